"""Which signals a step yields, and their rows.

Rows come in blocks, columns by name, whose nulls are the same in every row.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from recorder.cadence import Cadence, is_due
from recorder.capture import Capture, Place
from recorder.hooks import Array, Attention
from recorder.kernel import Kernel
from recorder.statistics import (
    SpectralNorm,
    Summary,
    all_finite,
    attention_entropy,
    attention_mass,
    attention_max_abs_logit,
    combined_hash,
    content_hash,
    summarize_all,
)
from recorder.writer import Block, Value


@dataclass
class TensorCatalogue:
    """The tensors that were seen, their ids, and the weights among them."""

    weights: dict[str, Array] = field(default_factory=dict)
    ids: dict[str, int] = field(default_factory=dict)
    rows: list[dict[str, Value]] = field(default_factory=list)  # of tensor_names
    written_count: int = 0

    def add_weight(
        self, place: Place, weight: Array, trainable: bool | None, decay: bool | None, tied_to: str | None
    ) -> None:
        """Watch a weight: an array that updates change in place."""
        self.weights[place.name] = weight
        flags = {"trainable": trainable, "weight_decay": decay, "tied_to": tied_to}
        self._add(place, weight.dtype, weight.shape, flags)

    def id_of(self, place: Place, activation: Array) -> int:
        """Id of an activation, given out when it is first seen."""
        if place.name not in self.ids:
            self._add(place, activation.dtype, activation.shape[1:], {})
        return self.ids[place.name]

    def weights_hash(self) -> int | None:
        """Hash over the hashes of all weights as they are now; None when none is watched."""
        if not self.weights:
            return None
        return combined_hash(content_hash(weight) for weight in self.weights.values())

    def take_blocks(self) -> list[Block]:
        """One block for each tensor whose name is not yet in the log."""
        blocks = [Block("tensor_names", 1, row) for row in self.rows[self.written_count :]]
        self.written_count = len(self.rows)
        return blocks

    def write_again(self) -> None:
        """A new segment begins, which needs all names."""
        self.written_count = 0

    def _add(
        self, place: Place, dtype: np.dtype[Any], shape: tuple[int, ...], flags: Mapping[str, Value]
    ) -> None:
        self.ids[place.name] = len(self.ids)
        row = {"tensor_id": self.ids[place.name], "name": place.name, "module": place.module}
        row |= {"layer": place.layer, "role": place.role, "dtype": str(dtype)}
        self.rows.append(row | {"shape": json.dumps(list(shape)), **flags})


class PreviousGradient(NamedTuple):
    """The last recorded gradient of all parameters, end to end, in a buffer that is written over."""

    step: int
    norm: float
    flat: Array


class StepSignals:
    """Computes the rows of one step after another. Weights are read before the update, the rest after."""

    weights_hash: int | None = None
    gradient_cosine_previous: float | None = None

    def __init__(self, cadence: Cadence, catalogue: TensorCatalogue, kernel: Kernel) -> None:
        self.cadence = cadence
        self._catalogue = catalogue
        self._kernel = kernel
        self._spectral: dict[str, SpectralNorm] = {}
        self._blocks: list[Block] = []
        self._weights_before: dict[str, Array] = {}
        self._previous_gradient: PreviousGradient | None = None

    # A NaN or an overflow is data here, even where the training loop asked NumPy to raise on them.
    @np.errstate(all="ignore")
    def before_update(self, step: int) -> None:
        """Take weights, their hashes and, for the update, a copy."""
        cadence, weights = self.cadence, self._catalogue.weights
        self._blocks = []
        self.weights_hash = None
        due = any(is_due(step, every) for every in (cadence.weights, cadence.spectral_norms, cadence.hashes))
        if due or not all_finite(list(weights.values()), self._kernel):
            self._blocks += self._weight_blocks(step)
        if is_due(step, cadence.updates):
            self._weights_before = {name: weight.copy() for name, weight in weights.items()}

    @np.errstate(all="ignore")
    def after_update(
        self,
        step: int,
        logged: Mapping[str, Value],
        capture: Capture,
        places: Mapping[str, Place],
        completed: bool,
    ) -> list[Block]:
        """Rows of every table but ``steps``. When the step failed halfway there is no update to tell of."""
        cadence = self.cadence
        everything = not completed or _not_finite(logged)
        blocks, self._blocks = self._blocks, []
        self.gradient_cosine_previous = None
        if everything or is_due(step, cadence.gradients):
            blocks += self._gradient_blocks(step, capture.gradients)
        for kind, every, arrays in (
            ("activation", cadence.activations, capture.activations),
            ("activation_gradient", cadence.activation_gradients, capture.activation_gradients),
        ):
            if arrays and (everything or is_due(step, every)):
                ids = [self._catalogue.id_of(_place(name, places), array) for name, array in arrays.items()]
                blocks.append(self._tensor_block(step, kind, ids, arrays.values()))
        if self._weights_before and completed:
            blocks.append(self._update_block(step))
        self._weights_before = {}
        for layer, attention in capture.attentions.items():
            with_entropy = everything or is_due(step, cadence.attention_entropy)
            if with_entropy or is_due(step, cadence.attention):
                blocks.append(_attention_block(step, layer, attention, self._kernel, with_entropy))
        if cadence.unit_window and (step + 1) % cadence.unit_window == 0:
            blocks += self.close_windows(step, capture)
        return self._catalogue.take_blocks() + blocks

    def close_windows(self, step: int, capture: Capture) -> list[Block]:
        """Rows of ``units`` for the windows that end here, which begin anew."""
        blocks = [
            Block(
                "units",
                1,
                {
                    "step": step,
                    "layer": window.layer,
                    "window_steps": step - window.first_step + 1,
                    "unit_count": window.fired.size,
                    "dead_unit_count": int(window.fired.size - np.count_nonzero(window.fired)),
                    "token_count": window.token_count,
                },
            )
            for window in capture.units.values()
        ]
        capture.units.clear()
        return blocks

    def _weight_blocks(self, step: int) -> list[Block]:
        """One block for matrices, which have a spectral norm, and one for all other weights."""
        cadence, weights = self.cadence, self._catalogue.weights
        hashes = None
        if is_due(step, cadence.hashes):
            hashes = {name: content_hash(weight) for name, weight in weights.items()}
            self.weights_hash = combined_hash(hashes.values())
        blocks = []
        for is_matrix in (True, False):
            group = {name: weight for name, weight in weights.items() if (weight.ndim == 2) == is_matrix}
            if not group:
                continue
            block = self._tensor_block(
                step, "weight", [self._catalogue.ids[n] for n in group], group.values()
            )
            if hashes is not None:
                block.columns["content_hash"] = np.array([hashes[name] for name in group], np.uint64)
            if is_matrix:
                block.columns.update(self._spectral_columns(step, group))
            blocks.append(block)
        return blocks

    def _spectral_columns(self, step: int, matrices: Mapping[str, Array]) -> dict[str, Value]:
        if not is_due(step, self.cadence.spectral_norms):
            return {}
        iterations = {name: self._spectral.setdefault(name, SpectralNorm()) for name in matrices}
        columns: dict[str, Value] = {
            "spectral_norm": np.array([iterations[name].estimate(m) for name, m in matrices.items()])
        }
        if is_due(step, self.cadence.spectral_bounds):
            bounds = [iterations[name].upper_bound(m) for name, m in matrices.items()]
            columns["spectral_norm_upper"] = np.array(bounds)
        return columns

    def _gradient_blocks(self, step: int, gradients: Mapping[str, Array]) -> list[Block]:
        """Rows for the gradients that arrived, and rows that say so for those that did not."""
        ids = self._catalogue.ids
        arrived = {name: gradient for name, gradient in gradients.items() if name in ids}
        missing = [ids[name] for name in self._catalogue.weights if name not in gradients]
        blocks = []
        if arrived:
            block = self._tensor_block(step, "gradient", [ids[name] for name in arrived], arrived.values())
            blocks.append(block)
            block.columns["has_gradient"] = True
            self._compare_with_previous(step, list(arrived.values()), block.columns["l2_norm"])
        if missing:
            columns = {"step": step, "kind": "gradient", "has_gradient": False}
            blocks.append(Block("tensors", len(missing), columns | {"tensor_id": np.array(missing)}))
        return blocks

    def _compare_with_previous(self, step: int, gradients: list[Array], norms: Array) -> None:
        """Set the cosine with the step before's gradient; null after a gap and for other than float32."""
        previous = self._previous_gradient
        count = sum(gradient.size for gradient in gradients)
        self._previous_gradient = None
        if any(gradient.dtype != np.float32 for gradient in gradients):
            return
        if previous is None or previous.flat.size != count:
            previous = PreviousGradient(-1, 0.0, np.zeros(count, np.float32))
        product = self._kernel.dot_and_replace([gradient.ravel() for gradient in gradients], previous.flat)
        norm = float(np.sqrt(np.dot(norms, norms)))
        if previous.step == step - 1:
            self.gradient_cosine_previous = float(np.float64(product) / (norm * previous.norm))
        self._previous_gradient = PreviousGradient(step, norm, previous.flat)

    def _update_block(self, step: int) -> Block:
        weights, before = self._catalogue.weights, self._weights_before
        ids = [self._catalogue.ids[name] for name in before]
        return self._tensor_block(step, "update", ids, [weights[n] - old for n, old in before.items()])

    def _tensor_block(self, step: int, kind: str, ids: Sequence[int], arrays: Iterable[Array]) -> Block:
        summaries = summarize_all(list(arrays), self._kernel)
        columns: dict[str, Value] = {"step": step, "kind": kind, "tensor_id": np.array(ids)}
        columns |= {name: summaries[:, index] for index, name in enumerate(Summary._fields)}
        return Block("tensors", len(ids), columns)


def _place(name: str, places: Mapping[str, Place]) -> Place:
    """Where an activation was made; a loop without hooks gives nothing but its name."""
    return places.get(name) or Place(name, name, None, "activation")


def _attention_block(
    step: int, layer: int, attention: Attention, kernel: Kernel, with_entropy: bool
) -> Block:
    probabilities, token_mask = attention.probabilities, attention.token_mask
    columns: dict[str, Value] = dict(attention_mass(probabilities, token_mask, kernel)._asdict())
    if with_entropy:
        columns["entropy"] = attention_entropy(probabilities, token_mask)
        columns["max_abs_logit"] = attention_max_abs_logit(attention.logits(), token_mask)
    heads: NDArray[np.int32] = np.arange(probabilities.shape[1], dtype=np.int32)
    return Block("attention", heads.size, columns | {"step": step, "layer": layer, "head": heads})


def _not_finite(logged: Mapping[str, Value]) -> bool:
    """A cheap look at what the loop logged, so that a NaN between two cadences is still recorded in full."""
    watched = (logged.get(name) for name in ("objective", "loss_sum", "train_loss", "gradient_norm"))
    return any(value is not None and not math.isfinite(value) for value in watched)
