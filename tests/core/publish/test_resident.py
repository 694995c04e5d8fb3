"""A model that lives in the store: what it publishes, that nothing is copied, and how it ends."""

from __future__ import annotations

import contextlib
import ctypes
import shutil
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import dbuffer
from dbuffer import ResidentModel
from dbuffer.io.copier import Copier
from dbuffer.store import filesystem
from dbuffer.store.buffer import DoubleBuffer
from dbuffer.store.writer import BufferWriter
from tests.support.children import Child, in_a_fork
from tests.support.moments import COPIES, Step, at_call, at_step, die
from tests.support.patterns import SMALL, SPARSE, Pattern, assert_same, newest
from tests.support.soak import numbers, patience_s
from tests.support.stores import assert_tidy, make_temporaries_old, weights_files

BIG = Pattern(num_tensors=8, numel=1 << 16)
"""4 MiB: what is copied shows in the blocks of the store's files."""


class Patterned(nn.Module):
    """A module with a pattern's tensors as its parameters."""

    def __init__(self, pattern: Pattern = SMALL) -> None:
        super().__init__()
        self.pattern = pattern
        layers = nn.ModuleList(nn.Module() for _ in pattern.names)
        self.add_module(pattern.names[0].split(".")[0], layers)
        for layer, tensor in zip(layers, pattern.empty().values(), strict=True):
            layer.weight = nn.Parameter(tensor.clone(), requires_grad=False)

    def step(self, version: int) -> None:
        """Write in place what is to be published as ``version``."""
        self.load_state_dict(self.pattern.weights(version))

    def version(self) -> int | None:
        return self.pattern.version_of(self.state_dict())


class Net(nn.Module):
    """All kinds of tensors: tied, frozen, in bfloat16, empty, not contiguous, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(16, 8)
        self.norm = nn.BatchNorm1d(8)
        self.hidden = nn.Linear(8, 8)
        self.hidden.weight.requires_grad_(False)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight
        self.twin = nn.Parameter(self.hidden.bias.data)
        self.small = nn.Parameter(torch.randn(5, dtype=torch.bfloat16))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.also_empty = nn.Parameter(torch.empty(0, 3))
        self.turned = nn.Parameter(torch.randn(4, 8).t())
        self.register_buffer("cache", torch.zeros(3), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.embedding(tokens)) @ self.turned
        hidden = self.hidden(hidden @ self.turned.t()) * self.small.float().sum()
        return self.head(hidden + self.empty.sum())


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def read(store: Path, like: nn.Module) -> dict[str, torch.Tensor]:
    """The newest version, which must have just the names, dtypes and shapes of a model."""
    target = {name: torch.zeros_like(tensor) for name, tensor in values(like).items()}
    with dbuffer.WeightReceiver(store) as receiver:
        receiver.load_into(target)
    return target


def mapped_files(tensors: Iterable[torch.Tensor]) -> set[str]:
    """The files in whose mappings tensors lie."""
    places = [tensor.data_ptr() for tensor in tensors if tensor.numel()]
    found = set()
    for line in Path("/proc/self/maps").read_text().splitlines():
        bounds, *_, path = line.split(maxsplit=5) if line.count("/") else (line.split()[0], "")
        first, end = (int(bound, 16) for bound in bounds.split("-"))
        if any(first <= place < end for place in places):
            found.add(path)
    return found


def is_outside(model: nn.Module, store: Path) -> bool:
    return not [path for path in mapped_files(model.parameters()) if str(store) in path]


def publish(model: Patterned, resident: ResidentModel, *versions: int) -> None:
    for version in versions:
        model.step(version)
        resident.publish()


@pytest.fixture
def model() -> Patterned:
    return Patterned()


@pytest.fixture
def resident(model: Patterned, store: Path) -> Iterator[ResidentModel]:
    with ResidentModel(model, store) as resident:
        yield resident


@pytest.fixture
def warnings(store: Path, caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Warnings about the store that were logged so far."""
    return lambda: [message for message in caplog.messages if str(store) in message]


