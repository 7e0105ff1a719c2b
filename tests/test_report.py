"""The page as text: what it says, that it stands alone, stays small, and comes out the same every time."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from html import unescape
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rule_run import healthy
from synthetic import MANIFEST, healthy_run, healthy_tables, write_run

from analyzer import verdicts
from analyzer.diagnoses import DIAGNOSES, Assessment, Finding, assess
from analyzer.diagnosis_report import Judgement, report_document, spike_rows
from analyzer.panels import PANELS
from analyzer.report import render
from analyzer.run_log import open_runs
from recorder.manifest import LabelRoles

LARGEST_PAGE_BYTES = 3_000_000
CHART_COUNT = sum(len(panel.charts) for panel in PANELS)


def page_of(run: Path, blind: bool = False) -> str:
    """The rendered page of a run directory."""
    with open_runs([run]) as run_log:
        return render(run_log, assess(run_log), blind)


def tables_of(steps: int = 120) -> dict[str, dict[str, Any]]:
    """Tables of a healthy run that a test may change."""
    return {name: dict(columns) for name, columns in healthy_tables(steps).items()}


def without(columns: dict[str, Any], *names: str) -> dict[str, Any]:
    """A table in which some columns were not recorded."""
    return {name: values for name, values in columns.items() if name not in names}


def unrecorded(html: str) -> list[str]:
    """What the page says was not recorded."""
    return re.findall(r"not recorded: ([^<·]+?)(?= ·|<)", html)


def body(html: str) -> str:
    """The page without its scripts: what a reader without JavaScript gets."""
    return re.sub(r"<script.*?</script>", "", html, flags=re.DOTALL)


@pytest.fixture(scope="module")
def healthy_page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of a healthy run."""
    return page_of(healthy_run(tmp_path_factory.mktemp("runs") / "healthy"))


def checks_of_the_headline(html: str) -> tuple[int, int]:
    """(checks without a finding, checks that could not be evaluated), as the headline tells them."""
    headline = re.search(r"No finding in (\d+) checks; (\d+) could not be evaluated", html)
    assert headline is not None
    return int(headline[1]), int(headline[2])


def test_headline_of_a_healthy_run(healthy_page: str) -> None:
    """Every rule either was checked and did not fire, or is counted as not evaluated."""
    assert sum(checks_of_the_headline(healthy_page)) == len(DIAGNOSES)


def test_every_chart_of_a_healthy_run_has_a_summary(healthy_page: str) -> None:
    """Each chart can be read without its canvas."""
    assert len(re.findall(r'<p class="summary" id="summary-[\w-]+">[^<]+</p>', healthy_page)) == CHART_COUNT


def test_page_forbids_requests_and_eval(healthy_page: str) -> None:
    """The policy allows inline scripts and styles and data images, and nothing else."""
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]+)"', healthy_page)
    assert policy == (
        "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:;"
        " base-uri 'none'; form-action 'none'"
    )


def test_page_refers_to_no_other_file(healthy_page: str) -> None:
    """No element outside the scripts names a source, and every link stays within the page."""
    links = re.findall(r'(?:src|href)="([^"]*)"', body(healthy_page))
    assert [link for link in links if not link.startswith("#")] == []


def test_every_link_has_a_target(healthy_page: str) -> None:
    """Each fragment that is linked to is an id of the page."""
    html = body(healthy_page)
    targets = set(re.findall(r' id="([^"]+)"', html))
    assert set(re.findall(r'href="#([^"]+)"', html)) - targets == set()


def test_headings_descend_one_level_at_a_time(healthy_page: str) -> None:
    """One h1; no level is skipped."""
    levels = [int(level) for level in re.findall(r"<h([1-6])", body(healthy_page))]
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))


def test_rendering_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    """Model ids count on within a process; the page does not show it."""
    run = healthy_run(tmp_path / "healthy")
    assert page_of(run) == page_of(run)


