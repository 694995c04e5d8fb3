"""`WeightSender`: versions, metadata, files, threads, memory, acknowledgements."""

from __future__ import annotations

import itertools
import json
import os
import resource
import shutil
import stat
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
import xxhash
from tensordict import TensorDict

import dbuffer
from dbuffer.format.layout import ITEM_BYTES
from dbuffer.store.buffer import DoubleBuffer
from dbuffer.store.records import RecordFile
from tests.support.children import Child, in_a_fork, open_files
from tests.support.patterns import bits, checksum_of, random_bits, received
from tests.support.soak import in_turn
from tests.support.waiting import until

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

MB = 1 << 20
WEIGHTS = {"a": torch.arange(6.0).view(2, 3), "b": torch.arange(4)}


def newest(store: Path) -> tuple[Path, dict]:
    """The newest weights file and its manifest, by the names in the files alone."""
    directory = store / json.loads((store / "CURRENT").read_bytes())["buffer"]
    manifest = json.loads((directory / "manifest.json").read_bytes())
    return directory / manifest["file"], manifest


class TestVersions:
    def test_one_more_each_time(self, sender):
        assert [sender.send(WEIGHTS).version for _ in range(4)] == [1, 2, 3, 4]

    def test_chosen_ones_go_up(self, sender):
        assert sender.send(WEIGHTS, version=120).version == 120
        assert sender.send(WEIGHTS).version == 121
        assert sender.send(WEIGHTS, version=2**62).version == 2**62

    @pytest.mark.parametrize("version", [5, 4, 0, -1, 2**63, True, 6.0, "6", (6,)], ids=repr)
    def test_others_are_refused(self, sender, store, version):
        sender.send(WEIGHTS, version=5)
        before = newest(store)
        with pytest.raises(dbuffer.VersionError):
            sender.send({"other": torch.ones(1), "x": torch.ones(1)}, version=version)
        assert newest(store) == before
        assert sender.send(WEIGHTS).version == 6

    def test_none_is_above_the_greatest(self, sender):
        sender.send(WEIGHTS, version=2**63 - 1)
        with pytest.raises(dbuffer.VersionError):
            sender.send(WEIGHTS)

    def test_a_new_sender_goes_on_above_the_last_version(self, store):
        for first in (1, 3, 5):
            with dbuffer.WeightSender(store) as sender:
                assert sender.send(WEIGHTS).version == first
                assert sender.send(WEIGHTS).version == first + 1

    def test_a_refused_publish_uses_no_version_up(self, sender):
        with pytest.raises(dbuffer.InvalidWeightsError):
            sender.send({})
        assert sender.send(WEIGHTS).version == 1


class TestPublication:
    def test_fields(self, sender):
        weights = {"a": torch.zeros(3).bfloat16(), "b": torch.zeros(()), "c": torch.ones(0)}
        started = time.monotonic()
        publication = sender.send(weights)
        assert 0 < publication.duration_s <= time.monotonic() - started
        assert (publication.version, publication.num_tensors) == (1, 3)
        assert publication.num_bytes == 3 * 2 + 4
        assert type(publication) is dbuffer.Publication
        with pytest.raises(AttributeError):
            publication.version = 2

    def test_counts_what_was_cast_as_it_was_published(self, store):
        with dbuffer.WeightSender(store, dtype=torch.bfloat16) as sender:
            assert sender.send(WEIGHTS).num_bytes == 6 * 2 + 4 * 8


HOLDS_ITSELF: dict = {}
HOLDS_ITSELF["self"] = HOLDS_ITSELF


