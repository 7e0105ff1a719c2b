"""The loop: reproducibility, what is logged, evaluation, and that recording changes nothing."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.batches import EpochIterator, PackedExamples
from experiments.corpus import SPLITS, Corpus, load_corpus
from experiments.evaluation import EvaluationSplit, evaluate, mean_loss
from experiments.progress import ProgressBar
from experiments.reference_losses import reference_losses
from experiments.training import (
    HEALTHY,
    TrainingConfig,
    TrainingState,
    train,
    training_step,
)
from experiments.training_step import StepResult
from experiments.transformer import Dropout, causal_mask
from recorder import Manifest, Recorder

SMALL = TrainingConfig(total_steps=6, warmup_steps=2, evaluation_interval=3, batch_size=8, width=16)


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return load_corpus()


def run_steps(state: TrainingState, corpus: Corpus, count: int) -> list[StepResult]:
    """Results of ``count`` healthy steps."""
    examples = PackedExamples(corpus.split("train"))
    return [training_step(state, examples, SMALL.clip_norm, HEALTHY) for _ in range(count)]


def test_two_runs_of_one_seed_are_bitwise_equal(corpus: Corpus) -> None:
    """Weights, losses and hashes; another seed gives others."""
    states = [TrainingState(dataclasses.replace(SMALL, seed=seed), corpus) for seed in (1, 1, 2)]
    results = [run_steps(state, corpus, 5) for state in states]
    columns = [[step.columns(0.0) for step in steps] for steps in results]
    assert columns[0] == columns[1] != columns[2]
    first, second, other = (state.optimizer.weights for state in states)
    assert np.array_equal(first, second)
    assert not np.array_equal(first, other)


def test_saved_state_resumes_bit_for_bit(corpus: Corpus) -> None:
    """60 steps in a row equal 30, a copy of all state into a new run, and 30 more, across an epoch's end."""
    straight = TrainingState(SMALL, corpus)
    run_steps(straight, corpus, 60)
    first = TrainingState(SMALL, corpus)
    run_steps(first, corpus, 30)
    resumed = TrainingState(dataclasses.replace(SMALL, seed=9), corpus)
    resumed.load_state(first.state())
    last = run_steps(resumed, corpus, 30)[-1]
    assert last.draw.epoch == 1
    assert np.array_equal(straight.optimizer.weights, resumed.optimizer.weights)
    assert (
        straight.dropout.state()["state"]["state"].tolist()
        == resumed.dropout.state()["state"]["state"].tolist()
    )


def test_recording_does_not_change_training(corpus: Corpus, tmp_path: Path) -> None:
    """The last losses are the same bytes with and without a recorder, and no hook is left."""
    plain = train(SMALL, corpus)
    with Recorder(tmp_path, Manifest("r")) as recorder:
        recorded = train(SMALL, corpus, recorder)
    for split in SPLITS:
        assert np.array_equal(plain[split].loss_sum, recorded[split].loss_sum)


