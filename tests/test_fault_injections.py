"""What each kind of fault does to the part of the loop that it replaces."""

import dataclasses
import math

import numpy as np
import pytest
from fault_runs import STEPS_PER_EPOCH, TINY, recorded, tiny_corpus, weights_of

from experiments.batches import EpochIterator, PackedBatch, PackedExamples
from experiments.corpus import END, PAD, Corpus
from experiments.faults import code_path_of
from experiments.faults.examples import padded, scrambled, with_leak, with_wrong_answers
from experiments.faults.masks import EVERYTHING, mask_with_later_keys, mask_with_next_key
from experiments.training import HEALTHY, TrainingState
from experiments.transformer import causal_mask


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return tiny_corpus()


@pytest.fixture(scope="module")
def batch(corpus: Corpus) -> PackedBatch:
    return PackedExamples(corpus.split("train")).batch([0, 7, 3, 20])


def test_wrong_masks_show_the_keys_that_they_say() -> None:
    """Up to two later keys, all of them, and the next one for every other query."""
    row, column = np.indices((5, 5))
    assert np.array_equal(mask_with_later_keys(2)(5), column <= row + 2)
    assert mask_with_later_keys(EVERYTHING)(5).all()
    opened = mask_with_next_key(2)(5) & ~causal_mask(5)
    assert np.argwhere(opened).tolist() == [[0, 1], [2, 3]]


def test_only_evaluation_tells_the_two_broken_masks_apart() -> None:
    """The variant in training evaluates with the causal mask."""
    shared = code_path_of("causal_mask_absent", "severe")
    training_only = code_path_of("causal_mask_absent_in_training", "severe")
    assert shared.training_mask(3).all() and shared.evaluation_mask(3).all()
    assert training_only.training_mask(3).all()
    assert training_only.evaluation_mask is HEALTHY.evaluation_mask


@pytest.mark.parametrize("most_per_example", [1, 1000])
def test_padding_follows_the_end_of_each_sequence_and_is_its_target(
    batch: PackedBatch, most_per_example: int
) -> None:
    """Sequence by sequence: real tokens as before, then end and padding as inputs, padding as targets."""
    result = padded(batch, most_per_example)
    added = np.minimum(batch.lengths.max() - batch.lengths, most_per_example)
    assert added.sum() > 0
    assert result.non_padding_token_count() == len(batch.targets) == len(result.targets) - added.sum()
    for row, count in enumerate(added.tolist()):
        old, new = (
            (b.tokens[b.rows == row].tolist(), b.targets[b.rows == row].tolist()) for b in (batch, result)
        )
        assert new == (old[0] + ([END] + [PAD] * count)[:count], old[1] + [PAD] * count)
        assert result.positions[result.rows == row].tolist() == list(range(result.lengths[row]))
    assert not result.is_answer[result.targets == PAD].any()


def test_scrambled_targets_are_the_inputs_that_follow(batch: PackedBatch) -> None:
    """A wrong token is wrong on both sides; share 1 replaces about all, share 0 none."""
    result = scrambled(batch, 1.0)
    follows = np.flatnonzero(batch.positions > 0)
    assert np.array_equal(result.tokens[follows], result.targets[follows - 1])
    assert np.mean(result.targets != batch.targets) > 0.5
    unchanged = scrambled(batch, 0.0)
    assert np.array_equal(unchanged.tokens, batch.tokens)
    assert np.array_equal(unchanged.targets, batch.targets)


def test_a_leak_copies_validation_sequences_into_train(corpus: Corpus) -> None:
    """Half of twelve examples, under ids of their own; validation keeps all of its examples."""
    leaky = with_leak(corpus, 0.5)
    sequences = {name: {e.tokens for e in leaky.split(name)} for name in ("train", "validation")}
    assert len(sequences["train"] & sequences["validation"]) == 6
    assert leaky.split("validation") == corpus.split("validation")
    assert len({e.example_id for e in leaky.examples}) == len(corpus.examples) + 6


