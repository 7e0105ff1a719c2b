"""What a deliberate fault is: one change to the code path, in three severities."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from experiments.code_path import HEALTHY, CodePath
from experiments.errors import UsageError

SEVERITIES = ("mild", "medium", "severe")

Settings = Mapping[str, Any]


def healthy_code_path(_: Any) -> CodePath:
    """No part of the loop is replaced."""
    return HEALTHY


def no_settings(_: Any) -> Settings:
    """The configuration stays what it was."""
    return {}


@dataclass(frozen=True)
class Fault:
    """One change to what the loop runs, named like the diagnosis that must find it.

    ``code_path`` makes the changed loop for the value of a severity, anew for each run, so that a part may
    keep state of its own. ``settings`` is what the configuration must be for the fault: the choice itself
    where a choice is the fault (overfitting, underfitting), or what the error needs to have an effect. The
    manifest shows it.
    """

    name: str
    title: str
    number: int  # in the catalogue of failures
    parameter: str  # what the three values are, in words
    mild: Any
    medium: Any
    severe: Any
    evidence: str  # what it must leave in the log
    code_path: Callable[[Any], CodePath] = healthy_code_path
    settings: Callable[[Any], Settings] = no_settings
    first_step: int = 0
    duration_steps: int | None = None  # None: to the end
    starts_with_the_run: bool = False  # it can not begin later
    diagnosis: str = ""  # when another fault's diagnosis finds this one

    def value(self, severity: str) -> Any:
        """The parameter's value. Raises UsageError when there is no such severity."""
        if severity not in SEVERITIES:
            raise UsageError(f"severity {severity}: expected one of {', '.join(SEVERITIES)}")
        return {"mild": self.mild, "medium": self.medium, "severe": self.severe}[severity]

    def found_by(self) -> str:
        """Name of the diagnosis that must fire."""
        return self.diagnosis or self.name

    def active_path(self, severity: str, first_step: int | None = None) -> CodePath:
        """The changed loop, active from ``first_step``; None: from the fault's own first step.

        Raises UsageError for a later start of a fault that can only start with the run.
        """
        start = self.first_step if first_step is None else first_step
        if start < 0 or (start > 0 and self.starts_with_the_run):
            expected = "0: this fault starts with the run" if self.starts_with_the_run else "0 or more"
            raise UsageError(f"{self.name}: fault start {start}; expected {expected}")
        end = None if self.duration_steps is None else start + self.duration_steps
        return dataclasses.replace(self.code_path(self.value(severity)), first_step=start, end_step=end)
