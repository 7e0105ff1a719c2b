"""A real process, killed for real: what it recorded more than a second before is read back."""

import random
import signal
import subprocess
import sys
import textwrap
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pytest

PROMISE = timedelta(seconds=1)

TRAINING = """
    import sys, time
    import numpy as np
    from recorder import Cadence, Recorder
    weight = np.ones((64, 64), np.float32)
    with Recorder(sys.argv[1], cadence=Cadence(weights=1)) as recorder:
        recorder.watch({"w": weight})
        for step in range(1_000_000):
            with recorder.step(step) as record:
                record.add_gradients({"w": weight * 0.5})
                time.sleep(float(sys.argv[2]))
                record.log(loss_sum=1.0, loss_token_count=1)
            print(step, time.time(), flush=True)
"""


def read_whole_batches(path: Path) -> list[dict]:
    """Rows of all whole record batches, as any reader of a torn Arrow stream must take them."""
    rows: list[dict] = []
    with path.open("rb") as file:
        try:
            for batch in pa.ipc.open_stream(file):
                rows += batch.to_pylist()
        except (pa.ArrowInvalid, OSError):
            pass
    return rows


@pytest.mark.parametrize("seed", range(6))
def test_a_killed_run_keeps_every_row_older_than_a_second(tmp_path: Path, seed: int) -> None:
    """SIGKILL at a random moment: no gap, no duplicate, and nothing older than a second is missing."""
    arguments = [sys.executable, "-c", textwrap.dedent(TRAINING), str(tmp_path / "run"), "0.002"]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()  # the first step is done
        time.sleep(random.Random(seed).uniform(0.5, 2.5))
        process.send_signal(signal.SIGKILL)
        killed = datetime.now(UTC)
        finished = [line.split() for line in process.stdout]
    steps = [row["step"] for row in read_whole_batches(tmp_path / "run" / "log" / "steps-r0-s0.arrows")]
    promised = [
        int(step)
        for step, seconds in finished
        if datetime.fromtimestamp(float(seconds), UTC) < killed - PROMISE
    ]
    assert steps == list(range(len(steps)))
    assert len(steps) >= max(promised, default=0) + 1


def test_rows_leave_during_a_long_step(tmp_path: Path) -> None:
    """The flusher hands out waiting rows while the next step takes its time."""
    arguments = [sys.executable, "-c", textwrap.dedent(TRAINING), str(tmp_path / "run"), "2.0"]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()  # step 0 is done, step 1 takes two seconds
        time.sleep(1.0)
        process.kill()
    assert [row["step"] for row in read_whole_batches(tmp_path / "run" / "log" / "steps-r0-s0.arrows")] == [0]


@pytest.mark.parametrize("seconds", [0.0, 0.3, 1.5])
def test_a_killed_training_renders(tmp_path: Path, seconds: float) -> None:
    """The reference training, killed soon after its log appears, is told as killed and has a page."""
    run = tmp_path / "run"
    command = [sys.executable, "-m", "experiments", "run", "19-healthy", "--out", str(run)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        deadline = time.monotonic() + 60
        while not list(run.glob("log/events-*.arrows")) and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(seconds)
        process.kill()
    result = subprocess.run(
        [sys.executable, "-m", "analyzer", "render", str(run)], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    page = (run / "dashboard.html").read_text(encoding="utf-8")
    assert ">killed<" in page
