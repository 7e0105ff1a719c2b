"""Errors in the data and in the order that it is read in."""

from __future__ import annotations

import dataclasses
from itertools import count

import numpy as np

from experiments.batches import EpochIterator, Integers, PackedBatch
from experiments.code_path import HEALTHY, CodePath
from experiments.corpus import END, PAD, PRIMARY_SPLIT, SEPARATOR, Corpus, Example
from experiments.faults.fault import Fault
from experiments.training import TrainingState

FAULT_SEED = 97  # of generators apart from the run's own: the rest of the run stays as it was
WHOLE_DATA = 1 << 20  # window of a full shuffle


def padding_counted(most_per_example: int) -> CodePath:
    """Sequences are padded towards the batch's longest, by at most so many tokens, which all count."""
    return dataclasses.replace(HEALTHY, batch=lambda batch: padded(batch, most_per_example))


def padded(batch: PackedBatch, most_per_example: int) -> PackedBatch:
    """The batch with padding as ordinary tokens: inputs after the end, with padding as their targets."""
    added = np.minimum(batch.lengths.max() - batch.lengths, most_per_example)
    ends = np.cumsum(batch.lengths)
    parts = {
        "tokens": (batch.tokens, PAD),
        "targets": (batch.targets, PAD),
        "is_answer": (batch.is_answer, False),
    }
    filled = {
        name: np.insert(array, np.repeat(ends, added), filler) for name, (array, filler) in parts.items()
    }
    lengths = batch.lengths + added
    first_added = (np.cumsum(lengths) - added)[added > 0]
    filled["tokens"][first_added] = END  # the target of the last real token is the next input
    rows = np.repeat(np.arange(len(lengths)), lengths)
    positions = np.arange(len(rows)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return PackedBatch(**filled, rows=rows, positions=positions, lengths=lengths, examples=batch.examples)


def tokens_scrambled(share: float) -> CodePath:
    """A random ``share`` of the batch's tokens is replaced by any symbol of the batch."""
    return dataclasses.replace(HEALTHY, batch=lambda batch: scrambled(batch, share))


def scrambled(batch: PackedBatch, share: float) -> PackedBatch:
    """The batch with wrong tokens, each as a target and as the input after it."""
    generator = np.random.default_rng([FAULT_SEED, batch.content_hash() % (1 << 32)])
    wrong = generator.choice(np.unique(batch.targets), len(batch.targets))
    targets = np.where(generator.random(len(wrong)) < share, wrong, batch.targets)
    follows = batch.positions > 0
    tokens = batch.tokens.copy()
    tokens[follows] = np.roll(targets, 1)[follows]
    return dataclasses.replace(batch, tokens=tokens, targets=targets)


def order_repeated(window: int) -> CodePath:
    """Every epoch has one and the same order: the table's, shuffled inside windows of so many examples."""

    def next_order(data: EpochIterator) -> Integers:
        generator = np.random.default_rng(FAULT_SEED)
        starts = range(0, data.example_count, window)
        windows = [np.arange(start, min(start + window, data.example_count)) for start in starts]
        return np.concatenate([generator.permutation(part) for part in windows])

    def order_first_epoch(run: TrainingState) -> None:
        if run.data.data_position == 0:
            run.data.order = next_order(run.data)

    return dataclasses.replace(HEALTHY, next_order=next_order, alter_state=order_first_epoch)


def validation_copied(share: float) -> CodePath:
    """A random ``share`` of the validation examples is in the training data too."""
    return dataclasses.replace(HEALTHY, corpus=lambda corpus: with_leak(corpus, share))


def with_leak(corpus: Corpus, share: float) -> Corpus:
    """The corpus with copies of validation examples in ``train``, under ids of their own."""
    validation = corpus.split(PRIMARY_SPLIT)
    chosen = np.random.default_rng(FAULT_SEED).permutation(len(validation))[: round(share * len(validation))]
    free_ids = count(max(example.example_id for example in corpus.examples) + 1)
    copies = [
        dataclasses.replace(validation[index], split="train", example_id=next(free_ids))
        for index in sorted(chosen)
    ]
    return dataclasses.replace(corpus, examples=(*corpus.examples, *copies))


def answers_swapped(share: float) -> CodePath:
    """A random ``share`` of the training examples has the answer of another one of its task."""
    return dataclasses.replace(HEALTHY, corpus=lambda corpus: with_wrong_answers(corpus, share))


def with_wrong_answers(corpus: Corpus, share: float) -> Corpus:
    """The corpus with wrong answers in ``train``; no sequence grows longer than the longest."""
    generator = np.random.default_rng(FAULT_SEED)
    train = corpus.split("train")
    chosen = generator.permutation(len(train))[: round(share * len(train))]
    longest = corpus.context_length() + 1
    wrong = {}
    for example in (train[index] for index in chosen):
        donors = [
            donor
            for donor in train
            if donor.labels["task"] == example.labels["task"]
            and donor.answer != example.answer
            and len(example.tokens) - len(example.answer) + len(donor.answer) <= longest
        ]
        wrong[example.example_id] = with_answer_of(example, donors[generator.integers(len(donors))])
    return dataclasses.replace(
        corpus, examples=tuple(wrong.get(example.example_id, example) for example in corpus.examples)
    )


def with_answer_of(example: Example, donor: Example) -> Example:
    """The example's prompt and labels with the donor's answer."""
    prompt = example.tokens[: example.tokens.index(SEPARATOR)]
    answer = donor.tokens[donor.tokens.index(SEPARATOR) :]
    labels = {**example.labels, "answer": donor.answer}
    return dataclasses.replace(example, answer=donor.answer, labels=labels, tokens=prompt + answer)


EXAMPLE_FAULTS = (
    Fault(
        name="padding_in_loss",
        title="Padding in the loss",
        number=11,
        parameter="padding tokens that count, at most, in each example",
        mild=1,
        medium=4,
        severe=1000,
        evidence="more counted tokens than non-padding tokens",
        code_path=padding_counted,
    ),
    Fault(
        name="bad_batch",
        title="Bad batch",
        number=27,
        parameter="share of random tokens in one batch",
        mild=0.1,
        medium=0.5,
        severe=1.0,
        evidence="a loss spike of one batch that is over after a few steps",
        code_path=tokens_scrambled,
        first_step=120,
        duration_steps=1,
    ),
    Fault(
        name="data_not_shuffled",
        title="Data not shuffled",
        number=28,
        parameter="window of the one shuffle that every epoch repeats; 1: the order of the table",
        mild=WHOLE_DATA,
        medium=64,
        severe=1,
        evidence="the same order hash in every epoch",
        code_path=order_repeated,
    ),
    Fault(
        name="train_validation_leak",
        title="Validation examples in the training data",
        number=29,
        parameter="share of the validation examples",
        mild=0.05,
        medium=0.5,
        severe=1.0,
        evidence="content hashes that are in both splits",
        code_path=validation_copied,
        starts_with_the_run=True,
    ),
    Fault(
        name="label_noise",
        title="Label noise",
        number=32,
        parameter="share of training examples with another example's answer",
        mild=0.05,
        medium=0.15,
        severe=0.3,
        evidence="train stalls far above its floor, with two groups of per-example losses",
        code_path=answers_swapped,
        starts_with_the_run=True,
    ),
)
