"""What the tests of the recorder share: a short loop, a process of its own, and the rows that are left."""

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import IO

import pyarrow as pa

from recorder import Recorder


def rows(run: Path, table: str, *, rank: int = 0, segment: int = 0) -> list[dict]:
    """All rows of one stream."""
    path = run / "log" / f"{table}-r{rank}-s{segment}.arrows"
    return pa.ipc.open_stream(path.read_bytes()).read_all().to_pylist()


def record_steps(recorder: Recorder, steps: range) -> None:
    """Log a loss at each step."""
    for step in steps:
        with recorder.step(step) as record:
            record.log(loss_sum=1.0, loss_token_count=1)


def run_program(
    program: str, *arguments: object, cwd: Path | None = None, stderr: int | IO[str] = subprocess.PIPE
) -> subprocess.CompletedProcess[str]:
    """A Python process of its own."""
    command = [sys.executable, "-c", textwrap.dedent(program), *map(str, arguments)]
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=stderr, text=True, cwd=cwd)
