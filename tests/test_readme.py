"""What the README shows is run, and what it names exists."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import dbuffer
from dbuffer import WeightReceiver

README = Path(__file__).parents[1] / "README.md"
TEXT = README.read_text(encoding="utf-8")


def test_the_sixty_seconds_run(tmp_path, capsys):
    (example,) = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)
    code = example.replace("/dev/shm/policy", str(tmp_path / "policy"))
    assert code != example
    exec(compile(code, str(README), "exec"), {})
    assert capsys.readouterr().out == "1 2 1050624\n120 torch.Size([512, 512])\n"


@pytest.mark.parametrize("tag", ["names", "resident"])
def test_examples_run(tmp_path, tag):
    (example,) = re.findall(rf"```python {tag}\n(.*?)```", TEXT, flags=re.DOTALL)
    code = example.replace("/dev/shm/", f"{tmp_path}/")
    assert code != example
    exec(compile(code, str(README), "exec"), {})


@pytest.mark.slow
def test_the_collector_runs(tmp_path):
    (example,) = re.findall(r"```python torchrl\n(.*?)```", TEXT, flags=re.DOTALL)
    script = tmp_path / "collector.py"
    script.write_text(example.replace("/dev/shm/run-1", str(tmp_path / "run")))
    subprocess.run([sys.executable, script], check=True, cwd=tmp_path)
    assert WeightReceiver(tmp_path / "run" / "policy").wait_for_version(timeout_s=0) == 5


def test_every_error_is_in_the_table():
    table = TEXT.split("## Errors")[1].split("## Benchmarks")[0]
    documented = set(re.findall(r"`(\w+Error)`", table))
    errors = {
        name for name in dbuffer.__all__ if name.endswith("Error") and name not in ("DBufferError",)
    }
    missing = errors - documented
    assert not missing
    for row in re.findall(r"^\| `(\w+)`.*?\| `(\w+)` \|", table, flags=re.MULTILINE):
        name, standard = row
        assert issubclass(getattr(dbuffer, name), __builtins__[standard])


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\(([^)#]+)\)", TEXT))))
def test_links_lead_somewhere(link):
    if not link.startswith("http"):
        assert (README.parent / link).exists()


def test_commands_exist():
    from dbuffer.cli import app

    shown = set(re.findall(r"^\$ dbuffer (\w+)", TEXT, flags=re.MULTILINE))
    assert shown == {command.callback.__name__ for command in app.registered_commands}
