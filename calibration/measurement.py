"""A trained cell -> its outcome: every rule, times to detection, harm, and the peers' rules."""

from __future__ import annotations

import platform
import time
from datetime import UTC, datetime
from pathlib import Path

import duckdb
import numpy as np

from analyzer.diagnoses import Assessment, assess_runs
from analyzer.run_log import RunLog, open_runs
from analyzer.views import quoted
from calibration.cell import Cell
from calibration.detection import detection_step
from calibration.outcome import Detection, FiredRule, Harm, Outcome
from calibration.peers import fired_rules
from calibration.rules_hash import rules_hash
from calibration.testable import testable_step


def measure(cell: Cell, directory: Path, control: Path | None, training_seconds: float) -> Outcome:
    """The outcome of the cell that was trained into ``directory``; its control is trained already."""
    paths = [directory, control] if cell.has_second_run and control is not None else [directory]
    start = time.perf_counter()
    with open_runs(paths) as run_log:
        run = next(iter(run_log.paths))
        assessments = assess_runs(run_log)[run]
        diagnosis_seconds = time.perf_counter() - start
        detections = tuple(
            _detection(run_log, run, cell, assessment)
            for name in cell.expected()
            for assessment in assessments
            if assessment.diagnosis.name == name
        )
    return Outcome(
        identity=cell.identity(),
        part=cell.part,
        kind=cell.kind,
        name=cell.name,
        faults=cell.faults,
        expected=cell.expected(),
        severity=cell.severity,
        seed=cell.seed,
        architecture=cell.architecture,
        start=cell.fault_start(),
        steps=cell.steps,
        fired=tuple(
            FiredRule(a.diagnosis.name, a.first_step(), len(a.findings))
            for a in assessments
            if a.outcome == "fired"
        ),
        not_evaluated=tuple(a.diagnosis.name for a in assessments if a.outcome == "not_evaluated"),
        detections=detections,
        harm=None if control is None or not cell.faults else _harm(directory, control),
        peer_rules=_peer_rules(directory),
        training_seconds=round(training_seconds, 2),
        diagnosis_seconds=round(diagnosis_seconds, 3),
        rules_hash=rules_hash(),
        date=datetime.now(UTC).date().isoformat(),
        versions=versions(),
    )


def versions() -> str:
    """Of what the numbers depend on."""
    return f"Python {platform.python_version()}, DuckDB {duckdb.__version__}, NumPy {np.__version__}"


def _detection(run_log: RunLog, run: str, cell: Cell, assessment: Assessment) -> Detection:
    diagnosis, start = assessment.diagnosis, cell.fault_start()
    if assessment.outcome != "fired":
        return Detection(diagnosis.name, testable_step(run_log, run, diagnosis, start), None)
    # Overfitting is there from the minimum on, which only the whole log tells.
    is_late = diagnosis.name == "overfitting"
    testable = assessment.first_step() if is_late else testable_step(run_log, run, diagnosis, start)
    # From the row before the fault on: a rule that fires there fires without it.
    detected = detection_step(run_log, run, diagnosis, max(0, start - 1), cell.steps)
    return Detection(diagnosis.name, testable, detected)


def _harm(directory: Path, control: Path) -> Harm:
    with open_runs([directory, control]) as run_log:
        run, other = run_log.paths
        (row,) = run_log.query(
            "SELECT gap, lower, upper, nonfinite_count "
            f"FROM control_gap(control_name := {quoted(other)}) WHERE run = {quoted(run)}"
        ).to_pylist()
    return Harm(**row)


def _peer_rules(directory: Path) -> tuple[str, ...]:
    with open_runs([directory]) as run_log:
        return fired_rules(run_log)
