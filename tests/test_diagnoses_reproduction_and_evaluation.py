"""Resumes, repeats and evaluations: proofs over hashes, each with what must not trigger it."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
from rule_run import RUN, changed, diagnosis, healthy, opened, outcome, resumed, segments_outcome
from synthetic import MANIFEST, Columns

from analyzer.diagnoses import Assessment, assess_runs

RESUMED_AT = 100


def resume(saved: dict[str, int] | None = None, **steps_columns: Any) -> list[dict[str, Any]]:
    """A run of two segments: the second begins at step 100 with the checkpoint's state, or other columns."""
    steps = dict(healthy()["steps"])
    first = {name: np.asarray(values)[:RESUMED_AT] for name, values in steps.items()}
    second = {name: np.asarray(values)[RESUMED_AT:] for name, values in steps.items()} | steps_columns
    return [
        {**healthy(), "steps": first, "events": []},
        {"steps": second, "events": [resumed(RESUMED_AT, **(saved or {}))]},
    ]


def first_row(column: str, value: Any) -> dict[str, Any]:
    """A column of the second segment with another value in its first row."""
    values = np.asarray(healthy()["steps"][column]).tolist()[RESUMED_AT:]
    return {column: [value, *values[1:]]}


RESUME_RULES = (
    "optimizer_state_lost",
    "random_state_lost_on_resume",
    "schedule_reset_on_resume",
    "data_replayed_on_resume",
)


@pytest.mark.parametrize("rule", RESUME_RULES)
def test_a_faithful_resume_is_clear(rule: str) -> None:
    """The first row is where the checkpoint was."""
    assert segments_outcome(rule, resume()).outcome == "clear"


@pytest.mark.parametrize(
    ("rule", "column"),
    [("optimizer_state_lost", "optimizer_hash"), ("random_state_lost_on_resume", "rng_hash")],
)
def test_a_lost_state_has_another_hash(rule: str, column: str) -> None:
    """Any other hash is proof, at the first row after the resume."""
    (finding,) = segments_outcome(rule, resume(**first_row(column, 1))).findings
    assert (finding.first_step, finding.last_step, finding.observed) == (RESUMED_AT, RESUMED_AT, 1.0)
    assert (
        "segment 1 begins at step 100 with hash 1, its checkpoint checkpoints/step-00000100" in finding.detail
    )


def test_hashes_above_the_largest_signed_integer_are_compared_whole() -> None:
    """64 bits without a sign: as decimal text they survive JSON, and differ in the last bit."""
    large = 2**64 - 1
    faithful = resume({"optimizer_hash": large}, **first_row("optimizer_hash", large))
    assert segments_outcome("optimizer_state_lost", faithful).outcome == "clear"
    lost = resume({"optimizer_hash": large}, **first_row("optimizer_hash", large - 1))
    assert segments_outcome("optimizer_state_lost", lost).outcome == "fired"


def test_a_checkpoint_without_a_hash_proves_nothing() -> None:
    """A payload of another loop may lack it."""
    segments = resume(**first_row("optimizer_hash", 1))
    event = dict(segments[1]["events"][0])
    payload = {k: v for k, v in json.loads(event["payload"]).items() if k != "optimizer_hash"}
    segments[1]["events"] = [event | {"payload": json.dumps(payload)}]
    assert segments_outcome("optimizer_state_lost", segments).outcome == "clear"


# The plan's peak is 3e-3, a millionth of it the threshold.
@pytest.mark.parametrize(("error", "expected"), [(3.1e-9, "fired"), (2.9e-9, "clear")])
def test_schedule_reset_on_resume(error: float, expected: str) -> None:
    """The first rate after the resume, of a run that kept to its plan until then."""
    planned = list(healthy()["steps"]["planned_learning_rate"])[RESUMED_AT]
    segments = resume(**first_row("learning_rate", planned + error))
    manifest = dataclasses.replace(MANIFEST, planned_schedule={"peak": 3e-3})
    assert segments_outcome("schedule_reset_on_resume", segments, manifest).outcome == expected


