"""The cells of both parts: faults, pairs, hard negatives, and the healthy controls they are paired with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from calibration.cell import Cell, Continuation, Part, settings_of
from calibration.negatives import NEGATIVES, Negative
from calibration.pairs import PAIRS
from experiments.code_path import HEALTHY
from experiments.faults import FAULTS, SEVERITIES, Fault
from experiments.faults.resumes import RESUME_FAULTS

SHORT_STEPS = 300
MEMORY_STEPS = 2000  # until examples are learned by heart
LONG_STEPS = {"overfitting": MEMORY_STEPS, "underfitting": 1000, "label_noise": MEMORY_STEPS}
"""What a fault needs to show: validation must have turned, a loss must have become flat."""
CONTROL_STEPS = (MEMORY_STEPS, 1000, SHORT_STEPS)
MID_RUN_STEP = 127  # inside an epoch, and off every cadence of the recorder
SECOND_RUN_FAULTS = ("nondeterminism",)

SHORT_PLAN = {"warmup_steps": 50, "evaluation_interval": 20}
"""A repeat comes with every tenth evaluation, so that a mid-run start meets one, at step 200; and hashes of
the live weights, which evaluations are compared with, are logged every tenth step."""
LONG_PLAN = {"warmup_steps": 100, "evaluation_interval": 50}  # the reference


@dataclass(frozen=True)
class Architecture:
    """Settings of the model under a name."""

    name: str
    settings: Mapping[str, Any]
    step_seconds: float  # measured, with the recorder, on one core of two; for the estimate only


REFERENCE = Architecture("64 wide, 2 layers, pre-norm", {}, 0.0135)
DEEPER = Architecture(
    "32 wide, 3 layers, pre-norm", {"width": 32, "layer_count": 3, "feed_forward_width": 128}, 0.0125
)
POST_NORM = Architecture(
    "48 wide, 2 layers, post-norm",
    {"width": 48, "feed_forward_width": 192, "norm_placement": "post"},
    0.011,
)
WIDER_DEEPER = Architecture(
    "72 wide, 3 layers, pre-norm", {"width": 72, "layer_count": 3, "feed_forward_width": 288}, 0.025
)
WIDER_POST_NORM = Architecture(
    "72 wide, 2 layers, post-norm",
    {"width": 72, "feed_forward_width": 288, "norm_placement": "post"},
    0.019,
)
ARCHITECTURES = {
    architecture.name: architecture
    for architecture in (REFERENCE, DEEPER, POST_NORM, WIDER_DEEPER, WIDER_POST_NORM)
}


@dataclass(frozen=True)
class Run:
    """A seed, its architectures, and whether its faults start mid-run where they can."""

    seed: int
    architecture: Architecture
    is_mid_run: bool
    able: Architecture  # to learn its examples by heart, right answers and wrong ones

    def architecture_for(self, steps: int) -> Architecture:
        """The able one for the longest: half the reference's width does not overfit in 2000 steps."""
        return self.able if steps == MEMORY_STEPS else self.architecture


RUNS: Mapping[Part, tuple[Run, ...]] = {
    "tuning": tuple(Run(seed, REFERENCE, seed == 2, REFERENCE) for seed in (0, 1, 2)),
    "judged": (
        Run(210, DEEPER, False, WIDER_DEEPER),
        Run(211, DEEPER, True, WIDER_DEEPER),
        Run(212, POST_NORM, False, WIDER_POST_NORM),
        Run(213, POST_NORM, True, WIDER_POST_NORM),
    ),
}
"""The judged seeds had never been trained when the thresholds were frozen."""


def cells(part: Part) -> tuple[Cell, ...]:
    """Every cell of a part; a control comes before the cells that are held against it."""
    found: dict[str, Cell] = {}
    for run in RUNS[part]:
        faulty = [*_fault_cells(part, run), *_pair_cells(part, run)]
        negatives = [_negative_cell(part, run, negative) for negative in NEGATIVES]
        for cell in [*_control_cells(part, run), *negatives, *faulty]:
            found.setdefault(cell.identity(), cell)
    return tuple(found.values())


