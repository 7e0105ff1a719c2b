"""Order, leaks, bad batches, noise, fit and floors: what fires, and what is just below the threshold."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from rule_run import changed, example_losses, healthy, outcome
from synthetic import Columns

EPOCH_STEPS = 14


def with_orders(*hashes: int) -> dict[str, Columns]:
    """The order hash of each epoch of the healthy run, the last one for all that follow."""
    epochs = np.asarray(healthy()["steps"]["epoch"])
    return {"steps": changed("steps", "order_hash", [hashes[min(e, len(hashes) - 1)] for e in epochs])}


@pytest.mark.parametrize(
    ("hashes", "expected"), [((1, 2, 2, *range(3, 30)), "fired"), ((1, 2, 1, *range(3, 30)), "clear")]
)
def test_data_not_shuffled(hashes: tuple[int, ...], expected: str) -> None:
    """Two epochs in a row in one order; an order that comes back later is chance."""
    assessment = outcome("data_not_shuffled", with_orders(*hashes))
    assert assessment.outcome == expected
    assert [f.first_step for f in assessment.findings] == [2 * EPOCH_STEPS] * (expected == "fired")


def test_one_batch_an_epoch_has_no_order() -> None:
    """There is nothing to shuffle."""
    steps = dict(with_orders(1)["steps"])
    steps["epoch"] = steps["step"]
    assert outcome("data_not_shuffled", {"steps": steps}).outcome == "clear"


def shared_hashes(count: int) -> dict[str, Columns]:
    """So many validation examples have the hash of a training example."""
    examples = healthy()["examples"]
    splits = list(examples["split"])
    held_out = [i for i, split in enumerate(splits) if split == "validation"][:count]
    twin = examples["content_hash"][splits.index("train")]
    return {"examples": changed("examples", "content_hash", dict.fromkeys(held_out, twin))}


@pytest.mark.parametrize(("count", "expected"), [(1, "fired"), (0, "clear")])
def test_train_validation_leak(count: int, expected: str) -> None:
    """One full sequence in both splits is proof."""
    assert outcome("train_validation_leak", shared_hashes(count)).outcome == expected


def test_the_leak_finding_counts_and_names_examples() -> None:
    """By split, with the ids on both sides."""
    (finding,) = outcome("train_validation_leak", shared_hashes(2)).findings
    assert (finding.first_step, finding.subject, finding.observed) == (0, "validation", 2.0)
    assert finding.detail.startswith("2 of 60 examples are in train too: ")


def test_duplicates_within_training_are_no_leak() -> None:
    """Only two splits can leak."""
    examples = healthy()["examples"]
    train = [i for i, split in enumerate(examples["split"]) if split == "train"][:2]
    changes = {"examples": changed("examples", "content_hash", dict.fromkeys(train, 99))}
    assert outcome("train_validation_leak", changes).outcome == "clear"


@pytest.mark.parametrize(("length", "expected"), [(3, "fired"), (4, "clear")])
def test_bad_batch_is_over_within_three_steps(length: int, expected: str) -> None:
    """A spike that stays longer has harmed the model."""
    steps = changed("steps", "train_loss", dict.fromkeys(range(120, 120 + length), 4.0))
    assert outcome("bad_batch", {"steps": steps}).outcome == expected


def test_the_bad_batch_finding_names_the_batch() -> None:
    """By its hash, with its place in the epoch."""
    (finding,) = outcome("bad_batch", {"steps": changed("steps", "train_loss", {120: 4.0})}).findings
    assert (finding.first_step, finding.subject) == (120, f"batch {1120:x}")
    assert finding.detail.endswith("back at step 121; epoch 8 from position 256")


def evaluated(loss: float, step: int = 200, **columns: Any) -> list[dict[str, Any]]:
    """One evaluation of the primary split."""
    row = {"step": step, "split": "validation", "repeat": 0, "loss_sum": 1000 * loss, "token_count": 1000}
    return [row | columns]


# The floor of the primary split is 0.2; tolerance 0.001 + 0.2 * 1e-5 = 0.001002.
@pytest.mark.parametrize(("loss", "expected"), [(0.19899, "fired"), (0.19901, "clear"), (math.nan, "clear")])
def test_loss_below_the_entropy_floor(loss: float, expected: str) -> None:
    """Just beyond the tolerance is proof, just within it is rounding; NaN is another rule's."""
    assert outcome("loss_below_entropy_floor", {"evaluations": evaluated(loss)}).outcome == expected


def test_the_entropy_floor_finding() -> None:
    """One finding per split, from the first to the last evaluation below the floor."""
    rows = evaluated(0.15, 50) + evaluated(0.1, 100) + evaluated(0.3, 150)
    (finding,) = outcome("loss_below_entropy_floor", {"evaluations": rows}).findings
    assert (finding.first_step, finding.last_step, finding.subject) == (50, 100, "validation")
    assert (finding.observed, finding.threshold) == (0.1, pytest.approx(0.198998, abs=1e-12))


