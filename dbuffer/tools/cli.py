"""The command line.

A command's module is imported when the command runs; torch, which takes seconds to import, by the
commands that need it.
"""

from __future__ import annotations

import importlib
import inspect
import io
import logging
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer
import typer.core
import typer.main

import dbuffer
from dbuffer.errors import DBufferError, OptionError, WaitTimeoutError, WriterSupersededError
from dbuffer.tools.commands.shared import (
    EXIT_FAILED,
    EXIT_SIGNAL,
    EXIT_SUPERSEDED,
    EXIT_TIMEOUT,
    EXIT_USAGE,
)
from dbuffer.tools.terminal import LogHandler, print_error, print_line, status_line

COMMANDS = {
    "publish": "publish:publish",
    "follow": "follow:follow",
    "exec": "exec:run_for_each",
    "follow-server": "follow_server:follow_server",
    "mirror": "mirror:mirror",
    "status": "status:status",
    "log": "log:log",
    "verify": "verify:verify",
    "ls": "ls:ls",
    "pin": "keep:pin",
    "unpin": "keep:unpin",
    "rollback": "keep:rollback",
    "doctor": "doctor:doctor",
    "demo": "demo:demo",
}
"""Module and function of each command, in the order of the help."""

_DESCRIPTION = """Move weights from a trainer to its inference workers through a directory.

A store is a directory with two buffers and a pointer to the newest version. `publish` writes a
checkpoint into it; `follow`, `exec` and `follow-server` print each new version, run a command for
it, or switch an inference server to it; `status` shows the sender and the receivers.

Try it: `dbuffer demo` trains a small model while a real vLLM engine samples from it.
"""

_EPILOG = """`dbuffer COMMAND --help` shows a command's options.

Exit codes: 0 success; 1 a failure, or damage in a store; 2 wrong usage; 3 a time-out, or nothing
was published yet; 4 another process took over as the writer; 130 stopped by Ctrl-C; 141 the reader
of a pipe is gone; 143 stopped by SIGTERM.
"""

_TELLING = (
    "dbuffer.mirror.mirror",
    "dbuffer.publish.delta_chain",
    "dbuffer.store.weights_files",
)
"""Loggers that say at the level INFO for whom a command waits, or why it publishes no delta."""


class _LazyGroup(typer.core.TyperGroup):
    """Group that imports a command's module when the command is needed."""

    def list_commands(self, ctx: object) -> list[str]:  # noqa: ARG002
        """Return the commands' names, in the order of the help."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command. For a wrong name all are imported: typer suggests a similar one."""
        for name in [cmd_name] if cmd_name in COMMANDS else COMMANDS:
            if name not in self.commands:
                self.add_command(_command(name))
        return super().get_command(ctx, cmd_name)


class _Command(typer.core.TyperCommand):
    """Command whose usage line has no braces around its arguments; all of them are required."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the usage line's words."""
        return [piece.strip("{}") for piece in super().collect_usage_pieces(ctx)]


app = typer.Typer(
    cls=_LazyGroup,
    no_args_is_help=True,
    context_settings={"help_option_names": ["--help", "-h"]},
    rich_markup_mode=None,  # plain text: a narrow terminal wraps it, and cuts no column of a table
    pretty_exceptions_enable=False,
    help=_DESCRIPTION,
    epilog=_EPILOG,
)


def run(arguments: Sequence[str]) -> int:
    """Run a command and return its exit code.

    An error is one line on stderr; with --debug, a traceback.
    """
    arguments = list(arguments)
    debug = "--debug" in arguments
    if debug:  # accepted in any place
        arguments.remove("--debug")
    if isinstance(sys.stdout, io.TextIOWrapper):  # for terminals that lack a character
        sys.stdout.reconfigure(errors="backslashreplace")
    _begin_logging(debug=debug)
    try:
        code = _run(arguments)
        sys.stdout.flush()  # here, so that a broken pipe is noticed
    except BrokenPipeError:  # `dbuffer ls STORE | head`
        return EXIT_SIGNAL + signal.SIGPIPE
    except (DBufferError, OSError) as error:
        print_error(traceback.format_exc().rstrip("\n") if debug else f"dbuffer: {error}")
        return _exit_code(error)
    finally:
        status_line.clear()
    return code


def command_named(name: str) -> Callable[..., None]:
    """Import a command's function."""
    module, _, function = COMMANDS[name].partition(":")
    return getattr(importlib.import_module(f"dbuffer.tools.commands.{module}"), function)  # type: ignore[no-any-return]


def _command(name: str) -> Any:
    """Return a command as typer parses and runs it."""
    function = command_named(name)
    one = typer.Typer(add_completion=False, rich_markup_mode=None)
    # Its first line, whole: typer would cut it to the width.
    summary = inspect.getdoc(function).partition("\n")[0]  # type: ignore[union-attr]
    one.command(name, cls=_Command, short_help=summary)(function)
    return typer.main.get_command(one)


def _run(arguments: Sequence[str]) -> int:
    try:
        app(arguments, prog_name="dbuffer")
    except SystemExit as stop:
        if isinstance(stop.__context__, BrokenPipeError):  # for typer a failure
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
        typer.Option("--debug", help="Show tracebacks and debug logs; accepted in any place."),
    ] = False,
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None: ...


def _begin_logging(*, debug: bool) -> None:
    if logging.root.handlers:  # of a program that calls this
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
