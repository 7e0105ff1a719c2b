"""The events: input rows, call, output rows."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from query_call import answer
from synthetic import MANIFEST, healthy_run, write_run

from analyzer.run_log import open_runs

NAN, INF = math.nan, math.inf


def flat_curve(column: str, changes: dict[int, float], length: int = 80) -> list[dict[str, Any]]:
    """Rows of `steps`: the column is 1 except at the given steps; without noise the scale is 0.02."""
    return [{"step": step, column: changes.get(step, 1.0)} for step in range(length)]


def test_a_loss_spike_with_its_recovery(tmp_path: Path) -> None:
    """Steps 40 and 41 stand out; z of the higher one is ln 3 / 0.02; step 42 is back at the baseline."""
    tables = {"steps": flat_curve("train_loss", {40: 2.0, 41: 3.0})}
    sql = "SELECT step, last_step, loss, baseline, z, recovered_step FROM loss_spikes()"
    ((step, last_step, loss, baseline, z, recovered),) = answer(tmp_path, tables, sql)
    assert (step, last_step, loss, baseline, recovered) == (40, 41, 3.0, 1.0, 42)
    assert z == pytest.approx(math.log(3) / 0.02, rel=1e-9)


def test_a_spike_that_never_comes_back(tmp_path: Path) -> None:
    """A lasting rise ends as an event when the median has caught up, and has no recovery."""
    tables = {"steps": flat_curve("train_loss", dict.fromkeys(range(40, 80), 3.0))}
    rows = answer(tmp_path, tables, "SELECT step, last_step, recovered_step FROM loss_spikes()")
    # The median of 16 rows is 1 until eight of them are 3, then 2 at exactly eight: steps 40-48 are above it.
    assert rows == [(40, 48, None)]


@pytest.mark.parametrize(("second", "expected"), [(50, [(40, 50)]), (51, [(40, 40), (51, 51)])])
def test_spikes_within_ten_steps_are_one_event(
    tmp_path: Path, second: int, expected: list[tuple[int, int]]
) -> None:
    """Ten steps apart is one event, eleven are two."""
    tables = {"steps": flat_curve("train_loss", {40: 2.0, second: 2.0})}
    assert answer(tmp_path, tables, "SELECT step, last_step FROM loss_spikes()") == expected


@pytest.mark.parametrize(
    ("loss", "count"),
    [
        (math.exp(0.1201), 1),  # z = 6.005
        (math.exp(0.1199), 0),  # z = 5.995
    ],
)
def test_a_spike_must_pass_six_sigma(tmp_path: Path, loss: float, count: int) -> None:
    """The scale's floor of 0.02 makes 0.12 the least prominence of a spike on a smooth curve."""
    tables = {"steps": flat_curve("train_loss", {40: loss})}
    assert answer(tmp_path, tables, "SELECT count(*) FROM loss_spikes()") == [(count,)]


def test_a_small_rise_of_a_small_loss_is_no_spike(tmp_path: Path) -> None:
    """From 0.01 to 0.029 is three times as much, and 0.019 nats: nothing."""
    for name, peak, count in (("below", 0.0299, 0), ("above", 0.0301, 1)):
        steps = [{"step": step, "train_loss": peak if step == 40 else 0.01} for step in range(60)]
        assert answer(tmp_path / name, {"steps": steps}, "SELECT count(*) FROM loss_spikes()") == [(count,)]


@pytest.mark.parametrize(("at", "count"), [(19, 0), (20, 1)])
def test_a_spike_needs_twenty_past_points(tmp_path: Path, at: int, count: int) -> None:
    """The first steps of a run have no baseline to stand out from."""
    tables = {"steps": flat_curve("train_loss", {at: 2.0})}
    assert answer(tmp_path, tables, "SELECT count(*) FROM loss_spikes()") == [(count,)]


def test_a_non_finite_loss_is_no_spike(tmp_path: Path) -> None:
    """NaN and infinity are first_nonfinite's, and do not disturb the windows of later points."""
    changes = {40: NAN, 41: INF, 42: 2.0}
    rows = answer(tmp_path, {"steps": flat_curve("train_loss", changes)}, "SELECT step FROM loss_spikes()")
    assert rows == [(42,)]


def test_a_healthy_run_has_no_spike(tmp_path: Path) -> None:
    """Two thousand steps with 1% noise on the loss and 5% on the gradient norm."""
    with open_runs([healthy_run(tmp_path / "a", steps=2000)]) as run_log:
        sql = "SELECT (SELECT count(*) FROM loss_spikes()), (SELECT count(*) FROM gradient_norm_spikes())"
        assert run_log.connection.execute(sql).fetchall() == [(0, 0)]


