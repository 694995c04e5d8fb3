"""Guarantee 6, bad input is refused: a store that others can write to, and anything pickled."""

from __future__ import annotations

import ast
import contextlib
import os
import pickle
import stat
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from safetensors.torch import save_file

import dbuffer
from dbuffer.store.buffer import DoubleBuffer
from dbuffer.weights.checkpoint import read_checkpoint
from tests.support.children import Child
from tests.support.patterns import SMALL, newest, publish
from tests.support.waiting import error_of

NOBODY = 65534

pytestmark = pytest.mark.timing(settle_s=0.01)

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


def open_sender(store: Path, **options: bool) -> None:
    with dbuffer.WeightSender(store, **options):
        pass


def load(store: Path, **options: bool) -> None:
    with dbuffer.WeightReceiver(store, **options) as receiver:
        assert receiver.load_into(SMALL.empty()) is not None


def hold(store: Path, **options: bool) -> None:
    with dbuffer.WeightReceiver(store, **options) as receiver, receiver.open(timeout_s=5):
        pass


EVERY_WAY_IN = pytest.mark.parametrize("way_in", [open_sender, load, hold])


@pytest.fixture
def published(store: Path) -> Path:
    with dbuffer.WeightSender(store) as sender:
        publish(sender, 1, 2)
    return store


def test_a_new_store_is_for_its_owner_alone(shm_path):
    store = shm_path / "made" / "on the way" / "store"
    before = os.umask(0)
    try:
        with dbuffer.WeightSender(store) as sender:
            sender.send(SMALL.weights(1))
            newest(store)
    finally:
        os.umask(before)
    paths = [store, *store.rglob("*")]
    assert len(paths) >= 8
    for path in paths:
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path


@EVERY_WAY_IN
@pytest.mark.parametrize("mode", [0o770, 0o707, 0o720, 0o702, 0o777, 0o1777])
def test_a_store_that_others_can_write_to_is_refused(published, way_in, mode):
    published.chmod(mode)
    advice = "name a directory below it" if mode & stat.S_ISVTX else "run 'chmod go-w"
    with pytest.raises(dbuffer.StoreAccessError, match=f"{published}.*{advice}"):
        way_in(published)
    way_in(published, allow_shared_store=True)
    published.chmod(0o755)
    way_in(published)


@pytest.mark.parametrize(
    "inside",
    [
        *("A", "B", "CURRENT", "A/manifest.json", "B/manifest.json", "weights"),
        *("tmp", "receivers", "writer.json"),
    ],
)
def test_what_others_can_write_to_in_a_store_is_refused(published, inside):
    """The directory is open for others to read, and something in it for them to write."""
    for path in [published, *published.rglob("*")]:
        path.chmod(path.stat().st_mode | 0o055)
    paths = [published / inside] if inside != "weights" else [*published.rglob("weights-*")]
    for path in paths:
        path.chmod(0o777)
    with pytest.raises(dbuffer.StoreAccessError):
        use_both_buffers(published)


def use_both_buffers(store: Path) -> None:
    """A buffer that is not the newest is looked at when its turn comes."""
    with dbuffer.WeightSender(store) as sender:
        for version in (3, 4):
            load(store)
            sender.send(SMALL.weights(version))


@needs_root
@EVERY_WAY_IN
def test_a_store_of_somebody_else_is_refused(published, way_in):
    os.chown(published, NOBODY, -1)
    with pytest.raises(dbuffer.StoreAccessError, match=rf"{published} .*\b{NOBODY}\b"):
        way_in(published)
    way_in(published, allow_shared_store=True)


@EVERY_WAY_IN
def test_what_is_no_directory_is_refused(shm_path, way_in):
    path = shm_path / "file"
    path.write_text("not a store")
    if way_in is open_sender:
        with pytest.raises(dbuffer.StoreAccessError, match=str(path)):
            way_in(path)
    else:
        with dbuffer.WeightReceiver(path) as receiver:
            assert receiver.load_into(SMALL.empty()) is None


