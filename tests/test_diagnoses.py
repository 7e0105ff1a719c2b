"""Each rule fires, is silent below its threshold and on a healthy run, and says when it lacks a column."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from synthetic import MANIFEST, Columns, healthy_run, healthy_tables, write_run

from analyzer.diagnoses import (
    DIAGNOSES,
    SEVERITIES,
    Assessment,
    Diagnosis,
    Finding,
    assess,
    causes,
    is_at_least,
    symptoms,
    verdict,
)
from analyzer.query_library import library
from analyzer.run_log import open_runs
from recorder.manifest import Manifest, ReferenceLosses

NAMES = [diagnosis.name for diagnosis in DIAGNOSES]
PANEL_COUNT = 7
HEALTHY = healthy_tables(steps=200)


def outcome(
    directory: Path, name: str, changes: Mapping[str, Any], manifest: Manifest = MANIFEST
) -> Assessment:
    """What a rule comes to on a healthy run in which some tables are replaced; None takes one away."""
    tables = {**HEALTHY, **changes}
    write_run(directory / "run", {n: rows for n, rows in tables.items() if rows is not None}, manifest)
    with open_runs([directory / "run"]) as run_log:
        return {a.diagnosis.name: a for a in assess(run_log)}[name]


def changed(table: str, column: str, values: Mapping[int, Any]) -> Columns:
    """A table of the healthy run with some rows of one column set."""
    columns = dict(HEALTHY[table])
    column_values = list(columns[column])
    for row, value in values.items():
        column_values[row] = value
    return columns | {column: column_values}


def without(table: str, column: str) -> Columns:
    """A table of the healthy run with one column not recorded."""
    return {n: values for n, values in HEALTHY[table].items() if n != column}


def test_every_rule_has_its_query() -> None:
    """DIAGNOSES and the files of queries/diagnoses are the same names."""
    assert sorted(NAMES) == [query.name for query in library() if query.layer == "diagnoses"]


def test_every_diagnosis_query_has_the_same_columns() -> None:
    """A finding is one row, whatever the rule."""
    expected = ["run", "first_step", "last_step", "subject", "observed", "threshold", "detail"]
    found = {q.name: [c.name for c in q.columns] for q in library() if q.layer == "diagnoses"}
    assert found == dict.fromkeys(NAMES, expected)


@pytest.mark.parametrize("diagnosis", DIAGNOSES, ids=NAMES)
def test_a_declaration_is_complete(diagnosis: Diagnosis) -> None:
    """All words are there, and the rules that it explains exist."""
    assert all((diagnosis.title, diagnosis.question, diagnosis.meaning, diagnosis.remedy, diagnosis.source))
    assert set(diagnosis.explains) <= set(NAMES) - {diagnosis.name}
    assert diagnosis.requires
    assert 1 <= diagnosis.panel <= PANEL_COUNT


def test_a_healthy_run_is_clear(tmp_path: Path) -> None:
    """Two thousand steps of every table: each rule was evaluated, and none fired."""
    with open_runs([healthy_run(tmp_path / "a", steps=2000)]) as run_log:
        assessments = assess(run_log)
    assert [a.outcome for a in assessments] == ["clear"] * len(DIAGNOSES)
    assert verdict(assessments) == "clear"


def test_an_empty_log_is_not_evaluated(tmp_path: Path) -> None:
    """Nothing recorded is never a silent pass."""
    write_run(tmp_path / "a", {"events": []})
    with open_runs([tmp_path / "a"]) as run_log:
        assessments = assess(run_log)
    assert {a.outcome for a in assessments} == {"not_evaluated"}
    assert verdict(assessments) == "not evaluated"


MISSING: list[tuple[str, str, dict[str, Any]]] = [
    ("causal_mask_absent", "attention.future_mass", {"attention": without("attention", "future_mass")}),
    ("causal_mask_absent", "attention.future_mass", {"attention": None}),
    ("loss_below_entropy_floor", "evaluations.loss_sum", {"evaluations": without("evaluations", "loss_sum")}),
    ("nonfinite_value", "steps.train_loss", {"steps": without("steps", "train_loss")}),
    ("loss_spike", "steps.train_loss", {"steps": without("steps", "train_loss")}),
    ("overfitting", "example_losses.loss_sum", {"example_losses": without("example_losses", "loss_sum")}),
]


@pytest.mark.parametrize(("name", "column", "changes"), MISSING)
def test_a_rule_without_its_column_is_not_evaluated(
    tmp_path: Path, name: str, column: str, changes: Mapping[str, Any]
) -> None:
    """The missing column is named, whether it is all null or its table is absent."""
    assessment = outcome(tmp_path, name, changes)
    assert (assessment.outcome, column in assessment.missing) == ("not_evaluated", True)


UNDECLARED = [
    ("causal_mask_absent", "manifest.mask_type", {"mask_type": None}),
    (
        "loss_below_entropy_floor",
        "manifest.entropy_floor",
        {"reference_losses": ReferenceLosses(uniform=3.5)},
    ),
    ("overfitting", "manifest.primary_split", {"primary_split": None}),
]


@pytest.mark.parametrize(("name", "field", "declaration"), UNDECLARED)
def test_a_rule_without_its_declaration_is_not_evaluated(
    tmp_path: Path, name: str, field: str, declaration: dict[str, Any]
) -> None:
    """What the run had to declare is named like a column."""
    manifest = dataclasses.replace(MANIFEST, **declaration)
    assessment = outcome(tmp_path, name, {}, manifest)
    assert (assessment.outcome, assessment.missing) == ("not_evaluated", (field,))


def test_future_mass_is_a_broken_causal_mask(tmp_path: Path) -> None:
    """The finding names the head with the most mass, and the first and last step with any."""
    attention = changed("attention", "future_mass", {8: 0.125, 11: 0.25, 17: 0.125})
    (finding,) = outcome(tmp_path, "causal_mask_absent", {"attention": attention}).findings
    expected = Finding("run", 1, 2, "layer 0 head 3", 0.25, 0.0, finding.detail, 1)
    assert finding == expected
    assert finding.detail.startswith(
        "3 of 8 heads see later keys, only the next one: the mask is off by one; "
    )


def test_the_smallest_mass_fires_and_none_is_clear(tmp_path: Path) -> None:
    """The invariant is exact: the threshold is zero itself."""
    for name, mass, expected in (
        ("least", 5e-324, "fired"),
        ("zero", 0.0, "clear"),
        ("minus", -0.0, "clear"),
    ):
        attention = changed("attention", "future_mass", {8: mass})
        assessment = outcome(tmp_path / name, "causal_mask_absent", {"attention": attention})
        assert assessment.outcome == expected


def test_a_nan_mass_proves_nothing(tmp_path: Path) -> None:
    """NaN is greater than everything in this engine; here it is no evidence."""
    attention = changed("attention", "future_mass", {8: math.nan, 9: math.inf})
    assert outcome(tmp_path, "causal_mask_absent", {"attention": attention}).outcome == "clear"


def test_a_declared_bidirectional_mask_may_see_the_future(tmp_path: Path) -> None:
    """What the run intends is no fault."""
    attention = changed("attention", "future_mass", {8: 0.5})
    manifest = dataclasses.replace(MANIFEST, mask_type="bidirectional")
    assessment = outcome(tmp_path, "causal_mask_absent", {"attention": attention}, manifest)
    assert assessment.outcome == "clear"


def evaluated(loss: float, step: int = 200, **columns: Any) -> list[dict[str, Any]]:
    """One evaluation of the primary split."""
    row = {"step": step, "split": "validation", "repeat": 0, "loss_sum": 1000 * loss, "token_count": 1000}
    return [row | columns]


CONSEQUENCES = [
    (0.1, "training and evaluation share the missing mask: validation loss 0.1 nats/token at step 200"),
    (5.0, "evaluation masks correctly: validation loss 5 nats/token versus training"),
    (1.0, "the losses do not tell yet whether evaluation sees the future too: validation 1"),
]


@pytest.mark.parametrize(("loss", "words"), CONSEQUENCES)
def test_the_detail_says_whether_evaluation_sees_the_future(tmp_path: Path, loss: float, words: str) -> None:
    """Training is at 1.3 nats/token, the floor at 0.2: below it both leak, far above only training does."""
    changes = {
        "attention": changed("attention", "future_mass", {8: 0.5}),
        "evaluations": evaluated(loss),
    }
    (finding,) = outcome(tmp_path, "causal_mask_absent", changes).findings
    assert words in finding.detail


def test_the_detail_says_when_there_was_no_evaluation(tmp_path: Path) -> None:
    """A run that is killed early is still proven broken."""
    changes = {"attention": changed("attention", "future_mass", {8: 0.5}), "evaluations": None}
    (finding,) = outcome(tmp_path, "causal_mask_absent", changes).findings
    assert finding.detail.endswith(
        "no evaluation of the primary split tells whether evaluation sees the future too"
    )


# The floor of the primary split is 0.2; tolerance 0.001 + 0.2 * 1e-5 = 0.001002.
@pytest.mark.parametrize(("loss", "expected"), [(0.19899, "fired"), (0.19901, "clear"), (math.nan, "clear")])
def test_loss_below_the_entropy_floor(tmp_path: Path, loss: float, expected: str) -> None:
    """Just beyond the tolerance is proof, just within it is rounding; NaN is another rule's."""
    changes = {"evaluations": evaluated(loss)}
    assert outcome(tmp_path, "loss_below_entropy_floor", changes).outcome == expected


