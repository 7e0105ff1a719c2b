"""Which signals a step yields, and their rows.

Rows come in blocks, columns by name, whose nulls are the same in every row.
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from recorder.cadence import Cadence, is_due
from recorder.capture import Capture, Due, Place
from recorder.hooks import Array, Attention
from recorder.kernel import Kernel, Summary
from recorder.schema import MOMENTS, NONFINITE_COUNTS
from recorder.statistics import (
    ATTENTION_MASS,
    SpectralNorm,
    all_finite,
    attention_entropy,
    attention_mass,
    attention_max_abs_logit,
    combined_hash,
    content_hash,
    replace_doubtful,
    summarize_all,
)
from recorder.writer import Block, Matrix, Value


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
        """Give out an id; a name that is watched again keeps its own, unless it is another tensor now."""
        row: dict[str, Value] = {"name": place.name, "module": place.module}
        row |= {"layer": place.layer, "role": place.role, "dtype": str(dtype)}
        row |= {"shape": json.dumps(list(shape)), **flags}
        known = self.ids.get(place.name)
        if known is None or self.rows[known] != {"tensor_id": known, **row}:
            self.ids[place.name] = len(self.rows)
            self.rows.append({"tensor_id": len(self.rows), **row})


class PreviousGradient(NamedTuple):
    """The last recorded gradient of all parameters, end to end, in a buffer that is written over."""

    step: int | None  # None: the buffer holds no gradient
    norm: float
    flat: Array


class GradientNames(NamedTuple):
    """Which tensors the gradients of a step belong to; hardly ever another one than the step before."""

    known_count: int  # tensors that the catalogue knew: another one may be watched now
    arrived: list[str]
    ids: NDArray[np.int64]  # of the arrived ones that are watched
    watched: list[bool]  # of the arrived ones
    missing_ids: NDArray[np.int64]  # watched weights without a gradient


class StepSignals:
    """Computes the rows of one step after another. Weights are read before the update, the rest after."""

    weights_hash: int | None = None
    gradient_cosine_previous: float | None = None
    gradient_norm: float | None = None

    def __init__(self, cadence: Cadence, catalogue: TensorCatalogue, kernel: Kernel) -> None:
        self.cadence = cadence
        self._catalogue = catalogue
        self._kernel = kernel
        self._spectral: dict[str, SpectralNorm] = {}
        self._blocks: list[Block] = []
        self._weights_before: Array | None = None  # end to end, in a buffer that is written over
        self._has_weights_before = False
        self._previous_gradient: PreviousGradient | None = None
        self._gradient_names: GradientNames | None = None
        self.doubts: dict[str, str] = {}  # what to tell of gradients, by name

    def due_in_hooks(self, step: int) -> Due:
        """What hooks take in this step."""
        cadence = self.cadence
        return Due(
            is_due(step, cadence.activations),
            is_due(step, cadence.activation_gradients),
            is_due(step, cadence.attention),
        )

    # A NaN or an overflow is data here, even where the training loop asked NumPy to raise on them.
    @np.errstate(all="ignore")
    def before_update(self, step: int) -> None:
        """Take weights, their hashes and, for the update, a copy."""
        cadence, weights = self.cadence, self._catalogue.weights
        self._blocks = []
        self._has_weights_before = False
        self.weights_hash = None
        due = any(is_due(step, every) for every in (cadence.weights, cadence.spectral_norms, cadence.hashes))
        if due or not all_finite(list(weights.values()), self._kernel):
            self._blocks += self._weight_blocks(step)
        if weights and is_due(step, cadence.updates):
            flat = [weight.ravel() for weight in weights.values()]
            self._weights_before = _end_to_end(flat, self._weights_before)
            self._has_weights_before = True

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
        self.gradient_cosine_previous = self.gradient_norm = None
        if everything or is_due(step, cadence.gradients):
            blocks += self._gradient_blocks(step, capture.gradients)
        blocks += self._activation_blocks(step, capture, places, everything)
        if self._has_weights_before and completed:
            blocks += self._update_blocks(step)
        for layer, attention in capture.attentions.items():
            mass = capture.attention_masses.get(layer)
            with_entropy = everything or is_due(step, cadence.attention_entropy)
            if with_entropy or mass is not None:
                blocks.append(_attention_block(step, layer, attention, mass, self._kernel, with_entropy))
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

    def _activation_blocks(
        self, step: int, capture: Capture, places: Mapping[str, Place], everything: bool
    ) -> list[Block]:
        """Rows of activations and their gradients: what hooks summed up, and what they kept for now."""
        blocks = []
        for kind, due, taken, arrays in (
            (
                "activation",
                capture.due.activations,
                capture.activation_statistics,
                capture.activations,
            ),
            (
                "activation_gradient",
                capture.due.activation_gradients,
                capture.activation_gradient_statistics,
                capture.activation_gradients,
            ),
        ):
            names = list(taken.taken)
            if names:
                ids = [self._catalogue.id_of(_place(n, places), capture.activations[n]) for n in names]
                blocks += _blocks(step, kind, np.array(ids), taken.statistics())
            if due or everything:
                rest = {name: array for name, array in arrays.items() if name not in taken.taken}
                if rest:
                    ids = [self._catalogue.id_of(_place(n, places), array) for n, array in rest.items()]
                    blocks += self._tensor_blocks(step, kind, np.array(ids), rest.values())
        return blocks

    def _weight_blocks(self, step: int) -> list[Block]:
        """Rows of matrices, which have a spectral norm, and of all other weights."""
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
            ids = np.array([self._catalogue.ids[name] for name in group])
            blocks += self._tensor_blocks(step, "weight", ids, group.values())
            values = self._spectral_columns(step, group) if is_matrix else {}
            if hashes is not None:
                values["content_hash"] = np.array([hashes[name] for name in group], np.uint64)
            if values:
                blocks.append(Block("weights", len(ids), {"step": step, "tensor_id": ids} | values))
        return blocks

    def _spectral_columns(self, step: int, matrices: Mapping[str, Array]) -> dict[str, Value]:
        if not is_due(step, self.cadence.spectral_norms):
            return {}
        iterations = {name: self._spectral.setdefault(name, SpectralNorm(self._kernel)) for name in matrices}
        columns: dict[str, Value] = {
            "spectral_norm": np.array([iterations[name].estimate(m) for name, m in matrices.items()])
        }
        if is_due(step, self.cadence.spectral_bounds):
            bounds = [iterations[name].upper_bound(m) for name, m in matrices.items()]
            columns["spectral_norm_upper"] = np.array(bounds)
        return columns

    def _gradient_blocks(self, step: int, gradients: Mapping[str, Array]) -> list[Block]:
        """Rows for the gradients that arrived, and rows that say so for those that did not."""
        names = self._gradient_names
        known_count = len(self._catalogue.rows)
        if names is None or names.known_count != known_count or names.arrived != list(gradients):
            names = self._gradient_names = self._names_of(gradients)
        arrays = list(gradients.values())
        if len(names.ids) < len(arrays):
            arrays = [array for array, watched in zip(arrays, names.watched, strict=True) if watched]
        blocks = []
        if arrays:
            statistics = self._gradient_statistics(step, arrays)
            blocks += _blocks(step, "gradient", names.ids, statistics, has_gradient=True)
            if len(names.ids) == len(self._catalogue.weights):  # that of some would pass for that of all
                self.gradient_norm = _norm_of_all(statistics)
        if names.missing_ids.size:
            columns = {"step": step, "kind": "gradient", "has_gradient": False}
            blocks.append(
                Block("tensors", len(names.missing_ids), columns | {"tensor_id": names.missing_ids})
            )
        return blocks

    def _names_of(self, gradients: Mapping[str, Array]) -> GradientNames:
        ids, weights = self._catalogue.ids, self._catalogue.weights
        watched = [name in weights for name in gradients]
        # A weight whose gradient may have come under another name is not said to have none.
        missing = [ids[name] for name in weights if name not in gradients] if all(watched) else []
        for name, gradient in gradients.items():
            if name not in weights:
                self.doubts[name] = f"of no watched weight; expected one of {_first_names(weights)}"
            elif np.shape(gradient) != weights[name].shape:
                self.doubts[name] = f"{np.shape(gradient)}, and its weight {weights[name].shape}"
        return GradientNames(
            len(self._catalogue.rows),
            list(gradients),
            np.array([ids[name] for name in gradients if name in weights], np.int64),
            watched,
            np.array(missing, np.int64),
        )

    def _gradient_statistics(self, step: int, gradients: list[Array]) -> Array:
        """Their rows; sets the cosine with the step before's, null after a gap and for other than float32."""
        previous, self._previous_gradient = self._previous_gradient, None
        count = sum(map(_size, gradients))
        if previous is None or previous.flat.size != count:
            previous = PreviousGradient(None, 0.0, np.zeros(count, np.float32))
        statistics = _empty_statistics(len(gradients))
        try:
            product, trusted = self._kernel.summarize_and_compare(gradients, previous.flat, statistics)
        except (TypeError, BufferError):  # the buffer may hold a part of them by now
            return summarize_all(gradients, self._kernel)
        if not trusted:
            replace_doubtful(statistics, gradients)
        norms = statistics[:, _L2_NORM]
        norm = math.sqrt(np.dot(norms, norms))
        if previous.step == step - 1:
            self.gradient_cosine_previous = float(np.float64(product) / (norm * previous.norm))
        self._previous_gradient = PreviousGradient(step, norm, previous.flat)
        return statistics

    def _update_blocks(self, step: int) -> list[Block]:
        """Rows of what the update added to each weight."""
        assert self._weights_before is not None
        weights, before = list(self._catalogue.weights.values()), self._weights_before
        ids = [self._catalogue.ids[name] for name in self._catalogue.weights]
        statistics = _empty_statistics(len(weights))
        try:
            trusted = self._kernel.summarize_differences(weights, before, statistics)
        except (TypeError, BufferError):  # other than contiguous float32
            statistics[:] = math.nan
            trusted = False
        if not trusted:
            ends = np.cumsum([weight.size for weight in weights])
            differences = np.concatenate([weight.ravel() for weight in weights]) - before
            replace_doubtful(statistics, np.split(differences, ends[:-1]))
        return _blocks(step, "update", np.array(ids), statistics)

    def _tensor_blocks(
        self, step: int, kind: str, ids: NDArray[np.int64], arrays: Iterable[Array]
    ) -> list[Block]:
        return _blocks(step, kind, ids, summarize_all(list(arrays), self._kernel))


