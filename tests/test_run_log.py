"""Run directories become views: what was written whole is there, what was cut is said."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from query_call import answer
from synthetic import MANIFEST, events, healthy_run, write_run, write_stream

from analyzer.errors import AnalyzerError
from analyzer.run_log import open_runs, run_names
from recorder.schema import MANIFEST_FILE, TABLES


def test_a_newer_manifest_is_one_clear_error(tmp_path: Path) -> None:
    """The manifest carries the schema version too."""
    run = write_run(tmp_path / "run", manifest=dataclasses.replace(MANIFEST, schema_version=3))
    with pytest.raises(AnalyzerError) as caught:
        open_runs([run])
    expected = f"{run / MANIFEST_FILE}: schema version 3; this analyzer reads 1-2: upgrade it"
    assert str(caught.value) == expected


def test_label_columns_of_the_user_are_kept(tmp_path: Path) -> None:
    """Columns that the contract does not know stay in `examples`, and in long form in `example_labels`."""
    examples = [
        {"example_id": 7, "verb": "eat", "tense": None},
        {"example_id": 8, "verb": "go", "tense": "past"},
    ]
    rows = answer(tmp_path, {"examples": examples}, "FROM example_labels ORDER BY ALL")
    assert rows == [("run", 7, "verb", "eat"), ("run", 8, "tense", "past"), ("run", 8, "verb", "go")]


def test_runs_with_different_labels_open_together(tmp_path: Path) -> None:
    """A label that one run does not have is null there."""
    for name, label in (("a", "verb"), ("b", "noun")):
        write_run(tmp_path / name, {"examples": [{"example_id": 1, label: name}]})
    with open_runs([tmp_path / "a", tmp_path / "b"]) as run_log:
        rows = run_log.connection.execute("SELECT run, verb, noun FROM examples ORDER BY run").fetchall()
    assert rows == [("a", "a", None), ("b", None, "b")]


def test_a_label_with_the_name_of_a_view_column_is_hidden_and_said(tmp_path: Path) -> None:
    """`run` is the analyzer's own column."""
    write_run(tmp_path / "a", {"examples": [{"example_id": 1, "run": "mine"}]})
    with open_runs([tmp_path / "a"]) as run_log:
        rows = run_log.connection.execute("SELECT run FROM examples").fetchall()
        warnings = run_log.warnings
    path = tmp_path / "a/log/examples-r0-s0.arrows"
    assert (rows, warnings) == ([("a",)], [f"{path}: column run hidden: the views use this name"])


def test_every_table_has_a_view_even_without_a_stream(tmp_path: Path) -> None:
    """A table that was not recorded is empty, with the contract's columns after run, rank and segment."""
    write_run(tmp_path / "a", {"events": []})
    with open_runs([tmp_path / "a"]) as run_log:
        found = {t.name: run_log.query(f"FROM {t.name}").schema.names for t in TABLES}
        all_found = {t.name: run_log.query(f"FROM {t.name}_all").num_rows for t in TABLES}
    assert found == {t.name: ["run", "rank", "segment", *t.column_names()] for t in TABLES}
    assert set(all_found.values()) == {0}


def steps_from(first: int, last: int) -> list[dict[str, Any]]:
    """Rows of `steps` with the steps first to last."""
    return [{"step": step, "train_loss": 1.0} for step in range(first, last + 1)]


def test_a_row_is_current_below_the_first_step_of_every_later_segment(tmp_path: Path) -> None:
    """A second restart further back also replaces the rows of the first one: no branch is spliced in."""
    for segment, (first, last) in enumerate([(0, 9), (5, 8), (3, 4)]):
        write_run(tmp_path / "a", {"steps": steps_from(first, last)}, segment=segment)
    with open_runs([tmp_path / "a"]) as run_log:
        current = run_log.connection.execute("SELECT segment, step FROM steps ORDER BY ALL").fetchall()
        count = run_log.connection.execute("SELECT count(*) FROM steps_all").fetchall()
    assert current == [(0, 0), (0, 1), (0, 2), (2, 3), (2, 4)]
    assert count == [(16,)]


