"""Rules on synthetic runs that live in memory: one engine for all tests, new rows for each."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
from synthetic import MANIFEST, Columns, Rows, healthy_tables, view_table

from analyzer.diagnoses import DIAGNOSES, Assessment, Diagnosis, assess_runs
from analyzer.query_library import load_queries
from analyzer.run_facts import create_run_facts
from analyzer.run_log import RunLog
from analyzer.streams import Stream
from analyzer.views import create_segments, create_t_quantiles, create_table_views
from recorder.manifest import Manifest
from recorder.schema import TENSOR_KINDS, table

Tables = Mapping[str, Rows | Columns | None]
RUN = "run"
STEPS = 200


@cache
def healthy(steps: int = STEPS) -> dict[str, Columns]:
    """The tables of a healthy run in which every column that a rule needs is recorded."""
    tables = healthy_tables(steps)
    steps_table, tensors = dict(tables["steps"]), dict(tables["tensors"])
    step = np.asarray(steps_table["step"])
    steps_table |= {
        "data_position": step % 14 * 32,
        "gradient_cosine_previous": np.full(len(step), 0.1),
        "accumulation_count": np.full(len(step), 2),
        "batch_hash": 1000 + step,
        "order_hash": 5 + np.asarray(steps_table["epoch"]),
        "weights_hash": 100_000 + step,
        "optimizer_hash": 200_000 + step,
        "rng_hash": 300_000 + step,
    }
    is_weight = np.asarray(tensors["kind"]) == "weight"
    tensors["content_hash"] = [i if w else None for i, w in enumerate(is_weight)]
    examples = tables["examples"]
    return tables | {
        "steps": steps_table,
        "tensors": tensors,
        "micro_batches": micro_batches(steps_table),
        "evaluations": with_weights_and_repeats(tables["evaluations"]),
        "examples": dict(examples) | {"content_hash": [7 * i for i in examples["example_id"]]},
        "events": [resumed(0)],
    }


def micro_batches(steps_table: Columns) -> Columns:
    """Two micro-batches a step, of a third and two thirds of the tokens."""
    step = np.repeat(np.asarray(steps_table["step"]), 2)
    share = np.tile([1 / 3, 2 / 3], len(step) // 2)
    token_count = np.repeat(np.asarray(steps_table["loss_token_count"]), 2)
    return {
        "step": step,
        "micro": np.tile([0, 1], len(step) // 2),
        # the shorter one is harder, so that the mean of the means is not the mean over the tokens
        "loss_sum": np.repeat(np.asarray(steps_table["loss_sum"]), 2) * np.tile([0.4, 0.6], len(step) // 2),
        "loss_token_count": (token_count * share).round().astype(int),
        "gradient_norm": np.repeat(np.asarray(steps_table["gradient_norm"]), 2) * 1.5,
    }


def with_weights_and_repeats(evaluations: Columns) -> Columns:
    """The evaluations with the live weights' hash, and the last one made twice."""
    columns = {name: list(values) for name, values in evaluations.items()}
    columns["weights_hash"] = [100_000 + step for step in columns["step"]]
    for values in columns.values():
        values.append(values[-1])
    columns["repeat"][-1] = 1
    return columns


def resumed(step: int, **saved: int) -> dict[str, Any]:
    """The event of a resume whose checkpoint holds the healthy state of a step, or what is given."""
    state = {
        "step": step,
        "checkpoint": f"checkpoints/step-{step:08d}",
        "weights_hash": 100_000 + step,
        "optimizer_hash": 200_000 + step,
        "rng_hash": 300_000 + step,
        "epoch": step // 14,
        "data_position": step % 14 * 32,
    } | saved
    payload = {name: str(value) if name.endswith("hash") else value for name, value in state.items()}
    return {"step": step, "kind": "resumed", "message": "resumed", "payload": json.dumps(payload)}


