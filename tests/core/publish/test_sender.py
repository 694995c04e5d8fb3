"""`WeightSender`: versions, metadata, files, threads, memory, acknowledgements."""

from __future__ import annotations

import itertools
import json
import math
import os
import resource
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import dbuffer
from dbuffer.format.layout import ITEM_BYTES
from dbuffer.format.lineage import VersionId
from dbuffer.store import acknowledgements
from dbuffer.store.buffer import DoubleBuffer
from dbuffer.store.records import RecordFile
from dbuffer.testing.waiting import TIMEOUT_S, until
from tests.support.children import Child
from tests.support.patterns import assert_same, random_bits, received
from tests.support.stores import open_files

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

MB = 1 << 20
WEIGHTS = {"a": torch.arange(6.0).view(2, 3), "b": torch.arange(4)}
FORMS = {"dict": dict, "stream": lambda weights: iter(weights.items())}


def newest(store: Path) -> tuple[Path, dict[str, Any]]:
    """The newest weights file and its manifest, by the names in the files alone."""
    directory = store / json.loads((store / "CURRENT").read_bytes())["buffer"]
    manifest = json.loads((directory / "manifest.json").read_bytes())
    return directory / manifest["file"], manifest


def metadata_in(store: Path) -> dict[str, Any]:
    with dbuffer.WeightReceiver(store) as receiver, receiver.open() as snapshot:
        return snapshot.metadata


def apply_newest(store: Path, name: str = "one") -> None:
    with dbuffer.WeightReceiver(store, receiver_id=name) as receiver, receiver.open():
        pass


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> Any:
    """A function that makes a dictionary or a stream of weights."""
    return FORMS[request.param]


# Versions and metadata


def test_versions_go_up_and_others_are_refused(sender, store):
    assert [sender.send(WEIGHTS).version for _ in range(3)] == [1, 2, 3]
    assert sender.send(WEIGHTS, version=120).version == 120
    before = newest(store)
    for version in (120, 119, 0, -1, 2**63, True, 121.0, "121", (121,)):
        with pytest.raises(dbuffer.VersionError):
            sender.send({"other": torch.ones(1), "x": torch.ones(1)}, version=version)
        assert newest(store) == before
    with pytest.raises(dbuffer.InvalidWeightsError):
        sender.send({})
    assert sender.send(WEIGHTS).version == 121, "a refused publish uses no version up"
    sender.close()
    with dbuffer.WeightSender(store) as another:
        assert another.send(WEIGHTS).version == 122
        assert another.send(WEIGHTS, version=2**63 - 1).version == 2**63 - 1
        with pytest.raises(dbuffer.VersionError, match="new store"):
            another.send(WEIGHTS)


def test_metadata_comes_back_as_it_was_when_it_was_sent(sender, store):
    for metadata in (
        {"step": 120, "loss": 0.25, "note": "naïve ☃ \ud800", "none": None, "yes": True},
        {"nested": {"list": [1, [2, {"deep": []}]], "": {}}},
        {"large": "x" * 100_000, "big": 10**300, "tiny": 5e-324, "negative": -0.0},
    ):
        sender.send(WEIGHTS, metadata=metadata)
        assert metadata_in(store) == metadata
    metadata = {"list": [1]}
    sender.send(WEIGHTS, metadata=metadata)
    metadata["list"].append(2)
    assert metadata_in(store) == {"list": [1]}
    sender.send(WEIGHTS)
    assert metadata_in(store) == {}


HOLDS_ITSELF: dict[str, Any] = {}
HOLDS_ITSELF["self"] = HOLDS_ITSELF


def test_metadata_that_json_cannot_hold_is_refused(sender, store):
    sender.send(WEIGHTS)
    bad = (object(), {1, 2}, b"bytes", torch.ones(1), 1j, float("nan"), "x" * MB, 10**5_000)
    for metadata in (
        *({"bad": one} for one in bad),
        {("a", "b"): 1},
        {1: "one"},
        {"a": [{2: 3}]},
        HOLDS_ITSELF,
        [1],
        "text",
        3,
    ):
        with pytest.raises(dbuffer.InvalidWeightsError, match="metadata"):
            sender.send(WEIGHTS, metadata=metadata)
    assert DoubleBuffer(store).pointer().version == 1
    assert sender.send(WEIGHTS).version == 2


