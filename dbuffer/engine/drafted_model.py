"""`DraftedModel`: a model and the draft model of its speculative decoding, as one model.

Each step of a switch treats the two as one model. So a version's draft is loaded together with the
model that it drafts for (the target), or not at all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from dbuffer.engine.meta_model import set_loader
from dbuffer.format.layout import DRAFT_PREFIX, is_of_draft

Tensors = Iterable[tuple[str, torch.Tensor]]


class DraftedModel(torch.nn.Module):
    """A model that serves (the target), and the draft model that proposes its tokens.

    As in a published version, tensors of the target have their own names, and names of the draft's
    tensors begin with ``__draft__.``. Layers that the draft shares with the target have the
    target's names, and a version's draft must not contain them.

    Args:
        target: the model that serves.
        draft: the model that proposes tokens.
        is_in_target: whether a tensor of the target's checkpoint is loaded into the draft, too.
    """

    def __init__(
        self,
        target: Any,
        draft: Any,
        is_in_target: Callable[[str], bool] = lambda _: False,
    ) -> None:
        super().__init__()
        # The target is registered under an empty name, so that its tensors keep their names.
        self._modules |= {"": target, DRAFT_PREFIX[:-1]: draft}
        self._is_in_target = is_in_target
        self.last_of_draft: str | None = None
        """Name of the tensor that the draft's loaders are loading or failed to load, or None."""

    @property
    def target(self) -> Any:
        return self._modules[""]

    @property
    def draft(self) -> Any:
        return self._modules[DRAFT_PREFIX[:-1]]

    def has_draft(self, names: Iterable[str]) -> bool:
        """Whether a version with tensors of these names contains weights for the draft."""
        return any(is_of_draft(name) or self._is_in_target(name) for name in names)

    def load_weights(self, weights: Tensors) -> None:
        """Load the target model, and then the draft, if the weights include a draft."""
        self.last_of_draft = None
        of_draft: list[tuple[str, torch.Tensor]] = []
        self.target.load_weights(self._of_target(weights, of_draft))
        if of_draft:
            of_target = set(map(id, self.target.parameters()))
            shared = [tensor for tensor in self.draft.parameters() if id(tensor) in of_target]
            with _ignoring_loads(shared):
                self.draft.load_weights(self._noted(of_draft))
        self.last_of_draft = None

    def _of_target(
        self, weights: Tensors, of_draft: list[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            if self.has_draft([name]):
                of_draft.append((name, tensor))
            if not is_of_draft(name):
                yield name, tensor

    def _noted(
        self, of_draft: list[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for self.last_of_draft, tensor in of_draft:
            yield self.last_of_draft.removeprefix(DRAFT_PREFIX), tensor


@contextlib.contextmanager
def _ignoring_loads(parameters: Iterable[Any]) -> Iterator[None]:
    """Make loaders skip the given parameters in the ``with`` block."""
    loaders = [(parameter, *set_loader(parameter, _load_nothing)) for parameter in parameters]
    try:
        yield
    finally:
        for parameter, attribute, loader in loaders:
            if loader is None:
                delattr(parameter, attribute)
            else:
                setattr(parameter, attribute, loader)


def _load_nothing(*_: Any, **__: Any) -> None: ...