# What it publishes


@pytest.mark.parametrize(
    ("pattern", "delta", "checksum"),
    [
        *((SMALL, False, False), (SMALL, False, True), (SMALL, True, False)),
        *((SPARSE, True, False), (SPARSE, True, True)),
    ],
)
def test_each_version_is_the_model_as_it_was(any_store, warnings, pattern, delta, checksum):
    model, options = Patterned(pattern), {"delta": delta, "checksum": checksum}
    with ResidentModel(model, any_store, durable=checksum, **options) as resident:
        for version in range(1, 8):
            model.step(version)
            publication = resident.publish(metadata={"step": version})
            with pytest.raises(dbuffer.WaitTimeoutError):
                resident.wait_applied(version, timeout_s=0)
            assert publication.version == version == newest(any_store, verify=checksum)
            resident.wait_applied(version, timeout_s=0)
            assert publication.num_tensors == len(SMALL.names)
            assert publication.num_bytes == sum(t.nbytes for t in SMALL.weights(0).values())
            # What changes all is published whole.
            has_delta = pattern is SPARSE and version > 1
            assert (publication.delta_bytes is not None) == has_delta
            assert model.version() == version
            assert_tidy(any_store)
        with dbuffer.WeightReceiver(any_store) as receiver, receiver.open() as snapshot:
            assert snapshot.metadata == {"step": 7}
    assert warnings() == []


def test_what_did_not_change_is_not_copied(store, monkeypatch):
    """Into the other buffer, from the third version on: it holds the one before the last."""
    write = mock.Mock(wraps=Copier.write)
    monkeypatch.setattr(Copier, "write", lambda *arguments, **options: write(*arguments, **options))
    model = Patterned(SPARSE)
    with ResidentModel(model, store, delta=True) as resident:
        for version in range(1, 7):
            publish(model, resident, version)
            assert model.version() == version
    copied = [len(tensors) for (_, _, tensors), _ in write.call_args_list]
    assert copied == [len(SPARSE.names)] * 2


