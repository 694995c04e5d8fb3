"""``python -m dbuffer`` and the command ``dbuffer``."""

import contextlib
import os
import signal
import sys

from dbuffer.errors import DBufferError
from dbuffer.runtime.extras import needed_for

_SIGNALED = (128 + signal.SIGINT, 128 + signal.SIGTERM, 128 + signal.SIGPIPE)


def main() -> None:
    """Run the command line, and end this process with the command's exit code."""
    _replace_closed_streams()
    try:
        with needed_for("the command line"):
            from dbuffer.tools import cli

            code = cli.run(sys.argv[1:])
    except DBufferError as error:
        sys.exit(f"dbuffer: {error}")
    except KeyboardInterrupt:  # before the command ran
        code = 128 + signal.SIGINT
    if code in _SIGNALED:
        # End this process by the signal itself, so that a shell also ends the loop that ran the
        # command, and service managers count the command as stopped, not as failed.
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        signal.signal(code - 128, signal.SIG_DFL)
        signal.raise_signal(code - 128)
    sys.exit(code)


def _replace_closed_streams() -> None:
    """Open /dev/null in place of standard streams that the caller has closed (``>&-``).

    Python sets ``sys.stdout`` and ``sys.stderr`` to None if they are closed. The first file that
    dbuffer opens could then get stderr's file descriptor (2), and torch would print its messages
    into the file.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115


if __name__ == "__main__":
    main()
