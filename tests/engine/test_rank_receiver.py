"""What each rank of an engine stages, once its switches are copies alone: its own part."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dbuffer
from dbuffer.engine.contract import WEIGHTS
from dbuffer.engine.endpoint import RankEndpoint
from dbuffer.engine.engine_options import EngineOptions, UpdateRequest
from dbuffer.engine.meta_model import MetaModel
from dbuffer.engine.plan.load_trace import LoadTrace
from dbuffer.engine.plan.prepared_switch import PreparedSwitch
from dbuffer.engine.rank_channel import RankChannel
from dbuffer.engine.rank_receiver import RankReceiver
from dbuffer.engine.shape_check import ShapeCheck, UnusedTensors
from dbuffer.format.layout import Layout
from dbuffer.receive import stager
from dbuffer.receive.stager import DEVICE_RESERVE_BYTES
from dbuffer.store.buffer import DoubleBuffer
from dbuffer.testing.engines import FakeRank
from dbuffer.testing.waiting import until
from dbuffer.tools.status import read_status
from tests.support.soak import in_turn
from tests.support.worlds import Coordinator, World, world_of

SIZE = 4
NUM_LAYERS = 3
WIDTH = 64
TIMEOUT_S = 20.0
DTYPE = torch.bfloat16


STAGINGS = ["map", "copy", "device"]
both_stagings = pytest.mark.parametrize("staging", STAGINGS)


def rows(parameter: torch.Tensor, loaded: torch.Tensor, rank: int) -> None:
    parameter.data.copy_(loaded.narrow(0, rank * len(parameter), len(parameter)))


def columns(parameter: torch.Tensor, loaded: torch.Tensor, rank: int) -> None:
    width = parameter.shape[1]
    parameter.data.copy_(loaded.narrow(1, rank * width, width))


def all_of_it(parameter: torch.Tensor, loaded: torch.Tensor, rank: int) -> None:
    parameter.data.copy_(loaded)


class Model(nn.Module):
    """A rank's part of layers as tensor parallelism has them."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        kinds = {
            "up": (rows, (4 * WIDTH // SIZE, WIDTH)),
            "down": (columns, (WIDTH, 4 * WIDTH // SIZE)),
            "norm": (all_of_it, (WIDTH,)),
        }
        for layer in range(NUM_LAYERS):
            for kind, (loader, shape) in kinds.items():
                parameter = nn.Parameter(torch.ones(shape, dtype=DTYPE), requires_grad=False)
                parameter.weight_loader = self.of_this_rank(loader)
                self.register_parameter(f"{kind}_{layer}", parameter)

    def of_this_rank(self, loader: Callable[..., None]) -> Callable[..., None]:
        return lambda parameter, loaded: loader(parameter, loaded, self.rank)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            parameter = self.get_parameter(name)
            parameter.weight_loader(parameter, tensor)


class Watched(MetaModel):
    def __init__(self, model: Model) -> None:
        super().__init__(model, embedding=nn.Module, default_loader=all_of_it, tp_size=SIZE)

    def require_complete(self) -> None:
        for name, parameter in self.model.named_parameters():
            self.require_whole(name, parameter, 1)


class PlannedRank(FakeRank):
    """A rank of a model of several parts."""

    not_weights = ("num_loads", "_dbuffer_endpoint")

    def __init__(self, model: Model, ranks: RankChannel) -> None:
        super().__init__(ranks=ranks)
        self.module = model
        self.checkpoint: dict[str, torch.Tensor] = {}

    def make_check(self) -> ShapeCheck:
        with torch.device("meta"):
            return ShapeCheck(Watched(Model(self.ranks.rank)))

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]], *, partial: bool = False) -> None:
        self.num_loads += 1  # two for a switch that proves the plan
        self.module.load_weights(tensors)

    def read_checkpoint(self) -> Iterable[tuple[str, torch.Tensor]]:
        return self.checkpoint.items()

    def refuse_to_serve(self, reason: str) -> None:
        raise AssertionError(reason)