def trainer_of(model: nn.Module) -> tuple[torch.optim.Optimizer, Callable[[], None]]:
    """An optimizer, and the same steps for any model that begins with the same values."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 0.1)
    generator = torch.Generator().manual_seed(1)

    def step() -> None:
        tokens = torch.randint(16, (8,), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(tokens), tokens).backward()
        optimizer.step()

    return optimizer, step


def test_it_trains_as_any_other_model_does(store, warnings):
    model, other = Net(), Net()
    names = [name for name, _ in model.named_parameters()]
    with ResidentModel(model, store) as resident:
        (optimizer, step), (_, step_other) = trainer_of(model), trainer_of(other)
        for _ in range(6):
            step()
            step_other()
            resident.publish()
            assert_same(read(store, model), values(model))
            # A matrix that is not contiguous any more is multiplied in another order.
            torch.testing.assert_close(values(model), values(other))
        assert model.head.weight is model.embedding.weight
        assert model.twin.data_ptr() == model.hidden.bias.data_ptr()
        assert not model.hidden.weight.requires_grad
        assert [name for name, _ in model.named_parameters()] == names
        trained = optimizer.param_groups[0]["params"]
        assert {id(p) for p in trained} <= {id(p) for p in model.parameters()}
    torch.testing.assert_close(values(model), values(other))
    assert warnings() == []


def test_checkpoints_of_it_are_as_large_as_it_is(store, tmp_path):
    """Each tensor has a storage of its own, by which ties are told from neighbours."""
    model = Patterned(BIG)
    with ResidentModel(model, store):
        model.step(1)
        one = model.layers[0].weight
        torch.save(one.detach(), tmp_path / "one")
        assert (tmp_path / "one").stat().st_size < 1.1 * one.nbytes
        torch.save(model.state_dict(), tmp_path / "all")
        assert BIG.version_of(torch.load(tmp_path / "all")) == 1
        storages = {t.untyped_storage().data_ptr() for t in model.state_dict().values()}
        assert len(storages) == len(BIG.names)


def test_names_are_mapped_and_versions_given(store):
    model = nn.Linear(2, 3)
    rename = dbuffer.NameMap().exact("weight", "w")
    with ResidentModel(model, store, rename=rename) as resident:
        assert resident.publish(version=40).version == 40
        with pytest.raises(dbuffer.VersionError):
            resident.publish(version=40)
        with pytest.raises(dbuffer.InvalidWeightsError, match="JSON"):
            resident.publish(metadata={"step": object()})
        assert resident.publish().version == 41
    with dbuffer.WeightReceiver(store) as receiver, receiver.open() as snapshot:
        assert list(snapshot.tensors) == ["w", "bias"]


# Nothing is copied, and what is published stays as it is


def publish_protected(connection: Connection, store: Path) -> None:
    """Publish with every page that the parameters live in made read-only: a write is a SIGSEGV."""
    model = Patterned(BIG)
    resident = ResidentModel(model, store, num_threads=1)
    publish(model, resident, 1)
    model.step(2)
    home = resident._home
    assert home is not None
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(ctypes.c_void_p(home.address), len(home.raw), 1) == 0
    at_step(Step("c_return", "replace", "CURRENT"), die)
    resident.publish()


def test_publish_writes_none_of_the_pages_before_the_flip(store):
    with Child(publish_protected, store) as child:
        assert child.wait() == -signal.SIGKILL, "something was written into the parameters' pages"
    assert newest(store, BIG) == 2


def test_what_is_published_is_the_file_that_was_trained_in_and_not_written_again(store):
    model = Patterned(BIG)
    with ResidentModel(model, store) as resident, dbuffer.WeightReceiver(store) as receiver:
        for version in range(1, 5):
            model.step(version)
            [trained_in] = map(Path, mapped_files(model.state_dict().values()))
            blocks = trained_in.stat().st_blocks
            resident.publish()
            buffer = DoubleBuffer(store).pointer().buffer
            [file] = weights_files(store)[buffer]
            assert trained_in == store / buffer / file
            assert trained_in.stat().st_blocks == blocks
            [trains_in] = map(Path, mapped_files(model.state_dict().values()))
            assert trains_in.parent != trained_in.parent
            with receiver.open(timeout_s=0) as snapshot:
                model.step(1000 + version)
                assert BIG.version_of(snapshot.tensors) == version
        assert sum(map(len, weights_files(store).values())) == 2


def test_reader_that_holds_on_is_evicted_into_a_new_file(store, warnings):
    model = Patterned()
    with (
        ResidentModel(model, store, reader_timeout_s=0.1) as resident,
        dbuffer.WeightReceiver(store) as receiver,
    ):
        publish(model, resident, 1)
        with pytest.raises(dbuffer.SnapshotEvictedError), receiver.open(timeout_s=0) as snapshot:
            for version in (2, 3, 4):
                publish(model, resident, version)
                assert newest(store) == version
                assert SMALL.version_of(snapshot.tensors) == 1
        assert_tidy(store)
    assert any("evicting" in message for message in warnings())


# What moves out is copied back in, or refused


def untie(model: Net) -> None:
    model.head.weight = nn.Parameter(model.embedding.weight.detach() + 1)


def share(model: Net) -> None:
    """As TorchRL's collectors do with a policy: storages go elsewhere, under all of their views."""
    model.share_memory()
    with torch.no_grad():
        model.hidden.bias.add_(1)


def hand_to_a_spawned_process(model: Net) -> None:
    """Torch moves tensors that it pickles for another process into shared memory."""
    ForkingPickler.dumps(model)
    with torch.no_grad():
        model.hidden.bias.add_(1)