class TestMetadata:
    @pytest.mark.parametrize(
        "metadata",
        [
            {},
            {"step": 120, "loss": 0.25, "note": "naïve ☃ \ud800", "none": None, "yes": True},
            {"nested": {"list": [1, [2, {"deep": []}]], "": {}}},
            {"large": "x" * 100_000, "big": 10**300, "tiny": 5e-324, "negative": -0.0},
        ],
        ids=["empty", "plain", "nested", "large"],
    )
    def test_comes_back(self, sender, store, metadata):
        sender.send(WEIGHTS, metadata=metadata)
        with dbuffer.WeightReceiver(store) as receiver, receiver.open() as snapshot:
            assert snapshot.metadata == metadata

    def test_none_is_empty(self, sender, store):
        sender.send(WEIGHTS, metadata={"step": 1})
        sender.send(WEIGHTS)
        with dbuffer.WeightReceiver(store) as receiver, receiver.open() as snapshot:
            assert snapshot.metadata == {}

    def test_is_that_of_the_moment(self, sender, store):
        metadata = {"list": [1]}
        sender.send(WEIGHTS, metadata=metadata)
        metadata["list"].append(2)
        with dbuffer.WeightReceiver(store) as receiver, receiver.open() as snapshot:
            assert snapshot.metadata == {"list": [1]}

    @staticmethod
    def nested(depth: int) -> list:
        value: list = []
        for _ in range(depth):
            value = [value]
        return value

    @pytest.mark.parametrize("depth", [50, 100, 400, 600, 800, 900, 960, 2_000, 100_000])
    def test_deep_ones_are_published_or_refused(self, sender, store, depth):
        sender.send(WEIGHTS)
        try:
            sender.send(WEIGHTS, metadata={"deep": self.nested(depth)})
        except dbuffer.InvalidWeightsError:
            assert depth > 50
        with dbuffer.WeightReceiver(store) as receiver, receiver.open() as snapshot:
            assert len(snapshot.tensors) == 2

    @pytest.mark.parametrize(
        "metadata",
        [
            {"bad": object()},
            {"bad": {1, 2}},
            {"bad": b"bytes"},
            {"bad": torch.ones(1)},
            {"bad": 1j},
            {("a", "b"): 1},
            {"bad": "x" * MB},
            {"bad": 10**5_000},
            HOLDS_ITSELF,
            [1],
            "text",
            3,
        ],
    )
    def test_what_json_cannot_hold_is_refused(self, sender, store, metadata):
        sender.send(WEIGHTS)
        with pytest.raises(dbuffer.InvalidWeightsError, match="metadata"):
            sender.send(WEIGHTS, metadata=metadata)
        assert newest(store)[1]["version"] == 1
        assert sender.send(WEIGHTS).version == 2


@pytest.fixture
def weights():
    """Tensors of every dtype, in four shapes each."""
    weights = {}
    for name in ITEM_BYTES:
        dtype = getattr(torch, name)
        weights[name] = random_bits(dtype, 3, 5)
        weights[f"{name}.scalar"] = random_bits(dtype)
        weights[f"{name}.empty"] = random_bits(dtype, 0, 2)
        weights[f"{name}.transposed"] = random_bits(dtype, 4, 3).t()
    return weights


