"""What `import dbuffer` costs, and what it leaves alone."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import pytest

import dbuffer

PACKAGE = Path(dbuffer.__file__).parent

OPTIONAL_PACKAGES = (
    *(
        "deepspeed",
        "httpx",
        "huggingface_hub",
        "matplotlib",
        "peft",
        "prometheus_client",
        "requests",
        "rich",
    ),
    *("peft", "safetensors", "sglang", "torchrl", "transformers", "typer", "vllm"),
)

MAX_IMPORT_S = 0.3

LAYERS = (
    *(
        "errors",
        "names",
        "manifest",
        "layout",
        "comparison",
        "filesystem",
        "buffer",
        "retirement",
        "writer",
    ),
    *(
        "acknowledgements",
        "tensors",
        "spans",
        "parts",
        "output",
        "checkpoint",
        "sources",
        "targets",
        "snapshot",
    ),
    *("watcher", "sender", "resident", "agreement", "shards", "rank_output", "sharded", "records"),
    *("receiver", "relay", "mirror", "stager"),
)
"""Imports point from right to left."""

PROBE = """
import json, logging, os, signal, sys, threading, time
import tensordict

def state():
    return {
        "threads": threading.active_count(),
        "signals": [str(signal.getsignal(number)) for number in sorted(signal.valid_signals())],
        "root_handlers": len(logging.root.handlers),
        "root_level": logging.root.level,
        "cwd": sorted(os.listdir()),
        "environment": sorted(os.environ.items()),
        "descriptors": sorted(os.listdir("/proc/self/fd")),
        "hooks": [repr(sys.excepthook), repr(threading.excepthook)],
    }

before = state()
loaded = set(sys.modules)
started = time.perf_counter()
import dbuffer
import_s = time.perf_counter() - started
after = state()
print(json.dumps({
    "import_s": import_s,
    "changed": [name for name in before if before[name] != after[name]],
    "handlers": [repr(handler) for handler in logging.getLogger("dbuffer").handlers],
    "modules": sorted({name.partition(".")[0] for name in set(sys.modules) - loaded}),
    "submodules": sorted(name for name in sys.modules if name.startswith("dbuffer.")),
}))
"""


@pytest.fixture(scope="module")
def probes(tmp_path_factory):
    """Two fresh interpreters that imported dbuffer, and what they saw."""
    cwd = tmp_path_factory.mktemp("cwd")
    found = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", PROBE], cwd=cwd, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        found.append(json.loads(done.stdout))
    return found


def test_imports_no_optional_package(probes):
    for probe in probes:
        assert not set(OPTIONAL_PACKAGES) & set(probe["modules"])


def test_imports_neither_command_line_nor_integrations(probes):
    for probe in probes:
        outer = {name.split(".")[1] for name in probe["submodules"]}
        assert not outer & {"cli", "demo", "integrations", "__main__"}


def test_takes_little_longer_than_tensordict(probes):
    # Other work on the machine only ever adds to a measurement, so the least is nearest.
    assert min(probe["import_s"] for probe in probes) <= MAX_IMPORT_S


def test_has_no_side_effects(probes):
    for probe in probes:
        assert probe["changed"] == []
        assert probe["handlers"] == []


def test_the_version_is_that_of_the_package():
    assert dbuffer.__version__ == importlib.metadata.version("dbuffer")


def test_is_typed():
    assert (PACKAGE / "py.typed").is_file()


@pytest.mark.parametrize("layer", LAYERS)
def test_imports_point_one_way(layer):
    path = PACKAGE / f"{layer}.py"
    below = set(LAYERS[: LAYERS.index(layer)])
    assert imported_from_dbuffer(path) <= below


def imported_from_dbuffer(path: Path) -> set[str]:
    """The modules of this package that a file imports, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "dbuffer":
            module = (node.module or "").removeprefix("dbuffer").removeprefix(".")
            found |= {module} if module else {alias.name for alias in node.names}
        if isinstance(node, ast.Import):
            found |= {a.name.split(".")[1] for a in node.names if a.name.startswith("dbuffer.")}
    return found
