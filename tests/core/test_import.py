"""What `import dbuffer` costs, and what it leaves alone."""

from __future__ import annotations

import ast
import functools
import graphlib
import importlib
import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import dbuffer

ROOT = Path(dbuffer.__file__).parent

OPTIONAL_PACKAGES = {
    *("accelerate", "datasets", "deepspeed", "httpx", "huggingface_hub", "matplotlib", "obstore"),
    *("peft", "prometheus_client", "requests", "rich", "safetensors", "sglang", "torchrl"),
    *("transformers", "trl", "typer", "verl", "vllm", "zstandard"),
}

HEAVY = OPTIONAL_PACKAGES - {"rich", "typer"} | {
    *("asyncio", "concurrent", "http", "multiprocessing", "numpy", "ssl", "tensordict", "torch"),
}
"""Packages that neither `import dbuffer` nor a command that only looks at a store imports."""

PACKAGES = (
    *("errors", "runtime", "format", "store", "io", "weights", "ranks", "publish", "receive"),
    *("mirror", "engine", "integrations", "tools", "testing"),
)
"""Imports point from right to left."""

PROBE = """
import json, logging, os, signal, sys, threading

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

changed, modules = set(), set()

def observe(action):
    before, loaded = state(), set(sys.modules)
    action()
    changed.update(name for name, value in state().items() if value != before[name])
    modules.update(name.partition(".")[0] for name in set(sys.modules) - loaded)

def import_package():
    global dbuffer
    import dbuffer, dbuffer.errors, dbuffer.weights.names
    hasattr(dbuffer, "__wrapped__")

observe(import_package)
assert "torch" not in sys.modules
import torch
observe(lambda: exec("from dbuffer import *", {}))
from dbuffer.publish.sender import WeightSender
assert WeightSender is dbuffer.WeightSender
assert set(dbuffer.__all__) <= set(dir(dbuffer))
print(json.dumps({
    "changed": sorted(changed),
    "handlers": [repr(handler) for handler in logging.getLogger("dbuffer").handlers],
    "modules": sorted(modules),
    "submodules": sorted(name for name in sys.modules if name.startswith("dbuffer.")),
}))
"""


def run(code: str, *arguments: str, **options: Any) -> str:
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, **options
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.fixture(scope="module")
def probe(tmp_path_factory):
    """Observations of a fresh interpreter that imported dbuffer, and torch only when it had to."""
    return json.loads(run(PROBE, cwd=tmp_path_factory.mktemp("cwd")))


def test_imports_no_optional_package(probe):
    """Nor TensorDicts, and torch's DTensor, which imports sympy; each takes as long as torch."""
    assert not (OPTIONAL_PACKAGES | {"tensordict", "sympy"}) & set(probe["modules"])
    outer = {name.split(".")[1] for name in probe["submodules"]}
    assert not outer & {"tools", "integrations", "engine", "__main__"}


def test_has_no_side_effects(probe):
    assert probe["changed"] == []
    assert probe["handlers"] == []


MODULES = """
import atexit, sys
before = set(sys.modules)
atexit.register(lambda: print(*sorted(set(sys.modules) - before)))
"""


def require_light(modules: list[str], at_most: int) -> None:
    """Refuse modules that take long to import, and more than so many of any kind.

    They are counted rather than timed: other work on the machine changes no count.
    """
    assert not HEAVY & {name.partition(".")[0] for name in modules}
    assert len(modules) <= at_most, modules


def test_the_package_imports_little():
    require_light(run(f"{MODULES}\nimport dbuffer").split(), 40)


@pytest.mark.parametrize(
    ("arguments", "at_most"),
    [
        ("--version", 320),
        ("follow --help", 400),  # typer, rich and pydantic
        ("status STORE", 400),
        ("status STORE --json", 400),
        ("ls STORE", 400),
        ("pin STORE 1", 400),
    ],
)
def test_commands_that_look_import_little(tmp_path, arguments, at_most):
    with dbuffer.WeightSender(tmp_path / "store") as sender:
        sender.send({"w": torch.ones(2)})
    printed = run(
        f"{MODULES}\nfrom dbuffer.__main__ import main\nmain()",
        *arguments.replace("STORE", str(tmp_path / "store")).split(),
    )
    require_light(printed.splitlines()[-1].split(), at_most)


