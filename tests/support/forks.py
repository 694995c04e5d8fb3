"""Forks of a process, which end with a function."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable

FORK_TIMEOUT_S = 60


def fork(body: Callable[[], None]) -> int:
    """Run ``body`` in a fork of this process, which is killed if it hangs; return its pid.

    A process that forks should have one thread, as a `Child` has.
    """
    pid = os.fork()
    if pid == 0:
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(FORK_TIMEOUT_S)
            body()
            os._exit(0)
        except BaseException:  # it must not run on as a second copy of the test
            traceback.print_exc()
            os._exit(1)
    return pid


def in_a_fork(body: Callable[[], None]) -> int:
    """Run ``body`` in a :func:`fork`; return its exit status."""
    return os.waitstatus_to_exitcode(os.waitpid(fork(body), 0)[1])


def was_killed(body: Callable[[], None]) -> bool:
    """Run ``body`` in a fork; return whether it was killed, and not at its end."""
    status = in_a_fork(body)
    assert status in (0, -signal.SIGKILL), f"it ended with {status}"
    return status != 0
