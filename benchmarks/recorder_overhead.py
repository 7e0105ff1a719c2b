"""What the recorder costs, in percent of a training step: attached against detached, in turn, in one process.

    .venv/bin/python -m benchmarks.recorder_overhead [--blocks 10]

Two copies of the 19-healthy training run step by step, one with a recorder; which goes first alternates.
A block is 100 pairs, one turn of every cadence. The cost of a block is the ratio of its two sums of seconds,
minus one; the interval is a t interval over blocks, so that it includes the machine's drift.
"""

from __future__ import annotations

import argparse
import math
import os
import tempfile
import time
from dataclasses import dataclass, fields
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # as the reference experiments do

import numpy as np
import pyarrow as pa

from analyzer.views import STUDENT_T_975
from experiments.batches import PackedExamples
from experiments.corpus import load_corpus
from experiments.memory import keep_freed_memory
from experiments.training import HEALTHY, TrainingConfig, TrainingState, training_step
from recorder import Cadence, Manifest, Recorder
from recorder.kernel import KERNEL_VARIABLE
from recorder.schema import LOG_DIRECTORY, stream_name

PAIRS_PER_BLOCK = 100
WARMUP_PAIRS = 20
BLOCK_COUNTS = (5, 10, 20, 30)  # within the table of Student's t

DEFAULT = Cadence()
EVERYTHING = Cadence(
    **{field.name: 1 for field in fields(Cadence)} | {"spectral_bounds": 100, "unit_window": 50}
)
"""Every signal at every step; the certificate of the spectral norm and the window keep their meaning."""


@dataclass(frozen=True)
class Cost:
    """Seconds of each pair, (pairs,) each, and what the recorder itself logged."""

    detached: np.ndarray
    attached: np.ndarray
    logged: np.ndarray

    def percent_by_block(self) -> np.ndarray:
        """(blocks,) cost in percent of the detached step."""
        blocks = len(self.detached) // PAIRS_PER_BLOCK
        sums = [seconds.reshape(blocks, -1).sum(axis=1) for seconds in (self.attached, self.detached)]
        return 100 * (sums[0] / sums[1] - 1)


def measure(cadence: Cadence, kernel: str, blocks: int) -> Cost:
    """Run warm-up and blocks of pairs with one cadence and one kernel."""
    os.environ[KERNEL_VARIABLE] = kernel
    corpus, config = load_corpus(), TrainingConfig()
    examples = PackedExamples(corpus.split("train"))
    pairs = WARMUP_PAIRS + blocks * PAIRS_PER_BLOCK
    plain, watched = TrainingState(config, corpus), TrainingState(config, corpus)
    seconds = np.zeros((2, pairs))
    with (
        tempfile.TemporaryDirectory() as directory,
        np.errstate(all="ignore"),
        Recorder(Path(directory) / "run", Manifest("overhead"), cadence=cadence) as recorder,
    ):
        recorder.attach(watched.model)

        def step_detached(step: int) -> None:
            training_step(plain, examples, config.clip_norm, HEALTHY)

        def step_attached(step: int) -> None:
            with recorder.step(step) as record:
                result = training_step(watched, examples, config.clip_norm, HEALTHY)
                record.log(**result.columns(result.learning_rate))

        for step in range(pairs):
            order = (step_detached, step_attached) if step % 2 else (step_attached, step_detached)
            for run in order:
                start = time.perf_counter()
                run(step)
                seconds[int(run is step_attached), step] = time.perf_counter() - start
        recorder.close()
        log = Path(directory) / "run" / LOG_DIRECTORY / stream_name("steps", 0, 0)
        logged = pa.ipc.open_stream(log.read_bytes()).read_all()["recorder_seconds"].to_numpy()
    return Cost(*(values[WARMUP_PAIRS:] for values in (*seconds, logged)))


def describe(name: str, cost: Cost) -> str:
    """One row of the table."""
    by_block = cost.percent_by_block()
    half_width = STUDENT_T_975[len(by_block) - 2] * by_block.std(ddof=1) / math.sqrt(len(by_block))
    milliseconds = [1e3 * np.percentile(s, q) for s in (cost.detached, cost.attached) for q in (50, 99)]
    logged = 100 * cost.logged.sum() / cost.detached.sum()
    low, high = by_block.mean() - half_width, by_block.mean() + half_width
    return (
        f"{name:<32} {by_block.mean():6.2f}  {low:6.2f} to {high:5.2f}  {logged:6.2f}"
        f"  {milliseconds[0]:7.2f} {milliseconds[2]:7.2f}  {milliseconds[1]:7.2f} {milliseconds[3]:7.2f}"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, default=10, choices=BLOCK_COUNTS)
    blocks = parser.parse_args().blocks
    keep_freed_memory()  # as the reference experiments do
    print(f"cost in % of the detached step, {blocks} blocks of {PAIRS_PER_BLOCK} pairs")
    print(f"{'':<32} {'mean':>6}  {'95% interval':^15}  {'logged':>6}  {'median ms':^15}  {'p99 ms':^15}")
    for cadence_name, cadence in (("default cadence", DEFAULT), ("everything at every step", EVERYTHING)):
        for kernel in ("compiled", "numpy"):
            cost = measure(cadence, kernel, blocks)
            print(describe(f"{cadence_name}, {kernel}", cost), flush=True)


if __name__ == "__main__":
    main()
