"""The reports in the experiment folders: their queries run, and their numbers are committed results."""

import csv
import re
from pathlib import Path

import pytest

from analyzer.run_log import open_runs
from experiments.experiment import (
    EXPERIMENTS_DIRECTORY,
    configure,
    experiment_names,
    load_experiment,
    run_experiment,
)

REPORTS = sorted(EXPERIMENTS_DIRECTORY.glob("*/README.md"))
OVERFIT = EXPERIMENTS_DIRECTORY / "19-overfit"


@pytest.fixture(scope="module")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps with every table that a report asks for."""
    out = tmp_path_factory.mktemp("runs") / "tiny"
    settings = ["total_steps=4", "evaluation_interval=2", "width=16", "layer_count=1"]
    run_experiment(
        load_experiment("19-healthy"), configure(load_experiment("19-healthy"), None, settings), out
    )
    return out


def queries_of(report: Path) -> list[str]:
    """The statements of all SQL blocks of a report."""
    blocks = re.findall(r"```sql\n(.*?)```", report.read_text(encoding="utf-8"), re.DOTALL)
    return [query.strip() for block in blocks for query in block.split(";") if query.strip()]


def rows_of(name: str) -> list[dict[str, str]]:
    with (OVERFIT / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_every_experiment_has_a_report() -> None:
    """One README per folder."""
    assert [path.parent.name for path in REPORTS] == list(experiment_names())


@pytest.mark.parametrize("report", REPORTS, ids=lambda path: path.parent.name)
def test_every_quoted_query_runs(report: Path, tiny_run: Path) -> None:
    """On a real run, through the analyzer's own views and macros."""
    with open_runs([tiny_run]) as run_log:
        for query in queries_of(report):
            assert run_log.query(query).num_columns > 0, query


def test_overfit_onset_is_the_minimum_of_the_committed_curve() -> None:
    """minimum_step is where validation is lowest; a later confirmation proves it."""
    losses, onsets = rows_of("losses.csv"), rows_of("onset.csv")
    final = {row["run"]: row for row in onsets if row["is_superseded"] == "false"}
    for run in {row["run"] for row in losses}:
        curve = {int(r["step"]): float(r["validation"]) for r in losses if r["run"] == run}
        lowest = min(curve, key=curve.__getitem__)
        assert int(final[run]["minimum_step"]) == lowest
        assert int(final[run]["confirmed_step"]) > lowest
        assert curve[8000] > curve[lowest] + 0.02


def test_overfit_report_quotes_the_committed_onsets() -> None:
    """Seed, minimum, confirmation and losses of each row of the table."""
    text = (OVERFIT / "README.md").read_text(encoding="utf-8")
    for row in rows_of("onset.csv"):
        if row["is_superseded"] == "false":
            seed = row["run"].rpartition("-")[2]
            losses = f"{float(row['minimum_loss']):.3f} | {float(row['confirmed_loss']):.3f}"
            assert f"| {seed} | {row['minimum_step']} | {row['confirmed_step']} | {losses} |" in text


def test_overfit_report_quotes_the_committed_gaps() -> None:
    """Train/validation gap of regular and irregular verbs, and the tax, seed by seed at four steps."""
    text = (OVERFIT / "README.md").read_text(encoding="utf-8")
    rows = {(row["run"].rpartition("-")[2], row["step"]): row for row in rows_of("losses.csv")}
    for step in ("2000", "4000", "6000", "8000"):
        cells = []
        for quantity in (
            lambda r: float(r["regular_validation"]) - float(r["regular_train"]),
            lambda r: float(r["irregular_validation"]) - float(r["irregular_train"]),
            lambda r: float(r["irregular_validation"]) - float(r["regular_validation"]),
        ):
            cells.append(", ".join(f"{quantity(rows[seed, step]):.2f}" for seed in "012"))
        assert f"| {step} | {' | '.join(cells)} |" in text
