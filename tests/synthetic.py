"""Run directories written with pyarrow straight from the contract, without the recorder."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from recorder.manifest import LabelRoles, Manifest, ReferenceLosses
from recorder.schema import (
    ALL_FINITE,
    LOG_DIRECTORY,
    MANIFEST_FILE,
    NONFINITE,
    NONFINITE_COUNTS,
    WEIGHT_VALUES,
    WEIGHTS,
    stream,
    stream_name,
    table,
)

Rows = Sequence[Mapping[str, Any]]
Columns = Mapping[str, Any]

START = datetime(2026, 1, 1, tzinfo=UTC)
MANIFEST = Manifest(
    run_id="synthetic",
    seed=0,
    mask_type="causal",
    primary_split="validation",
    label_roles=LabelRoles(group="regularity", cluster="verb", map_rows="verb", map_columns="tense"),
    reference_losses=ReferenceLosses(
        uniform=3.5, unigram=2.8, entropy_floor={"train": 0.25, "validation": 0.2}
    ),
)
VERBS = tuple(f"verb{i:02}" for i in range(20))
REGULARITY = tuple("irregular" if i % 5 < 2 else "regular" for i in range(20))
TENSES = ("infinitive", "present", "past", "participle", "future")


def write_run(
    directory: Path,
    tables: Mapping[str, Rows | Columns] | None = None,
    manifest: Manifest | None = MANIFEST,
    *,
    rank: int = 0,
    segment: int = 0,
    finished: bool = True,
) -> Path:
    """The run directory, with the streams of the given tables; an existing manifest stays as it is."""
    (directory / LOG_DIRECTORY).mkdir(parents=True, exist_ok=True)
    if manifest is not None and not (directory / MANIFEST_FILE).exists():
        (directory / MANIFEST_FILE).write_text(json.dumps(dataclasses.asdict(manifest)))
    given = dict(tables or {})
    if "events" not in given:
        given["events"] = events("segment_started", *(["finished"] if finished else []))
    for table_name, rows in given.items():
        for name, stored in stream_tables(table_name, rows).items():
            _write(directory / LOG_DIRECTORY / stream_name(name, rank, segment), stored)
    return directory


def events(*kinds: str, host: str | None = None, pid: int | None = None) -> Rows:
    """Rows of `events`, one per kind, a microsecond apart; the start names this host and process."""
    start = {"environment": {"host": host or socket.gethostname(), "pid": pid or os.getpid()}}
    return [
        {
            "wall_time": START.replace(microsecond=i),
            "kind": kind,
            "message": kind,
            "payload": json.dumps(start if kind == "segment_started" else {}),
        }
        for i, kind in enumerate(kinds)
    ]


def write_stream(path: Path, name: str, rows: Rows | Columns, batch_rows: int | None = None) -> None:
    """One Arrow IPC stream of a table: absent columns are null, unknown ones are added as they are."""
    _write(path, stream_table(name, rows), batch_rows)


def _write(path: Path, stored: pa.Table, batch_rows: int | None = None) -> None:
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, stored.schema) as writer:
        writer.write_table(stored, max_chunksize=batch_rows)


def stream_tables(name: str, rows: Rows | Columns) -> dict[str, pa.Table]:
    """The streams that hold the rows of a table: three for ``tensors``, if they are needed."""
    whole = view_table(name, rows)
    if name != "tensors":
        return {name: _stored(name, whole)}
    counts = [whole.column(column.name) for column in NONFINITE_COUNTS]
    all_finite = pc.equal(pc.max_element_wise(*counts), 0)  # null where no count is given
    values = [pc.is_valid(whole.column(column.name)) for column in WEIGHT_VALUES]
    parts = {
        NONFINITE.name: whole.filter(pc.invert(all_finite)),
        WEIGHTS.name: whole.filter(pc.or_(pc.or_(values[0], values[1]), values[2])),
    }
    streams = {part: _stored(part, found) for part, found in parts.items() if found.num_rows}
    return streams | {name: _stored(name, whole.append_column(ALL_FINITE.name, all_finite))}


def stream_table(name: str, rows: Rows | Columns) -> pa.Table:
    """The rows in the schema of their only stream."""
    return stream_tables(name, rows)[name]


def _stored(name: str, rows: pa.Table) -> pa.Table:
    """The columns of a stream in its types, then the user's labels."""
    contract = stream(name)
    schema = contract.stream_schema()
    if contract.open_columns:
        for label in rows.column_names[len(schema) :]:
            schema = schema.append(rows.schema.field(label))
    return rows.select(schema.names).cast(schema)


def view_table(name: str, rows: Rows | Columns) -> pa.Table:
    """The rows as a reader sees them, in the types of the contract."""
    contract = table(name).arrow_schema()
    columns = dict(rows) if isinstance(rows, Mapping) else _columns(rows)
    row_count = len(next(iter(columns.values()), ()))
    fields = list(contract)
    arrays = [_array(columns.get(f.name, [None] * row_count), f.type) for f in fields]
    for label in (c for c in columns if c not in contract.names):
        arrays.append(pa.array(columns[label]))
        fields.append(pa.field(label, arrays[-1].type))
    return pa.table(arrays, schema=pa.schema(fields, metadata=contract.metadata))


