"""Holds on to the arrays of one training step, by hooks on a model, until the step ends.

Hooks keep references. What is due in the step and can be summed up at once is summed up in the hook, while
the array is still in the cache: at the end of the step the same pass would wait for memory. Which units
have fired is a bitmap over a window of steps. Outside a step hooks return at once.

Activations and weight gradients live until the step ends anyway, so keeping them is free. Gradients of
activations do not: backward frees each as soon as it is used. They are kept only where the kernel needs them
together, in steps that record them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recorder.hooks import (
    Array,
    Attention,
    ForwardHook,
    Handle,
    WatchedAttention,
    WatchedModel,
    WatchedModule,
    WatchedTensor,
)
from recorder.kernel import Kernel, Summary
from recorder.statistics import attention_mass, summarize_slowly

UNIT_ROLES = ("relu",)
"""Roles of modules whose output is exactly zero when a unit is silent."""
ATTENTION_ROLE = "attention"


@dataclass(frozen=True)
class Place:
    """Where a tensor lives in the model."""

    name: str
    module: str
    layer: int | None
    role: str


@dataclass
class UnitWindow:
    """Which units of one layer have fired on a real token since the window began."""

    layer: int
    fired: NDArray[np.bool_]
    first_step: int
    token_count: int = 0

    def add(self, output: Array, kernel: Kernel) -> None:
        """Add the (tokens, units) output of one forward pass."""
        kernel.mark_fired(output, self.fired)
        self.token_count += output.shape[0]


class HookStatistics:
    """Statistics of one kind of tensors, a row each, filled in hooks."""

    def __init__(self, kernel: Kernel) -> None:
        self.taken: dict[str, int] = {}  # row by tensor name, of this step
        self._kernel = kernel
        self._rows: dict[str, int] = {}  # row by tensor name, of all steps
        self._values = np.empty((16, len(Summary._fields)))

    def take(self, name: str, array: Array) -> None:
        """Summarise the array into its row; a second one of the step takes the place of the first."""
        row = self._rows.setdefault(name, len(self._rows))
        if row == len(self._values):
            self._values = np.concatenate([self._values, np.empty_like(self._values)])
        if not self._kernel.summarize_into(array, self._values, row):
            self._values[row] = summarize_slowly(array)
        self.taken[name] = row

    def statistics(self) -> NDArray[np.float64]:
        """(taken, 11) rows of Summary, a copy."""
        return self._values[list(self.taken.values())]


@dataclass(frozen=True)
class Due:
    """What hooks take in a step."""

    activations: bool = False
    activation_gradients: bool = False
    attention: bool = False

    @cached_property
    def outputs(self) -> bool:
        """Hooks on outputs do more than to keep them."""
        return self.activations or self.activation_gradients


@dataclass
class Capture:
    """The arrays of the current step; ``recording`` is true between its begin and its end."""

    kernel: Kernel
    recording: bool = False
    due: Due = field(default_factory=Due)
    step: int = 0
    seconds: float = 0.0  # computing time spent in hooks during the step
    gradients: dict[str, Array] = field(default_factory=dict)
    activations: dict[str, Array] = field(default_factory=dict)  # real tokens only, (tokens, ...)
    activation_gradients: dict[str, Array] = field(default_factory=dict)
    attentions: dict[int, Attention] = field(default_factory=dict)  # by layer
    attention_masses: dict[int, Array] = field(default_factory=dict)  # by layer, (H, 3)
    units: dict[str, UnitWindow] = field(default_factory=dict)  # by module; outlives the step
    errors: list[tuple[str, Exception]] = field(default_factory=list)  # (hook, what it raised)

    def __post_init__(self) -> None:
        self.activation_statistics = HookStatistics(self.kernel)
        self.activation_gradient_statistics = HookStatistics(self.kernel)
        self._of_the_step: tuple[dict[Any, Any], ...] = (
            self.gradients,
            self.activations,
            self.activation_gradients,
            self.attentions,
            self.attention_masses,
            self.activation_statistics.taken,
            self.activation_gradient_statistics.taken,
        )

    def begin(self, step: int, due: Due) -> None:
        """Let hooks keep what they see."""
        self.recording = True
        self.due = due
        self.step = step
        self.seconds = 0.0

    def end(self) -> list[tuple[str, Exception]]:
        """Let go of every array; returns what hooks have raised."""
        self.recording = False
        errors, self.errors = self.errors, []
        for kept in self._of_the_step:
            kept.clear()
        return errors


def attach_hooks(model: WatchedModel, capture: Capture) -> tuple[list[Handle], dict[str, Place]]:
    """Handles of the hooks put on every parameter and module, and the places of their tensors by name."""
    handles: list[Handle] = []
    places: dict[str, Place] = {}
    modules = dict(model.named_modules())
    for name, parameter in model.named_parameters():
        handles.append(parameter.register_gradient_hook(partial(_keep, capture, capture.gradients, name)))
        places[name] = _parameter_place(name, modules)
    for name, module in modules.items():
        places[name] = Place(name, name, module.layer, module.role)
        handles.append(module.register_forward_hook(_forward_hook(name, module, capture)))
        if module.role == ATTENTION_ROLE:
            handles.append(_watch_attention(name, module, capture))
    return handles, places


def _keep(capture: Capture, kept: dict[str, Array], name: str, array: Array) -> None:
    if capture.recording:
        kept[name] = array


def _parameter_place(name: str, modules: dict[str, WatchedModule]) -> Place:
    """A parameter belongs to the module with the longest name that its own name starts with."""
    owner = name
    while owner and owner not in modules:
        owner = owner.rpartition(".")[0]
    module = modules.get(owner)
    if module is None:
        return Place(name, name.rpartition(".")[0], None, "parameter")
    return Place(name, owner, module.layer, module.role)


def _forward_hook(name: str, module: WatchedModule, capture: Capture) -> ForwardHook:
    counts_units = module.role in UNIT_ROLES
    layer = -1 if module.layer is None else module.layer
    eager = capture.kernel.eager

    def keep(output: WatchedTensor, token_mask: NDArray[np.bool_] | None) -> None:
        # In most steps this is all, so it does without the clock and the call that _guarded costs.
        if not capture.recording:
            return
        try:
            activation = _real_tokens(output.data, token_mask)
            capture.activations[name] = activation
        except Exception as error:
            capture.errors.append((name, error))
            return
        if counts_units or capture.due.outputs:
            _guarded(capture, name, look, output, activation, token_mask)

    def look(output: WatchedTensor, activation: Array, token_mask: NDArray[np.bool_] | None) -> None:
        if eager and capture.due.activations:
            capture.activation_statistics.take(name, activation)
        if capture.due.activation_gradients:
            hook = partial(_guarded, capture, f"gradient of {name}", keep_gradient, token_mask)
            output.register_gradient_hook(hook)
        if counts_units:
            window = capture.units.get(name)
            if window is None:
                fired = np.zeros(activation.shape[-1], np.bool_)
                window = capture.units[name] = UnitWindow(layer, fired, capture.step)
            window.add(activation.reshape(-1, activation.shape[-1]), capture.kernel)

    def keep_gradient(token_mask: NDArray[np.bool_] | None, gradient: Array) -> None:
        real = _real_tokens(gradient, token_mask)
        if eager:
            capture.activation_gradient_statistics.take(name, real)
        else:
            capture.activation_gradients[name] = real

    return keep


def _guarded(capture: Capture, name: str, keep: Callable[..., None], *arguments: Any) -> None:
    """A hook that must never break the training: outside a step it returns, an error is kept for later."""
    if not capture.recording:
        return
    start = time.perf_counter()
    try:
        keep(*arguments)
    except Exception as error:  # whatever it is; the recorder reports it at the end of the step
        capture.errors.append((name, error))
    capture.seconds += time.perf_counter() - start


def _real_tokens(array: Array, token_mask: NDArray[np.bool_] | None) -> Array:
    """The rows of real tokens, (tokens, ...); the array itself when all rows are."""
    return array if token_mask is None else array[token_mask]


def _watch_attention(name: str, module: WatchedModule, capture: Capture) -> Handle:
    layer = -1 if module.layer is None else module.layer
    attention_module: WatchedAttention = module  # type: ignore[assignment]  # its role says so

    def keep(attention: Attention) -> None:
        capture.attentions[layer] = attention
        if capture.due.attention:
            mass = attention_mass(attention.probabilities, attention.token_mask, capture.kernel)
            capture.attention_masses[layer] = mass

    return attention_module.register_attention_hook(partial(_guarded, capture, name, keep))
