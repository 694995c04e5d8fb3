"""``python -m dbuffer`` and the command ``dbuffer``."""

import contextlib
import os
import signal
import sys

from dbuffer.errors import DBufferError
from dbuffer.runtime.extras import needed_for

_SIGNALED = (128 + signal.SIGINT, 128 + signal.SIGTERM, 128 + signal.SIGPIPE)


def main() -> None:
    """Run the command line."""
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
        # Ended by the signal itself, it is taken for stopped and not for failed: by a shell, whose
        # loop ends as well, and by service managers.
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        signal.signal(code - 128, signal.SIG_DFL)
        signal.raise_signal(code - 128)
    sys.exit(code)


def _replace_closed_streams() -> None:
    """Let what goes to a closed stdout or stderr (``>&-``) be lost.

    Python makes None of these. And the first file of a store would get the number of stderr, and
    with it what torch prints there.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115


if __name__ == "__main__":
    main()
