"""The command line in the test's own process."""

from __future__ import annotations

import pytest


def call(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Run a command that needs no process of its own; its exit code, output and complaints."""
    from dbuffer.tools import cli  # looks at the environment

    code = cli.run([str(argument) for argument in arguments])
    return code, *capsys.readouterr()
