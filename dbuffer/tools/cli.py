"""The command line.

A command's module is imported when the command runs; torch, which takes seconds to import, by the
commands that need it.
"""

from __future__ import annotations

import argparse
import importlib
import io
import logging
import signal
import sys
import traceback
from collections.abc import Sequence

import dbuffer
from dbuffer.errors import DBufferError, OptionError, WaitTimeoutError
from dbuffer.tools.arguments import Command, Parser, parser_of, run_command, summary_of
from dbuffer.tools.commands.shared import EXIT_FAILED, EXIT_SIGNAL, EXIT_TIMEOUT, EXIT_USAGE
from dbuffer.tools.terminal import LogHandler, print_error, status_line

COMMANDS = {
    "publish": "publish:publish",
    "follow": "follow:follow",
    "exec": "exec:run_for_each",
    "follow-server": "follow_server:follow_server",
    "mirror": "mirror:mirror",
    "status": "status:status",
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

Exit codes: 0 success; 1 a failure, or damage in a store; 2 wrong usage; 3 a time-out; 130 stopped
by Ctrl-C; 141 the reader of a pipe is gone; 143 stopped by SIGTERM.
"""

_WAITING = ("dbuffer.mirror.mirror", "dbuffer.store.weights_files")
"""Loggers that say at the level INFO for whom a command waits."""


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
        return _run(arguments)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_SIGNAL + signal.SIGINT
    except BrokenPipeError:  # `dbuffer ls STORE | head`
        return EXIT_SIGNAL + signal.SIGPIPE
    except (DBufferError, OSError) as error:
        print_error(traceback.format_exc().rstrip("\n") if debug else f"dbuffer: {error}")
        return _exit_code(error)
    finally:
        status_line.clear()


def command_named(name: str) -> Command:
    """Import a command."""
    module, _, function = COMMANDS[name].partition(":")
    return getattr(importlib.import_module(f"dbuffer.tools.commands.{module}"), function)  # type: ignore[no-any-return]


def parse(arguments: Sequence[str]) -> tuple[Command, argparse.Namespace]:
    """Read a command's name and its arguments.

    Raises:
        OptionError: they are wrong.
        SystemExit: help or the version was printed instead.
    """
    name, *rest = arguments or [""]
    if name not in COMMANDS:
        raise _refusal(arguments)
    command = command_named(name)
    return command, parser_of(command, f"dbuffer {name}").parse_args(rest)


def _run(arguments: Sequence[str]) -> int:
    command, parsed = parse(arguments)
    code = run_command(command, parsed)
    sys.stdout.flush()  # here, so that a broken pipe is noticed
    return code or 0


def _overview() -> Parser:
    """Return the parser of a command line that begins with no command."""
    parser = Parser(prog="dbuffer", description=_DESCRIPTION, epilog=_EPILOG)
    version = dbuffer.__version__
    parser.add_argument("--version", action="version", version=version, help="Print the version.")
    text = "Show tracebacks and debug logs; accepted in any place."
    parser.add_argument("--debug", action="store_true", help=text)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name in COMMANDS:
        commands.add_parser(name, help=summary_of(command_named(name)))
    return parser


def _refusal(arguments: Sequence[str]) -> OptionError | SystemExit:
    """Return the error of a command line that begins with no command.

    Help or the version is shown instead, if it asks for that.
    """
    parser = _overview()
    if not arguments:
        parser.print_help(sys.stderr)
        return SystemExit(EXIT_USAGE)
    parser.parse_args(arguments)
    return OptionError(f"a command is needed before {arguments[0]!r}; see `dbuffer --help`")


def _begin_logging(*, debug: bool) -> None:
    if logging.root.handlers:  # of a program that calls this
        return
    logging.root.addHandler(LogHandler(debug=debug))
    logging.root.setLevel(logging.DEBUG if debug else logging.WARNING)
    for name in _WAITING:
        logging.getLogger(name).setLevel(logging.DEBUG if debug else logging.INFO)


def _exit_code(error: Exception) -> int:
    if isinstance(error, OptionError):
        return EXIT_USAGE
    return EXIT_TIMEOUT if isinstance(error, WaitTimeoutError) else EXIT_FAILED
