"""`ForwardGuard`: forward calls and loading exclude each other, and nothing waits for itself."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from dbuffer import WeightsMismatchError
from dbuffer.integrations.torchrl.forward_guard import ForwardGuard

WAIT_S = 30.0
SOON_S = 0.1


class Steps(nn.Module):
    """A model whose forward call can be stopped in its middle."""

    def __init__(self) -> None:
        super().__init__()
        self.entered = threading.Semaphore(0)
        self.may_leave = threading.Semaphore(0)

    def forward(self, x: int) -> int:
        self.entered.release()
        assert self.may_leave.acquire(timeout=WAIT_S)
        return x + 1


def in_thread(action: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(action())
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, results


@pytest.fixture
def guard() -> ForwardGuard:
    return ForwardGuard()


@pytest.fixture
def model(guard: ForwardGuard) -> Steps:
    model = Steps()
    guard.attach(model)
    return model


def load(guard: ForwardGuard, loaded: threading.Event) -> None:
    with guard.loading():
        loaded.set()


def test_loading_waits_for_a_forward_call_that_runs(guard, model):
    forward, result = in_thread(lambda: model(1))
    assert model.entered.acquire(timeout=WAIT_S)
    loaded = threading.Event()
    loading, _ = in_thread(lambda: load(guard, loaded))
    assert not loaded.wait(SOON_S)
    model.may_leave.release()
    assert loaded.wait(WAIT_S)
    forward.join()
    loading.join()
    assert result == [2]


def test_a_forward_call_waits_for_loading(guard, model):
    model.may_leave.release()
    with guard.loading():
        forward, result = in_thread(lambda: model(1))
        assert not model.entered.acquire(timeout=SOON_S)
    forward.join()
    assert result == [2]


def test_loading_that_waits_keeps_new_forward_calls_out(guard, model):
    first, _ = in_thread(lambda: model(1))
    assert model.entered.acquire(timeout=WAIT_S)
    loaded = threading.Event()
    loading, _ = in_thread(lambda: load(guard, loaded))
    assert not loaded.wait(SOON_S)
    second, _ = in_thread(lambda: model(1))
    assert not model.entered.acquire(timeout=SOON_S)
    model.may_leave.release(2)
    for thread in (first, loading, second):
        thread.join(WAIT_S)
        assert not thread.is_alive()
    assert loaded.is_set()


def test_forward_calls_do_not_wait_for_each_other(model):
    threads = [in_thread(lambda: model(1))[0] for _ in range(3)]
    for _ in threads:
        assert model.entered.acquire(timeout=WAIT_S)
    model.may_leave.release(3)
    for thread in threads:
        thread.join()


def test_loading_may_be_entered_again_by_the_same_thread(guard, model):
    model.may_leave.release()
    with guard.loading():
        with guard.loading():
            pass
        forward, result = in_thread(lambda: model(1))
        assert not model.entered.acquire(timeout=SOON_S)
    forward.join()
    assert result == [2]


def test_a_model_that_calls_itself_does_not_wait_for_itself(guard):
    class Recursive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.is_inside = threading.Event()
            self.may_go_on = threading.Event()

        def forward(self, depth: int) -> int:
            self.is_inside.set()
            assert self.may_go_on.wait(WAIT_S)
            return depth if depth == 3 else self(depth + 1)

    model = Recursive()
    guard.attach(model)
    forward, result = in_thread(lambda: model(0))
    assert model.is_inside.wait(WAIT_S)
    loaded = threading.Event()
    loading, _ = in_thread(lambda: load(guard, loaded))
    assert not loaded.wait(SOON_S)
    model.may_go_on.set()
    for thread in (forward, loading):
        thread.join(WAIT_S)
        assert not thread.is_alive()
    assert result == [3]


def test_a_forward_call_that_raises_is_over(guard):
    linear = nn.Linear(2, 2)
    guard.attach(linear)
    with pytest.raises(RuntimeError, match="shape"):
        linear(torch.ones(3))
    loading, _ = in_thread(lambda: load(guard, threading.Event()))
    loading.join(WAIT_S)
    assert not loading.is_alive()


def test_a_model_that_is_refused_does_not_run_until_it_is_accepted(guard):
    linear = nn.Linear(2, 2)
    guard.attach(linear)
    guard.refuse("half of it is of version 3")
    for _ in range(2):
        with pytest.raises(WeightsMismatchError, match="half of it is of version 3"):
            linear(torch.ones(2))
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
def test_a_copy_of_the_model_and_a_compiled_one_are_guarded_with_it(guard, derive):
    linear = nn.Linear(2, 2)
    guard.attach(linear)
    twin = derive(linear)
    twin(torch.ones(2))
    with guard.loading():
        forward, result = in_thread(lambda: twin(torch.ones(2)))
        forward.join(SOON_S)
        assert forward.is_alive()
    forward.join()
    assert isinstance(result[0], torch.Tensor)


def test_a_model_travels_to_another_process_with_a_guard_of_its_own(guard):
    linear = nn.Linear(2, 2)
    guard.attach(linear)
    with guard.loading():
        elsewhere = pickle.loads(pickle.dumps(linear))
        elsewhere(torch.ones(2))