def _array(values: Any, type: pa.DataType) -> pa.Array:
    """An Arrow array: strings in a NumPy array cannot be dictionary-encoded in one go."""
    plain = values.tolist() if isinstance(values, np.ndarray) and values.dtype.kind == "U" else values
    return pa.array(plain, type)


def _columns(rows: Rows) -> dict[str, list[Any]]:
    names = list(dict.fromkeys(name for row in rows for name in row))
    return {name: [row.get(name) for row in rows] for name in names}


def healthy_run(directory: Path, steps: int = 300, seed: int = 0, manifest: Manifest = MANIFEST) -> Path:
    """A finished run that learns and has nothing wrong with it, every table filled."""
    return write_run(directory, healthy_tables(steps, seed), manifest)


def healthy_tables(steps: int = 300, seed: int = 0) -> dict[str, Columns]:
    """The tables of ``healthy_run``: losses decay from 3.5 nats/token with 1% noise, a cosine schedule."""
    random = np.random.default_rng(seed)
    evaluated = np.arange(0, steps + 1, 50)
    names = _tensor_names()
    examples = _examples()
    example_losses = _example_losses(evaluated, examples, random)
    return {
        "steps": _steps(steps, random),
        "tensor_names": names,
        "tensors": _tensors(steps, len(names["tensor_id"]), random),
        "units": _units(steps),
        "attention": _attention(steps, random),
        "examples": examples,
        "example_losses": example_losses,
        "evaluations": _evaluations(example_losses),
    }


def mean_loss(step: np.ndarray) -> np.ndarray:
    """Nats/token that the synthetic model reaches after so many updates."""
    return 0.3 + 3.2 * np.exp(-np.asarray(step) / 150.0)


def _steps(steps: int, random: np.random.Generator) -> Columns:
    step = np.arange(steps)
    token_count = np.full(steps, 600)
    loss = mean_loss(step) * np.exp(random.normal(0, 0.01, steps))
    rate = 3e-3 * np.minimum((step + 1) / 100, 0.55 + 0.45 * np.cos(np.pi * step / max(steps, 1)))
    norm = (0.5 + mean_loss(step)) * np.exp(random.normal(0, 0.05, steps))
    return {
        "step": step,
        "wall_time": int(START.timestamp() * 1e6) + step * 50_000,
        "step_seconds": np.full(steps, 0.05),
        "recorder_seconds": np.full(steps, 0.001),
        "epoch": step // 14,
        "objective": loss,
        "loss_sum": loss * token_count,
        "loss_token_count": token_count,
        "non_padding_token_count": token_count,
        "example_count": np.full(steps, 32),
        "train_loss": loss,
        "learning_rate": rate,
        "planned_learning_rate": rate,
        "gradient_norm": norm,
        "clipped_gradient_norm": np.minimum(norm, 1.0),
    }


def _tensor_names() -> Columns:
    weights = [
        (f"blocks.{layer}.{part}", "linear", layer, shape)
        for layer in range(2)
        for part, shape in (("attention.query", "[64, 64]"), ("mlp.up", "[64, 256]"), ("norm.gain", "[64]"))
    ]
    modules = [
        (f"blocks.{layer}.{part}", part, layer, "[64]")
        for layer in range(2)
        for part in ("attention", "relu")
    ]
    rows = [
        *((f"{n}.weight", n, *rest, True) for n, *rest in weights),
        *((n, n, *rest, None) for n, *rest in modules),
    ]
    name, module, role, layer, shape, trainable = (list(column) for column in zip(*rows, strict=True))
    return {
        "tensor_id": list(range(len(rows))),
        "name": name,
        "module": module,
        "layer": layer,
        "role": role,
        "shape": shape,
        "dtype": ["float32"] * len(rows),
        "trainable": trainable,
        "weight_decay": trainable,
    }


