"""Rules of the user's own: applied like ours, and checked with one line for each mistake."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from synthetic import healthy_run, healthy_tables, write_run

from analyzer.cli import main
from analyzer.diagnoses.user_rules import run_rules
from analyzer.errors import AnalyzerError
from analyzer.sandbox import Limits

ROOT = Path(__file__).parent.parent

RULE = """-- Is the last training loss above a bound?
-- Source: what this project wants.
-- title: Not good enough
-- severity: S3
-- requires: steps.train_loss
CREATE OR REPLACE MACRO not_good_enough(
    loss_bound := 0.1 -- nats/token
) AS TABLE
SELECT
    run, -- run directory
    step AS first_step, -- optimizer updates
    step AS last_step, -- optimizer updates
    'train_loss' AS subject, -- quantity
    train_loss AS observed, -- nats/token
    CAST(loss_bound AS DOUBLE) AS threshold, -- nats/token
    format('{:.2f} at step {}', train_loss, step) AS detail -- text
FROM steps
WHERE train_loss > loss_bound
QUALIFY step = max(step) OVER (PARTITION BY run)
ORDER BY run;
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A healthy run directory."""
    return healthy_run(tmp_path_factory.mktemp("runs") / "healthy", steps=120)


def rules(directory: Path, text: str, name: str = "not_good_enough") -> Path:
    """A directory with one rule."""
    directory.mkdir()
    (directory / f"{name}.sql").write_text(text)
    return directory


def test_a_rule_of_ones_own_is_a_cause(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With its title, severity, evidence and steps; it decides the exit code."""
    directory = rules(tmp_path / "rules", RULE)
    assert main(["diagnose", str(run), "--rules", str(directory), "--json"]) == 3
    document = json.loads(capsys.readouterr().out)
    (cause,) = document["causes"]
    assert document["verdict"] == "Not good enough"
    assert (cause["name"], cause["severity"], cause["evidence"]) == ("not_good_enough", "S3", "signature")
    assert cause["findings"][0]["first_step"] == 119
    assert shlex.split(cause["query"]) == ["analyzer", "diagnose", str(run), "--rules", str(directory)]


def test_the_rule_of_the_documentation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It fires from its tenth slow step on, with the words that it writes."""
    (text,) = re.findall(r"```sql\n(.*?)```", (ROOT / "docs/your-own-rules.md").read_text(), re.DOTALL)
    directory = rules(tmp_path / "rules", text, "slow_steps")
    outcomes = []
    for count in (9, 10):
        tables = healthy_tables(120)
        seconds = np.where(np.arange(120) < 120 - count, 0.01, 0.04)
        tables["steps"] = dict(tables["steps"]) | {"step_seconds": seconds}
        path = write_run(tmp_path / f"run-{count}", tables)
        main(["diagnose", str(path), "--rules", str(directory), "--json"])
        outcomes.append(json.loads(capsys.readouterr().out)["causes"])
    assert outcomes[0] == []
    (cause,) = outcomes[1]
    assert (cause["title"], cause["severity"]) == ("Slow steps", "S1")
    assert cause["findings"][0]["detail"] == "10 steps, the slowest 4.0 times the median"


def test_a_rule_whose_input_is_missing_is_not_evaluated(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What it requires is named like for our rules."""
    directory = rules(tmp_path / "rules", RULE.replace("steps.train_loss", "steps.rng_hash"))
    assert main(["diagnose", str(run), "--rules", str(directory)]) == 0
    assert "not evaluated: Not good enough: no steps.rng_hash" in capsys.readouterr().out


