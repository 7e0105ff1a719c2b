"""One query on one synthetic run: input rows, call, output rows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from synthetic import MANIFEST, Columns, Rows, write_run

from analyzer.run_log import open_runs
from recorder.manifest import Manifest


def answer(
    directory: Path, tables: Mapping[str, Rows | Columns], sql: str, manifest: Manifest = MANIFEST
) -> list[tuple[Any, ...]]:
    """The rows of a query over a run that holds just these tables."""
    write_run(directory / "run", tables, manifest)
    with open_runs([directory / "run"]) as run_log:
        return run_log.connection.execute(sql).fetchall()
