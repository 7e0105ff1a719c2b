"""Evaluation of a whole split, example by example."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from experiments.autograd import Tensor, softmax_cross_entropy
from experiments.batches import PackedBatch, PackedExamples
from experiments.transformer import (
    DropoutFunction,
    Join,
    MaskFunction,
    Transformer,
    add_branch,
    no_dropout,
)
from recorder import EvaluationLosses

EVALUATION_BATCH_SIZE = 64  # bounds memory; has no effect on the result


@dataclass(frozen=True)
class EvaluationSplit:
    """A split, packed once for all of its evaluations."""

    name: str
    examples: PackedExamples

    @cached_property
    def batches(self) -> tuple[PackedBatch, ...]:
        """Sequences of like length together, so that attention wastes little on padding."""
        order = np.argsort([len(e.tokens) for e in self.examples.examples], kind="stable")
        starts = range(0, len(order), EVALUATION_BATCH_SIZE)
        return tuple(self.examples.batch(order[start : start + EVALUATION_BATCH_SIZE]) for start in starts)


def evaluate(
    model: Transformer,
    split: EvaluationSplit,
    mask: MaskFunction,
    dropout: DropoutFunction = no_dropout,
    join: Join = add_branch,
) -> EvaluationLosses:
    """Losses of every example of the split in its own order; without dropout that is evaluation mode."""
    count = len(split.examples.examples)
    losses = EvaluationLosses(
        example_id=split.examples.example_ids(),
        loss_sum=np.zeros(count),
        token_count=np.zeros(count, dtype=np.int64),
        answer_loss_sum=np.zeros(count),
        answer_token_count=np.zeros(count, dtype=np.int64),
        correct=np.zeros(count, dtype=np.bool_),
    )
    for batch in split.batches:
        _add_batch(losses, batch, model(batch, mask, dropout, join))
    return losses


def _add_batch(losses: EvaluationLosses, batch: PackedBatch, logits: Tensor) -> None:
    """Fill in the rows of ``losses`` that belong to the batch's examples."""
    _, token_losses = softmax_cross_entropy(logits, batch.targets)
    wrong = batch.is_answer & (logits.data.argmax(axis=1) != batch.targets)
    chosen, rows, count = batch.examples, batch.rows, len(batch.lengths)
    losses.loss_sum[chosen] = np.bincount(rows, token_losses, count)
    losses.token_count[chosen] = batch.lengths
    losses.answer_loss_sum[chosen] = np.bincount(rows, token_losses * batch.is_answer, count)
    losses.answer_token_count[chosen] = np.bincount(rows, batch.is_answer, count)
    losses.correct[chosen] = np.bincount(rows, wrong, count) == 0


def mean_loss(losses: EvaluationLosses) -> float:
    """Nats per target token."""
    return float(losses.loss_sum.sum() / losses.token_count.sum())
