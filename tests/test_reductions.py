"""Loss reductions and gradient accumulation: what is declared is what is backpropagated."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from experiments.autograd import Tensor, parameter
from experiments.batches import PackedBatch, PackedExamples
from experiments.code_path import HEALTHY
from experiments.corpus import Corpus, load_corpus
from experiments.experiment import configure, load_experiment, run_experiment
from experiments.log_reader import current_rows
from experiments.reductions import REDUCTIONS, Reduction, reduction_named
from experiments.training import TrainingConfig, TrainingState, train
from experiments.training_step import training_step
from recorder.manifest import read_manifest

CONFIG = TrainingConfig(batch_size=12, width=16, layer_count=1, dropout=0.0, dtype="float64")
BATCH_TOKENS = 12 * 40  # more than any batch of 12 examples has
# Both orders of summation err by at most n u sum|terms| (Higham 2002, section 4.2), u = 2^-53. A token's
# gradient is at most some 10 times the norm of their mean, so sum|terms| <= 10 n |mean|: relatively 10 n^2 u.
TOLERANCE = 10 * BATCH_TOKENS**2 * 2**-53


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return load_corpus()


def batch_of(corpus: Corpus, count: int) -> PackedBatch:
    """Sequences of different lengths from the training split."""
    return PackedExamples(corpus.split("train")).batch(range(count))


def random_logits(batch: PackedBatch, corpus: Corpus) -> Tensor:
    """(N, V) logits of standard deviation 1."""
    shape = len(batch.targets), len(corpus.vocabulary)
    return parameter(np.random.default_rng(1).standard_normal(shape))


def step_gradient(corpus: Corpus, reduction: Reduction, count: int, path=HEALTHY) -> np.ndarray:
    """Flat gradient of the first step from the same weights and the same 12 examples."""
    run = TrainingState(CONFIG, corpus)
    training_step(run, PackedExamples(corpus.split("train")), 1.0, path, reduction, count)
    return run.optimizer.flat_gradient()


def relative_difference(one: np.ndarray, two: np.ndarray) -> float:
    return float(np.linalg.norm(one - two) / np.linalg.norm(two))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("token_mean", lambda terms, batch: terms.mean()),
        (
            "sequence_mean",
            lambda terms, batch: np.mean([terms[batch.rows == row].mean() for row in range(5)]),
        ),
        ("sum", lambda terms, batch: terms.sum()),
    ],
)
def test_each_reduction_is_what_its_sentence_says(corpus: Corpus, name: str, expected) -> None:
    """The value, and the gradient against central differences in float64."""
    batch = batch_of(corpus, 5)
    logits = random_logits(batch, corpus)
    loss, terms = reduction_named(name).loss(logits, batch)
    assert float(loss.data) == pytest.approx(expected(terms, batch), rel=1e-13)  # 150 terms: n u = 2e-14
    loss.backward()
    step = 1e-6  # truncation step^2 = 1e-12, rounding 2^-53 * 500 / step = 6e-8 for the sum
    for place in ((0, 3), (40, 7)):
        values = []
        for sign in (1, -1):
            moved = parameter(logits.data.copy())
            moved.data[place] += sign * step
            values.append(float(reduction_named(name).loss(moved, batch)[0].data))
        assert logits.gradient[place] == pytest.approx((values[0] - values[1]) / (2 * step), abs=1e-7)


@pytest.mark.parametrize("reduction", REDUCTIONS, ids=lambda reduction: reduction.name)
@pytest.mark.parametrize("count", [2, 5, 12])
def test_accumulated_gradient_is_that_of_the_big_batch(
    corpus: Corpus, reduction: Reduction, count: int
) -> None:
    """Micro-batches of unequal sizes and lengths, down to one example each."""
    whole = step_gradient(corpus, reduction, 1)
    assert relative_difference(step_gradient(corpus, reduction, count), whole) < TOLERANCE


def test_mean_of_micro_batch_means_is_another_gradient(corpus: Corpus) -> None:
    """The trap: with equal shares every micro-batch weighs the same, whatever its number of tokens."""
    trap = dataclasses.replace(HEALTHY, micro_batch_share=lambda reduction, part, whole: 1 / 4)
    token_mean = reduction_named("token_mean")
    whole = step_gradient(corpus, token_mean, 1)
    assert relative_difference(step_gradient(corpus, token_mean, 4, trap), whole) > 1e-3 > TOLERANCE


def test_accumulation_without_shares_multiplies_the_gradient(corpus: Corpus) -> None:
    """The other trap: four means added up are about four times the mean."""
    trap = dataclasses.replace(HEALTHY, micro_batch_share=lambda reduction, part, whole: 1.0)
    token_mean = reduction_named("token_mean")
    ratio = np.linalg.norm(step_gradient(corpus, token_mean, 4, trap)) / np.linalg.norm(
        step_gradient(corpus, token_mean, 1)
    )
    assert 3.5 < ratio < 4.5


def test_sum_is_the_mean_times_the_number_of_tokens(corpus: Corpus) -> None:
    """The same direction, a length that depends on the batch."""
    batch = batch_of(corpus, 12)
    mean, total = (
        reduction_named(name).loss(random_logits(batch, corpus), batch)[0] for name in ("token_mean", "sum")
    )
    assert float(total.data) == pytest.approx(float(mean.data) * len(batch.targets), rel=1e-13)


def test_padding_would_change_the_mean_and_is_not_in_it(corpus: Corpus) -> None:
    """The counted tokens are those of the sequences; a padded grid has more."""
    batch = batch_of(corpus, 12)
    lengths = [len(example.tokens) - 1 for example in corpus.split("train")[:12]]
    _, terms = reduction_named("token_mean").loss(random_logits(batch, corpus), batch)
    assert len(terms) == sum(lengths) < 12 * max(lengths)


def test_parts_of_a_batch_are_the_batches_of_their_examples(corpus: Corpus) -> None:
    """Every token once, in order, and rows counted from 0 in each part."""
    examples = PackedExamples(corpus.split("train"))
    batch = examples.batch([4, 9, 2, 30, 11])
    for part, indices in zip(batch.parts(2), ([4, 9, 2], [30, 11]), strict=True):
        expected = examples.batch(indices)
        for field in dataclasses.fields(PackedBatch):
            assert np.array_equal(getattr(part, field.name), getattr(expected, field.name)), field.name


@pytest.mark.parametrize("reduction", REDUCTIONS, ids=lambda reduction: reduction.name)
def test_manifest_carries_the_declared_sentence(reduction: Reduction, tmp_path: Path) -> None:
    """The sentence is the reduction's own, and training with it works."""
    experiment = load_experiment("19-healthy")
    settings = ["total_steps=1", "width=16", "layer_count=1", f"loss_reduction={reduction.name}"]
    run_experiment(experiment, configure(experiment, None, settings), tmp_path / "run")
    assert read_manifest(tmp_path / "run").loss_reduction == reduction.sentence


