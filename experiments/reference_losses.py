"""Losses in nats per target token that the curves of a language model are read against."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from experiments.corpus import PRIMARY_SPLIT, SPLITS, Corpus
from experiments.n_gram import best_baseline
from recorder.manifest import ReferenceLosses

Tokens = Sequence[int]


def reference_losses(corpus: Corpus) -> ReferenceLosses:
    """ln V, unigram entropy of the training targets, best n-gram on the primary split, floor per split."""
    sequences = {name: [example.tokens for example in corpus.split(name)] for name in SPLITS}
    return ReferenceLosses(
        uniform=math.log(len(corpus.vocabulary)),
        unigram=unigram_entropy(sequences["train"]),
        n_gram=best_baseline(corpus).loss(corpus.split(PRIMARY_SPLIT)),
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
