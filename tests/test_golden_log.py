"""Logs of earlier versions stay readable: their numbers come out as they were written.

tests/golden/make.py wrote them, once per schema version; they are never written again.
"""

from pathlib import Path

import pytest

from analyzer.run_log import open_runs

GOLDEN = Path(__file__).parent / "golden"

ROWS_OF_VERSION_1 = {
    "steps": 25,
    "tensors": 260,
    "tensor_names": 30,
    "attention": 10,
    "units": 1,
    "evaluations": 7,
    "example_losses": 1200,
    "examples": 600,
    "events": 2,
    "micro_batches": 0,
}


@pytest.mark.parametrize(("table", "row_count"), ROWS_OF_VERSION_1.items())
def test_version_1_has_all_its_rows(table: str, row_count: int) -> None:
    """Every stream is read to its end, without a warning."""
    with open_runs([GOLDEN / "v1"]) as run_log:
        assert run_log.warnings == []
        assert run_log.query(f"SELECT count(*) AS n FROM {table}").column("n")[0].as_py() == row_count


def test_version_1_keeps_its_numbers() -> None:
    """Losses, 64-bit hashes and labels are what version 1 wrote, to the last digit that it printed."""
    with open_runs([GOLDEN / "v1"]) as run_log:
        steps = run_log.query(
            "SELECT step, round(train_loss, 6) AS loss, weights_hash, batch_hash FROM steps "
            "WHERE step % 10 = 0 ORDER BY step"
        ).to_pylist()
        labels = run_log.query(
            "SELECT e.regularity AS value, round(sum(l.loss_sum) / sum(l.token_count), 6) AS loss "
            "FROM example_losses l JOIN examples e USING (run, example_id) "
            "WHERE l.step = 25 AND l.split = 'validation' GROUP BY ALL ORDER BY ALL"
        ).to_pylist()
    assert [tuple(row.values()) for row in steps] == [
        (0, 3.65446, 15301040485822613760, 7961372637946327322),
        (10, 3.640285, 14551749977928760363, 2770937655558058901),
        (20, 3.58536, 4958921665987920864, 447089835176761965),
    ]
    assert labels == [{"value": "irregular", "loss": 3.534463}, {"value": "regular", "loss": 3.532323}]


def test_version_1_names_its_tensors() -> None:
    """A gradient row is joined to its name, layer and role."""
    with open_runs([GOLDEN / "v1"]) as run_log:
        row = run_log.query(
            "SELECT n.layer, n.role, t.has_gradient, t.element_count FROM tensors t "
            "JOIN tensor_names n USING (run, rank, segment, tensor_id) "
            "WHERE n.name = 'blocks.0.mlp.up.weight' AND t.kind = 'gradient' AND t.step = 5"
        ).to_pylist()
    assert row == [{"layer": 0, "role": "linear", "has_gradient": True, "element_count": 256}]