# Runs, and the trainer's steps in them


def test_each_sender_begins_a_run_and_versions_say_which_led_to_them(store):
    for name in ("exp-7", None, "réglé 8"):
        with dbuffer.WeightSender(store, run=name) as sender:
            sender.send(WEIGHTS)
            sender.send(WEIGHTS)
    runs = DoubleBuffer(store).pointer().runs
    assert [(run.name, run.upon) for run in runs] == [("réglé 8", 4), (None, 2), ("exp-7", None)]
    assert len({run.id for run in runs}) == 3


@pytest.mark.parametrize("name", ["", "x" * 129, "two\nlines", 7, b"exp"])
def test_a_name_of_a_run_that_cannot_be_shown_is_refused(store, name):
    with pytest.raises(dbuffer.OptionError, match="run"):
        dbuffer.WeightSender(store, run=name)
    assert not store.exists()


# What others may rely on who look into a store without dbuffer


@pytest.mark.parametrize("checksum", [False, True], ids=["plain", "checksum"])
def test_tensordict_opens_the_weights_file(store, form, checksum):
    from tensordict import TensorDict  # children, which import this file, need none

    weights = {}
    for name in ITEM_BYTES:
        dtype = getattr(torch, name)
        weights[name] = random_bits(dtype, 3, 5)
        weights[f"{name}.scalar"] = random_bits(dtype)
        weights[f"{name}.empty"] = random_bits(dtype, 0, 2)
        weights[f"{name}.transposed"] = random_bits(dtype, 4, 3).t()
    with dbuffer.WeightSender(store, checksum=checksum) as sender:
        for _ in range(3):
            sender.send(form(weights))
        path, manifest = newest(store)
        opened = TensorDict.from_consolidated(path)
    assert (manifest["checksums_xxh3"] is not None) == checksum
    assert_same(received(store), weights)
    held = {n: t for n, t in weights.items() if not n.startswith(("float8", "float4"))}
    assert_same(dict(opened.items()), held)


def test_two_files_are_rewritten_in_place_and_another_layout_gets_another(sender, store):
    for _ in range(2):
        sender.send(WEIGHTS)
    assert newest(store)[1]["checksums_xxh3"] is None, "not by default on a local disk"
    before = {path: path.stat().st_ino for path in store.glob("[AB]/*.td")}
    assert len(before) == 2
    for _ in range(5):
        sender.send(WEIGHTS)
    assert {path: path.stat().st_ino for path in store.glob("[AB]/*.td")} == before
    for size in (3, 3, 5, 5, 2, 2):
        sender.send({"w": torch.full((size,), float(size)), "x": torch.ones(1)})
        assert len(list(store.glob("[AB]/*.td"))) <= 2
        assert received(store)["w"].tolist() == [size] * size


# Threads, casts, memory


def test_casts_leave_all_else_alone(store, form):
    weights = {
        name: random_bits(getattr(torch, name), 5)
        for name in ITEM_BYTES
        if name.startswith(("bool", "int", "uint", "complex"))
    }
    source = torch.nn.Parameter(torch.ones(3))
    for dtype in (
        torch.int32,
        torch.complex64,
        torch.bool,
        torch.qint8,
        torch.float4_e2m1fn_x2,
        torch.float8_e8m0fnu,  # has no sign
        "bf16",
    ):
        with pytest.raises(dbuffer.OptionError, match="cast"):
            dbuffer.WeightSender(store, dtype=dtype)
    with dbuffer.WeightSender(store, dtype=torch.float16) as sender:
        started = time.monotonic()
        publication = sender.send(form(weights | {"source": source}))
        assert 0 < publication.duration_s <= time.monotonic() - started
    assert publication.num_tensors == len(weights) + 1
    assert publication.num_bytes == sum(tensor.nbytes for tensor in weights.values()) + 2 * 3
    found = received(store)
    assert found.pop("source").dtype is torch.float16
    assert_same(found, weights)
    assert (source.dtype, source.grad_fn) == (torch.float32, None)


