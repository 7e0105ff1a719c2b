"""One optimizer step: draw, forward and backward for each micro-batch, clip, update."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.batches import Draw, PackedBatch, PackedExamples
from experiments.code_path import CodePath
from experiments.optimizer import global_norm
from experiments.reductions import REDUCTIONS, Reduction, scaled

if TYPE_CHECKING:  # the loop imports this module
    from experiments.training import TrainingState


@dataclass(frozen=True)
class MicroBatch:
    """What one forward and backward pass computed; names as in table ``micro_batches``."""

    objective: float  # its part of what was backpropagated
    loss_sum: float  # nats
    loss_token_count: int
    gradient_norm: float  # of its own loss, whatever its share in the step's; NaN for a whole batch


@dataclass(frozen=True)
class StepResult:
    """What one step computed about the weights before its update."""

    draw: Draw
    batch: PackedBatch
    objective: float  # what was backpropagated, nats/token
    loss_sum: float  # nats
    loss_token_count: int
    learning_rate: float
    gradient_norm: float
    clipped_gradient_norm: float
    micro_batches: tuple[MicroBatch, ...]

    def columns(self, planned_learning_rate: float) -> dict[str, Any]:
        """The step's columns of the log's table ``steps``."""
        return {
            "epoch": self.draw.epoch,
            "data_position": self.draw.data_position,
            "objective": self.objective,
            "loss_sum": self.loss_sum,
            "loss_token_count": self.loss_token_count,
            "non_padding_token_count": self.batch.non_padding_token_count(),
            "example_count": len(self.batch.lengths),
            "learning_rate": self.learning_rate,
            "planned_learning_rate": planned_learning_rate,
            "gradient_norm": self.gradient_norm,
            "clipped_gradient_norm": self.clipped_gradient_norm,
            "accumulation_count": len(self.micro_batches),
            "loss_scale": 1.0,
            "batch_hash": self.batch.content_hash(),
            "order_hash": self.draw.order_hash,
            "training_mode": True,
        }


def training_step(
    run: TrainingState,
    examples: PackedExamples,
    clip_norm: float,
    code_path: CodePath,
    reduction: Reduction = REDUCTIONS[0],
    accumulation_count: int = 1,
) -> StepResult:
    """One update: draw, forward and backward for each micro-batch, clip, AdamW."""
    draw = run.data.draw(code_path.next_order)
    batch = code_path.batch(examples.batch(draw.indices))
    code_path.zero_gradients(run)
    micro_batches = [
        backpropagate(run, part, batch, code_path, reduction) for part in batch.parts(accumulation_count)
    ]
    gradient = code_path.gradient(run)
    gradient_norm = global_norm(gradient)
    scale = code_path.clip_scale(gradient_norm, clip_norm)
    learning_rate = code_path.applied_rate(run.schedule)
    code_path.update(run, gradient, learning_rate, scale)

    return StepResult(
        draw=draw,
        batch=batch,
        objective=sum(micro.objective for micro in micro_batches),
        loss_sum=sum(micro.loss_sum for micro in micro_batches),
        loss_token_count=sum(micro.loss_token_count for micro in micro_batches),
        learning_rate=learning_rate,
        gradient_norm=gradient_norm,
        clipped_gradient_norm=gradient_norm * scale,
        micro_batches=tuple(micro_batches),
    )


def backpropagate(
    run: TrainingState, batch: PackedBatch, whole: PackedBatch, code_path: CodePath, reduction: Reduction
) -> MicroBatch:
    """Add to the weights' gradients what a micro-batch contributes to the loss of the whole batch."""
    logits = run.model(batch, code_path.training_mask, run.dropout, code_path.join)
    loss, token_losses = (code_path.loss or reduction.loss)(logits, batch)
    loss_sum, token_count = float(token_losses.sum(dtype=np.float64)), len(token_losses)
    if batch is whole:
        loss.backward()
        return MicroBatch(float(loss.data), loss_sum, token_count, math.nan)
    share = code_path.micro_batch_share(reduction, batch, whole)
    before = run.optimizer.flat_gradient()
    scaled(loss, share).backward()
    own_norm = global_norm(run.optimizer.flat_gradient() - before) / share
    return MicroBatch(share * float(loss.data), loss_sum, token_count, own_norm)
