"""The outcome of rules on opened runs: fired, clear, or not evaluated because of a named missing input."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache

from analyzer.diagnoses.declaration import (
    REPEATED_EVALUATION,
    RESUMED_EVENT,
    SECOND_RUN,
    TRAINING_LOSS,
    WHOLE_LOG,
    Assessment,
    Diagnosis,
    Finding,
)
from analyzer.diagnoses.registry import DIAGNOSES
from analyzer.query_library import library
from analyzer.run_log import RunLog
from analyzer.views import identifier, quoted
from recorder.schema import TENSOR_KINDS

FACTS = {
    SECOND_RUN: """
        SELECT count(*) > 0 FROM runs AS mine JOIN runs AS other
            ON other.run <> mine.run AND other.seed = mine.seed AND other.config = mine.config
        WHERE mine.run = {run}""",
    REPEATED_EVALUATION: "SELECT count(*) > 0 FROM evaluations WHERE run = {run} AND repeat > 0",
    RESUMED_EVENT: """
        SELECT count(*) > 0 FROM events_all
        WHERE run = {run} AND kind = 'resumed' AND json_valid(payload) -- it holds the state""",
    TRAINING_LOSS: """
        SELECT count(*) > 0 FROM (
            SELECT run FROM steps WHERE train_loss IS NOT NULL
            UNION ALL SELECT run FROM evaluations WHERE split = 'train' AND loss_sum / token_count IS NOT NULL
        ) WHERE run = {run}""",
}
"""Needs that are no column, and the query that says whether a run has them."""


def assess(run_log: RunLog, diagnoses: Sequence[Diagnosis] = DIAGNOSES) -> tuple[Assessment, ...]:
    """The outcome of every rule on the one opened run, or the first of several, in the order of the rules."""
    return next(iter(assess_runs(run_log, diagnoses).values()), ())


def assess_runs(
    run_log: RunLog, diagnoses: Sequence[Diagnosis] = DIAGNOSES
) -> dict[str, tuple[Assessment, ...]]:
    """The outcome of every rule on each opened run, by run name; a query runs once for all of them."""
    missing = {run: missing_inputs(run_log, run, diagnoses) for run in run_log.paths}
    updates = {run: _update_count(run_log, run) for run in run_log.paths}
    damaged = {run for run in run_log.paths if run_log.lost_row_count(run)}
    outcomes: dict[str, list[Assessment]] = {run: [] for run in run_log.paths}
    for diagnosis in diagnoses:
        lacking = {run: missing[run][diagnosis.name] for run in run_log.paths}
        findings = _findings(run_log, diagnosis) if not all(lacking.values()) else {}
        for run in run_log.paths:
            outcome = _outcome(diagnosis, lacking[run], findings.get(run, ()))
            outcomes[run].append(_earned(outcome, updates[run], run in damaged))
    return {run: tuple(assessments) for run, assessments in outcomes.items()}


def _outcome(diagnosis: Diagnosis, missing: tuple[str, ...], findings: tuple[Finding, ...]) -> Assessment:
    if missing:
        return Assessment(diagnosis, "not_evaluated", missing, ())
    return Assessment(diagnosis, "fired" if findings else "clear", (), findings)


def _earned(assessment: Assessment, update_count: int, is_damaged: bool) -> Assessment:
    """Not evaluated instead of clear where the run ends before the first step that the rule looks at.

    Without any step nothing is clear, nor where rows are lost: what is left may show a fault, but not that
    there was none.
    """
    least = _least_steps().get(assessment.diagnosis.name, 1)
    if assessment.outcome != "clear" or (update_count >= least and not is_damaged):
        return assessment
    return replace(
        assessment, outcome="not_evaluated", missing=(WHOLE_LOG if is_damaged else f"step {least}",)
    )


@cache
def _least_steps() -> dict[str, int]:
    """The step from which on a rule looks at a run, by rule: the default of its parameter ``least_step``."""
    return {
        query.name: int(parameter.default)
        for query in library()
        for parameter in query.parameters
        if parameter.name == "least_step" and parameter.default is not None
    }


def _update_count(run_log: RunLog, run: str) -> int:
    """Optimizer updates that some row tells of: an evaluation follows the last one."""
    sources = ("step + 1 AS count FROM steps", "step FROM evaluations", "step FROM example_losses")
    rows = " UNION ALL ".join(f"SELECT {source} WHERE run = {quoted(run)}" for source in sources)
    ((count,),) = run_log.connection.execute(f"SELECT coalesce(max(count), 0) FROM ({rows})").fetchall()
    return int(count)


def _findings(run_log: RunLog, diagnosis: Diagnosis) -> dict[str, tuple[Finding, ...]]:
    """Rows of the rule's query, by run."""
    by_run: dict[str, tuple[Finding, ...]] = {}
    for row in run_log.query(f"FROM {diagnosis.name}()").to_pylist():
        finding = Finding(**row, panel=diagnosis.panel)
        by_run[finding.run] = (*by_run.get(finding.run, ()), finding)
    return by_run


def missing_inputs(
    run_log: RunLog, run: str, diagnoses: Sequence[Diagnosis]
) -> Mapping[str, tuple[str, ...]]:
    """What each rule needs and the run does not have, by rule name."""
    needs = {need for diagnosis in diagnoses for need in diagnosis.requires}
    facts = {need for need in needs & FACTS.keys() if _holds(run_log, run, need)}
    recorded = facts | _recorded(run_log, run, needs - FACTS.keys())
    return {d.name: tuple(need for need in d.requires if need not in recorded) for d in diagnoses}


def _recorded(run_log: RunLog, run: str, needs: Iterable[str]) -> set[str]:
    """The needed columns that hold a value. A kind of tensor counts as a table: ``gradient.l2_norm``."""
    recorded: set[str] = set()
    for table in {need.partition(".")[0] for need in needs}:
        columns = {need.partition(".")[2] for need in needs if need.startswith(table + ".")}
        found = (
            _columns_of_kind(run_log, run, table, columns)
            if table in TENSOR_KINDS
            else run_log.recorded_columns(table, run)
        )
        recorded |= {f"{table}.{column}" for column in found & columns}
    return recorded


def _columns_of_kind(run_log: RunLog, run: str, kind: str, columns: set[str]) -> set[str]:
    """Columns of ``tensors`` that hold a value in some row of that kind."""
    names = sorted(columns)
    counts = ", ".join(f"count({identifier(name)})" for name in names)
    sql = f"SELECT {counts} FROM tensors WHERE run = {quoted(run)} AND kind = {quoted(kind)}"
    (row,) = run_log.connection.execute(sql).fetchall()
    return {name for name, count in zip(names, row, strict=True) if count}


def _holds(run_log: RunLog, run: str, fact: str) -> bool:
    ((value,),) = run_log.connection.execute(FACTS[fact].format(run=quoted(run))).fetchall()
    return bool(value)
