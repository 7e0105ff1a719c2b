"""The calibration from a cell to the committed report."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from outcomes import outcome
from rule_run import RUN, diagnosis, example_losses, healthy, opened

from analyzer.diagnoses import DIAGNOSES
from analyzer.query_library import library
from calibration import testable
from calibration.cell import Cell, settings_of
from calibration.detection import first_true
from calibration.matrix import REFERENCE, cells
from calibration.outcome import Detection, Harm, Outcome
from calibration.pool import TRAINED_FILE, finish_cell
from calibration.report import REPORT_FILE, markdown
from calibration.results import (
    PARQUET_FILE,
    append_line,
    gathered,
    read_lines,
    read_parquet,
    write_parquet,
)
from calibration.rules_hash import normalised, rules_hash
from calibration.run import chosen_cells, pending_cells, set_aside_other_rules

TINY = {"width": 16, "feed_forward_width": 32, "warmup_steps": 10, "evaluation_interval": 20}


def tiny_cell(fault: str, steps: int, **changes: object) -> Cell:
    """A cell of a small model."""
    settings = settings_of(TINY, {"total_steps": steps})
    kind = "fault" if fault else "control"
    faults, severity = ((fault,), "medium") if fault else ((), "")
    cell = Cell(
        "tuning", kind, fault or "control", faults, severity, 0, REFERENCE.name, None, steps, settings
    )
    return dataclasses.replace(cell, **changes)  # type: ignore[arg-type]


def test_the_committed_results_are_of_the_rules_as_they_are() -> None:
    """Judge again when this fails: a rule was changed since. All cells of the part, or none yet."""
    judged = [o for o in read_parquet(PARQUET_FILE) if o.part == "judged"]
    assert {o.rules_hash for o in judged} <= {rules_hash()}
    assert {o.identity for o in judged} in (set(), {cell.identity() for cell in cells("judged")})


def test_the_committed_report_is_that_of_the_committed_results() -> None:
    """Run ``python -m calibration report`` when this fails."""
    assert REPORT_FILE.read_text(encoding="utf-8") == markdown(read_parquet(PARQUET_FILE))


def test_a_cell_is_trained_diagnosed_and_held_against_its_control(tmp_path: Path) -> None:
    """Cause, first testable row, time to detection, harm; the run is removed, the control is not."""
    control = tiny_cell("", 40)
    cell = tiny_cell("causal_mask_absent", 40, start=7, control=control.identity())
    healthy = finish_cell(control, tmp_path, False)
    faulty = finish_cell(cell, tmp_path, False)
    assert (healthy.fired, healthy.harm, healthy.detections) == ((), None, ())
    assert faulty.causes()[0] == "causal_mask_absent"
    assert faulty.detections == (Detection("causal_mask_absent", 7, 7),)
    assert faulty.harm is not None and faulty.harm.lower is not None
    assert (tmp_path / control.identity() / TRAINED_FILE).exists()
    assert not (tmp_path / cell.identity()).exists()


def test_a_fault_of_a_resume_is_found_at_the_first_row_after_it(tmp_path: Path) -> None:
    """The first part is interrupted ten steps after its checkpoint of step 150."""
    cell = tiny_cell("optimizer_state_lost", 170, continuation="interrupted")
    found = finish_cell(cell, tmp_path, False)
    assert found.detections == (Detection("optimizer_state_lost", 150, 150),)


def test_a_run_that_goes_on_past_its_plan_is_healthy(tmp_path: Path) -> None:
    """The plan stays the one that the run was begun with."""
    cell = tiny_cell("", 40, continuation="extended", settings=settings_of(TINY, {"total_steps": 20}))
    assert finish_cell(cell, tmp_path, True).fired == ()
    assert (tmp_path / cell.identity()).exists()


def test_two_runs_of_one_seed_are_compared(tmp_path: Path) -> None:
    """The faulty run is opened beside its control; an update of step 20 shows in the weights of step 30."""
    control = tiny_cell("", 40)
    cell = tiny_cell("nondeterminism", 40, has_second_run=True, control=control.identity())
    finish_cell(control, tmp_path, False)
    found = finish_cell(cell, tmp_path, False)
    assert found.detections == (Detection("nondeterminism", 30, 30),)


def test_overfitting_is_testable_at_its_first_certain_rise() -> None:
    """The minimum is at step 50; the mean of step 100 is a hundredth above it, with a spread of a half."""
    count = list(healthy()["examples"]["split"]).count("validation")
    spread = np.random.default_rng(0).standard_normal(count) / 2
    mixed = 1.01 + spread - spread.mean()
    rows = example_losses("validation", {0: 1.5, 50: 1.0, 100: mixed, 150: 1.3, 200: 1.3})
    run_log = opened({RUN: [{**healthy(), "example_losses": rows}]})
    assert testable.testable_step(run_log, RUN, diagnosis("overfitting"), 50) == 150


def test_zero_initialisation_is_testable_at_the_third_gradient() -> None:
    """Gradients are recorded at every step, weights at every tenth."""
    assert testable.testable_step(opened({RUN: [healthy()]}), RUN, diagnosis("zero_initialisation"), 0) == 2


@pytest.mark.parametrize("low", [0, 3])
def test_the_shortest_prefix_is_found_wherever_it_ends(low: int) -> None:
    """Every threshold of a small range, and the ends."""
    for least in range(low, 40):
        assert first_true(lambda step, least=least: step >= least, low, 39) == least  # type: ignore[misc]


def test_comments_and_white_space_are_no_rules() -> None:
    """Text literals are."""
    assert normalised("SELECT  1 -- one\nFROM t") == normalised("-- a\nSELECT 1 FROM\n  t")
    assert normalised("SELECT ' --  x'") == "SELECT ' --  x'"
    assert normalised("SELECT 'a  b'") != normalised("SELECT 'a b'")


def test_the_hash_is_of_what_decides_outcomes() -> None:
    """A threshold, what a rule explains and the ranking's lag change it; severity and words do not."""
    query = next(query for query in library() if query.name == "dead_units")
    (first, *others) = DIAGNOSES

    def with_first(**changes: object) -> str:
        return rules_hash([query], [dataclasses.replace(first, **changes), *others])  # type: ignore[arg-type]

    base = rules_hash([query])
    stricter = dataclasses.replace(query, sql=query.sql.replace(":= 0.1 ", ":= 0.2 "))
    commented = dataclasses.replace(query, sql="-- other words\n" + query.sql)
    assert rules_hash([stricter]) != base
    assert rules_hash([query], lag_steps=1) != base
    assert with_first(explains=()) != base
    assert rules_hash([commented]) == base
    assert with_first(severity="S1", remedy="another") == base


