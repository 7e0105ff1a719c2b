"""The command diagnose on several runs, with a control, and around spikes; and the command explain."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from query_call import answer
from rule_run import diagnosis, healthy
from synthetic import MANIFEST, healthy_run, healthy_tables, write_run

from analyzer.cli import main
from analyzer.diagnoses import DIAGNOSES, Assessment, Finding
from analyzer.diagnoses.document import markdown
from analyzer.diagnosis_report import Judgement, report_text

ROOT = Path(__file__).parent.parent
OTHER_SEED = dataclasses.replace(MANIFEST, seed=1)


def with_spike(steps: int = 1) -> dict[str, Any]:
    """Every table of the complete run, its loss high from step 150 on; bad_batch (S2) is over in three."""
    tables = healthy(250)
    loss = [9.0 if 150 <= i < 150 + steps else x for i, x in enumerate(tables["steps"]["train_loss"])]
    return tables | {"steps": dict(tables["steps"]) | {"train_loss": loss}}


def worse(tables: Mapping[str, Any], factor: float) -> dict[str, Any]:
    """The tables with higher losses on every example."""
    losses = dict(tables["example_losses"])
    losses["loss_sum"] = [factor * x for x in losses["loss_sum"]]
    return {**tables, "example_losses": losses}


def diagnosed(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    """What diagnose says as JSON."""
    main(["diagnose", *arguments, "--json"])
    return json.loads(capsys.readouterr().out)


def test_several_runs_get_a_verdict_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A list in the order given; the exit code is that of the worst."""
    first = healthy_run(tmp_path / "a", steps=120)
    second = write_run(tmp_path / "b", with_spike(), OTHER_SEED)
    assert main(["diagnose", str(first), str(second), "--json", "--fail-on", "S1"]) == 3
    documents = json.loads(capsys.readouterr().out)
    assert [d["run"] for d in documents] == [str(first), str(second)]
    assert [d["verdict"] for d in documents] == ["clear", "Bad batch"]


def test_several_runs_as_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One after another, each with its path and verdict first, and how much of it was not looked at."""
    runs = [healthy_run(tmp_path / name, steps=60, seed=i) for i, name in enumerate("ab")]
    assert main(["diagnose", *map(str, runs)]) == 0
    lines = capsys.readouterr().out.splitlines()
    skipped = sum(line.startswith("not evaluated: ") for line in lines) // 2
    assert 0 < skipped < len(DIAGNOSES)
    words = f"clear, {skipped} of {len(DIAGNOSES)} rules not evaluated"
    assert [f"{run}: {words}" in lines for run in runs] == [True, True]


def fired(name: str, *steps: tuple[int | None, int | None]) -> Assessment:
    """A rule that fired from a first to a last step, several times."""
    findings = tuple(Finding("run", *pair, "subject", 1.0, 0.0, "detail", 1) for pair in steps)
    return Assessment(diagnosis(name), "fired", (), findings)


@pytest.mark.parametrize(
    ("steps", "words"),
    [((2, 9), "step 2 to 9"), ((2, 2), "step 2"), ((2, None), "step 2"), ((None, None), "the whole run")],
)
def test_a_finding_tells_its_steps(steps: tuple[int | None, int | None], words: str) -> None:
    """No step is called None: a finding may concern the whole run, or have no end."""
    judgement = Judgement(Path("run"), (fired("dead_units", steps),), (), None)
    assert f"  since     {words}" in report_text(judgement).splitlines()


def test_a_symptom_tells_each_step_once() -> None:
    """Three splits below their floor since one evaluation are one step."""
    cause = fired("causal_mask_absent", (0, 400))
    symptom = fired("loss_below_entropy_floor", (200, 400), (200, 400), (100, 400))
    text = report_text(Judgement(Path("run"), (cause, symptom), (), None))
    assert "  explains  Loss below the entropy floor (steps 100, 200)" in text.splitlines()


@pytest.mark.parametrize(("factor", "severity", "code"), [(1.05, "S2", 3), (1.0, "S1", 0), (0.9, "S1", 0)])
def test_a_control_raises_an_anomaly_to_harm(
    tmp_path: Path, factor: float, severity: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Worse on every held-out example: the interval excludes zero. Equal or better: it stays S1."""
    run = write_run(tmp_path / "run", worse(with_spike(steps=10), factor))
    control = healthy_run(tmp_path / "control", steps=250)
    assert main(["diagnose", str(run), "--control", str(control), "--json"]) == code
    document = json.loads(capsys.readouterr().out)
    assert document["causes"][0]["severity"] == severity
    assert document["control"]["control"] == "control"
    assert document["control"]["split"] == "validation"


