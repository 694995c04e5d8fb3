"""The recipes for clusters in `examples/`: their commands, as the cluster would run them."""

from __future__ import annotations

import json
import os
import subprocess
import uuid
from pathlib import Path
from typing import Any

import pytest

from tests.support import NEEDS_ALL, ROOT

yaml = pytest.importorskip("yaml", reason=NEEDS_ALL)
EXAMPLES = ROOT / "examples"

SLURM = {
    "scontrol": 'printf "%s\\n" n1 n2 n3',
    # Runs on this host what would run on each node, and says which processes are steps.
    "srun": """echo $$ >> "$RECORDS/steps"
while [[ $1 == --* ]]; do shift; done
exec "$@" """,
    "scancel": 'xargs kill -TERM < "$RECORDS/steps"',
    "vllm": """mkdir "$LOCAL"
record vllm "$@"
exec sleep 60""",
    "python3": """until [[ -e $RECORDS/vllm ]]; do sleep 0.02; done
[[ -d ${STORE%/*} && -d $LOCAL ]]
record python3 "$@"
exit $TRAINER_EXITS_WITH""",
}
"""Stand-ins for SLURM's commands, and for a server and a trainer, which note their arguments."""

RECORD = """#!/bin/bash
set -e
record() { printf '%s\\0' "$@" > "$RECORDS/new"; mv "$RECORDS/new" "$RECORDS/$1"; }
"""


class SlurmJob:
    """A run of `slurm.sh` on three nodes that are this host: what it started, and what it left."""

    def __init__(self, directory: Path, *options: str, trainer_exits_with: int = 0) -> None:
        programs, records, shared = (directory / name for name in ("bin", "records", "shared"))
        for path in (programs, records, shared):
            path.mkdir(parents=True)
        for name, script in SLURM.items():
            (programs / name).write_text(f"{RECORD}{script}\n")
            (programs / name).chmod(0o700)
        job = uuid.uuid4().hex
        done = subprocess.run(
            ["bash", EXAMPLES / "slurm.sh", "/shared/checkpoint", *options],
            cwd=ROOT,
            env=os.environ
            | {
                "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
                "RECORDS": str(records),
                "SHARED": str(shared),
                "SLURM_JOB_ID": job,
                "SLURM_JOB_NODELIST": "n[1-3]",
                "TRAINER_EXITS_WITH": str(trainer_exits_with),
            },
            capture_output=True,
            text=True,
            timeout=60,
        )
        self.code, self.errors = done.returncode, done.stderr
        self.left = [*shared.iterdir(), *Path("/dev/shm").glob(f"*{job}*")]
        self.commands = [
            (records / name).read_text().rstrip("\0").split("\0") for name in ("vllm", "python3")
        ]


def kubernetes_objects() -> dict[str, Any]:
    """Objects of the manifests, by kind and name."""
    return {
        f"{each['kind']}/{each['metadata']['name']}": each
        for file in EXAMPLES.glob("kubernetes*.yaml")
        for each in yaml.safe_load_all(file.read_text(encoding="utf-8"))
    }


def pods() -> list[dict[str, Any]]:
    """Specifications of the pods of the manifests."""
    kinds = kubernetes_objects().values()
    templates = [each["spec"]["template"] for each in kinds if "template" in each["spec"]]
    return [each["spec"] for each in [*templates, *kinds] if "containers" in each["spec"]]


def containers() -> list[dict[str, Any]]:
    """Containers of all pods."""
    return [c for pod in pods() for c in [*pod.get("initContainers", []), *pod["containers"]]]


def compose() -> dict[str, Any]:
    """The Compose file, without its variables."""
    loaded: dict[str, Any] = yaml.safe_load((EXAMPLES / "compose.yaml").read_text(encoding="utf-8"))
    return loaded


def commands() -> list[list[str]]:
    """Commands of all containers of the manifests and of the Compose file."""
    return [
        *(each["command"] + each["args"] for each in containers()),
        *(each["entrypoint"] + each["command"] for each in compose()["services"].values()),
    ]


def option_of(command: list[str], option: str) -> Any:
    """Return the JSON value of an option of a command."""
    return json.loads(command[command.index(option) + 1])
