"""Results on disk: one JSON line per finished cell while running, one small Parquet file to commit."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from calibration.cell import Part
from calibration.outcome import Outcome, outcome_of

RUNS_DIRECTORY = Path("runs") / "calibration"
PARQUET_FILE = Path(__file__).parent / "results.parquet"
PARTS: tuple[Part, ...] = ("tuning", "judged")

NAMES = pa.list_(pa.string())
STEP = pa.int64()
SCHEMA = pa.schema(
    [
        ("identity", pa.string()),
        ("part", pa.string()),
        ("kind", pa.string()),
        ("name", pa.string()),
        ("faults", NAMES),
        ("expected", NAMES),
        ("severity", pa.string()),
        ("seed", pa.int64()),
        ("architecture", pa.string()),
        ("start", STEP),
        ("steps", STEP),
        ("causes", NAMES),  # ranked as the rules are declared when the file is written
        (
            "fired",
            pa.list_(pa.struct([("rule", pa.string()), ("first_step", STEP), ("finding_count", STEP)])),
        ),
        ("not_evaluated", NAMES),
        (
            "detections",
            pa.list_(pa.struct([("rule", pa.string()), ("testable_step", STEP), ("detected_step", STEP)])),
        ),
        (
            "harm",
            pa.struct(
                [
                    ("gap", pa.float64()),
                    ("lower", pa.float64()),
                    ("upper", pa.float64()),
                    ("nonfinite_count", STEP),
                ]
            ),
        ),
        ("peer_rules", NAMES),
        ("training_seconds", pa.float64()),
        ("diagnosis_seconds", pa.float64()),
        ("command_seconds", pa.float64()),
        ("rules_hash", pa.string()),
        ("date", pa.string()),
        ("versions", pa.string()),
    ]
)


def lines_file(directory: Path, part: Part) -> Path:
    """Where a part's finished cells are, one JSON object a line."""
    return directory / f"{part}.jsonl"


def append_line(path: Path, outcome: Outcome) -> None:
    """Add a finished cell; a kill can tear this line only."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(outcome)) + "\n")


def read_lines(path: Path) -> dict[str, Outcome]:
    """The finished cells by identity, the last line of each; a torn line is no result."""
    outcomes = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            outcome = outcome_of(json.loads(line))
        except (json.JSONDecodeError, KeyError):  # torn, or of another version of the columns
            continue
        outcomes[outcome.identity] = outcome
    return outcomes


def write_parquet(path: Path, outcomes: Iterable[Outcome]) -> None:
    """The outcomes by part and identity, with the causes that they rank to now."""
    ordered = sorted(outcomes, key=lambda o: (PARTS.index(o.part), o.identity))
    rows = [asdict(outcome) | {"causes": outcome.causes()} for outcome in ordered]
    pq.write_table(pa.Table.from_pylist(rows, SCHEMA), path, compression="zstd")


def read_parquet(path: Path) -> list[Outcome]:
    """The committed outcomes; a column that an older file does not have yet is None."""
    blank = dict.fromkeys(SCHEMA.names)
    return [outcome_of(blank | row) for row in pq.read_table(path).to_pylist()]


def gathered(directory: Path, committed: Path) -> list[Outcome]:
    """Each part from its lines where it was run here, else as it is committed; says when cells get fewer."""
    committed_outcomes = read_parquet(committed) if committed.exists() else []
    outcomes: list[Outcome] = []
    for part in PARTS:
        path = lines_file(directory, part)
        lines = list(read_lines(path).values())
        kept = [outcome for outcome in committed_outcomes if outcome.part == part]
        if lines and len(lines) < len(kept):
            print(
                f"{path}: {len(lines)} cells replace the {len(kept)} of {committed.name}; to keep those, "
                f"restore {committed} and name another directory with --runs",
                file=sys.stderr,
            )
        outcomes += lines or kept
    return outcomes


def hashes(outcomes: Sequence[Outcome]) -> tuple[str, ...]:
    """The different rules that were measured; one in a clean result."""
    return tuple(sorted({outcome.rules_hash for outcome in outcomes}))