def test_results_come_back_from_both_files(tmp_path: Path) -> None:
    """Lists, nothing, and numbers that are missing stay what they were."""
    written = [
        outcome("dead_units", "dead_units", harm=Harm(None, None, None, 3), peer_rules=("dead_relu",)),
        outcome("bad_batch", detections=(Detection("bad_batch", 5, None),), harm=Harm(0.1, 0.0, 0.2, 0)),
        outcome(identity="tuned", part="tuning"),
    ]
    for row in written:
        append_line(tmp_path / "rows.jsonl", row)
    write_parquet(tmp_path / "rows.parquet", written)
    assert list(read_lines(tmp_path / "rows.jsonl").values()) == written
    assert sorted(o.identity for o in read_parquet(tmp_path / "rows.parquet")) == sorted(
        o.identity for o in written
    )
    assert set(read_parquet(tmp_path / "rows.parquet")) == set(written)


def test_a_torn_line_is_no_result_and_the_last_of_two_counts(tmp_path: Path) -> None:
    """A kill tears the line that was being written; the cell is done again."""
    path = tmp_path / "judged.jsonl"
    append_line(path, outcome("bad_batch"))
    append_line(path, outcome("bad_batch", "bad_batch"))
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"identity": "torn"})[:-4])
    assert read_lines(path) == {"bad_batch-seed0": outcome("bad_batch", "bad_batch")}


def test_a_part_that_was_not_run_here_is_kept_as_committed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its lines replace it where there are any, and it is told when that makes the part smaller."""
    committed = tmp_path / "results.parquet"
    write_parquet(committed, [outcome("bad_batch"), outcome(identity="old", part="tuning")])
    append_line(tmp_path / "tuning.jsonl", outcome(identity="new", part="tuning"))
    assert [o.identity for o in gathered(tmp_path, committed)] == ["new", "bad_batch-seed0"]
    assert capsys.readouterr().err == ""
    write_parquet(committed, [outcome(identity=name, part="tuning") for name in ("old", "older")])
    gathered(tmp_path, committed)
    assert "tuning.jsonl: 1 cells replace the 2 of results.parquet" in capsys.readouterr().err


def done(chosen: list[Cell]) -> dict[str, Outcome]:
    return {cell.identity(): outcome(identity=cell.identity()) for cell in chosen}


def test_a_killed_run_continues_with_what_has_no_line(tmp_path: Path) -> None:
    """A control whose run is gone is trained again while something is still held against it."""
    chosen = chosen_cells(cells("tuning"), ["dead_units"], [0])
    controls = [cell for cell in chosen if cell.kind == "control"]
    assert {cell.name for cell in chosen} == {"control", "dead_units", "dead_units+data_not_shuffled"}
    assert pending_cells(chosen, {}, tmp_path) == chosen
    assert pending_cells(chosen, done(chosen), tmp_path) == []
    assert pending_cells(chosen, done(chosen[:-1]), tmp_path) == [*controls, chosen[-1]]
    directory = tmp_path / controls[0].identity()
    directory.mkdir()
    (directory / TRAINED_FILE).write_text("1.0")
    assert pending_cells(chosen, done(chosen[:-1]), tmp_path) == [chosen[-1]]


def test_lines_of_other_rules_are_set_aside(tmp_path: Path) -> None:
    """Under the hash of those rules; lines of these rules stay."""
    path = tmp_path / "judged.jsonl"
    append_line(path, outcome(rules_hash=rules_hash()))
    set_aside_other_rules(path)
    assert path.exists()
    append_line(path, outcome(rules_hash="other"))
    set_aside_other_rules(path)
    assert not path.exists()
    assert (tmp_path / "judged-other.jsonl").exists()


def test_the_report_names_every_miss_and_every_false_alarm() -> None:
    """With what was said instead."""
    text = markdown(
        [outcome("bad_batch", "dead_units"), outcome("", "label_noise", identity="a-healthy-one")]
    )
    assert "| `bad_batch` | medium | 0 | 0 | `dead_units` | did not fire |" in text
    assert "| `label_noise` | signature | 1 | a-healthy-one |" in text
