"""What a killed run gives back: SIGKILL at random moments, also inside a flush, and every row counted.

    python -m benchmarks.crash [--kills 200] [--seed 0] [--jobs 2]

Each run lives four lives: it is killed, its log is read with the analyzer, and it goes on from a few steps
earlier, as after a checkpoint. Broken promises are listed, and make the exit code 1. Held are:

- the run can be read at once, and is told as killed;
- every step that was recorded more than a second before the kill is there, with all its tensors, also when
  one step takes four seconds;
- every event whose call had returned is there, however young;
- no step is missing in between, none is there twice, no row holds another step's numbers, or has lost a NaN.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from analyzer.errors import AnalyzerError
from analyzer.run_log import RunLog, open_runs
from benchmarks.crash_victim import (
    FLUSH_BEGUN,
    FLUSHED,
    MARK,
    NAN_STEPS,
    NOTE,
    NOTED,
    RECORDED,
    SCENARIOS,
    SIDE,
    TENSOR_COUNT,
    TOKEN_COUNT,
    Scenario,
)
from recorder.schema import MANIFEST_FILE

PROMISED_SECONDS = 1.0
LIVES = 4
LATEST_KILL_SECONDS = 2.5  # after the birth: five times the recorder's own flush interval
REWOUND_STEPS = 5  # at most so many are recorded again after a resume
FLOAT32_ROUNDING = 1e-5  # of a norm: 256 products and sums of float32, each within 6e-8
ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Kill:
    """One death, and what was found afterwards."""

    scenario: str
    inside_flush: bool
    recorded_count: int  # steps that the victim had recorded in this life
    lost_count: int
    oldest_lost_seconds: float  # age of the oldest lost step when it was killed; 0 without one
    is_cut: bool  # a torn batch, or torn header, was left at the end of a file
    next_step: int  # first step that the log does not hold
    broken: tuple[str, ...]  # promises


def kill_run(run: Path, seed: int, lives: int = LIVES) -> list[Kill]:
    """Let a run die ``lives`` times at moments that the seed draws; the scenarios take turns."""
    draw = random.Random(seed)
    kills: list[Kill] = []
    first_step = 0
    for life in range(lives):
        scenario = SCENARIOS[(seed + life) % len(SCENARIOS)]
        segment = len(list(run.glob("log/events-r0-s*.arrows")))  # the one that this life will claim
        marks, killed_seconds = live_and_die(
            run, first_step, scenario, draw.uniform(0.0, LATEST_KILL_SECONDS)
        )
        kills.append(examine(run, segment, first_step, scenario, marks, killed_seconds))
        first_step = max(0, kills[-1].next_step - draw.randint(0, REWOUND_STEPS))
    return kills


def live_and_die(run: Path, first_step: int, scenario: Scenario, delay: float) -> tuple[np.ndarray, float]:
    """(marks that the victim left, monotonic seconds just before SIGKILL ``delay`` seconds after its birth).

    Raises RuntimeError when the victim ends by itself.
    """
    witness = run.with_suffix(".witness")
    module = "benchmarks.crash_victim"
    command = [sys.executable, "-m", module, str(run), str(witness), str(first_step), scenario.name]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as victim:
        assert victim.stdout is not None and victim.stderr is not None
        victim.stdout.readline()
        time.sleep(delay)
        if scenario.flush_steps:
            wait_for_flush(witness)
        killed_seconds = time.monotonic()
        victim.send_signal(signal.SIGKILL)
        last_words = victim.stderr.read()
    if victim.returncode != -signal.SIGKILL or last_words:
        raise RuntimeError(f"{run}: the victim did not live until it was killed: {last_words}")
    content = witness.read_bytes()
    return np.frombuffer(content, MARK, count=len(content) // MARK.itemsize), killed_seconds


def wait_for_flush(witness: Path) -> None:
    """Return while the victim is inside a flush; gives up after a second."""
    deadline = time.monotonic() + 1.0
    with witness.open("rb", buffering=0) as file:
        while time.monotonic() < deadline:
            end = file.seek(0, os.SEEK_END) // MARK.itemsize * MARK.itemsize
            file.seek(max(0, end - MARK.itemsize))
            last = np.frombuffer(file.read(MARK.itemsize), MARK)
            if last.size and last["kind"][0] == FLUSH_BEGUN:
                return


def examine(
    run: Path, segment: int, first_step: int, scenario: Scenario, marks: np.ndarray, killed_seconds: float
) -> Kill:
    """Read the log of a run that was killed, and hold its newest segment against the marks."""
    begun, ended = (int((marks["kind"] == kind).sum()) for kind in (FLUSH_BEGUN, FLUSHED))
    recorded = marks[marks["kind"] == RECORDED]
    broken: list[str] = []
    steps: list[int] = []
    is_cut = False
    if (run / MANIFEST_FILE).exists():
        try:
            with open_runs([run]) as run_log:
                steps = segment_steps(run_log, segment)
                broken = broken_promises(run_log, segment, first_step, marks, killed_seconds)
                is_cut = any(
                    ": cut: " in warning and f"-s{segment}." in warning for warning in run_log.warnings
                )
        except AnalyzerError as error:
            broken = [f"unreadable: {error}"]
    elif recorded.size:
        broken = ["steps were recorded and there is no manifest"]
    lost = recorded[~np.isin(recorded["step"], steps)]
    return Kill(
        scenario.name,
        begun > ended,
        recorded.size,
        lost.size,
        float(killed_seconds - lost["seconds"].min()) if lost.size else 0.0,
        is_cut,
        max(steps, default=first_step - 1) + 1,
        tuple(broken),
    )


def broken_promises(
    run_log: RunLog, segment: int, first_step: int, marks: np.ndarray, killed_seconds: float
) -> list[str]:
    """One line for each promise that the log of a killed run does not keep."""
    broken = [*_misfits(run_log, segment)]
    steps = segment_steps(run_log, segment)
    tensors = run_log.query(
        f"SELECT step, count(*) AS n, count(DISTINCT tensor_id) AS n_distinct FROM tensors_all "
        f"WHERE segment = {segment} AND kind = 'gradient' GROUP BY step ORDER BY step"
    )
    tensor_steps = tensors["step"].to_pylist()
    for table, found in (("steps", steps), ("tensors", tensor_steps)):
        if found != list(range(first_step, first_step + len(found))):
            broken.append(f"{table}: steps are missing in between, or twice")
    whole = [TENSOR_COUNT] * len(tensor_steps)
    if tensors["n"].to_pylist() != whole or tensors["n_distinct"].to_pylist() != whole:
        broken.append("tensors: not every step has each tensor once")
    promised = marks[(marks["kind"] == RECORDED) & (marks["seconds"] < killed_seconds - PROMISED_SECONDS)]
    for table, found in (("steps", steps), ("tensors", tensor_steps)):
        if missing := sorted(set(promised["step"].tolist()) - set(found)):
            broken.append(f"{table}: older than a second and lost: {missing[0]} to {missing[-1]}")
    noted = [str(step) for step in marks["step"][marks["kind"] == NOTED]]
    notes = _column(run_log, f"SELECT message FROM events_all WHERE segment = {segment} AND kind = '{NOTE}'")
    if notes[: len(noted)] != noted or len(notes) > len(noted) + 1:  # the last may be there, not yet marked
        broken.append(f"events: logged {noted}, found {notes}")
    current = _column(run_log, "SELECT step FROM steps ORDER BY step")
    if current != list(range(len(current))):
        broken.append("steps: the current rows of all segments are not 0, 1, 2, ... once each")
    if (status := _column(run_log, "SELECT status FROM runs")) != ["killed"]:
        broken.append(f"told as {status} and not as killed")
    return broken


def segment_steps(run_log: RunLog, segment: int) -> list[int]:
    """Steps of a segment in the order of their rows in the file."""
    return [
        step
        for loaded in run_log.streams
        if (loaded.stream.table.name, loaded.stream.segment) == ("steps", segment)
        for step in loaded.stream.rows["step"].to_pylist()
    ]


def _misfits(run_log: RunLog, segment: int) -> Iterable[str]:
    """Rows whose numbers are not those of their step."""
    wrong_steps = _column(
        run_log,
        f"SELECT step FROM steps_all WHERE segment = {segment} AND (loss_sum, loss_token_count, train_loss) "
        f"IS DISTINCT FROM (step, {TOKEN_COUNT}, step / {TOKEN_COUNT})",
    )
    wrong_tensors = _column(
        run_log,
        f"SELECT step FROM tensors_all WHERE segment = {segment} AND kind = 'gradient' AND NOT coalesce("
        f"min = step AND max = step AND element_count = {SIDE * SIDE} AND has_gradient "
        f"AND nan_count = CAST(tensor_id = 0 AND step % {NAN_STEPS} = 0 AS INTEGER) "
        f"AND abs(l2_norm / sqrt(element_count - nan_count) - step) <= {FLOAT32_ROUNDING} * step, false)",
    )
    for table, wrong in (("steps", wrong_steps), ("tensors", wrong_tensors)):
        if wrong:
            yield f"{table}: {len(wrong)} rows hold numbers of another step, first that of step {wrong[0]}"


def _column(run_log: RunLog, sql: str) -> list[object]:
    values: list[object] = run_log.query(sql).column(0).to_pylist()
    return values


def table(kills: Sequence[Kill]) -> str:
    """The summary, one line per scenario."""
    names = [*(scenario.name for scenario in SCENARIOS), "all"]
    lines = [_line(name, [kill for kill in kills if name in (kill.scenario, "all")]) for name in names]
    heads = ("kills", "in a flush", "file cut", "steps recorded", "lost", "oldest lost, s", "broken promises")
    return "\n".join([" " * 10 + "".join(f"{head:>17}" for head in heads), *lines])


def _line(name: str, kills: Sequence[Kill]) -> str:
    in_flush, cut = sum(kill.inside_flush for kill in kills), sum(kill.is_cut for kill in kills)
    recorded, lost = sum(kill.recorded_count for kill in kills), sum(kill.lost_count for kill in kills)
    oldest = max((kill.oldest_lost_seconds for kill in kills), default=0.0)
    broken = sum(len(kill.broken) for kill in kills)
    return f"{name:<10}{len(kills):17}{in_flush:17}{cut:17}{recorded:17}{lost:17}{oldest:17.2f}{broken:17}"


def main(given: Sequence[str] | None = None) -> int:
    """Kill, print the table, and say what was broken; exit code 1 when anything was."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=200, help=f"a multiple of {LIVES}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    arguments = parser.parse_args(given)
    if arguments.kills < LIVES or arguments.kills % LIVES:
        parser.error(f"--kills {arguments.kills}: expected a multiple of {LIVES}, the lives of a run")
    seeds = range(arguments.seed, arguments.seed + arguments.kills // LIVES)
    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(arguments.jobs) as pool:
        runs = [Path(directory) / f"run-{seed}" for seed in seeds]
        kills_by_seed = dict(zip(seeds, pool.map(kill_run, runs, seeds), strict=True))
    kills = [kill for killed in kills_by_seed.values() for kill in killed]
    print(table(kills))
    for seed, killed in kills_by_seed.items():
        for life, kill in enumerate(killed):
            for line in kill.broken:
                print(f"seed {seed}, life {life}, {kill.scenario}: {line}")
    return int(any(kill.broken for kill in kills))


if __name__ == "__main__":
    sys.exit(main())