def _plan(steps: int) -> Mapping[str, Any]:
    return SHORT_PLAN if steps == SHORT_STEPS else LONG_PLAN


def _control(part: Part, run: Run, steps: int, choices: Mapping[str, Any]) -> Cell:
    """The healthy run of that length, with the choices that are no fault by themselves."""
    name = "-".join(["control", *(f"{key}={value}" for key, value in sorted(choices.items()))])
    architecture = run.architecture_for(steps)
    settings = settings_of(_plan(steps), architecture.settings, choices, {"total_steps": steps})
    return Cell(part, "control", name, (), "", run.seed, architecture.name, None, steps, settings)


def _control_cells(part: Part, run: Run) -> Iterator[Cell]:
    for steps in CONTROL_STEPS:
        yield _control(part, run, steps, {})
    for fault in FAULTS:
        for severity in SEVERITIES:
            if choices := choices_of(fault, severity):
                yield _control(part, run, SHORT_STEPS, choices)


def choices_of(fault: Fault, severity: str) -> Mapping[str, Any]:
    """Settings that a fault needs to show and that are healthy without it; none where they are the fault."""
    value = fault.value(severity)
    return {} if fault.code_path(value) == HEALTHY else fault.settings(value)


def _negative_cell(part: Part, run: Run, negative: Negative) -> Cell:
    control = _control(part, run, negative.steps, {}) if negative.has_second_run else None
    planned = negative.steps // 2 if negative.continuation == "extended" else negative.steps
    architecture = run.architecture
    settings = settings_of(
        _plan(negative.steps),
        architecture.settings,
        negative.settings(architecture.settings),
        {"total_steps": planned},
    )
    return Cell(
        part=part,
        kind="negative",
        name=negative.name,
        faults=(),
        severity="",
        seed=run.seed,
        architecture=architecture.name,
        start=None,
        steps=negative.steps,
        settings=settings,
        continuation=negative.continuation,
        has_second_run=negative.has_second_run,
        control="" if control is None else control.identity(),
    )


def _fault_cells(part: Part, run: Run) -> Iterator[Cell]:
    for fault in FAULTS:
        for severity in SEVERITIES:
            is_mid_run = run.is_mid_run and not fault.starts_with_the_run
            yield _faulty_cell(part, run, (fault,), severity, MID_RUN_STEP if is_mid_run else None)


def _pair_cells(part: Part, run: Run) -> Iterator[Cell]:
    """Every pair at medium severity, from the same step on."""
    by_name = {fault.name: fault for fault in FAULTS}
    for names in PAIRS:
        faults = tuple(by_name[name] for name in names)
        can_start_later = not any(fault.starts_with_the_run for fault in faults)
        start = MID_RUN_STEP if run.is_mid_run and can_start_later else 0
        yield _faulty_cell(part, run, faults, "medium", start)


def _faulty_cell(part: Part, run: Run, faults: tuple[Fault, ...], severity: str, start: int | None) -> Cell:
    steps = max(LONG_STEPS.get(fault.name, SHORT_STEPS) for fault in faults)
    control = _control(part, run, steps, joint_choices(faults, severity))
    is_resumed = any(fault in RESUME_FAULTS for fault in faults)
    continuation: Continuation = "interrupted" if is_resumed else "none"
    chosen = [fault.settings(fault.value(severity)) for fault in faults]
    return Cell(
        part=part,
        kind="fault" if len(faults) == 1 else "pair",
        name="+".join(fault.name for fault in faults),
        faults=tuple(fault.name for fault in faults),
        severity=severity,
        seed=run.seed,
        architecture=control.architecture,
        start=start,
        steps=steps,
        settings=settings_of(dict(control.settings), *chosen),
        continuation=continuation,
        has_second_run=any(fault.name in SECOND_RUN_FAULTS for fault in faults),
        control=control.identity(),
    )


def joint_choices(faults: tuple[Fault, ...], severity: str) -> Mapping[str, Any]:
    """The healthy choices of all of them."""
    return dict(settings_of(*(choices_of(fault, severity) for fault in faults)))
