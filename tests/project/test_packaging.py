"""What is built to be installed: all of the package, and nothing else."""

from __future__ import annotations

import email
import os
import re
import runpy
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import dbuffer
from tests.support import NEEDS_ALL, ROOT
from tests.support.soak import IN_SOAKS_ALONE

pytest.importorskip("twine", reason=NEEDS_ALL)
yaml = pytest.importorskip("yaml", reason=NEEDS_ALL)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def run(*command: str, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the source distribution, and the wheel that was built from that."""
    path = tmp_path_factory.mktemp("built")
    run("-m", "hatchling", "build", "-t", "sdist", "-d", str(path), cwd=ROOT)
    [archive] = path.glob("*.tar.gz")
    with tarfile.open(archive) as source:
        source.extractall(path, filter="data")
    [source_tree] = (entry for entry in path.iterdir() if entry.is_dir())
    run("-m", "hatchling", "build", "-t", "wheel", "-d", str(path), cwd=source_tree)
    return path


def wheel_in(built: Path) -> Path:
    [wheel] = built.glob("*.whl")
    return wheel


def test_the_wheel_holds_the_package_and_says_what_the_project_does(built):
    with zipfile.ZipFile(wheel_in(built)) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
        [metadata] = (name for name in wheel.namelist() if name.endswith("METADATA"))
        told = email.message_from_bytes(wheel.read(metadata))
        [points] = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))
        entry_points = wheel.read(points).decode()
    package = (
        path for path in (ROOT / "dbuffer").rglob("*") if path.suffix in {".json", ".py", ".typed"}
    )
    assert names == {str(path.relative_to(ROOT)) for path in package}
    assert (told["Name"], told["Version"]) == (PROJECT["name"], dbuffer.__version__)
    assert set(told.get_all("Provides-Extra")) == set(PROJECT["optional-dependencies"])
    needed = [line for line in told.get_all("Requires-Dist") if "extra ==" not in line]
    assert sorted(needed) == sorted(PROJECT["dependencies"])
    assert "dbuffer = dbuffer.integrations.vllm.plugin:register" in entry_points


def test_the_sources_can_be_tested(built):
    """The sources have what the README's commands need. An index would take both archives."""
    [source_tree] = (entry for entry in built.iterdir() if entry.is_dir())
    for name in ("dev.py", "README.md", "requirements-cpu.txt", "requirements-sglang-cpu.txt"):
        assert (source_tree / name).is_file(), name
    for folder in ("tests", "examples"):
        there = {path.relative_to(ROOT) for path in (ROOT / folder).rglob("*.py")}
        assert there == {p.relative_to(source_tree) for p in source_tree.glob(f"{folder}/**/*.py")}
    archives = map(str, [*built.glob("*.tar.gz"), wheel_in(built)])
    assert run("-m", "twine", "check", "--strict", *archives, cwd=built).count("PASSED") == 2


def settings_of_uv() -> dict[str, str]:
    settings: dict[str, str] = runpy.run_path(str(ROOT / "dev.py"))["settings_of_uv"]()
    return settings


@pytest.fixture(scope="module")
def environment_of_uv() -> dict[str, str]:
    return settings_of_uv() | os.environ


def test_uv_asks_the_indexes_that_pip_asks(monkeypatch):
    """Those of the variable, which for pip count for more than what its files say."""
    monkeypatch.setenv("PIP_INDEX_URL", "https://first.test/simple")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "https://a.test/simple\nhttps://b.test/simple")
    monkeypatch.setenv("PIP_FIND_LINKS", "/a /b")
    settings = settings_of_uv()
    assert settings["UV_DEFAULT_INDEX"] == "https://first.test/simple"
    assert settings["UV_INDEX"] == "https://a.test/simple https://b.test/simple"
    assert settings["UV_FIND_LINKS"] == "/a,/b"


EXTRAS = sorted(PROJECT["optional-dependencies"])
BY_THEMSELVES = ("sglang", "verl", "vllm")
"""Extras that fix versions which others do not take."""
TOGETHER = ",".join(extra for extra in EXTRAS if extra not in BY_THEMSELVES)


@pytest.mark.parametrize(
    "extras",
    [
        TOGETHER,
        *(
            pytest.param(extra, marks=IN_SOAKS_ALONE)
            for extra in (*BY_THEMSELVES, *TOGETHER.split(","))
        ),
    ],
)
def test_extras_resolve_in_a_new_environment(built, tmp_path, environment_of_uv, extras):
    """Versions that suit all extras suit each; each by itself may get newer ones."""
    requirements = tmp_path / "requirements.in"
    requirements.write_text(f"dbuffer[{extras}] @ {wheel_in(built).as_uri()}\n")
    uv = ["-m", "uv", "pip", "compile", "--quiet", "--no-annotate", "--no-header"]
    resolved = run(*uv, str(requirements), cwd=tmp_path, **environment_of_uv).splitlines()
    names = {line.partition(" ")[0].partition("==")[0] for line in resolved}
    assert {"dbuffer", "torch", "tensordict", "msgspec", "watchdog", "xxhash"} < names


WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def tool(name: str) -> str:
    """Return the path of a program beside this Python."""
    return str(Path(sys.executable).with_name(name))


def test_workflows_pass_their_linter():
    done = subprocess.run(
        [tool("zizmor"), "--offline", "--no-progress", *WORKFLOWS], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_steps_of_workflows_are_tasks_of_dev_py(workflow):
    """So that each can be run by hand."""
    tasks = runpy.run_path(str(ROOT / "dev.py"))["COMMANDS"]
    jobs = yaml.safe_load(workflow.read_text())["jobs"].values()
    commands = [step["run"].split() for job in jobs for step in job["steps"] if "run" in step]
    assert commands
    for python, program, task, *_ in commands:
        assert (python[:7], program) == ("python3", "dev.py")
        assert task in tasks or task == "${{"
    weekly = [
        c for job in jobs for c in job.get("strategy", {}).get("matrix", {}).get("command", [])
    ]
    assert all(command.split()[0] in tasks for command in weekly)


def test_names_are_not_vague():
    """The hook of pre-commit sees changed files alone."""
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    [names] = (hook for hook in hooks if hook["id"] == "names")
    vague = [
        f"{path.relative_to(ROOT)}: {line}"
        for path in (ROOT / "dbuffer").rglob("*.py")
        for line in path.read_text(encoding="utf-8").splitlines()
        if re.search(names["entry"], line)
    ]
    assert not vague, "\n".join(vague)


def test_words_are_spelled_right():
    done = subprocess.run([tool("codespell")], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_changes_can_be_put_into_the_change_log(tmp_path):
    for name in ("pyproject.toml", "CHANGELOG.md", "dbuffer"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "changes").mkdir()
    (tmp_path / "changes" / "7.added.md").write_text("`send` does more.\n")
    done = subprocess.run(
        [tool("towncrier"), "build", "--draft", "--version", "9.9.9"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert re.search(
        r"## \[9\.9\.9\] - .*### Added.*- `send` does more\. \(#7\)", done.stdout, re.S
    )
