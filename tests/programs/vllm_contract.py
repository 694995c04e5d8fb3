"""vLLM 0.23 and 0.24: the contract that their documents give for a weight transfer's engine."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import dbuffer
from dbuffer.testing.waiting import TIMEOUT_S
from tests.support.engines.vllm_engines import judge

WEIGHTS = {"a": torch.arange(12.0).view(3, 4), "b": torch.arange(6.0)}


def backend() -> Any:
    from dbuffer.integrations.vllm.backend import DBufferWeightTransferEngine

    return DBufferWeightTransferEngine


class Model(torch.nn.Module):
    """Parameters by the names of :data:`WEIGHTS`, and vLLM's functions that load them."""

    def __init__(self) -> None:
        super().__init__()
        for name, tensor in WEIGHTS.items():
            self.register_parameter(name, torch.nn.Parameter(torch.zeros_like(tensor)))
        self.num_patched = 0

    @torch.no_grad()
    def load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self.get_parameter(name).copy_(tensor)

    @torch.no_grad()
    def apply_patches(self, patches: list[Any]) -> None:
        for patch in patches:
            assert patch.indices.dtype is torch.int32
            assert patch.indices.ndim == patch.values.ndim == 1
            flat = self.get_parameter(patch.name).data.view(-1)
            flat.index_copy_(0, patch.indices.long(), patch.values)
            self.num_patched += len(patch.indices)

    def has(self, weights: dict[str, torch.Tensor]) -> bool:
        return all(torch.equal(self.get_parameter(name), weights[name]) for name in weights)


def alone(world_size: int = 1) -> Any:
    return SimpleNamespace(world_size=world_size, rank=0, data_parallel_size=1)


class Case:
    """An engine as the documents make one, its model, and a sender to its store."""

    def __init__(self, store: Path) -> None:
        self.store, self.model = store, Model()
        self.engine = backend()(SimpleNamespace(backend="dbuffer"), alone(), self.model)
        start(self)
        self.sender = dbuffer.WeightSender(store, delta=True, keep=3)

    def receive(self, **info: Any) -> None:
        self.engine.receive_weights(self.engine.parse_update_info(info), self.model.load_weights)

    def receive_sparse(self, num_updates: int, **info: Any) -> None:
        info |= {"update_kind": "sparse_flat", "num_updates_list": [num_updates]}
        parsed = self.engine.parse_update_info(info)
        self.engine.receive_sparse_weights(parsed, self.model.apply_patches)

    def close(self) -> None:
        self.sender.close()
        self.engine.shutdown()


def patch(name: str, places: list[int], values: list[float]) -> Any:
    indices = torch.tensor(places, dtype=torch.int32)
    return SimpleNamespace(name=name, indices=indices, values=torch.tensor(values))


def take_dense_and_sparse_updates(case: Case) -> None:
    start(case, engine_id="the-engine")
    version = case.engine.trainer_send_weights(iter(WEIGHTS.items()), {"sender": case.sender})
    case.receive(version=version)
    assert case.model.has(WEIGHTS)
    case.sender.wait_applied(version, receivers="the-engine", timeout_s=TIMEOUT_S)
    patches = iter([patch("a", [1, 6], [9.0, 8.0])])
    arguments = SimpleNamespace(sender=case.sender)
    version = case.engine.trainer_send_sparse_weights(_iterator=patches, _trainer_args=arguments)
    case.receive_sparse(2, version=version)
    after = WEIGHTS["a"].clone()
    after.view(-1)[[1, 6]] = torch.tensor([9.0, 8.0])
    assert case.model.has({"a": after, "b": WEIGHTS["b"]})
    assert case.model.num_patched == 18  # all of it is handed over

    def fail(_: Any) -> None:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        case.engine.receive_weights(case.engine.parse_update_info({}), fail)
    after = {name: tensor + 1 for name, tensor in WEIGHTS.items()}
    case.sender.send(after)
    case.receive_sparse(1, at_least=version + 1)
    assert case.model.has(after)
    assert case.model.num_patched == 36


def name_parameters(case: Case) -> None:
    config = SimpleNamespace(backend="dbuffer")
    engine = backend()(config=config, parallel_config=alone(), model=case.model)
    assert (engine.config, engine.model) == (config, case.model)
    with pytest.raises(TypeError):
        backend()(config, alone(), case.model, "more", "still more")


