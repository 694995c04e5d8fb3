"""`StoreScheme`: the base of our schemes, for collectors and for engines."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

from tensordict import TensorDictBase
from torch import nn
from torchrl.weight_update import WeightSyncScheme
from torchrl.weight_update.utils import _resolve_attr

from dbuffer.errors import NotReadyError, OptionError
from dbuffer.integrations.torchrl.options import TransportOptions
from dbuffer.integrations.torchrl.transport import VLLMDoubleBufferTransport
from dbuffer.runtime import options as checks

Strategy = Literal["tensordict", "state_dict"]

DEFAULT_MODEL_ID = "policy"


class StoreScheme(WeightSyncScheme):  # type: ignore[misc]  # torchrl is not typed
    """Base of our schemes: a ``WeightSyncScheme`` whose two sides meet in a store.

    Its errors are ``DBufferError`` and of the standard types that TorchRL's are.
    """

    _model_id: str = DEFAULT_MODEL_ID

    def __init__(
        self,
        remote_addr: str | os.PathLike[str],
        local_addr: str | os.PathLike[str] | None,
        num_threads: int,
        strategy: Strategy,
        options: dict[str, Any],
    ) -> None:
        checks.choice("strategy", strategy, ("tensordict", "state_dict"))
        super().__init__(strategy=strategy)
        self.options = TransportOptions.parse({"num_threads": num_threads} | options)
        # Absolute: workers may have other working directories.
        self.remote_addr = self.local_addr = str(checks.directory("remote_addr", remote_addr))
        if local_addr is not None:
            self.local_addr = str(checks.directory("local_addr", local_addr))
        self.num_threads = num_threads
        self._sender: Any = None
        self._receiver: Any = None

    @property
    def model(self) -> Any:
        """The model that weights are taken from, or loaded into; None if there is none."""
        model = self._model_ref() if self._model_ref is not None else None
        return find_model(self.context, self._model_id) if model is None else model

    @model.setter
    def model(self, model: Any) -> None:
        WeightSyncScheme.model.fset(self, model)

    def connect(self, *, worker_idx: int | None = None, weights: Any = None) -> None:
        """Begin, on either side, after ``init_on_sender`` or ``init_on_receiver``.

        Args:
            worker_idx: on the receiving side: this worker, counted from 0.
            weights: on the sending side: the first weights. Default: the model's.

        Raises:
            NotReadyError: (a ``RuntimeError``) that was not called, or this was; or an argument is
                for the other side.
        """
        if self.synchronized_on_sender or self.synchronized_on_receiver:
            raise NotReadyError("connect() cannot be called twice")
        if not self.initialized_on_sender and not self.initialized_on_receiver:
            raise NotReadyError("call init_on_sender() or init_on_receiver() before connect()")
        if self.initialized_on_sender and worker_idx is not None:
            raise NotReadyError("connect(worker_idx=...) is for the receiving side")
        if not self.initialized_on_sender and weights is not None:
            raise NotReadyError("connect(weights=...) is for the sending side")
        super().connect(worker_idx=worker_idx, weights=weights)

    # Names of TorchRL before 0.12.

    def init_on_worker(self, model_id: str, context: Any = None, **kwargs: Any) -> None:
        """Call ``init_on_receiver``."""
        self.init_on_receiver(model_id=model_id, context=context, **kwargs)

    def get_sender(self) -> Any:
        """Return the part with ``update_weights``, once ``init_on_sender`` was called.

        Raises:
            NotReadyError: (a ``RuntimeError``) it was not.
        """
        self._require_sender()
        return self

    def get_receiver(self) -> Any:
        """Return the part with ``receive``, once ``init_on_receiver`` was called.

        Raises:
            NotReadyError: (a ``RuntimeError``) it was not.
        """
        self._require_receiver()
        return self

    def apply_weights(self, weights: Any, inplace: bool = True) -> None:
        """Apply weights that did not come through the store.

        Args:
            weights: a TensorDict or a state dict.
            inplace: write into the tensors that the model has, instead of replacing them.

        Raises:
            NotReadyError: (a ``RuntimeError``) ``init_on_receiver`` was not called.
            OptionError: (a ``ValueError``) there is no model.
        """
        if not self.initialized_on_receiver:
            raise NotReadyError("call init_on_receiver() before applying weights")
        if self._model_ref is None:
            raise OptionError("no model to apply weights to: give init_on_receiver() one")
        super().apply_weights(weights, inplace=inplace)

    def prepare_weights(
        self, weights: Any, model_id: str | None = None, strategy: Any = None, context: Any = None
    ) -> Any:
        """Extract weights with TorchRL's strategy, from anything that ``send`` takes.

        Args:
            weights: a module, its name in the context, or None for the model ``model_id``; anything
                else is returned unchanged.
            model_id: a name. Default: that given to ``init_on_sender``.
            strategy: a ``WeightStrategy``. Default: the scheme's.
            context: where a name is searched: by its ``get_model``, or as a path of attributes.
                Default: that given to ``init_on_sender``.

        Raises:
            OptionError: (a ``ValueError``) there is no model of the name ``weights``.
        """
        context = self.context if context is None else context
        if weights is None:
            weights = find_model(context, model_id or self._model_id)
        weights = self._find_weights(weights, context)
        if isinstance(weights, nn.Module) and not isinstance(weights, TensorDictBase):
            return (strategy or self._strategy).extract_weights(weights)
        return weights

    def create_transport(
        self,
        pipe_or_context: Any = None,  # noqa: ARG002 - of other schemes
        **kwargs: Any,  # noqa: ARG002
    ) -> VLLMDoubleBufferTransport:
        """Return a transport, which writes and reads the store by hand; collectors need none."""
        remote, local = self._store_at(self.remote_addr), self._store_at(self.local_addr)
        return VLLMDoubleBufferTransport(remote, local, options=self.options)

    def _store_at(self, address: str) -> str | Path:
        """The model's store, below an address or at it."""
        return address

    def shutdown(self) -> None:
        """Close the store on this side. A second call does nothing."""
        super().shutdown()
        self._close()

    def _find_weights(self, weights: Any, context: Any) -> Any:
        """Return the model that a name stands for; the scheme's own weights for None."""
        if weights is None:
            return self._own_weights()
        if not isinstance(weights, str):
            return weights
        if (model := find_model(context, weights)) is None:
            raise OptionError(f"there is no model {weights!r} in {context!r:.200}")
        return model

    def _own_weights(self) -> Any:
        return self.model

    def _require_sender(self) -> Any:
        if self._sender is None:
            raise NotReadyError(
                "this scheme does not send, or was shut down: call init_on_sender() first"
            )
        return self._sender

    def _require_receiver(self) -> Any:
        if self._receiver is None:
            raise NotReadyError(
                "this scheme does not receive, or was shut down: call init_on_receiver() first"
            )
        return self._receiver

    def _close(self) -> None:
        # __del__ comes here as well, also of a scheme whose __init__ has raised.
        for name in ("_sender", "_receiver"):
            part = self.__dict__.get(name)
            if part is not None:
                part.shutdown()
                setattr(self, name, None)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_sender": None, "_receiver": None}


def find_model(context: Any, model_id: str) -> Any:
    """Find the model of an id in a context, mostly a collector; None if there is none.

    The id may be a path as ``env.transform[0]``. A collector whose policy is made by its workers
    may keep one to take weights from.
    """
    if context is None:
        return None
    get_model = getattr(context, "get_model", None)
    try:
        model = get_model(model_id) if callable(get_model) else _resolve_attr(context, model_id)
    except (AttributeError, LookupError, TypeError, ValueError):  # a path may have an index
        model = None
    if model is None and model_id == DEFAULT_MODEL_ID:
        return getattr(context, "_fallback_policy", None)
    return model


def model_of_factory(context: Any, model_id: str) -> Any:
    """Make a policy with the factory that all workers of a collector share; None without one."""
    if model_id != DEFAULT_MODEL_ID:
        return None
    factories = getattr(context, "policy_factory", None)
    if callable(factories):
        return factories()
    if not factories or factories[0] is None or any(f is not factories[0] for f in factories):
        return None
    return factories[0]()
