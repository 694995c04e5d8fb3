"""Weights on a real GPU: streams, captured graphs, deltas, a device without room."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch

import dbuffer
from benchmarks import models
from benchmarks.layouts import PlannedReceiver
from dbuffer.engine.plan import prepared_switch
from dbuffer.errors import StoreAccessError
from dbuffer.io import changes
from dbuffer.io.changes import encode_found, find_on_device
from dbuffer.io.copier import Copier
from dbuffer.io.devices import PageLock
from dbuffer.receive.stager import DeviceMemory
from tests.support.deltas import random_step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
]

CYCLES = 200_000_000
"""About a tenth of a second of a kernel that only waits."""

SHAPES = models.qwen2_0_5b(width=0.25)


@pytest.fixture(params=["local", "network"])
def mount(request, monkeypatch):
    monkeypatch.setenv("DBUFFER_MOUNT", request.param)


def late(tensor, value):
    """Have the current stream write a tensor, after some time."""
    torch.cuda._sleep(CYCLES)
    tensor.fill_(value)


def various():
    """Tensors of many kinds: long, short, strided, empty, of all widths."""
    generator = torch.Generator("cuda").manual_seed(0)

    def bits(*shape, dtype=torch.int32):
        numbers = torch.randint(-(2**30), 2**30, shape, device="cuda", generator=generator)
        return numbers.to(dtype)

    return {
        "long": bits(3000, 10_007, dtype=torch.int16).view(torch.bfloat16),
        "strided": bits(999, 1001).float().t(),
        "sliced": bits(501, 700)[::2, ::3].double(),
        "bytes": bits(77, dtype=torch.uint8),
        "float8": bits(4096, 33, dtype=torch.uint8).view(torch.float8_e4m3fn),
        "complex": torch.randn(1000, dtype=torch.complex128, device="cuda"),
        "conjugate": torch.randn(99, dtype=torch.complex64, device="cuda").conj(),
        "flags": bits(12_345) > 0,
        "one": bits(),
        "none": bits(0, 4),
    } | {f"short.{number}": bits(number) for number in range(300)}


def require_equal(received, published):
    for name, tensor in published.items():
        right = tensor.resolve_conj().contiguous().reshape(-1).view(torch.uint8).cpu()
        mine = received[name].cpu().contiguous().reshape(-1).view(torch.uint8)
        assert torch.equal(mine, right), name


@pytest.mark.usefixtures("mount")
@pytest.mark.parametrize("checksum", [False, True])
def test_every_byte_goes_there_and_back(store, checksum):
    published = various()
    with (
        dbuffer.WeightSender(store, checksum=checksum) as sender,
        dbuffer.WeightReceiver(store) as receiver,
    ):
        for _ in range(5):  # buffers are page-locked when they are written again
            published["long"].view(torch.int16).add_(1)
            sender.send(published)
            with receiver.open() as snapshot:
                require_equal(snapshot.tensors, published)
            targets = {
                name: torch.zeros_like(tensor.resolve_conj()) for name, tensor in published.items()
            }
            receiver.load_into(targets)
            require_equal(targets, published)


def test_a_send_waits_for_kernels_that_write_the_weights(sender, receiver):
    weights = torch.zeros(5_000_000, device="cuda")
    for value, stream in enumerate([torch.cuda.Stream(), torch.cuda.default_stream()], 1):
        with torch.cuda.stream(stream):
            late(weights, value)
            sender.send({"w": weights})
        with receiver.open() as snapshot:
            assert snapshot.tensors["w"].unique().tolist() == [value]


def test_a_send_in_the_background_waits_for_the_kernels_before_it_and_no_others(sender, receiver):
    weights, other = torch.zeros(5_000_000, device="cuda"), torch.zeros(10, device="cuda")
    for value in (1, 2):
        with torch.cuda.stream(torch.cuda.Stream()):
            late(weights, value)
            pending = sender.send({"w": weights}, wait=False)
            late(other, value)
            pending.wait()
        with receiver.open() as snapshot:
            assert snapshot.tensors["w"].unique().tolist() == [value]
        torch.cuda.synchronize()


def test_a_load_is_in_order_with_the_caller_s_stream(sender, receiver):
    source, target = torch.zeros(5_000_000, device="cuda"), torch.zeros(5_000_000, device="cuda")
    source.fill_(3)
    sender.send({"w": source})
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(CYCLES)
        before = target.sum()  # reads what is there before the load
        receiver.load_into({"w": target})
        after = target.sum()
        assert (before.item(), after.item()) == (0, 15_000_000)


def test_a_captured_graph_computes_with_new_weights(sender, receiver):
    weights = torch.zeros(1000, 1000, device="cuda")
    ones, result = torch.ones(1000, device="cuda"), torch.zeros(1000, device="cuda")
    torch.mv(weights, ones, out=result)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        torch.mv(weights, ones, out=result)
    for value in (1.0, 2.0, 3.0):
        sender.send({"w": torch.full_like(weights, value)})
        receiver.load_into({"w": weights})
        graph.replay()
        assert result.unique().tolist() == [1000 * value]


def changed(weights, share):
    """Change such a share of each tensor's elements by one in the last place."""
    for tensor in weights.values():
        bits = tensor.view(-1).view(torch.int16)
        places = torch.randint(bits.numel(), (max(1, int(share * bits.numel())),), device="cuda")
        bits[places] ^= 1


