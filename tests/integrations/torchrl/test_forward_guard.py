"""`ForwardGuard`: forward calls and loading exclude each other, and nothing waits for itself."""

from __future__ import annotations

import asyncio
import copy
import pickle
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from dbuffer import WeightsMismatchError
from dbuffer.integrations.torchrl import forward_guard
from dbuffer.integrations.torchrl.forward_guard import ForwardGuard

WAIT_S = 30.0
SOON_S = 0.1


class Steps(nn.Module):
    """A model whose forward calls, one in the other, can be stopped in their middle."""

    def __init__(self) -> None:
        super().__init__()
        self.entered = threading.Semaphore(0)
        self.may_leave = threading.Semaphore(0)

    def forward(self, depth: int = 0) -> int:
        self.entered.release()
        assert self.may_leave.acquire(timeout=WAIT_S)
        return 1 + self(depth - 1) if depth else 1


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as pool:
        yield pool


@pytest.fixture
def guard() -> ForwardGuard:
    return ForwardGuard()


@pytest.fixture
def model(guard: ForwardGuard) -> Steps:
    model = Steps()
    guard.attach(model)
    return model


def load(guard: ForwardGuard) -> None:
    with guard.loading():
        pass


def assert_waits(future: Future[Any]) -> None:
    with pytest.raises(TimeoutError):
        future.result(SOON_S)


COMPILED = pytest.mark.parametrize(
    "derive", [lambda model: model, partial(torch.compile, backend="eager")], ids=["", "compiled"]
)


@COMPILED
def test_loading_waits_for_a_forward_call_that_runs_and_keeps_new_ones_out(
    pool, guard, model, derive
):
    twin = derive(model)
    first = pool.submit(twin)
    assert model.entered.acquire(timeout=WAIT_S)
    loading = pool.submit(load, guard)
    assert_waits(loading)
    second = pool.submit(twin)
    assert not model.entered.acquire(timeout=SOON_S)
    model.may_leave.release()
    loading.result(WAIT_S)
    model.may_leave.release()
    assert first.result(WAIT_S) == second.result(WAIT_S) == 1


def test_a_forward_call_waits_for_loading(pool, guard, model):
    model.may_leave.release()
    with guard.loading():
        load(guard)
        forward = pool.submit(model)
        assert not model.entered.acquire(timeout=SOON_S)
    assert forward.result(WAIT_S) == 1


def test_forward_calls_do_not_wait_for_each_other(pool, model):
    calls = [pool.submit(model) for _ in range(3)]
    for _ in calls:
        assert model.entered.acquire(timeout=WAIT_S)
    model.may_leave.release(3)
    assert [call.result(WAIT_S) for call in calls] == [1, 1, 1]


def test_a_model_that_calls_itself_does_not_wait_for_itself(pool, guard, model):
    forward = pool.submit(model, 3)
    assert model.entered.acquire(timeout=WAIT_S)
    loading = pool.submit(load, guard)
    assert_waits(loading)
    model.may_leave.release(3)
    for _ in range(3):
        assert model.entered.acquire(timeout=WAIT_S)
    assert_waits(loading)
    model.may_leave.release()
    loading.result(WAIT_S)
    assert forward.result(WAIT_S) == 4


class Interrupted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.error: type[BaseException] | None = None

    def forward(self, depth: int = 1) -> int:
        if depth:
            return self(depth - 1)
        error, self.error = self.error, None
        if error is not None:
            raise error
        return 1


@COMPILED
@pytest.mark.parametrize(
    "error", [ValueError, KeyboardInterrupt, SystemExit, asyncio.CancelledError]
)
def test_a_forward_call_that_raises_is_over(pool, guard, derive, error):
    model = Interrupted()
    guard.attach(model)
    twin = derive(model)
    model.error = error
    with pytest.raises(error):
        twin()
    with guard.loading():  # in the thread of that call
        forward = pool.submit(twin)
        assert_waits(forward)
    assert forward.result(WAIT_S) == 1
    model.error = error
    with pytest.raises(error):
        pool.submit(twin).result(WAIT_S)
    load(guard)
    with guard.loading():
        forward = pool.submit(twin)  # in the same thread, maybe
        assert_waits(forward)
    assert forward.result(WAIT_S) == 1


class Helped(nn.Module):
    def __init__(self, pool: ThreadPoolExecutor) -> None:
        super().__init__()
        self.pool = pool
        self.entered = threading.Event()
        self.may_ask = threading.Event()

    def forward(self, helpers: int) -> int:
        if not helpers:
            return 1
        self.entered.set()
        assert self.may_ask.wait(WAIT_S)
        return sum(self.pool.submit(self, 0).result(WAIT_S) for _ in range(helpers))


def test_a_forward_call_may_wait_for_another_threads_while_a_load_waits(pool, guard, monkeypatch):
    monkeypatch.setattr(forward_guard, "_PATIENCE_S", SOON_S)
    model = Helped(pool)
    guard.attach(model)
    forward = pool.submit(model, 3)
    assert model.entered.wait(WAIT_S)
    loading = pool.submit(load, guard)
    assert_waits(loading)
    model.may_ask.set()
    assert forward.result(WAIT_S) == 3
    loading.result(WAIT_S)


class Slow(nn.Module):
    def forward(self) -> None:
        time.sleep(0.2)


def test_forward_calls_without_a_gap_do_not_keep_loading_waiting(pool, guard):
    """Each of three threads begins a call while another's runs."""
    model = Slow()
    guard.attach(model)
    is_loaded = threading.Event()

    def run(first_s: float) -> None:
        time.sleep(first_s)
        while not is_loaded.is_set():
            model()

    running = [pool.submit(run, first_s) for first_s in (0.0, 0.07, 0.14)]
    try:
        pool.submit(load, guard).result(WAIT_S)
    finally:
        is_loaded.set()
    for future in running:
        future.result(WAIT_S)


def test_a_model_that_is_refused_does_not_run_until_it_is_accepted(guard):
    linear = nn.Linear(2, 2)
    guard.attach(linear)
    guard.refuse("half of it is of version 3")
    for _ in range(2):
        with pytest.raises(WeightsMismatchError, match="half of it is of version 3") as refused:
            linear(torch.ones(2))
        assert refused.value.__notes__ == ["the model may hold parts of two versions"]
    with guard.loading():  # a refused call counts as none that runs
        pass
    guard.accept()
    linear(torch.ones(2))


def test_attaching_again_changes_nothing(guard):
    linear = nn.Linear(2, 2)
    for _ in range(3):
        guard.attach(linear)
    assert len(linear._forward_pre_hooks) == len(linear._forward_hooks) == 1
    guard.attach(lambda x: x)  # a policy that is no module has nothing to guard


@pytest.mark.parametrize("derive", [copy.deepcopy, partial(torch.compile, backend="eager")])
def test_a_copy_of_the_model_and_a_compiled_one_are_guarded_with_it(pool, guard, derive):
    linear = nn.Linear(2, 2)
    guard.attach(linear)
    twin = derive(linear)
    twin(torch.ones(2))
    with guard.loading():
        forward = pool.submit(twin, torch.ones(2))
        assert_waits(forward)
    assert isinstance(forward.result(WAIT_S), torch.Tensor)


def test_a_model_travels_to_another_process_with_a_guard_of_its_own(guard):
    linear = nn.Linear(2, 2)
    guard.attach(linear)
    with guard.loading():
        elsewhere = pickle.loads(pickle.dumps(linear))
        elsewhere(torch.ones(2))