def _tensors(steps: int, tensor_count: int, random: np.random.Generator) -> Columns:
    """Gradients of every weight at every step, all kinds of everything at every tenth."""
    weight_ids = np.arange(6)
    module_ids = np.arange(6, tensor_count)
    every, tenth = np.arange(steps), np.arange(0, steps, 10)
    parts = [
        (every, weight_ids, "gradient"),
        (tenth, weight_ids, "weight"),
        (tenth, weight_ids, "update"),
        (tenth, module_ids, "activation"),
        (tenth, module_ids, "activation_gradient"),
    ]
    step = np.concatenate([np.repeat(s, len(ids)) for s, ids, _ in parts])
    tensor_id = np.concatenate([np.tile(ids, len(s)) for s, ids, _ in parts])
    kind = np.concatenate([np.full(len(s) * len(ids), name) for s, ids, name in parts])
    size = {"gradient": 1e-2, "weight": 1e-1, "update": 1e-4, "activation": 1.0, "activation_gradient": 1e-3}
    scale = np.array([size[k] for k in kind]) * np.exp(random.normal(0, 0.05, len(kind)))
    is_weight = kind == "weight"
    zero = np.zeros(len(kind), int)
    return {
        "step": step,
        "tensor_id": tensor_id,
        "kind": kind,
        "element_count": np.full(len(kind), 4096),
        "l2_norm": scale * 64,
        "mean": zero.astype(np.float32),
        "mean_abs": (scale * 0.8).astype(np.float32),
        "std": scale.astype(np.float32),
        "min": (-3 * scale).astype(np.float32),
        "max": (3 * scale).astype(np.float32),
        "zero_fraction": zero.astype(np.float32),
        "nan_count": zero,
        "positive_infinity_count": zero,
        "negative_infinity_count": zero,
        "has_gradient": [True if k == "gradient" else None for k in kind],
        "spectral_norm": [float(s) * 16 if w else None for s, w in zip(scale, is_weight, strict=True)],
        "spectral_norm_upper": [
            float(s) * 16.01 if w else None for s, w in zip(scale, is_weight, strict=True)
        ],
    }


def _units(steps: int) -> Columns:
    last = np.arange(13, steps, 14)
    step, layer = np.repeat(last, 2), np.tile([0, 1], len(last))
    return {
        "step": step,
        "layer": layer,
        "window_steps": np.full(len(step), 14),
        "unit_count": np.full(len(step), 256),
        "dead_unit_count": 2 + layer,
        "token_count": np.full(len(step), 14 * 600),
    }


def _attention(steps: int, random: np.random.Generator) -> Columns:
    step = np.repeat(np.arange(steps), 8)
    row_count = len(step)
    return {
        "step": step,
        "layer": np.tile(np.repeat([0, 1], 4), steps),
        "head": np.tile([0, 1, 2, 3], 2 * steps),
        "entropy": random.uniform(0.6, 0.9, row_count).astype(np.float32),
        "first_row_entropy": np.zeros(row_count, np.float32),
        "future_mass": np.zeros(row_count),
        "future_mass_beyond_next": np.zeros(row_count),
        "max_abs_logit": random.uniform(5, 8, row_count).astype(np.float32),
    }


def _examples() -> Columns:
    """600 examples: 20 verbs x 5 tenses x 3 persons x 2 tasks; every tenth cell is held out."""
    cells = [
        (verb, tense, person, task)
        for verb in range(20)
        for tense in range(5)
        for person in range(3)
        for task in range(2)
    ]
    held_out = [(3 * verb + 4 * tense + 7 * person) % 10 == 0 for verb, tense, person, _ in cells]
    return {
        "example_id": list(range(len(cells))),
        "split": ["validation" if held else "train" for held in held_out],
        "content_hash": list(range(len(cells))),
        "verb": [VERBS[verb] for verb, _, _, _ in cells],
        "tense": [TENSES[tense] for _, tense, _, _ in cells],
        "person": [str(person + 1) for _, _, person, _ in cells],
        "task": ["inflection" if task == 0 else "translation" for _, _, _, task in cells],
        "regularity": [REGULARITY[verb] for verb, _, _, _ in cells],
    }


def _example_losses(evaluated: np.ndarray, examples: Columns, random: np.random.Generator) -> Columns:
    """Irregular verbs are 30% behind; verbs and cells differ by 10%, the same at every evaluation."""
    example_count, evaluation_count = len(examples["example_id"]), len(evaluated)
    factor = np.where(np.array(examples["regularity"]) == "irregular", 1.3, 1.0)
    factor = factor * np.exp(random.normal(0, 0.1, example_count))
    factor = factor * np.where(np.array(examples["split"]) == "validation", 1.15, 1.0)
    loss = mean_loss(evaluated)[:, None] * factor[None, :]
    token_count = np.full(evaluation_count * example_count, 20)
    return {
        "step": np.repeat(evaluated, example_count),
        "split": np.tile(np.array(examples["split"]), evaluation_count),
        "example_id": np.tile(np.array(examples["example_id"]), evaluation_count),
        "loss_sum": loss.ravel() * 20,
        "token_count": token_count,
        "answer_loss_sum": loss.ravel() * 8,
        "answer_token_count": np.full(len(token_count), 8),
        "correct": loss.ravel() < 0.6,
    }


def _evaluations(example_losses: Columns) -> Columns:
    keys = list(
        dict.fromkeys(zip(example_losses["step"].tolist(), example_losses["split"].tolist(), strict=True))
    )
    rows: dict[str, list[Any]] = {name: [] for name in ("step", "split", "repeat", "evaluation_mode")}
    sums = ("loss_sum", "token_count", "answer_loss_sum", "answer_token_count")
    for step, split in keys:
        mine = (example_losses["step"] == step) & (example_losses["split"] == split)
        rows["step"].append(step)
        rows["split"].append(split)
        rows["repeat"].append(0)
        rows["evaluation_mode"].append(True)
        for name in sums:
            rows.setdefault(name, []).append(example_losses[name][mine].sum())
    return rows
