"""The recipes for clusters: their commands are understood, and their parts fit together.

vLLM's own parser reads their `vllm serve` in `tests/integrations/vllm/test_recipes.py`.
"""

from __future__ import annotations

import ast
import importlib

import pytest
import typer.main

from dbuffer.engine.engine_options import EngineOptions
from dbuffer.tools.cli import app
from tests.support import ROOT
from tests.support.recipes import (
    EXAMPLES,
    SlurmJob,
    commands,
    option_of,
)

MODEL_OPTIONS = ("--tensor-parallel-size", "8")


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> SlurmJob:
    return SlurmJob(tmp_path_factory.mktemp("job"), *MODEL_OPTIONS)


@pytest.fixture(scope="module")
def all_commands(job: SlurmJob) -> list[list[str]]:
    return [*commands(), *job.commands]


# SLURM, by stand-ins for its commands.


def test_a_job_runs_and_leaves_nothing(job):
    """It passes options to vLLM, waits for all engines, and ends with its trainer."""
    assert job.code == 0, job.errors
    assert job.left == []
    server, trainer = job.commands
    assert server[:3] == ["vllm", "serve", "/shared/checkpoint"]
    assert tuple(server[-2:]) == MODEL_OPTIONS
    assert trainer[-2:] == ["--receivers", "2"]


def test_a_job_whose_trainer_fails_fails_and_leaves_nothing(tmp_path):
    failed = SlurmJob(tmp_path / "job", trainer_exits_with=7)
    assert (failed.code, failed.left) == (7, [])


# Commands.


def test_dbuffers_commands_are_understood(all_commands):
    group = typer.main.get_command(app)
    found = [command[1:] for command in all_commands if command[0] == "dbuffer"]
    assert found
    for name, *arguments in found:
        subcommand = group.get_command(None, name)  # type: ignore[attr-defined]
        subcommand.make_context(name, arguments)  # parsed, and not carried out


def options_of_trainer() -> set[str]:
    """Options that `examples/trainer.py` adds to its parser, which imports for seconds."""
    tree = ast.parse((EXAMPLES / "trainer.py").read_text(encoding="utf-8"))
    return {
        str(ast.literal_eval(node.args[0]))
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "add_argument"
    }


def test_the_trainer_has_its_options(all_commands):
    found = [command for command in all_commands if command[0] == "python3"]
    assert len(found) == 3
    for _, program, *arguments in found:
        assert (ROOT / program.lstrip("/")).is_file()
        assert {name for name in arguments if name.startswith("--")} < options_of_trainer()
        assert len([name for name in arguments if name.startswith("/")]) == 2


def test_engines_follow_the_store_that_the_trainer_writes(all_commands):
    """Or, in a pod, the copy that the mirror beside them makes."""
    stores = {command[3] for command in all_commands if command[0] == "python3"}
    copies = {command[3]: command[2] for command in all_commands if command[0] == "dbuffer"}
    servers = [command for command in all_commands if command[0] == "vllm"]
    assert len(servers) == 3
    followed = []
    for server in servers:
        options = EngineOptions.parse(option_of(server, "--additional-config")["dbuffer"])
        followed.append(copies.get(options.store, options.store))
        assert option_of(server, "--weight-transfer-config") == {"backend": "dbuffer"}
        module, _, name = server[server.index("--middleware") + 1].rpartition(".")
        assert name in importlib.import_module(module).__all__
    assert set(followed) == stores