def test_a_spike_at_the_first_row_of_a_resume_is_seen(tmp_path: Path) -> None:
    """The window runs across the segments: a resume that lost its state shows."""
    write_run(tmp_path / "a", {"steps": flat_curve("train_loss", {}, 60)})
    resumed = [{"step": step, "train_loss": 2.0 if step == 50 else 1.0} for step in range(50, 60)]
    write_run(tmp_path / "a", {"steps": resumed}, segment=1)
    with open_runs([tmp_path / "a"]) as run_log:
        assert run_log.connection.execute("SELECT step FROM loss_spikes()").fetchall() == [(50,)]


@pytest.mark.parametrize(("norm", "count"), [(2.01, 1), (1.99, 0)])
def test_a_gradient_norm_spike_doubles(tmp_path: Path, norm: float, count: int) -> None:
    """Prominence ln 2: a norm that does not double is no event."""
    tables = {"steps": flat_curve("gradient_norm", {40: norm})}
    assert answer(tmp_path, tables, "SELECT count(*) FROM gradient_norm_spikes()") == [(count,)]


def test_a_gradient_norm_spike_row(tmp_path: Path) -> None:
    """Step, last step, highest norm, and the level before."""
    tables = {"steps": flat_curve("gradient_norm", {40: 5.0, 41: 4.0, 60: INF})}
    sql = "SELECT step, last_step, gradient_norm, baseline FROM gradient_norm_spikes()"
    assert answer(tmp_path, tables, sql) == [(40, 41, 5.0, 1.0)]


def updates(ratio: Mapping[int, float], weight_norm: float = 4.0) -> dict[str, Any]:
    """A 16 x 16 matrix, of gain 1 at norm 4, and the size of its updates against it at each step."""
    names = [{"tensor_id": 0, "name": "up.weight", "shape": "[16, 16]", "role": "mlp"}]
    rows = [
        {"step": step, "tensor_id": 0, "kind": kind, "l2_norm": norm}
        for step, size in ratio.items()
        for kind, norm in (("weight", weight_norm), ("update", size * weight_norm))
    ]
    return {"tensor_names": names, "tensors": rows}


def test_large_updates_are_a_stretch_of_records(tmp_path: Path) -> None:
    """Five records in a row above a hundredth, from the first of them to the last; four are none."""
    sql = "SELECT first_step, last_step, ratio, ratio_step FROM large_updates()"
    ratios = {10 * i: 0.02 if i in (3, 4, 5, 6, 7, 8, 10, 11, 12, 13) else 0.005 for i in range(15)}
    (row,) = answer(tmp_path / "long", updates(ratios | {80: 0.04}), sql)
    assert row == (30, 80, pytest.approx(0.04, rel=1e-6), 80)  # the norms are float32
    assert answer(tmp_path / "short", updates(ratios | {50: 0.005, 60: 0.005}), sql) == []


@pytest.mark.parametrize(("gain", "ratio"), [(0.31, 0.0101), (0.3, 0.0101), (0.15, 0.0202)])
def test_updates_of_a_tiny_matrix_count_against_the_least_gain(
    tmp_path: Path, gain: float, ratio: float
) -> None:
    """At half of that gain the update must be twice as large against the matrix."""
    sql = "SELECT count(*) FROM large_updates()"
    for name, factor, count in (("above", 1.0, 1), ("below", 0.98, 0)):
        tables = updates(dict.fromkeys(range(0, 100, 10), factor * ratio), weight_norm=4 * gain)
        assert answer(tmp_path / name, tables, sql) == [(count,)]


NAMES = [{"tensor_id": 0, "name": "up.weight"}, {"tensor_id": 1, "name": "down.weight"}]


def test_first_nonfinite_names_the_origin_first(tmp_path: Path) -> None:
    """A weight turns NaN at step 5; the loss of the same step follows from it; later steps do not count."""
    tables = {
        "tensor_names": NAMES,
        "tensors": [
            {"step": 5, "tensor_id": 1, "kind": "weight", "nan_count": 2, "positive_infinity_count": 1},
            {"step": 6, "tensor_id": 0, "kind": "weight", "nan_count": 9},
        ],
        "steps": [{"step": 5, "train_loss": NAN}, {"step": 6, "train_loss": NAN}],
    }
    assert answer(tmp_path, tables, "FROM first_nonfinite()") == [
        ("run", 0, 5, "tensors", "down.weight", "weight", 2, 1, 1),
        ("run", 0, 5, "steps", "train_loss", "loss", 1, 0, 2),
    ]


