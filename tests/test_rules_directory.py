"""Rules of the user's own: checked like ours, and shut in like any SQL that a person types."""

from pathlib import Path

import pytest
from synthetic import healthy_run

from analyzer.cli import main

RULE = """-- Is a training loss above the threshold?
-- title: Loss above one
-- severity: S1
-- requires: steps.train_loss
CREATE OR REPLACE MACRO loss_above_one(
    loss_threshold := 1.0 -- nats/token
) AS TABLE
SELECT run, min(step) AS first_step, max(step) AS last_step, 'train_loss' AS subject,
    max(train_loss) AS observed, loss_threshold AS threshold, 'mine' AS detail
FROM steps WHERE isfinite(train_loss) AND train_loss > loss_threshold GROUP BY run ORDER BY run;
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A healthy run, whose loss begins above one."""
    return healthy_run(tmp_path / "run")


def diagnose(run: Path, rules: Path) -> int:
    """Exit code of ``analyzer diagnose RUN --rules DIR --fail-on S1``."""
    return main(["diagnose", str(run), "--rules", str(rules), "--fail-on", "S1"])


def write_rule(directory: Path, text: str) -> Path:
    """A directory with one rule."""
    directory.mkdir()
    (directory / "loss_above_one.sql").write_text(text, encoding="utf-8")
    return directory


def test_a_rule_of_ones_own_fires(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its title is the verdict, and the exit code follows its severity."""
    assert diagnose(run, write_rule(tmp_path / "rules", RULE)) == 3
    assert capsys.readouterr().out.splitlines()[0] == f"{run}: Loss above one"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (RULE.replace("'mine' AS detail", "'mine' AS remark"), "expected run, first_step"),
        (RULE.replace("MACRO loss_above_one", "MACRO other"), "no CREATE MACRO loss_above_one"),
        (RULE.replace("severity: S1", "severity: S9"), "severity S9; expected one of"),
        (RULE.replace("FROM steps", "FROM read_csv('/etc/passwd')"), "loss_above_one.sql"),
        (RULE + "DROP VIEW steps;", "2 statements; expected one CREATE MACRO"),
    ],
)
def test_what_is_no_rule_is_one_line(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, told: str
) -> None:
    """The file, what is wrong with it, and exit code 1."""
    assert diagnose(run, write_rule(tmp_path / "rules", text)) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert told in line


def test_a_missing_directory_is_one_line(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A typing error in the path."""
    assert diagnose(run, tmp_path / "nowhere") == 1
    assert "no such directory" in capsys.readouterr().err