def test_a_schedule_that_counts_from_zero_again_is_told_as_one() -> None:
    """Its first rate is the plan's first."""
    rates = list(healthy()["steps"]["planned_learning_rate"])
    segments = resume(learning_rate=rates[:RESUMED_AT])
    (finding,) = segments_outcome("schedule_reset_on_resume", segments).findings
    assert finding.detail.endswith("the schedule counts from 0 again")


def test_a_run_that_never_kept_to_its_plan_was_not_reset() -> None:
    """The resume did not begin it."""
    segments = resume(learning_rate=[1e-5] * (len(healthy()["steps"]["step"]) - RESUMED_AT))
    early = dict(segments[0]["steps"])
    segments[0]["steps"] = early | {"learning_rate": [1e-5] * RESUMED_AT}
    assert segments_outcome("schedule_reset_on_resume", segments).outcome == "clear"


# Step 100 is at epoch 7, position 2 * 32 = 64.
PLACES = [
    (7, 64, "clear"),
    (7, 32, "fired"),
    (7, 0, "fired"),
    (0, 0, "fired"),
    (6, 64, "fired"),
    (8, 0, "clear"),  # the checkpoint's epoch had ended
]


@pytest.mark.parametrize(("epoch", "position", "expected"), PLACES)
def test_data_replayed_on_resume(epoch: int, position: int, expected: str) -> None:
    """Another place than the checkpoint's, unless it is the beginning of the next epoch."""
    segments = resume(**first_row("epoch", epoch), **first_row("data_position", position))
    assert segments_outcome("data_replayed_on_resume", segments).outcome == expected


def test_a_batch_that_comes_again_in_its_epoch_is_a_replay() -> None:
    """Even where the loop logs the position that it should have."""
    (finding,) = segments_outcome("data_replayed_on_resume", resume(**first_row("batch_hash", 1099))).findings
    assert finding.detail.endswith("its first batch is that of step 99 again")


def test_the_same_batch_in_an_earlier_epoch_is_no_replay() -> None:
    """A fixed order repeats its batches every epoch."""
    segments = resume(**first_row("batch_hash", 1002))
    assert segments_outcome("data_replayed_on_resume", segments).outcome == "clear"


def second_run(tables: dict[str, Any], **declaration: Any) -> Assessment:
    """What nondeterminism comes to on the healthy run beside another one of the same seed."""
    manifests = {RUN: MANIFEST, "twin": dataclasses.replace(MANIFEST, **declaration)}
    run_log = opened({RUN: [healthy()], "twin": [{**healthy(), **tables}]}, manifests)
    return assess_runs(run_log, [diagnosis("nondeterminism")])[RUN][0]


def other_weight(step: int, tensor_id: int) -> dict[str, Columns]:
    """One weight has another hash at one step."""
    tensors = healthy()["tensors"]
    keys = zip(tensors["step"], tensors["tensor_id"], tensors["kind"], strict=True)
    row = next(i for i, key in enumerate(keys) if key == (step, tensor_id, "weight"))
    return {"tensors": changed("tensors", "content_hash", {row: 1})}


def test_nondeterminism_names_step_and_tensor() -> None:
    """The first hash that differs, in the order of a step."""
    (finding,) = second_run(other_weight(50, 4)).findings
    assert (finding.first_step, finding.subject) == (50, "blocks.1.mlp.up.weight")
    assert (
        "in twin, a run of the same seed and configuration; 1 quantities differ at step 50" in finding.detail
    )


def test_another_batch_comes_before_the_weights() -> None:
    """The data are read before the weights move."""
    changes = other_weight(50, 4) | {"steps": changed("steps", "batch_hash", {50: 1})}
    (finding,) = second_run(changes).findings
    assert (finding.first_step, finding.subject) == (50, "batch")


