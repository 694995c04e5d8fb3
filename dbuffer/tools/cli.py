"""Command line of dbuffer. Importing torch takes seconds, so a command imports it when it runs."""

from __future__ import annotations

import io
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

import dbuffer
from dbuffer.errors import DBufferError, OptionError, WaitTimeoutError, WriterSupersededError
from dbuffer.tools.commands import keep, mirror, publish, show
from dbuffer.tools.commands.doctor import doctor
from dbuffer.tools.commands.follow import follow
from dbuffer.tools.commands.shared import (
    EXIT_FAILED,
    EXIT_SIGNAL,
    EXIT_SUPERSEDED,
    EXIT_TIMEOUT,
    EXIT_USAGE,
)
from dbuffer.tools.terminal import LogHandler, print_error, print_line

COMMANDS: dict[str, tuple[Callable[..., None], str]] = {
    "publish": (publish.publish, "./checkpoint STORE --metadata '{\"step\": 80}'"),
    "follow": (follow, "STORE --count 1 --timeout-s 60"),
    "mirror": (mirror.mirror, "/mnt/shared/policy STORE"),
    "status": (show.status, "STORE --watch"),
    "verify": (show.verify, "STORE"),
    "ls": (show.ls, "STORE"),
    "export": (keep.export, "STORE checkpoints/step-800 --model models/qwen3"),
    "pin": (keep.pin, "STORE 120"),
    "unpin": (keep.unpin, "STORE 120"),
    "rollback": (keep.rollback, "STORE 120"),
    "doctor": (doctor, "/mnt/shared/policy"),
}
"""Function of each command, and arguments for the example in the command's help."""

_DESCRIPTION = """Move weights from a trainer to its inference workers through a directory.

A store is a directory with two buffers and a pointer to the newest version. `publish` writes a
checkpoint into it, `follow` prints each new version, and `status` shows the sender and the
receivers. Inference servers need none of these commands to follow a store.
"""

_EPILOG = """`dbuffer COMMAND --help` shows a command's options. If you leave out STORE, the command
uses the store in the variable DBUFFER_STORE.

Exit codes: 0 success; 1 a failure, or damage in a store; 2 wrong usage; 3 a time-out, or nothing
was published yet; 4 another process took over as the writer; 130 stopped by Ctrl-C; 141 broken
pipe; 143 stopped by SIGTERM.
"""

_TELLING = (
    "dbuffer.mirror.mirror",
    "dbuffer.store.writer",
    "dbuffer.weights.checkpoint_directory",
)
"""Loggers whose INFO messages are shown, because these messages explain why a command waits."""


class StoreCommand(TyperCommand):
    """Command whose argument STORE defaults to the environment variable DBUFFER_STORE."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse arguments. If exactly one argument is missing, add the store of DBUFFER_STORE."""
        store = os.environ.get("DBUFFER_STORE")
        names = [str(it.name) for it in self.params if it.param_type_name == "argument"]
        if store and "store" in names:
            values, _, _ = self.make_parser(ctx).parse_args(list(args))
            if sum(not isinstance(values.get(name), str) for name in names) == 1:
                args = [*args, store] if names[-1] == "store" else [store, *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    no_args_is_help=True,
    context_settings={"help_option_names": ["--help", "-h"]},
    rich_markup_mode=None,  # plain text, which a narrow terminal wraps
    pretty_exceptions_enable=False,
    help=_DESCRIPTION,
    epilog=_EPILOG,
)
for _name, (_command, _arguments) in COMMANDS.items():
    _arguments = _arguments.replace("STORE", "/dev/shm/policy")  # noqa: S108
    app.command(_name, cls=StoreCommand, epilog=f"Example: dbuffer {_name} {_arguments}")(_command)


def run(arguments: Sequence[str]) -> int:
    """Run a command, print its error if it fails, and return its exit code."""
    arguments = list(arguments)
    debug = "--debug" in arguments
    if debug:  # allowed anywhere on the command line
        arguments.remove("--debug")
    if isinstance(sys.stdout, io.TextIOWrapper):  # for characters that the terminal cannot show
        sys.stdout.reconfigure(errors="backslashreplace")
    _begin_logging(debug=debug)
    # Like Ctrl-C, SIGTERM raises an exception, so that the command removes its files.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_SIGNAL + signal.SIGTERM))
    try:
        code = _run(arguments)
        sys.stdout.flush()  # now, so that a broken pipe raises here
    except BrokenPipeError:  # `dbuffer ls STORE | head`
        return EXIT_SIGNAL + signal.SIGPIPE
    except (DBufferError, OSError) as error:
        print_error(traceback.format_exc().rstrip("\n") if debug else f"dbuffer: {error}")
        return _exit_code(error)
    finally:
        signal.signal(signal.SIGTERM, before)
    return code


def _run(arguments: Sequence[str]) -> int:
    try:
        _parser(arguments, prog_name="dbuffer")
    except SystemExit as stop:
        if isinstance(stop.__context__, BrokenPipeError):  # typer exits with 1 for a broken pipe
            raise stop.__context__ from None
        return stop.code if isinstance(stop.code, int) else EXIT_FAILED
    return 0


def _print_version(value: bool) -> None:
    if value:
        print_line(dbuffer.__version__)
        raise typer.Exit


@app.callback()
def _options(
    _debug: Annotated[
        bool,
        typer.Option(
            "--debug", help="Show tracebacks and debug logs; allowed before or after the command."
        ),
    ] = False,
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None: ...


_parser = typer.main.get_command(app)


def _begin_logging(*, debug: bool) -> None:
    if logging.root.handlers:  # the calling program has set up its own logging
        return
    logging.root.addHandler(LogHandler(debug=debug))
    logging.root.setLevel(logging.DEBUG if debug else logging.WARNING)
    for name in _TELLING:
        logging.getLogger(name).setLevel(logging.DEBUG if debug else logging.INFO)


def _exit_code(error: Exception) -> int:
    codes = {
        OptionError: EXIT_USAGE,
        WaitTimeoutError: EXIT_TIMEOUT,
        WriterSupersededError: EXIT_SUPERSEDED,
    }
    return next((code for kind, code in codes.items() if isinstance(error, kind)), EXIT_FAILED)