def test_other_tables_follow_the_segments_of_steps(tmp_path: Path) -> None:
    """Evaluations are replaced by step like everything else; events without a step stay."""
    write_run(tmp_path / "a", {"steps": steps_from(0, 9), "evaluations": [{"step": 4}, {"step": 8}]})
    write_run(tmp_path / "a", {"steps": steps_from(6, 9), "evaluations": [{"step": 8}]}, segment=1)
    with open_runs([tmp_path / "a"]) as run_log:
        evaluations = run_log.connection.execute(
            "SELECT segment, step FROM evaluations ORDER BY ALL"
        ).fetchall()
        event_count = run_log.connection.execute("SELECT count(*) FROM events").fetchall()
    assert evaluations == [(0, 4), (1, 8)]
    assert event_count == [(4,)]


def test_a_later_segment_without_steps_replaces_nothing(tmp_path: Path) -> None:
    """A restart that was killed before its first step leaves the run as it was."""
    write_run(tmp_path / "a", {"steps": steps_from(0, 2)})
    write_run(tmp_path / "a", {}, segment=1)
    with open_runs([tmp_path / "a"]) as run_log:
        rows = run_log.connection.execute("SELECT count(*) FROM steps").fetchall()
        segments = run_log.connection.execute(
            "SELECT segment, first_step, last_step, current_below FROM segments"
        ).fetchall()
    assert rows == [(3,)]
    assert segments == [(0, 0, 2, None), (1, None, None, None)]


def test_ranks_are_replaced_on_their_own(tmp_path: Path) -> None:
    """A restart of one rank does not touch the rows of another."""
    write_run(tmp_path / "a", {"steps": steps_from(0, 3)}, rank=0)
    write_run(tmp_path / "a", {"steps": steps_from(0, 3)}, rank=1)
    write_run(tmp_path / "a", {"steps": steps_from(2, 3)}, rank=1, segment=1)
    with open_runs([tmp_path / "a"]) as run_log:
        sql = "SELECT rank, segment, count(*) FROM steps GROUP BY ALL ORDER BY ALL"
        rows = run_log.connection.execute(sql).fetchall()
    assert rows == [(0, 0, 4), (1, 0, 2), (1, 1, 2)]


def test_examples_are_those_of_the_newest_segment_that_has_some(tmp_path: Path) -> None:
    """Each restart lists all examples again; tensor names are kept, since ids belong to their segment."""
    for segment, verb in enumerate(["old", "new"]):
        tables = {"examples": [{"example_id": 1, "verb": verb}], "tensor_names": [{"tensor_id": 0}]}
        write_run(tmp_path / "a", tables, segment=segment)
    write_run(tmp_path / "a", {"examples": []}, segment=2)
    with open_runs([tmp_path / "a"]) as run_log:
        examples = run_log.connection.execute("SELECT segment, verb FROM examples").fetchall()
        names = run_log.connection.execute("SELECT count(*) FROM tensor_names").fetchall()
    assert (examples, names) == ([(1, "new")], [(2,)])


def test_many_small_batches_read_as_one(tmp_path: Path) -> None:
    """Batches of a row each are joined, and nothing is lost or reordered."""
    write_run(tmp_path / "a", {})
    write_stream(tmp_path / "a/log/steps-r0-s0.arrows", "steps", steps_from(0, 99), batch_rows=1)
    with open_runs([tmp_path / "a"]) as run_log:
        read = run_log.streams[-1].stream.rows.column("step")
    assert (read.num_chunks, read.to_pylist()) == (1, list(range(100)))


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        (["x/a", "x/b"], ["a", "b"]),
        (["x/a", "y/a"], ["x/a", "y/a"]),
        (["x/a", "x/a"], ["a"]),
        (["x/a", "y/x/a"], ["RUNS/x/a", "y/x/a"]),
    ],
)
def test_run_names_are_directory_names_made_unique(paths: list[str], expected: list[str]) -> None:
    """Parents are added until the names differ; the same directory twice is one run."""
    base = Path("/RUNS")
    assert list(run_names([base / path for path in paths])) == expected