def test_page_does_not_grow_with_the_run(tmp_path: Path) -> None:
    """Ten times the steps change the page by less than a tenth; both are below three megabytes.

    2,000 steps are drawn almost whole, so that what a longer run adds is thinned away.
    """
    sizes = [len(page_of(healthy_run(tmp_path / str(n), steps=n)).encode()) for n in (2_000, 20_000)]
    assert sizes[1] < 1.1 * sizes[0]
    assert max(sizes) < LARGEST_PAGE_BYTES


def test_finding_is_told_with_its_evidence(tmp_path: Path) -> None:
    """Headline, observed against threshold, remedy, the query, and a link to the chart at its steps."""
    tables = tables_of()
    tables["attention"]["future_mass"] = np.full(len(tables["attention"]["step"]), 0.43)
    tables["attention"]["future_mass_beyond_next"] = np.full(len(tables["attention"]["step"]), 0.41)
    html = body(page_of(write_run(tmp_path / "mask", tables)))
    assert "Broken causal mask \N{EN DASH} proof, since step 0" in html
    assert 'data-label="Since"><div>step 0 to 119<' in html
    assert 'data-label="Observed"><div>0.43<' in html
    assert "&#x27;FROM causal_mask_absent()&#x27;" in html
    assert 'href="#chart-later-keys" data-first-step="0" data-last-step="119"' in html


def test_check_without_its_column_is_not_evaluated(tmp_path: Path) -> None:
    """The table of checks names the missing column, and the headline counts the check apart."""
    tables = tables_of()
    checked, _ = checks_of_the_headline(page_of(write_run(tmp_path / "whole", tables)))
    del tables["attention"]
    html = page_of(write_run(tmp_path / "run", tables))
    assert checks_of_the_headline(html)[0] < checked
    assert 'data-label="Missing"><div>attention.future_mass<' in html


def with_spike() -> dict[str, dict[str, Any]]:
    """A run whose loss jumps at step 80 and is back at the next; each batch has a hash."""
    tables = tables_of()
    loss = np.array(tables["steps"]["train_loss"])
    loss[80] *= 9
    tables["steps"] |= {"train_loss": loss, "batch_hash": 0x1000 + np.arange(len(loss))}
    return tables


def test_page_tells_what_diagnose_tells(tmp_path: Path) -> None:
    """Each cause of the report, with its meaning, remedy, source, query, evidence and symptoms."""
    run = write_run(tmp_path / "spike", with_spike())
    with open_runs([run]) as run_log:
        assessments = assess(run_log)
        html = unescape(body(render(run_log, assessments)))
        judgement = Judgement(run, assessments, spike_rows(run_log, "spike", assessments), None)
    causes = report_document(judgement)["causes"]
    assert [cause["name"] for cause in causes] == ["bad_batch"]
    for cause in causes:
        words = [cause[key] for key in ("title", "meaning", "remedy", "source", "query", "severity")]
        words += [finding["detail"] for finding in cause["findings"]]
        words += [symptom["title"] for symptom in cause["explains"]]
        assert [word for word in words if word not in html] == []


def test_spike_is_told_with_the_order_of_signals(tmp_path: Path) -> None:
    """Its batch, when it was over, what moved, the examples to look at, and a link to its steps."""
    html = body(page_of(write_run(tmp_path / "spike", with_spike())))
    (table,) = re.findall(r'<table class="stacked spikes">(.*?)</table>', html)
    assert 'href="#panel-1" data-first-step="80" data-last-step="81">step 80<' in table
    assert 'data-label="Batch"><div><code>1050<' in table
    assert 'data-label="Recovered"><div>step 81<' in table
    assert re.findall(r"<li>(.*?), ", table) == ["step 80: loss train_loss"]
    assert re.search(r'near it"><div>\d+ \([\d.]+\), \d+ \([\d.]+\), \d+ ', table)


def test_page_without_a_spike_has_no_table_of_spikes(healthy_page: str) -> None:
    """The order of signals is looked up only where there is a spike to explain."""
    assert 'class="stacked spikes"' not in healthy_page


def check_tables(html: str) -> list[list[str]]:
    """The names of the checks of each table of checks, in order."""
    tables = re.findall(r'<table class="stacked outcomes">(.*?)</table>', body(html))
    return [re.findall(r'<th scope="row">(.*?)</th>', table) for table in tables]