def test_a_store_that_turns_insecure_is_refused_from_then_on(published):
    with (
        dbuffer.WeightSender(published) as sender,
        dbuffer.WeightReceiver(published) as receiver,
    ):
        assert receiver.load_into(SMALL.empty()) == 2
        sender.send(SMALL.weights(3))
        published.chmod(0o777)
        target = SMALL.empty()
        with pytest.raises(dbuffer.StoreAccessError):
            receiver.load_into(target)
        assert not any(tensor.any() for tensor in target.values())


def open_as_nobody(connection: Connection, store: Path, allow_shared_store: bool) -> None:
    os.setuid(NOBODY)
    for way_in in (load, hold, open_sender):
        try:
            way_in(store, allow_shared_store=allow_shared_store)
        except Exception as error:  # which one it is, the test judges
            connection.send((isinstance(error, dbuffer.DBufferError), repr(error)))
        else:
            connection.send((True, "worked"))


@needs_root
@pytest.mark.parametrize("allow_shared_store", [False, True])
@pytest.mark.parametrize("mode", [0o700, 0o755])
def test_a_store_that_may_not_be_read_is_a_clear_error(published, allow_shared_store, mode):
    published.parent.chmod(0o755)
    published.chmod(mode)
    with Child(open_as_nobody, published, allow_shared_store) as child:
        for _ in range(3):
            is_ours, found = child.receive()
            assert is_ours, found
            assert str(published) in found
            assert f"for user {NOBODY}" in found or f"runs as {NOBODY}" in found


def read_as_nobody(connection: Connection, checkpoint: Path) -> None:
    import safetensors.torch

    assert safetensors
    os.setuid(NOBODY)
    connection.send(error_of(lambda: read_checkpoint(checkpoint)))


@needs_root
def test_a_checkpoint_that_may_not_be_read_is_not_said_to_be_missing(tmp_path):
    for path in (tmp_path, *tmp_path.parents[:3]):
        path.chmod(path.stat().st_mode | 0o055)
    checkpoint = tmp_path / "model.safetensors"
    save_file(SMALL.weights(1), checkpoint)
    checkpoint.chmod(0o600)
    with Child(read_as_nobody, checkpoint) as child:
        assert "Permission denied" in child.receive()


# Nothing in a store is ever unpickled

PACKAGE = Path(dbuffer.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))

UNPICKLERS = (
    *("_pickle", "cloudpickle", "dill", "joblib", "marshal", "pickle", "shelve"),
    *("torch.load", "torch.serialization", "torch.package", "torch.jit.load", "torch.hub"),
    *("numpy.load", "numpy.lib.npyio", "pandas.read_pickle", "multiprocessing.reduction"),
)
"""Modules and functions that may unpickle, or what is below them."""
UNPICKLING_METHODS = {
    *("load_memmap", "from_consolidated", "load_memmap_", "read_pickle", "Unpickler"),
    *("all_gather_object", "broadcast_object_list", "gather_object", "recv_object_list"),
    *("scatter_object_list",),
}
"""Whatever they are methods of."""
HARMLESS = {"pickle.dumps"}


class Uses(ast.NodeVisitor):
    """Which names of other modules a source uses, whatever they are called there."""

    def __init__(self, source: str) -> None:
        self._names = {"__builtins__": "builtins"}
        self.found: set[str] = set()
        tree = ast.parse(source)
        for node in ast.walk(tree):  # first of all: a function may stand above an import
            self._note_import(node)
        self.visit(tree)

    def _note_import(self, node: ast.AST) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.partition(".")[0]
                self._names[alias.asname or first] = alias.name if alias.asname else first
                if "." in alias.name:
                    self.found.add(alias.name)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                self._names[alias.asname or alias.name] = name
                self.found.add(name)

    def _name_of(self, node: ast.AST) -> str | None:
        if isinstance(node, ast.Name):
            return self._names.get(node.id)
        if isinstance(node, ast.Attribute):
            base = self._name_of(node.value)
            return None if base is None else f"{base}.{node.attr}"
        return None

    def visit_Name(self, node: ast.Name) -> None:
        self.found.add(self._name_of(node) or node.id)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        name = self._name_of(node)
        self.found.add(name or f"?.{node.attr}")
        if name is None:
            self.visit(node.value)

    def visit_Call(self, node: ast.Call) -> None:
        """``getattr(torch, "load")``, ``import_module("pickle")``."""
        words = [a.value for a in node.args if isinstance(a, ast.Constant)]
        function = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if function == "getattr" and words:
            self.found.add(f"{self._name_of(node.args[0]) or '?'}.{words[0]}")
        if function in ("import_module", "__import__"):
            self.found.update(map(str, words))
        self.generic_visit(node)