def test_the_entropy_floor_finding(tmp_path: Path) -> None:
    """One finding per split, from the first to the last evaluation below the floor."""
    rows = evaluated(0.15, 50) + evaluated(0.1, 100) + evaluated(0.3, 150)
    (finding,) = outcome(tmp_path, "loss_below_entropy_floor", {"evaluations": rows}).findings
    assert (finding.first_step, finding.last_step, finding.subject) == (50, 100, "validation")
    assert (finding.observed, finding.threshold) == (0.1, pytest.approx(0.198998, abs=1e-12))


def test_an_evaluation_with_dropout_is_not_held_to_the_floor(tmp_path: Path) -> None:
    """The floor holds for a function of the prefix, which dropout is not."""
    changes = {"evaluations": evaluated(0.1, evaluation_mode=False)}
    assert outcome(tmp_path, "loss_below_entropy_floor", changes).outcome == "clear"


def test_one_nan_element_is_a_non_finite_value(tmp_path: Path) -> None:
    """One element of one tensor is enough; the finding names it."""
    tensors = changed("tensors", "nan_count", {1200 + 3: 1})  # first weights follow 200 x 6 gradients
    (finding,) = outcome(tmp_path, "nonfinite_value", {"tensors": tensors}).findings
    assert (finding.first_step, finding.subject) == (0, "weight of blocks.1.attention.query.weight")
    assert (finding.observed, finding.threshold) == (1.0, 0.0)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_non_finite_loss_is_found_without_tensors(tmp_path: Path, value: float) -> None:
    """Where no tensor was recorded the loss itself is the evidence."""
    changes = {"steps": changed("steps", "train_loss", {7: value, 9: value}), "tensors": None}
    (finding,) = outcome(tmp_path, "nonfinite_value", changes).findings
    assert (finding.first_step, finding.last_step, finding.subject) == (7, 9, "train_loss")


