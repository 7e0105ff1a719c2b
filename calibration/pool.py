"""Cells over long-lived worker processes: controls before what is held against them, long ones first."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from calibration.cell import Cell
from calibration.matrix import ARCHITECTURES
from calibration.measurement import measure
from calibration.outcome import Outcome
from calibration.training import train_cell

THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
TRAINED_FILE = "trained-seconds"  # in a run directory whose training is complete
WORKER_OUTPUT = "workers.log"  # what recorder and loop say on stderr

REFERENCE_BATCH = 32
FIXED_BATCH_SHARE = 0.45  # of a step's time, whatever the batch; measured at 8 and at 128 examples
EVALUATION_SECONDS = 0.08  # all splits, measured
DIAGNOSIS_SECONDS = 1.3  # rules, bisection, harm and peers, measured


def estimated_seconds(cell: Cell) -> float:
    """Processor time of a cell on one core."""
    settings = dict(cell.settings)
    batch: float = settings.get("batch_size", REFERENCE_BATCH) / REFERENCE_BATCH
    step = ARCHITECTURES[cell.architecture].step_seconds
    step *= FIXED_BATCH_SHARE + (1 - FIXED_BATCH_SHARE) * batch
    evaluations: float = cell.steps / settings["evaluation_interval"]
    return cell.steps * step + evaluations * EVALUATION_SECONDS + DIAGNOSIS_SECONDS


def in_order(cells: Sequence[Cell]) -> list[Cell]:
    """Controls, then the others, long ones first: a long cell at the end would leave a worker idle."""
    return sorted(cells, key=lambda cell: (cell.kind != "control", -estimated_seconds(cell)))


def finish_cell(cell: Cell, directory: Path, keeps_runs: bool) -> Outcome:
    """Train and measure a cell in this process; a run that is kept from before is measured again."""
    out = directory / cell.identity()
    marker = out / TRAINED_FILE
    if not marker.exists():
        start = time.perf_counter()
        shutil.rmtree(out, ignore_errors=True)
        train_cell(cell, out)
        marker.write_text(f"{time.perf_counter() - start:.2f}")
    control = directory / cell.control if cell.control else None
    outcome = measure(cell, out, control, float(marker.read_text()))
    if cell.kind != "control" and not keeps_runs:
        shutil.rmtree(out)
    return outcome


def is_trained(directory: Path, identity: str) -> bool:
    """Its run directory is complete."""
    return (directory / identity / TRAINED_FILE).exists()


def start_worker(log: Path) -> None:
    """What the loop and the recorder say goes to a file: the terminal shows the progress."""
    sys.stderr = log.open("a", encoding="utf-8", buffering=1)
    threading.Thread(target=_leave_with_the_parent, daemon=True).start()


def _leave_with_the_parent() -> None:
    """A killed calibration must not leave two trainings behind."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def finished_cells(
    cells: Sequence[Cell], directory: Path, worker_count: int, *, keeps_runs: bool
) -> Iterator[tuple[Cell, Outcome | BaseException]]:
    """Each cell when it is done, with what stopped it if something did: one error must not end an hour's run.

    A cell waits for its control; directories go when nothing needs them.
    """
    for variable in THREAD_VARIABLES:
        os.environ[variable] = "1"  # spawned workers read it when they import NumPy
    queue = Queue(in_order(cells), directory)
    context = multiprocessing.get_context("spawn")
    log = directory / WORKER_OUTPUT
    with ProcessPoolExecutor(worker_count, context, start_worker, (log,)) as pool:
        running: dict[Future[Outcome], Cell] = {}
        while queue.waiting or running:
            while len(running) < worker_count and (cell := queue.next()) is not None:
                running[pool.submit(finish_cell, cell, directory, keeps_runs)] = cell
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                cell = running.pop(future)
                yield cell, future.exception() or future.result()
                queue.finish(cell, _remover(directory, keeps_runs))


def _remover(directory: Path, keeps_runs: bool) -> Callable[[str], None]:
    def remove(identity: str) -> None:
        if not keeps_runs:
            shutil.rmtree(directory / identity, ignore_errors=True)

    return remove


@dataclass
class Queue:
    """Cells that wait, in order, and the controls that are in use."""

    waiting: list[Cell]
    directory: Path

    def __post_init__(self) -> None:
        self.unfinished = {cell.identity(): cell for cell in self.waiting}

    def next(self) -> Cell | None:
        """The first cell whose control is trained, taken out; None when every one waits for a control."""
        for place, cell in enumerate(self.waiting):
            if cell.control not in self.unfinished:
                return self.waiting.pop(place)
        return None

    def finish(self, cell: Cell, remove: Callable[[str], None]) -> None:
        """Account for a finished cell; ``remove`` a control that no unfinished cell is held against."""
        del self.unfinished[cell.identity()]
        in_use = {other.control for other in self.unfinished.values()}
        for identity in {cell.control, cell.identity()} - {""} - in_use:
            remove(identity)