def test_label_noise_gives_wrong_answers_to_right_prompts(corpus: Corpus) -> None:
    """A quarter of forty training examples; prompts, other splits and the longest sequence stay."""
    noisy = with_wrong_answers(corpus, 0.25)
    pairs = list(zip(corpus.examples, noisy.examples, strict=True))
    wrong = [(old, new) for old, new in pairs if old != new]
    assert len(wrong) == 10
    for old, new in wrong:
        assert (old.split, old.prompt) == ("train", new.prompt)
        assert old.answer != new.answer == new.labels["answer"]
        assert new.tokens != old.tokens
    assert noisy.context_length() == corpus.context_length()


@pytest.mark.parametrize("severity", ["mild", "medium", "severe"])
def test_unshuffled_data_has_one_order_in_all_epochs(corpus: Corpus, severity: str) -> None:
    """The order hash repeats; severe is the order of the table."""
    state = TrainingState(TINY, corpus)
    path = code_path_of("data_not_shuffled", severity)
    path.alter_state(state)
    draws = [state.data.draw(path.next_order) for _ in range(3 * STEPS_PER_EPOCH)]
    assert len({draw.order_hash for draw in draws}) == 1
    assert np.array_equal(state.data.order, np.arange(40)) == (severity == "severe")
    assert sorted(state.data.order) == list(range(40))


def test_the_healthy_order_is_the_iterators_own(corpus: Corpus) -> None:
    """The replaceable part draws what the iterator would draw by itself."""
    one, two = (EpochIterator(40, 10, np.random.SeedSequence(3)) for _ in range(2))
    for _ in range(9):
        assert np.array_equal(one.draw(HEALTHY.next_order).indices, two.draw().indices)


def test_gradients_that_are_not_zeroed_grow_alike(corpus: Corpus) -> None:
    """Without zeroing, norms pile up: the sum of twelve gradients is longer than any one of them."""
    kept = recorded(corpus, code_path_of("gradients_not_zeroed", "severe"))
    healthy = recorded(corpus)
    assert kept.steps[0]["gradient_norm"] == healthy.steps[0]["gradient_norm"]
    assert kept.steps[-1]["gradient_norm"] > 3 * healthy.steps[-1]["gradient_norm"]


@pytest.mark.parametrize(("severity", "count"), [("mild", "token"), ("medium", "example"), ("severe", "all")])
def test_the_objective_is_the_mean_times_what_was_not_divided_by(
    corpus: Corpus, severity: str, count: str
) -> None:
    """Loss sum and counts stay what they are."""
    for row in recorded(corpus, code_path_of("loss_summed_not_averaged", severity)).steps:
        tokens, examples = row["loss_token_count"], row["example_count"]
        factor = {"token": tokens / examples, "example": examples, "all": tokens}[count]
        # one product and one quotient more than the exact sum
        assert row["objective"] == pytest.approx(factor * row["loss_sum"] / tokens, rel=1e-13)


@pytest.mark.parametrize("count", [2, 4])
def test_micro_batches_in_full_are_as_many_times_their_mean(corpus: Corpus, count: int) -> None:
    """The objective is the sum of the micro-batches' losses, where their weighted mean was declared."""
    config = dataclasses.replace(TINY, accumulation_count=count)
    path = code_path_of("accumulation_not_normalised")
    row = recorded(corpus, path, config).steps[0]
    means = [part["loss_sum"] / part["loss_token_count"] for part in row["micro_batches"]]
    assert len(means) == count
    # float64 sums of the same float32 terms
    assert row["objective"] == pytest.approx(sum(means), rel=1e-13)


@pytest.mark.parametrize(("severity", "prefix"), [("mild", "blocks.0.mlp.up.weight"), ("severe", "")])
def test_frozen_weights_stay_where_they_began(corpus: Corpus, severity: str, prefix: str) -> None:
    """Exactly those of that name: one matrix, or all."""
    start = TrainingState(TINY, corpus).model.state()
    end = weights_of(recorded(corpus, code_path_of("frozen_layer", severity)))
    still = {name for name in start if np.array_equal(start[name], end[name])}
    assert still == {name for name in start if name.startswith(prefix)}