class TestFiles:
    """What others may rely on who look into a store without dbuffer."""

    @pytest.mark.parametrize("checksum", [False, True], ids=["plain", "checksum"])
    @pytest.mark.parametrize("as_stream", [False, True], ids=["dict", "stream"])
    def test_tensordict_opens_the_weights_file(self, store, weights, checksum, as_stream):
        with dbuffer.WeightSender(store, checksum=checksum) as sender:
            for _ in range(3):
                sender.send(iter(weights.items()) if as_stream else weights)
            opened = TensorDict.from_consolidated(newest(store)[0])
        held = {name: tensor for name, tensor in weights.items() if not name.startswith("float8")}
        held = {name: tensor for name, tensor in held.items() if not name.startswith("float4")}
        assert set(opened.keys()) == set(held)
        for name, tensor in held.items():
            assert opened[name].dtype is tensor.dtype
            assert opened[name].shape == tensor.shape
            assert bits(opened[name]) == bits(tensor)

    def test_tensordict_opens_any_name(self, sender, store):
        names = ["shape", "device", "_type", "", "a.b", "a/b", "..", "\ud800", "重み", "x" * 5_000]
        weights = {name: torch.full((3,), float(n)) for n, name in enumerate(names)}
        sender.send(weights)
        opened = TensorDict.from_consolidated(newest(store)[0])
        assert set(opened.keys()) == set(names)
        assert all(torch.equal(opened[name], tensor) for name, tensor in weights.items())

    def test_two_files_rewritten_in_place(self, sender, store):
        for _ in range(2):
            sender.send(WEIGHTS)
        before = {path: path.stat().st_ino for path in store.glob("[AB]/*.td")}
        assert len(before) == 2
        for _ in range(5):
            sender.send(WEIGHTS)
        assert {path: path.stat().st_ino for path in store.glob("[AB]/*.td")} == before

    def test_another_layout_gets_another_file(self, sender, store):
        for size in (3, 3, 5, 5, 2, 2):
            sender.send({"w": torch.full((size,), float(size)), "x": torch.ones(1)})
            assert len(list(store.glob("[AB]/*.td"))) <= 2
            assert received(store)["w"].tolist() == [size] * size

    def test_is_for_the_owner_only(self, store):
        before = os.umask(0)
        try:
            with dbuffer.WeightSender(store / "deep" / "down") as sender:
                sender.send(WEIGHTS)
        finally:
            os.umask(before)
        for path in [store / "deep" / "down", *(store / "deep" / "down").rglob("*")]:
            assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path

    @pytest.mark.parametrize("durable", [False, True])
    def test_is_flushed_before_it_is_named_where_asked_for(self, store, monkeypatch, durable):
        done = []
        replace, fsync = os.replace, os.fsync

        def note_replace(source, target):
            done.append(Path(target).name)
            replace(source, target)

        def note_fsync(descriptor):
            done.append(f"flush {Path(f'/proc/self/fd/{descriptor}').readlink().suffix}")
            fsync(descriptor)

        with dbuffer.WeightSender(store, durable=durable) as sender:
            monkeypatch.setattr(os, "replace", note_replace)
            monkeypatch.setattr(os, "fsync", note_fsync)
            sender.send(WEIGHTS)
        flush = ["flush .tmp"] if durable else []
        sync_directory = ["flush "] if durable else []
        marked = [*flush, "manifest.json", *sync_directory]
        complete = [*flush, "manifest.json", *sync_directory, *flush, "CURRENT", *sync_directory]
        weights = ["flush .td"] if durable else []
        assert done == [*marked, *weights, *complete]
        assert torch.equal(received(store)["a"], WEIGHTS["a"])

    def test_a_path_with_spaces_and_unicode(self, tmp_path):
        path = tmp_path / "a store — 重み" / "it's\nhere"
        with dbuffer.WeightSender(str(path)) as sender:
            sender.send(WEIGHTS)
            assert sender.store == path
        assert torch.equal(received(path)["a"], WEIGHTS["a"])

    @pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
    def test_a_directory_that_others_can_write_is_refused(self, store, mode):
        store.mkdir()
        store.chmod(mode)
        with pytest.raises(dbuffer.StoreAccessError, match="chmod go-w"):
            dbuffer.WeightSender(store)
        assert list(store.iterdir()) == []
        with dbuffer.WeightSender(store, allow_shared_store=True) as sender:
            assert sender.send(WEIGHTS).version == 1


