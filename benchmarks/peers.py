"""What one logged scalar costs, beside other loggers, on the same workload in the same process.

    python -m benchmarks.peers [--tensors 20] [--steps 200]

Each step logs eight statistics of every tensor. `tight` logs step after step; `loop` does 5 ms of work that
empties the caches between two steps, as training does, and counts the logging calls only. Writers that hand
their work to a thread or a process of their own show it in `cpu`: processor time of the process and its ended
children per scalar, in the tight loop, closing included. Loggers that are not installed are left out; none is
a dependency.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import resource
import shutil
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np

from recorder.schema import TENSORS
from recorder.segment import Segment
from recorder.writer import Block

STATISTICS = ("l2_norm", "mean", "mean_abs", "std", "min", "max", "zero_fraction", "spectral_norm")
WORK_SECONDS = 0.005

Log = Callable[[int, np.ndarray], None]
"""(step, (tensors, 8) float64)."""


@contextlib.contextmanager
def flight_recorder(directory: Path, tensors: int) -> Iterator[Log]:
    """The recorder's own write path: one block of rows for each step."""
    segment = Segment(directory, 0, "raise", fsync_seconds=0)
    ids = np.arange(tensors)

    def log(step: int, values: np.ndarray) -> None:
        columns = {"step": step, "tensor_id": ids, "kind": "gradient"}
        columns |= {name: values[:, index] for index, name in enumerate(STATISTICS)}
        segment.append([Block(TENSORS.name, tensors, columns)])

    yield log
    segment.close()


@contextlib.contextmanager
def raw_write(directory: Path, tensors: int) -> Iterator[Log]:
    """The floor: the same numbers as bytes, one write per step, no schema, no flush guarantee."""
    directory.mkdir(parents=True)
    with (directory / "raw.bin").open("wb", buffering=0) as file:
        yield lambda step, values: file.write(struct.pack("q", step) + values.tobytes()) and None


@contextlib.contextmanager
def json_lines(directory: Path, tensors: int) -> Iterator[Log]:
    """One JSON object per step, flushed."""
    directory.mkdir(parents=True)
    names = scalar_names(tensors)
    with (directory / "log.jsonl").open("w", encoding="utf-8") as file:

        def log(step: int, values: np.ndarray) -> None:
            file.write(json.dumps({"step": step, **named(names, values)}) + "\n")
            file.flush()

        yield log


@contextlib.contextmanager
def tensorboard(directory: Path, tensors: int) -> Iterator[Log]:
    """TensorBoard's own event writer, scalar by scalar."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(directory))
    names = scalar_names(tensors)

    def log(step: int, values: np.ndarray) -> None:
        for name, value in named(names, values).items():
            summary = Summary(value=[Summary.Value(tag=name, simple_value=value)])
            writer.add_event(Event(step=step, wall_time=time.time(), summary=summary))

    yield log
    writer.close()


@contextlib.contextmanager
def wandb_offline(directory: Path, tensors: int) -> Iterator[Log]:
    """W&B in offline mode, one call per step."""
    import wandb

    directory.mkdir(parents=True)
    os.environ["WANDB_SILENT"] = "true"
    run = wandb.init(project="benchmark", mode="offline", dir=str(directory))
    names = scalar_names(tensors)
    yield lambda step, values: run.log(named(names, values), step=step)
    run.finish()


@contextlib.contextmanager
def trackio(directory: Path, tensors: int) -> Iterator[Log]:
    """Trackio on its local SQLite store, one call per step."""
    os.environ["TRACKIO_DIR"] = str(directory)
    import trackio as library

    names = scalar_names(tensors)
    with contextlib.redirect_stdout(io.StringIO()):
        library.init(project="benchmark", embed=False)
        yield lambda step, values: library.log(
            dict(zip(names, values.ravel().tolist(), strict=True)), step=step
        )
        library.finish()


PEERS = (flight_recorder, raw_write, json_lines, tensorboard, wandb_offline, trackio)


@dataclass(frozen=True)
class Cost:
    """Per scalar."""

    tight_microseconds: float
    loop_microseconds: float
    cpu_microseconds: float
    bytes: float


def scalar_names(tensors: int) -> list[str]:
    """Names as a user would give them."""
    return [f"blocks.{index}.weight/{statistic}" for index in range(tensors) for statistic in STATISTICS]


def named(names: list[str], values: np.ndarray) -> dict[str, float]:
    """The scalars of one step by name."""
    return dict(zip(names, values.ravel().tolist(), strict=True))


Peer = Callable[[Path, int], contextlib.AbstractContextManager[Log]]


def measure(peer: Peer, tensors: int, steps: int) -> Cost:
    """Log the same numbers twice, tight and in a loop, each into a directory of its own."""
    values = np.random.default_rng(0).standard_normal((steps, tensors, len(STATISTICS)))
    scalars = steps * tensors * len(STATISTICS)
    evict = np.ones(4_000_000, np.float32)  # 16 MB, more than the caches hold
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        before = processor_seconds()
        with peer(Path(name) / "tight", tensors) as log:
            start = time.perf_counter()
            for step in range(steps):
                log(step, values[step])
            tight = time.perf_counter() - start
        cpu = processor_seconds() - before
        size = sum(path.stat().st_size for path in (Path(name) / "tight").rglob("*") if path.is_file())
        loop = 0.0
        with peer(Path(name) / "loop", tensors) as log:
            for step in range(steps):
                deadline = time.perf_counter() + WORK_SECONDS
                while time.perf_counter() < deadline:
                    evict *= 1.0
                start = time.perf_counter()
                log(step, values[step])
                loop += time.perf_counter() - start
        shutil.rmtree(Path(name), ignore_errors=True)
    return Cost(1e6 * tight / scalars, 1e6 * loop / scalars, 1e6 * cpu / scalars, size / scalars)


def processor_seconds() -> float:
    """User and system time of this process and of its ended children."""
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in usage)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tensors", type=int, default=20)
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    workload = f"{arguments.tensors} tensors x {len(STATISTICS)} statistics x {arguments.steps} steps"
    print(f"{workload}; microseconds per scalar")
    print(f"{'':<18} {'tight':>8} {'loop':>8} {'loop, ratio':>12} {'cpu':>8} {'bytes':>8}")
    own = None
    for peer in PEERS:
        try:
            cost = measure(peer, arguments.tensors, arguments.steps)
        except ImportError as error:
            print(f"{peer.__name__:<18} not installed ({error.name})")
            continue
        own = own or cost
        ratio = cost.loop_microseconds / own.loop_microseconds
        print(
            f"{peer.__name__:<18} {cost.tight_microseconds:8.3f} {cost.loop_microseconds:8.3f} {ratio:12.1f}"
            f" {cost.cpu_microseconds:8.3f} {cost.bytes:8.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