class FakeRecorder:
    """Remembers what a loop logs."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []
        self.evaluations: list[tuple[int, str]] = []
        self.examples: dict[str, list[Any]] = {}

    def attach(self, model: object) -> None:
        self.model = model

    def log_examples(self, columns: dict[str, list[Any]]) -> None:
        self.examples = columns

    def log_evaluation(self, step: int, split: str, losses: object, *, weights_hash: int | None) -> None:
        assert weights_hash is None
        self.evaluations.append((step, split))

    def step(self, step: int) -> "FakeRecorder":
        self.steps.append({"step": step})
        return self

    def log(self, **columns: Any) -> None:
        self.steps[-1] |= columns

    def __enter__(self) -> "FakeRecorder":
        return self

    def __exit__(self, *_: object) -> None:
        return


def test_every_split_is_evaluated_at_start_at_each_interval_and_at_the_end(corpus: Corpus) -> None:
    """The last evaluation describes the weights after the last update."""
    fake = FakeRecorder()
    train(dataclasses.replace(SMALL, total_steps=5), corpus, fake)
    expected = [(step, split) for step in (0, 3, 5) for split in SPLITS]
    assert [e for i, e in enumerate(fake.evaluations) if i != len(SPLITS)] == expected


def test_the_primary_split_is_evaluated_twice_at_every_tenth_evaluation(corpus: Corpus) -> None:
    """The second evaluation of the same weights proves that evaluation is in evaluation mode."""
    fake = FakeRecorder()
    train(dataclasses.replace(SMALL, total_steps=11, evaluation_interval=1), corpus, fake)
    counts = {step: fake.evaluations.count((step, "validation")) for step in range(12)}
    assert counts == dict.fromkeys(range(12), 1) | {0: 2, 10: 2}


def test_logged_loss_is_the_token_mean(corpus: Corpus) -> None:
    """objective = loss_sum / loss_token_count, over all tokens of the batch, prompts included."""
    fake = FakeRecorder()
    train(SMALL, corpus, fake)
    assert len(fake.steps) == SMALL.total_steps
    for row in fake.steps:
        # both sum the same float32 terms in float64
        assert row["objective"] == pytest.approx(row["loss_sum"] / row["loss_token_count"], rel=1e-13)
        assert row["loss_token_count"] == row["non_padding_token_count"]
        assert row["example_count"] == 8


def test_logged_learning_rate_follows_the_plan(corpus: Corpus) -> None:
    """In a healthy run applied and planned rates are the same numbers."""
    fake = FakeRecorder()
    train(SMALL, corpus, fake)
    plan = SMALL.learning_rate_plan()
    expected = [plan.learning_rate(step) for step in range(6)]
    assert [row["learning_rate"] for row in fake.steps] == expected
    assert [row["planned_learning_rate"] for row in fake.steps] == expected


def test_clipped_gradient_norm_is_at_most_the_limit(corpus: Corpus) -> None:
    """The smaller of the norm and the limit."""
    state = TrainingState(dataclasses.replace(SMALL, clip_norm=0.5), corpus)
    examples = PackedExamples(corpus.split("train"))
    result = training_step(state, examples, 0.5, HEALTHY)
    assert result.gradient_norm > 0.5
    assert result.clipped_gradient_norm == pytest.approx(0.5, rel=1e-15)


@pytest.mark.parametrize("prefixes", ["blocks.0", "embedding, blocks.1.mlp"])
def test_frozen_weights_stay_bit_for_bit_and_all_others_move(corpus: Corpus, prefixes: str) -> None:
    """Neither gradient nor decay reaches them; they are no part of the gradient norm."""
    state = TrainingState(dataclasses.replace(SMALL, frozen_modules=prefixes), corpus)
    before = state.model.state()
    result = run_steps(state, corpus, 3)[-1]
    after = state.model.state()
    starts = tuple(f"{prefix.strip()}." for prefix in prefixes.split(","))
    assert {name for name in before if np.array_equal(before[name], after[name])} == {
        name for name in before if name.startswith(starts)
    }
    gradients = [w.gradient.ravel() for _, w in state.model.named_parameters() if w.gradient is not None]
    # float64 sums of squares of some 10^4 float32 values in another order: 10^4 * 2^-53 relative at most
    assert result.gradient_norm == pytest.approx(
        float(np.linalg.norm(np.concatenate(gradients).astype(np.float64))), rel=1e-11
    )


def test_constant_schedule_applies_and_logs_the_peak_after_warmup(corpus: Corpus) -> None:
    """Plan and rate are the same numbers: a declared constant rate is followed."""
    fake = FakeRecorder()
    train(dataclasses.replace(SMALL, schedule="constant"), corpus, fake)
    assert [row["learning_rate"] for row in fake.steps] == [1.5e-3, *[3e-3] * 5]
    assert [row["planned_learning_rate"] for row in fake.steps] == [1.5e-3, *[3e-3] * 5]


def test_infinite_clip_norm_never_clips(corpus: Corpus) -> None:
    """The norm that is logged after clipping is the one before."""
    fake = FakeRecorder()
    train(dataclasses.replace(SMALL, clip_norm=math.inf), corpus, fake)
    assert all(row["clipped_gradient_norm"] == row["gradient_norm"] for row in fake.steps)


@pytest.mark.parametrize("setting", [{"norm_placement": "post"}, {"activation": "gelu"}])
def test_other_blocks_learn_too(corpus: Corpus, setting: dict[str, str]) -> None:
    """150 small steps go below the unigram entropy on validation."""
    config = dataclasses.replace(
        SMALL, total_steps=150, warmup_steps=10, evaluation_interval=150, batch_size=32, **setting
    )
    assert mean_loss(train(config, corpus)["validation"]) < reference_losses(corpus).unigram


def test_each_epoch_is_a_fresh_shuffle_without_its_partial_batch() -> None:
    """10 examples in batches of 4: two batches an epoch, no example twice, another order each time."""
    iterator = EpochIterator(10, 4, np.random.SeedSequence(0))
    draws = [iterator.draw() for _ in range(6)]
    assert [(d.epoch, d.data_position) for d in draws] == [(e, p) for e in range(3) for p in (0, 4)]
    for one, two in zip(draws[::2], draws[1::2], strict=True):
        assert len(set(one.indices) | set(two.indices)) == 8
        assert one.order_hash == two.order_hash
    assert len({d.order_hash for d in draws}) == 3


def test_data_order_does_not_depend_on_dropout(corpus: Corpus) -> None:
    """Shuffling and dropout draw from generators of their own."""
    with_dropout, without = (TrainingState(dataclasses.replace(SMALL, dropout=p), corpus) for p in (0.2, 0.0))
    hashes = [[r.batch.content_hash() for r in run_steps(s, corpus, 3)] for s in (with_dropout, without)]
    assert hashes[0] == hashes[1]


def test_evaluation_reports_each_example_in_the_order_of_the_split(corpus: Corpus) -> None:
    """Counts are those of the tokens; sums agree with scoring one example alone."""
    state = TrainingState(dataclasses.replace(SMALL, dtype="float64"), corpus)
    split = EvaluationSplit("validation", PackedExamples(corpus.split("validation")))
    losses = evaluate(state.model, split, causal_mask)
    examples = corpus.split("validation")
    assert losses.example_id.tolist() == [e.example_id for e in examples]
    assert losses.token_count.tolist() == [len(e.tokens) - 1 for e in examples]
    assert losses.answer_token_count.tolist() == [len(e.answer) + 1 for e in examples]
    alone = EvaluationSplit("one", PackedExamples((examples[5],)))
    # float64, 40 terms of order 4, other batch shapes: 40 * 4 * 40 * 2^-53 = 7e-13
    expected = evaluate(state.model, alone, causal_mask).loss_sum[0]
    assert losses.loss_sum[5] == pytest.approx(expected, abs=1e-11)


def test_correct_means_that_every_answer_token_ranks_first(corpus: Corpus) -> None:
    """A head whose logits spell the targets is right everywhere; spoiling one answer token makes it wrong."""
    examples = PackedExamples(corpus.split("validation"))

    def spelling_model(spoiled_row: int | None) -> Any:
        def model(batch: Any, mask: object, dropout: object, join: object) -> Any:
            logits = np.eye(len(corpus.vocabulary))[batch.targets]
            if spoiled_row is not None:
                last = np.flatnonzero(batch.examples[batch.rows] == spoiled_row)[-1]
                logits[last] = 0.0
                logits[last, 0] = 1.0
            return dataclasses.make_dataclass("Logits", ["data"])(logits)

        return model

    split = EvaluationSplit("validation", examples)
    assert evaluate(spelling_model(None), split, causal_mask).correct.all()
    assert np.flatnonzero(~evaluate(spelling_model(7), split, causal_mask).correct).tolist() == [7]


def test_evaluation_leaves_the_training_generators_alone(corpus: Corpus) -> None:
    """Evaluating more often gives the same weights."""
    often = train(dataclasses.replace(SMALL, evaluation_interval=1), corpus)
    rarely = train(dataclasses.replace(SMALL, evaluation_interval=6), corpus)
    assert np.array_equal(often["validation"].loss_sum, rarely["validation"].loss_sum)


def test_training_learns_and_stays_above_the_floor(corpus: Corpus) -> None:
    """150 small steps go below the unigram entropy on validation, and below no floor."""
    config = dataclasses.replace(
        SMALL, total_steps=150, warmup_steps=10, evaluation_interval=150, batch_size=32
    )
    losses = train(config, corpus)
    references = reference_losses(corpus)
    assert mean_loss(losses["validation"]) < references.unigram
    assert all(mean_loss(losses[split]) > references.entropy_floor[split] for split in SPLITS)


def test_diverging_run_is_recorded_to_its_end(corpus: Corpus) -> None:
    """Non-finite losses are data: no warning, no exception."""
    fake = FakeRecorder()
    config = dataclasses.replace(SMALL, peak_learning_rate=1e30, warmup_steps=0, total_steps=4)
    train(config, corpus, fake)
    assert len(fake.steps) == 4
    assert not np.isfinite(fake.steps[-1]["loss_sum"])


def test_dropout_state_continues_the_draws() -> None:
    """The same mask follows a saved state."""
    dropout = Dropout(0.5, np.random.SeedSequence(4))
    state = dropout.state()
    first = dropout.bits.random_raw(3).tolist()
    dropout.load_state(state)
    assert dropout.bits.random_raw(3).tolist() == first


class Terminal:
    """A text stream that says whether it is a terminal."""

    def __init__(self, is_terminal: bool) -> None:
        self.is_terminal = is_terminal
        self.text = ""

    def isatty(self) -> bool:
        return self.is_terminal

    def write(self, text: str) -> None:
        self.text += text

    def flush(self) -> None:
        return


def test_progress_bar_shows_loss_and_learning_rate_on_a_terminal_only() -> None:
    """Quiet when its output is no terminal."""
    terminal, file = Terminal(True), Terminal(False)
    for stream in (terminal, file):
        bar = ProgressBar(10, stream)
        bar.show(10, 1.25, 3e-3)
        bar.close()
    assert "10/10  loss 1.250  lr 3.00e-03" in terminal.text
    assert file.text == ""
