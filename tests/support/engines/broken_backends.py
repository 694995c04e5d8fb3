"""The checks of `dbuffer.testing.conformance`: dbuffer passes, and a broken backend fails each."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dbuffer.testing import conformance
from dbuffer.testing.conformance import Bench, Client, Source
from tests.support.engines.patch_trainers import trainer_engine
from tests.support.engines.tiny_models import make_model, vary_vectors


class Altered(Source):
    """A source that loses or alters tensors."""

    def __init__(self, source: Source, alter: Callable[[Iterator[Any]], Iterator[Any]]) -> None:
        self.source, self.alter = source, alter

    def metadata(self) -> list[Any]:
        return [conformance.ParamMeta(n, t.dtype, tuple(t.shape)) for n, t in self]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self.alter(iter(self.source))


class Unchanged:
    """A trainer's half that passes everything on."""

    def __init__(self, engine: Any, source: Source) -> None:
        self.engine, self.source = engine, source

    def send_weights(self, *patches: Any) -> None:
        self.engine.send_weights(*patches)

    def shutdown(self) -> None:
        self.engine.shutdown()


class SendsNothingTwice(Unchanged):
    """A trainer that never sends the same weights again."""

    sent: Any = None

    def send_weights(self, *patches: Any) -> None:
        if patches or self.sent is not self.source.weights:
            super().send_weights(*patches)
            self.sent = self.source.weights


class LosesAPatch(Unchanged):
    def send_weights(self, *patches: Any) -> None:
        super().send_weights(*(patches[0][:-1],) if patches else ())


class TakesAnyField:
    """An engine that ignores unknown fields."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    def update_weights(self, request: Any) -> None:
        if "no_such_field" not in request["update_info"]:
            self._llm.update_weights(request)


def require_conformance(store: Path, llm: Any) -> None:
    """Run all checks on an engine with seed 1, and each with a backend that must not pass it."""
    models = make_model("qwen3", 1), make_model("qwen3", 0)
    vary_vectors(models[1])
    first, second = (
        {name: parameter.detach() for name, parameter in model.named_parameters()}
        for model in models
    )

    def start(client: Client, source: Source) -> Any:
        how = {"sparse": True, "sender": {"dtype": torch.bfloat16}}
        return trainer_engine(store, client, source, **how)

    def with_known_names(tensors: Iterator[Any]) -> Iterator[Any]:
        return iter((first | {n: t for n, t in tensors if n in first}).items())

    def fitted(tensors: Iterator[Any]) -> Iterator[Any]:
        for name, tensor in tensors:
            fitting = first[name].clone()
            shapes = zip(tensor.shape, fitting.shape, strict=True)
            part = tuple(slice(min(sizes)) for sizes in shapes)
            fitting[part] = tensor[part]
            yield name, fitting

    def up_to_a_failure(tensors: Iterator[Any]) -> Iterator[Any]:
        received = dict(first)
        with contextlib.suppress(RuntimeError):
            for name, tensor in tensors:
                received[name] = tensor
        return iter(received.items())

    def altered(alter: Any) -> Any:
        return lambda client, source: start(client, Altered(source, alter))

    def wrapped(kind: type[Unchanged]) -> Any:
        return lambda client, source: kind(start(client, source), source)

    broken: dict[Any, tuple[Any, Any, str]] = {
        conformance.check_names: (llm, altered(with_known_names), "a wrong update: .* is missing"),
        conformance.check_shapes: (llm, altered(fitted), "a wrong update: too few rows"),
        conformance.check_refusals: (TakesAnyField(llm), start, "unknown field of update_info"),
        conformance.check_half_updates: (llm, altered(up_to_a_failure), "the source fails"),
        conformance.check_sleep: (llm, wrapped(SendsNothingTwice), "were lost in sleep"),
        conformance.check_sparse: (llm, wrapped(LosesAPatch), "patches and a whole update differ"),
    }
    assert set(broken) == set(conformance.CHECKS)
    bench = Bench(llm, start, first, second)
    for check, (engine, start_broken, problem) in broken.items():
        check(bench)
        with pytest.raises(AssertionError, match=problem):
            check(Bench(engine, start_broken, first, second))
        with bench.training():
            assert bench.state() == bench.fresh
