"""What a run is and how it ended: the tables `runs` and `reference_losses`, from manifests and events."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from types import UnionType
from typing import Any

import duckdb
import pyarrow as pa

from recorder.manifest import Manifest
from recorder.schema import LOG_DIRECTORY

HEARTBEAT_SECONDS = 60.0
"""A live run touches its log every few seconds; a minute of silence is a stopped process."""

_TEXT_FIELDS = ("run_id", "created", "primary_split", "loss_reduction", "mask_type")
_LABEL_FIELDS = ("group_label", "cluster_label", "map_row_label", "map_column_label")
_LOSS_FIELDS = ("uniform_loss", "unigram_loss", "n_gram_loss")
_JSON_FIELDS = ("planned_schedule", "config")

RUNS_SCHEMA = pa.schema(
    [
        ("run", pa.string()),
        ("status", pa.string()),
        ("seed", pa.int64()),
        *((name, pa.string()) for name in (*_TEXT_FIELDS, *_LABEL_FIELDS, *_JSON_FIELDS)),
        *((name, pa.float64()) for name in _LOSS_FIELDS),
    ]
)
REFERENCE_LOSSES_SCHEMA = pa.schema(
    [("run", pa.string()), ("reference", pa.string()), ("split", pa.string()), ("loss", pa.float64())]
)
RUNS_SQL = """
CREATE OR REPLACE TABLE runs AS
SELECT
    run, run_id, status, created, seed, coalesce(progress.steps, 0) AS steps, last_step, last_train_loss,
    primary_split, loss_reduction, mask_type, group_label, cluster_label, map_row_label, map_column_label,
    uniform_loss, unigram_loss, n_gram_loss, planned_schedule, config
