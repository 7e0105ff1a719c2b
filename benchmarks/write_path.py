"""What it takes to get rows onto disk in a real loop, each number beside its limit.

    python -m benchmarks.write_path [--steps 1500] [--memory-steps 100000]

The loop watches 200 tensors, gives a gradient for each at every step, and works between the recorder's
calls: arrays that empty the caches, and plain Python that needs the interpreter. Steps with and without a
recorder take turns. The write path alone, without statistics, is measured as benchmarks.peers does it.

A stall is stated as a percentile. A maximum on a shared machine says how long another guest ran: the loop
without a recorder has one as well, and it is printed beside. What the flusher thread takes from a step, the
recorder's own calls do not show; whole steps do.

Memory is measured in a process of its own, whose loop has no work but the recorder's.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # as the reference experiments do

import numpy as np

TENSOR_COUNT = 200
ELEMENT_COUNT = 64  # small: the subject is rows, not the arrays behind them
STATISTIC_COUNT = 10  # of a tensor: seven of the finite elements and three counts of the others
WORK_PASSES = 3  # over 16 MB, which is more than the caches hold
PYTHON_LOOPS = 20_000  # about a millisecond of plain Python

MOST_MICROSECONDS = 0.05  # per scalar
MOST_BYTES = 4.9  # per statistic
MOST_STALL_MILLISECONDS = 1.0
MOST_MEGABYTES = 8.0
MOST_GROWTH_MEGABYTES = 1.0  # from a tenth of the steps to all: what "flat" may mean with an allocator
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass
class Loop:
    """A training loop whose work is the same at every step."""

    def __post_init__(self) -> None:
        generator = np.random.default_rng(0)
        self.names = [f"blocks.{index}.weight" for index in range(TENSOR_COUNT)]
        self.weights = {n: generator.standard_normal(ELEMENT_COUNT, dtype=np.float32) for n in self.names}
        self.gradients = {n: generator.standard_normal(ELEMENT_COUNT, dtype=np.float32) for n in self.names}
        self._evict = np.ones(4_000_000, np.float32)

    def work(self) -> None:
        """One step's work."""
        for _ in range(WORK_PASSES):
            self._evict *= 1.0
        total = 0
        for number in range(PYTHON_LOOPS):
            total += number


@dataclass(frozen=True)
class Stalls:
    """Milliseconds, (steps,) each."""

    calls: np.ndarray  # inside the recorder's calls
    attached: np.ndarray  # whole steps
    detached: np.ndarray

    def rows(self) -> Iterator[str]:
        """Lines of the table."""
        yield f"{'milliseconds of a step':<44}{'median':>9}{'p99':>9}{'p99.9':>9}{'max':>9}"
        for name, values in (
            ("inside the recorder's calls", self.calls),
            ("whole step, without a recorder", self.detached),
            ("whole step, with one", self.attached),
        ):
            numbers = np.percentile(values, (50, 99, 99.9, 100))
            yield f"{name:<44}" + "".join(f"{number:9.3f}" for number in numbers)

    def added(self, percentile: float) -> float:
        """Difference of the same percentile of whole steps."""
        attached, detached = (
            np.percentile(self.attached, percentile),
            np.percentile(self.detached, percentile),
        )
        return float(attached - detached)


def measure_stalls(directory: Path, steps: int) -> Stalls:
    """Steps with and without a recorder, in turn."""
    from recorder import Recorder

    loop = Loop()
    calls, attached, detached = np.zeros((3, steps))
    with Recorder(directory, quiet=True) as recorder:
        recorder.watch(loop.weights)
        for step in range(steps):
            start = time.perf_counter()
            loop.work()
            detached[step] = time.perf_counter() - start
            start = time.perf_counter()
            record = recorder.step(step)
            record.__enter__()
            entered = time.perf_counter()
            loop.work()
            worked = time.perf_counter()
            record.add_gradients(loop.gradients)
            record.log(loss_sum=1.0, loss_token_count=1, learning_rate=0.1)
            record.__exit__(None, None, None)
            end = time.perf_counter()
            calls[step] = entered - start + end - worked
            attached[step] = end - start
    return Stalls(1e3 * calls, 1e3 * attached, 1e3 * detached)


