"""Guarantee 6, bad input is refused: a store that others can write to, and anything pickled."""

from __future__ import annotations

import ast
import contextlib
import os
import pickle
import stat
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from support import SMALL, Child, newest

import dbuffer
from dbuffer import agreement

NOBODY = 65534

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
        for version in (1, 2):
            sender.send(SMALL.weights(version))
    return store


def test_a_new_store_is_for_its_owner_alone(shm_path: Path) -> None:
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
def test_a_store_that_others_can_write_to_is_refused(
    published: Path, way_in: Callable[..., None], mode: int
) -> None:
    published.chmod(mode)
    with pytest.raises(dbuffer.StoreInsecureError, match=f"{published}.*chmod go-w"):
        way_in(published)
    way_in(published, allow_shared_store=True)
    published.chmod(0o755)
    way_in(published)


@pytest.mark.parametrize(
    "inside", ["A", "B", "CURRENT", "A/manifest.json", "B/manifest.json", "weights"]
)
def test_what_others_can_write_to_in_a_store_is_refused(published: Path, inside: str) -> None:
    """The directory is open for others to read, and something in it for them to write."""
    for path in [published, *published.rglob("*")]:
        path.chmod(path.stat().st_mode | 0o055)
    paths = [published / inside] if inside != "weights" else [*published.rglob("weights-*")]
    for path in paths:
        path.chmod(0o777)
    with pytest.raises(dbuffer.StoreInsecureError):
        use_both_buffers(published)


def use_both_buffers(store: Path) -> None:
    """A buffer that is not the newest is looked at when its turn comes."""
    with dbuffer.WeightSender(store) as sender:
        for version in (3, 4):
            load(store)
            sender.send(SMALL.weights(version))


@needs_root
@EVERY_WAY_IN
def test_a_store_of_somebody_else_is_refused(published: Path, way_in: Callable[..., None]) -> None:
    os.chown(published, NOBODY, -1)
    with pytest.raises(dbuffer.StoreInsecureError, match=f"{published} belongs to user {NOBODY}"):
        way_in(published)
    way_in(published, allow_shared_store=True)


@EVERY_WAY_IN
def test_what_is_no_directory_is_refused(shm_path: Path, way_in: Callable[..., None]) -> None:
    path = shm_path / "file"
    path.write_text("not a store")
    if way_in is open_sender:
        with pytest.raises(dbuffer.StoreAccessError, match=str(path)):
            way_in(path)
    else:
        with dbuffer.WeightReceiver(path) as receiver:
            assert receiver.load_into(SMALL.empty()) is None


def test_a_store_that_turns_insecure_is_refused_from_then_on(published: Path) -> None:
    with (
        dbuffer.WeightSender(published) as sender,
        dbuffer.WeightReceiver(published) as receiver,
    ):
        assert receiver.load_into(SMALL.empty()) == 2
        sender.send(SMALL.weights(3))
        published.chmod(0o777)
        target = SMALL.empty()
        with pytest.raises(dbuffer.StoreInsecureError):
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
def test_a_store_that_may_not_be_read_is_a_clear_error(
    published: Path, allow_shared_store: bool, mode: int
) -> None:
    published.parent.chmod(0o755)
    published.chmod(mode)
    with Child(open_as_nobody, published, allow_shared_store) as child:
        for _ in range(3):
            is_ours, found = child.receive()
            assert is_ours, found
            assert str(published) in found


# ---------------------------------------------------------------------------------------------
# Nothing in a store is ever unpickled

# What `agreement` unpickles comes from ranks of the same job, by way of their process group.
CORE = sorted(set(Path(dbuffer.__file__).parent.glob("*.py")) - {Path(agreement.__file__)})
UNPICKLERS = {"cloudpickle", "dill", "joblib", "marshal", "pickle", "shelve"}


@pytest.mark.parametrize("file", CORE, ids=lambda file: file.name)
def test_no_module_of_the_core_can_unpickle(file: Path) -> None:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            assert not UNPICKLERS & {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert (node.module or "").partition(".")[0] not in UNPICKLERS
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            assert (node.value.id, node.attr) != ("torch", "load")
            assert node.attr not in ("load_memmap", "from_consolidated")


class Bomb:
    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (self.path,)

    def __init__(self, path: Path) -> None:
        self.path = str(path)


@pytest.mark.parametrize("file", ["CURRENT", "A/manifest.json", "B/manifest.json", "writer.json"])
def test_a_pickle_in_a_record_is_not_opened(published: Path, shm_path: Path, file: str) -> None:
    (published / file).write_bytes(pickle.dumps(Bomb(shm_path / "boom")))
    for way_in in (load, open_sender):
        with contextlib.suppress(dbuffer.StoreCorruptError):
            way_in(published)
    assert not (shm_path / "boom").exists()