FROM declared_runs
LEFT JOIN (
    SELECT run, count(*) AS steps, max(step) AS last_step, arg_max(train_loss, step) AS last_train_loss
    FROM steps WHERE rank = 0 GROUP BY run
) AS progress USING (run)
ORDER BY run
"""


def create_run_facts(
    connection: duckdb.DuckDBPyConnection, paths: Mapping[str, Path], manifests: Mapping[str, Manifest]
) -> None:
    """Tables `runs` and `reference_losses`, computed once: macros look labels and splits up in them."""
    declared = [
        _run_row(run, manifest) | {"status": run_status(connection, run, paths[run], manifest)}
        for run, manifest in manifests.items()
    ]
    connection.register("declared_runs", pa.Table.from_pylist(declared, schema=RUNS_SCHEMA))
    connection.execute(RUNS_SQL)
    rows = [row for run, manifest in manifests.items() for row in _reference_rows(run, manifest)]
    connection.register("reference_losses", pa.Table.from_pylist(rows, schema=REFERENCE_LOSSES_SCHEMA))


def malformed_field(manifest: Manifest) -> str | None:
    """The first field whose JSON type is not the declared one, None when all are well formed."""
    roles, losses = manifest.label_roles, manifest.reference_losses
    texts = {name: getattr(manifest, name) for name in _TEXT_FIELDS} | vars(roles)
    numbers = {name: value for name, value in vars(losses).items() if name != "entropy_floor"}
    objects = {name: getattr(manifest, name) for name in (*_JSON_FIELDS, "environment", "git")}
    objects["entropy_floor"] = losses.entropy_floor
    if isinstance(losses.entropy_floor, dict):
        numbers |= losses.entropy_floor
    checks: tuple[tuple[dict[str, Any], type | UnionType], ...] = (
        (objects, dict),
        (texts, str | None),
        (numbers, float | int | None),
        ({"seed": manifest.seed}, int | None),
    )
    return next((n for fields, kind in checks for n, v in fields.items() if not isinstance(v, kind)), None)


def _run_row(run: str, manifest: Manifest) -> dict[str, Any]:
    roles, losses = manifest.label_roles, manifest.reference_losses
    return {
        "run": run,
        "seed": manifest.seed,
        **{name: getattr(manifest, name) for name in _TEXT_FIELDS},
        **{name: json.dumps(dict(getattr(manifest, name))) for name in _JSON_FIELDS},
        "group_label": roles.group,
        "cluster_label": roles.cluster,
        "map_row_label": roles.map_rows,
        "map_column_label": roles.map_columns,
        "uniform_loss": losses.uniform,
        "unigram_loss": losses.unigram,
        "n_gram_loss": losses.n_gram,
    }


def _reference_rows(run: str, manifest: Manifest) -> list[dict[str, Any]]:
    losses = manifest.reference_losses
    whole_run = (("uniform", losses.uniform), ("unigram", losses.unigram), ("n_gram", losses.n_gram))
    rows: list[dict[str, Any]] = [
        {"run": run, "reference": name, "split": None, "loss": loss}
        for name, loss in whole_run
        if loss is not None
    ]
    return rows + [
        {"run": run, "reference": "entropy_floor", "split": split, "loss": loss}
        for split, loss in losses.entropy_floor.items()
    ]


def run_status(connection: duckdb.DuckDBPyConnection, run: str, path: Path, manifest: Manifest) -> str:
    """ "finished", "failed", "live" or "killed", from the events of each rank's newest segment.

    One rank that fails fails the run; it has finished when every rank has whose log is there. Ranks that
    the newest start does not count, since it has fewer of them, have no say.
    """
    events = connection.execute(
        """
        SELECT rank, kind, payload FROM events_all
        JOIN (SELECT rank, max(segment) AS segment FROM loaded_segments WHERE run = $1 GROUP BY rank)
            USING (rank, segment)
        WHERE run = $1 AND kind IN ('segment_started', 'finished', 'exception')
        ORDER BY wall_time
        """,
        [run],
    ).fetchall()
    starts = [_json_object(payload) for _, kind, payload in events if kind == "segment_started"]
    world_size = _world_size(starts[-1]) if starts else None
    by_rank: dict[int, dict[str, str]] = {}
    for rank, kind, payload in events:
        if world_size is None or rank < world_size:
            by_rank.setdefault(rank, {})[kind] = payload
    if any("exception" in kinds for kinds in by_rank.values()):
        return "failed"
    unfinished = [kinds for kinds in by_rank.values() if "finished" not in kinds]
    if by_rank and not unfinished:
        return "finished"
    environments = [_json_object(kinds.get("segment_started")).get("environment") for kinds in unfinished]
    declared = dict(manifest.environment)
    alive = any(_process_may_be_alive(environment or declared) for environment in environments or [declared])
    return "live" if alive and _heartbeat_is_recent(path / LOG_DIRECTORY) else "killed"


def _world_size(start: Mapping[str, Any]) -> int:
    """Number of ranks that a segment's first event tells of; 1 where it tells none."""
    size = start.get("world_size")
    return size if isinstance(size, int) and size > 0 else 1


def missing_ranks(connection: duckdb.DuckDBPyConnection, run: str, path: Path) -> list[str]:
    """A warning when a run of several ranks has logs of only some of them."""
    rows = connection.execute(
        "SELECT DISTINCT rank, payload FROM events_all WHERE run = $1 AND kind = 'segment_started'", [run]
    ).fetchall()
    world_size = max((_world_size(_json_object(payload)) for _, payload in rows), default=1)
    missing = sorted(set(range(world_size)) - {rank for rank, _ in rows})
    if world_size == 1 or not missing:
        return []
    names = ", ".join(str(rank) for rank in missing)
    return [
        f"{path / LOG_DIRECTORY}: ranks missing of {world_size}: {names}: their part of the run is not shown"
    ]


def _json_object(text: str | None) -> dict[str, Any]:
    try:
        document = json.loads(text or "")
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}


def _process_may_be_alive(environment: Mapping[str, Any]) -> bool:
    """False only for a process of this host that is gone; another host cannot be asked."""
    pid = environment.get("pid")
    if environment.get("host") != socket.gethostname() or not isinstance(pid, int) or pid <= 0:
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _heartbeat_is_recent(log_directory: Path) -> bool:
    newest = max((p.stat().st_mtime for p in log_directory.glob("*.arrows")), default=0.0)
    return time.time() - newest <= HEARTBEAT_SECONDS
