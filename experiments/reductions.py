"""How token losses become the one number that is backpropagated: declared, and kept over micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from experiments.autograd import Array, Tensor, softmax_cross_entropy
from experiments.batches import PackedBatch

Loss = Callable[[Tensor, PackedBatch], tuple[Tensor, Array]]
"""(N, V) logits, batch -> the reduced loss and its (N,) terms in nats."""


@dataclass(frozen=True)
class Reduction:
    """One reduction. A micro-batch counts by its share of what the whole batch is divided by."""

    name: str
    sentence: str  # the manifest carries it
    loss: Loss
    count: Callable[[PackedBatch], int]  # what the loss is divided by; 1: nothing

    def share(self, micro_batch: PackedBatch, batch: PackedBatch) -> float:
        """The factor of a micro-batch's loss with which the sum over micro-batches is the batch's loss."""
        return self.count(micro_batch) / self.count(batch)


def token_mean(logits: Tensor, batch: PackedBatch) -> tuple[Tensor, Array]:
    """Mean over all target tokens."""
    return softmax_cross_entropy(logits, batch.targets)


def sequence_mean(logits: Tensor, batch: PackedBatch) -> tuple[Tensor, Array]:
    """Mean over sequences of the mean over their tokens: a token of a short sequence weighs more."""
    weights = 1.0 / (len(batch.lengths) * batch.lengths[batch.rows])  # (N,), sum 1
    return softmax_cross_entropy(logits, batch.targets, weights)


def token_sum(logits: Tensor, batch: PackedBatch) -> tuple[Tensor, Array]:
    """Sum over all target tokens: it grows with the batch, and so does its gradient."""
    return softmax_cross_entropy(logits, batch.targets, np.ones(len(batch.targets)))


REDUCTIONS = (
    Reduction(
        "token_mean",
        "sum of NLL over all non-pad target tokens / their number",
        token_mean,
        lambda batch: len(batch.targets),
    ),
    Reduction(
        "sequence_mean",
        "mean over sequences of (sum of NLL over the sequence's non-pad target tokens / their number)",
        sequence_mean,
        lambda batch: len(batch.lengths),
    ),
    Reduction("sum", "sum of NLL over all non-pad target tokens", token_sum, lambda batch: 1),
)


def reduction_named(name: str) -> Reduction:
    """The reduction of that name. KeyError when there is none."""
    return {reduction.name: reduction for reduction in REDUCTIONS}[name]


def scaled(loss: Tensor, factor: float) -> Tensor:
    """``factor`` times a scalar."""
    return Tensor(loss.data * factor, (loss,), lambda gradient: (gradient * factor,))