_L2_NORM = Summary._fields.index("l2_norm")
_NAN_COUNT = Summary._fields.index("nan_count")
_MOMENTS = tuple(column.name for column in MOMENTS)
_MOMENT_COUNT = len(_MOMENTS)
_COUNTS = tuple(column.name for column in NONFINITE_COUNTS)
_size = operator.attrgetter("size")


def _norm_of_all(statistics: Array) -> float:
    """L2 norm over all elements of the arrays: NaN or infinite where one of them is."""
    if statistics[:, _NAN_COUNT:].any():
        return math.nan if statistics[:, _NAN_COUNT].any() else math.inf
    norms = statistics[:, _L2_NORM]
    return math.sqrt(np.dot(norms, norms))


def _blocks(
    step: int, kind: str, ids: NDArray[np.int64], statistics: Array, has_gradient: bool | None = None
) -> list[Block]:
    """Rows of tensors, and of nonfinite where a count is not 0. statistics: (ids, Summary)."""
    columns: dict[str, Value] = {"step": step, "kind": kind, "tensor_id": ids, "all_finite": True}
    if has_gradient is not None:
        columns["has_gradient"] = has_gradient
    blocks = [Block("tensors", len(ids), columns, Matrix(_MOMENTS, statistics[:, :_MOMENT_COUNT]))]
    counts = statistics[:, _MOMENT_COUNT:]
    if counts.any():
        is_counted = counts.any(axis=1)
        columns["all_finite"] = ~is_counted
        key: dict[str, Value] = {"step": step, "kind": kind, "tensor_id": ids[is_counted]}
        blocks.append(Block("nonfinite", len(key["tensor_id"]), key, Matrix(_COUNTS, counts[is_counted])))
    return blocks


