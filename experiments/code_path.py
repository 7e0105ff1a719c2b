"""What the training loop really runs, part by part. The defaults are the healthy loop.

A deliberate fault replaces parts for a stretch of steps and leaves the declaration, which the manifest
carries, as it was.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from experiments.autograd import Array
from experiments.batches import EpochIterator, Integers, PackedBatch
from experiments.corpus import Corpus
from experiments.optimizer import LearningRatePlan, Schedule, clip_scale
from experiments.reductions import Loss, Reduction
from experiments.transformer import (
    DropoutFunction,
    Join,
    MaskFunction,
    Transformer,
    add_branch,
    causal_mask,
    no_dropout,
)

if TYPE_CHECKING:  # the loop imports this module
    from experiments.training import TrainingState


def intended_corpus(corpus: Corpus) -> Corpus:
    """The corpus that the data manifest pins."""
    return corpus


def leave_state_alone(run: TrainingState) -> None:
    """Nothing but the loop changes weights and optimizer."""


def intended_batch(batch: PackedBatch) -> PackedBatch:
    """The examples that were drawn, token by token."""
    return batch


def zero_gradients(run: TrainingState) -> None:
    """Forget the gradients of the step before."""
    run.optimizer.zero_gradients()


def summed_gradient(run: TrainingState) -> Array:
    """All gradients in one flat array, as backward summed them."""
    return run.optimizer.flat_gradient()


def update_weights(run: TrainingState, gradient: Array, learning_rate: float, scale: float) -> None:
    """One AdamW update along ``scale * gradient``."""
    run.optimizer.update(gradient, learning_rate, scale)


def restore_everything(run: TrainingState, state: dict[str, Any]) -> None:
    """Every state machine continues where the checkpoint was taken."""
    run.load_state(state)


def evaluation_mode(run: TrainingState) -> DropoutFunction:
    """No dropout."""
    return no_dropout


def live_weights(run: TrainingState) -> Transformer:
    """The model that is being trained."""
    return run.model


@dataclass(frozen=True)
class CodePath:
    """One function for each part of the loop that a fault can replace, and the steps that it is active in."""

    first_step: int = 0
    end_step: int | None = None  # the first step that is healthy again; None: it stays to the end

    # before training
    corpus: Callable[[Corpus], Corpus] = intended_corpus
    # once, before anything else happens in ``first_step``
    alter_state: Callable[[TrainingState], None] = leave_state_alone
    # every step, in the order of the loop
    next_order: Callable[[EpochIterator], Integers] = EpochIterator.shuffled
    batch: Callable[[PackedBatch], PackedBatch] = intended_batch
    training_mask: MaskFunction = causal_mask
    join: Join = add_branch
    loss: Loss | None = None  # None: the declared reduction
    micro_batch_share: Callable[[Reduction, PackedBatch, PackedBatch], float] = Reduction.share
    zero_gradients: Callable[[TrainingState], None] = zero_gradients
    gradient: Callable[[TrainingState], Array] = summed_gradient
    clip_scale: Callable[[float, float], float] = clip_scale
    applied_rate: Callable[[Schedule], float] = Schedule.next
    planned_rate: Callable[[LearningRatePlan, int], float] = LearningRatePlan.learning_rate
    update: Callable[[TrainingState, Array, float, float], None] = update_weights
    # at a resume
    restore: Callable[[TrainingState, dict[str, Any]], None] = restore_everything
    # every evaluation
    evaluation_mask: MaskFunction = causal_mask
    evaluation_dropout: Callable[[TrainingState], DropoutFunction] = evaluation_mode
    evaluated_model: Callable[[TrainingState], Transformer] = live_weights

    def at(self, step: int) -> CodePath:
        """What runs at ``step``: this path while it is active, the healthy one before and after."""
        active = self.first_step <= step and (self.end_step is None or step < self.end_step)
        return self if active else HEALTHY


HEALTHY = CodePath()
