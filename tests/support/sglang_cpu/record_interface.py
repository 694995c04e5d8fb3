"""Writes down what of SGLang's interface the adapter rests on: ``sglang_interface.json``.

Run it with SGLang's Python when another SGLang is to be supported, and look at what changed:

    .venv-sglang/bin/python tests/support/sglang_cpu/record_interface.py

It reads SGLang's sources and imports none of them, so that the comparison costs CI nothing.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import json
from pathlib import Path
from typing import Any

RECORD = Path(__file__).with_name("sglang_interface.json")

FUNCTIONS = {
    "srt/entrypoints/engine.py": (
        "Engine.begin_weight_update",
        "Engine.end_weight_update",
        "Engine.get_model_info",
        "Engine.get_server_info",
        "Engine.update_weights_from_tensor",
    ),
    "srt/managers/tokenizer_control_mixin.py": ("TokenizerControlMixin.update_weight_version",),
    "srt/model_executor/model_runner_components/weight_updater.py": (
        "WeightUpdater.update_weights_from_tensor",
    ),
    "srt/model_loader/loader.py": (
        "DefaultModelLoader.load_weights_and_postprocess",
        "DefaultModelLoader.restore_weights_before_loading",
    ),
    "srt/model_loader/utils.py": ("set_default_torch_dtype",),
    "srt/model_loader/weight_utils.py": ("default_weight_loader",),
    "srt/runtime_context.py": ("get_model", "get_parallel"),
}
"""What is called, or calls, by file."""

REQUESTS = {
    "srt/managers/io_struct.py": (
        "BeginWeightUpdateReqInput",
        "ContinueGenerationReqInput",
        "EndWeightUpdateReqInput",
        "PauseGenerationReqInput",
        "UpdateWeightVersionReqInput",
        "UpdateWeightsFromTensorReqInput",
    )
}
"""Fields of what is sent."""

ROUTES = (
    "/begin_weight_update",
    "/continue_generation",
    "/end_weight_update",
    "/model_info",
    "/pause_generation",
    "/server_info",
    "/update_weight_version",
    "/update_weights_from_tensor",
)
SERVER = "srt/entrypoints/http_server.py"


def interface(package: Path) -> dict[str, Any]:
    """Signatures, fields and routes, as the sources in ``package`` have them; None: not there."""
    functions = {
        name: _signature(_find(package / file, name))
        for file, names in FUNCTIONS.items()
        for name in names
    }
    requests = {
        name: _fields(_find(package / file, name))
        for file, names in REQUESTS.items()
        for name in names
    }
    return {"functions": functions, "requests": requests, "routes": _routes(package / SERVER)}


def _find(file: Path, qualified_name: str) -> Any:
    found: Any = ast.parse(file.read_text())
    for name in qualified_name.split("."):
        inner = [node for node in found.body if getattr(node, "name", None) == name]
        if not inner:
            return None
        found = inner[-1]
    return found


def _signature(function: Any) -> str | None:
    return None if function is None else ast.unparse(function.args)


def _fields(request: Any) -> dict[str, str] | None:
    if request is None:
        return None
    fields = [node for node in request.body if isinstance(node, ast.AnnAssign)]
    return {
        ast.unparse(field.target): " = ".join(
            ast.unparse(part) for part in (field.annotation, field.value) if part is not None
        )
        for field in fields
    }


def _routes(file: Path) -> dict[str, str | None]:
    found: dict[str, str | None] = dict.fromkeys(ROUTES)
    for node in ast.walk(ast.parse(file.read_text())):
        for decorator in getattr(node, "decorator_list", []):
            if isinstance(decorator, ast.Call) and decorator.args:
                path = getattr(decorator.args[0], "value", None)
                if path in found:
                    found[path] = ast.unparse(decorator.func)
    return found


def main() -> None:
    """Write the record of the SGLang that is installed here."""
    spec = importlib.util.find_spec("sglang")
    assert spec.origin is not None
    version = importlib.metadata.version("sglang")
    record = {"version": version, **interface(Path(spec.origin).parent)}
    RECORD.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