def _empty_statistics(count: int) -> Array:
    return np.empty((count, len(Summary._fields)))


def _end_to_end(flat: list[Array], buffer: Array | None) -> Array:
    """The flat arrays as one, in the buffer when it fits: a fresh one costs new pages at every call."""
    count, dtype = sum(map(_size, flat)), np.result_type(*flat)
    if buffer is None or buffer.size != count or buffer.dtype != dtype:
        return np.concatenate(flat)
    return np.concatenate(flat, out=buffer)


def _first_names(weights: Mapping[str, Array]) -> str:
    """Enough of them to see how they are written."""
    names = list(weights)
    return (
        ", ".join([*names[:5], "..."] if len(names) > 5 else names)
        or "those given to watch(), which are none"
    )


def _place(name: str, places: Mapping[str, Place]) -> Place:
    """Where an activation was made; a loop without hooks gives nothing but its name."""
    return places.get(name) or Place(name, name, None, "activation")


def _attention_block(
    step: int, layer: int, attention: Attention, mass: Array | None, kernel: Kernel, with_entropy: bool
) -> Block:
    probabilities, token_mask = attention.probabilities, attention.token_mask
    if mass is None:  # not due in the hook: the step turned out to be worth a full record
        mass = attention_mass(probabilities, token_mask, kernel)
    heads: NDArray[np.int32] = np.arange(len(mass), dtype=np.int32)
    columns: dict[str, Value] = {"step": step, "layer": layer, "head": heads}
    if with_entropy:
        columns["entropy"] = attention_entropy(probabilities, token_mask, kernel)
        columns["max_abs_logit"] = attention_max_abs_logit(attention.logits(), token_mask)
    return Block("attention", len(mass), columns, Matrix(ATTENTION_MASS, mass))


def _not_finite(logged: Mapping[str, Value]) -> bool:
    """A cheap look at what the loop logged, so that the gradients of a NaN between two cadences are kept."""
    watched = (logged.get(name) for name in ("objective", "loss_sum", "gradient_norm"))
    return any(value is not None and not math.isfinite(value) for value in watched)