def test_micro_batches_are_logged_and_add_up_to_the_step(tmp_path: Path) -> None:
    """Their sums and counts are the step's; their number is in the step's row."""
    experiment = load_experiment("19-healthy")
    settings = ["total_steps=2", "width=16", "layer_count=1", "accumulation_count=3"]
    run_experiment(experiment, configure(experiment, None, settings), tmp_path / "run")
    steps = current_rows(tmp_path / "run", "steps").to_pylist()
    micro = current_rows(tmp_path / "run", "micro_batches").to_pylist()
    assert [row["accumulation_count"] for row in steps] == [3, 3]
    assert [(row["step"], row["micro"]) for row in micro] == [(s, m) for s in (0, 1) for m in (0, 1, 2)]
    for step in steps:
        mine = [row for row in micro if row["step"] == step["step"]]
        assert sum(row["loss_sum"] for row in mine) == step["loss_sum"]
        assert sum(row["loss_token_count"] for row in mine) == step["loss_token_count"]
        assert all(0 < row["gradient_norm"] < 5 * step["gradient_norm"] for row in mine)


def test_whole_run_with_accumulation_follows_the_run_without(corpus: Corpus) -> None:
    """Ten float64 steps end at the same losses."""
    config = dataclasses.replace(CONFIG, total_steps=10, warmup_steps=2, evaluation_interval=10)
    one, four = (train(dataclasses.replace(config, accumulation_count=n), corpus) for n in (1, 4))
    # Each step's gradient differs by TOLERANCE at most; Adam divides by sqrt(v), where a small v can amplify
    # the difference by the ratio of the largest to the smallest gradient element, taken as 1e5.
    for split, losses in one.items():
        assert four[split].loss_sum == pytest.approx(losses.loss_sum, rel=10 * TOLERANCE * 1e5)
