"""Environments, policies and collectors for the tests of TorchRL's schemes.

Worker processes are forked off a process that has imported torchrl already: a collector then
starts in a tenth of a second instead of five. What runs in workers stands here, where they and
Ray's actors can import it without pytest.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import forkserver
from typing import Any

with warnings.catch_warnings():
    # torchrl warns of its own legacy classes, and of torch's, as it is imported.
    warnings.simplefilter("ignore", DeprecationWarning)
    import torch
    from tensordict import TensorDict
    from tensordict.nn import TensorDictModule, TensorDictModuleBase
    from torch import nn
    from torchrl import collectors as collectors
    from torchrl.collectors import MultiSyncCollector
    from torchrl.collectors import distributed as distributed
    from torchrl.data import Composite, Unbounded
    from torchrl.envs import EnvBase

    from dbuffer.integrations.torchrl import DoubleBufferSyncScheme

from dbuffer.testing.waiting import TIMEOUT_S, until

TORN = -1.0
"""What `WholePolicy` does when its weights are of two versions."""


@contextlib.contextmanager
def start_method(name: str | None) -> Iterator[None]:
    """Let collectors start their processes by this method; None: by TorchRL's default, spawn."""
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method(name, force=True)
    try:
        yield
    finally:
        multiprocessing.set_start_method(before, force=True)


def forkserver_address() -> str:
    """Where the process listens that others are forked off."""
    forkserver._forkserver.ensure_running()
    address: str = forkserver._forkserver._forkserver_address
    return address


def use_forkserver(address: str) -> None:
    """Fork off that process from here, too.

    Python gives a process that was forked off it a server of its own, without the imports.
    """
    forkserver._forkserver._forkserver_address = address
    forkserver._forkserver.ensure_running = lambda: None


class ProbeEnv(EnvBase):
    """Takes any action, a single number, and never ends."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_spec = Composite(observation=Unbounded(shape=(1,)))
        self.action_spec = Unbounded(shape=(1,))
        self.reward_spec = Unbounded(shape=(1,))

    def _reset(self, tensordict: Any = None, **_: Any) -> TensorDict:
        return TensorDict({"observation": torch.zeros(1)})

    def _step(self, tensordict: Any) -> TensorDict:
        done = self.full_done_spec.zero()
        return TensorDict({"observation": torch.zeros(1), "reward": torch.zeros(1), **done})

    def _set_seed(self, seed: int | None) -> None:
        pass


class SlowEnv(ProbeEnv):
    """Takes its time for each step."""

    def _step(self, tensordict: Any) -> TensorDict:
        time.sleep(0.02)
        return super()._step(tensordict)


class NodeEnv:
    """Makes a `ProbeEnv`; a node that it is sent to starts its workers as `start_method` says."""

    def __init__(self) -> None:
        self._forkserver = forkserver_address()

    def __call__(self) -> ProbeEnv:
        return ProbeEnv()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        use_forkserver(self._forkserver)


class LateEnv(NodeEnv):
    """Keeps its node waiting."""

    def __call__(self) -> ProbeEnv:
        if multiprocessing.parent_process().name != "MainProcess":
            time.sleep(2.0)
        return super().__call__()


class ValuedEnv(ProbeEnv):
    """An environment with a model of its own, whose output is the reward."""

    def __init__(self) -> None:
        super().__init__()
        self.value_net = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(self.value_net.weight)

    def _step(self, tensordict: Any) -> TensorDict:
        return super()._step(tensordict).set("reward", self.value_net(torch.ones(1)).detach())


class ConstantPolicy(TensorDictModuleBase):
    """Acts by its one weight, a tensor without dimensions."""

    def __init__(self, weight: float = 1.0) -> None:
        super().__init__()
        self.in_keys = []
        self.out_keys = ["action"]
        self.weight = nn.Parameter(torch.tensor(weight))

    def forward(self, tensordict: Any) -> Any:
        return tensordict.set("action", self.weight.detach().expand(*tensordict.shape, 1).clone())


class WholePolicy(TensorDictModuleBase):
    """A parameter, another one in a submodule, a buffer and extra state that all say the same.

    It looks at them all through a slow forward call, and acts by what they say; or by `TORN`.
    """

    def __init__(self, value: float = 0.0, numel: int = 200_000, forward_s: float = 0.004) -> None:
        super().__init__()
        self.in_keys = []
        self.out_keys = ["action"]
        self.forward_s = forward_s
        self.first = nn.Parameter(torch.full((numel,), value))
        self.inner = nn.Linear(numel // 100, 100)
        self.register_buffer("buffer", torch.full((numel,), value))
        self.stamp = torch.tensor(value)
        self.say(value)

    def say(self, value: float) -> None:
        for tensor in (*self.parameters(), *self.buffers(), self.stamp):
            tensor.detach().fill_(value)

    def get_extra_state(self) -> dict[str, torch.Tensor]:
        return {"stamp": self.stamp.clone()}

    def set_extra_state(self, state: Mapping[str, torch.Tensor]) -> None:
        self.stamp = state["stamp"].clone()

    def forward(self, tensordict: Any) -> Any:
        seen = set(self._look())
        time.sleep(self.forward_s)
        seen.update(self._look())
        action = seen.pop() if len(seen) == 1 else TORN
        return tensordict.set("action", torch.full((*tensordict.shape, 1), action))

    def _look(self) -> Iterator[float]:
        for tensor in (self.first, self.inner.weight, self.inner.bias, self.buffer, self.stamp):
            yield float(tensor.detach().min())
            yield float(tensor.detach().max())


class StatefulPolicy(ConstantPolicy):
    """Acts by its weight plus a number that is neither parameter nor buffer."""

    def __init__(self, weight: float = 0.0, offset: float = 0.0) -> None:
        super().__init__(weight)
        self.offset = torch.tensor(offset)
        self.names = ["a", "b"]

    def get_extra_state(self) -> dict[str, Any]:
        return {"offset": self.offset, "names": self.names}

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        if float(state["offset"]) == 13.0:
            raise ValueError("13 is not a number that I take")
        self.offset, self.names = torch.as_tensor(state["offset"]).clone(), state["names"]

    def forward(self, tensordict: Any) -> Any:
        super().forward(tensordict)
        return tensordict.set("action", tensordict["action"] + self.offset)


class BarePolicy(nn.Module):
    """Takes an observation, and knows nothing of TensorDicts: collectors wrap it."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1)
        with torch.no_grad():
            self.linear.bias.fill_(value)

    def forward(self, observation: torch.Tensor) -> Any:
        return self.linear(observation).detach()