def as_lazy(weights: dict[str, torch.Tensor]) -> dict[str, dbuffer.LazyTensor]:
    return {
        name: dbuffer.LazyTensor(tensor.dtype, tuple(tensor.shape), tensor.clone)
        for name, tensor in weights.items()
    }


@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2fnuz], ids=str
)
def test_values_that_the_dtype_cannot_hold_are_refused(store, mount, dtype, delta):
    limits = torch.finfo(dtype)
    has_infinities = dtype in (torch.bfloat16, torch.float16)
    values = [limits.max, -limits.max * (1 + limits.eps / 8), math.nan, 0.0]
    fits = torch.tensor([*values, math.inf if has_infinities else 1.0], dtype=torch.float64)
    weights = {"fits": fits, "large": fits}
    too_large = -2 * limits.max if has_infinities else -math.inf
    refused = {"fits": fits, "large": fits.clone().index_fill_(0, torch.tensor(3), too_large)}
    forms = [dict, as_lazy] if delta else [dict, as_lazy, FORMS["stream"]]
    with dbuffer.WeightSender(store, dtype=dtype, delta=delta) as sender:
        for form in forms:
            with pytest.raises(dbuffer.InvalidWeightsError, match=r"'large' .* 1 of 5 values"):
                sender.send(form(refused))
            sender.send(form(weights))
        with pytest.raises(dbuffer.InvalidWeightsError, match="'large'"):
            sender.send(refused, wait=False).wait(TIMEOUT_S)
    cast = fits.to(dtype)
    assert cast.float().isfinite().sum() == (3 if has_infinities else 4)
    assert_same(received(store), {"fits": cast, "large": cast})


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


@pytest.mark.parametrize("mount", ["local", "network"])
@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_refused_if_they_must_be(
    store, tmp_path, monkeypatch, mount, delta, value
):
    monkeypatch.setenv("DBUFFER_MOUNT", mount)
    kinds = (torch.float64, torch.float32, torch.bfloat16, torch.float8_e5m2, torch.complex64)
    weights = {str(kind): torch.ones(1000).to(kind) for kind in (*kinds, torch.int32, torch.bool)}
    weights["empty"] = torch.ones(0)
    checkpoint = tmp_path / "model.safetensors"
    with dbuffer.WeightSender(store, delta=delta, require_finite=True) as sender:
        assert sender.send(weights).version == 1
        for kind in kinds:
            spoilt = weights | {str(kind): weights[str(kind)].clone()}
            spoilt[str(kind)][7] = value
            told = f"1 of .* values of '{kind}' are NaN or infinite"
            with pytest.raises(dbuffer.InvalidWeightsError, match=told):
                sender.send(spoilt)
            with pytest.raises(dbuffer.InvalidWeightsError, match=told):
                sender.send(spoilt, wait=False).wait()
            if not delta:
                with pytest.raises(dbuffer.InvalidWeightsError, match=told):
                    sender.send(iter(spoilt.items()))
            if kind is not torch.complex64:  # which the format does not have
                del spoilt["torch.complex64"]
                save_file(spoilt, checkpoint)
                with pytest.raises(dbuffer.InvalidWeightsError, match=told):
                    sender.send(checkpoint)
        assert sender.send(weights).version == 2
    with dbuffer.WeightSender(store, delta=delta) as sender:
        spoilt = weights | {"torch.float32": torch.full((1000,), value)}
        assert sender.send(spoilt).version == 3


def test_a_send_takes_little_memory_beside_the_store(store):
    with Child(publish_in_little_memory, store) as child:
        assert [child.receive() for _ in range(4)] == [160, 160, 80, "the limit holds"]


# Receivers: how far they are, and waiting for them


def test_waiting_for_a_number_of_receivers(sender, store):
    sender.send(WEIGHTS)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(sender.wait_applied, 1, timeout_s=60)
        until("it waits", waiting.running)
        time.sleep(0.05)
        assert not waiting.done()
        apply_newest(store)
        waiting.result(50)
    with dbuffer.WeightReceiver(store, receiver_id="slow-one") as receiver:
        for version in (2, 3):
            sender.send(WEIGHTS)
            if version == 2:
                with receiver.open():
                    pass
        sender.wait_applied(1, receivers=2, timeout_s=0)  # a later version will do
        with pytest.raises(dbuffer.WaitTimeoutError) as caught:
            sender.wait_applied(3, receivers=3, timeout_s=0.2)
    for part in ("0 of 3", "version 3", str(store), "0.2 s", "slow-one is at version 2"):
        assert part in str(caught.value)


