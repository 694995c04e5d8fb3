"""The command line.

Torch takes seconds to import: only the commands that need it import it.

Exit codes: 0 success; 1 a failure, or damage in a store; 2 wrong usage; 3 a time-out.
"""

from __future__ import annotations

import io
import logging
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.logging import RichHandler

import dbuffer
from dbuffer.errors import DBufferError, OptionError, WaitTimeoutError
from dbuffer.tools.commands.demo import demo
from dbuffer.tools.commands.doctor import doctor
from dbuffer.tools.commands.exec import run_for_each
from dbuffer.tools.commands.follow import follow
from dbuffer.tools.commands.follow_server import follow_server
from dbuffer.tools.commands.keep import pin, rollback, unpin
from dbuffer.tools.commands.ls import ls
from dbuffer.tools.commands.mirror import mirror
from dbuffer.tools.commands.publish import publish
from dbuffer.tools.commands.shared import EXIT_FAILED, EXIT_TIMEOUT, EXIT_USAGE, console, errors
from dbuffer.tools.commands.status import status
from dbuffer.tools.commands.verify import verify
from dbuffer.tools.render import PrintableFormatter, printable

app = typer.Typer(
    name="dbuffer",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="""Move weights from a trainer to its inference workers through a directory.

A *store* is a directory with two buffers and a pointer to the newest one. `publish` writes a
checkpoint into it; `follow`, `exec` and `follow-server` print each new version, run a command for
it, or switch an inference server to it; `status` shows the sender and the receivers.

Try it: `dbuffer demo` trains a small model while a real vLLM engine samples from it.
""",
)
for _command in (
    *(publish, follow, follow_server, mirror, status, verify, ls),
    *(pin, unpin, rollback, doctor, demo),
):
    app.command()(_command)
app.command("exec")(run_for_each)


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
    handler = RichHandler(console=errors, show_path=False, show_time=debug)
    handler.setFormatter(PrintableFormatter("%(message)s"))
    logging.basicConfig(level=logging.DEBUG if debug else logging.WARNING, handlers=[handler])
    try:
        app(arguments)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else EXIT_FAILED
    except (DBufferError, OSError) as error:
        text = traceback.format_exc() if debug else f"dbuffer: {error}"
        print(printable(text.rstrip("\n")), file=sys.stderr)
        return _exit_code(error)
    return 0


def _exit_code(error: Exception) -> int:
    if isinstance(error, OptionError):
        return EXIT_USAGE
    return EXIT_TIMEOUT if isinstance(error, WaitTimeoutError) else EXIT_FAILED


def _print_version(value: bool) -> None:
    if value:
        console.print(dbuffer.__version__)
        raise typer.Exit


@app.callback()
def _options(
    _debug: Annotated[
        bool, typer.Option("--debug", help="Show tracebacks and debug logs.")
    ] = False,
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None: ...