class AwkwardModel(nn.Module):
    """Every kind of tensor that a policy may hold."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.scalar = nn.Parameter(torch.randn((), generator=generator))
        self.transposed = nn.Parameter(torch.randn(5, 3, generator=generator).t())
        self.tied_to = nn.Linear(4, 4)
        self.tied = nn.Linear(4, 4, bias=False)
        self.tied.weight = self.tied_to.weight
        self.frozen = nn.Parameter(torch.randn(3, generator=generator), requires_grad=False)
        self.in_bfloat16 = nn.Parameter(torch.randn(7, generator=generator).bfloat16())
        self.no_elements = nn.Parameter(torch.zeros(0, 3))
        self.register_buffer("count", torch.tensor(seed))
        self.register_buffer("mask", torch.rand(6, generator=generator) > 0.5)
        self.register_buffer("strided", torch.randn(8, generator=generator)[::2])
        # No state dict has it, but a worker that began on the meta device must get it.
        self.register_buffer("unsaved", torch.tensor(float(seed)), persistent=False)
        with torch.no_grad():
            self.tied_to.weight.fill_(seed)
            self.tied_to.bias.fill_(seed + 0.5)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return observation + self.scalar.detach() + self.unsaved


def linear_policy(value: float = 1.0) -> TensorDictModule:
    """A policy whose action is its one weight, below ``module.weight``, with a bias of zero."""
    linear = nn.Linear(1, 1)
    with torch.no_grad():
        linear.weight.zero_()
        linear.bias.fill_(value)
    return TensorDictModule(linear, in_keys=["observation"], out_keys=["action"])


def constant_factory(value: float) -> Callable[[], ConstantPolicy]:
    """A factory of its own for each value."""
    return lambda: ConstantPolicy(value)


@contextlib.contextmanager
def collecting(
    policy: Any,
    schemes: DoubleBufferSyncScheme | Mapping[str, DoubleBufferSyncScheme],
    *,
    collector_class: Callable[..., Any] = MultiSyncCollector,
    env: Callable[[], EnvBase] = ProbeEnv,
    num_workers: int = 2,
    frames: int = 4,
    **options: Any,
) -> Iterator[Any]:
    """A collector over our scheme; for a MultiSyncCollector, a batch has one row a worker."""
    by_model = dict(schemes) if isinstance(schemes, Mapping) else {"policy": schemes}
    # torchrl warns of what its next version will do if this is not said.
    options = {"auto_register_policy_transforms": False, **options}
    if collector_class is MultiSyncCollector:
        options = {"cat_results": "stack", **options}
    with contextlib.ExitStack() as stack:
        for scheme in by_model.values():
            stack.callback(scheme.shutdown)  # multi-process collectors do not
        collector = collector_class(
            [env] * num_workers,
            policy,
            frames_per_batch=frames * num_workers,
            total_frames=-1,
            weight_sync_schemes=by_model,
            **options,
        )
        stack.callback(collector.shutdown)
        yield collector


def comes_to(collector: Any, read: Callable[[Any], Any], expected: Any) -> None:
    """Take batches until what is read of them is as expected, for some in a row.

    Asynchronous workers may have begun batches already, and a slow one may deliver its own after
    many of another's.
    """
    in_a_row = 0

    def is_steady() -> bool:
        nonlocal in_a_row
        in_a_row = in_a_row + 1 if read(collector.next()) == expected else 0
        return in_a_row == 2 * collector.num_workers

    until(f"batches come to {expected}", is_steady, TIMEOUT_S, every_s=0)


def actions(collector: Any) -> list[list[float]]:
    """The next batch's actions, by worker."""
    batch = collector.next()
    return batch["action"].reshape(collector.num_workers, -1).tolist()


def acts(collector: Any) -> list[float]:
    """The one number by which each worker acts in the next batch."""
    rows = actions(collector)
    assert all(len(set(row)) == 1 for row in rows), rows
    return [row[0] for row in rows]


def worker_state(collector: Any, worker: int) -> dict[str, Any]:
    """The state dict of a worker's policy."""
    state: dict[str, Any] = collector.state_dict()[f"worker{worker}"]["policy_state_dict"]
    return state


def assert_same_state(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    assert list(found) == list(expected)
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert found[name].dtype == value.dtype, name
            assert torch.equal(found[name], value), name
