"""Find a model in what TorchRL calls a context: a collector, mostly."""

from __future__ import annotations

from typing import Any

from torchrl.weight_update.utils import _resolve_attr

DEFAULT_MODEL_ID = "policy"


def find_model(context: Any, model_id: str | None) -> Any:
    """The model under that id, which may be a path as ``env.transform[0]``; None if there is none.

    A collector whose policy is made by its workers may keep one to take weights from.
    """
    if context is None:
        return None
    model_id = model_id or DEFAULT_MODEL_ID
    get_model = getattr(context, "get_model", None)
    try:
        model = get_model(model_id) if callable(get_model) else _resolve_attr(context, model_id)
    except (AttributeError, LookupError, TypeError, ValueError):  # a path may have an index
        model = None
    if model is None and model_id == DEFAULT_MODEL_ID:
        return getattr(context, "_fallback_policy", None)
    return model


def make_model(context: Any, model_id: str | None) -> Any:
    """A policy from the factory that all workers of a collector share; None if they do not."""
    if (model_id or DEFAULT_MODEL_ID) != DEFAULT_MODEL_ID:
        return None
    factories = getattr(context, "policy_factory", None)
    if callable(factories):
        return factories()
    if not factories or factories[0] is None or any(f is not factories[0] for f in factories):
        return None
    return factories[0]()