class TestChecksums:
    SIZES = (0, 1, 63, MB - 1, MB, MB + 1, 2 * MB, 3 * MB + 17)

    @pytest.mark.parametrize("num_threads", [1, 2, 5])
    @pytest.mark.parametrize("as_stream", [False, True], ids=["dict", "stream"])
    def test_are_those_of_the_bytes(self, store, num_threads, as_stream):
        weights = {str(size): random_bits(torch.uint8, size) for size in self.SIZES}
        weights["transposed"] = torch.randn(700, 900).t()
        with dbuffer.WeightSender(store, checksum=True, num_threads=num_threads) as sender:
            for _ in range(2):
                sender.send(iter(weights.items()) if as_stream else weights)
        path, manifest = newest(store)
        start = manifest["checksums_offset"]
        table = path.read_bytes()[start : start + 8 * len(weights)]
        assert xxhash.xxh3_64_hexdigest(table) == manifest["checksums_xxh3"]
        for index, (name, tensor) in enumerate(weights.items()):
            found = int.from_bytes(table[8 * index : 8 * index + 8], "little")
            assert found == checksum_of(bits(tensor)), name

    @pytest.mark.parametrize("checksum", [False, "auto"])
    def test_are_left_out_on_a_local_disk(self, store, checksum):
        with dbuffer.WeightSender(store, checksum=checksum) as sender:
            sender.send(WEIGHTS)
        assert newest(store)[1]["checksums_xxh3"] is None


class TestThreads:
    @pytest.mark.parametrize("num_threads", [1, 2, 5, None])
    @pytest.mark.parametrize("checksum", [False, True], ids=["plain", "checksum"])
    @pytest.mark.parametrize("num_tensors", [1, 2, 7])
    def test_any_number_of_them(self, store, num_threads, checksum, num_tensors):
        weights = {str(number): torch.randn(1000 + number) for number in range(num_tensors)}
        with dbuffer.WeightSender(store, num_threads=num_threads, checksum=checksum) as sender:
            for _ in range(3):
                for tensor in weights.values():
                    tensor.add_(1)
                sender.send(weights)
                found = received(store)
                assert all(torch.equal(found[name], tensor) for name, tensor in weights.items())

    def test_none_is_left_after_closing(self, store):
        before = set(threading.enumerate())
        with dbuffer.WeightSender(store, num_threads=4) as sender:
            sender.send({str(number): torch.ones(1000) for number in range(20)})
        assert set(threading.enumerate()) <= before


class TestDtype:
    FLOATS = sorted(
        name for name in ITEM_BYTES if name.startswith(("float", "bfloat")) and "float4" not in name
    )

    @pytest.mark.soak
    @in_turn(("name", "checksum"), FLOATS, [False, True])
    @pytest.mark.parametrize("as_stream", [False, True], ids=["dict", "stream"])
    def test_casts_as_torch_does(self, store, name, as_stream, checksum):
        dtype = getattr(torch, name)
        weights = {
            "float32": torch.randn(30, 40),
            "float64": torch.randn(7, dtype=torch.float64),
            "bfloat16": torch.randn(7, dtype=torch.bfloat16),
            "transposed": torch.randn(30, 40).t(),
            "scalar": torch.tensor(0.5),
            "empty": torch.empty(0, 3),
        }
        with dbuffer.WeightSender(store, dtype=dtype, checksum=checksum) as sender:
            sender.send(iter(weights.items()) if as_stream else weights)
        for key, tensor in received(store).items():
            assert tensor.dtype is dtype
            assert bits(tensor) == bits(weights[key].to(dtype)), key

    @pytest.mark.parametrize("as_stream", [False, True], ids=["dict", "stream"])
    def test_leaves_all_else_alone(self, store, as_stream):
        weights = {
            name: random_bits(getattr(torch, name), 5)
            for name in ITEM_BYTES
            if name.startswith(("bool", "int", "uint", "complex"))
        }
        with dbuffer.WeightSender(store, dtype=torch.float16) as sender:
            sender.send(iter(weights.items()) if as_stream else weights)
        for name, tensor in received(store).items():
            assert tensor.dtype is weights[name].dtype
            assert bits(tensor) == bits(weights[name])

    def test_leaves_the_source_alone(self, store):
        model = torch.nn.Linear(3, 3)
        with dbuffer.WeightSender(store, dtype=torch.bfloat16) as sender:
            sender.send(model)
        assert model.weight.dtype is torch.float32
        assert model.weight.grad_fn is None

    @pytest.mark.parametrize(
        "dtype",
        [torch.int32, torch.complex64, torch.bool, torch.qint8, torch.float4_e2m1fn_x2, "bf16"],
    )
    def test_is_a_floating_point_one_that_torch_can_cast_to(self, store, dtype):
        with pytest.raises(dbuffer.OptionError, match="cast"):
            dbuffer.WeightSender(store, dtype=dtype)


