"""Deliberate faults: each changes one thing in the code path, and nothing in the manifest."""

from __future__ import annotations

from experiments.code_path import HEALTHY, CodePath
from experiments.errors import UsageError
from experiments.faults.evaluations import EVALUATION_FAULTS
from experiments.faults.examples import EXAMPLE_FAULTS
from experiments.faults.fault import SEVERITIES, Fault
from experiments.faults.gradients import GRADIENT_FAULTS
from experiments.faults.masks import MASK_FAULTS
from experiments.faults.resumes import RESUME_FAULTS
from experiments.faults.schedules import SCHEDULE_FAULTS
from experiments.faults.settings import SETTING_FAULTS
from experiments.faults.weights import WEIGHT_FAULTS

FAULTS: tuple[Fault, ...] = (
    *WEIGHT_FAULTS,
    *SCHEDULE_FAULTS,
    *MASK_FAULTS,
    *GRADIENT_FAULTS,
    *EXAMPLE_FAULTS,
    *SETTING_FAULTS,
    *RESUME_FAULTS,
    *EVALUATION_FAULTS,
)


def fault_named(name: str) -> Fault:
    """The fault of that name. Raises UsageError when there is none."""
    for fault in FAULTS:
        if fault.name == name:
            return fault
    raise UsageError(f"fault {name}: no such fault; choose one of {', '.join(f.name for f in FAULTS)}")


def code_path_of(fault_name: str | None, severity: str = "medium", first_step: int | None = None) -> CodePath:
    """A fresh code path with that fault; the healthy one when there is no name. See ``Fault.active_path``."""
    return HEALTHY if fault_name is None else fault_named(fault_name).active_path(severity, first_step)


__all__ = ["FAULTS", "SEVERITIES", "Fault", "code_path_of", "fault_named"]
