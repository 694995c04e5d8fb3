"""A package that is not installed is named, with what needs it and how to install it."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

import pytest
import torch

import dbuffer
from dbuffer.runtime.extras import EXTRAS, needed_for
from tests.support.children import call, run_program

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(("module", "extra"), [each for each in EXTRAS.items() if each[1]])
def test_the_extra_has_the_package(module, extra):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    package = module.replace("_", "-")
    required = project["optional-dependencies"][extra]
    assert any(re.match(rf"{package}(?![\w-])", each) for each in required), required


@pytest.mark.parametrize(
    ("module", "arguments", "use"),
    [
        ("obstore", ("status", "s3://bucket/policy"), "bucket"),
        ("prometheus_client", ("mirror", "store", "y", "--metrics-port", 9100), "--metrics-port"),
    ],
)
def test_a_command_says_what_to_install(monkeypatch, capsys, tmp_path, module, arguments, use):
    monkeypatch.chdir(tmp_path)
    with dbuffer.WeightSender("store") as sender:
        sender.send({"w": torch.ones(2)})
    monkeypatch.setitem(sys.modules, module, None)
    code, out, err = call(capsys, *arguments)
    package = module.replace("_", "-")
    assert (code, out) == (1, "")
    assert use in err
    extra = EXTRAS[module]
    clone = f", or '.[{extra}]' in a clone of dbuffer" if extra else ""
    assert err.endswith(f" needs {package}: pip install {package}{clone}\n")


def test_without_typer_the_command_line_says_what_to_install():
    code = "import sys; sys.modules['typer'] = None; from dbuffer.__main__ import main; main()"
    done = run_program(code)
    assert (done.returncode, done.stdout) == (1, "")
    install = "pip install typer, or '.[cli]' in a clone of dbuffer"
    assert done.stderr == f"dbuffer: the command line needs typer: {install}\n"


def test_packages_that_are_not_simply_missing():
    with pytest.raises(dbuffer.DBufferError, match="needs zstandard: pip install zstandard"):
        with needed_for("a delta"):
            raise ModuleNotFoundError(name="zstandard.backend")
    with pytest.raises(ModuleNotFoundError, match="other"), needed_for("a test"):
        raise ModuleNotFoundError("No module named 'other'", name="other")  # of one that is there
