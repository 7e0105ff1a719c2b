"""Logs of earlier versions stay readable: their numbers come out as they were written.

tests/golden/make.py wrote them, once per schema version; they are never written again.
"""

from pathlib import Path

import pytest

from analyzer.run_log import open_runs

GOLDEN = Path(__file__).parent / "golden"

ROWS = {
    "steps": (25, 26),
    "tensors": (260, 280),
    "tensor_names": (30, 30),
    "attention": (10, 10),
    "units": (1, 1),
    "evaluations": (7, 7),
    "example_losses": (1200, 1200),
    "examples": (600, 600),
    "events": (2, 2),
    "micro_batches": (0, 0),
}


VERSIONS = ("v1", "v2")


@pytest.mark.parametrize("table", ROWS)
@pytest.mark.parametrize("version", VERSIONS)
def test_every_version_has_all_its_rows(version: str, table: str) -> None:
    """Every stream is read to its end, without a warning."""
    with open_runs([GOLDEN / version]) as run_log:
        assert run_log.warnings == []
        row_count = run_log.query(f"SELECT count(*) AS n FROM {table}").column("n")[0].as_py()
    assert row_count == ROWS[table][VERSIONS.index(version)]


@pytest.mark.parametrize("version", VERSIONS)
def test_every_version_keeps_its_numbers(version: str) -> None:
    """Losses, 64-bit hashes and labels are what it wrote, to the last digit that it printed."""
    with open_runs([GOLDEN / version]) as run_log:
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


@pytest.mark.parametrize("version", VERSIONS)
def test_every_version_names_its_tensors(version: str) -> None:
    """A gradient row is joined to its name, layer and role."""
    with open_runs([GOLDEN / version]) as run_log:
        row = run_log.query(
            "SELECT n.layer, n.role, t.has_gradient, t.element_count FROM tensors t "
            "JOIN tensor_names n USING (run, rank, segment, tensor_id) "
            "WHERE n.name = 'blocks.0.mlp.up.weight' AND t.kind = 'gradient' AND t.step = 5"
        ).to_pylist()
    assert row == [{"layer": 0, "role": "linear", "has_gradient": True, "element_count": 256}]


@pytest.mark.parametrize("version", VERSIONS)
def test_every_version_keeps_what_only_weights_have(version: str) -> None:
    """Spectral norms, their bound where it was due, and hashes of the bytes."""
    with open_runs([GOLDEN / version]) as run_log:
        rows = run_log.query(
            "SELECT step, round(CAST(spectral_norm AS DOUBLE), 5) AS norm, "
            "round(CAST(spectral_norm_upper AS DOUBLE), 5) AS bound, content_hash "
            "FROM tensors JOIN tensor_names USING (run, rank, segment, tensor_id) "
            "WHERE name = 'blocks.0.mlp.up.weight' AND kind = 'weight' ORDER BY step"
        ).to_pylist()
    assert [tuple(row.values()) for row in rows] == [
        (0, 2.03953, 2.03953, 16632679311645490321),
        (10, 2.04126, None, 18061784389052993346),
        (20, 2.04506, None, 17633739543257241228),
    ]


def test_version_2_tells_values_that_are_not_finite_from_those_that_are_not_there() -> None:
    """Its last step has one gradient, of NaN, infinities and numbers; the other 19 did not arrive."""
    with open_runs([GOLDEN / "v2"]) as run_log:
        rows = run_log.query(
            "SELECT has_gradient, element_count, l2_norm, nan_count, positive_infinity_count, "
            "negative_infinity_count, count(*) AS n FROM tensors WHERE step = 25 GROUP BY ALL ORDER BY ALL"
        ).to_pylist()
    assert [tuple(row.values()) for row in rows] == [
        (False, None, None, None, None, None, 19),
        (True, 6, 5.0, 2, 1, 1, 1),
    ]