@pytest.mark.usefixtures("mount")
@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn], ids=str)
def test_a_value_that_the_dtype_cannot_hold_is_refused(store, dtype, delta):
    largest = torch.finfo(dtype).max
    kinds = (torch.float64, torch.float32, torch.bfloat16, torch.float8_e5m2)
    weights = {str(kind): torch.ones(1000, device="cuda").to(kind) for kind in kinds}
    with dbuffer.WeightSender(store, dtype=dtype, delta=delta) as sender:
        assert sender.send(weights).version == 1
        for name in list(weights)[:3]:
            refused = weights | {name: weights[name] * 2 * largest}
            with pytest.raises(dbuffer.InvalidWeightsError, match=f"'{name}' cannot be cast"):
                sender.send(refused)
            with pytest.raises(dbuffer.InvalidWeightsError, match=f"'{name}' cannot be cast"):
                sender.send(refused, wait=False).wait()
        assert sender.send(weights).version == 2


@pytest.mark.usefixtures("mount")
@pytest.mark.parametrize("checksum", [False, True])
def test_deltas_of_weights_on_a_gpu(store, checksum):
    weights = {name: t.cuda() for name, t in models.random_weights(SHAPES).items()}
    weights["model.norm.weight"] = torch.ones(224, dtype=torch.bfloat16, device="cuda")
    with (
        dbuffer.WeightSender(store, delta=True, checksum=checksum) as sender,
        dbuffer.WeightReceiver(store) as receiver,
    ):
        target = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
        sizes = []
        for share in (0.01, 0.0001, 0.01, 0.5, 1.0, 0.01, 0.0):
            if share:
                changed(weights, share)
            weights["model.norm.weight"].view(torch.int16).add_(1)  # changes whole
            sizes.append(sender.send(weights).delta_bytes)
            receiver.load_into(target)
            require_equal(target, weights)
    assert [size is not None for size in sizes[1:5]] == [True, True, True, False]


def test_a_gpu_encodes_the_same_chunks_as_a_cpu(monkeypatch):
    """The weights take several comparisons, and have words of all sizes."""
    monkeypatch.setattr(changes, "DEVICE_BYTES", 16 << 20)
    copier, rng = Copier(2), np.random.default_rng(0)
    dtypes = ["bfloat16", "uint8", "float32", "complex128", "bfloat16"]
    sizes, shares = [20_000_003, 77_777, 3_000_001, 99_999, 5_000_000], [0.01, 0.2, 0.9, 0.1, 1.0]
    step = random_step(rng, dtypes, sizes, shares, copier)
    old, new = (step.contents(of_after=after).data.cuda() for after in (False, True))
    found = find_on_device(old, new, step.layout)
    assert len(found) > 3
    encoded = encode_found(found, step.layout, copier, step.layout.offsets)
    assert [body for _, body in encoded.chunks] == step.chunks
    copier.close()