def test_a_loss_spike_is_one_finding_per_event(tmp_path: Path) -> None:
    """Two bad batches, two findings."""
    steps = changed("steps", "train_loss", {80: 9.0, 140: 9.0})
    assessment = outcome(tmp_path, "loss_spike", {"steps": steps})
    assert [f.first_step for f in assessment.findings] == [80, 140]
    assert assessment.findings[0].threshold == 6.0
    assert assessment.findings[0].detail.endswith("back at step 81")


# The loss at step 120 is 1.74, its 16-row median before 1.82, the scale below 0.02: prominence 0.12 is z = 6.
@pytest.mark.parametrize(("factor", "expected"), [(1.10, "clear"), (1.30, "fired")])
def test_a_loss_spike_below_its_threshold_is_clear(tmp_path: Path, factor: float, expected: str) -> None:
    """A tenth above the curve is noise, three tenths are not."""
    loss = list(HEALTHY["steps"]["train_loss"])[120]
    steps = changed("steps", "train_loss", {120: factor * loss})
    assert outcome(tmp_path, "loss_spike", {"steps": steps}).outcome == expected


def overfit_losses(rise: float) -> list[dict[str, Any]]:
    """Validation at 1 nat/token at step 0, then above it by the rise at four evaluations, all verbs alike."""
    validation = [
        i for i, split in enumerate(healthy_tables(steps=50)["examples"]["split"]) if split == "validation"
    ]
    return [
        {
            "step": step,
            "split": "validation",
            "example_id": example,
            "loss_sum": 10 * (1.0 + (rise if step else 0.0)),
            "token_count": 10,
        }
        for step in range(0, 250, 50)
        for example in validation
    ]