def dead_process() -> int:
    """The id of a process that has ended."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


STATUSES: list[tuple[str, Callable[[], Any]]] = [
    ("finished", lambda: events("segment_started", "finished")),
    ("failed", lambda: events("segment_started", "exception")),
    ("live", lambda: events("segment_started")),
    ("live", lambda: events("segment_started", host="another-host", pid=1)),
    ("killed", lambda: events("segment_started", pid=dead_process())),
]


@pytest.mark.parametrize(("expected", "rows"), STATUSES)
def test_status_of_a_run(tmp_path: Path, expected: str, rows: Callable[[], Any]) -> None:
    """The closing event decides; without one, whether the process of the last start is still there."""
    assert answer(tmp_path, {"events": rows()}, "SELECT status FROM runs") == [(expected,)]


def test_a_silent_process_is_not_live(tmp_path: Path) -> None:
    """A process that has written nothing for more than a minute does not count as recording."""
    write_run(tmp_path / "a", {"events": events("segment_started")})
    old = time.time() - 61
    os.utime(tmp_path / "a/log/events-r0-s0.arrows", (old, old))
    with open_runs([tmp_path / "a"]) as run_log:
        assert run_log.connection.execute("SELECT status FROM runs").fetchall() == [("killed",)]


def test_the_newest_segment_decides_the_status(tmp_path: Path) -> None:
    """A finished run that was resumed and killed is killed."""
    write_run(tmp_path / "a", {"events": events("segment_started", "finished")})
    write_run(tmp_path / "a", {"events": events("segment_started", pid=dead_process())}, segment=1)
    with open_runs([tmp_path / "a"]) as run_log:
        assert run_log.connection.execute("SELECT status FROM runs").fetchall() == [("killed",)]


def test_runs_tell_the_progress_and_the_declared_roles(tmp_path: Path) -> None:
    """The last loss is the last step's, finite or not."""
    steps = [{"step": 0, "train_loss": 2.0}, {"step": 1, "train_loss": float("inf")}]
    sql = "SELECT run, steps, last_step, last_train_loss, primary_split, group_label, uniform_loss FROM runs"
    rows = answer(tmp_path, {"steps": steps}, sql)
    assert rows == [("run", 2, 1, float("inf"), "validation", "regularity", 3.5)]


def test_reference_losses_are_rows(tmp_path: Path) -> None:
    """Only what the manifest declares is there; floors carry their split."""
    rows = answer(tmp_path, {}, "SELECT reference, split, loss FROM reference_losses ORDER BY loss DESC")
    assert rows == [
        ("uniform", None, 3.5),
        ("unigram", None, 2.8),
        ("entropy_floor", "train", 0.25),
        ("entropy_floor", "validation", 0.2),
    ]


def test_recorded_columns_hold_a_value(tmp_path: Path) -> None:
    """A column of nulls counts as not recorded; a NaN is a value."""
    rows = [{"step": 0, "train_loss": float("nan"), "learning_rate": None}]
    write_run(tmp_path / "a", {"steps": rows})
    with open_runs([tmp_path / "a"]) as run_log:
        assert run_log.recorded_columns("steps") == {"step", "train_loss"}
        assert run_log.recorded_columns("units") == set()
        assert (run_log.has_rows("steps"), run_log.has_rows("units")) == (True, False)


def test_an_empty_log_opens_with_a_warning(tmp_path: Path) -> None:
    """A run killed before its first row can still be looked at."""
    write_run(tmp_path / "a", {"events": []})
    with open_runs([tmp_path / "a"]) as run_log:
        assert run_log.warnings == [f"{tmp_path / 'a/log'}: empty log: not one whole row was written"]