def test_first_nonfinite_of_several_ranks(tmp_path: Path) -> None:
    """One query gives rank, step, kind and tensor, whichever rank it happened on."""
    rows = [{"step": 4, "tensor_id": 0, "kind": "gradient", "nan_count": 1}]
    write_run(tmp_path / "run", {"tensor_names": NAMES, "steps": [{"step": 4, "train_loss": NAN}]})
    write_run(tmp_path / "run", {"tensor_names": NAMES, "tensors": rows}, rank=1)
    write_run(tmp_path / "run", {"tensor_names": NAMES, "tensors": [rows[0] | {"step": 3}]}, rank=2)
    with open_runs([tmp_path / "run"]) as run_log:
        sql = "SELECT rank, step, kind, subject FROM first_nonfinite()"
        assert run_log.connection.execute(sql).fetchall() == [(2, 3, "gradient", "up.weight")]


def test_two_named_runs_are_compared_whatever_they_are(tmp_path: Path) -> None:
    """Of two seeds only when both are named; then the first step and tensor that differ, in one row."""
    for name, hashes in (("a", (1, 2, 3)), ("b", (1, 2, 9))):
        tensors = [
            {"step": step, "tensor_id": 1, "kind": "weight", "content_hash": value}
            for step, value in enumerate(hashes)
        ]
        manifest = dataclasses.replace(MANIFEST, seed=ord(name))
        write_run(tmp_path / name, {"tensor_names": NAMES, "tensors": tensors}, manifest)
    columns = "SELECT run, other_run, step, quantity FROM first_divergence"
    with open_runs([tmp_path / "a", tmp_path / "b"]) as run_log:
        found = run_log.connection.execute(f"{columns}('a', 'b')").fetchall()
        assert found == [("a", "b", 2, "down.weight")]
        assert run_log.connection.execute(f"{columns}()").fetchall() == []


def test_a_tensor_whose_name_was_cut_off_is_not_lost(tmp_path: Path) -> None:
    """A killed run may have lost its names; a NaN in a nameless tensor is still a NaN."""
    tables = {"tensors": [{"step": 5, "tensor_id": 4, "kind": "weight", "nan_count": 1}]}
    rows = answer(tmp_path, tables, "SELECT subject, nan_count FROM first_nonfinite()")
    assert rows == [("tensor 4", 1)]


def test_nonfinite_steps_are_all_of_them(tmp_path: Path) -> None:
    """Every step is a mark, not the first one only."""
    steps = [
        {"step": 5, "train_loss": NAN},
        {"step": 6, "train_loss": 1.0},
        {"step": 7, "gradient_norm": INF},
    ]
    assert answer(tmp_path, {"steps": steps}, "FROM nonfinite_steps()") == [
        ("run", 5, "steps", "train_loss", "loss"),
        ("run", 7, "steps", "gradient_norm", "gradient"),
    ]


def test_null_is_not_non_finite(tmp_path: Path) -> None:
    """Not measured is not NaN."""
    assert answer(tmp_path, {"steps": [{"step": 0}]}, "FROM nonfinite_values_by_step()") == []


def test_resumes(tmp_path: Path) -> None:
    """The first step of each later segment."""
    for segment, first in enumerate([0, 5, 3]):
        write_run(tmp_path / "a", {"steps": [{"step": first}, {"step": 6}]}, segment=segment)
    with open_runs([tmp_path / "a"]) as run_log:
        assert run_log.connection.execute("FROM resumes()").fetchall() == [("a", 0, 1, 5), ("a", 0, 2, 3)]


EXAMPLES = [{"example_id": i, "verb": verb} for i, verb in enumerate(["go", "be", "eat", "walk"])]


def overfit_tables(
    validation: list[float], train: list[float], spread: float = 0.0, split: str = "train"
) -> dict[str, Any]:
    """Evaluations every 50 steps; four verbs whose losses move apart by the spread, up and down in turn."""
    losses, evaluations = [], []
    for i, (loss, train_loss) in enumerate(zip(validation, train, strict=True)):
        for verb in range(4):
            own = loss + 0.1 * verb + (spread * (-1) ** verb if i else 0)
            losses.append(
                {
                    "step": 50 * i,
                    "split": "validation",
                    "example_id": verb,
                    "loss_sum": 10 * own,
                    "token_count": 10,
                }
            )
        evaluations.append({"step": 50 * i, "split": split, "loss_sum": 10 * train_loss, "token_count": 10})
    return {"examples": EXAMPLES, "example_losses": losses, "evaluations": evaluations}


