"""Hard negatives: runs that look unlike the reference and are healthy by construction."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from calibration.cell import Continuation

OTHER_PLACEMENT = {"pre": "post", "post": "pre"}


def always(**settings: Any) -> Callable[[Mapping[str, Any]], Mapping[str, Any]]:
    """The same settings, whatever the architecture has."""
    return lambda architecture: settings


def other_norm_placement(architecture: Mapping[str, Any]) -> Mapping[str, Any]:
    """Norms where the architecture does not have them."""
    return {"norm_placement": OTHER_PLACEMENT[architecture.get("norm_placement", "pre")]}


@dataclass(frozen=True)
class Negative:
    """A declared choice that must raise no alarm. ``settings`` takes those of the architecture."""

    name: str
    settings: Callable[[Mapping[str, Any]], Mapping[str, Any]]
    steps: int
    continuation: Continuation = "none"
    has_second_run: bool = False


LONG = 1200
NEGATIVES = (
    # With too little dropout a long run overfits in earnest: with 0.05 validation turns at step 1400 of 2000.
    Negative("dropout_low", always(dropout=0.1), 1000),
    Negative("dropout_high", always(dropout=0.4), LONG),
    Negative("gelu", always(activation="gelu"), LONG),
    Negative("other_norm_placement", other_norm_placement, LONG),
    Negative("clip_off", always(clip_norm=float("inf")), LONG),
    Negative("peak_rate_low", always(peak_learning_rate=1e-3, final_learning_rate=1e-4), LONG),
    Negative("peak_rate_high", always(peak_learning_rate=1e-2, final_learning_rate=1e-3), LONG),
    Negative("batch_small", always(batch_size=8), LONG),
    Negative("batch_large", always(batch_size=128), 400),  # a step costs four times as much
    Negative("freeze_declared", always(frozen_modules="blocks.0"), LONG),
    Negative("constant_schedule_declared", always(schedule="constant"), 1000),
    Negative("weight_decay_off", always(weight_decay=0.0), LONG),
    Negative("warmup_off", always(warmup_steps=0), LONG),
    Negative("accumulation_right", always(accumulation_count=4), 1000),
    Negative("sum_declared", always(loss_reduction="sum"), LONG),
    Negative("sequence_mean_declared", always(loss_reduction="sequence_mean"), LONG),
    Negative("cosine_tail", always(), LONG, continuation="extended"),
    Negative("resume_right", always(), LONG, continuation="interrupted"),
    Negative("repeated", always(), 1000, has_second_run=True),
)
