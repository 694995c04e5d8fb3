"""Commands as functions: their parameters are the arguments of the command line.

    def ls(
        store: Annotated[Path, Argument("Store directory.", parse=parse_path)],
        against: Annotated[Path | None, Argument("Compare with …", metavar="MODEL_DIR")] = None,
    ) -> int | None:
        "List the newest version's tensors."

A parameter without a default is a positional argument, any other one an option of its name. A
dataclass stands for its fields. A function returns its exit code, or None for success.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import textwrap
from collections.abc import Callable, Iterable, Iterator
from types import UnionType
from typing import Any, Literal, NoReturn, get_args, get_origin

from dbuffer.errors import OptionError

Command = Callable[..., int | None]

_METAVARS: dict[Any, str] = {int: "N", float: "SECONDS"}


@dataclasses.dataclass(frozen=True, slots=True)
class Argument:
    """Help of an argument; what its parameter's name, type and default do not say."""

    help: str
    name: str | None = None
    """Name of the option, if it is not the parameter's."""
    metavar: str | None = None
    parse: Callable[[str], Any] | None = None
    """Function that reads the value; it raises `argparse.ArgumentTypeError` or `OptionError`.
    Default: the type."""


class Parser(argparse.ArgumentParser):
    """Parser whose errors are `OptionError`, and whose help keeps the paragraphs of a docstring."""

    def __init__(self, **options: Any) -> None:
        super().__init__(
            formatter_class=_HelpFormatter, allow_abbrev=False, add_help=False, **options
        )
        self.add_argument("-h", "--help", action="help", help="Show this help.")

    def error(self, message: str) -> NoReturn:
        raise OptionError(f"{message}; see `{self.prog} --help`")


def parser_of(command: Command, prog: str) -> Parser:
    """Return the parser of a command's arguments."""
    parser = Parser(prog=prog, description=inspect.getdoc(command))
    for parameter in _parameters(command):
        _add(parser, parameter)
    return parser


def run_command(command: Command, parsed: argparse.Namespace) -> int | None:
    """Call a command with the arguments that its parser has read."""
    values = vars(parsed)
    arguments = {}
    for parameter in _signature(command):
        if (group := _dataclass_of(parameter)) is not None:
            fields = {each.name: values[each.name] for each in _signature(group)}
            arguments[parameter.name] = group(**fields)
        else:
            arguments[parameter.name] = values[parameter.name]
    return command(**arguments)


def summary_of(command: Command) -> str:
    """Return the first sentence of a command's docstring, without the full stop."""
    return inspect.getdoc(command).partition("\n")[0].rstrip(".")  # type: ignore[union-attr]


def _signature(function: Callable[..., Any]) -> Iterable[inspect.Parameter]:
    return inspect.signature(function, eval_str=True).parameters.values()


def _dataclass_of(parameter: inspect.Parameter) -> type | None:
    """Return the dataclass whose fields are arguments; None: the parameter is one itself."""
    kind = parameter.annotation
    return kind if isinstance(kind, type) and dataclasses.is_dataclass(kind) else None


def _parameters(command: Command) -> Iterator[inspect.Parameter]:
    for parameter in _signature(command):
        group = _dataclass_of(parameter)
        yield from [parameter] if group is None else _signature(group)


def _add(parser: Parser, parameter: inspect.Parameter) -> None:
    """Add the argument or option of a parameter."""
    kind, argument = get_args(parameter.annotation)
    if isinstance(kind, UnionType):  # int | None
        kind = next(each for each in get_args(kind) if each is not type(None))
    default, text = parameter.default, argument.help.replace("%", "%%")
    if default is inspect.Parameter.empty:
        metavar = argument.metavar or parameter.name.upper()
        parser.add_argument(parameter.name, metavar=metavar, type=argument.parse or kind, help=text)
        return
    flag = "--" + (argument.name or parameter.name.replace("_", "-"))
    options: dict[str, Any] = {"dest": parameter.name, "default": default}
    if kind is bool:
        action = argparse.BooleanOptionalAction if default else "store_true"
        parser.add_argument(flag, action=action, help=text, **options)
        return
    if default is not None:
        text += f" Default: {default}."
    if get_origin(kind) is Literal:
        parser.add_argument(flag, choices=get_args(kind), help=text, **options)
        return
    metavar = argument.metavar or _METAVARS.get(kind)
    parser.add_argument(flag, metavar=metavar, type=argument.parse or kind, help=text, **options)


class _HelpFormatter(argparse.HelpFormatter):
    """Formatter that wraps each paragraph on its own and breaks no word: words are to be copied."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        text = " ".join(text.split())
        return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = (self._split_lines(each, width - len(indent)) for each in text.split("\n\n"))
        return "\n\n".join("\n".join(f"{indent}{line}" for line in each) for each in paragraphs)
