"""Bad input to the commands: one line on stderr that says what, where and what to do, and an exit code."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from synthetic import MANIFEST, write_run

from analyzer.cli import main
from analyzer.diagnoses import assess
from analyzer.run_log import open_runs
from analyzer.streams import read_stream
from recorder import Recorder
from recorder.schema import parse_stream_name, table


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with one step."""
    return write_run(tmp_path_factory.mktemp("runs") / "a", {"steps": [{"step": 0, "train_loss": 1.0}]})


@pytest.fixture
def empty_run(tmp_path: Path) -> Path:
    """A run that was killed before its first row."""
    return write_run(tmp_path / "a", {"events": []})


def test_wrong_sql_shows_the_position(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The engine's message with its mark, and exit code 1."""
    assert main(["sql", str(run), "SELECT nope FROM steps"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith('analyzer: Binder Error: Referenced column "nope" not found')
    assert captured.err.splitlines()[-2:] == ["LINE 1: SELECT nope FROM steps", "               ^^^^"]


@pytest.mark.parametrize("sql", ["COPY steps TO 'x.csv'", "FROM 'x.csv'"])
def test_sql_that_touches_files_is_refused(run: Path, capsys: pytest.CaptureFixture[str], sql: str) -> None:
    """One line, exit code 1."""
    assert main(["sql", str(run), sql]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_diagnose_of_an_empty_log_is_an_error(empty_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing evaluated is neither clear nor a finding."""
    assert main(["diagnose", str(empty_run)]) == 1
    captured = capsys.readouterr()
    assert captured.out.splitlines()[0] == f"{empty_run}: not evaluated"
    assert captured.err.splitlines() == [
        f"analyzer: warning: {empty_run / 'log'}: empty log: not one whole row was written",
        f"analyzer: {empty_run}: no rule could be evaluated: the log has none of the columns they need",
    ]


def test_an_empty_log_renders(empty_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A process killed at any moment leaves a run that renders."""
    assert main(["render", str(empty_run)]) == 0
    assert capsys.readouterr().out == f"{empty_run / 'dashboard.html'}: not evaluated\n"


@pytest.fixture
def closed_run(tmp_path: Path) -> Path:
    """A run of 200 steps that a real recorder closed."""
    weights, random = {"w": np.ones((4, 4), np.float32)}, np.random.default_rng(0)
    with Recorder(tmp_path / "closed", quiet=True) as recorder:
        recorder.watch(weights)
        for step in range(200):
            with recorder.step(step) as record:
                record.add_gradients({"w": random.standard_normal((4, 4), dtype=np.float32)})
                weights["w"] += 0.001
                record.log(loss_sum=1.0, loss_token_count=1)
            if step % 50 == 49:
                recorder.flush()  # several batches, so that a part of them can be lost
    return tmp_path / "closed"


def test_the_closing_event_counts_what_is_there(closed_run: Path) -> None:
    """So nothing is missing, and rules may say clear."""
    with open_runs([closed_run]) as run_log:
        assert (run_log.warnings, run_log.lost_row_count("closed")) == ([], 0)
        assert any(a.outcome == "clear" for a in assess(run_log))


def cut(path: Path) -> None:
    """Take the last third away."""
    os.truncate(path, 2 * path.stat().st_size // 3)


@pytest.mark.parametrize("stream", ["steps", "tensors", "weights"])
@pytest.mark.parametrize("damage", [cut, Path.unlink])
def test_rows_that_a_closed_log_has_lost_make_nothing_clear(
    closed_run: Path, stream: str, damage: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """A killed process leaves a cut file, too, but no closing event that tells of more rows."""
    path = closed_run / "log" / f"{stream}-r0-s0.arrows"
    before = rows_of(path)
    damage(path)
    left = rows_of(path) if path.exists() else 0
    assert main(["diagnose", str(closed_run)]) == 1
    captured = capsys.readouterr()
    assert captured.out.splitlines()[0] == f"{closed_run}: not evaluated"
    assert (
        f"analyzer: warning: {path}: damaged: {left} of {before} rows are left" in captured.err.splitlines()
    )
    assert captured.err.splitlines()[-1].endswith("no rule could be evaluated: the log is damaged")
    assert main(["ls", str(closed_run.parent), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["verdict"] == "not evaluated"


def rows_of(path: Path) -> int:
    """Rows of a stream's whole batches."""
    name, rank, segment = parse_stream_name(path.name) or ("", 0, 0)
    return read_stream(path, table(name), rank, segment).rows.num_rows


def run_commands(path: Path) -> list[list[str]]:
    """Every command that opens a run."""
    return [
        ["sql", str(path), "FROM steps"],
        ["sql", str(path)],
        ["diagnose", str(path)],
        ["render", str(path)],
    ]


BAD_RUNS: list[tuple[Callable[[Path], Path], str]] = [
    (lambda base: base / "no", "no such run directory: list the runs with: analyzer ls"),
    (lambda base: base, "not a run directory: no manifest.json; name a directory that a recorder wrote"),
    (
        lambda base: write_run(base / "a", {}, dataclasses.replace(MANIFEST, schema_version=9)),
        "schema version 9; this analyzer reads 1-2: upgrade it",
    ),
]


@pytest.mark.parametrize(("make", "words"), BAD_RUNS, ids=["missing", "foreign", "newer"])
def test_a_bad_run_is_one_line_and_exit_code_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], make: Callable[[Path], Path], words: str
) -> None:
    """The same for every command: nothing on stdout, one line on stderr."""
    for command in run_commands(make(tmp_path)):
        assert main(command) == 1
        captured = capsys.readouterr()
        assert captured.out == ""
        assert len(captured.err.splitlines()) == 1
        assert captured.err.startswith("analyzer: ")
        assert words in captured.err


def test_output_that_cannot_be_written_is_one_line(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The line names the file; exit code 1."""
    target = run / "no" / "page.html"
    for command in (["render"], ["sql", "FROM steps"]):
        assert main([command[0], str(run), *command[1:], "-o", str(target)]) == 1
        expected = f"analyzer: {target}: cannot write: No such file or directory: name another file with -o\n"
        assert capsys.readouterr().err == expected


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["fly"],
        ["sql"],
        ["sql", "FROM steps"],
        ["sql", "a", "FROM steps", "FROM units"],
        ["sql", "a", "FROM steps", "--timeout", "0"],
        ["diagnose", "a", "--fail-on", "S5"],
        ["render", "a", "b", "-o", "page.html"],
    ],
)
def test_wrong_usage_is_exit_code_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """The usage is printed on stderr."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    captured = capsys.readouterr()
    assert (caught.value.code, captured.out) == (2, "")
    assert captured.err.startswith("usage: analyzer")
