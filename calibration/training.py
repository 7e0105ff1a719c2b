"""Trains a cell: one run directory, as any run of the experiments leaves it."""

from __future__ import annotations

from pathlib import Path

from calibration import pairs
from calibration.cell import RESUMED_STEP, Cell
from experiments.code_path import HEALTHY, CodePath
from experiments.corpus import load_corpus
from experiments.experiment import Experiment, clear_run_directory, configure, run_manifest
from experiments.resume import plan_resume, run_resume
from experiments.training import Progress, train
from recorder import Recorder

INTERRUPTED_AFTER_STEPS = 10  # updates past the checkpoint: a killed run loses some work


class Interrupted(Exception):
    """Ends a training in the middle, as a scheduler or a crash does."""


def train_cell(cell: Cell, out: Path) -> None:
    """Train and record it into ``out``, emptied first; resumed or extended where the cell says so."""
    clear_run_directory(out, overwrite=True)
    faulty = pairs.code_path(cell.faults, cell.severity, cell.start)
    if cell.continuation == "none":
        _train(cell, out, faulty)
    elif cell.continuation == "extended":
        _train(cell, out, HEALTHY, has_checkpoints=True)
        _continue(cell, out, faulty)
    else:
        _interrupt(cell, out)
        _continue(cell, out, faulty)


def experiment_of(cell: Cell) -> Experiment:
    """The cell as an experiment; its name is that of the control too, so that nothing tells them apart."""
    checkpoints = {} if cell.continuation == "none" else {"checkpoint_interval": RESUMED_STEP}
    return Experiment(
        name="calibration", title=cell.name, purpose="", config=dict(cell.settings) | checkpoints
    )


def _train(
    cell: Cell,
    out: Path,
    code_path: CodePath,
    *,
    has_checkpoints: bool = False,
    progress: Progress | None = None,
) -> None:
    experiment = experiment_of(cell)
    config = configure(experiment, cell.seed, ())
    corpus = load_corpus(config.direction, config.split_seed)
    with Recorder(out, run_manifest(experiment, config, corpus)) as recorder:
        train(config, corpus, recorder, code_path, progress, out if has_checkpoints else None)


def _interrupt(cell: Cell, out: Path) -> None:
    """Train until some steps after the first checkpoint."""

    def stop(finished_steps: int, loss: float, learning_rate: float) -> None:
        if finished_steps == RESUMED_STEP + INTERRUPTED_AFTER_STEPS:
            raise Interrupted

    try:
        _train(cell, out, HEALTHY, has_checkpoints=True, progress=stop)
    except Interrupted:
        return
    raise AssertionError(f"{cell.identity()}: ended before it could be interrupted")


def _continue(cell: Cell, out: Path, code_path: CodePath) -> None:
    experiment = experiment_of(cell)
    plan = plan_resume(experiment, out, cell.seed, (f"total_steps={cell.steps}",))
    run_resume(experiment, plan, out, code_path)