def test_a_run_without_a_log_directory_opens_with_a_warning(tmp_path: Path) -> None:
    """The manifest is written before anything else."""
    run = write_run(tmp_path / "a", {"events": []})
    (run / "log/events-r0-s0.arrows").unlink()
    (run / "log").rmdir()
    with open_runs([run]) as run_log:
        assert run_log.warnings == [f"{run / 'log'}: empty log: not one whole row was written"]


def test_a_missing_directory_is_one_clear_error(tmp_path: Path) -> None:
    """The error says what to do next."""
    with pytest.raises(AnalyzerError) as caught:
        open_runs([tmp_path / "no"])
    assert str(caught.value) == f"{tmp_path / 'no'}: no such run directory: list the runs with: analyzer ls"


def test_a_directory_without_a_manifest_is_no_run(tmp_path: Path) -> None:
    """Any other directory is refused by name."""
    with pytest.raises(AnalyzerError, match=r"not a run directory: no manifest\.json"):
        open_runs([tmp_path])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("seed", "zero"),
        ("config", [1]),
        ("git", [1]),
        ("primary_split", 3),
        ("reference_losses", {"entropy_floor": {"a": "b"}}),
    ],
)
def test_a_malformed_manifest_field_is_named(tmp_path: Path, field: str, value: object) -> None:
    """A hand-edited manifest gives one line, no traceback."""
    run = write_run(tmp_path / "a", {})
    document = json.loads((run / MANIFEST_FILE).read_text())
    (run / MANIFEST_FILE).write_text(json.dumps(document | {field: value}))
    with pytest.raises(AnalyzerError, match=r"is malformed: write it as the recorder's Manifest declares it"):
        open_runs([run])


def test_a_python_variable_is_no_table(tmp_path: Path) -> None:
    """A misspelt table never resolves to data of the analyzer's process."""
    write_run(tmp_path / "a", {})
    secret = pa.table({"x": [1]})
    with open_runs([tmp_path / "a"]) as run_log, pytest.raises(Exception, match="secret does not exist"):
        run_log.query("FROM secret")
    assert secret.num_rows == 1


def test_a_full_run_opens_with_every_table(tmp_path: Path) -> None:
    """The synthetic healthy run fills all tables but micro_batches."""
    with open_runs([healthy_run(tmp_path / "a", steps=100)]) as run_log:
        assert [t.name for t in TABLES if not run_log.has_rows(t.name)] == ["micro_batches"]


def test_a_log_can_be_opened_as_it_was_at_a_step(tmp_path: Path) -> None:
    """Rows of later steps are gone from every table and from `segments`; what has no step stays."""
    run = healthy_run(tmp_path / "run")
    with open_runs([run], until_step=20) as run_log:
        last_steps = {
            table.name: run_log.query(f"SELECT max(step) AS step FROM {table.name}").to_pylist()[0]["step"]
            for table in TABLES
            if "step" in table.column_names() and run_log.has_rows(table.name)
        }
        segments = run_log.query("SELECT last_step FROM segments").to_pylist()
        example_count = run_log.query("SELECT count(*) AS n FROM examples").to_pylist()[0]["n"]
    assert last_steps["steps"] == 20
    assert all(step is None or step <= 20 for step in last_steps.values())
    assert segments == [{"last_step": 20}]
    assert example_count > 0


def test_a_prefix_can_be_taken_again_and_again(tmp_path: Path) -> None:
    """Each prefix is one of the whole log; macros see the rows that are there when they are called."""
    with open_runs([healthy_run(tmp_path / "run")]) as whole:
        counts = [
            whole.until(step).query("SELECT count(*) AS n FROM training_loss_by_step()").to_pylist()[0]["n"]
            for step in (30, 5, 12)
        ]
    assert counts == [31, 6, 13]
