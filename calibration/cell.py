"""One cell of the matrix: a training run whose truth is known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from experiments.faults import fault_named

Part = Literal["tuning", "judged"]
Kind = Literal["control", "negative", "fault", "pair"]
Continuation = Literal["none", "interrupted", "extended"]
"""How a run continues: not at all, from a checkpoint after an interruption, or past its planned end."""

RESUMED_STEP = 150  # of an interrupted run; inside an epoch, of which there are 14 steps

Settings = tuple[tuple[str, Any], ...]
"""Settings of the training by name, sorted, so that equal ones compare equal."""


def settings_of(*mappings: Mapping[str, Any]) -> Settings:
    """The mappings merged, later ones first in authority."""
    merged: dict[str, Any] = {}
    for mapping in mappings:
        merged |= mapping
    return tuple(sorted(merged.items()))


@dataclass(frozen=True)
class Cell:
    """What is trained, and what is true of it. Equal identities are equal runs."""

    part: Part
    kind: Kind
    name: str  # of the fault, of both of a pair joined by "+", of the negative, or "control"
    faults: tuple[str, ...]  # none: healthy
    severity: str  # "" when healthy
    seed: int
    architecture: str
    start: int | None  # step that the fault starts at; None: its own, or healthy
    steps: int
    settings: Settings  # what differs from the defaults of TrainingConfig
    continuation: Continuation = "none"
    has_second_run: bool = False  # diagnosed beside its control, which has the same seed and configuration
    control: str = ""  # identity of the paired healthy run; "" has none

    def identity(self) -> str:
        """Name of the cell, of its run directory too."""
        words = [self.name, self.severity, "" if self.start is None else f"from{self.start}"]
        return "-".join([*(word for word in words if word), f"{self.steps}steps", f"seed{self.seed}"])

    def expected(self) -> tuple[str, ...]:
        """Names of the rules that must be named as causes; none when healthy."""
        return tuple(fault_named(name).found_by() for name in self.faults)

    def fault_start(self) -> int:
        """First step of the fault, or of the later one of a pair; faults of a resume begin with it."""
        if self.start is not None:
            return self.start
        if self.continuation == "interrupted":
            return RESUMED_STEP
        return max((fault_named(name).first_step for name in self.faults), default=0)
