"""What a model offers so that it can be watched, and what hooks are called with.

The recorder knows no framework. A model that can be attached to has named parameters and named
modules whose hook registries are empty, and cost nothing, while nobody watches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.floating]
GradientHook = Callable[[Array], None]
"""Called once in a backward pass with the finished gradient of a tensor."""


class Handle(Protocol):
    """What registering a hook returns."""

    def remove(self) -> None:
        """Take the hook out again; a second call does nothing."""


class WatchedTensor(Protocol):
    """A value in the computation: its array, and a hook for its gradient."""

    @property
    def data(self) -> Array:
        """The value; not to be changed in place before the step ends (parameters: by the update only)."""

    def register_gradient_hook(self, hook: GradientHook) -> Handle:
        """Call ``hook(gradient)`` when backward has finished this tensor's gradient."""


class WatchedParameter(WatchedTensor, Protocol):
    """A weight."""

    @property
    def trainable(self) -> bool:
        """The optimizer updates it."""

    @property
    def weight_decay(self) -> bool:
        """The optimizer decays it."""


class WatchedModule(Protocol):
    """A part of the model with one output."""

    @property
    def role(self) -> str:
        """What it is: "embedding", "layer_norm", "linear", "relu", "attention", "block", ..."""

    @property
    def layer(self) -> int | None:
        """Block index, None outside the blocks."""

    def register_forward_hook(self, hook: ForwardHook) -> Handle:
        """Call ``hook(output, token_mask)`` at the end of each forward pass."""


class WatchedAttention(WatchedModule, Protocol):
    """A module whose role is "attention"."""

    def register_attention_hook(self, hook: AttentionHook) -> Handle:
        """Call ``hook(attention)`` at the end of each forward pass."""


ForwardHook = Callable[[WatchedTensor, "NDArray[np.bool_] | None"], None]
"""(output, mask of real tokens over the output's leading axes; None when every row is a real token)."""


@dataclass(frozen=True)
class Attention:
    """What one attention module did in one forward pass.

    probabilities: (B, H, T, T), query x key, exactly the array that multiplied the values.
    token_mask: (B, T) bool, true at real tokens.
    logits: recomputes the scaled logits before masking, (B, H, T, T); a call costs a matrix product,
        so that the training path keeps nothing.
    """

    probabilities: Array
    token_mask: NDArray[np.bool_]
    logits: Callable[[], Array]


AttentionHook = Callable[[Attention], None]


class WatchedModel(Protocol):
    """What ``Recorder.attach`` takes."""

    def named_parameters(self) -> Iterable[tuple[str, WatchedParameter]]:
        """Each weight once, tied ones under their first name."""

    def tied_names(self) -> Iterable[tuple[str, str]]:
        """(second name, first name) of each weight that is used twice."""

    def named_modules(self) -> Iterable[tuple[str, WatchedModule]]:
        """Each module once, in order of the forward pass."""