def ways_to_unpickle(source: str) -> set[str]:
    return {
        name
        for name in Uses(source).found - HARMLESS
        if name.rpartition(".")[2] in UNPICKLING_METHODS
        or any(f"{name}.".startswith(f"{unpickler}.") for unpickler in UNPICKLERS)
    }


def test_no_module_can_unpickle():
    found = {file: ways_to_unpickle(file.read_text()) for file in MODULES}
    assert not {file: ways for file, ways in found.items() if ways}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle; pickle.loads(data)",
        "import pickle as harmless; harmless.load(file)",
        "import pickle; read = pickle.loads",
        "import pickle; [*map(pickle.loads, data)]",
        "import pickle; codec = pickle",
        "from pickle import loads",
        "from pickle import *",
        "from _pickle import loads as decode",
        "def read(data):\n    from cloudpickle import loads\n    return loads(data)",
        "import torch; torch.load(file)",
        "import torch as t; t.load(file)",
        "from torch import load",
        "from torch import load as read",
        "from torch import serialization",
        "import torch.serialization",
        "from torch.serialization import load",
        "import torch; getattr(torch, 'load')(file)",
        "import importlib; importlib.import_module('pickle').loads(data)",
        "__import__('marshal').loads(data)",
        "from numpy import load",
        "TensorDict.load_memmap(path)",
        "from torch import distributed as d; d.broadcast_object_list(names)",
    ],
)
def test_every_way_to_unpickle_is_found(source):
    assert ways_to_unpickle(source)


def watch_for_pickles(connection: Connection, store: Path) -> None:
    """Use a store in every way that the core has; send what was unpickled meanwhile."""
    found: list[str] = []
    is_watching = True

    def watch(event: str, arguments: tuple[object, ...]) -> None:
        if is_watching and event in ("pickle.find_class", "marshal.loads"):
            found.append(f"{event} {arguments}"[:80])

    local = store.with_name("local")
    import dbuffer.api
    import dbuffer.receive.stager
    import dbuffer.tools.verification

    sys.addaudithook(watch)
    use_both_buffers(store)
    hold(store)
    with dbuffer.Mirror(store, local).start() as mirror:
        mirror.wait_until_current(10)
    receiver = dbuffer.WeightReceiver(local, receiver_id="rank", verify=False)
    stager = dbuffer.receive.stager.Stager(receiver)
    stager.take(timeout_s=10)
    stager.close()
    list(DoubleBuffer(store).receivers())
    used = found.copy()
    pickle.loads(pickle.dumps(Bomb(store.with_name("boom"))))
    is_watching = False
    connection.send((used, len(found) - len(used)))


def test_nothing_is_unpickled_while_a_store_is_used(published):
    with Child(watch_for_pickles, published) as child:
        used, of_the_control = child.receive()
    assert not used
    assert of_the_control


class Bomb:
    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (self.path,)

    def __init__(self, path: Path) -> None:
        self.path = str(path)


@pytest.mark.parametrize(
    "file",
    [
        *("CURRENT", "A/manifest.json", "B/manifest.json", "writer.json", "writer.lock"),
        *("receivers/old.json", "tmp/CURRENT", "tmp/.CURRENT.1.tmp", "weights"),
    ],
)
def test_a_pickle_in_a_store_is_not_opened(published, shm_path, file):
    paths = [published / file] if file != "weights" else [*published.rglob("weights-*")]
    for path in paths:
        path.write_bytes(pickle.dumps(Bomb(shm_path / "boom")))
        path.chmod(0o600)
    for way_in in (load, hold, open_sender, lambda store: [*DoubleBuffer(store).receivers()]):
        with contextlib.suppress(dbuffer.StoreCorruptError):
            way_in(published)
    assert not (shm_path / "boom").exists()