def test_all_names_are_there():
    found: dict[str, object] = {}
    exec("from dbuffer import *", found)
    found.pop("__builtins__")
    assert found.keys() == set(dbuffer.__all__)
    assert all(getattr(dbuffer, name) is value for name, value in found.items())
    with pytest.raises(AttributeError, match="'WeightSendr'"):
        dbuffer.WeightSendr  # noqa: B018
    with pytest.raises(ImportError, match="'WeightSendr'"):
        exec("from dbuffer import WeightSendr")


def test_public_names_have_docstrings():
    """Others need one only if their names and types do not say it all."""
    values = {name: getattr(dbuffer, name) for name in dbuffer.__all__ if name != "__version__"}
    for name, value in values.items():
        assert value.__doc__, name
        assert not value.__doc__.startswith(f"{name}("), f"{name} has a dataclass's own docstring"


def test_type_checkers_see_the_same_names():
    """As a type checker reads them: all errors, and each name imported as ``X as X``."""
    tree = ast.parse((ROOT / "__init__.py").read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    imported = {
        alias.name: node.module
        for node in imports
        for alias in node.names
        if alias.asname == alias.name
    }
    assert [node.module for node in imports if node.names[0].name == "*"] == ["dbuffer.errors"]
    errors = {name for name in vars(dbuffer.errors) if not name.startswith("_")}
    assert {*imported, *errors, "__version__"} == set(dbuffer.__all__)
    for name, module in imported.items():
        assert getattr(importlib.import_module(module), name) is getattr(dbuffer, name)


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_point_one_way(package):
    below_or_here = set(PACKAGES[: PACKAGES.index(package) + 1])
    place = ROOT / package
    for path in place.rglob("*.py") if place.is_dir() else [place.with_suffix(".py")]:
        assert packages_imported(path) <= below_or_here, path


def test_modules_of_a_package_import_in_no_circle():
    graph = {
        module_of(path): modules_imported(path) - {module_of(path)} for path in ROOT.rglob("*.py")
    }
    graph["dbuffer"] = set()  # imports what it exports, when it is asked for
    graphlib.TopologicalSorter(graph).prepare()


def packages_imported(path: Path) -> set[str]:
    """The packages of this package that a file imports from, also inside functions.

    What it imports from the package itself is public, and stands nowhere in the order.
    """
    return {name.split(".")[1] for name in modules_imported(path) if "." in name}


@functools.cache
def nodes_of(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


@functools.cache
def modules_imported(path: Path) -> set[str]:
    """The modules of this package that a file imports, also inside functions."""
    found = set()
    for node in nodes_of(path):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "dbuffer":
            module = node.module or ""
            found |= {nearest_module(f"{module}.{alias.name}") for alias in node.names}
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names if a.name.partition(".")[0] == "dbuffer"}
    return found


def nearest_module(name: str) -> str:
    """Of ``a.b.c``: that, if it is a module, and ``a.b`` if ``c`` is a name in it."""
    place = ROOT.parent.joinpath(*name.split("."))
    is_module = place.is_dir() or place.with_suffix(".py").is_file()
    return name if is_module else name.rpartition(".")[0]


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


VAGUE = ("What ", "That ", "Those ", "Who ", "Where ", "The same ", "One that ")
"""Beginnings that send a reader elsewhere for the object of a docstring."""


def test_docstrings_begin_with_their_object_or_action():
    vague = [
        f"{path.relative_to(ROOT)}:{statement.lineno}: {text.splitlines()[0]}"
        for path in sorted(ROOT.rglob("*.py"))
        for statement in nodes_of(path)
        if isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(text := statement.value.value, str)
        and text.startswith(VAGUE)
    ]
    assert not vague, "\n".join(vague)


def test_no_attribute_has_a_lock_for_all_instances():
    """A child that is forked while a thread computes one hangs: use dbuffer.runtime.lazy's."""
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in sorted(ROOT.rglob("*.py"))
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if "functools" in line and "cached_property" in line and path.name != "lazy.py"
    ]
    assert not found


def test_logs_get_texts_of_errors():
    """A handler may keep what it gets: an error's traceback has the frames, and so the mappings."""
    methods = ("debug", "info", "warning", "error", "log")
    found = [
        f"{path.relative_to(ROOT)}:{call.lineno}"
        for path in sorted(ROOT.rglob("*.py"))
        for call in nodes_of(path)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)
        if call.func.attr in methods and ast.unparse(call.func.value).endswith("logger")
        if any(isinstance(each, ast.Name) and each.id == "error" for each in call.args)
    ]
    assert not found, "give str(error)"