@pytest.mark.parametrize("whole", [(), ("model.norm.weight",)])
def test_an_engine_is_patched_with_a_delta(store, monkeypatch, whole):
    """Also where a tensor has changed whole, which is copied beside the patches."""
    monkeypatch.setattr(prepared_switch, "log_copied_whole", pytest.fail)
    weights = {name: t.cuda() for name, t in models.random_weights(SHAPES).items()}
    with (
        dbuffer.WeightSender(store, delta=True) as sender,
        PlannedReceiver(store, SHAPES, torch.device("cuda")) as engine,
    ):
        for _ in range(4):
            changed(weights, 0.01)
            for name in whole:
                weights[name] += 1
            sender.send(weights)
            switched = engine.switch()
            engine.require_right(weights)
            assert engine.attest_s() > 0
    assert switched.is_patched


def test_an_engine_is_not_patched_where_something_wrote_to_it(store):
    weights = {name: t.cuda() for name, t in models.random_weights(SHAPES).items()}
    with (
        dbuffer.WeightSender(store, delta=True) as sender,
        PlannedReceiver(store, SHAPES, torch.device("cuda")) as engine,
    ):
        for _ in range(4):
            changed(weights, 0.01)
            sender.send(weights)
            engine.switch()
            engine.attest_s()
            next(engine.model.parameters()).data.view(-1)[:1] += 1
        changed(weights, 0.01)
        sender.send(weights)
        engine.switch()
        engine.require_right(weights)


@pytest.mark.parametrize("room_bytes", [0, 100 << 20, 1 << 40])
def test_a_version_is_staged_in_a_gpu_s_memory(store, monkeypatch, room_bytes):
    monkeypatch.setattr(DeviceMemory, "room", lambda memory: room_bytes)
    weights = {name: t.cuda() for name, t in models.random_weights(SHAPES).items()}
    device = torch.device("cuda")
    with (
        dbuffer.WeightSender(store) as sender,
        PlannedReceiver(store, SHAPES, device, stages_on_device=True) as engine,
    ):
        for _ in range(4):
            changed(weights, 1.0)
            sender.send(weights)
            engine.switch()
            engine.require_right(weights)
            engine.attest_s()


@pytest.mark.parametrize("share", [0.01, 1.0])
def test_a_device_without_room(store, share):
    """Sends, deltas, loads and switches go on with 40 MiB left."""
    weights = {name: t.cuda() for name, t in models.random_weights(SHAPES).items()}
    on_device = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    with (
        dbuffer.WeightSender(store, delta=True) as sender,
        dbuffer.WeightReceiver(store) as receiver,
        PlannedReceiver(store, SHAPES, torch.device("cuda")) as engine,
    ):
        for _ in range(2):
            changed(weights, share)
            sender.send(weights)
            engine.switch()
        gc.collect()
        torch.cuda.empty_cache()
        changed_in_advance = {name: tensor.clone() for name, tensor in weights.items()}
        changed(changed_in_advance, share)
        torch.cuda.empty_cache()
        free_bytes, _ = torch.cuda.mem_get_info()
        filler = torch.empty(free_bytes - (40 << 20), dtype=torch.uint8, device="cuda")
        sender.send(changed_in_advance)
        receiver.load_into(on_device)
        engine.switch()
        del filler
        require_equal(on_device, changed_in_advance)
        engine.require_right(changed_in_advance)


def test_a_page_lock_that_is_refused_leaves_no_error_behind():
    memory = torch.zeros(1 << 20, dtype=torch.uint8)
    lock = PageLock(memory.data_ptr(), memory.numel())
    with pytest.raises(StoreAccessError, match="page-locked"):
        PageLock(memory.data_ptr(), memory.numel())
    assert torch.ones(3, device="cuda").sum().item() == 3
    lock.release()
    lock.release()
    assert not memory.is_pinned()


def test_a_store_that_is_gone_is_unlocked(sender, store):
    weights = {"w": torch.ones(20_000_000, device="cuda")}
    for _ in range(6):
        sender.send(weights)
    sender.close()
    gc.collect()
    # Pages that stay locked would be refused a second time.
    with dbuffer.WeightSender(store) as second:
        for _ in range(6):
            second.send(weights)
