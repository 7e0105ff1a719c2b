"""Weights that start wrong, or are made wrong at some step."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator

from experiments.autograd import Array, Tensor, add
from experiments.code_path import HEALTHY, CodePath
from experiments.faults.fault import Fault
from experiments.training import TrainingState

SILENCING_BIAS = -5.0  # unit pre-activations have deviation 1 at the start: five deviations below zero
POISONED_BRANCH = (
    "blocks.0.mlp"  # its sum with the residual stream is the output of block 0, which is watched
)


def altered(alter_state: Callable[[TrainingState], None]) -> CodePath:
    """The healthy loop, whose state is altered once."""
    return dataclasses.replace(HEALTHY, alter_state=alter_state)


def matrices(run: TrainingState, prefix: str = "", suffixes: tuple[str, ...] = ("",)) -> Iterator[Array]:
    """The arrays of the matrices with such names; to be changed in place, the optimizer shares them."""
    for name, weight in run.model.named_parameters():
        if weight.data.ndim == 2 and name.startswith(prefix) and name.endswith(suffixes):
            yield weight.data


def matrices_scaled(factor: float) -> CodePath:
    """Every matrix, embeddings included, times ``factor``."""

    def scale(run: TrainingState) -> None:
        for matrix in matrices(run):
            matrix *= factor

    return altered(scale)


def matrices_zero(prefix: str) -> CodePath:
    """The matrices whose name starts with ``prefix`` are zero."""

    def clear(run: TrainingState) -> None:
        for matrix in matrices(run, prefix):
            matrix[...] = 0

    return altered(clear)


def queries_and_keys_scaled(factor: float) -> CodePath:
    """Query and key projections times ``factor``, so that attention logits grow by its square."""

    def scale(run: TrainingState) -> None:
        for matrix in matrices(run, suffixes=("query_weight", "key_weight")):
            matrix *= factor

    return altered(scale)


def units_silenced(share: float) -> CodePath:
    """The first ``share`` of the units of every layer get a bias far below zero."""

    def silence(run: TrainingState) -> None:
        for block in run.model.blocks:
            bias = block.up.parameters["bias"].data
            bias[: round(share * bias.size)] = SILENCING_BIAS

    return altered(silence)


def residual_dropped(factor: float) -> CodePath:
    """Branches replace the residual stream, and every matrix of the blocks is ``factor`` times as large."""

    def shrink(run: TrainingState) -> None:
        for matrix in matrices(run, "blocks."):
            matrix *= factor

    return dataclasses.replace(altered(shrink), join=branch_only)


def branch_only(name: str, stream: Tensor, branch: Tensor) -> Tensor:
    """What the branch says, without the stream that it should be added to."""
    return branch


def late_matrices_scaled_without_clipping(factor: float) -> CodePath:
    """The matrices of the last block times ``factor``, and no clipping."""

    def scale(run: TrainingState) -> None:
        for matrix in matrices(run, f"blocks.{len(run.model.blocks) - 1}."):
            matrix *= factor

    return dataclasses.replace(altered(scale), clip_scale=never_clip)


def never_clip(norm: float, limit: float) -> float:
    """Factor 1, whatever the norm."""
    return 1.0


def value_poisoned(place: str) -> CodePath:
    """One element becomes NaN in a gradient, +inf in an activation, or NaN in a weight."""
    if place == "weight":
        return altered(poison_weight)
    join = poison_gradient if place == "gradient" else poison_activation
    return dataclasses.replace(HEALTHY, join=join)


def poison_weight(run: TrainingState) -> None:
    """The first element of the first block's first feed-forward matrix becomes NaN."""
    run.model.blocks[0].up.parameters["weight"].data[0, 0] = math.nan


def poison_activation(name: str, stream: Tensor, branch: Tensor) -> Tensor:
    """The first element of the first block's output becomes +inf."""
    joined = add(stream, branch)
    if name == POISONED_BRANCH:
        joined.data[0, 0] = math.inf  # a fresh array, not yet seen by anybody
    return joined


def poison_gradient(name: str, stream: Tensor, branch: Tensor) -> Tensor:
    """The value is right, but the gradient that comes back through the first block's output has a NaN."""
    joined = add(stream, branch)
    if name != POISONED_BRANCH:
        return joined

    def backward(gradient: Array) -> tuple[Array, ...]:
        poisoned = gradient.copy()
        poisoned[0, 0] = math.nan
        return (poisoned,)

    return Tensor(joined.data, (joined,), backward)


WEIGHT_FAULTS = (
    Fault(
        name="initialisation_too_large",
        title="Initialisation too large",
        number=1,
        parameter="factor on every matrix",
        mild=3.0,
        medium=10.0,
        severe=100.0,
        evidence="first loss far above ln V, low attention entropy at step 0",
        code_path=matrices_scaled,
        starts_with_the_run=True,
    ),
    Fault(
        name="initialisation_too_small",
        title="Initialisation too small",
        number=2,
        parameter="factor on every matrix",
        mild=0.1,
        medium=0.01,
        severe=1e-4,
        evidence="attention logits near 0 and entropy near 1 at step 0, spectral norms far below the usual",
        code_path=matrices_scaled,
        starts_with_the_run=True,
    ),
    Fault(
        name="zero_initialisation",
        title="Zero initialisation",
        number=3,
        parameter="start of the names of the matrices that are zero",
        mild="blocks.0.",
        medium="blocks.",
        severe="",
        evidence="spectral norm 0 and gradient 0 of the same matrices, step after step",
        code_path=matrices_zero,
        starts_with_the_run=True,
    ),
    Fault(
        name="dead_units",
        title="Dead units",
        number=15,
        parameter="share of the units of each layer whose bias is -5",
        mild=0.2,
        medium=0.5,
        severe=1.0,
        evidence="that share of units zero on every token of a window",
        code_path=units_silenced,
    ),
    Fault(
        name="attention_entropy_collapse",
        title="Attention entropy collapse",
        number=16,
        parameter="factor on query and key projections",
        mild=3.0,
        medium=10.0,
        severe=30.0,
        evidence="attention entropy near 0 and attention logits far above those of other runs",
        code_path=queries_and_keys_scaled,
    ),
    Fault(
        name="vanishing_gradients",
        title="Vanishing gradients",
        number=17,
        parameter="factor on the matrices of the blocks, beside the dropped residual",
        mild=0.05,
        medium=0.02,
        severe=1e-3,
        evidence="gradients of the first layers orders of magnitude below those of the last",
        code_path=residual_dropped,
        starts_with_the_run=True,
    ),
    Fault(
        name="exploding_gradients",
        title="Exploding gradients",
        number=18,
        parameter="factor on the matrices of the last block, beside the missing clipping",
        mild=3.0,
        medium=10.0,
        severe=30.0,
        evidence="jumps of the gradient norm that clipping does not bound",
        code_path=late_matrices_scaled_without_clipping,
        first_step=120,
    ),
    Fault(
        name="nonfinite_value",
        title="Non-finite value",
        number=21,
        parameter="where one element becomes NaN or infinite, in one step",
        mild="gradient",
        medium="activation",
        severe="weight",
        evidence="the first non-finite tensor, by step and name",
        code_path=value_poisoned,
        first_step=120,
        duration_steps=1,
    ),
)
