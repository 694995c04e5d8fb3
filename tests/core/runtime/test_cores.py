"""Threads of dbuffer leave the core that an engine has bound its own thread to."""

from __future__ import annotations

import os
import threading
from contextlib import closing
from multiprocessing import parent_process
from multiprocessing.connection import Connection

import pytest

from dbuffer.io.copier import Copier
from dbuffer.receive.receiver import WeightReceiver
from dbuffer.receive.stager import Stager
from dbuffer.runtime.cores import use_cores_of_parent
from dbuffer.testing.waiting import until
from tests.support.children import Child

pytestmark = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one core")


def start_threads(connection: Connection, store: str, uses_parents: bool) -> None:
    """Send the cores of the main thread, of its parent, and of a copier's and a stager's thread."""
    one = {min(os.sched_getaffinity(0))}
    os.sched_setaffinity(0, one)  # as OpenMP does where a variable says so
    if uses_parents:
        use_cores_of_parent()
    both, threads = threading.Barrier(2), [threading.main_thread()]

    def work(*_: int) -> None:
        both.wait()
        threads.append(threading.current_thread())

    copier, stager = Copier(num_threads=2), Stager(WeightReceiver(store))
    with closing(copier), closing(stager):
        copier.in_parallel(work, [(0, 1), (1, 2)])
        threads.append(stager._thread)
        parent = parent_process()
        assert parent is not None
        pids = [thread.native_id or 0 for thread in dict.fromkeys(threads)]
        if uses_parents:
            until("the stager has left it", lambda: os.sched_getaffinity(pids[-1]) != one)
        connection.send([os.sched_getaffinity(pid or 0) for pid in (*pids, parent.pid)])


def count_threads(connection: Connection) -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    connection.send(Copier().num_threads)


def test_a_process_of_one_core_copies_with_one_thread():
    """As in a container, or a job, that has some of a host's cores."""
    with Child(count_threads) as child:
        assert child.receive() == 1


@pytest.mark.parametrize("uses_parents", [True, False])
def test_threads_leave_the_core_of_the_thread_that_starts_them(tmp_path, uses_parents):
    with Child(start_threads, str(tmp_path / "store"), uses_parents) as child:
        main, *others, parent = child.receive()
    assert len(main) == 1 < len(parent)
    assert others == 2 * [parent if uses_parents else main]
