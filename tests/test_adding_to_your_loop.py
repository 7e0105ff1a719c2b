"""The page on how to add the recorder to a loop: its snippets run as printed, and record what it says."""

import re
from pathlib import Path
from typing import Any

import pytest

from analyzer.run_log import open_runs
from recorder import Cadence

PAGE = Path(__file__).parent.parent / "docs" / "adding-to-your-loop.md"
SNIPPETS = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of the runs that all snippets, one after the other, have recorded."""
    directory = tmp_path_factory.mktemp("page")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        setting: dict[str, Any] = {"__name__": "page"}
        for snippet in SNIPPETS:
            exec(compile(snippet, PAGE.name, "exec"), setting)
    return directory / "runs"


def query(runs: Path, run: str, sql: str) -> list[dict[str, Any]]:
    """Rows of one run."""
    with open_runs([runs / run]) as run_log:
        rows: list[dict[str, Any]] = run_log.query(sql).to_pylist()
    return rows


def test_every_run_is_finished_and_without_a_warning(runs: Path) -> None:
    """Nothing was lost, nothing raised, and the page names no other runs."""
    names = {path.name for path in runs.iterdir()}
    assert names == set(re.findall(r"Recorder\(\"runs/([\w-]+)\"", "".join(SNIPPETS)))
    for name in names:
        assert query(runs, name, "SELECT status FROM runs") == [{"status": "finished"}]
        assert query(runs, name, "SELECT message FROM events WHERE kind = 'warning'") == []


def test_five_lines_record_weights_gradients_updates_and_loss(runs: Path) -> None:
    """What the page promises for five lines is there, and the loss of its loop falls."""
    kinds = query(runs, "five-lines", "SELECT DISTINCT kind FROM tensors_all ORDER BY kind")
    assert [row["kind"] for row in kinds] == ["gradient", "update", "weight"]
    losses = query(runs, "five-lines", "SELECT train_loss FROM steps_all WHERE segment = 0 ORDER BY step")
    assert len(losses) == 100 and losses[-1]["train_loss"] < 0.7 * losses[0]["train_loss"]


def test_a_resume_keeps_both_histories(runs: Path) -> None:
    """Current rows are 80 steps of the first segment and 40 of the second; all rows are all."""
    current = query(
        runs, "five-lines", "SELECT segment, count(*) AS n FROM steps GROUP BY segment ORDER BY segment"
    )
    assert current == [{"segment": 0, "n": 80}, {"segment": 1, "n": 40}]
    assert query(runs, "five-lines", "SELECT count(*) AS n FROM steps_all") == [{"n": 140}]


def test_labels_events_and_evaluations_are_recorded(runs: Path) -> None:
    """Five evaluations of 100 examples, with the label column of the user's own, and one note."""
    by_side = query(
        runs,
        "intended",
        "SELECT side, count(*) AS n FROM example_losses JOIN examples USING (example_id) GROUP BY side",
    )
    assert {row["side"] for row in by_side} == {"left", "right"} and sum(row["n"] for row in by_side) == 500
    assert len(query(runs, "intended", "FROM loss_by_label(label_name := 'side')")) > 0
    assert len(query(runs, "intended", "SELECT * FROM events WHERE kind = 'note'")) == 1


def test_activations_and_micro_batches_are_recorded(runs: Path) -> None:
    """The loop without hooks gives both by hand."""
    activations = query(runs, "activations", "SELECT count(*) AS n FROM tensors WHERE kind = 'activation'")
    assert activations[0]["n"] == 30 // Cadence().activations
    assert query(runs, "accumulated", "SELECT count(*) AS n FROM micro_batches") == [{"n": 40}]


def test_the_budget_of_a_tiny_loop_slows_the_cadences(runs: Path) -> None:
    """Steps of a tenth of a millisecond can not pay for statistics: the event says what is in force."""
    assert len(query(runs, "budget", "SELECT * FROM events WHERE kind = 'cadence'")) > 0


def test_both_ranks_are_there(runs: Path) -> None:
    """Five steps each."""
    counts = query(runs, "ranks", "SELECT rank, count(*) AS n FROM steps GROUP BY rank ORDER BY rank")
    assert counts == [{"rank": 0, "n": 5}, {"rank": 1, "n": 5}]
