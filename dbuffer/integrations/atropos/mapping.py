"""`ParameterMapping`: the names and layouts that Atropos' servers use for a trainer's tensors.

The servers write the mapping into the file ``vllm_bridge_config.json``. Most entries map a name to
itself. If several names are mapped to the same name, their tensors are the parts of a fused
projection. dbuffer publishes these tensors under their original names, because the engine's loader
fuses them.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from dbuffer.errors import (
    DBufferError,
    EngineUnreachableError,
    InvalidWeightsError,
    NotReadyError,
    OptionError,
    UnsupportedError,
)
from dbuffer.integrations.atropos.config import BridgeConfig
from dbuffer.integrations.vllm.vllm_engine import VllmServer
from dbuffer.runtime import options
from dbuffer.runtime.messages import listed
from dbuffer.runtime.timing import TIMING
from dbuffer.weights.names import NameMap, Rule, read_mapping_file

logger = logging.getLogger(__name__)

MAPPING_FILE = "vllm_bridge_config.json"
PATH_VARIABLE = "VLLM_BRIDGE_CONFIG_PATH"

_RETRY_S = 0.1
_PROBE_S = 2.0
_QUERY = re.compile(r"(?:^|\.)(?:wq|q_proj)\.")
_KEY = re.compile(r"(?:^|\.)(?:wk|k_proj)\.")
_CHANGES_NOTHING: dict[str, Any] = {"param_mappings": {}}


def mapping_path(directory: str | None) -> Path:
    """Return the mapping file: ``VLLM_BRIDGE_CONFIG_PATH``, or the default in ``directory``."""
    named = os.environ.get(PATH_VARIABLE)
    if named:
        return options.path(PATH_VARIABLE, named)
    return options.path("log_dir", directory or ".") / MAPPING_FILE


def get_name_conversions(param_mappings: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the trainer's parameter names, grouped by the name that the servers use.

    ``param_mappings`` is the field ``param_mappings`` of a mapping file. A parameter without
    ``vllm_name`` has the same name on the servers.
    """
    conversions: dict[str, list[str]] = {}
    for name, entry in param_mappings.items():
        conversions.setdefault(entry.get("vllm_name", name), []).append(name)
    return conversions


class ParameterMapping:
    """Names that the servers use for a trainer's tensors, and which tensors to permute.

    ``content`` is the decoded JSON of the mapping file at ``path``. :func:`permute_for_rotary`
    explains how tensors are permuted.
    """

    def __init__(self, path: Path, content: Any = _CHANGES_NOTHING) -> None:
        self.path = path
        rules = NameMap.parse(content, str(path)).rules
        targets = Counter(rule.to for rule in rules if rule.kind == "name")
        renamed = [rule for rule in rules if targets[rule.to] > 1 and not _is_part(rule)]
        if renamed:
            raise OptionError(
                f"{path} renames parts of fused projections: {listed(renamed)}. An "
                "engine fuses these parts itself, and finds them only by their names in the "
                "checkpoint: map each part to that name"
            )
        self.names = NameMap(
            rule
            for rule in rules
            if rule.kind != "name" or (rule.text != rule.to and targets[rule.to] == 1)
        )
        self.entries: dict[str, Any] = content.get("param_mappings", {})
        permuted = (name for name, entry in self.entries.items() if entry.get("needs_permute"))
        self.permuted = frozenset(permuted)

    def check(self, names: Iterable[str]) -> None:
        names = list(names)
        of_names = {str(rule.text) for rule in self.names.rules if rule.kind == "name"}
        unknown = sorted((of_names | self.permuted).difference(names))
        if unknown:
            raise OptionError(
                f"{self.path} maps {len(unknown)} names that the trainer's model does not have: "
                f"{listed(unknown)}; is the mapping for another model?"
            )
        counts = Counter(map(self.names, names))
        twice = [name for name, count in counts.items() if count > 1]
        if twice:
            raise OptionError(
                f"{self.path} gives several tensors the same name: {twice[:5]}; map each tensor to "
                "a different name"
            )

    def permute(
        self, tensors: Mapping[str, torch.Tensor], num_heads: int, num_kv_heads: int
    ) -> dict[str, torch.Tensor]:
        heads = {name: _heads_of(name, num_heads, num_kv_heads) for name in self.permuted}
        return {
            name: permute_for_rotary(tensor.detach(), heads[name]) if name in heads else tensor
            for name, tensor in tensors.items()
        }