def test_harm_that_no_rule_explains_is_a_finding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Worse than the control for certain, and nothing fired: no run like that is clear."""
    run = write_run(tmp_path / "run", worse(healthy(200), 2.0))
    control = write_run(tmp_path / "control", healthy(200))
    assert main(["diagnose", str(run), "--control", str(control)]) == 3
    assert capsys.readouterr().out.splitlines()[0] == f"{run}: Unexplained: worse than its control"
    assert main(["diagnose", str(run), "--control", str(control), "--fail-on", "S3"]) == 0
    capsys.readouterr()
    assert diagnosed(capsys, str(run), "--control", str(control))["verdict"].startswith("Unexplained: worse")


def test_the_query_of_a_rule_on_two_runs_names_both(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Pasted, it shows the row; with one run it would show none."""
    tables = dict(healthy(120))
    other = {
        **tables,
        "steps": dict(tables["steps"]) | {"batch_hash": np.asarray(tables["steps"]["step"]) + 1},
    }
    runs = [write_run(tmp_path / "a", tables), write_run(tmp_path / "b", other)]
    document = diagnosed(capsys, *map(str, runs))[0]
    assert document["verdict"] == "Nondeterminism"
    arguments = shlex.split(document["causes"][0]["query"])
    assert arguments[:4] == ["analyzer", "sql", str(runs[0]), str(runs[1])]
    assert main([*arguments[1:], "--json"]) == 0
    assert [row["subject"] for row in json.loads(capsys.readouterr().out)] == ["batch", "batch"]


def test_the_control_is_told_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Difference, interval, step, and what it means."""
    run = write_run(tmp_path / "run", worse(healthy(200), 2.0))
    control = write_run(tmp_path / "control", healthy(200))
    main(["diagnose", str(run), "--control", str(control)])
    (line,) = [x for x in capsys.readouterr().out.splitlines() if x.startswith("against control: ")]
    assert "nats/token (" in line
    assert line.endswith(" at step 200, worse beyond its interval")


def test_a_run_that_ended_in_nan_is_worse_than_its_control(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No difference can be told, but the harm can."""
    run = write_run(tmp_path / "run", worse(with_spike(steps=10), float("nan")))
    control = healthy_run(tmp_path / "control", steps=250)
    assert main(["diagnose", str(run), "--control", str(control)]) == 3
    (line,) = [x for x in capsys.readouterr().out.splitlines() if x.startswith("against control: ")]
    assert "is not finite on any of " in line
    main(["diagnose", str(run), "--control", str(control), "--json"])
    document = json.loads(capsys.readouterr().out)
    assert document["control"]["gap"] is None
    assert {cause["severity"] for cause in document["causes"]}.isdisjoint({"S1"})


def test_a_control_without_common_evaluations_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line that says what to give instead."""
    run = healthy_run(tmp_path / "run", steps=60)
    control = write_run(tmp_path / "control", healthy_tables(60) | {"example_losses": []})
    assert main(["diagnose", str(run), "--control", str(control)]) == 1
    assert "no common evaluation of the primary split" in capsys.readouterr().err


def test_a_run_is_not_its_own_control(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It would never be worse."""
    run = healthy_run(tmp_path / "run", steps=60)
    assert main(["diagnose", str(run), "--control", str(run)]) == 1
    assert "is the run itself: name another run as its control" in capsys.readouterr().err


