"""`dbuffer.testing`, as other projects use it in their tests."""

from __future__ import annotations

import itertools
import os
import shutil
from typing import Any

import pytest
import torch

import dbuffer
from dbuffer.testing.patterns import SMALL
from dbuffer.testing.processes import SenderProcess
from tests.support.children import start_server
from tests.support.patterns import newest


@pytest.fixture(autouse=True)
def quick_children():
    start_server()


def test_a_sender_in_another_process_has_a_store_while_it_is_there():
    with SenderProcess() as sender:
        assert sender.publish(SMALL.weights(1), metadata={"step": 10}).version == 1
        assert newest(sender.store) == 1
        with pytest.raises(dbuffer.StoreBusyError, match=str(sender.pid)):
            SenderProcess(sender.store)
        with pytest.raises(dbuffer.OptionError):
            SenderProcess(num_threads=0)
        with pytest.raises(dbuffer.InvalidWeightsError):
            sender.publish({"a": torch.ones(3).to_sparse()})
        assert sender.publish(SMALL.weights(2)).version == 2
    assert not sender.store.parent.exists()


def test_a_sender_is_killed_at_each_call_that_changes_the_store(store):
    with SenderProcess(store, checksum=True) as sender:
        sender.publish(SMALL.weights(1))
    seen = []
    for number in itertools.count(1):
        copied = store.with_name("copied")
        shutil.copytree(store, copied)
        with SenderProcess(copied, checksum=True, num_threads=1) as sender:
            is_killed = sender.was_killed_at(number, SMALL.weights(2))
            if not is_killed:
                assert sender.publish(SMALL.weights(3)).version == 3
        seen.append(newest(copied, verify=True))
        shutil.rmtree(copied)
        if not is_killed:
            break
    assert seen == sorted(seen)
    assert {1, 3} <= set(seen) <= {1, 2, 3}
    assert len(seen) > 8


class Deadly:
    """Weights that end the process that receives them."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os._exit, (3,)


def test_a_sender_that_ends_by_itself_was_not_killed(store):
    with SenderProcess(store) as sender, pytest.raises(AssertionError, match="ended with 3"):
        sender.was_killed_at(1000, {"a": Deadly()})
