"""Losses in nats per target token that the curves of a language model are read against."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from experiments.corpus import PRIMARY_SPLIT, SPLITS, Corpus
from recorder.manifest import ReferenceLosses

Tokens = Sequence[int]
N_GRAM_ORDERS = (1, 2, 3, 4, 5, 6)
N_GRAM_HELD_OUT_EVERY = 10  # every tenth training sequence chooses the order


def reference_losses(corpus: Corpus) -> ReferenceLosses:
    """ln V, unigram entropy of the training targets, best n-gram on the primary split, floor per split."""
    sequences = {name: [example.tokens for example in corpus.split(name)] for name in SPLITS}
    vocabulary_size = len(corpus.vocabulary)
    return ReferenceLosses(
        uniform=math.log(vocabulary_size),
        unigram=unigram_entropy(sequences["train"]),
        n_gram=n_gram_loss(sequences["train"], sequences[PRIMARY_SPLIT], vocabulary_size),
        entropy_floor={name: prefix_tree_entropy(sequences[name]) for name in SPLITS},
    )


def unigram_entropy(sequences: Iterable[Tokens]) -> float:
    """Entropy of the frequencies of the target tokens (every token but the first of a sequence)."""
    counts = Counter(token for tokens in sequences for token in tokens[1:])
    total = sum(counts.values())
    return -sum(count / total * math.log(count / total) for count in counts.values())


def prefix_tree_entropy(sequences: Iterable[Tokens]) -> float:
    """The loss that no causal model with fixed weights can beat on exactly these sequences.

    -(1/N) sum over (prefix, next token) of c(prefix, token) ln(c(prefix, token) / c(prefix)): a causal
    model gives one distribution per prefix, and the best one is the empirical one (Gibbs' inequality).
    """
    next_counts: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    for tokens in sequences:
        for end in range(1, len(tokens)):
            next_counts[tuple(tokens[:end])][tokens[end]] += 1
    total = sum(counts.total() for counts in next_counts.values())
    nats = sum(
        count * math.log(counts.total() / count)
        for counts in next_counts.values()
        for count in counts.values()
    )
    return nats / total


def n_gram_loss(training: Sequence[Tokens], evaluated: Sequence[Tokens], vocabulary_size: int) -> float:
    """Loss of an interpolated n-gram model on ``evaluated``; its order is chosen on training data alone."""
    held_out = training[::N_GRAM_HELD_OUT_EVERY]
    kept = [tokens for index, tokens in enumerate(training) if index % N_GRAM_HELD_OUT_EVERY]
    chooser = NGramModel.fit(kept, max(N_GRAM_ORDERS), vocabulary_size)
    order = min(N_GRAM_ORDERS, key=lambda candidate: chooser.loss(held_out, candidate))
    return NGramModel.fit(training, order, vocabulary_size).loss(evaluated, order)


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

    def loss(self, sequences: Iterable[Tokens], order: int) -> float:
        """Mean negative log-likelihood of the target tokens, in nats, with contexts below ``order``."""
        losses = [
            -math.log(self.probability(context, token))
            for tokens in sequences
            for context, token in _contexts(tokens, order)
        ]
        return math.fsum(losses) / len(losses)


def _contexts(tokens: Tokens, order: int) -> Iterator[tuple[tuple[int, ...], int]]:
    """(up to order - 1 tokens before it, target token) for each target of a sequence."""
    for end in range(1, len(tokens)):
        yield tuple(tokens[max(0, end - order + 1) : end]), tokens[end]