def test_equal_runs_are_deterministic() -> None:
    """Not one hash differs."""
    assert second_run({}).outcome == "clear"


def test_another_seed_or_configuration_is_no_second_run() -> None:
    """They may differ, so there is nothing to compare."""
    for declaration in ({"seed": 1}, {"config": {"width": 8}}):
        assert second_run(other_weight(50, 4), **declaration).outcome == "not_evaluated"


def test_other_thread_counts_may_sum_in_another_order() -> None:
    """Runs of unlike environments are not compared."""
    start = {
        "kind": "segment_started",
        "message": "",
        "payload": '{"environment": {"threads": {"OMP": "4"}}}',
    }
    assert second_run(other_weight(50, 4) | {"events": [start]}).outcome == "clear"


def repeated(difference: float, tokens: int = 0) -> dict[str, Columns]:
    """The repeat of the last evaluation has another loss, relatively, and so many more tokens."""
    evaluations = {name: list(values) for name, values in healthy()["evaluations"].items()}
    evaluations["loss_sum"][-1] *= 1 + difference
    evaluations["token_count"][-1] += tokens
    return {"evaluations": evaluations}


# Sums of float32 in another order differ by up to 6e-6; dropout moves the loss by a hundredth.
@pytest.mark.parametrize(("difference", "expected"), [(1.1e-5, "fired"), (0.9e-5, "clear"), (0.0, "clear")])
def test_evaluation_in_training_mode(difference: float, expected: str) -> None:
    """The same weights and examples give the same loss."""
    assert outcome("evaluation_in_training_mode", repeated(difference)).outcome == expected


@pytest.mark.parametrize(
    ("difference", "expected"), [(1.1e-5, "fired"), (0.9e-5, "clear"), (float("nan"), "clear")]
)
def test_a_draw_that_comes_out_the_same_shows_in_the_answers(difference: float, expected: str) -> None:
    """Two sums of one draw seldom agree both."""
    changes = repeated(0.0)
    answers = list(changes["evaluations"]["answer_loss_sum"])
    answers[-1] *= 1 + difference  # of the repeat
    evaluations = dict(changes["evaluations"]) | {"answer_loss_sum": answers}
    assert outcome("evaluation_in_training_mode", {"evaluations": evaluations}).outcome == expected


def test_another_set_of_examples_may_have_another_loss() -> None:
    """A resampled evaluation set has another number of tokens."""
    assert outcome("evaluation_in_training_mode", repeated(0.1, tokens=1)).outcome == "clear"


def stale(*behind: int) -> dict[str, Columns]:
    """The evaluations at 0, 50, 100, ... are of weights so many steps back; 1 is a hash of its own."""
    evaluations = {name: list(values) for name, values in healthy()["evaluations"].items()}
    lag = dict(zip(range(0, 50 * len(behind), 50), behind, strict=True))
    evaluations["weights_hash"] = [
        step if lag.get(step) == 1 else 100_000 + step - lag.get(step, 0) for step in evaluations["step"]
    ]
    return {"evaluations": evaluations}


@pytest.mark.parametrize(
    ("behind", "expected"),
    [((0, 0, 50), "fired"), ((0, 0, 10), "fired"), ((0, 0, 0), "clear"), ((1, 1, 1), "clear")],
)
def test_stale_evaluation_weights(behind: tuple[int, ...], expected: str) -> None:
    """A hash of an earlier step is proof; one of its own may be an average of weights."""
    assert outcome("stale_evaluation_weights", stale(*behind)).outcome == expected


def test_a_copy_that_never_changes_is_stale() -> None:
    """Unknown weights that stay while the live ones move."""
    evaluations = dict(healthy()["evaluations"]) | {
        "weights_hash": np.full(len(healthy()["evaluations"]["step"]), 7)
    }
    (finding,) = outcome("stale_evaluation_weights", {"evaluations": evaluations}).findings
    assert (finding.first_step, finding.observed) == (50, 50.0)
