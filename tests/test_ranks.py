"""Runs of several processes: the analyzer reads all ranks together and says which are missing."""

import signal
from pathlib import Path

import pytest
from recorded_rows import run_program

from analyzer.run_log import open_runs
from recorder import Recorder


def record(run: Path, ranks: list[int]) -> None:
    """Three steps of each rank of a world of four."""
    for rank in ranks:
        with Recorder(run, rank=rank, world_size=4, quiet=True) as recorder:
            for step in range(3):
                with recorder.step(step) as record:
                    record.log(loss_sum=float(rank), loss_token_count=1)


def test_all_ranks_are_read_together(tmp_path: Path) -> None:
    """Views carry the rank; nothing is said when all are there."""
    record(tmp_path / "run", [0, 1, 2, 3])
    with open_runs([tmp_path / "run"]) as run_log:
        rows = run_log.query(
            "SELECT rank, count(*) AS n, max(train_loss) AS loss FROM steps GROUP BY ALL ORDER BY ALL"
        )
        assert rows.to_pylist() == [{"rank": rank, "n": 3, "loss": float(rank)} for rank in range(4)]
        assert run_log.warnings == []


@pytest.mark.parametrize(("ranks", "missing"), [([0, 2], "1, 3"), ([0], "1, 2, 3")])
def test_missing_ranks_are_named(tmp_path: Path, ranks: list[int], missing: str) -> None:
    """A rank whose log is not there must not go unnoticed."""
    record(tmp_path / "run", ranks)
    with open_runs([tmp_path / "run"]) as run_log:
        (warning,) = run_log.warnings
    assert f"ranks missing of 4: {missing}:" in warning


KILLED_RANK = """
    import os, signal, sys
    from recorder import Recorder
    recorder = Recorder(sys.argv[1], rank=1, world_size=2, quiet=True)
    with recorder.step(0) as record:
        record.log(loss_sum=1.0, loss_token_count=1)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def status(run: Path) -> str:
    """What the analyzer calls the run."""
    with open_runs([run]) as run_log:
        (status,) = run_log.query("SELECT status FROM runs")["status"].to_pylist()
    return status


def test_a_run_has_finished_when_every_rank_has(tmp_path: Path) -> None:
    """One rank that was killed is not hidden by another that came to its end."""
    run = tmp_path / "run"
    assert run_program(KILLED_RANK, run).returncode == -signal.SIGKILL
    with Recorder(run, rank=0, world_size=2, quiet=True):
        pass
    assert status(run) == "killed"
    with Recorder(run, rank=1, world_size=2, quiet=True):
        pass
    assert status(run) == "finished"


def test_a_rank_that_raises_fails_the_run(tmp_path: Path) -> None:
    """Whichever it is, and though the others finished."""
    run = tmp_path / "run"
    record(run, [0])
    with pytest.raises(ValueError, match="out of data"), Recorder(run, rank=1, world_size=4, quiet=True):
        raise ValueError("out of data")
    assert status(run) == "failed"


def test_a_resume_with_fewer_ranks_is_judged_by_them(tmp_path: Path) -> None:
    """The second process was killed; the run went on with one, and finished."""
    run = tmp_path / "run"
    run_program(KILLED_RANK, run)
    with Recorder(run, rank=0, world_size=1, quiet=True):
        pass
    assert status(run) == "finished"
