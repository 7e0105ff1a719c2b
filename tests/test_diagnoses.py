"""What holds for every rule: complete words, one query, clear on a healthy run, never a silent pass."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from rule_run import RUN, diagnosis, healthy, opened, without
from synthetic import MANIFEST, Columns

from analyzer.diagnoses import DIAGNOSES, Assessment, Diagnosis, assess, assess_runs, verdict
from analyzer.diagnoses.assessment import FACTS, missing_inputs
from analyzer.diagnoses.declaration import REPEATED_EVALUATION, RESUMED_EVENT, SECOND_RUN, TRAINING_LOSS
from analyzer.query_library import library
from analyzer.run_log import RunLog
from recorder.manifest import Manifest, ReferenceLosses

NAMES = [diagnosis.name for diagnosis in DIAGNOSES]
PANEL_COUNT = 7
MANIFEST_OF_ALL = dataclasses.replace(MANIFEST, loss_reduction="sum of NLL / number of tokens")
UNDECLARED: dict[str, Any] = {
    "mask_type": {"mask_type": None},
    "primary_split": {"primary_split": None},
    "loss_reduction": {"loss_reduction": None},
    "uniform": {"reference_losses": ReferenceLosses(entropy_floor={"train": 0.2, "validation": 0.2})},
    "entropy_floor": {"reference_losses": ReferenceLosses(uniform=3.5)},
}
NEEDS = [(d.name, need) for d in DIAGNOSES for need in d.requires]


def opened_twice(tables: Any, manifest: Manifest = MANIFEST_OF_ALL) -> RunLog:
    """A run that was made twice."""
    return opened({RUN: [tables], "twin": [tables]}, {RUN: manifest, "twin": manifest})


def test_every_rule_has_its_query() -> None:
    """DIAGNOSES and the files of queries/diagnoses are the same names, each once."""
    assert sorted(NAMES) == [query.name for query in library() if query.layer == "diagnoses"]


def test_every_diagnosis_query_has_the_same_columns() -> None:
    """A finding is one row, whatever the rule."""
    expected = ["run", "first_step", "last_step", "subject", "observed", "threshold", "detail"]
    found = {q.name: [c.name for c in q.columns] for q in library() if q.layer == "diagnoses"}
    assert found == dict.fromkeys(NAMES, expected)


def test_thresholds_are_parameters_only() -> None:
    """Every rule can be asked with another threshold."""
    assert [q.name for q in library() if q.layer == "diagnoses" and not q.parameters] == []


@pytest.mark.parametrize("rule", DIAGNOSES, ids=NAMES)
def test_a_declaration_is_complete(rule: Diagnosis) -> None:
    """All words are there, and the rules that it explains exist."""
    assert all((rule.title, rule.meaning, rule.remedy, rule.source))
    assert rule.question.endswith("?")
    assert set(rule.explains) <= set(NAMES) - {rule.name}
    assert len(set(rule.explains)) == len(rule.explains)
    assert rule.requires
    assert 1 <= rule.panel <= PANEL_COUNT


def test_titles_are_unique() -> None:
    """A verdict names one rule."""
    assert len({d.title for d in DIAGNOSES}) == len(DIAGNOSES)


def test_explanations_have_no_cycle() -> None:
    """Upstream explains downstream: removing rules that nothing is left to explain ends with none."""
    left = {d.name: set(d.explains) for d in DIAGNOSES}
    while left:
        roots = left.keys() - set().union(*left.values())
        assert roots, f"cycle among {sorted(left)}"
        left = {name: explained for name, explained in left.items() if name not in roots}


def test_a_healthy_run_is_clear() -> None:
    """Every column is recorded, the run was resumed and made twice: each rule was evaluated, none fired."""
    assessments = assess_runs(opened_twice(healthy(600)))[RUN]
    assert {a.diagnosis.name: a.outcome for a in assessments} == dict.fromkeys(NAMES, "clear")
    assert verdict(assessments) == "clear"


def test_an_empty_log_is_not_evaluated() -> None:
    """Nothing recorded is never a silent pass."""
    assessments = assess(opened({RUN: [{"events": []}]}))
    assert {a.outcome for a in assessments} == {"not_evaluated"}
    assert verdict(assessments) == "not evaluated"


def test_no_run_has_no_assessment() -> None:
    """Nothing opened, nothing said."""
    assert assess(opened({})) == ()


@pytest.mark.parametrize("need", sorted({need for _, need in NEEDS} - FACTS.keys()))
def test_rules_without_a_column_are_not_evaluated(need: str) -> None:
    """Exactly the rules that declare a column, or a declaration of the manifest, ask for it by name."""
    manifest, tables = MANIFEST_OF_ALL, healthy()
    if need.startswith("manifest."):
        manifest = dataclasses.replace(manifest, **UNDECLARED[need.removeprefix("manifest.")])
    else:
        tables = without(tables, need)
    missing = missing_inputs(opened_twice(tables, manifest), RUN, DIAGNOSES)
    assert {name for name, needs in missing.items() if need in needs} == {n for n, d in NEEDS if d == need}


def no_training_split() -> Columns:
    """The evaluations of other splits."""
    evaluations = healthy()["evaluations"]
    keeps = np.asarray(evaluations["split"]) != "train"
    return {name: np.asarray(values)[keeps] for name, values in evaluations.items()}


@pytest.mark.parametrize("fact", sorted(FACTS))
def test_rules_without_a_second_look_are_not_evaluated(fact: str) -> None:
    """No resume, repeated evaluation, second run or training loss leave the rules over them open."""
    evaluations = {name: list(values)[:-1] for name, values in healthy()["evaluations"].items()}
    tables = healthy() | {
        RESUMED_EVENT: {"events": []},
        REPEATED_EVALUATION: {"evaluations": evaluations},
        TRAINING_LOSS: {
            "steps": without(healthy(), "steps.train_loss")["steps"],
            "evaluations": no_training_split(),
        },
    }.get(fact, {})
    second = {} if fact == SECOND_RUN else {"twin": [tables]}
    run_log = opened({RUN: [tables], **second}, dict.fromkeys((RUN, "twin"), MANIFEST_OF_ALL))
    missing = missing_inputs(run_log, RUN, DIAGNOSES)
    assert {n for n, needs in missing.items() if needs == (fact,)} == {n for n, d in NEEDS if d == fact}


def test_a_missing_input_is_the_outcome() -> None:
    """A rule that lacks something names it, and its query is not asked."""
    rule = diagnosis("causal_mask_absent")
    (assessment,) = assess(opened({RUN: [healthy() | {"attention": None}]}), [rule])
    assert assessment == Assessment(rule, "not_evaluated", ("attention.future_mass",), ())


def test_each_run_is_judged_by_its_own_log() -> None:
    """A column that only the other run recorded is missing here."""
    other = healthy() | {"attention": None}
    run_log = opened({RUN: [healthy()], "other": [other]})
    assessed = {
        run: assessments[0].outcome
        for run, assessments in assess_runs(run_log, [diagnosis("causal_mask_absent")]).items()
    }
    assert assessed == {RUN: "clear", "other": "not_evaluated"}


@pytest.mark.parametrize(("steps", "expected"), [(49, ("not_evaluated", ("step 50",))), (50, ("clear", ()))])
def test_a_rule_does_not_call_a_run_clear_that_ended_before_it_looks(
    steps: int, expected: tuple[str, tuple[str, ...]]
) -> None:
    """Gradients of healthy runs agree until step 50, so that the rule says nothing before."""
    run_log = opened({RUN: [healthy(steps)]}, {RUN: MANIFEST_OF_ALL})
    (assessment,) = assess_runs(run_log, [diagnosis("gradients_not_zeroed")])[RUN]
    assert (assessment.outcome, assessment.missing) == expected


def test_nothing_is_clear_without_a_step() -> None:
    """A log whose steps are lost is no healthy run."""
    run_log = opened({RUN: [healthy() | {"steps": None, "evaluations": None, "example_losses": None}]})
    assert {a.outcome for a in assess(run_log)} == {"not_evaluated"}
    assert verdict(assess(run_log)) == "not evaluated"
