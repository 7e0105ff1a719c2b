"""The commands: results on stdout, everything else on stderr, and exit codes for scripts."""

from __future__ import annotations

import dataclasses
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from synthetic import MANIFEST, healthy_run, healthy_tables, write_run

from analyzer.cli import main
from analyzer.commands.sql import is_query
from analyzer.diagnoses import DIAGNOSES

Runs = Path


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """A directory with a healthy run, a run with a broken mask and a spike, and a broken run."""
    directory = tmp_path_factory.mktemp("runs")
    healthy_run(directory / "healthy")
    write_run(directory / "leak", leaking_tables(), MANIFEST)
    write_run(directory / "newer", {}, dataclasses.replace(MANIFEST, schema_version=9))
    (directory / "notes").mkdir()
    return directory


def leaking_tables() -> dict[str, Any]:
    """The healthy tables, with attention to the future from step 2 on and one spike."""
    tables = healthy_tables()
    attention = dict(tables["attention"])
    attention["future_mass"] = [0.5 * (step >= 2) for step in attention["step"]]
    attention["future_mass_beyond_next"] = [0.4 * (step >= 2) for step in attention["step"]]
    steps = dict(tables["steps"])
    steps["train_loss"] = [9.0 if i == 150 else x for i, x in enumerate(steps["train_loss"])]
    return tables | {"attention": attention, "steps": steps}


def lines(text: str) -> list[str]:
    """Non-empty lines."""
    return [line for line in text.splitlines() if line]


def test_ls_lists_runs_and_says_what_is_broken(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    """A run that cannot be read is a row, and other directories are none."""
    assert main(["ls", str(runs), "--json"]) == 0
    rows = {row["run"]: row for row in json.loads(capsys.readouterr().out)}
    assert list(rows) == ["healthy", "leak", "newer"]
    healthy = rows["healthy"]
    assert (healthy["status"], healthy["steps"], healthy["verdict"]) == ("finished", 300, "clear")
    assert healthy["last_loss"] == pytest.approx(0.74, abs=0.05)  # 0.3 + 3.2 exp(-299/150) +- 4 sigma of 1%
    assert rows["leak"]["verdict"] == "Broken causal mask"
    assert (rows["newer"]["status"], rows["newer"]["verdict"]) == ("unreadable", None)
    assert rows["newer"]["error"].endswith("schema version 9; this analyzer reads 1-2: upgrade it")


def test_ls_prints_a_table(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    """One line per run under a header."""
    assert main(["ls", str(runs)]) == 0
    shown = [line.split()[0] for line in lines(capsys.readouterr().out)]
    assert shown == ["run", "healthy", "leak", "newer"]


def test_ls_goes_on_after_a_file_that_is_gone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run that is being deleted is a row that says why; those after it are listed."""
    for name in ("a", "b"):
        healthy_run(tmp_path / name, steps=20)
    gone = tmp_path / "a" / "log" / "units-r0-s0.arrows"
    gone.unlink()
    gone.symlink_to(tmp_path / "nowhere")
    assert main(["ls", str(tmp_path), "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert (first["status"], first["error"]) == (
        "unreadable",
        f"{gone}: unreadable: No such file or directory",
    )
    assert (second["run"], second["error"]) == ("b", None)


def test_ls_of_an_empty_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing to list is no error, and is said on stderr."""
    assert main(["ls", str(tmp_path), "--json"]) == 0
    captured = capsys.readouterr()
    assert (json.loads(captured.out), captured.err) == ([], f"analyzer: {tmp_path}: no runs here\n")


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("FROM steps", True),
        ("from(steps)", True),
        ("select", True),
        ("SUMMARIZE steps", True),
        ("runs/a", False),
        ("from-scratch", False),
        ("selection", False),
    ],
)
def test_what_counts_as_a_query(argument: str, expected: bool) -> None:
    """White space or a leading keyword makes SQL; a longer word does not."""
    assert is_query(argument) is expected


def test_an_existing_directory_is_a_run_whatever_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name with a space in it can still be opened."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "from here").mkdir()
    assert is_query("from here") is False


