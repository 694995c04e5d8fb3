"""Types of the package, and of programs that users begin with code of the documents."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.documents import BLOCKS, NOT_RUN, TUTORIAL, relative

pytest.importorskip("mypy")


def test_mypy_finds_no_error(tmp_path):
    """In the package and in each page's Python; lines are those of the page.

    The tutorial has excerpts of programs in `examples`, which are checked whole.
    """
    code: dict[Path, list[str]] = {}
    for block in (each for each in BLOCKS if each.page != TUTORIAL):
        if block.language == "python" and block.mark != NOT_RUN:
            lines = code.setdefault(block.page, [])
            lines += [""] * (block.line - 1 - len(lines)) + block.code.splitlines()
    for page, lines in code.items():
        name = relative(page).removesuffix(".md").replace("/", "_").replace("-", "_")
        (tmp_path / f"{name}.py").write_text("\n".join(lines) + "\n")
    assert len(code) > 5
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]
    command = [sys.executable, "-m", "mypy", *settings["files"], *tmp_path.glob("*.py")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
