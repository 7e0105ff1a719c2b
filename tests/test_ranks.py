"""Runs of several processes: the analyzer reads all ranks together and says which are missing."""

from pathlib import Path

import pytest

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
