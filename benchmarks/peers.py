"""What one logged scalar costs, beside other loggers, on the same workload in the same run.

    python -m benchmarks.peers [--tensors 20] [--steps 200] [--kill-seconds 3] [--query-scalars 3000000]

Each step logs eight statistics of every tensor. `tight` logs step after step; `loop` does 5 ms of work that
empties the caches between two steps, as training does, and counts the logging calls only. Writers that hand
their work to a thread or a process of their own show it in `cpu`: processor time of the process and its ended
children per scalar, in the tight loop, closing included.

`read back` is the share of steps that a reader finds after SIGKILL ended a process that had logged in such a
loop for a few seconds, and `lost` the seconds that are missing: rows that had not left the process. `query`
is the time of a fresh process, from its start to one curve, one scalar at every step, of 3 million scalars.

Loggers that are not installed are left out; none is a dependency.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np

from benchmarks.peer_loggers import PEERS, STATISTICS, Peer

WORK_SECONDS = 0.005
SETTLE_SECONDS = 2.0  # after a kill: helper processes of a logger may still write what they have


@dataclass(frozen=True)
class Cost:
    """Per scalar."""

    tight_microseconds: float
    loop_microseconds: float
    cpu_microseconds: float
    bytes: float


class Work:
    """What a training step does to the caches."""

    def __init__(self) -> None:
        self._evict = np.ones(4_000_000, np.float32)  # 16 MB, more than the caches hold

    def step(self) -> None:
        """Five milliseconds of it."""
        deadline = time.perf_counter() + WORK_SECONDS
        while time.perf_counter() < deadline:
            self._evict *= 1.0


def step_values(steps: int, tensors: int) -> np.ndarray:
    """(steps, tensors, 8) float64."""
    return np.random.default_rng(0).standard_normal((steps, tensors, len(STATISTICS)))


def measure(peer: Peer, tensors: int, steps: int) -> Cost:
    """Log the same numbers twice, tight and in a loop, each into a directory of its own."""
    values = step_values(steps, tensors)
    work = Work()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        before = processor_seconds()
        with peer.writer(Path(name) / "tight", tensors) as log:
            start = time.perf_counter()
            for step in range(steps):
                log(step, values[step])
            tight = time.perf_counter() - start
        cpu = processor_seconds() - before
        size = sum(path.stat().st_size for path in (Path(name) / "tight").rglob("*") if path.is_file())
        loop = 0.0
        with peer.writer(Path(name) / "loop", tensors) as log:
            for step in range(steps):
                work.step()
                start = time.perf_counter()
                log(step, values[step])
                loop += time.perf_counter() - start
    tight, loop, cpu = (1e6 * seconds / values.size for seconds in (tight, loop, cpu))
    return Cost(tight, loop, cpu, size / values.size)


def processor_seconds() -> float:
    """User and system time of this process and of its ended children."""
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in usage)


def log_until_killed(peer: Peer, directory: Path, tensors: int) -> None:
    """Log in a loop with work, and leave a byte outside for each step that was logged."""
    values, work = step_values(1, tensors)[0], Work()
    with peer.writer(directory, tensors) as log, _witness(directory).open("wb", buffering=0) as witness:
        for step in range(10**9):
            work.step()
            log(step, values)
            witness.write(b".")


def _witness(directory: Path) -> Path:
    return directory.with_suffix(".witness")


def survivors(peer: Peer, tensors: int, seconds: float) -> tuple[int, int]:
    """(steps that can be read back, steps that were logged) of a process that SIGKILL ended."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        directory = Path(name) / "log"
        with subprocess.Popen(
            _command(peer, "die", directory, tensors), stderr=subprocess.DEVNULL
        ) as process:
            while not _witness(directory).exists():
                time.sleep(0.01)
            time.sleep(seconds)
            process.kill()
        time.sleep(SETTLE_SECONDS)
        return _curve_length(peer, directory, tensors), _witness(directory).stat().st_size


def query_seconds(peer: Peer, tensors: int, scalar_count: int) -> float:
    """Seconds from the start of a fresh process to one curve of a long run."""
    steps = scalar_count // (tensors * len(STATISTICS))
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        directory = Path(name) / "log"
        fill = [*_command(peer, "fill", directory, tensors), "--steps", str(steps)]
        subprocess.run(fill, check=True, capture_output=True)
        start = time.perf_counter()
        found = _curve_length(peer, directory, tensors)
        seconds = time.perf_counter() - start
    if found != steps:
        raise RuntimeError(f"{peer.name}: logged {steps} steps, read {found}")
    return seconds


def log_tight(peer: Peer, directory: Path, tensors: int, steps: int) -> None:
    """Log a long run as fast as the logger takes it."""
    values = step_values(1, tensors)[0]
    with peer.writer(directory, tensors) as log:
        for step in range(steps):
            log(step, values)


def _curve_length(peer: Peer, directory: Path, tensors: int) -> int:
    command = _command(peer, "curve", directory, tensors)
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def _command(peer: Peer, what: str, directory: Path, tensors: int) -> list[str]:
    module = [sys.executable, "-m", "benchmarks.peers", "--tensors", str(tensors)]
    return [*module, "--child", what, str(PEERS.index(peer)), str(directory)]


def child(what: str, peer: Peer, directory: Path, tensors: int, steps: int) -> None:
    """The part of a process of its own: some loggers take one directory each, and one is killed."""
    if what == "die":
        log_until_killed(peer, directory, tensors)
    elif what == "fill":
        log_tight(peer, directory, tensors, steps)
    else:
        print(len(peer.curve(directory, tensors)))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tensors", type=int, default=20)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--kill-seconds", type=float, default=3.0)
    parser.add_argument("--query-scalars", type=int, default=3_000_000)
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        what, index, directory = arguments.child
        child(what, PEERS[int(index)], Path(directory), arguments.tensors, arguments.steps)
    else:
        print_table(arguments.tensors, arguments.steps, arguments.kill_seconds, arguments.query_scalars)


def print_table(tensors: int, steps: int, kill_seconds: float, query_scalars: int) -> None:
    """One line per logger, as it is measured."""
    print(f"{tensors} tensors x {len(STATISTICS)} statistics x {steps} steps; microseconds per scalar")
    heads = ("tight", "loop", "loop, ratio", "cpu", "bytes", "read back", "lost, s", "query, s")
    print(f"{'':<16}" + "".join(f"{head:>12}" for head in heads))
    own = None
    for peer in PEERS:
        try:
            cost = measure(peer, tensors, steps)
        except ImportError as error:
            print(f"{peer.name:<16} not installed ({error.name})")
            continue
        own = own or cost
        kept, logged = survivors(peer, tensors, kill_seconds)
        lost_seconds = kill_seconds * (1 - kept / logged)
        query = query_seconds(peer, tensors, query_scalars)
        ratio = cost.loop_microseconds / own.loop_microseconds
        print(
            f"{peer.name:<16}{cost.tight_microseconds:12.3f}{cost.loop_microseconds:12.3f}{ratio:12.1f}"
            f"{cost.cpu_microseconds:12.3f}{cost.bytes:12.1f}{100 * kept / logged:11.1f}%{lost_seconds:12.2f}"
            f"{query:12.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