ONSET = "SELECT split, minimum_step, confirmed_step, is_superseded FROM overfit_onset()"
FALLING = [1.0, 0.9, 0.8, 0.7, 0.6, 0.5]


def test_onset_is_confirmed_at_the_third_evaluation_above_the_minimum(tmp_path: Path) -> None:
    """Minimum at step 50, rising at 100, 150 and 200."""
    tables = overfit_tables([1.0, 0.5, 0.55, 0.6, 0.65, 0.7], FALLING)
    assert answer(tmp_path, tables, ONSET) == [("validation", 50, 200, False)]


def test_onset_carries_the_certain_part_of_the_rise(tmp_path: Path) -> None:
    """All verbs rise alike, so all of the rise is certain: 0.65 + 0.15 against 0.5 + 0.15 nats/token."""
    tables = overfit_tables([1.0, 0.5, 0.55, 0.6, 0.65, 0.7], FALLING)
    ((lowest, confirmed, lower),) = answer(
        tmp_path, tables, "SELECT minimum_loss, confirmed_loss, lower_bound FROM overfit_onset()"
    )
    # Sums of four terms of size one in float64 err by less than 1e-14.
    assert (lowest, confirmed, lower) == (
        pytest.approx(0.65, abs=1e-12),
        pytest.approx(0.8, abs=1e-12),
        pytest.approx(0.15, abs=1e-12),
    )


def test_two_rising_evaluations_are_no_onset(tmp_path: Path) -> None:
    """The third one could come back."""
    assert answer(tmp_path, overfit_tables([1.0, 0.5, 0.55, 0.6], FALLING[:4]), ONSET) == []


def test_rising_evaluations_must_be_consecutive(tmp_path: Path) -> None:
    """A return to within the least rise starts the count again."""
    tables = overfit_tables([0.5, 0.55, 0.6, 0.51, 0.6, 0.6], FALLING)
    assert answer(tmp_path, tables, ONSET) == []


@pytest.mark.parametrize(("rise", "count"), [(0.0201, 1), (0.0199, 0)])
def test_a_rise_below_the_least_one_is_no_onset(tmp_path: Path, rise: float, count: int) -> None:
    """However certain, two hundredths of a nat are not worth a stop."""
    tables = overfit_tables([0.5, *[0.5 + rise] * 3], FALLING[:4])
    assert len(answer(tmp_path, tables, ONSET)) == count


@pytest.mark.parametrize(("spread", "count"), [(0.03, 1), (0.06, 0)])
def test_an_uncertain_rise_is_no_onset(tmp_path: Path, spread: float, count: int) -> None:
    """Four verbs rise by 0.1 +- spread: standard error spread / sqrt 3, t(3) = 3.182; the limit is 0.0544."""
    tables = overfit_tables([0.5, 0.6, 0.6, 0.6], FALLING[:4], spread=spread)
    assert len(answer(tmp_path, tables, ONSET)) == count


def test_no_onset_while_training_loss_rises_too(tmp_path: Path) -> None:
    """Both losses up is divergence, not overfitting."""
    tables = overfit_tables([0.5, 0.6, 0.7, 0.8], [0.5, 0.6, 0.7, 0.8])
    assert answer(tmp_path, tables, ONSET) == []


def test_a_lower_minimum_later_supersedes_the_onset(tmp_path: Path) -> None:
    """Double descent: the first minimum was not the last word."""
    tables = overfit_tables([0.5, 0.6, 0.6, 0.6, 0.4, 0.39], FALLING)
    assert answer(tmp_path, tables, ONSET) == [("validation", 0, 150, True)]


def test_recent_training_loss_stands_in_for_an_unevaluated_training_split(tmp_path: Path) -> None:
    """A run that evaluates held-out data only is judged by the mean of its last 50 training steps."""
    tables = overfit_tables([0.5, 0.6, 0.7, 0.8], FALLING[:4], split="another")
    steps = [{"step": step, "train_loss": 2.0 - step / 200} for step in range(150)]
    # No step precedes the evaluation at 0, so the minimum must lie later to be compared.
    late = overfit_tables([0.7, 0.5, 0.6, 0.7, 0.8], FALLING[:5], split="another")
    late["steps"] = [*steps, *({"step": step, "train_loss": 1.0} for step in range(150, 200))]
    assert answer(tmp_path / "early", tables | {"steps": steps}, ONSET) == []
    assert answer(tmp_path / "late", late, ONSET) == [("validation", 50, 200, False)]
