"""Fixtures: ranks of one job, which the files of the scope "ranks" share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.children import preload
from tests.support.worlds import World


@pytest.fixture(scope="session")
def transformers_preloaded() -> None:
    """Ranks need not import transformers (4 s) and FSDP2 (1 s), each of them."""
    names = ("transformers.core_model_loading", "transformers.models.mixtral.modeling_mixtral")
    more = ("torch.distributed.fsdp", "torch.distributed.pipelining", "tests.support.sharded")
    preload(*names, *more)


@pytest.fixture(scope="package")
def four(transformers_preloaded: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Four ranks in one process group, for all tests that need just that."""
    with World(tmp_path_factory.mktemp("world"), 4) as world:
        yield world


@pytest.fixture(scope="package")
def two(transformers_preloaded: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Two ranks in one process group, of another job."""
    with World(tmp_path_factory.mktemp("world"), 2) as world:
        yield world
