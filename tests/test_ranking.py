"""Fired rules become causes with their symptoms: pure functions over assessments."""

from __future__ import annotations

import pytest
from rule_run import diagnosis

from analyzer.diagnoses import (
    DIAGNOSES,
    SEVERITIES,
    Assessment,
    Diagnosis,
    Finding,
    cause_title,
    causes,
    is_at_least,
    symptoms,
    verdict,
)
from analyzer.diagnoses.ranking import DETECTION_LAG_STEPS


def fired(name: str, *steps: int | None) -> Assessment:
    """A rule that fired at those steps."""
    findings = tuple(Finding("run", step, step, "subject", 1.0, 0.0, "detail", 1) for step in steps)
    return Assessment(diagnosis(name), "fired", (), findings)


def among_all(*given: Assessment) -> tuple[Assessment, ...]:
    """All rules in their order, those that are not given clear."""
    named = {a.diagnosis.name: a for a in given}
    return tuple(named.get(d.name, Assessment(d, "clear", (), ())) for d in DIAGNOSES)


def cause_names(*given: Assessment) -> list[str]:
    """Names of the causes, first one first."""
    return [cause.diagnosis.name for cause in causes(among_all(*given))]


def symptom_names(name: str, *given: Assessment) -> list[str]:
    """Names of what a cause explains."""
    assessments = among_all(*given)
    (cause,) = [a for a in assessments if a.diagnosis.name == name]
    return [s.diagnosis.name for s in symptoms(cause, assessments)]


def test_a_cause_takes_its_symptoms_along() -> None:
    """A broken mask explains the low loss and the overfitting: one cause, two symptoms."""
    given = (fired("causal_mask_absent", 0), fired("loss_below_entropy_floor", 50), fired("overfitting", 90))
    assert cause_names(*given) == ["causal_mask_absent"]
    assert symptom_names("causal_mask_absent", *given) == ["loss_below_entropy_floor", "overfitting"]


def test_symptoms_of_symptoms_belong_to_the_cause() -> None:
    """Too high a rate collapses attention, and collapsed attention underfits."""
    given = (
        fired("initialisation_too_large", 0),
        fired("attention_entropy_collapse", 0),
        fired("underfitting", 200),
    )
    assert cause_names(*given) == ["initialisation_too_large"]
    expected = ["attention_entropy_collapse", "underfitting"]
    assert symptom_names("initialisation_too_large", *given) == expected


def test_two_independent_faults_are_two_causes() -> None:
    """Neither explains the other, each keeps its own symptoms."""
    given = (fired("padding_in_loss", 0), fired("data_not_shuffled", 13))
    assert cause_names(*given) == ["padding_in_loss", "data_not_shuffled"]


def test_proof_comes_before_signature_before_anomaly() -> None:
    """However early the others are."""
    given = (fired("loss_spike", 3), fired("label_noise", 5), fired("causal_mask_absent", 100))
    assert cause_names(*given) == ["causal_mask_absent", "label_noise", "loss_spike"]


def test_the_earliest_comes_first() -> None:
    """Among causes of the same evidence."""
    given = (fired("frozen_layer", 40), fired("padding_in_loss", 20), fired("data_not_shuffled", 30))
    assert cause_names(*given) == ["padding_in_loss", "data_not_shuffled", "frozen_layer"]


def test_the_gravest_comes_first_at_the_same_step() -> None:
    """Severity decides between two causes from step 0 on."""
    given = (fired("loss_summed_not_averaged", 0), fired("train_validation_leak", 0))
    assert cause_names(*given) == ["train_validation_leak", "loss_summed_not_averaged"]


# Detection of a cause may lag: units are counted in windows of 50 steps.
@pytest.mark.parametrize(("lag", "names"), [(0, ["bad_batch"]), (1, ["bad_batch", "loss_spike"])])
def test_a_cause_explains_nothing_that_was_long_before_it(lag: int, names: list[str]) -> None:
    """A bad batch at step 200 has not caused the spike at step 100; within the lag it may have."""
    step = 100 + DETECTION_LAG_STEPS + lag
    assert cause_names(fired("bad_batch", step), fired("loss_spike", 100)) == names


def test_an_anomaly_that_nothing_explains_is_called_so() -> None:
    """It is never forced into a class."""
    assessments = among_all(fired("loss_spike", 80))
    assert verdict(assessments) == "Unexplained anomaly: loss spike"
    assert cause_title(causes(assessments)[0]) == "Unexplained anomaly: loss spike"


def test_a_finding_without_a_step_concerns_the_whole_run() -> None:
    """It ranks as if it began at step 0."""
    assert cause_names(fired("frozen_layer", None), fired("padding_in_loss", 2)) == [
        "frozen_layer",
        "padding_in_loss",
    ]


def test_a_symptom_alone_is_a_cause() -> None:
    """Nothing that fired stays unnamed."""
    assert verdict(among_all(fired("loss_below_entropy_floor", 50))) == "Loss below the entropy floor"


def test_a_rule_that_was_not_evaluated_leaves_the_others_clear() -> None:
    """The verdict speaks of what could be evaluated."""
    rule = diagnosis("overfitting")
    assert verdict(among_all(Assessment(rule, "not_evaluated", ("t.c",), ()))) == "clear"


def test_nothing_evaluated_is_no_verdict() -> None:
    """Never a silent pass."""
    assert verdict([Assessment(d, "not_evaluated", ("t.c",), ()) for d in DIAGNOSES]) == "not evaluated"


@pytest.mark.parametrize("rule", DIAGNOSES, ids=[d.name for d in DIAGNOSES])
def test_every_rule_is_a_cause_by_itself(rule: Diagnosis) -> None:
    """And it explains nothing when nothing else fired."""
    assert cause_names(fired(rule.name, 10)) == [rule.name]
    assert symptom_names(rule.name, fired(rule.name, 10)) == []


def test_severities_are_ordered() -> None:
    """S1 < S2 < S3 < S4."""
    reached = [[is_at_least(s, level) for level in SEVERITIES] for s in SEVERITIES]
    assert reached == [[j <= i for j in range(4)] for i in range(4)]
