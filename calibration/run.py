"""Runs a part of the matrix: resumable, parallel, with the time that is left."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from calibration.cell import Cell, Part
from calibration.matrix import cells
from calibration.outcome import Outcome
from calibration.pool import estimated_seconds, finished_cells, is_trained
from calibration.results import append_line, lines_file, read_lines
from calibration.rules_hash import rules_hash


def run_part(
    part: Part,
    directory: Path,
    worker_count: int,
    *,
    only: Sequence[str] = (),
    seeds: Sequence[int] = (),
    keeps_runs: bool = False,
) -> int:
    """Finish every cell of the part that has no line yet; the lines of other rules are set aside.

    only: names of faults, pairs or negatives; seeds: numbers. None of them: all.
    Returns the number of cells that an error stopped: they have no line, so the next run tries them again.
    """
    directory.mkdir(parents=True, exist_ok=True)
    lines = lines_file(directory, part)
    set_aside_other_rules(lines)
    chosen = chosen_cells(cells(part), only, seeds)
    pending = pending_cells(chosen, read_lines(lines), directory)
    total = sum(map(estimated_seconds, pending)) / worker_count
    say(f"{part}: {len(pending)} of {len(chosen)} cells to do, about {total / 60:.0f} min; {lines}")
    progress, failed = Progress(pending, worker_count), 0
    for cell, outcome in finished_cells(pending, directory, worker_count, keeps_runs=keeps_runs):
        if isinstance(outcome, BaseException):
            failed += 1
            said = f"failed: {type(outcome).__name__}: {outcome}"
        else:
            append_line(lines, outcome)
            said = ", ".join(outcome.causes()) or "clear"
        say(f"{progress.line(cell)} {said}")
    return failed


def set_aside_other_rules(lines: Path) -> None:
    """Rename the lines that other rules were measured with; a part has the results of one set of rules."""
    others = {outcome.rules_hash for outcome in read_lines(lines).values()} - {rules_hash()}
    if others:
        aside = lines.with_name(f"{lines.stem}-{'-'.join(sorted(others))}.jsonl")
        lines.rename(aside)
        say(f"{lines}: measured other rules: now {aside}, starting anew")


def chosen_cells(all_cells: Sequence[Cell], only: Sequence[str], seeds: Sequence[int]) -> list[Cell]:
    """The cells of these names and seeds, and the controls that they are held against."""
    named = [
        cell
        for cell in all_cells
        if (not only or cell.name in only or any(fault in only for fault in cell.faults))
        and (not seeds or cell.seed in seeds)
    ]
    needed = {cell.identity() for cell in named} | {cell.control for cell in named}
    return [cell for cell in all_cells if cell.identity() in needed]


def pending_cells(chosen: Sequence[Cell], done: dict[str, Outcome], directory: Path) -> list[Cell]:
    """What has no line, and controls whose directory is gone while something is still held against them."""
    missing = [cell for cell in chosen if cell.identity() not in done]
    needed = {cell.control for cell in missing}
    return [
        cell
        for cell in chosen
        if cell.identity() not in done
        or (cell.identity() in needed and not is_trained(directory, cell.identity()))
    ]


class Progress:
    """How much is done, and how long the rest takes at the pace so far."""

    def __init__(self, pending: Sequence[Cell], worker_count: int) -> None:
        self.count = len(pending)
        self.finished_count = 0
        self.left = sum(map(estimated_seconds, pending)) / worker_count
        self.worker_count = worker_count
        self.finished = 0.0
        self.start = time.monotonic()

    def line(self, cell: Cell) -> str:
        """Account for a finished cell: its name and the time left."""
        share = estimated_seconds(cell) / self.worker_count
        self.finished_count += 1
        self.finished += share
        self.left = max(0.0, self.left - share)
        pace = (time.monotonic() - self.start) / self.finished
        minutes = pace * self.left / 60
        return f"[{self.finished_count}/{self.count}] {minutes:.1f} min left  {cell.identity()}:"


def say(line: str) -> None:
    """Progress goes to stderr, results to files."""
    print(line, file=sys.stderr, flush=True)
