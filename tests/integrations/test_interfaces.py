"""Records of frameworks' interfaces, against installed releases and a copy whose names moved."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import re
import runpy
import shutil
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import dbuffer
from dbuffer.engine.messages import decode_answer
from dbuffer.integrations import interfaces
from dbuffer.integrations.interfaces import Record, Sources
from dbuffer.integrations.vllm import follow, plugin
from tests.support import ROOT

DEV = runpy.run_path(str(ROOT / "dev.py"))


def packages_of(framework: str) -> Path:
    """Return the directory that an installed framework's package is in."""
    spec = importlib.util.find_spec(framework)
    if spec is None or spec.origin is None:
        pytest.skip(f"needs {framework}")
    return Path(spec.origin).parent.parent


@pytest.mark.parametrize("framework", interfaces.frameworks())
def test_records_have_all_names_that_dbuffer_imports(framework):
    record = Record.of(framework)
    assert DEV["uses_of"](framework).keys() <= record.names.keys()
    assert record.replaced <= record.names.keys()
    # Names that no release has would be found in none.
    assert all(any(form is not None for form in forms.values()) for forms in record.names.values())


@pytest.mark.parametrize("framework", interfaces.frameworks())
def test_records_hold_for_the_installed_releases(framework):
    root, version = packages_of(framework), interfaces.installed(framework)
    assert version is not None
    assert Record.of(framework).moved(root, version) == {}


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the files of vLLM that have recorded names."""
    root, place = packages_of("vllm"), tmp_path_factory.mktemp("copy")
    reader = Reader(root)
    for name in Record.of("vllm").names:
        reader.form(name, is_replaced=False)
    for file in reader.files:
        there = place / file.relative_to(root)
        there.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, there)
    return place


class Reader(Sources):
    """Notes which files are read."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.files: set[Path] = set()

    def _tree(self, module: str) -> Any:
        place = self._place(module)
        for file in (Path(f"{place}.py"), Path(str(place)) / "__init__.py"):
            if file.is_file():
                self.files.add(file)
                break
        return super()._tree(module)


def test_each_name_that_is_renamed_is_reported(copy):
    """A renamed name, and with it the names of its parts."""
    version = interfaces.installed("vllm")
    assert version is not None
    record = Record.of("vllm")
    assert record.moved(copy, version) == {}
    for name in record.names:
        expected = record.expected(name, version)
        module, _, path = name.partition(":")
        last = path.rpartition(".")[2]
        if expected is None or Sources(copy).form(f"{module}.{path}", is_replaced=False):
            continue  # no such name in this release, or a module
        word = re.compile(rf"\b{re.escape(last)}\b")
        texts = {file: file.read_text() for file in copy.rglob("*.py")}
        changed = {file: text for file, text in texts.items() if word.search(text)}
        for file, text in changed.items():
            file.write_text(word.sub("moved", text))
        one = Record("vllm", record.tested, record.replaced, {name: record.names[name]})
        assert one.moved(copy, version) == {name: (expected, None)}
        assert DEV["uses_of"]("vllm").get(name) or DEV["mentions_of"](name), name
        for file, text in changed.items():
            file.write_text(text)


def write(place: Path, text: str) -> Sources:
    module = place / "package" / "module.py"
    module.parent.mkdir(exist_ok=True)
    (module.parent / "__init__.py").write_text("from .module import One as Other\n")
    module.write_text(text)
    return Sources(place)


def test_forms_tell_what_matters_to_a_caller(tmp_path):
    text = 'class One:\n    def call(self, a: int, *, b: str = "x") -> None:\n        return a\n'
    name = "package:Other.call"
    assert write(tmp_path, text).form(name, is_replaced=False) == "(self, a, *, b='x')"
    before = write(tmp_path, text).form(name, is_replaced=True)
    comment = text.replace("return", '"""Return it."""\n        return').replace("a\n", "a  # it\n")
    assert write(tmp_path, comment).form(name, is_replaced=True) == before
    body = text.replace("return a", "return b")
    assert write(tmp_path, body).form(name, is_replaced=True) != before
    kind = text.replace("    def call", "    @functools.cached_property\n    async def call")
    form = write(tmp_path, kind).form(name, is_replaced=False)
    assert form == "cached_property async (self, a, *, b='x')"