MOVES: dict[str, Callable[[Net], Any]] = {
    "halved": Net.half,
    "assigned": lambda model: setattr(model.norm, "running_mean", torch.ones(8)),
    "replaced": lambda model: setattr(model, "hidden", nn.Linear(8, 8)),
    "untied": untie,
    "loaded by assignment": lambda model: model.load_state_dict(values(Net()), assign=True),
    "shared": share,
    "handed to a spawned process": hand_to_a_spawned_process,
}


@pytest.mark.parametrize("move", MOVES)
def test_what_was_moved_out_is_copied_back_in(store, move, warnings):
    model = Net()
    with ResidentModel(model, store) as resident:
        resident.publish()
        MOVES[move](model)
        expected = values(model)
        resident.publish()
        assert "was moved out of the store" in warnings()[-1]
        assert_same(read(store, model), expected)
        assert_same(values(model), expected)
        count = len(warnings())
        for _ in range(2):
            with torch.no_grad():
                model.hidden.bias.add_(1)
            resident.publish()
            assert_same(read(store, model), values(model))
        assert len(warnings()) == count, "it is at home again"
        assert len(mapped_files(model.state_dict().values())) == 1
        assert_tidy(store)


def lose_values(model: nn.Linear) -> None:
    model.weight = nn.Parameter(model.weight.to("meta"))


def describe_scales(model: nn.Linear) -> None:
    model.register_state_dict_post_hook(lambda _, state, *__: state.update(scales=(1, 2)))


@pytest.mark.parametrize(
    ("spoil", "message"), [(lose_values, "meta"), (describe_scales, r"'scales' \(tuple\)")]
)
def test_a_model_that_was_spoiled_is_refused_and_moves_out_all_the_same(store, spoil, message):
    model = nn.Linear(2, 2)
    with ResidentModel(model, store) as resident:
        resident.publish()
        before = read(store, nn.Linear(2, 2))
        spoil(model)
        with pytest.raises(dbuffer.InvalidWeightsError, match=message):
            resident.publish()
        assert_same(read(store, nn.Linear(2, 2)), before)
        model._state_dict_hooks.clear()
        model.weight = nn.Parameter(torch.ones(2, 2))
        assert resident.publish().version == 2
    assert is_outside(model, store)


def flat_buffer() -> nn.Module:
    model = nn.Linear(2, 2)
    model.weight.data = torch.zeros(6)[:4].view(2, 2)
    return model


def two_views() -> nn.Module:
    model = nn.Linear(2, 2, bias=False)
    model.other = nn.Parameter(model.weight.detach().view(4))
    return model


def transposed_beside_it() -> nn.Module:
    model = nn.Linear(2, 2)
    model.register_buffer("turned", model.weight.detach().t(), persistent=False)
    return model


def made_by_state_dict() -> nn.Module:
    model = nn.Linear(2, 2)
    model.register_state_dict_post_hook(
        lambda _, state, *__: state.update(bias=state["bias"].detach().clone())
    )
    return model


@pytest.mark.parametrize(
    ("make", "message", "mount"),
    [
        (flat_buffer, "a part of something larger.* WeightSender", "local"),
        (two_views, "another view of it.* WeightSender", "local"),
        (transposed_beside_it, "another view of it.* WeightSender", "local"),
        (made_by_state_dict, "'bias' .* WeightSender", "local"),
        (lambda: nn.Linear(2, 2, device="meta"), "meta", "local"),
        (lambda: nn.Linear(2, 2), "WeightSender", "network"),
    ],
)
def test_a_model_that_cannot_move_in_is_refused(store, make, message, mount, monkeypatch):
    monkeypatch.setenv("DBUFFER_MOUNT", mount)
    model = make()
    place = model.weight.data_ptr()
    refusals = dbuffer.UnsupportedError, dbuffer.InvalidWeightsError
    with pytest.raises(refusals, match=message):
        ResidentModel(model, store)
    assert model.weight.data_ptr() == place
    assert not store.exists()


# How it ends