def limit_memory(num_bytes: int) -> None:
    """Leave so much for what is private and writable: anonymous memory, no shared mapping."""
    status = Path("/proc/self/status").read_text()
    used = 1024 * int(status.split("VmData:")[1].split()[0])
    resource.setrlimit(resource.RLIMIT_DATA, (used + num_bytes, resource.RLIM_INFINITY))


def publish_in_little_memory(connection: Connection, store: Path) -> None:
    weights = {f"layers.{n}": torch.full((2 * MB,), float(n)) for n in range(8)}
    weights["large"] = torch.full((24 * MB,), 7.0)
    for options in ({}, {"checksum": True}, {"dtype": torch.bfloat16}):
        with dbuffer.WeightSender(store, num_threads=2, **options) as sender:
            sender.send({f"small.{n}": torch.ones(100) for n in range(10)})  # starts its threads
            limit_memory(32 * MB)
            for _ in range(2):
                num_bytes = sender.send(weights).num_bytes
            resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY,) * 2)
        with dbuffer.WeightReceiver(store) as receiver, receiver.open() as snapshot:
            assert snapshot.tensors["layers.7"][-1] == snapshot.tensors["large"][-1] == 7
        connection.send(num_bytes // MB)
    limit_memory(32 * MB)
    with pytest.raises(RuntimeError):
        torch.empty(100 * MB, dtype=torch.uint8)
    connection.send("the limit holds")


def test_takes_little_memory_beside_the_store(store):
    with Child(publish_in_little_memory, store) as child:
        assert [child.receive() for _ in range(4)] == [160, 160, 80, "the limit holds"]


class TestWaitApplied:
    def test_a_later_version_will_do(self, sender, store):
        for _ in range(3):
            sender.send(WEIGHTS)
        with dbuffer.WeightReceiver(store) as receiver, receiver.open():
            pass
        sender.wait_applied(2, timeout_s=0)
        with pytest.raises(TimeoutError):
            sender.wait_applied(4, timeout_s=0)

    def test_waits(self, sender, store):
        sender.send(WEIGHTS)

        def apply():
            time.sleep(0.2)
            with dbuffer.WeightReceiver(store) as receiver, receiver.open():
                pass

        started = time.monotonic()
        with ThreadPoolExecutor() as pool:
            pool.submit(apply)
            sender.wait_applied(1, timeout_s=60)
            assert 0.2 <= time.monotonic() - started < 50

    def test_says_who_is_missing(self, sender, store):
        with dbuffer.WeightReceiver(store, receiver_id="slow-one") as receiver:
            sender.send(WEIGHTS)
            with receiver.open():
                pass
            sender.send(WEIGHTS)
            with pytest.raises(dbuffer.WaitTimeoutError) as caught:
                sender.wait_applied(2, receivers=3, timeout_s=0.2)
        for part in ("0 of 3", "version 2", str(store), "0.2 s", "slow-one is at 1"):
            assert part in str(caught.value)

    @pytest.mark.parametrize("receivers", [1, "one"])
    def test_learns_at_once_that_the_store_was_removed(self, sender, store, receivers):
        sender.send(WEIGHTS)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(sender.wait_applied, 1, receivers=receivers, timeout_s=60)
            shutil.rmtree(store)
            with pytest.raises(dbuffer.StoreNotFoundError):
                waiting.result(10)

    def test_a_version_of_another_run_in_its_place_does_not_count(self, sender, store):
        sender.send(WEIGHTS)
        shutil.rmtree(store)
        with dbuffer.WeightSender(store) as other, dbuffer.WeightReceiver(store) as receiver:
            other.send(WEIGHTS, version=5)
            with receiver.open():
                pass
            other.wait_applied(5, timeout_s=0)
            with pytest.raises(dbuffer.WriterSupersededError):
                sender.wait_applied(1, timeout_s=60)


def be_one(connection: Connection, store: Path, version: int | None = None) -> None:
    """Write a receiver's record, acknowledge a version or none, and end."""
    receiver = dbuffer.WeightReceiver(store, receiver_id="one")
    receiver.record.write()
    if version is not None:
        receiver.acknowledge(version)


class TestLagsOfReceivers:
    def test_of_one_id_the_longest_counts(self, sender, store):
        sender.send(WEIGHTS)
        with (
            dbuffer.WeightReceiver(store, receiver_id="one") as ahead,
            dbuffer.WeightReceiver(store, receiver_id="one") as behind,
        ):
            for receiver in (behind, ahead):
                with receiver.open():
                    pass
            sender.send(WEIGHTS)
            with ahead.open():
                pass
            assert sender.receiver_lags() == {"one": (1, None)}
            behind.close()
            assert sender.receiver_lags() == {"one": (0, None)}

    def test_ranks_of_an_engine_are_one_receiver(self, sender, store):
        sender.send(WEIGHTS)
        engine, rank = (RecordFile(store, name) for name in ("engine", "engine.rank-0"))
        history = DoubleBuffer(store).pointer().history
        engine.write(applied_version=1, history=history, metadata={"step": 5})
        rank.write(applied_version=1, history=history, part_of="engine")
        sender.send(WEIGHTS, metadata={"step": 7.5})
        assert sender.receiver_lags() == {"engine": (1, 2.5)}

    def test_version_of_another_history_counts_as_none(self, sender, store):
        sender.send(WEIGHTS, version=7, metadata={"step": 5})
        RecordFile(store, "one").write(applied_version=9, history="0" * 16, metadata={"step": 4})
        assert sender.receiver_lags() == {"one": (7, None)}

    def test_before_the_first_version_there_are_none(self, sender, store):
        RecordFile(store, "one").write()
        assert sender.receiver_lags() == {}


class TestWaitingForReceiversByName:
    def test_waits_for_those_and_no_others(self, sender, store):
        sender.send(WEIGHTS)
        sender.send(WEIGHTS)
        with dbuffer.WeightReceiver(store, receiver_id="one") as one, one.open():
            pass
        sender.wait_applied(2, receivers=["one"], timeout_s=0)
        sender.wait_applied(2, receivers=[], timeout_s=0)
        with pytest.raises(dbuffer.WaitTimeoutError, match=r"1 of 2 .*one .*2"):
            sender.wait_applied(2, receivers={"one", "other"}, timeout_s=0)
        with pytest.raises(dbuffer.WaitTimeoutError):
            sender.wait_applied(2, receivers=["other"], timeout_s=0)

    def test_says_at_once_that_one_cannot(self, sender, store):
        sender.send(WEIGHTS)
        with dbuffer.WeightReceiver(store, receiver_id="one") as one:
            one.record.write(problem="tensor 'a' is odd", problem_version=1)
            with pytest.raises(
                dbuffer.ReceiverFailedError, match=r"one .* version 1: tensor 'a' is odd"
            ):
                sender.wait_applied(1, receivers=["one"], timeout_s=60)
            # The store itself is the problem, so every version is.
            one.record.write(problem="the store was removed", problem_version=None)
            with pytest.raises(
                dbuffer.ReceiverFailedError, match=r"one .*version 1: the store was removed"
            ):
                sender.wait_applied(1, receivers=["one"], timeout_s=60)
            one.record.write(problem="tensor 'a' is odd", problem_version=1)
            # Whichever will do: another one may come.
            because = r"one is at None, because of: tensor 'a' is odd"
            with pytest.raises(dbuffer.WaitTimeoutError, match=because):
                sender.wait_applied(1, receivers=1, timeout_s=0)
            sender.send(WEIGHTS)
            # What was wrong with one version says nothing of the next.
            with pytest.raises(dbuffer.WaitTimeoutError):
                sender.wait_applied(2, receivers=["one"], timeout_s=0)

    def test_a_problem_with_the_store_may_be_over(self, sender, store):
        sender.send(WEIGHTS)
        with dbuffer.WeightReceiver(store, receiver_id="one") as one:
            one.record.write(problem="the store was removed", problem_version=None)
            with ThreadPoolExecutor() as pool:
                waiting = pool.submit(sender.wait_applied, 1, receivers=["one"], timeout_s=60)
                until("it waits", waiting.running)
                one.load_into({name: tensor.clone() for name, tensor in WEIGHTS.items()})
                waiting.result()

    def test_says_at_once_that_one_has_ended(self, sender, store):
        sender.send(WEIGHTS)
        with Child(be_one, store) as child:
            assert child.wait() == 0
        with pytest.raises(dbuffer.ReceiverFailedError, match=r"one .*None"):
            sender.wait_applied(1, receivers=["one"], timeout_s=60)
        with Child(be_one, store, 1) as child:
            assert child.wait() == 0
        sender.wait_applied(1, receivers=["one"], timeout_s=0)

    def test_what_an_earlier_run_has_left_behind_is_no_failure(self, store):
        dbuffer.WeightSender(store).close()
        with Child(be_one, store) as child:
            assert child.wait() == 0
        with dbuffer.WeightSender(store) as sender:
            sender.send(WEIGHTS)
            with pytest.raises(dbuffer.WaitTimeoutError):
                sender.wait_applied(1, receivers=["one"], timeout_s=0)


class TestLife:
    def test_one_sender_a_store(self, sender, store):
        with pytest.raises(dbuffer.StoreBusyError, match=str(os.getpid())):
            dbuffer.WeightSender(store)
        assert sender.send(WEIGHTS).version == 1

    def test_leaving_with_an_error_closes_too(self, store):
        with pytest.raises(KeyError), dbuffer.WeightSender(store):
            raise KeyError
        dbuffer.WeightSender(store).close()

    def test_is_of_no_use_once_closed(self, store):
        sender = dbuffer.WeightSender(store)
        sender.send(WEIGHTS)
        sender.close()
        sender.close()
        with pytest.raises(dbuffer.ClosedError):
            sender.send(WEIGHTS)
        with pytest.raises(dbuffer.ClosedError):
            sender.wait_applied(1, timeout_s=0)
        assert torch.equal(received(store)["a"], WEIGHTS["a"])

    def test_closing_leaves_no_file_open(self, store):
        with dbuffer.WeightSender(store) as sender:
            for size in (3, 3, 4, 4):
                sender.send({"w": torch.ones(size), "x": torch.ones(1)})
            assert open_files(str(store))
        assert open_files(str(store)) == []

    @pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
    def test_is_of_no_use_in_a_forked_child(self, sender):
        sender.send(WEIGHTS)

        def send_in_child():
            with pytest.raises(dbuffer.ClosedError):
                sender.send(WEIGHTS)

        assert in_a_fork(send_in_child) == 0
        assert sender.send(WEIGHTS).version == 2

    def test_several_threads_may_send(self, sender, store):
        def send(value: float) -> list[int]:
            weights = {str(n): torch.full((50,), value) for n in range(4)}
            return [sender.send(weights).version for _ in range(20)]

        with ThreadPoolExecutor(3) as pool:
            versions = sorted(itertools.chain(*pool.map(send, (1.0, 2.0, 3.0))))
        assert versions == list(range(1, 61))
        assert len({tensor[0].item() for tensor in received(store).values()}) == 1

    def test_progress_of_a_stream(self, sender):
        seen = []
        pairs = [(str(n), torch.zeros(16)) for n in range(3)]
        sender.send(iter(pairs), progress=lambda done, total: seen.append((done, total)))
        assert seen == [(64, 0), (128, 0), (192, 0)]