class SmallDevice:
    """Main memory that stands in for a device's, of which this process may have so much."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.promised_bytes: int | None = None
        self.used_bytes = 0
        allocate = stager.new_memory

        def new_memory(num_bytes: int, device: torch.device | None = None) -> torch.Tensor:
            return allocate(num_bytes) if device is None else self.allocated(num_bytes)

        stager.new_memory = new_memory
        stager.free_on = self.free_on

    def free_on(self, _: torch.device) -> int:
        if self.promised_bytes is not None:
            return self.promised_bytes
        return DEVICE_RESERVE_BYTES + self.limit_bytes - self.used_bytes

    def allocated(self, num_bytes: int) -> torch.Tensor:
        if num_bytes > self.limit_bytes - self.used_bytes:
            raise dbuffer.StoreAccessError(f"cannot allocate {num_bytes} bytes")
        memory = Block(num_bytes)
        self.used_bytes += num_bytes
        weakref.finalize(memory, self.release, num_bytes)  # once no view of it is left
        return torch.frombuffer(memory, dtype=torch.uint8)

    def release(self, num_bytes: int) -> None:
        self.used_bytes -= num_bytes


class Block(bytearray):
    """Memory whose end can be noticed."""


class DeviceRank(PlannedRank):
    """A rank on a device."""

    on_device = True
    memory: SmallDevice


_engine: list[tuple[PlannedRank, RankReceiver, RankEndpoint]] = []
_logged: list[list[str]] = []
_errors: list[list[str]] = []
"""Errors that each test has listened to."""


def start(rank: int, store: Path, staging: str, more: dict[str, Any] | None = None) -> None:
    mine = PlannedRank(Model(rank), RankChannel.of(Coordinator()))
    begin(mine, EngineOptions(store=str(store), engine_id="engine", staging=staging, **more or {}))


def start_on_device(rank: int, store: Path, rooms: list[int]) -> None:
    """Start with the default, on a device that has so much for each rank; listen."""
    mine = DeviceRank(Model(rank), RankChannel.of(Coordinator()))
    mine.memory = SmallDevice(rooms[rank])
    _logged.append(listen(logging.INFO))
    begin(mine, EngineOptions(store=str(store), engine_id="engine"))


def begin(mine: PlannedRank, options: EngineOptions) -> None:
    endpoint = RankEndpoint()
    endpoint.begin(lambda: mine, options)
    assert endpoint.receiver is not None
    _engine.append((mine, endpoint.receiver, endpoint))


def parameters(rank: int) -> tuple[int, dict[str, torch.Tensor]]:
    rank = _engine[-1][0]
    return rank.num_loads, {name: p.clone() for name, p in rank.module.named_parameters()}


def update(rank: int, version: int) -> tuple[int, dict[str, torch.Tensor]]:
    """Switch; how often it was loaded so far, and what it has now."""
    _engine[-1][1].update(UpdateRequest(at_least=version))
    return parameters(rank)


def update_after_moving(
    rank: int, version: int
) -> tuple[list[str], tuple[int, dict[str, torch.Tensor]]]:
    """The same, when something else moved a parameter after it was staged; and what was logged."""
    mine, receiver, _ = _engine[-1]
    receiver._stager.take(version, timeout_s=TIMEOUT_S)
    receiver._stager.release()
    mine.module.get_parameter("norm_0").data = torch.full((WIDTH,), 9, dtype=DTYPE)
    messages = listen(logging.WARNING)
    return messages, update(rank, version)


def close(rank: int) -> None:
    _engine[-1][1].close()


world = world_of(SIZE, "function")


def weights(seed: int, *, norms: float = 1.0, dtype: torch.dtype = DTYPE) -> dict[str, Any]:
    """A model's, whole."""
    random = torch.Generator().manual_seed(seed)
    made: dict[str, Any] = {}
    for layer in range(NUM_LAYERS):
        made[f"up_{layer}"] = torch.randn(4 * WIDTH, WIDTH, generator=random).to(dtype)
        made[f"down_{layer}"] = torch.randn(WIDTH, 4 * WIDTH, generator=random).to(dtype)
        made[f"norm_{layer}"] = torch.full((WIDTH,), norms, dtype=dtype)
    return made


def require_right(found: list[Any], published: dict[str, torch.Tensor]) -> list[int]:
    """All ranks have their part of it; how often each was loaded."""
    for rank, (_, has) in enumerate(found):
        right = Model(rank)
        right.load_weights(published.items())
        assert all(torch.equal(has[name], p) for name, p in right.named_parameters())
    return [num_loads for num_loads, _ in found]