def test_after_close_the_model_is_an_ordinary_one(store):
    model = Patterned()
    with dbuffer.WeightSender(store) as sender:
        places = [tensor.data_ptr() for tensor in model.parameters()]
        with pytest.raises(dbuffer.StoreBusyError):
            ResidentModel(model, store)
        assert [tensor.data_ptr() for tensor in model.parameters()] == places
    resident = ResidentModel(model, store)
    with pytest.raises(dbuffer.StoreBusyError):
        dbuffer.WeightSender(store)
    publish(model, resident, 1)
    model.step(2)
    resident.close()
    resident.close()
    assert model.version() == 2
    assert is_outside(model, store)
    assert newest(store) == 1
    assert_tidy(store)
    with pytest.raises(dbuffer.ClosedError):
        resident.publish()
    with pytest.raises(dbuffer.ClosedError):
        resident.wait_applied(1)
    with dbuffer.WeightSender(store) as sender:
        assert sender.send(model).version == 2 == newest(store)


def test_successor_is_not_written_into_and_not_overtaken(store):
    model = Patterned()
    resident = ResidentModel(model, store)
    publish(model, resident, 1)
    (store / "writer.lock").unlink()  # by a hand that knows no better
    with dbuffer.WeightSender(store, reader_timeout_s=0.1) as sender:
        for version in (2, 3, 4):
            sender.send(SMALL.weights(version))
            model.step(1000 + version)
            assert newest(store) == version
        with pytest.raises(dbuffer.WriterSupersededError):
            resident.publish()
        assert model.version() == 1004
        resident.close()
        sender.send(SMALL.weights(5))
        assert newest(store) == 5
        assert_tidy(store)


def fork_and_publish(connection: Connection, store: Path) -> None:
    model = Patterned()
    with ResidentModel(model, store, num_threads=1) as resident:
        publish(model, resident, 1)
        model.step(2)

        def publish_in_child() -> None:
            with pytest.raises(dbuffer.ClosedError):
                resident.publish()
            resident.close()

        assert in_a_fork(publish_in_child) == 0
        resident.publish()
        assert newest(store) == 2
        publish(model, resident, 3)
    connection.send("done")


def test_a_forked_child_can_neither_publish_nor_end_it(store):
    with Child(fork_and_publish, store) as child:
        assert child.receive() == "done"
    assert newest(store) == 3


