"""Columns taken out of a log one at a time: the rules that need one say so, the others do not notice.

Twice: on a real short log, and on logs on which each rule fires. The second would catch an input that a rule
reads without declaring it: a healthy run is clear with it and without it.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import test_diagnoses_attention_and_units as attention
import test_diagnoses_data_and_generalisation as data
import test_diagnoses_loss_and_gradient as loss
import test_diagnoses_optimisation as optimisation
import test_diagnoses_reproduction_and_evaluation as reproduction
from rule_run import RUN, Tables, changed, diagnosis, healthy, opened
from synthetic import MANIFEST

from analyzer.diagnoses import DIAGNOSES, Diagnosis, assess_runs
from analyzer.diagnoses.assessment import missing_inputs
from analyzer.diagnoses.declaration import RESUMED_EVENT
from analyzer.query_library import library
from analyzer.run_facts import create_run_facts
from analyzer.run_log import RunLog, open_runs
from analyzer.streams import Stream
from analyzer.views import LoadedStream
from experiments import cli
from recorder.manifest import Manifest
from recorder.schema import TABLES, TENSOR_KINDS, TENSORS

Outcomes = dict[str, tuple[str, tuple[str, ...]]]

SOURCES = {t.name: t for t in TABLES if t != TENSORS} | dict.fromkeys(TENSOR_KINDS, TENSORS)
"""What a need may name before its dot: a table, or a kind of tensor."""

NAMED_OTHERWISE = {"events.kind": RESUMED_EVENT, "events.payload": RESUMED_EVENT}
"""Columns that rules need as a fact, and the fact's words."""

READ_BY_RUN_FACTS = {"steps", "events"}
"""Tables that the table `runs` is made of."""

SETTINGS = (
    "layer_count=1",
    "total_steps=30",
    "warmup_steps=5",
    "evaluation_interval=5",
    "checkpoint_interval=15",
    "accumulation_count=2",
    "width=16",
    "head_count=2",
    "feed_forward_width=32",
)


@pytest.fixture(scope="module")
def real_log(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunLog]:
    """A run of 30 steps, resumed for ten more, and the same again: every input of every rule is there."""
    paths = [tmp_path_factory.mktemp(name) / name for name in ("run", "twin")]
    settings = [word for setting in SETTINGS for word in ("--set", setting)]
    for path in paths:
        assert cli.main(["run", "19-healthy", "--out", str(path), *settings]) == 0
        resume = ["run", "19-healthy", "--resume", "--out", str(path), "--set", "total_steps=40"]
        assert cli.main(resume) == 0
    with open_runs(paths) as run_log:
        yield run_log


def without_column(stream: Stream, column: str) -> Stream:
    """The stream with null in a column, for ``gradient.l2_norm`` in the rows of that kind."""
    source, _, name = column.partition(".")
    rows, place = stream.rows, stream.rows.column_names.index(name)
    values = pa.nulls(rows.num_rows, rows.schema.field(name).type)
    if source in TENSOR_KINDS:
        is_kind = pc.equal(rows.column("kind").cast(pa.string()), source)
        values = pc.if_else(is_kind, values, rows.column(name))
    return dataclasses.replace(stream, rows=rows.set_column(place, rows.schema.field(name), values))


@contextmanager
def stripped(run_log: RunLog, column: str) -> Iterator[RunLog]:
    """The same log on the same connection, without a column; the views stay, the tables below them change."""
    source = column.partition(".")[0]
    replaced = {
        loaded.relation: dataclasses.replace(loaded, stream=without_column(loaded.stream, column))
        for loaded in run_log.streams
        if loaded.stream.table == SOURCES[source]
    }
    streams = tuple(replaced.get(loaded.relation, loaded) for loaded in run_log.streams)
    try:
        _register(run_log, streams, replaced)
        yield dataclasses.replace(run_log, streams=streams)
    finally:
        _register(run_log, run_log.streams, replaced)


def _register(run_log: RunLog, streams: Sequence[LoadedStream], relations: Container[str]) -> None:
    changed_streams = [loaded for loaded in streams if loaded.relation in relations]
    for loaded in changed_streams:
        run_log.connection.register(loaded.relation, loaded.stream.rows)
    if {loaded.stream.table.name for loaded in changed_streams} & READ_BY_RUN_FACTS:
        create_run_facts(run_log.connection, run_log.paths, run_log.manifests)


@cache
def words_read(rule: str) -> frozenset[str]:
    """Every word in the SQL of a rule and of the queries that it uses: no other column can matter to it.

    Words before a parenthesis are functions and macros: ``min(step)`` does not read the column ``min``.
    """
    sql = {query.name: query.sql for query in library()}
    words: set[str] = set()
    waiting, done = {rule}, set[str]()
    while waiting:
        name = waiting.pop()
        done.add(name)
        waiting |= set(re.findall(r"\b\w+(?=\()", sql[name])) & sql.keys() - done
        words |= set(re.findall(r"\b\w+\b(?!\()", sql[name]))
    return frozenset(words)