def staged_bytes(store: Path) -> int:
    """Of the newest version, by what the ranks say in the store."""
    records = [DoubleBuffer(store).receiver(f"engine.rank-{rank}") for rank in range(SIZE)]
    return sum(int(record.stats["staged_bytes"]) for record in records if record is not None)


@in_turn(("staging", "dtype"), STAGINGS, [DTYPE, torch.float32])
def test_a_rank_stages_its_part_when_that_is_proven_to_do(staging, dtype, world, store):
    model_bytes = sum(tensor.nbytes for tensor in weights(0).values())
    with dbuffer.WeightSender(store) as sender:
        world.run(start, store, staging)
        for version in range(1, 6):
            before = staged_bytes(store)
            sender.send(published := weights(version, dtype=dtype))
            assert require_right(world.run(update, version), published) == [2] * SIZE
            if version > 1:
                assert staged_bytes(store) - before < 1.02 * model_bytes
        # Norms never changed before.
        sender.send(published := weights(6, norms=2.0, dtype=dtype))
        assert require_right(world.run(update, 6), published) == [2] * SIZE
    world.run(close)


def prove_the_plan(
    world: World, sender: dbuffer.WeightSender, staging: str, **more: Any
) -> dict[str, Any]:
    """Two versions, of which the first is reloaded twice, and the second copied; the second."""
    world.run(start, sender.store, staging, more)
    for version in (1, 2):
        sender.send(published := weights(version))
        assert require_right(world.run(update, version), published) == [2] * SIZE
    return published


@both_stagings
def test_what_was_staged_for_another_model_is_staged_anew(staging, world, store):
    with dbuffer.WeightSender(store) as sender:
        prove_the_plan(world, sender, staging)
        sender.send(published := weights(3))
        logged, found = zip(*world.run(update_after_moving, 3), strict=True)
        # Where all of it was staged, nothing is read again.
        assert [any("the whole version 3 again" in line for line in lines) for lines in logged] == [
            staging != "map"
        ] * SIZE
        # Read again, it is planned again, and verified at once.
        num_loads = 3 if staging == "map" else 4
        assert require_right(list(found), published) == [num_loads] * SIZE
    world.run(close)


@both_stagings
def test_a_tensor_of_two_names_is_staged_under_both(staging, world, store):
    with dbuffer.WeightSender(store) as sender:
        world.run(start, store, staging)
        for version in range(1, 4):
            published = weights(version, norms=float(version))
            published["norm_1"] = published["norm_0"]
            sender.send(published)
            assert require_right(world.run(update, version), published) == [2] * SIZE
    world.run(close)


def set_room(rank: int, num_bytes: list[int], promised: int | None = None) -> None:
    """Change how much the device holds, and how much of that it says is free (None: all)."""
    _engine[-1][0].memory.limit_bytes, _engine[-1][0].memory.promised_bytes = (
        num_bytes[rank],
        promised,
    )


def used_on_device(rank: int) -> int:
    return _engine[-1][0].memory.used_bytes


def fall_asleep(rank: int) -> int:
    _engine[-1][2].note_asleep((WEIGHTS, "kv_cache"), is_lost=False)
    return used_on_device(rank)


def wake_up(rank: int, part: str | None) -> None:
    _engine[-1][2].note_awake(part and [part])


def logged(rank: int) -> list[str]:
    return [line for line in _logged[-1] if "main memory" in line]


def staged_parts(store: Path, version: int) -> list[tuple[int, int]]:
    """Wait until all ranks have staged a version; their bytes on the device, in main memory."""
    found: list[tuple[int, int]] = []

    def is_staged() -> bool:
        ranks = [r for r in read_status(DoubleBuffer(store))["receivers"] if r["part_of"]]
        found[:] = [(rank["device_bytes"], rank["memory_bytes"]) for rank in ranks]
        return [rank["staged_version"] for rank in ranks] == [version] * SIZE

    until(f"version {version} is staged", is_staged)
    return found


