"""A trained cell -> its outcome: every rule, times to detection, harm, and the peers' rules."""

from __future__ import annotations

import platform
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import duckdb
import numpy as np

from analyzer.diagnoses import Assessment, assess_runs
from analyzer.diagnoses.control import control_gap
from analyzer.exit_codes import FINDINGS, FINE
from analyzer.run_log import RunLog, open_runs
from calibration.cell import Cell
from calibration.detection import detection_step
from calibration.matrix import MEMORY_STEPS
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
        command_seconds=_command_seconds(directory) if cell.steps == MEMORY_STEPS else None,
        rules_hash=rules_hash(),
        date=datetime.now(UTC).date().isoformat(),
        versions=versions(),
    )


def versions() -> str:
    """Of what the numbers depend on."""
    return f"Python {platform.python_version()}, DuckDB {duckdb.__version__}, NumPy {np.__version__}"


def _command_seconds(directory: Path) -> float:
    """What a person waits for: the start of the process, the diagnosis and its print."""
    start = time.perf_counter()
    command = [sys.executable, "-m", "analyzer", "diagnose", str(directory)]
    completed = subprocess.run(command, capture_output=True, text=True, check=False)
    if completed.returncode not in (FINE, FINDINGS):
        raise RuntimeError(f"{' '.join(command)}: exit code {completed.returncode}: {completed.stderr}")
    return round(time.perf_counter() - start, 3)


def _detection(run_log: RunLog, run: str, cell: Cell, assessment: Assessment) -> Detection:
    diagnosis, start = assessment.diagnosis, cell.fault_start()
    if assessment.outcome != "fired":
        return Detection(diagnosis.name, testable_step(run_log, run, diagnosis, start), None)
    begins = assessment.first_step() if diagnosis.name == "overfitting" else start
    testable = testable_step(run_log, run, diagnosis, begins)
    # From the row before the fault on: a rule that fires there fires without it.
    detected = detection_step(run_log, run, diagnosis, max(0, start - 1), cell.steps)
    return Detection(diagnosis.name, testable, detected)


def _harm(directory: Path, control: Path) -> Harm:
    gap = control_gap(directory, control)
    return Harm(gap.gap, gap.lower, gap.upper, gap.nonfinite_count)


def _peer_rules(directory: Path) -> tuple[str, ...]:
    with open_runs([directory]) as run_log:
        return fired_rules(run_log)