def test_a_detached_branch_gets_no_gradient(corpus: Corpus) -> None:
    """The first block's feed-forward weights and the norm before them; all others do."""
    recorder = recorded(corpus, code_path_of("detached_branch", "mild"))
    without = {name for name, weight in recorder.model.named_parameters() if weight.gradient is None}
    assert without == {
        name for name in recorder.model.state() if name.startswith(("blocks.0.mlp", "blocks.0.norm2"))
    }


@pytest.mark.parametrize(
    ("severity", "loss_is_finite", "gradient_is_finite"),
    [("mild", True, False), ("medium", False, False), ("severe", False, False)],
)
def test_a_poisoned_value_appears_where_it_is_put(
    corpus: Corpus, severity: str, loss_is_finite: bool, gradient_is_finite: bool
) -> None:
    """In the gradient alone at first, or in the activation or weight and so in the loss."""
    row = recorded(corpus, code_path_of("nonfinite_value", severity, 5)).steps[5]
    assert math.isfinite(row["loss_sum"]) == loss_is_finite
    assert math.isfinite(row["gradient_norm"]) == gradient_is_finite


def test_zero_matrices_stay_zero(corpus: Corpus) -> None:
    """With every matrix zero no gradient reaches any: the loss stays at ln V."""
    recorder = recorded(corpus, code_path_of("zero_initialisation", "severe"))
    assert all(not weight.any() for weight in weights_of(recorder).values() if weight.ndim == 2)
    uniform = math.log(len(corpus.vocabulary))
    # float32: the logarithm of V is rounded once
    assert [row["objective"] for row in recorder.steps] == pytest.approx([uniform] * 12, rel=2**-23)


def test_stale_weights_are_reported_by_their_own_hash(corpus: Corpus) -> None:
    """Every evaluation is of the first one's weights, while the live ones move on."""
    recorder = recorded(corpus, code_path_of("stale_evaluation_weights", "severe"))
    live = {row["step"]: row["live_hash"] for row in recorder.steps}
    assert {weights_hash for *_, weights_hash in recorder.evaluations} == {live[0]}
    assert live[3] != live[0]


def test_dropout_in_evaluation_shows_in_a_repeat(corpus: Corpus) -> None:
    """Two evaluations of the same weights differ; the training is untouched."""
    recorder, healthy = (recorded(corpus, p) for p in (code_path_of("evaluation_in_training_mode"), HEALTHY))
    for log, differs in ((recorder, True), (healthy, False)):
        first, second = (losses for step, split, losses, _ in log.evaluations if (step, split) == REPEATED)
        assert (first != second) == differs
    assert recorder.steps == healthy.steps


REPEATED = (0, "validation")


def test_warmup_and_schedule_faults_part_from_the_plan_and_a_high_rate_does_not(corpus: Corpus) -> None:
    """A high rate by plan is followed; a missing warmup and a constant rate are not the plan's."""
    plan = TINY.learning_rate_plan()
    for name, follows in (
        ("learning_rate_too_high", True),
        ("learning_rate_too_low", True),
        ("warmup_missing", False),
        ("schedule_not_followed", False),
    ):
        rows = recorded(corpus, code_path_of(name)).steps
        assert all(r["learning_rate"] == r["planned_learning_rate"] for r in rows) == follows, name
    high = recorded(corpus, code_path_of("learning_rate_too_high")).steps
    assert [row["learning_rate"] for row in high] == [50 * plan.learning_rate(step) for step in range(12)]
    missing = recorded(corpus, code_path_of("warmup_missing", "mild")).steps
    assert missing[0]["learning_rate"] == plan.peak


def test_decay_shrinks_matrices_and_leaves_vectors(corpus: Corpus) -> None:
    """Ten times faster than declared, on what is declared to decay."""
    state, other = (TrainingState(TINY, corpus) for _ in range(2))
    gradient = np.zeros_like(state.optimizer.weights)
    code_path_of("weight_decay_too_strong", "mild").update(state, gradient, 0.01, 1.0)
    ours, theirs, decayed = state.optimizer.weights, other.optimizer.weights, other.optimizer.decayed_count
    # 1 - 0.01 and the product with it are each rounded to float32: two halves of a unit in the last place
    assert ours[:decayed] == pytest.approx(0.99 * theirs[:decayed], rel=2**-23)
    assert np.array_equal(ours[decayed:], theirs[decayed:])