def test_an_evaluation_with_dropout_is_not_held_to_the_floor() -> None:
    """The floor holds for a function of the prefix, which dropout is not."""
    rows = evaluated(0.1, evaluation_mode=False)
    assert outcome("loss_below_entropy_floor", {"evaluations": rows}).outcome == "clear"


@pytest.mark.parametrize(("rise", "expected"), [(0.0201, "fired"), (0.0199, "clear")])
def test_overfitting_fires_above_its_least_rise(rise: float, expected: str) -> None:
    """Training falls, validation is certainly above its minimum: by more than 0.02 nats/token, or by less."""
    rows = example_losses("validation", {s: 1.0 + rise * (s > 0) for s in range(0, 250, 50)})
    assert outcome("overfitting", {"example_losses": rows}).outcome == expected


def test_the_overfitting_finding() -> None:
    """Since the minimum, confirmed at the third evaluation above it, and called provisional."""
    rows = example_losses("validation", {s: 1.0 + 0.5 * (s > 0) for s in range(0, 250, 50)})
    (finding,) = outcome("overfitting", {"example_losses": rows}).findings
    assert (finding.first_step, finding.last_step, finding.subject) == (0, 150, "validation")
    assert finding.observed == pytest.approx(0.5, abs=1e-12)
    assert "provisional" in finding.detail


def training_split(excess: dict[int, float]) -> dict[str, Any]:
    """Evaluations of the training split, whose floor is 0.25, at a constant learning rate."""
    rows = [
        {"step": step, "split": "train", "repeat": 0, "loss_sum": 100 * (0.25 + e), "token_count": 100}
        for step, e in excess.items()
    ]
    rates = changed("steps", "learning_rate", np.full(600, 1e-3), steps=600)
    return {"evaluations": rows, "steps": rates}


# Between step 200 and step 300, the last third of the run, a tenth of the excess must go.
@pytest.mark.parametrize(
    ("earlier", "later", "expected"),
    [(1.0, 0.91, "fired"), (1.0, 0.89, "clear"), (0.202, 0.201, "fired"), (0.2, 0.199, "clear")],
)
def test_underfitting(earlier: float, later: float, expected: str) -> None:
    """Flat, and more than 0.2 nats/token above what can be reached."""
    changes = training_split({200: earlier, 300: later})
    assert outcome("underfitting", changes).outcome == expected


def test_a_cosine_tail_is_flat_without_underfitting() -> None:
    """At less than three tenths of the largest rate nothing is said."""
    changes = training_split({200: 1.0, 300: 0.99})
    rate = np.where(np.arange(600) < 250, 1e-3, 2.9e-4)
    changes["steps"] = dict(changes["steps"]) | {"learning_rate": rate}
    assert outcome("underfitting", changes).outcome == "clear"


def noisy_split(tail_fall: float, median_fall: float = 0.5) -> dict[str, Any]:
    """Training losses of evaluations 100 steps apart; a tenth of the examples is hard.

    From a step to one half as large again the hard ones fall by ``tail_fall``, the others by ``median_fall``:
    like powers of the step, so that every evaluation shows the same fall.
    """
    count = healthy()["examples"]["split"].count("train")
    is_hard = np.arange(count) % 10 == 0
    octaves = {step: math.log(step / 300) / math.log(1.5) for step in range(300, 1700, 100)}
    losses = {s: np.where(is_hard, 3.0 * tail_fall**o, median_fall**o) for s, o in octaves.items()}
    return {"example_losses": example_losses("train", losses)}


# The evaluation at or before two thirds of 700 is 400: a fall over ln(7 / 4) / ln(1.5) = 1.4 powers of 1.5.
# The pace of the tail is ln(tail_fall) / ln(0.5) at each of them: 0.29 and 0.38. The median is below 0.15
# from step 900 on.
@pytest.mark.parametrize(("tail_fall", "expected"), [(0.82, "fired"), (0.77, "clear")])
def test_label_noise(tail_fall: float, expected: str) -> None:
    """The hardest twentieth falls at less than a third of the median's pace."""
    assert outcome("label_noise", noisy_split(tail_fall)).outcome == expected


def test_a_model_that_learns_nothing_shows_no_label_noise() -> None:
    """Slow for all examples is slow, not noise."""
    assert outcome("label_noise", noisy_split(0.99, median_fall=0.9)).outcome == "clear"


def test_the_label_noise_finding_names_the_hardest_examples() -> None:
    """Ids with their losses, so that somebody can read them."""
    (finding,) = outcome("label_noise", noisy_split(0.9)).findings
    assert finding.subject == "train"
    assert finding.observed == pytest.approx(math.log(0.9) / math.log(0.5), rel=1e-6)
    assert "hardest of 540 examples: " in finding.detail
