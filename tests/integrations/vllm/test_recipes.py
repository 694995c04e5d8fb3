"""vLLM understands the servers' commands of the recipes for clusters, and of the documentation."""

from __future__ import annotations

import json
import shlex

from tests.support.documents import BLOCKS
from tests.support.engines.vllm_engines import NEEDS_VLLM, observe
from tests.support.recipes import SlurmJob, commands

pytestmark = NEEDS_VLLM


def shown() -> list[list[str]]:
    lines = [
        line
        for block in BLOCKS
        if block.language == "bash"
        for line in block.code.replace("\\\n", " ").splitlines()
    ]
    return [shlex.split(line) for line in lines if line.startswith("vllm serve")]


def test_vllm_understands_the_commands(tmp_path):
    job = SlurmJob(tmp_path / "job", "--tensor-parallel-size", "8")
    found = [*commands(), *job.commands, *shown()]
    servers = [command for command in found if command[:2] == ["vllm", "serve"]]
    assert len(servers) >= 5
    unknown = [*servers[0], "--no-such-option"]
    (tmp_path / "commands.json").write_text(json.dumps([*servers, unknown]))
    *understood, refused = observe("vllm_recipes.py", tmp_path)
    middleware = ["dbuffer.integrations.vllm.FollowStore"]
    assert understood == [[command[2], middleware] for command in servers]
    assert refused == "SystemExit(2)"
