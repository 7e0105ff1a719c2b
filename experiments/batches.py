"""Packed batches: only real tokens are stored, so padding never enters embedding, layers or loss."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experiments.corpus import PAD, SEPARATOR, Example

Integers = NDArray[np.int64]


@dataclass(frozen=True)
class PackedBatch:
    """The N real tokens of B sequences, one after another; all arrays but the last two are (N,).

    A sequence of L + 1 tokens gives L inputs and, shifted by one, L targets. Padding is on the right,
    so a token's position is also its column in the padded grid.
    """

    tokens: Integers
    targets: Integers
    positions: Integers
    rows: Integers  # which sequence of the batch
    is_answer: NDArray[np.bool_]  # the target comes after the prompt: answer or end
    lengths: Integers  # (B,)
    examples: Integers  # (B,) index of each sequence in its split

    def parts(self, count: int) -> tuple[PackedBatch, ...]:
        """``count`` micro-batches of neighbouring sequences, as equal in number as can be."""
        if count == 1:
            return (self,)
        return tuple(
            self._part(rows[0], rows[-1] + 1) for rows in np.array_split(np.arange(len(self.lengths)), count)
        )

    def _part(self, first: int, end: int) -> PackedBatch:
        """Sequences ``first`` to ``end`` - 1."""
        chosen = (self.rows >= first) & (self.rows < end)
        return PackedBatch(
            tokens=self.tokens[chosen],
            targets=self.targets[chosen],
            positions=self.positions[chosen],
            rows=self.rows[chosen] - first,
            is_answer=self.is_answer[chosen],
            lengths=self.lengths[first:end],
            examples=self.examples[first:end],
        )

    def content_hash(self) -> int:
        """64-bit hash of token ids and targets, in order."""
        digest = hashlib.blake2b(self.tokens.tobytes(), digest_size=8)
        digest.update(self.targets.tobytes())
        return int.from_bytes(digest.digest(), "little")

    def non_padding_token_count(self) -> int:
        """Targets that are not padding, counted from the targets themselves."""
        return int(np.count_nonzero(self.targets != PAD))


@dataclass(frozen=True)
class PackedExamples:
    """A whole split, packed once; a batch is a choice of its sequences."""

    examples: tuple[Example, ...]

    @cached_property
    def _sequences(self) -> list[tuple[NDArray[Any], ...]]:
        """(tokens, targets, positions, is_answer) of each example."""
        return [_sequence(example.tokens) for example in self.examples]

    def example_ids(self) -> Integers:
        """(examples,) ids of the whole split, in order."""
        return np.array([example.example_id for example in self.examples], dtype=np.int64)

    def batch(self, indices: Sequence[int] | Integers) -> PackedBatch:
        """The sequences at ``indices``, in that order."""
        chosen = [self._sequences[index] for index in indices]
        tokens, targets, positions, is_answer = (np.concatenate(parts) for parts in zip(*chosen, strict=True))
        lengths = np.array([len(sequence[0]) for sequence in chosen])
        return PackedBatch(
            tokens=tokens,
            targets=targets,
            positions=positions,
            rows=np.repeat(np.arange(len(chosen)), lengths),
            is_answer=is_answer,
            lengths=lengths,
            examples=np.asarray(indices),
        )


def _sequence(tokens: Sequence[int]) -> tuple[NDArray[Any], ...]:
    array = np.array(tokens, dtype=np.int64)
    positions = np.arange(len(array) - 1)
    return array[:-1], array[1:], positions, positions >= tokens.index(SEPARATOR)


@dataclass(frozen=True)
class Draw:
    """What one training step reads, and where in the data that is."""

    indices: Integers  # (batch_size,)
    epoch: int
    data_position: int  # examples of this epoch consumed before
    order_hash: int


class EpochIterator:
    """Batches of example indices: every epoch is one fresh shuffle, with a generator of its own.

    The partial batch at an epoch's end is dropped, so that every step has the same number of examples
    and neither the noise of the loss nor that of the gradient changes within an epoch. The shuffle
    leaves out other examples each time.
    """

    def __init__(self, example_count: int, batch_size: int, seed: np.random.SeedSequence) -> None:
        self.example_count = example_count
        self.batch_size = batch_size
        self.generator = np.random.Generator(np.random.PCG64(seed))
        self.epoch = 0
        self.data_position = 0
        self.order = self.shuffled()

    def shuffled(self) -> Integers:
        """A fresh order of all examples."""
        return self.generator.permutation(self.example_count)

    def draw(self, next_order: Callable[[EpochIterator], Integers] = shuffled) -> Draw:
        """The next batch's indices; ``next_order`` orders an epoch that begins here."""
        if self.data_position + self.batch_size > self.example_count:
            self.epoch += 1
            self.data_position = 0
            self.order = next_order(self)
        indices = self.order[self.data_position : self.data_position + self.batch_size]
        drawn = Draw(indices, self.epoch, self.data_position, self._order_hash())
        self.data_position += self.batch_size
        return drawn

    def state(self) -> dict[str, Any]:
        """Everything that the following draws depend on."""
        return {
            "epoch": self.epoch,
            "data_position": self.data_position,
            "order": self.order.copy(),
            "generator": self.generator.bit_generator.state,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue exactly where ``state`` was taken."""
        self.epoch = state["epoch"]
        self.data_position = state["data_position"]
        self.order = state["order"].copy()
        self.generator.bit_generator.state = state["generator"]

    def _order_hash(self) -> int:
        digest = hashlib.blake2b(self.order.tobytes(), digest_size=8)
        return int.from_bytes(digest.digest(), "little")
