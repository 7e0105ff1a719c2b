"""A run against its paired control: the harm that one run alone cannot show."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from analyzer.diagnoses.declaration import Assessment
from analyzer.errors import AnalyzerError
from analyzer.run_log import open_runs
from analyzer.views import quoted


@dataclass(frozen=True)
class ControlGap:
    """How much worse a run does than its control on the primary split, in nats/token, with a 95% interval."""

    control: str
    step: int
    split: str
    gap: float | None  # over examples whose loss is finite; None without any
    lower: float | None  # None with one cluster
    upper: float | None
    nonfinite_count: int  # examples whose loss is not finite in this run

    def is_worse(self) -> bool:
        """Worse beyond the interval, or not finite where the control is."""
        return self.nonfinite_count > 0 or (self.lower is not None and self.lower > 0)


def control_gap(path: Path, control: Path) -> ControlGap:
    """The comparison at the last common evaluation. Raises AnalyzerError when there is none."""
    with open_runs([path, control]) as run_log:
        if len(run_log.paths) < 2:
            raise AnalyzerError(f"{control}: is the run itself: name another run as its control")
        run, other = run_log.paths
        columns = ", ".join(field.name for field in dataclasses.fields(ControlGap))
        sql = f"SELECT {columns} FROM control_gap(control_name := {quoted(other)}) WHERE run = {quoted(run)}"
        rows = run_log.query(sql).to_pylist()
    if not rows:
        raise AnalyzerError(
            f"{control}: no common evaluation of the primary split with {path}: "
            "give a control that logs example_losses of the same examples at the same steps"
        )
    return ControlGap(**rows[0])


def raised(assessments: Sequence[Assessment], gap: ControlGap) -> tuple[Assessment, ...]:
    """The assessments, fired ones of S1 raised to S2 when the run is worse than its control."""
    return tuple(
        dataclasses.replace(a, diagnosis=dataclasses.replace(a.diagnosis, severity="S2"))
        if gap.is_worse() and a.outcome == "fired" and a.diagnosis.severity == "S1"
        else a
        for a in assessments
    )