def changed(name: str, column: str, values: Mapping[int, Any] | Any, steps: int = STEPS) -> Columns:
    """A healthy table with one column replaced: as a whole, or in the given rows."""
    columns = dict(healthy(steps)[name])
    if isinstance(values, Mapping):
        old = columns.get(column)
        new = list(old) if old is not None else [None] * len(next(iter(columns.values())))
        for row, value in values.items():
            new[row] = value
        return columns | {column: new}
    return columns | {column: values}


def example_losses(split: str, losses: dict[int, Any]) -> list[dict[str, Any]]:
    """Rows of a split's examples: at each step the loss of every example, or one for each of them."""
    ids = [i for i, s in enumerate(healthy()["examples"]["split"]) if s == split]
    return [
        {"step": step, "split": split, "example_id": example, "token_count": 10, "answer_token_count": 10}
        | {"loss_sum": 10 * float(value), "answer_loss_sum": 10 * float(value)}
        for step, values in losses.items()
        for example, value in zip(ids, np.broadcast_to(values, len(ids)), strict=True)
    ]


def without(tables: Tables, requirement: str) -> dict[str, Any]:
    """The tables with a required column null everywhere: of one kind of tensor for ``gradient.l2_norm``."""
    name, _, column = requirement.partition(".")
    if name not in TENSOR_KINDS:
        columns = dict(tables[name] or {})  # type: ignore[arg-type]  # healthy tables are columns
        return {**tables, name: {n: values for n, values in columns.items() if n != column}}
    tensors = dict(tables["tensors"] or {})  # type: ignore[arg-type]
    values = [
        None if kind == name else value for kind, value in zip(tensors["kind"], tensors[column], strict=True)
    ]
    return {**tables, "tensors": tensors | {column: values}}


def opened(runs: Mapping[str, Sequence[Tables]], manifests: Mapping[str, Manifest] | None = None) -> RunLog:
    """Runs, each a sequence of segments of tables, as if they had been read from their directories."""
    connection = _engine()
    streams = {
        run: tuple(
            Stream(Path(f"{name}-r0-s{number}"), table(name), 0, number, _arrow_table(name, rows), ())
            for number, tables in enumerate(segments)
            for name, rows in tables.items()
            if rows is not None
        )
        for run, segments in runs.items()
    }
    paths = {run: Path("nowhere") / run for run in runs}
    declared = {run: (manifests or {}).get(run, MANIFEST) for run in runs}
    loaded = create_table_views(connection, streams)
    create_segments(connection, loaded)
    create_run_facts(connection, paths, declared)
    return RunLog(connection, paths, declared, [], loaded)


def _arrow_table(name: str, rows: Rows | Columns) -> pa.Table:
    """The rows in the contract's schema; those of the healthy run, which most tests share, made once."""
    return _healthy_arrow_table(name) if rows is healthy().get(name) else view_table(name, rows)


@cache
def _healthy_arrow_table(name: str) -> pa.Table:
    return view_table(name, healthy()[name])


@cache
def _engine() -> duckdb.DuckDBPyConnection:
    """A connection with every macro. Macros look their tables up when they are called, not when made."""
    connection = duckdb.connect(":memory:", config={"threads": 1})
    connection.execute("SET python_enable_replacements = false; SET TimeZone = 'UTC'")
    create_segments(connection, create_table_views(connection, {}))
    create_t_quantiles(connection)
    create_run_facts(connection, {}, {})
    load_queries(connection)
    return connection


def diagnosis(name: str) -> Diagnosis:
    """The rule of that name."""
    return next(d for d in DIAGNOSES if d.name == name)


def outcome(name: str, changes: Tables | None = None, manifest: Manifest = MANIFEST) -> Assessment:
    """What a rule comes to on a healthy run in which some tables are replaced; None takes one away."""
    return segments_outcome(name, [{**healthy(), **(changes or {})}], manifest)


def segments_outcome(name: str, segments: Sequence[Tables], manifest: Manifest = MANIFEST) -> Assessment:
    """What a rule comes to on a run of several segments."""
    run_log = opened({RUN: segments}, {RUN: manifest})
    return assess_runs(run_log, [diagnosis(name)])[RUN][0]
