"""Program of `test_recipes.py` beside vLLM's tests: vLLM's own parser reads commands."""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
from pathlib import Path
from typing import Any

from vllm.utils.argparse_utils import FlexibleArgumentParser


def arguments() -> Any:
    for place in ("common", "launchers", "openai"):
        with contextlib.suppress(ModuleNotFoundError):
            return importlib.import_module(f"vllm.entrypoints.{place}.cli_args")
    raise AssertionError


def main(directory: Path) -> None:
    seen, vllm = [], arguments()
    for command in json.loads((directory / "commands.json").read_text()):
        parser = vllm.make_arg_parser(FlexibleArgumentParser(exit_on_error=False))
        try:
            options = parser.parse_args(command[2:])
            vllm.validate_parsed_serve_args(options)
        except (Exception, SystemExit) as error:
            seen.append(repr(error))
            continue
        seen.append([options.model_tag or options.model, options.middleware])
    (directory / "observed.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