def column_bytes(log: Path) -> dict[str, float]:
    """Bytes on disk for each row of tensors: by column, what belongs to no column under ``other``.

    The streams that hold what few rows have are part of it, each as a whole.
    """
    import pyarrow as pa

    from recorder.schema import WRITTEN_BEFORE, stream_name

    sizes: dict[str, float] = {}
    row_count = 0
    stream = log / stream_name("tensors", 0, 0)
    with stream.open("rb") as file:
        for batch in pa.ipc.open_stream(file):
            row_count += batch.num_rows
            for name, column in zip(batch.schema.names, batch.columns, strict=True):
                keys = column.indices if pa.types.is_dictionary(column.type) else column
                sizes[name] = sizes.get(name, 0.0) + keys.nbytes
    sizes["other"] = stream.stat().st_size - sum(sizes.values())
    for name in WRITTEN_BEFORE["tensors"]:
        part = log / stream_name(name, 0, 0)
        sizes[f"table {name}"] = part.stat().st_size if part.exists() else 0.0
    return {name: size / row_count for name, size in sizes.items()}


def resident_megabytes() -> float:
    """Memory of this process that is in RAM."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * PAGE_BYTES / 1e6


def print_memory(directory: Path, steps: int) -> None:
    """Print ``name megabytes`` lines: of the loop alone, with libraries, and as the steps go by."""
    loop = Loop()
    loop.work()
    print("loop", resident_megabytes())
    from recorder import Recorder

    print("libraries", resident_megabytes())
    with Recorder(directory, quiet=True) as recorder:
        recorder.watch(loop.weights)
        for step in range(steps + 1):
            if step in (steps // 100, steps // 10, steps // 2, steps):
                print(f"{step}", resident_megabytes(), flush=True)
            with recorder.step(step) as record:
                record.add_gradients(loop.gradients)
                record.log(loss_sum=1.0, loss_token_count=1, learning_rate=0.1)


def measure_memory(directory: Path, steps: int) -> dict[str, float]:
    """What ``print_memory`` says in a fresh process."""
    command = [sys.executable, "-m", "benchmarks.write_path", "--print-memory", str(directory), str(steps)]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {name: float(megabytes) for name, megabytes in map(str.split, output.splitlines())}


def verdict(name: str, value: float, limit: float) -> str:
    """One line: a number beside the most that it may be."""
    return f"{name:<60}{value:10.3f}{limit:10.2f}{'' if value <= limit else '  over'}"


def print_tables(steps: int, memory_steps: int) -> None:
    """Measure and print."""
    from benchmarks.peer_loggers import PEERS
    from benchmarks.peers import measure

    cost = measure(PEERS[0], TENSOR_COUNT, steps)
    with tempfile.TemporaryDirectory() as name:
        stalls = measure_stalls(Path(name) / "stalls", steps)
        bytes_by_column = column_bytes(Path(name) / "stalls" / "log")
        memory = measure_memory(Path(name) / "memory", memory_steps)
    *_, tenth, _, late = memory.values()
    print("\n".join(stalls.rows()))
    print("\nresident MB: " + ", ".join(f"{moment} {megabytes:.1f}" for moment, megabytes in memory.items()))
    print("bytes of a row: " + ", ".join(f"{n} {size:.1f}" for n, size in bytes_by_column.items()))
    print(f"\n{'':<60}{'measured':>10}{'at most':>10}")
    print(verdict("microseconds per scalar, work between steps", cost.loop_microseconds, MOST_MICROSECONDS))
    row_bytes = sum(bytes_by_column.values())
    print(verdict("bytes per statistic on disk", row_bytes / STATISTIC_COUNT, MOST_BYTES))
    in_calls = float(np.percentile(stalls.calls, 99.9))
    print(verdict("ms inside the recorder's calls, p99.9", in_calls, MOST_STALL_MILLISECONDS))
    print(verdict("ms that whole steps are longer, p99", stalls.added(99), MOST_STALL_MILLISECONDS))
    print(verdict("resident MB added, libraries aside", late - memory["libraries"], MOST_MEGABYTES))
    print(
        verdict(f"MB grown over the last 9/10 of {memory_steps:,} steps", late - tenth, MOST_GROWTH_MEGABYTES)
    )
    print(
        f"\nnot counted above: the libraries, {memory['libraries'] - memory['loop']:.1f} MB (pyarrow, xxhash)"
    )


def main() -> None:
    """Print the tables, or one process's part of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--memory-steps", type=int, default=100_000)
    parser.add_argument("--print-memory", nargs=2, metavar=("DIR", "STEPS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.print_memory:
        directory, steps = arguments.print_memory
        print_memory(Path(directory), int(steps))
    else:
        print_tables(arguments.steps, arguments.memory_steps)


if __name__ == "__main__":
    main()