def test_each_rank_stages_on_its_device_as_far_as_there_is_room(world, store):
    """The default, on devices that differ, shrink, grow, and refuse what they said was free."""
    part = sum(parameter.nbytes for parameter in Model(0).parameters())

    def switch(version: int) -> list[int]:
        """Switch to a version; the bytes that each rank had on its device."""
        sender.send(published := weights(version))
        parts = staged_parts(store, version)
        assert [sum(sizes) for sizes in parts] == [part] * SIZE
        require_right(world.run(update, version), published)
        assert world.run(used_on_device) == [on_device for on_device, _ in parts]
        return [on_device for on_device, _ in parts]

    with dbuffer.WeightSender(store) as sender:
        world.run(start_on_device, store, rooms := [0, part // 4, part // 2, part])
        sender.send(weights(1))
        assert staged_parts(store, 1) == [(0, 0)] * SIZE, "nothing is known of copies yet"
        world.run(update, 1)
        none, little, half, whole = switch(2)
        assert none == 0 < little <= part // 4 < half <= part // 2 < whole == part
        world.run(set_room, [part, part // 4, part // 4, part // 2])
        assert switch(3) == [whole, little, little, half]
        world.run(set_room, [0] * SIZE)
        assert switch(4) == [0] * SIZE
        world.run(set_room, [0] * SIZE, DEVICE_RESERVE_BYTES + part)
        assert [switch(5), switch(6)] == [[0] * SIZE] * 2
        world.run(set_room, rooms)
        assert switch(7) == [none, little, half, whole]
        world.run(set_room, [DEVICE_RESERVE_BYTES + part] * SIZE)
        assert switch(8) == [whole] * SIZE
        for lines in world.run(logged):
            assert sum("switches take longer: cannot allocate" in line for line in lines) == 1
        stages = [line for line in world.run(logged)[3] if "stages versions" in line]
        assert "on cpu, 0 B in main memory" in stages[0]
        assert "0 B on cpu" in stages[2]
    world.run(close)


def test_memory_of_the_device_is_given_back_for_a_sleep(world, store):
    part = sum(parameter.nbytes for parameter in Model(0).parameters())
    with dbuffer.WeightSender(store) as sender:
        world.run(start_on_device, store, [part] * SIZE)
        for version in (1, 2):
            sender.send(weights(version))
            world.run(update, version)
        sender.send(weights(3))
        assert staged_parts(store, 3) == [(part, 0)] * SIZE
        assert world.run(fall_asleep) == [0] * SIZE
        # The memory that is free now is the cache's, which will want it back.
        world.run(wake_up, WEIGHTS)
        until("it is staged again", lambda: staged_parts(store, 3) == [(0, part)] * SIZE)
        for version in (3, 4):
            require_right(world.run(update, version), weights(version))
            sender.send(weights(version + 1))
            assert staged_parts(store, version + 1) == [(0, part)] * SIZE
        world.run(wake_up, "kv_cache")
        require_right(world.run(update, 5), weights(5))
        sender.send(weights(6))
        assert staged_parts(store, 6) == [(part, 0)] * SIZE
        assert world.run(fall_asleep) == [0] * SIZE
        world.run(wake_up, None)
        until("on the device", lambda: staged_parts(store, 6) == [(part, 0)] * SIZE)
        require_right(world.run(update, 6), weights(6))
    world.run(close)


def attested(rank: int) -> tuple[bool, int | None, bool]:
    """Whether the engine's record says that its weights were compared, or why not, by version."""
    receiver = _engine[-1][1]
    if receiver._id is not None:
        wait_until_compared(rank)
    receiver.attest()
    record = receiver._record.current
    return record.attested_at is not None, record.applied_version, record.is_attestable


@both_stagings
def test_weights_are_compared_with_what_was_published_while_an_engine_serves(staging, world, store):
    with dbuffer.WeightSender(store) as sender:
        prove_the_plan(world, sender, staging, attest=True)
        assert world.run(attested) == [(True, 2, False)] * SIZE
        sender.send(weights(3))
        world.run(update, 3)
        assert world.run(attested) == [(True, 3, False)] * SIZE
    world.run(close)


def test_weights_that_only_a_reload_gives_are_not_called_attested(world, store):
    with dbuffer.WeightSender(store) as sender:
        world.run(start, store, "copy", {"attest": True, "plan": False})
        sender.send(weights(1))
        world.run(update, 1)
        assert world.run(attested) == [(False, 1, False)] * SIZE
    world.run(close)


def update_and_write(rank: int, version: int) -> None:
    """Switch; on one rank, something writes an element before the weights are compared."""
    mine, receiver, _ = _engine[-1]
    _errors.append(listen(logging.ERROR))
    receiver._stager.take(version, timeout_s=TIMEOUT_S)
    receiver._stager.release()
    with receiver._model.reading if rank == 2 else contextlib.nullcontext():
        receiver.update(UpdateRequest(at_least=version))
        if rank == 2:
            mine.module.down_1[3, 5] += 1


@both_stagings
def test_weights_that_something_wrote_to_are_unknown_and_are_loaded_again(staging, world, store):
    with dbuffer.WeightSender(store) as sender:
        prove_the_plan(world, sender, staging, attest=True)
        sender.send(published := weights(3))
        world.run(update_and_write, 3)
        assert world.run(attested) == [(False, None, False)] * SIZE
        for line in world.run(last_error):
            assert "served other weights than version 3" in line
            assert "rank 2: down_1; all" in line
        require_right(world.run(update, 3), published)
        assert world.run(attested) == [(False, 3, False)] * SIZE  # by a reload alone
        sender.send(published := weights(4))
        require_right(world.run(update, 4), published)
        assert world.run(attested) == [(True, 4, False)] * SIZE
    world.run(close)


def test_weights_that_nobody_asked_about_are_loaded_again_with_the_next_update(world, store):
    with dbuffer.WeightSender(store) as sender:
        prove_the_plan(world, sender, "copy", attest=True)
        sender.send(published := weights(3))
        world.run(update_and_write, 3)
        world.run(wait_until_compared)
        require_right(world.run(update, 3), published)
        assert "down_1" in world.run(last_error)[2]
    world.run(close)


def is_attested(rank: int) -> bool:
    return _engine[-1][1]._record.current.attested_at is not None


def fail_next_switch(rank: int) -> None:
    """Let one rank's next switch by copies end half-way."""
    apply = PreparedSwitch.apply
    if rank != 1:
        return

    def fail(switch: PreparedSwitch, *_: Any) -> None:
        PreparedSwitch.apply = apply
        copies = [copy for of_one in switch.copies.values() for copy in of_one]
        for target, source in copies[: len(copies) // 2]:
            target.copy_(source)
        raise RuntimeError("the bus is on fire")

    PreparedSwitch.apply = fail


@both_stagings
def test_a_switch_that_fails_on_one_rank_is_taken_back_on_all(staging, world, store):
    with dbuffer.WeightSender(store) as sender:
        published = prove_the_plan(world, sender, staging, attest=True)
        assert world.run(attested) == [(True, 2, False)] * SIZE
        world.run(fail_next_switch)
        sender.send(weights(3))
        world.begin(update, 3)
        for rank in range(SIZE):
            outcome = world.outcome(rank)
            assert outcome.kind == "EngineUpdateError"
            assert "rank 1: RuntimeError: the bus is on fire" in outcome.message
            assert "went back" in outcome.message
        with pytest.raises(dbuffer.ReceiverFailedError, match=r"engine .* version 3: .* on fire"):
            sender.wait_applied(3, receivers=["engine"], timeout_s=60)
        require_right(world.run(parameters), published)
        assert world.run(is_attested) == [False] * SIZE, "the weights were loaded again"
        sender.send(published := weights(4))
        # The rank that failed was reloaded to go back, which proved its plan anew.
        failed = world.run(parameters)[1][0]
        assert require_right(world.run(update, 4), published) == [2, failed, 2, 2]
        sender.wait_applied(4, receivers=["engine"], timeout_s=0)
    world.run(close)


def test_a_load_into_a_part_of_a_model_makes_its_weights_unknown():
    model = nn.Module()
    model.language_model = Model(0)
    endpoint = RankEndpoint.of(model)
    assert not endpoint.state.must_reload
    model.language_model.load_weights(weights(1).items())
    assert endpoint.state.must_reload


def start_on_checkpoint(rank: int, store: Path, checkpoint: dict[str, torch.Tensor]) -> None:
    start(rank, store, "auto")
    mine = _engine[-1][0]
    mine.checkpoint = checkpoint
    mine.load(checkpoint.items())


def fail_loads(rank: int) -> None:
    """Let each load of one rank fail but that of its checkpoint, until it is mended."""
    mine = _engine[-1][0]

    def fail(tensors: Iterable[tuple[str, torch.Tensor]], *, partial: bool) -> None:
        loaded = dict(tensors)
        if not torch.equal(loaded["up_0"], mine.checkpoint["up_0"]):
            raise RuntimeError("the bus is on fire")
        type(mine).load(mine, loaded.items(), partial=partial)

    if rank == 1:
        mine.load = fail


def mend_loads(rank: int) -> None:
    if rank == 1:
        del _engine[-1][0].load


def test_a_delta_is_not_patched_upon_a_checkpoint(tmp_path, monkeypatch):
    """Three ranks have loaded a version, and all load the checkpoint again, as one could not."""
    monkeypatch.setenv("DBUFFER_MOUNT", "network")  # where a delta is known to its readers
    first = weights(1)
    checkpoint = {name: tensor.clone() for name, tensor in first.items()}
    checkpoint["up_0"][3, 5] += 1
    second = {name: tensor.clone() for name, tensor in first.items()}
    second["up_1"][7, 9] += 1
    with World(tmp_path, SIZE) as world, dbuffer.WeightSender(tmp_path / "s", delta=True) as sender:
        world.run(start_on_checkpoint, sender.store, checkpoint)
        world.run(fail_loads)
        sender.send(first)
        world.begin(update, 1)
        for rank in range(SIZE):
            assert "all ranks went back" in world.outcome(rank).message
        require_right(world.run(parameters), checkpoint)
        world.run(mend_loads)
        sender.send(second)
        require_right(world.run(update, 2), second)
        world.run(close)


def catch_up_with_a_mirror_of_some(rank: int, store: Path, local: Path) -> None:
    """Start, and read the local store; only the first rank has found that it needs a mirror."""
    if rank:
        EngineOptions.start_mirror = lambda _: None
    start(rank, store, "auto", {"local_store": str(local)})
    _engine[-1][1].catch_up()


def test_ranks_of_which_one_has_a_mirror_catch_up_together(world, store, shm_path):
    with dbuffer.WeightSender(store) as sender:
        sender.send(published := weights(1))
        world.run(catch_up_with_a_mirror_of_some, store, shm_path / "local")
        require_right(world.run(parameters), published)
    world.run(close)


def refuse(rank: int, invalid: set[int]) -> None:
    """Update, or refuse where the request is invalid."""
    if rank in invalid:
        _engine[-1][1].update(dbuffer.OptionError("no request"))
    update(rank, 1)


def test_a_request_that_is_invalid_on_some_ranks_is_refused_on_all(world, store):
    with dbuffer.WeightSender(store) as sender:
        world.run(start, store, "auto")
        sender.send(weights(1))
        for invalid, kind in (({1}, "EngineUpdateError"), ({*range(SIZE)}, "OptionError")):
            for outcome in world.outcomes(refuse, invalid):
                assert outcome.kind == kind
                assert "no request" in outcome.message
        world.run(update, 1)
        world.run(close)


def wait_until_compared(rank: int) -> None:
    receiver = _engine[-1][1]
    until("compared", lambda: receiver._is_compared)


def last_error(rank: int) -> str:
    """The last error that this process logged since it listens; none: an empty text."""
    return "".join(_errors[-1][-1:])


def listen(level: int) -> list[str]:
    """Collect what this process logs from now on."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger("dbuffer")
    logger.addHandler(handler)
    logger.setLevel(level)
    return messages


def test_each_tensor_that_goes_nowhere_is_named_once(caplog):
    unused = UnusedTensors("store", "warn", is_pipeline=False, is_first=True)
    for names in (["mtp"], ["mtp"], ["mtp", "visual", "value_head"], ["mtp", "visual"]):
        unused.check(LoadTrace({}, frozenset(names), unused=tuple(names)))
    lines = [message for message in caplog.messages if "store" in message]
    named = [[name for name in ("mtp", "visual", "value_head") if name in line] for line in lines]
    assert named == [["mtp"], ["visual", "value_head"]]


def test_ranks_of_a_pipeline_refuse_tensors_that_none_of_them_reads():
    unused = UnusedTensors("store", "refuse", is_pipeline=True, is_first=True)
    layout = Layout.of([])
    with pytest.raises(dbuffer.WeightsMismatchError, match="no place for b, "):
        unused.check_pipeline(layout, [{"a": "a", "b": "b"}, {"b": "b"}], [{}, {}])
    # A duplicate of a tied tensor, on a rank that has that one, counts only if the two differ.
    unused.check_pipeline(layout, [{"head": "head"}, {"head": None}], [{}, {}])
    with pytest.raises(dbuffer.WeightsMismatchError, match="head differs"):
        unused.check_pipeline(layout, [{}, {}], [{}, {"head": "head differs"}])