def test_forms_tell_the_path_of_a_route_and_the_fields_of_a_request(tmp_path):
    text = (
        "class Request(Base, kw_only=True):\n    kind: str\n    mode: Literal['a'] = 'a'\n"
        "@app.post('/serve', tags=['x'])\nasync def serve(request): ...\n"
    )
    sources = write(tmp_path, text)
    fields = sources.form("package.module:Request.__init__", is_replaced=False)
    assert fields == "(self, *, kind, mode='a')"
    route = sources.form("package.module:serve", is_replaced=False)
    assert route == "post /serve async (request)"


@pytest.fixture
def newer(copy: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Let the copy be the installed vLLM, in a release above the last on record, which it was."""
    spec = importlib.machinery.ModuleSpec("vllm", None, origin=str(copy / "vllm" / "__init__.py"))
    find, version, load = importlib.util.find_spec, metadata.version, Record.of
    release = interfaces.installed("vllm")
    assert release is not None
    record = load("vllm")
    names = {name: {release: record.expected(name, release)} for name in record.names}
    record = Record("vllm", (release, release), record.replaced, names)
    monkeypatch.setattr(Record, "of", lambda n: record if n == "vllm" else load(n))
    monkeypatch.setattr(importlib.util, "find_spec", lambda n: spec if n == "vllm" else find(n))
    monkeypatch.setattr(metadata, "version", lambda n: "99.1" if n == "vllm" else version(n))
    interfaces.moved_names.cache_clear()
    core = copy / "vllm" / "v1" / "engine" / "core.py"
    text = core.read_text()
    yield core
    core.write_text(text)
    interfaces.moved_names.cache_clear()


def test_a_newer_release_follows_if_its_interface_is_as_recorded(newer):
    assert interfaces.is_newer("vllm")
    interfaces.require("vllm")


@pytest.mark.parametrize(
    ("parameters", "is_refused"),
    [
        ("handle, spec=None, *, extra=1", False),
        ("handle, spec=None, extra=1", False),
        ("handle, extra=1, spec=None", True),
        ("handle, spec=1", True),
        ("handle, spec=None, *, extra", True),
        ("handle", True),
    ],
)
def test_functions_may_gain_optional_parameters(newer, parameters, is_refused):
    """Others stay in order, with their defaults. A function that dbuffer replaces may gain none."""
    called, replaced = "vllm.v1.engine.core:called", "vllm.v1.engine.core:EngineCore.sleep"
    Record.of("vllm").names[called] = {"0": "(handle, spec=None)"}
    text = f"{newer.read_text()}\ndef called({parameters}): ...\n"
    newer.write_text(text)
    assert interfaces.moved_names("vllm") == ((called,) if is_refused else ())
    newer.write_text(text.replace("def sleep(self,", "def sleep(self, *, extra=None,"))
    interfaces.moved_names.cache_clear()
    assert replaced in interfaces.moved_names("vllm")


def test_a_newer_release_whose_interface_moved_is_refused_at_the_start(newer):
    newer.write_text(newer.read_text().replace("def pause_scheduler", "def stop_scheduler"))
    moved = r"vllm 99\.1 differs .*EngineCore\.pause_scheduler.*: install vllm 0"
    with pytest.raises(dbuffer.UnsupportedError, match=moved):
        follow(object())
    # A request from outside is answered, and never raised: other ranks have an answer, too.
    answer = plugin._call_the_extension(SimpleNamespace(), {})
    assert re.search(moved, str(decode_answer(answer)))
    registered: dict[str, Any] = {}
    factory = SimpleNamespace(register_engine=registered.__setitem__)
    plugin._register(factory, "backend", "DBufferWeightTransferEngine")
    with pytest.raises(dbuffer.UnsupportedError, match=moved):
        registered["dbuffer"](None, None)
    with pytest.raises(dbuffer.UnsupportedError, match=moved):
        registered["dbuffer"].trainer_init(None, client=None)
