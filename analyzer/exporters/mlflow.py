"""A run's manifest, scalar series and dashboard, written to an MLflow tracking store.

MLflow gets a summary; the log stays the only truth. Its metric store keeps NaN but turns infinities into
+-1.797e308, so infinite points are left out and named in the tag ``flight_recorder.not_representable``.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from analyzer.errors import AnalyzerError
from analyzer.run_log import RunLog
from analyzer.views import quoted

INSTALL = "pip install 'training-flight-recorder[mlflow]'"
NOT_REPRESENTABLE = "flight_recorder.not_representable"
LONGEST_PARAMETER = 6000
"""Characters; MLflow refuses longer parameter values."""
BATCH = 1000
"""Metrics in one request; MLflow refuses more."""
STATUS = {"finished": "FINISHED", "failed": "FAILED", "live": "RUNNING", "killed": "KILLED"}

STEP_SERIES = (
    "train_loss",
    "learning_rate",
    "planned_learning_rate",
    "gradient_norm",
    "clipped_gradient_norm",
)
EVALUATION_SERIES = ("loss", "answer_loss")


@dataclass(frozen=True)
class Point:
    """One value of one series."""

    series: str
    step: int
    milliseconds: int  # since the epoch, UTC
    value: float


def export(
    run_log: RunLog, run: str, dashboard: Path, tracking_uri: str, experiment: str
) -> tuple[str, int, int]:
    """(MLflow run id, points written, points that MLflow can not hold). Raises AnalyzerError."""
    # Said before the import: MLflow reads these when it is loaded.
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
    os.environ["DO_NOT_TRACK"] = "true"
    try:
        from mlflow.entities import Metric, Param
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient
    except ImportError as error:
        raise AnalyzerError(f"MLflow is not installed ({error.name}): {INSTALL}") from None
    manifest = run_log.manifests[run]
    points = list(scalar_points(run_log, run))
    kept = [point for point in points if not math.isinf(point.value)]
    try:
        client = MlflowClient(tracking_uri=tracking_uri)
        found = client.get_experiment_by_name(experiment)
        experiment_id = found.experiment_id if found else client.create_experiment(experiment)
        tags = {"flight_recorder.run_id": manifest.run_id, NOT_REPRESENTABLE: not_representable(points)}
        mlflow_run = client.create_run(experiment_id, run_name=run, tags=tags).info.run_id
        parameters = [Param(name, value) for name, value in flat_parameters(asdict(manifest))]
        client.log_batch(mlflow_run, params=parameters)
        metrics = [Metric(p.series, p.value, p.milliseconds, p.step) for p in kept]
        for start in range(0, len(metrics), BATCH):
            client.log_batch(mlflow_run, metrics=metrics[start : start + BATCH])
        client.log_artifact(mlflow_run, str(dashboard))
        client.set_terminated(mlflow_run, STATUS[_status(run_log, run)])
    except MlflowException as error:
        raise AnalyzerError(f"{tracking_uri}: MLflow refused: {str(error).splitlines()[0]}") from None
    return mlflow_run, len(kept), len(points) - len(kept)


def scalar_points(run_log: RunLog, run: str) -> Iterator[Point]:
    """Every recorded point of the scalar series of a run, non-finite ones included, in order of steps.

    Of rank 0, as in all series: an MLflow metric has one value at a step.
    """
    columns = ", ".join(STEP_SERIES)
    steps = run_log.query(
        f"SELECT step, epoch_ms(wall_time) AS milliseconds, {columns} FROM steps "
        f"WHERE run = {quoted(run)} AND rank = 0 ORDER BY step"
    ).to_pylist()
    for row in steps:
        yield from _points(row, {name: name for name in STEP_SERIES}, row["milliseconds"] or 0)
    # An evaluation has no clock of its own: it happened when its step began.
    clock = {row["step"]: row["milliseconds"] or 0 for row in steps}
    last = max(clock.values(), default=0)
    evaluations = run_log.query(
        f"SELECT step, split, loss, answer_loss FROM evaluation_loss_by_step() WHERE run = {quoted(run)} "
        "ORDER BY split, step"
    ).to_pylist()
    for row in evaluations:
        names = {name: f"{row['split']}/{name}" for name in EVALUATION_SERIES}
        yield from _points(row, names, clock.get(row["step"], last))


def _points(row: Mapping[str, Any], names: Mapping[str, str], milliseconds: int) -> Iterator[Point]:
    for column, series in names.items():
        if row[column] is not None:  # null is "not measured", which is no point
            yield Point(series, row["step"], milliseconds, row[column])


def not_representable(points: list[Point]) -> str:
    """JSON: series -> value -> steps, of the infinite points."""
    report: dict[str, dict[str, list[int]]] = {}
    for point in points:
        if math.isinf(point.value):
            name = "Infinity" if point.value > 0 else "-Infinity"
            report.setdefault(point.series, {}).setdefault(name, []).append(point.step)
    return json.dumps(report)


def flat_parameters(document: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """(dotted name, text) of each leaf of the manifest that was declared."""
    for name, value in document.items():
        if isinstance(value, Mapping):
            yield from flat_parameters(value, f"{prefix}{name}.")
        elif value is not None and value != "":
            yield f"{prefix}{name}", str(value)[:LONGEST_PARAMETER]


def _status(run_log: RunLog, run: str) -> str:
    status: str = (
        run_log.query(f"SELECT status FROM runs WHERE run = {quoted(run)}").column("status")[0].as_py()
    )
    return status
