"""``python -m dbuffer`` and the command ``dbuffer``."""

import contextlib
import signal
import sys

_SIGNALED = (128 + signal.SIGINT, 128 + signal.SIGTERM)


def main() -> None:
    """Run the command line."""
    try:
        from dbuffer.tools import cli
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.exit(
            f"dbuffer: the command line needs {error.name}: "
            "pip install '.[cli]' in a clone of dbuffer"
        )
    code = cli.run(sys.argv[1:])
    if code in _SIGNALED:
        # Ended by the signal itself, it is taken for stopped and not for failed: by a shell, whose
        # loop ends as well, and by service managers.
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        signal.signal(code - 128, signal.SIG_DFL)
        signal.raise_signal(code - 128)
    sys.exit(code)


if __name__ == "__main__":
    main()
