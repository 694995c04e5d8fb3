"""Guarantee 6, bad input is refused: a store that others can write to, and anything pickled."""

from __future__ import annotations

import io
import os
import re
import stat
import tokenize
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from safetensors.torch import save_file

import dbuffer
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
def test_a_store_that_others_can_write_to_is_refused(published, way_in):
    for mode in (0o770, 0o702, 0o1777):
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
        *("A", "B", "CURRENT", "A/manifest.json", "B/manifest.json", "?/weights-*"),
        *("tmp", "receivers", "writer.json"),
    ],
)
def test_what_others_can_write_to_in_a_store_is_refused(published, inside):
    """The directory is open for others to read, and something in it for them to write."""
    for path in [published, *published.rglob("*")]:
        path.chmod(path.stat().st_mode | 0o055)
    for path in published.glob(inside):
        path.chmod(0o777)
    with pytest.raises(dbuffer.StoreAccessError, match=f"{published}/"):
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


def test_a_store_that_turns_insecure_is_refused_from_then_on(published):
    target = SMALL.empty()
    with (
        dbuffer.WeightSender(published) as sender,
        dbuffer.WeightReceiver(published) as receiver,
    ):
        assert receiver.load_into(target) == 2
        publish(sender, 3)
        published.chmod(0o777)
        with pytest.raises(dbuffer.StoreAccessError):
            receiver.load_into(target)
    assert SMALL.version_of(target) == 2


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
def test_a_checkpoint_that_may_not_be_read_is_not_said_to_be_missing(shm_path):
    shm_path.chmod(0o755)
    checkpoint = shm_path / "model.safetensors"
    save_file(SMALL.weights(1), checkpoint)
    checkpoint.chmod(0o600)
    with Child(read_as_nobody, checkpoint) as child:
        assert "Permission denied" in child.receive()


def publish_as_nobody(connection: Connection, store: Path) -> None:
    os.setuid(NOBODY)
    for version in (1, 2):
        assert connection.recv() == version
        with dbuffer.WeightSender(store, allow_shared_store=True) as sender:
            publish(sender, version)
        connection.send(version)


@needs_root
@pytest.mark.timing(forget_ephemeral_after_s=0.0)
def test_another_users_record_that_cannot_be_removed_stops_no_sender(shm_path):
    """A dead receiver's, in a directory like ``/tmp``: only its user may remove it."""
    for path in (shm_path, *shm_path.parents[:1]):
        path.chmod(path.stat().st_mode | 0o777)
    store = shm_path / "store"
    with Child(publish_as_nobody, store) as child:
        child.send(1)
        assert child.receive() == 1
        load(store, allow_shared_store=True)
        (store / "receivers").chmod(0o1777)
        os.chown(store / "receivers", 0, 0)
        [record] = (store / "receivers").glob("*.json")
        record.chmod(0o644)
        child.send(2)
        assert child.receive() == 2
    assert record.exists()
    load(store, allow_shared_store=True)


# Nothing in a store is ever unpickled

UNPICKLING = re.compile(
    r"\b(_?pickle|cloudpickle|dill|joblib|marshal|shelve|Unpickler|PackageImporter|serialization"
    r"|load_memmap_?|from_consolidated|npyio|reduction|read_pickle|hub|loads?"
    r"|(all_gather|broadcast|gather|recv|scatter|send)_object(_list)?)\b"
)
"""Names of modules and functions that may unpickle, whatever they belong to."""
HARMLESS = re.compile(
    r"\b(import pickle(?! as)|pickle \. dumps|(json|tomllib) \. loads"
    r"|(def|self \.|self \. _\w+ \.|staged \.) load)\b"
)
"""Other functions of these names."""


def ways_to_unpickle(source: str) -> list[str]:
    """Names by which a source may unpickle; a string of one word counts as a name."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    names = [token.string.strip("\"'") for token in tokens if token.type != tokenize.COMMENT]
    text = HARMLESS.sub("", " ".join(name for name in names if " " not in name))
    return [match[0] for match in UNPICKLING.finditer(text)]


def test_no_module_can_unpickle():
    modules = Path(dbuffer.__file__).parent.rglob("*.py")
    found = {path: ways_to_unpickle(path.read_text()) for path in modules}
    assert len(found) > 100
    assert not {path: ways for path, ways in found.items() if ways}
    for source in (
        "import pickle; pickle.loads(data)",
        "import pickle as harmless; harmless.load(file)",
        "from pickle import *",
        "from _pickle import loads as decode",
        "def read(data):\n    from cloudpickle import loads\n    return loads(data)",
        "import torch as t; t.load(file)",
        "from torch import load as read",
        "from torch import serialization",
        "import torch.serialization",
        "import torch; getattr(torch, 'load')(file)",
        "import importlib; importlib.import_module('pickle').loads(data)",
        "__import__('marshal').loads(data)",
        "from numpy import load",
        "TensorDict.load_memmap(path)",
        "from torch import distributed as d; d.broadcast_object_list(names)",
    ):
        assert ways_to_unpickle(source), source