def test_checks_that_fired_come_first_with_their_symptoms(tmp_path: Path) -> None:
    """The cause, its symptom indented under it, then what could not be evaluated, then what is clear."""
    html = page_of(write_run(tmp_path / "spike", with_spike()))
    fired, skipped, clear = check_tables(html)
    assert fired == ["Bad batch", '<span class="symptom">Loss spike</span>']
    assert len(fired) + len(skipped) + len(clear) == len(DIAGNOSES)
    assert f'<span class="outcome not_evaluated">{len(skipped)} not evaluated</span>' in html
    assert f'<details><summary><span class="outcome clear">{len(clear)} clear</span>' in html


@pytest.mark.parametrize(
    ("tables", "is_open"),
    [(healthy(600), True), ({"steps": {"step": [0], "train_loss": [3.5]}}, False)],
    ids=["all recorded", "one column"],
)
def test_many_checks_without_their_input_are_folded(
    tmp_path: Path, tables: dict[str, Any], is_open: bool
) -> None:
    """A few lie open above the panels; with next to nothing recorded they would push the panels away."""
    html = page_of(write_run(tmp_path / "run", tables))
    (opened,) = re.findall(r'<details( open)?><summary><span class="outcome not_evaluated">', html)
    assert bool(opened) is is_open


def test_symptom_of_two_causes_is_listed_once() -> None:
    """Under the first of them; every fired rule has one row."""
    rules = {diagnosis.name: diagnosis for diagnosis in DIAGNOSES}

    def fired(name: str) -> Assessment:
        return Assessment(rules[name], "fired", (), (Finding("run", 5, 5, "", 1.0, 0.0, "", 1),))

    given = [fired(name) for name in ("causal_mask_absent", "bad_batch", "data_not_shuffled", "loss_spike")]
    rows = [re.sub(r"<.*?>", "", name) for name, _, _ in verdicts.fired_rows(given)]
    assert sorted(rows) == sorted(one.diagnosis.title for one in given)


def test_anomaly_that_nothing_explains_is_called_so() -> None:
    """The headline has the words of the terminal, and does not say anomaly twice."""
    rule = next(diagnosis for diagnosis in DIAGNOSES if diagnosis.evidence == "anomaly")
    found = Assessment(rule, "fired", (), (Finding("run", 7, 7, "", 1.0, 0.0, "", 1),))
    title = f"{rule.title[:1].lower()}{rule.title[1:]}"
    assert verdicts.headline([found]) == f"Unexplained anomaly: {title}, since step 7"


def test_run_that_ends_in_nan_renders(tmp_path: Path) -> None:
    """No example has a finite loss at the last evaluation: the map is drawn in red, and says so."""
    tables = tables_of()
    losses = np.array(tables["example_losses"]["loss_sum"], np.float64)
    losses[np.array(tables["example_losses"]["step"]) == 100] = np.nan
    tables["example_losses"]["loss_sum"] = losses
    html = page_of(write_run(tmp_path / "run", tables))
    assert re.search(r'id="summary-loss-map">\d+ cells, none finite\.<', html)


def test_column_that_was_not_recorded_is_named_in_place_of_the_chart(tmp_path: Path) -> None:
    """Without a learning rate the second panel says so and draws nothing."""
    tables = tables_of()
    tables["steps"] = without(tables["steps"], "learning_rate", "planned_learning_rate")
    html = page_of(write_run(tmp_path / "run", tables))
    assert unrecorded(html) == ["steps.learning_rate", "steps.planned_learning_rate"]
    assert 'id="plot-learning-rate"' not in html


def test_chart_with_one_of_two_columns_is_drawn(tmp_path: Path) -> None:
    """The clipped norm is missing: the other is drawn, and a note names what is not there."""
    tables = tables_of()
    tables["steps"] = without(tables["steps"], "clipped_gradient_norm")
    html = page_of(write_run(tmp_path / "run", tables))
    assert unrecorded(html) == ["steps.clipped_gradient_norm"]
    assert 'id="plot-gradient-norm"' in html