# Two verbs of two examples and 10 tokens each; the run is worse by 0.1 and 0.3 nats/token.
def test_the_control_gap_is_a_paired_difference_over_clusters(tmp_path: Path) -> None:
    """Mean 0.2; the jackknife of two clusters has the standard error 0.1, t(1) = 12.706."""
    examples = {"example_id": [0, 1, 2, 3], "split": ["validation"] * 4, "verb": ["go", "go", "eat", "eat"]}

    def rows(losses: list[float]) -> list[dict[str, Any]]:
        return [
            {"step": 50, "split": "validation", "example_id": i, "loss_sum": 10 * x, "token_count": 10}
            for i, x in enumerate(losses)
        ]

    write_run(tmp_path / "control", {"examples": examples, "example_losses": rows([1.0, 2.0, 3.0, 4.0])})
    run = write_run(tmp_path / "run", {"examples": examples, "example_losses": rows([1.1, 2.1, 3.3, 4.3])})
    from analyzer.run_log import open_runs

    with open_runs([run, tmp_path / "control"]) as run_log:
        sql = "SELECT step, gap, lower, upper, cluster_count FROM control_gap(control_name := 'control')"
        ((step, gap, lower, upper, count),) = run_log.connection.execute(sql).fetchall()
    assert (step, count) == (50, 2)
    # float64 sums of ten numbers around 1: an error of 1e-14 at most, times 12.706
    assert (gap, lower, upper) == pytest.approx((0.2, 0.2 - 1.2706, 0.2 + 1.2706), abs=1e-12)


def test_a_spike_is_told_with_the_order_of_signals(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Batch, recovery, what moved first, and the examples to look at."""
    run = write_run(tmp_path / "run", with_spike())
    main(["diagnose", str(run)])
    text = capsys.readouterr().out
    (line,) = [x for x in text.splitlines() if x.startswith("  spike")]
    assert f"step 150, batch {1150:x}, back at step 151; in order: loss train_loss " in line
    assert "hardest training examples near it: " in text


def test_the_order_of_signals_at_a_spike(tmp_path: Path) -> None:
    """A gradient that doubles ten steps before the loss is listed before it; a quiet one is not listed."""
    tables = with_spike()
    tensors = dict(tables["tensors"])
    keys = zip(tensors["step"], tensors["tensor_id"], tensors["kind"], tensors["l2_norm"], strict=True)
    tensors["l2_norm"] = [
        norm * (2 if kind == "gradient" and tensor >= 3 and step >= 140 else 1)
        for step, tensor, kind, norm in keys
    ]
    sql = "SELECT step, signal, subject, moved_step FROM signal_order_at_spikes()"
    assert answer(tmp_path, tables | {"tensors": tensors}, sql) == [
        (150, "gradient norm", "layer 1", 140),
        (150, "loss", "train_loss", 150),
    ]


def test_explain_lists_every_rule(capsys: pytest.CaptureFixture[str]) -> None:
    """One line each, with evidence, severity and question."""
    assert main(["explain"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [d.name for d in DIAGNOSES]


def test_explain_prints_everything_about_a_rule(capsys: pytest.CaptureFixture[str]) -> None:
    """Question, thresholds with their units, sources, remedy, and the SQL itself."""
    assert main(["explain", "dead_units"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("Dead units (dead_units)\n")
    assert "  share_threshold := 0.1   1, dead units / units of the layer; 0 in the reference model" in text
    assert "CREATE OR REPLACE MACRO dead_units(" in text
    for word in ("question", "meaning", "evidence", "source", "remedy", "requires", "explains"):
        assert f"\n{word:<12}" in text


def test_explain_of_an_unknown_rule_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    """One line, exit code 1."""
    assert main(["explain", "dead_unit"]) == 1
    assert capsys.readouterr().err == "analyzer: dead_unit: no such rule; did you mean dead_units?\n"


def test_explain_of_a_name_like_no_rule_says_where_the_names_are(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is guessed."""
    assert main(["explain", "xyz"]) == 1
    assert capsys.readouterr().err == "analyzer: xyz: no such rule; list them with: analyzer explain\n"


def test_the_document_of_the_diagnoses_is_generated() -> None:
    """Write it anew when this fails: python -m analyzer.diagnoses.document > docs/diagnoses.md."""
    assert (ROOT / "docs/diagnoses.md").read_text(encoding="utf-8") == markdown()
