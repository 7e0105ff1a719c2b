"""Holds on to the arrays of one training step, by hooks on a model, until the step ends.

Hooks keep references and compute nothing, with one exception: which units have fired is a bitmap
over a window of steps, so it takes one maximum per step. Outside a step hooks return at once.

Activations and weight gradients live until the step ends anyway, so keeping them is free. Gradients of
activations do not: backward frees each as soon as it is used, and keeping them makes the allocator ask
for new pages at every step. They are kept in steps that record them only.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import partial

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

    def add(self, output: Array) -> None:
        """Add the (tokens, units) output of one forward pass."""
        silent = np.flatnonzero(~self.fired)
        if silent.size:  # most units fire in the first step of a window and need no second look
            candidates = output if silent.size > output.shape[1] // 4 else output[:, silent]
            # One maximum is a fast pass, and NaN comes through it: a unit that is NaN is not silent.
            fires = candidates.max(axis=0, initial=0.0) != 0
            self.fired[fires if candidates is output else silent[fires]] = True
        self.token_count += output.shape[0]


@dataclass
class Capture:
    """The arrays of the current step; ``recording`` is true between its begin and its end."""

    recording: bool = False
    keeps_activation_gradients: bool = False
    step: int = 0
    seconds: float = 0.0  # computing time spent in hooks during the step
    gradients: dict[str, Array] = field(default_factory=dict)
    activations: dict[str, Array] = field(default_factory=dict)  # real tokens only, (tokens, ...)
    activation_gradients: dict[str, Array] = field(default_factory=dict)
    attentions: dict[int, Attention] = field(default_factory=dict)  # by layer
    units: dict[str, UnitWindow] = field(default_factory=dict)  # by module; outlives the step
    errors: list[tuple[str, Exception]] = field(default_factory=list)  # (hook, what it raised)

    def begin(self, step: int, keeps_activation_gradients: bool) -> None:
        """Let hooks keep what they see."""
        self.recording = True
        self.keeps_activation_gradients = keeps_activation_gradients
        self.step = step
        self.seconds = 0.0

    def end(self) -> list[tuple[str, Exception]]:
        """Let go of every array; returns what hooks have raised."""
        self.recording = False
        errors, self.errors = self.errors, []
        self.gradients.clear()
        self.activations.clear()
        self.activation_gradients.clear()
        self.attentions.clear()
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
            handles.append(_watch_attention(module, capture))
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

    def keep(output: WatchedTensor, token_mask: NDArray[np.bool_] | None) -> None:
        activation = _real_tokens(output.data, token_mask)
        capture.activations[name] = activation
        if capture.keeps_activation_gradients:
            output.register_gradient_hook(lambda gradient: keep_gradient(gradient, token_mask))
        if counts_units:
            if name not in capture.units:
                fired = np.zeros(activation.shape[-1], np.bool_)
                capture.units[name] = UnitWindow(layer, fired, capture.step)
            capture.units[name].add(activation.reshape(-1, activation.shape[-1]))

    def keep_gradient(gradient: Array, token_mask: NDArray[np.bool_] | None) -> None:
        if capture.recording:
            capture.activation_gradients[name] = _real_tokens(gradient, token_mask)

    def hook(output: WatchedTensor, token_mask: NDArray[np.bool_] | None) -> None:
        if not capture.recording:
            return
        start = time.perf_counter()
        try:
            keep(output, token_mask)
        except Exception as error:  # a hook must never break the forward pass; the recorder reports it
            capture.errors.append((name, error))
        capture.seconds += time.perf_counter() - start

    return hook


def _real_tokens(array: Array, token_mask: NDArray[np.bool_] | None) -> Array:
    """The rows of real tokens, (tokens, ...); the array itself when all rows are."""
    return array if token_mask is None else array[token_mask]


def _watch_attention(module: WatchedModule, capture: Capture) -> Handle:
    layer = -1 if module.layer is None else module.layer
    attention_module: WatchedAttention = module  # type: ignore[assignment]  # its role says so

    def hook(attention: Attention) -> None:
        if capture.recording:
            capture.attentions[layer] = attention

    return attention_module.register_attention_hook(hook)
