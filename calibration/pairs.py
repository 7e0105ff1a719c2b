"""Two faults in one run: their code paths composed, part by part."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from experiments.code_path import HEALTHY, CodePath
from experiments.faults import fault_named
from experiments.training import TrainingState

PAIRS = (
    ("schedule_not_followed", "causal_mask_absent"),
    ("gradients_not_zeroed", "train_validation_leak"),
    ("frozen_layer", "padding_in_loss"),
    ("loss_summed_not_averaged", "causal_mask_off_by_one"),
    ("data_not_shuffled", "stale_evaluation_weights"),
    ("warmup_missing", "evaluation_in_training_mode"),
    ("dead_units", "data_not_shuffled"),
    ("attention_entropy_collapse", "padding_in_loss"),
    ("weight_decay_too_strong", "train_validation_leak"),
    ("learning_rate_too_low", "evaluation_in_training_mode"),
    ("detached_branch", "schedule_not_followed"),
    ("initialisation_too_large", "stale_evaluation_weights"),
)
"""Faults of different parts of the loop, neither of which explains the other."""

STEPS_ACTIVE = ("first_step", "end_step")


def composed(one: CodePath, other: CodePath) -> CodePath:
    """Every part that either path replaces. State is altered by both, one after the other.

    Raises ValueError when both replace another part, or are active in different steps.
    """
    if any(getattr(one, name) != getattr(other, name) for name in STEPS_ACTIVE):
        raise ValueError("the two faults are active in different steps")
    parts = replaced(one)
    for name, part in replaced(other).items():
        if name in parts and name != "alter_state":
            raise ValueError(f"both faults replace {name}")
        parts[name] = one_after_the_other(parts[name], part) if name in parts else part
    return dataclasses.replace(one, **parts)


def replaced(path: CodePath) -> dict[str, Any]:
    """The parts of the loop that are not the healthy ones."""
    names = [field.name for field in dataclasses.fields(CodePath) if field.name not in STEPS_ACTIVE]
    return {name: getattr(path, name) for name in names if getattr(path, name) != getattr(HEALTHY, name)}


def one_after_the_other(
    first: Callable[[TrainingState], None], second: Callable[[TrainingState], None]
) -> Callable[[TrainingState], None]:
    """Both alterations."""

    def alter(run: TrainingState) -> None:
        first(run)
        second(run)

    return alter


def code_path(faults: tuple[str, ...], severity: str, start: int | None) -> CodePath:
    """A fresh path with one fault or two, or the healthy one."""
    if not faults:
        return HEALTHY
    paths = [fault_named(name).active_path(severity, start) for name in faults]
    return paths[0] if len(paths) == 1 else composed(*paths)