def columns_of(source: str) -> list[str]:
    """Needs of a source: every column but those that identify a row, which the recorder always writes."""
    table = SOURCES[source]
    return [f"{source}.{name}" for name in table.column_names() if name not in table.key]


def needs(rule: Diagnosis, column: str) -> bool:
    """The rule declares the column, or the fact that it stands for."""
    return NAMED_OTHERWISE.get(column, column) in rule.requires


def may_notice(column: str) -> list[Diagnosis]:
    """The rules whose SQL names the column and its table (and kind, if any), or that declare it."""
    return [d for d in DIAGNOSES if needs(d, column) or _names(words_read(d.name), column)]


def _names(words: Container[str], column: str) -> bool:
    source, _, name = column.partition(".")
    table = SOURCES[source].name
    is_table_read = table in words or table in READ_BY_RUN_FACTS
    return name in words and is_table_read and (source == table or source in words)


def outcomes(run_log: RunLog, rules: Sequence[Diagnosis] = DIAGNOSES) -> Outcomes:
    """Outcome and missing inputs of rules on the first run."""
    assessed = assess_runs(run_log, rules)[next(iter(run_log.paths))]
    return {a.diagnosis.name: (a.outcome, a.missing) for a in assessed}


@pytest.fixture(scope="module")
def whole(real_log: RunLog) -> Outcomes:
    """The outcomes before anything is taken out."""
    return outcomes(real_log)


def test_every_rule_is_evaluated_on_the_whole_log(whole: Outcomes) -> None:
    """Otherwise the next test would prove nothing about a rule. For some the run is too short to be clear."""
    lacking = {need for _, missing in whole.values() for need in missing}
    assert [need for need in lacking if not re.fullmatch(r"step \d+", need)] == []


@pytest.mark.parametrize("source", SOURCES)
def test_only_rules_that_need_a_column_notice_that_it_is_gone(
    real_log: RunLog, whole: Outcomes, source: str
) -> None:
    """They are not evaluated and name it; no other outcome changes."""
    surprises = {}
    for column in columns_of(source):
        rules = may_notice(column)
        named = ("not_evaluated", (NAMED_OTHERWISE.get(column, column),))
        expected = {d.name: named if needs(d, column) else whole[d.name] for d in rules}
        with stripped(real_log, column) as run_log:
            found = outcomes(run_log, rules)
            missing = missing_inputs(run_log, next(iter(run_log.paths)), DIAGNOSES)
        surprises |= {(column, n): found[n] for n in expected if found[n] != expected[n]}
        surprises |= {(column, n): lacking for n, lacking in missing.items() if lacking and n not in expected}
    assert surprises == {}


@dataclass(frozen=True)
class Broken:
    """A synthetic log on which a rule fires: changes of the healthy tables, or whole segments."""

    rule: str
    changes: Tables = field(default_factory=dict)
    manifest: Manifest = MANIFEST
    segments: Sequence[Tables] = ()
    twin: Tables | None = None  # changes of a second run of the same seed

    def open(self) -> RunLog:
        """The log, and the second run where there is one."""
        runs: dict[str, Sequence[Tables]] = {RUN: self.segments or [{**healthy(), **self.changes}]}
        if self.twin is not None:
            runs["twin"] = [{**healthy(), **self.twin}]
        return opened(runs, dict.fromkeys(runs, self.manifest))


def with_steps(column: str, values: Any) -> dict[str, Any]:
    """The healthy steps with a column replaced, as a whole or in the given rows."""
    return {"steps": changed("steps", column, values)}


def resumed_with(column: str, value: Any) -> list[dict[str, Any]]:
    """A resume whose first row has another value than its checkpoint."""
    return reproduction.resume(**reproduction.first_row(column, value))


STEP = np.arange(200)
TRAIN_LOSS = np.asarray(healthy()["steps"]["train_loss"])
RISING = {50: 1.0} | dict.fromkeys((0, 100, 150, 200), 2.0)  # validation losses with a minimum at step 50