def wait_for_mapping(config: BridgeConfig, server: VllmServer | None) -> Any:
    """Return the mapping file's content, or an empty mapping if the file is missing and not needed.

    Wait for a file that is needed. The file is needed if ``VLLM_BRIDGE_CONFIG_PATH`` names it, or
    if ``config.directory`` is set. Exception: in local mode, a file in ``config.directory`` is not
    needed, because a stock vLLM server does not write it.
    """
    path, timeout_s = mapping_path(config.directory), config.timeout_seconds
    is_named = bool(os.environ.get(PATH_VARIABLE))
    if not path.exists():
        if not is_named and config.directory is None:
            return _CHANGES_NOTHING
        logger.warning("waiting up to %g s for %s, which a server writes", timeout_s, path)
    deadline = time.monotonic() + timeout_s
    while not path.exists():
        if not is_named and server is not None and is_stock(server):
            logger.warning("no %s: weights are published under the trainer's names", path)
            return _CHANGES_NOTHING
        if time.monotonic() > deadline:
            raise NotReadyError(
                f"{path} was not written within {timeout_s:g} s: Atropos' servers write it into "
                "their LOGDIR when they start. If your servers do not write this file and use the "
                'trainer\'s names, create it with the content {"param_mappings": {}}'
            )
        time.sleep(_RETRY_S)
    deadline = time.monotonic() + TIMING.settle_s
    while True:
        try:
            return read_mapping_file(path)
        except OptionError:  # the server may still be writing the file
            if time.monotonic() > deadline:
                raise
        time.sleep(_RETRY_S)


def _is_part(rule: Rule) -> bool:
    module = str(rule.to).split(".")[:-2]
    return str(rule.text).split(".")[: len(module)] == module


def _heads_of(name: str, num_heads: int, num_kv_heads: int) -> int:
    if _QUERY.search(name):
        return num_heads
    if _KEY.search(name):
        return num_kv_heads
    raise OptionError(
        f"needs_permute is set for {name!r}, but only projections of queries and keys (q_proj, "
        "k_proj, wq, wk) have rotary layouts"
    )


def permute_for_rotary(w: torch.Tensor, n_heads: int) -> torch.Tensor:
    """Return a copy of a projection, its rotary pairs converted from interleaved to halves.

    A rotary position embedding rotates pairs of a head's d elements. In Meta's checkpoints and
    GPT-J, pair i has the elements 2i and 2i+1 (interleaved). In Hugging Face's checkpoints and
    GPT-NeoX, pair i has the elements i and i + d/2 (halves). Attention scores stay the same if both
    projections, of queries and of keys, are converted.

    Args:
        w: weight ``[n_heads * head_dim, in_features]`` or bias ``[n_heads * head_dim]`` of a query
            or key projection.
        n_heads: number of heads in the projection. Keys can have fewer heads than queries.
    """
    if n_heads < 1 or not w.ndim or not w.shape[0] or w.shape[0] % (2 * n_heads):
        raise InvalidWeightsError(
            f"the rows of a tensor of shape {list(w.shape)} cannot be split into {n_heads} heads "
            "with an even number of rows each: pass the number of heads of this projection"
        )
    pairs = w.reshape(n_heads, -1, 2, *w.shape[1:])
    return pairs.transpose(1, 2).reshape(w.shape)


def permute_for_rotary_1d(w: torch.Tensor, n_heads: int) -> torch.Tensor:
    """Call :func:`permute_for_rotary`, which also converts biases. Atropos has both names."""
    return permute_for_rotary(w, n_heads)


# Calls to the single server of local mode. A server with Atropos' routes is notified of each
# version; a stock vLLM server follows the store with the middleware `FollowStore`.


def notify(server: VllmServer, notification: dict[str, Any], timeout_s: float) -> None:
    """Call a server's Atropos route, if any. Retry up to ``timeout_s`` until the server answers."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            _has_route(server, "POST", "/bridge/notify_update", json=notification)
        except EngineUnreachableError:
            if time.monotonic() + _RETRY_S > deadline:
                raise
        else:
            return
        time.sleep(_RETRY_S)


def is_stock(server: VllmServer) -> bool:
    """Whether a server answers, has vLLM's routes, and does not have Atropos' routes."""
    try:
        has_version = _has_route(server, "GET", "/version", timeout=_PROBE_S)
        return has_version and not _has_route(server, "GET", "/bridge/info", timeout=_PROBE_S)
    except DBufferError:
        return False


def _has_route(server: VllmServer, method: str, path: str, **options: Any) -> bool:
    try:
        server.request(method, path, **options)
    except UnsupportedError:
        return False
    return True