def test_waiting_for_receivers_by_name(sender, store):
    for _ in range(2):
        sender.send(WEIGHTS)
    apply_newest(store)
    for receivers in (["one"], []):
        sender.wait_applied(2, receivers=receivers, timeout_s=0)
    with pytest.raises(
        dbuffer.WaitTimeoutError,
        match=r"1 of 2 .*one has ended at version 2, other has not connected",
    ):
        sender.wait_applied(2, receivers={"one", "other"}, timeout_s=0)
    with pytest.raises(dbuffer.WaitTimeoutError):
        sender.wait_applied(2, receivers=["other"], timeout_s=0)


@pytest.mark.parametrize("receivers", [1, "one"])
def test_waiting_ends_at_once_when_the_store_is_removed(sender, store, receivers):
    sender.send(WEIGHTS)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(sender.wait_applied, 1, receivers=receivers, timeout_s=60)
        shutil.rmtree(store)
        with pytest.raises(dbuffer.StoreNotFoundError):
            waiting.result(50)
    with dbuffer.WeightSender(store) as other:
        other.send(WEIGHTS, version=5)
        apply_newest(store)
        other.wait_applied(5, timeout_s=0)
        with pytest.raises(dbuffer.WriterSupersededError):
            sender.wait_applied(1, receivers=receivers, timeout_s=60)


def test_waiting_ends_at_once_when_a_named_receiver_cannot_apply_it(
    sender, store, timing, monkeypatch
):
    timing.last_word_s = 0.05  # of the store itself
    sender.send(WEIGHTS)
    with dbuffer.WeightReceiver(store, receiver_id="one") as one:
        # Without a version the store itself is the problem, so every version is.
        first = DoubleBuffer(store).pointer().id
        for version, problem in ((first, "tensor 'a' is odd"), (None, "the store was removed")):
            one.record.write(problem=problem, problem_version=version)
            message = f"one .* version 1: {problem}"
            with pytest.raises(dbuffer.ReceiverFailedError, match=message):
                sender.wait_applied(1, receivers=["one"], timeout_s=60)
            # Whichever will do: another one may come.
            because = f"one is at no version, because of: {problem}"
            with pytest.raises(dbuffer.WaitTimeoutError, match=because):
                sender.wait_applied(1, receivers=1, timeout_s=0)
        timing.last_word_s = 60.0
        has_looked, require_able = threading.Event(), acknowledgements._Wait.require_able

        def note(*arguments: Any) -> None:
            try:
                require_able(*arguments)
            finally:
                has_looked.set()

        monkeypatch.setattr(acknowledgements._Wait, "require_able", note)
        with ThreadPoolExecutor() as pool:  # a problem with the store may be over
            waiting = pool.submit(sender.wait_applied, 1, receivers=["one"], timeout_s=60)
            assert has_looked.wait(TIMEOUT_S)
            one.load_into({name: tensor.clone() for name, tensor in WEIGHTS.items()})
            waiting.result()
        one.record.write(problem="tensor 'a' is odd", problem_version=first)
        sender.send(WEIGHTS)
        # What was wrong with one version says nothing of the next.
        with pytest.raises(dbuffer.WaitTimeoutError):
            sender.wait_applied(2, receivers=["one"], timeout_s=0)


def be_one(connection: Connection, store: Path, version: int | None = None) -> None:
    """Write a receiver's record, acknowledge a version or none, and end."""
    receiver = dbuffer.WeightReceiver(store, receiver_id="one")
    receiver.record.write()
    if version is not None:
        receiver.acknowledge(version)


def run_one(store: Path, version: int | None = None) -> None:
    with Child(be_one, store, version) as child:
        assert child.wait() == 0


