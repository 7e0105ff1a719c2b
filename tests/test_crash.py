"""Real processes, killed for real: what they recorded more than a second before is read back.

``make survive`` does the same 200 times; what holds the log against what the process did is in
benchmarks/crash.py, and is itself tested here on logs that were spoilt.
"""

import contextlib
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from analyzer.run_log import open_runs
from benchmarks.crash import broken_promises, kill_run, live_and_die, main
from benchmarks.crash_victim import BORN, MARK, NOTED, RECORDED, SCENARIOS

STEPS_SCENARIO = SCENARIOS[0]


@pytest.mark.parametrize("seed", range(3))
def test_a_run_that_is_killed_twice_keeps_its_promises(tmp_path: Path, seed: int) -> None:
    """SIGKILL between steps, in a flush and in a long step: no gap, no duplicate, nothing old is missing."""
    kills = kill_run(tmp_path / "run", seed, lives=2)
    assert [kill.broken for kill in kills] == [(), ()]


def test_the_victims_are_killed_where_it_hurts(tmp_path: Path) -> None:
    """The scenario of flushes dies inside one, sooner or later: where a moment falls is chance."""
    kills = (kill_run(tmp_path / f"run{seed}", seed, lives=1)[0] for seed in range(1, 60, len(SCENARIOS)))
    hit = next(kill for kill in kills if kill.inside_flush)
    assert (hit.scenario, hit.recorded_count > 0, hit.broken) == ("flushes", True, ())


@pytest.mark.parametrize("kills", ["0", "-4", "3", "6"])
def test_a_number_of_kills_that_kills_nothing_is_refused(
    kills: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """No run killed and no promise broken would look like a success."""
    with pytest.raises(SystemExit) as exit_of:
        main(["--kills", kills])
    assert exit_of.value.code == 2
    assert "expected a multiple of 4" in capsys.readouterr().err


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray, float]:
    """A run that was killed after 1.5 s, its marks, and when that was."""
    run = tmp_path_factory.mktemp("killed") / "run"
    return run, *live_and_die(run, 0, STEPS_SCENARIO, delay=1.5)


def broken(killed: tuple[Path, np.ndarray, float], marks: np.ndarray | None = None) -> list[str]:
    """What is held against the log of the killed run."""
    run, own_marks, killed_seconds = killed
    with open_runs([run]) as run_log:
        return broken_promises(run_log, 0, 0, own_marks if marks is None else marks, killed_seconds)


def test_rows_leave_during_a_long_step(tmp_path: Path) -> None:
    """Every step before the long one is there when the process is killed in the midst of it."""
    long_step = SCENARIOS[2]
    run = tmp_path / "run"
    marks, _ = live_and_die(run, 0, long_step, delay=2.0)
    recorded = marks["step"][marks["kind"] == RECORDED].tolist()
    assert recorded[-1] == long_step.long_step_every - 2  # the last one before the long step
    with open_runs([run]) as run_log:
        assert run_log.query("SELECT step FROM steps ORDER BY step")["step"].to_pylist() == recorded


def test_a_lost_step_is_found(killed: tuple[Path, np.ndarray, float]) -> None:
    """A step that the process recorded long before its death, and that no file holds, is a broken promise."""
    _, marks, _ = killed
    early = marks["seconds"][marks["kind"] == BORN][0]
    claimed = np.array([(RECORDED, 10**6, early)], MARK)
    lines = broken(killed, np.concatenate([marks, claimed]))
    assert [line.partition(":")[0] for line in lines] == ["steps", "tensors"]
    assert "older than a second and lost: 1000000" in lines[0]
    assert broken(killed) == []


def test_a_lost_event_is_found(killed: tuple[Path, np.ndarray, float]) -> None:
    """An event is promised as soon as its call returns."""
    _, marks, killed_seconds = killed
    claimed = np.array([(NOTED, 10**6, killed_seconds)], MARK)
    (line,) = broken(killed, np.concatenate([marks, claimed]))
    assert line.startswith("events: logged")


def spoil(path: Path, change: str) -> None:
    """Write a stream again, with one of its rows doubled or left out, or with one column a row too early."""
    batches: list[pa.RecordBatch] = []
    with path.open("rb") as file, contextlib.suppress(pa.ArrowInvalid, OSError):
        batches.extend(pa.ipc.open_stream(file))
    rows = pa.Table.from_batches(batches)
    is_looked_at = rows["has_gradient"].is_valid() if "has_gradient" in rows.column_names else rows["step"]
    row = np.flatnonzero(is_looked_at.to_numpy())[rows.num_rows // 4]
    if change == "doubled":
        rows = pa.concat_tables([rows.slice(0, row + 1), rows.slice(row)])
    elif change == "left out":
        rows = pa.concat_tables([rows.slice(0, row), rows.slice(row + 1)])
    else:
        index = rows.column_names.index("loss_sum" if "loss_sum" in rows.column_names else "max")
        early = pa.chunked_array([*rows.column(index).slice(1).chunks, pa.array([0], rows.field(index).type)])
        rows = rows.set_column(index, rows.field(index), early)
    with pa.ipc.new_stream(path, rows.schema) as writer:
        writer.write_table(rows)


@pytest.mark.parametrize("table", ["steps", "tensors"])
@pytest.mark.parametrize("change", ["doubled", "left out", "mixed up"])
def test_a_spoilt_log_is_found(
    killed: tuple[Path, np.ndarray, float], tmp_path: Path, table: str, change: str
) -> None:
    """A row that is there twice, or missing, or holds another step's numbers is a broken promise."""
    run, marks, killed_seconds = killed
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    spoil(copy / "log" / f"{table}-r0-s0.arrows", change)
    assert table in {line.partition(":")[0] for line in broken((copy, marks, killed_seconds))}


def test_lost_counts_are_found(killed: tuple[Path, np.ndarray, float], tmp_path: Path) -> None:
    """Gradients with a NaN whose counts are gone are not shown, so they are missing."""
    run, marks, killed_seconds = killed
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    (copy / "log" / "nonfinite-r0-s0.arrows").unlink()
    assert "tensors: not every step has each tensor once" in broken((copy, marks, killed_seconds))


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