def refuse(case: Case) -> None:
    info = case.engine.parse_update_info({})
    with pytest.raises(dbuffer.UnsupportedError):
        backend()(None, alone(), case.model).receive_weights(info, print)
    with pytest.raises(dbuffer.UnsupportedError, match="2 ranks"):
        backend()(None, alone(2), case.model)
    with pytest.raises(dbuffer.WaitTimeoutError):
        case.receive()
    with pytest.raises(dbuffer.OptionError, match="load_weights"):
        case.engine.receive_weights(info)
    with pytest.raises(dbuffer.VersionError):
        case.engine.trainer_send_sparse_weights([patch("a", [1], [1.0])], {"sender": case.sender})
    for nothing in (None, {}, {"sender": None}, SimpleNamespace(group=1)):
        with pytest.raises(dbuffer.OptionError, match="'sender'"):
            case.engine.trainer_send_weights(iter(WEIGHTS.items()), nothing)


def choose_versions(case: Case) -> None:
    another = "f" * 16
    with pytest.raises(dbuffer.UnsupportedError, match="local_store"):
        start(case, local_store=f"{case.store}-local")
    for step in (1, 2, 3):
        case.sender.send({name: tensor * step for name, tensor in WEIGHTS.items()})
    start(case, version=2)
    case.receive()
    assert case.model.has({name: tensor * 2 for name, tensor in WEIGHTS.items()})
    with pytest.raises(dbuffer.OptionError, match="stays on version 2"):
        case.receive(version=3)
    start(case, timeout_s=0.1)
    with pytest.raises(dbuffer.WaitTimeoutError):
        case.receive(at_least=4)
    case.receive(at_least=3)
    assert case.model.has({name: tensor * 3 for name, tensor in WEIGHTS.items()})
    for request, words in (
        ({"version": 3, "run": another}, "is not in"),
        ({"at_least": 3, "run": another}, "is not in"),
        ({"version": 2}, "never go back"),
    ):
        with pytest.raises(dbuffer.VersionError, match=words):
            case.receive(**request)
    case.sender.close()
    shutil.rmtree(case.store)
    case.sender = dbuffer.WeightSender(case.store, delta=True)
    case.sender.send(WEIGHTS)
    with pytest.raises(dbuffer.VersionRegressedError):
        case.receive()


def refuse_positions_past_32_bits(case: Case) -> None:
    """vLLM's patches have positions of 32 bits. The long tensor repeats a single element."""
    long = torch.zeros(1, dtype=torch.uint8).expand(2**31)
    handed: list[Any] = []

    @contextlib.contextmanager
    def opened(_: Any) -> Iterator[Any]:
        yield [("long", long)]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(case.engine, "_opened", opened)
        patched.setattr(torch, "arange", lambda *_, **__: torch.empty(0))  # else of 8 GiB
        patched.setattr(torch.Tensor, "flatten", lambda tensor: tensor[:0])
        with pytest.raises(dbuffer.EngineUpdateError, match=f"long has {2**31} elements"):
            case.engine.receive_sparse_weights(None, handed.extend)
        assert not handed
        long = long[1:]
        case.engine.receive_sparse_weights(None, handed.extend)
    assert len(handed) == 1


def start(case: Case, **options: Any) -> None:
    info = {"store": str(case.store), **options}
    case.engine.init_transfer_engine(case.engine.parse_init_info(info))


def check_update_info(case: Case) -> None:
    sparse = {"update_kind": "sparse_flat", "num_updates_list": [0, 2]}
    info_class = case.engine.update_info_cls
    for right in ({}, sparse, sparse | {"names": ["a", "b"], "version": 3}):
        for info in (info_class(**right), case.engine.parse_update_info(right)):
            assert info.num_updates_list == right.get("num_updates_list")
            assert info.update_kind == right.get("update_kind", "dense")
            assert info.version == right.get("version")
    for wrong in (
        sparse | {"names": ["a"]},
        {"update_kind": "sparse_flat"},
        sparse | {"num_updates_list": []},
        sparse | {"num_updates_list": [-1]},
        sparse | {"num_updates_list": [True]},
        sparse | {"num_updates_list": 2},
        {"num_updates_list": [2]},
        sparse | {"update_kind": "sparse"},
        sparse | {"names": "a"},
        {"names": ["a"]},
        {"version": 0},
    ):
        for make in (lambda values: info_class(**values), case.engine.parse_update_info):
            with pytest.raises(dbuffer.OptionError):
                make(wrong)
    with pytest.raises(dbuffer.OptionError, match=r"nothing but version, .*, num_updates_list$"):
        case.engine.parse_update_info(sparse | {"versions": 3})


def run(place: Path) -> None:
    checks = (
        take_dense_and_sparse_updates,
        name_parameters,
        refuse,
        choose_versions,
        refuse_positions_past_32_bits,
        check_update_info,
    )
    for mount in ("local", "network"):
        os.environ["DBUFFER_MOUNT"] = mount
        for check in checks:
            case = Case(place / mount / check.__name__)
            check(case)
            case.close()


if __name__ == "__main__":
    judge(run)