def test_sql_prints_a_table(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    """Several runs get a run column, as every view has one."""
    sql = "SELECT run, count(*) AS rows FROM steps GROUP BY run ORDER BY run"
    assert main(["sql", str(runs / "leak"), str(runs / "healthy"), sql]) == 0
    assert capsys.readouterr().out == "run      rows\nhealthy   300\nleak      300\n"


def test_sql_writes_every_format(runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """CSV and JSON to a file with -o, Parquet to its own."""
    run, sql = str(runs / "healthy"), "SELECT step FROM steps WHERE step < 2 ORDER BY step"
    assert main(["sql", run, sql, "--csv", "-o", str(tmp_path / "x.csv")]) == 0
    assert main(["sql", run, sql, "--json", "-o", str(tmp_path / "x.json")]) == 0
    assert main(["sql", run, sql, "--parquet", str(tmp_path / "x.parquet")]) == 0
    assert (tmp_path / "x.csv").read_text() == "step\n0\n1\n"
    assert json.loads((tmp_path / "x.json").read_text()) == [{"step": 0}, {"step": 1}]
    assert pq.read_table(tmp_path / "x.parquet").to_pydict() == {"step": [0, 1]}
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("FROM steps", "--parquet", "x.parquet", "-o", "y"), "--parquet and -o each name a file to write"),
        (("--parquet", "x.parquet"), "--parquet writes the rows of a query"),
    ],
)
def test_a_file_that_would_not_be_written_is_refused(
    runs: Runs, arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Usage, exit code 2, before anything is read."""
    with pytest.raises(SystemExit) as exit_of:
        main(["sql", str(runs / "healthy"), *arguments])
    assert exit_of.value.code == 2
    assert message in capsys.readouterr().err


def test_sql_without_a_query_lists_what_there_is(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    """Tables with units and labels, what was not recorded, and each query with its first line."""
    assert main(["sql", str(runs / "healthy")]) == 0
    text = capsys.readouterr().out
    assert "steps: one row per optimizer step\n" in text
    assert "micro_batches: one row per micro-batch of an accumulated step (not recorded)\n" in text
    assert ["verb", "text", "label"] in [line.split() for line in lines(text)]
    rate = next(line for line in lines(text) if line.startswith("  gradient_cosine_previous"))
    assert rate.endswith("(not recorded)")
    assert "FROM resumes()\n  Where a run was started again" in text


def test_diagnose_of_a_healthy_run(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    """Clear, exit code 0."""
    assert main(["diagnose", str(runs / "healthy")]) == 0
    assert lines(capsys.readouterr().out)[0].startswith(f"{runs / 'healthy'}: clear, ")


def test_diagnose_names_the_cause_with_its_evidence(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    """Verdict first; since when, where, observed, remedy, the query, and what it explains; exit code 3."""
    assert main(["diagnose", str(runs / "leak")]) == 3
    text = capsys.readouterr().out
    first = lines(text)[:6]
    assert first[:5] == [
        f"{runs / 'leak'}: Broken causal mask",
        "Broken causal mask (proof, S3)",
        "  since     step 2 to 299",
        "  where     layer 0 head 0",
        "  observed  0.5 against a threshold of 0",
    ]
    assert f"  query     analyzer sql {runs / 'leak'} 'FROM causal_mask_absent()'" in lines(text)
    (explains,) = [line for line in lines(text) if line.startswith("  explains")]
    assert "Loss spike" in explains
    (clear,) = [line for line in lines(text) if line.startswith("clear: ")]
    assert {"Loss below the entropy floor", "Non-finite value", "Overfitting"} <= set(clear[7:].split(", "))


def test_diagnose_gives_a_query_that_shows_the_evidence(
    runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command can be pasted: its words are those of this command line."""
    main(["diagnose", str(runs / "leak"), "--json"])
    command = json.loads(capsys.readouterr().out)["causes"][0]["query"]
    program, *arguments = shlex.split(command)
    assert program == "analyzer"
    assert main([*arguments, "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["subject"], row["first_step"], row["observed"]) == ("layer 0 head 0", 2, 0.5)


def test_diagnose_as_json(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    """Verdict in words, causes with findings and symptoms, and the rest by name."""
    assert main(["diagnose", str(runs / "leak"), "--json"]) == 3
    document = json.loads(capsys.readouterr().out)
    assert document["verdict"] == "Broken causal mask"
    (cause,) = document["causes"]
    assert (cause["name"], cause["severity"], cause["evidence"]) == ("causal_mask_absent", "S3", "proof")
    assert "loss_spike" in [symptom["name"] for symptom in cause["explains"]]
    assert {"loss_below_entropy_floor", "nonfinite_value", "overfitting"} <= set(document["clear"])
    told = [cause["name"], *(s["name"] for s in cause["explains"]), *document["clear"]]
    told += [rule["name"] for rule in document["not_evaluated"]]
    assert sorted(told) == sorted(diagnosis.name for diagnosis in DIAGNOSES)


def test_diagnose_says_what_was_not_evaluated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The missing column stands beside the rule."""
    tables = healthy_tables(steps=100)
    del tables["attention"]
    run = write_run(tmp_path / "a", tables)
    assert main(["diagnose", str(run)]) == 0
    assert "not evaluated: Broken causal mask: no attention.future_mass" in lines(capsys.readouterr().out)


@pytest.mark.parametrize(("level", "code"), [("S1", 3), ("S2", 0), ("S4", 0)])
def test_fail_on_decides_the_exit_code(tmp_path: Path, level: str, code: int) -> None:
    """A spike alone is S1: below the default, so it does not fail a script."""
    tables = healthy_tables()
    tables["steps"] = leaking_tables()["steps"]
    run = write_run(tmp_path / "a", tables)
    assert main(["diagnose", str(run), "--fail-on", level]) == code


def test_render_writes_the_page_and_prints_path_and_verdict(
    runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line: where it is and what it says."""
    page = tmp_path / "page.html"
    assert main(["render", str(runs / "healthy"), "-o", str(page)]) == 0
    assert capsys.readouterr().out == f"{page}: clear\n"
    assert page.read_text().lstrip().lower().startswith("<!doctype html>")
    assert [p.name for p in tmp_path.iterdir()] == ["page.html"]


def test_render_of_several_runs_goes_on_after_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each run gets its own page beside its log; the one that fails is one line on stderr, exit code 1."""
    good = write_run(tmp_path / "good", healthy_tables(steps=100))
    assert main(["render", str(tmp_path / "no"), str(good)]) == 1
    captured = capsys.readouterr()
    assert captured.out == f"{good / 'dashboard.html'}: clear\n"
    assert (
        captured.err
        == f"analyzer: {tmp_path / 'no'}: no such run directory: list the runs with: analyzer ls\n"
    )


@pytest.mark.parametrize("command", ["ls", "sql", "diagnose", "render"])
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The module's docstring, whole."""
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    assert f"usage: analyzer {command}" in capsys.readouterr().out


def test_a_reader_that_closes_the_pipe_sees_no_traceback(runs: Runs) -> None:
    """``analyzer sql ... | head`` ends quietly."""
    sql = "FROM range(1000000)"
    command = (
        f"{shlex.quote(sys.executable)} -m analyzer sql {shlex.quote(str(runs / 'healthy'))} '{sql}' --csv"
    )
    result = subprocess.run(
        ["bash", "-o", "pipefail", "-c", f"{command} | head -n 1"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "range\n", "")


def test_the_module_is_the_command(runs: Runs) -> None:
    """``python -m analyzer`` passes the exit code on."""
    command = [sys.executable, "-m", "analyzer", "diagnose", str(runs / "leak")]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 3


def test_sql_takes_a_query_longer_than_a_file_name(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    """A long query is not tried as a path that no file system could hold."""
    steps = ", ".join(str(step) for step in range(1000))
    query = f"SELECT max(step) AS total FROM steps WHERE step IN ({steps})"
    assert main(["sql", str(runs / "healthy"), query, "--csv"]) == 0
    assert capsys.readouterr().out.splitlines() == ["total", "299"]