@contextlib.contextmanager
def failing(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, error: BaseException, nth: int = 1
) -> Iterator[None]:
    """Let the ``nth`` call of a function raise instead."""
    right, left = getattr(owner, name), [nth]

    def call(*args: Any, **options: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise error
        return right(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, call)
        yield
    assert left[0] <= 0, "it was never called"


FULL = dbuffer.StoreFullError("no room")


FAILURES: dict[str, tuple[str, int]] = {
    "manifest": ("replace_file", 1),
    "pointer": ("replace_file", 2),
    "flush": ("sync_directory", 2),
}
"""Calls that fail, and which of them: the pointer is in place when its flush fails."""


@pytest.mark.parametrize("error", [FULL, KeyboardInterrupt()])
@pytest.mark.parametrize("step", FAILURES)
def test_a_publish_that_fails_leaves_the_model_whole(store, monkeypatch, step, error, model):
    with ResidentModel(model, store, durable=True) as resident:
        publish(model, resident, 1)
        model.step(2)
        function, nth = FAILURES[step]
        with (
            failing(monkeypatch, filesystem, function, error, nth),
            pytest.raises(type(error)),
        ):
            resident.publish()
        assert model.version() == 2
        there = 2 if step == "flush" else 1
        assert newest(store) == there
        model.step(3)
        assert newest(store) == there, "what was published was trained in"
        assert resident.publish(version=3).version == 3 == newest(store)
        model.step(4)
        assert resident.publish().version == 4 == newest(store)
        assert_tidy(store)


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("function", ["Publication.of", "ResidentModel._change_sides"])
def test_an_interrupt_right_after_the_flip_leaves_the_published_bytes_alone(store, model, function):
    with ResidentModel(model, store) as resident:
        publish(model, resident, 1)
        model.step(2)
        at_step(Step("call", function), interrupt)
        with pytest.raises(KeyboardInterrupt):
            resident.publish()
        assert newest(store) == 2
        model.step(3)
        assert newest(store) == 2, "what was published was trained in"
        assert resident.publish().version == 3 == newest(store)
        assert_tidy(store)


def test_no_room_for_the_next_is_no_failure_of_this_one(
    store, monkeypatch, warnings, model, resident
):
    model.step(1)
    with failing(monkeypatch, BufferWriter, "claim", FULL):
        assert resident.publish().version == 1
    assert "ordinary memory until the next publish" in warnings()[-1]
    model.step(2)
    assert newest(store) == 1, "the published pages were trained in"
    assert is_outside(model, store)
    with failing(monkeypatch, BufferWriter, "claim", FULL), pytest.raises(OSError, match="room"):
        resident.publish()
    assert model.version() == 2
    with failing(monkeypatch, Copier, "write", KeyboardInterrupt(), nth=2):  # in the other buffer
        with pytest.raises(KeyboardInterrupt):
            resident.publish()
    model.step(3)
    assert newest(store) == 2
    assert resident.publish().version == 3 == newest(store)
    assert not any("moved out of the store" in each for each in warnings()), "it moved them itself"
    assert_tidy(store)


@pytest.mark.parametrize("checksum", [False, True])
def test_training_in_ordinary_memory_is_published_where_deltas_are(store, monkeypatch, checksum):
    """The idle buffer lacks more than what changed between the last two versions."""
    model = Patterned(SPARSE)
    with ResidentModel(model, store, delta=True, checksum=checksum) as resident:
        publish(model, resident, *range(1, 4))
        model.step(4)
        with failing(monkeypatch, BufferWriter, "claim", FULL):
            resident.publish()
        model.step(5)
        assert resident.publish().version == 5 == model.version() == newest(store)


def train_until(connection: Connection, store: Path, number: int, last: int, delta: bool) -> None:
    """Publish, and die before a call of the ``last`` publish, or of the first moving in (0)."""
    model = Patterned(SPARSE if delta else SMALL)
    if last == 0:
        at_call(number, die, COPIES)
    resident = ResidentModel(model, store, checksum=True, delta=delta, num_threads=1)
    for version in range(1, last + 1):
        model.step(version)
        if version == last:
            at_call(number, die, COPIES)
        resident.publish()
    sys.setprofile(None)


def assert_goes_on(store: Path, expected: int | None) -> None:
    """The last version reads whole, and both kinds of writer publish after it."""
    assert newest(store) == expected
    make_temporaries_old(store)
    version = (expected or 0) + 1
    with dbuffer.WeightSender(store) as sender:
        assert newest(store) == expected
        sender.send(SMALL.weights(version), version=version)
    model = Patterned()
    with ResidentModel(model, store) as resident:
        for later in range(version + 1, version + 4):
            publish(model, resident, later)
            assert newest(store) == later
        assert_tidy(store)


@pytest.mark.timeout(patience_s())
@pytest.mark.parametrize(("last", "delta"), [(0, False), (1, False), (4, False), (4, True)])
def test_killed_at_any_moment(shm_path, last, delta, record_property):
    """While it moves in; in the first publish, and in a later one, each with a change of sides."""
    before, has_flipped = last - 1 if last > 1 else None, False
    kills = 0
    for number in numbers():
        store = shm_path / f"{number}"
        with Child(train_until, store, number, last, delta) as child:
            if (code := child.wait()) == 0:
                break
        assert code == -signal.SIGKILL
        kills += 1
        version = newest(store) if store.exists() else None
        has_flipped |= version == last
        assert version == (last if has_flipped else before), f"before call {number}"
        assert_goes_on(store, version)
        shutil.rmtree(store)
    assert has_flipped == (last > 0)
    assert kills > 3
    record_property("kills of a resident model", kills)