def test_labels_that_were_not_declared_are_named(tmp_path: Path) -> None:
    """Without label roles the last panel says which declaration it needs."""
    manifest = dataclasses.replace(MANIFEST, label_roles=LabelRoles())
    html = page_of(write_run(tmp_path / "run", tables_of(), manifest))
    assert unrecorded(html) == [
        "example_losses.loss_sum with manifest.label_roles.group",
        "example_losses.loss_sum with manifest.label_roles.map_rows and map_columns",
    ]


def test_group_names_come_from_the_run(tmp_path: Path) -> None:
    """A label of another domain appears in the page; the words of this one do not."""
    tables = tables_of()
    examples = tables["examples"]
    examples["difficulty"] = [
        "hard" if value == "irregular" else "easy" for value in examples.pop("regularity")
    ]
    roles = dataclasses.replace(MANIFEST.label_roles, group="difficulty")
    html = body(
        page_of(write_run(tmp_path / "run", tables, dataclasses.replace(MANIFEST, label_roles=roles)))
    )
    assert "hard: " in html
    assert "regular" not in html


def test_run_without_rows_renders(tmp_path: Path) -> None:
    """Killed before its first row, the run still has a page: nothing recorded, in every chart."""
    html = page_of(write_run(tmp_path / "run", {}))
    assert html.count('class="unrecorded"') == CHART_COUNT
    assert "0 recorded" in html


def test_run_with_one_row_renders(tmp_path: Path) -> None:
    """One step is one point."""
    html = page_of(write_run(tmp_path / "run", {"steps": {"step": [0], "train_loss": [3.5]}}))
    assert "train, each batch: 3.5 nats/token at step 0 (its lowest)." in html


def test_run_of_nothing_but_nan_renders(tmp_path: Path) -> None:
    """NaN was recorded: the chart is drawn and says that no value was ever finite."""
    steps = {"step": [0, 1], "train_loss": [np.nan, np.nan], "gradient_norm": [np.nan, np.inf]}
    html = page_of(write_run(tmp_path / "run", {"steps": steps}))
    assert "train, each batch: NaN nats/token at step 1, never finite." in html
    assert "2 values cannot be drawn on this axis" in html


def test_cut_tail_is_reported(tmp_path: Path) -> None:
    """A stream that was torn off shows as a warning above the verdicts."""
    run = healthy_run(tmp_path / "run")
    stream = run / "log" / "steps-r0-s0.arrows"
    stream.write_bytes(stream.read_bytes()[:-100])
    with open_runs([run]) as run_log:
        (warning,) = run_log.warnings
        html = render(run_log, assess(run_log))
    assert 'aria-label="Warnings of the log reader"' in html
    assert warning.split(":", 1)[1].strip()[:20] in html


@pytest.mark.parametrize("place", ["name", "loss_reduction", "config"])
def test_text_of_the_run_is_escaped(tmp_path: Path, place: str) -> None:
    """Markup in a name, a sentence or the configuration is shown as text."""
    hostile = "<i>x&"
    manifests: dict[str, Callable[[], Any]] = {
        "name": lambda: MANIFEST,
        "loss_reduction": lambda: dataclasses.replace(MANIFEST, loss_reduction=hostile),
        "config": lambda: dataclasses.replace(MANIFEST, config={"note": hostile}),
    }
    html = page_of(write_run(tmp_path / hostile, tables_of(60), manifests[place]()))
    assert hostile not in html
    assert "&lt;i&gt;x&amp;" in html


def test_blind_page_leaves_out_judgement_and_names(tmp_path: Path) -> None:
    """No verdict, no check, no run name, no configuration, no mark that judges; the curves stay."""
    tables = with_spike()
    manifest = dataclasses.replace(MANIFEST, config={"secret_setting": 1}, loss_reduction="secret sentence")
    run = write_run(tmp_path / "19-telling-name", tables, manifest)
    assert "Loss spike" in page_of(run)
    html = page_of(run, blind=True)
    assert [
        w for w in ("telling", "secret", "Loss spike", "spike to", "synthetic", "Outcome") if w in body(html)
    ] == []
    assert "spike to" not in html
    assert 'id="plot-loss"' in html