BROKEN = (
    Broken("causal_mask_absent", attention.seeing({8: 0.25})),
    Broken("causal_mask_off_by_one", attention.seeing({8: 0.25}, {})),
    Broken("attention_entropy_collapse", attention.sharp(8, 0.05, 60.0)),
    Broken("dead_units", {"units": changed("units", "dead_unit_count", {5: 128})}),
    Broken("initialisation_too_large", with_steps("train_loss", {0: 9.0})),
    Broken("initialisation_too_large", optimisation.with_norms(4.0, "weight")),
    Broken("initialisation_too_small", optimisation.attention_at_start(0.995, 0.05)),
    Broken("zero_initialisation", optimisation.zero_matrix(7)),
    Broken("warmup_missing", optimisation.with_rates({0: 3e-3}), optimisation.PEAK),
    Broken("schedule_not_followed", optimisation.with_rates({50: 1.0}), optimisation.PEAK),
    Broken("learning_rate_too_high", optimisation.large_updates(0.02) | optimisation.collapsing(0.1)),
    Broken(
        "learning_rate_too_high",
        optimisation.large_updates(0.02) | with_steps("train_loss", np.where(STEP < 100, TRAIN_LOSS, 3.0)),
    ),
    Broken(
        "learning_rate_too_high",
        optimisation.large_updates(0.02) | with_steps("train_loss", dict.fromkeys((120, 140, 160), 9.0)),
    ),
    Broken(
        "learning_rate_too_high",
        optimisation.large_updates(0.02) | with_steps("gradient_norm", dict.fromkeys((120, 140, 160), 900.0)),
    ),
    Broken("learning_rate_too_low", optimisation.crawling(0.8, 1e-4)),
    Broken("weight_decay_too_strong", optimisation.with_norms(np.where(STEP < 100, 1.0, 0.5), "weight")),
    Broken("padding_in_loss", with_steps("loss_token_count", {7: 800})),
    Broken("loss_summed_not_averaged", loss.objective(loss.TOKENS), loss.DECLARED_MEAN),
    Broken("accumulation_not_normalised", with_steps("objective", 2.1 * TRAIN_LOSS), loss.DECLARED_MEAN),
    Broken("gradients_not_zeroed", loss.remembering(0.98)),
    Broken("gradients_not_zeroed", loss.remembering(0.8, np.where(STEP < 100, 1.0, 9.0))),
    Broken("vanishing_gradients", loss.block_gradients(0.001)),
    Broken("exploding_gradients", loss.norm_level(10.0)),
    Broken("frozen_layer", loss.frozen(80)),
    Broken("detached_branch", loss.without_gradient(range(60, 70), missing=True)),
    Broken("detached_branch", loss.without_gradient(range(60, 70), missing=False)),
    Broken("nonfinite_value", with_steps("train_loss", {7: math.nan})),
    Broken("loss_spike", with_steps("train_loss", {80: 9.0})),
    Broken("gradient_norm_spike", with_steps("gradient_norm", {120: 900.0})),
    Broken("data_not_shuffled", data.with_orders(1, 2, 2, *range(3, 30))),
    Broken("train_validation_leak", data.shared_hashes(2)),
    Broken("loss_below_entropy_floor", {"evaluations": data.evaluated(0.1)}),
    Broken("overfitting", {"example_losses": data.example_losses("validation", RISING)}),
    Broken("bad_batch", with_steps("train_loss", {120: 4.0})),
    Broken("underfitting", data.training_split({200: 1.0, 300: 0.99})),
    Broken("label_noise", data.noisy_split(0.85)),
    Broken("optimizer_state_lost", segments=resumed_with("optimizer_hash", 1)),
    Broken("schedule_reset_on_resume", segments=resumed_with("learning_rate", 1.0)),
    Broken("data_replayed_on_resume", segments=resumed_with("data_position", 0)),
    Broken("data_replayed_on_resume", segments=resumed_with("batch_hash", 1099)),
    Broken("random_state_lost_on_resume", segments=resumed_with("rng_hash", 1)),
    Broken("nondeterminism", twin=reproduction.other_weight(50, 4)),
    Broken("nondeterminism", twin=with_steps("batch_hash", {50: 1})),
    Broken("evaluation_in_training_mode", reproduction.repeated(0.1)),
    Broken("stale_evaluation_weights", reproduction.stale(0, 0, 50)),
)


def test_every_rule_has_a_log_on_which_it_fires() -> None:
    """Or the next test would say nothing of it."""
    assert {broken.rule for broken in BROKEN} == {d.name for d in DIAGNOSES}


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.rule)
def test_a_rule_that_fires_keeps_firing_without_a_column_that_it_does_not_declare(broken: Broken) -> None:
    """Or it would call a broken run clear for want of an input that nobody knows to be missing.

    What a rule only uses where it is there (labels, counts for the words of a finding) needs no declaration:
    the finding may be poorer, the rule still fires.
    """
    run_log, rule = broken.open(), diagnosis(broken.rule)
    assert outcomes(run_log, [rule])[rule.name] == ("fired", ())
    found = {}
    for column in (column for source in SOURCES for column in columns_of(source)):
        if rule in may_notice(column) and not needs(rule, column):
            with stripped(run_log, column) as poorer_log:
                found[column] = outcomes(poorer_log, [rule])[rule.name]
    assert {column: outcome for column, outcome in found.items() if outcome != ("fired", ())} == {}