@pytest.mark.parametrize(("rise", "expected"), [(0.0201, "fired"), (0.0199, "clear")])
def test_overfitting_fires_above_its_least_rise(tmp_path: Path, rise: float, expected: str) -> None:
    """Training falls, validation is certainly above its minimum: by more than 0.02 nats/token, or by less."""
    assert outcome(tmp_path, "overfitting", {"example_losses": overfit_losses(rise)}).outcome == expected


def test_the_overfitting_finding(tmp_path: Path) -> None:
    """Since the minimum, confirmed at the third evaluation above it, and called provisional."""
    (finding,) = outcome(tmp_path, "overfitting", {"example_losses": overfit_losses(0.5)}).findings
    assert (finding.first_step, finding.last_step, finding.subject) == (0, 150, "validation")
    assert finding.observed == pytest.approx(0.5, abs=1e-12)
    assert "provisional" in finding.detail


FINDING = Finding("run", 0, 0, "subject", 1.0, 0.0, "detail", 1)


def assessments(**outcomes: str) -> tuple[Assessment, ...]:
    """All rules clear, but for the named ones."""
    return tuple(
        Assessment(d, o, ("t.c",) if o == "not_evaluated" else (), (FINDING,) if o == "fired" else ())
        for d in DIAGNOSES
        for o in [outcomes.get(d.name, "clear")]
    )


def test_a_cause_takes_its_symptoms_along() -> None:
    """A broken mask explains the low loss and the overfitting: one verdict, two symptoms."""
    given = assessments(causal_mask_absent="fired", overfitting="fired", loss_below_entropy_floor="fired")
    assert verdict(given) == "Broken causal mask"
    (cause,) = causes(given)
    assert [s.diagnosis.name for s in symptoms(cause, given)] == ["loss_below_entropy_floor", "overfitting"]


def test_the_gravest_cause_is_the_verdict() -> None:
    """Severity decides, then proof before signature."""
    given = assessments(loss_spike="fired", overfitting="fired", nonfinite_value="fired")
    names = [cause.diagnosis.name for cause in causes(given)]
    assert names == ["nonfinite_value", "overfitting", "loss_spike"]
    assert verdict(given) == "Non-finite value"


def test_a_symptom_alone_is_a_cause() -> None:
    """Nothing that fired stays unnamed."""
    assert verdict(assessments(loss_below_entropy_floor="fired")) == "Loss below the entropy floor"


def test_a_rule_that_was_not_evaluated_leaves_the_others_clear() -> None:
    """The verdict speaks of what could be evaluated."""
    assert verdict(assessments(overfitting="not_evaluated")) == "clear"


def test_severities_are_ordered() -> None:
    """S1 < S2 < S3 < S4."""
    reached = [[is_at_least(s, level) for level in SEVERITIES] for s in SEVERITIES]
    assert reached == [[j <= i for j in range(4)] for i in range(4)]