@pytest.mark.timing(last_word_s=0.2)
def test_waiting_ends_at_once_when_a_named_receiver_has_ended(store):
    dbuffer.WeightSender(store).close()
    run_one(store)
    with dbuffer.WeightSender(store) as sender:
        sender.send(WEIGHTS)
        with pytest.raises(dbuffer.WaitTimeoutError):  # it ended in an earlier run
            sender.wait_applied(1, receivers=["one"], timeout_s=0)
        run_one(store)
        with pytest.raises(dbuffer.ReceiverFailedError, match=r"one .*at no version"):
            sender.wait_applied(1, receivers=["one"], timeout_s=60)
        run_one(store, 1)
        sender.wait_applied(1, receivers=["one"], timeout_s=0)


@pytest.mark.timing(last_word_s=0.2)
def test_waiting_ends_at_once_when_a_named_receiver_of_an_earlier_run_is_closed(store):
    dbuffer.WeightSender(store).close()
    with dbuffer.WeightReceiver(store, receiver_id="one") as receiver:
        receiver.record.write()
        sender = dbuffer.WeightSender(store)
    with sender, pytest.raises(dbuffer.ReceiverFailedError, match=r"one .*at no version"):
        sender.send(WEIGHTS)
        sender.wait_applied(1, receivers=["one"], timeout_s=10)


def test_of_receivers_with_one_id_the_longest_lag_counts(sender, store):
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


def test_lags_of_records(sender, store):
    engine, rank = (RecordFile(store, name) for name in ("engine", "engine.rank-0"))
    other = RecordFile(store, "other")
    other.write()
    assert sender.receiver_lags() == {}, "before the first version"
    sender.send(WEIGHTS)
    first = DoubleBuffer(store).pointer()
    engine.write(applied=first.id, runs=first.runs, metadata={"step": 5})
    rank.write(applied=first.id, runs=first.runs, part_of="engine")
    lost = first.runs[0]._replace(id="0" * 16)
    other.write(applied=VersionId(lost.id, 9), runs=[lost], metadata={"step": 4})
    sender.send(WEIGHTS, metadata={"step": 7.5})
    # Ranks of an engine are one receiver, and a version of a run that was lost counts as none.
    assert sender.receiver_lags() == {"engine": (1, 2.5), "other": (2, None)}
    sender.send(WEIGHTS, metadata={"step": "8"})
    assert sender.receiver_lags() == {"engine": (2, None), "other": (3, None)}
    sender.republish(2)
    assert sender.receiver_lags() == {"engine": (3, 2.5), "other": (4, None)}
    sender.send(WEIGHTS, metadata={"step": -(10**400)})
    assert sender.receiver_lags() == {"engine": (4, None), "other": (5, None)}


# Its life


@pytest.mark.parametrize("delta", [False, True])
def test_a_closed_sender_is_of_no_use_and_leaves_no_file_open(store, delta):
    with dbuffer.WeightSender(store, delta=delta) as sender:
        with pytest.raises(dbuffer.StoreBusyError, match=str(os.getpid())):
            dbuffer.WeightSender(store)
        for size in (3, 3, 4, 4):
            sender.send({"w": torch.ones(size), "x": torch.ones(1)})
        assert open_files(str(store))
    sender.close()
    with pytest.raises(dbuffer.ClosedError):
        sender.send(WEIGHTS)
    with pytest.raises(dbuffer.ClosedError):
        sender.wait_applied(1, timeout_s=0)
    assert open_files(str(store)) == []
    with pytest.raises(KeyError), dbuffer.WeightSender(store):
        raise KeyError
    dbuffer.WeightSender(store).close()  # leaving with an error closes, too
    assert received(store)["w"].tolist() == [1] * 4


def test_several_threads_may_send(sender, store):
    def send(value: float) -> list[int]:
        weights = {str(n): torch.full((50,), value) for n in range(4)}
        return [sender.send(weights).version for _ in range(20)]

    with ThreadPoolExecutor(3) as pool:
        versions = sorted(itertools.chain(*pool.map(send, (1.0, 2.0, 3.0))))
    assert versions == list(range(1, 61))
    assert len({tensor[0].item() for tensor in received(store).values()}) == 1


def test_progress_of_a_stream(sender):
    seen = []

    def pairs() -> Iterator[tuple[str, torch.Tensor]]:
        yield from ((str(n), torch.zeros(16)) for n in range(3))

    sender.send(pairs(), progress=lambda done, total: seen.append((done, total)))
    assert seen == [(64, 0), (128, 0), (192, 0)]
