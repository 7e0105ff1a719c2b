"""n-gram baselines on the same tokens and loss positions as the model: an oracle for the training loop."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from experiments.corpus import SEPARATOR, Corpus, Example
from recorder import EvaluationLosses

Tokens = Sequence[int]
ORDERS = (1, 2, 3, 4, 5, 6)
HELD_OUT_EVERY = 10  # every tenth cell of the training split chooses the order


@dataclass(frozen=True)
class NGramModel:
    """Witten-Bell interpolation over contexts of 0 to order - 1 tokens (Witten and Bell, 1991).

    p_n(x | h) = (c(h, x) + t(h) p_(n-1)(x | shorter h)) / (c(h) + t(h)), with t(h) the number of distinct
    tokens seen after h, ending at the uniform distribution.
    """

    counts: dict[tuple[int, ...], Counter[int]]
    vocabulary_size: int

    @staticmethod
    def fit(sequences: Iterable[Tokens], order: int, vocabulary_size: int) -> NGramModel:
        """The model that counts every context of up to ``order - 1`` tokens."""
        counts: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
        for tokens in sequences:
            for context, token in _contexts(tokens, order):
                for start in range(len(context) + 1):
                    counts[context[start:]][token] += 1
        return NGramModel(dict(counts), vocabulary_size)

    def probability(self, context: tuple[int, ...], token: int) -> float:
        """p(token | context); the longest contexts weigh most where they have been seen."""
        probability = 1.0 / self.vocabulary_size
        for start in range(len(context), -1, -1):
            counts = self.counts.get(context[start:])
            if counts is None:
                break
            distinct = len(counts)
            probability = (counts[token] + distinct * probability) / (counts.total() + distinct)
        return probability

    def token_losses(self, tokens: Tokens, order: int) -> list[float]:
        """Negative log-likelihood in nats of each target, every token of the sequence but the first."""
        return [-math.log(self.probability(*place)) for place in _contexts(tokens, order)]

    def losses(self, examples: Sequence[Example], order: int) -> EvaluationLosses:
        """Sums of each example, all tokens and answer tokens, as an evaluation of the model gives them."""
        rows = [(self.token_losses(e.tokens, order), _answer_start(e)) for e in examples]
        return EvaluationLosses(
            example_id=np.array([example.example_id for example in examples]),
            loss_sum=np.array([math.fsum(nats) for nats, _ in rows]),
            token_count=np.array([len(nats) for nats, _ in rows]),
            answer_loss_sum=np.array([math.fsum(nats[start:]) for nats, start in rows]),
            answer_token_count=np.array([len(nats[start:]) for nats, start in rows]),
            correct=np.zeros(len(rows), dtype=np.bool_),  # not asked for
        )


@dataclass(frozen=True)
class Baseline:
    """The best n-gram model for a kind of token, its order chosen on training data alone."""

    order: int
    model: NGramModel
    answers_only: bool

    def loss(self, examples: Sequence[Example]) -> float:
        """Nats per token of the kind that it was chosen for."""
        return mean_nats(self.model.losses(examples, self.order), self.answers_only)


def best_baseline(corpus: Corpus, *, answers_only: bool = False) -> Baseline:
    """Fitted to the training split, with the order that predicts held-out cells of that split best.

    Both tasks of a cell are held out together: one of them would give the other's form away.
    """
    training = corpus.split("train")
    cell_of = {example: index for index, example in enumerate(dict.fromkeys(map(_cell, training)))}
    held_out = [example for example in training if cell_of[_cell(example)] % HELD_OUT_EVERY == 0]
    kept = [example.tokens for example in training if cell_of[_cell(example)] % HELD_OUT_EVERY]
    vocabulary_size = len(corpus.vocabulary)
    chooser = NGramModel.fit(kept, max(ORDERS), vocabulary_size)
    order = min(ORDERS, key=lambda candidate: mean_nats(chooser.losses(held_out, candidate), answers_only))
    fitted = NGramModel.fit([example.tokens for example in training], order, vocabulary_size)
    return Baseline(order, fitted, answers_only)


def mean_nats(losses: EvaluationLosses, answers_only: bool) -> float:
    """Nats per token, over all tokens or over answer tokens."""
    if answers_only:
        return float(losses.answer_loss_sum.sum() / losses.answer_token_count.sum())
    return float(losses.loss_sum.sum() / losses.token_count.sum())


def _cell(example: Example) -> tuple[str, str, str]:
    return example.labels["verb"], example.labels["tense"], example.labels["person"]


def _answer_start(example: Example) -> int:
    """Index among the targets of the first one after the separator."""
    return example.tokens.index(SEPARATOR)


def _contexts(tokens: Tokens, order: int) -> Iterator[tuple[tuple[int, ...], int]]:
    """(up to order - 1 tokens before it, target token) for each target of a sequence."""
    for end in range(1, len(tokens)):
        yield tuple(tokens[max(0, end - order + 1) : end]), tokens[end]