def test_headers_are_optional(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The title is the name, the severity S2."""
    text = "\n".join(line for line in RULE.splitlines() if ": " not in line or not line.startswith("-- "))
    text = "-- Is the loss high?\n" + text
    assert main(["diagnose", str(run), "--rules", str(rules(tmp_path / "r", text)), "--json"]) == 3
    document = json.loads(capsys.readouterr().out)
    assert (document["verdict"], document["causes"][0]["severity"]) == ("Not good enough", "S2")


MISTAKES = [
    (RULE.replace("MACRO not_good_enough", "MACRO other"), "no CREATE MACRO not_good_enough(...)"),
    (RULE.replace("AS observed", "AS seen"), "columns run, first_step, last_step, subject, seen, threshold"),
    (RULE.partition("\nCREATE")[2].join(["CREATE", ""]), "no comment above the macro"),
    (RULE.replace("severity: S3", "severity: S9"), "severity S9; expected one of S1, S2, S3, S4"),
    (RULE.replace("severity: S3", "evidence: hunch"), "evidence hunch; expected one of proof"),
    (RULE.replace("FROM steps", "FROM nowhere"), "Table with name nowhere does not exist"),
    (RULE + "DROP VIEW steps;", "2 statements; expected one CREATE MACRO"),
]


@pytest.mark.parametrize(("text", "message"), MISTAKES, ids=[m[1][:30] for m in MISTAKES])
def test_a_mistake_is_one_line(
    run: Path, tmp_path: Path, text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file, what is wrong with it, and exit code 1."""
    directory = rules(tmp_path / "rules", text)
    assert main(["diagnose", str(run), "--rules", str(directory)]) == 1
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert line.startswith(f"analyzer: {directory / 'not_good_enough.sql'}: ")
    assert message in line
    assert captured.out == ""


def test_a_rule_reads_no_files(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The SQL is somebody else's: the engine is locked before it is created."""
    text = RULE.replace("FROM steps", "FROM read_text('/etc/hostname'), steps")
    assert main(["diagnose", str(run), "--rules", str(rules(tmp_path / "rules", text))]) == 1
    assert "disabled by configuration" in capsys.readouterr().err


ENDLESS = RULE.replace(
    "WHERE train_loss > loss_bound",
    "WHERE (SELECT sum(range) FROM range(1000000000000000)) > loss_bound",
)


def test_a_rule_that_takes_too_long_is_stopped(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its file is named, after those that were done in time; the message says how to allow more."""
    directory = rules(tmp_path / "rules", RULE)
    slow = directory / "slow.sql"
    slow.write_text(ENDLESS.replace("not_good_enough", "slow"))
    assert main(["diagnose", str(run), "--rules", str(directory), "--timeout", "1.5"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        f"analyzer: {slow}: rule stopped after 1.5 s: narrow it, or allow more with --timeout SECONDS\n"
    )


def test_the_time_is_for_all_rules_together(run: Path, tmp_path: Path) -> None:
    """A limit that is over before the first rule stops that one, not only what runs for long."""
    directory = rules(tmp_path / "rules", RULE)
    with pytest.raises(AnalyzerError, match=r"not_good_enough\.sql: rule stopped after 0\.001 s"):
        run_rules([run], directory, Limits(timeout_seconds=0.001))


def test_a_rule_that_takes_too_much_memory_is_stopped(run: Path, tmp_path: Path) -> None:
    """The limits are those of a query."""
    text = RULE.replace("'train_loss' AS subject", "repeat('x', 2000000000) AS subject")
    directory = rules(tmp_path / "rules", text)
    with pytest.raises(AnalyzerError) as caught:
        run_rules([run], directory, Limits(data_limit_bytes=2**29))
    file = directory / "not_good_enough.sql"
    assert str(caught.value) == f"{file}: rule stopped: it needs more than 0.5 GiB of memory: narrow it"


def test_a_rule_that_fails_on_its_rows_is_one_line(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What only the data shows to be wrong is said like what the text shows."""
    text = RULE.replace("'train_loss' AS subject", "CAST(format('{}', step) || 'x' AS INTEGER) AS subject")
    directory = rules(tmp_path / "rules", text)
    assert main(["diagnose", str(run), "--rules", str(directory)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        f"analyzer: {directory / 'not_good_enough.sql'}: FROM not_good_enough(): Conversion"
    )


def test_wide_numbers_of_a_rule_become_plain_ones(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A decimal literal as the threshold and a sum as the step: a float and a whole number."""
    text = RULE.replace("CAST(loss_bound AS DOUBLE)", "loss_bound").replace(
        "step AS first_step", "CAST(step AS HUGEINT) AS first_step"
    )
    main(["diagnose", str(run), "--rules", str(rules(tmp_path / "rules", text)), "--json"])
    (finding,) = json.loads(capsys.readouterr().out)["causes"][0]["findings"]
    assert (finding["first_step"], finding["threshold"]) == (119, 0.1)


def test_a_rule_may_not_take_the_name_of_a_query(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It would replace what other rules use."""
    directory = rules(tmp_path / "rules", RULE.replace("not_good_enough", "loss_spikes"), "loss_spikes")
    assert main(["diagnose", str(run), "--rules", str(directory)]) == 1
    assert "loss_spikes is a query of the library: give the rule another name" in capsys.readouterr().err


@pytest.mark.parametrize("exists", [True, False])
def test_a_directory_without_rules_is_an_error(
    run: Path, tmp_path: Path, exists: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Asking for rules and applying none would be a silent pass."""
    directory = tmp_path / "rules"
    if exists:
        directory.mkdir()
    assert main(["diagnose", str(run), "--rules", str(directory)]) == 1
    assert ("no .sql file in it" if exists else "no such directory") in capsys.readouterr().err
