"""Errors between the loss and the weights: what is summed, forgotten, applied or held back."""

from __future__ import annotations

import dataclasses

import numpy as np

from experiments.autograd import Array, Tensor, add, softmax_cross_entropy
from experiments.batches import PackedBatch
from experiments.code_path import HEALTHY, CodePath
from experiments.faults.fault import Fault, Settings
from experiments.reductions import Reduction
from experiments.training import TrainingState

NEVER = 0  # steps between two zeroings, when there is none after the first


def loss_not_averaged(counted: str) -> CodePath:
    """The mean loss times the number of what should have been divided by, in the objective alone."""

    def loss(logits: Tensor, batch: PackedBatch) -> tuple[Tensor, Array]:
        mean, token_losses = softmax_cross_entropy(logits, batch.targets)
        token_count, example_count = len(batch.targets), len(batch.lengths)
        factors = {
            "tokens per example": token_count / example_count,
            "examples": float(example_count),
            "tokens": float(token_count),
        }
        return times(mean, factors[counted]), token_losses

    return dataclasses.replace(HEALTHY, loss=loss)


def times(inputs: Tensor, factor: float) -> Tensor:
    """``factor * inputs``."""
    return Tensor(inputs.data * factor, (inputs,), lambda gradient: (gradient * factor,))


def micro_batches_not_divided(_: int) -> CodePath:
    """Each micro-batch counts in full: their gradients are summed where their weighted mean was declared."""

    def share(reduction: Reduction, micro_batch: PackedBatch, batch: PackedBatch) -> float:
        return 1.0

    return dataclasses.replace(HEALTHY, micro_batch_share=share)


def accumulation(micro_batch_count: int) -> Settings:
    """The number of micro-batches, which the healthy run of comparison has too."""
    return {"accumulation_count": micro_batch_count}


def gradients_kept(steps_between: int) -> CodePath:
    """Gradients are zeroed before every ``steps_between``-th update only; NEVER: not once after the first."""

    def zero_sometimes(run: TrainingState) -> None:
        update_count = run.optimizer.update_count
        if update_count == 0 or (steps_between != NEVER and update_count % steps_between == 0):
            run.optimizer.zero_gradients()

    return dataclasses.replace(HEALTHY, zero_gradients=zero_sometimes)


def weights_frozen(prefix: str) -> CodePath:
    """Updates leave the weights whose name starts with ``prefix`` as they are, decay included."""

    def update(run: TrainingState, gradient: Array, learning_rate: float, scale: float) -> None:
        frozen = [w.data for name, w in run.model.named_parameters() if name.startswith(prefix)]
        before = [array.copy() for array in frozen]
        run.optimizer.update(gradient, learning_rate, scale)
        for array, old in zip(frozen, before, strict=True):
            array[...] = old

    return dataclasses.replace(HEALTHY, update=update)


def branch_detached(prefix: str) -> CodePath:
    """The branches whose name starts with ``prefix`` add their value, and no gradient comes back."""

    def join(name: str, stream: Tensor, branch: Tensor) -> Tensor:
        return add(stream, Tensor(branch.data) if name.startswith(prefix) else branch)

    return dataclasses.replace(HEALTHY, join=join)


def decay_applied(weight_decay: float) -> CodePath:
    """Updates decay by ``weight_decay`` instead of the declared one."""

    def update(run: TrainingState, gradient: Array, learning_rate: float, scale: float) -> None:
        run.optimizer.weight_decay = weight_decay
        run.optimizer.update(gradient, learning_rate, scale)

    return dataclasses.replace(HEALTHY, update=update)


def sums_in_any_order(share: float) -> CodePath:
    """A random ``share`` of the gradient's elements is off by one unit in the last place.

    That is what another order of summation does. The generator is not seeded: no two runs agree.
    """
    generator = np.random.default_rng()

    def gradient(run: TrainingState) -> Array:
        exact = run.optimizer.flat_gradient()
        chosen = generator.random(exact.size) < share
        upwards = generator.random(exact.size) < 0.5
        neighbour = np.nextafter(exact, np.where(upwards, np.inf, -np.inf).astype(exact.dtype))
        return np.where(chosen & (exact != 0), neighbour, exact)

    return dataclasses.replace(HEALTHY, gradient=gradient)


GRADIENT_FAULTS = (
    Fault(
        name="loss_summed_not_averaged",
        title="Loss summed, not averaged",
        number=12,
        parameter="what the mean loss is multiplied by the number of",
        mild="tokens per example",
        medium="examples",
        severe="tokens",
        evidence="objective a multiple of loss_sum / loss_token_count",
        code_path=loss_not_averaged,
    ),
    Fault(
        name="accumulation_not_normalised",
        title="Gradient accumulation not normalised",
        number=13,
        parameter="micro-batches of a step, each of which counts in full",
        mild=2,
        medium=4,
        severe=8,
        evidence="gradient norm and objective that many times those of the micro-batches' mean",
        code_path=micro_batches_not_divided,
        settings=accumulation,
    ),
    Fault(
        name="gradients_not_zeroed",
        title="Gradients not zeroed",
        number=14,
        parameter="steps between two zeroings; 0: none after the first",
        mild=4,
        medium=16,
        severe=NEVER,
        evidence="cosine between one step's gradient and the next near 1",
        code_path=gradients_kept,
    ),
    Fault(
        name="frozen_layer",
        title="Frozen layer",
        number=19,
        parameter="start of the names of the weights that do not move",
        mild="blocks.0.mlp.up.weight",
        medium="blocks.0.",
        severe="",
        evidence="hash of a trainable tensor unchanged while the learning rate is above 0",
        code_path=weights_frozen,
    ),
    Fault(
        name="detached_branch",
        title="Detached branch",
        number=20,
        parameter="start of the names of the branches that no gradient passes",
        mild="blocks.0.mlp",
        medium="blocks.0.",
        severe="blocks.",
        evidence="no gradient for trainable tensors that only decay moves",
        code_path=branch_detached,
    ),
    Fault(
        name="weight_decay_too_strong",
        title="Weight decay too strong",
        number=25,
        parameter="weight decay that is applied",
        mild=1.0,
        medium=3.0,
        severe=10.0,
        evidence="weight norms that shrink together, updates that are mostly decay",
        code_path=decay_applied,
    ),
    Fault(
        name="nondeterminism",
        title="Non-determinism",
        number=37,
        parameter="share of gradient elements that are off by one unit in the last place",
        mild=0.01,
        medium=0.1,
        severe=1.0,
        evidence="weight hashes that part from those of a run with the same seed",
        code_path=sums_in_any_order,
        first_step=20,
    ),
)
