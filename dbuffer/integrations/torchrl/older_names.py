"""`OlderNames`: methods that TorchRL's schemes had before 0.12, for programs that call them."""

from __future__ import annotations

from typing import Any


class OlderNames:
    """Beside a ``WeightSyncScheme``, whose present methods it calls."""

    initialized_on_sender: bool
    initialized_on_receiver: bool
    init_on_receiver: Any

    def init_on_worker(self, model_id: str, context: Any = None, **kwargs: Any) -> None:
        """The same as ``init_on_receiver``."""
        self.init_on_receiver(model_id=model_id, context=context, **kwargs)

    def get_sender(self) -> Any:
        """What has ``update_weights``.

        Raises:
            RuntimeError: ``init_on_sender`` was not called.
        """
        if not self.initialized_on_sender:
            raise RuntimeError("call init_on_sender() before get_sender()")
        return self._sending_part()

    def get_receiver(self) -> Any:
        """What receives.

        Raises:
            RuntimeError: ``init_on_receiver`` was not called.
        """
        if not self.initialized_on_receiver:
            raise RuntimeError("call init_on_receiver() before get_receiver()")
        return self._receiving_part()

    def _sending_part(self) -> Any:
        return self

    def _receiving_part(self) -> Any:
        return self
