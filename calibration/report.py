"""results.parquet and docs/calibration.md, from the results of both parts."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from calibration import tables
from calibration.cell import Part
from calibration.matrix import MEMORY_STEPS, MID_RUN_STEP, cells
from calibration.outcome import Outcome
from calibration.peers import OMITTED
from calibration.results import (
    PARQUET_FILE,
    PARTS,
    gathered,
    hashes,
    read_parquet,
    write_parquet,
)
from calibration.scores import healthy, single_faults
from calibration.targets import targets

REPORT_FILE = Path(__file__).parent.parent / "docs" / "calibration.md"
METHOD_FILE = Path(__file__).parent / "method.md"  # the words that every report begins with
PEERS_FILE = Path(__file__).parent / "peers.md"  # and those before the table of other tools

OMITTED_HEAD = "\nDocumented rules that are not here:\n\n"


def write_report(runs_directory: Path) -> None:
    """Write both files from the lines of the runs directory, or from the committed rows of a part without."""
    outcomes = gathered(runs_directory, PARQUET_FILE)
    write_parquet(PARQUET_FILE, outcomes)
    REPORT_FILE.write_text(markdown(read_parquet(PARQUET_FILE)), encoding="utf-8")
    for line in (f"{PARQUET_FILE}: {len(outcomes)} cells", str(REPORT_FILE)):
        print(line, file=sys.stderr)


def markdown(outcomes: Sequence[Outcome]) -> str:
    """The text of docs/calibration.md."""
    judged = [outcome for outcome in outcomes if outcome.part == "judged"]
    tuning = [outcome for outcome in outcomes if outcome.part == "tuning"]
    return METHOD_FILE.read_text(encoding="utf-8") + _provenance(outcomes) + _judged(judged) + _tuning(tuning)


def _provenance(outcomes: Sequence[Outcome]) -> str:
    return "\n## What was run\n\n" + "".join(
        _part(part, [outcome for outcome in outcomes if outcome.part == part]) for part in PARTS
    )


def _part(part: Part, outcomes: Sequence[Outcome]) -> str:
    """Cells, models, rules and versions of a part, as one item of a list."""
    seeds: dict[str, set[int]] = {}
    for outcome in outcomes:
        lengths = " for the longest runs" if outcome.steps == MEMORY_STEPS else ""
        seeds.setdefault(f"{outcome.architecture}{lengths}", set()).add(outcome.seed)
    models = "; ".join(f"{name}: seeds {_words(sorted(numbers))}" for name, numbers in sorted(seeds.items()))
    later = sorted({outcome.seed for outcome in outcomes if outcome.start == MID_RUN_STEP})
    hours = sum(outcome.training_seconds + outcome.diagnosis_seconds for outcome in outcomes) / 3600
    facts = (
        f"{len(outcomes)} of {len(cells(part))} cells: {len(single_faults(outcomes))} with one fault, "
        f"{sum(outcome.kind == 'pair' for outcome in outcomes)} with two, "
        f"{len(healthy(outcomes))} healthy of {tables.healthy_steps(outcomes):,} steps",
        models,
        f"faults that can start mid-run do so at step {MID_RUN_STEP} with seed {_words(later)}",
        f"rules {_words(hashes(outcomes))}",
        _words(sorted({outcome.date for outcome in outcomes})),
        _words(sorted({outcome.versions for outcome in outcomes})),
        f"{hours:.1f} hours of training and diagnosing",
    )
    return f"- **{part}**: {'; '.join(facts)}.\n"


def _words(items: Sequence[object]) -> str:
    return ", ".join(map(str, items)) or "none"


def _judged(outcomes: Sequence[Outcome]) -> str:
    if not outcomes:
        return "\n## Judged part\n\nNot run yet.\n"
    sections = (
        ("Targets", targets(outcomes)),
        ("First cause by severity", tables.severities(outcomes)),
        ("Confusion matrix", tables.confusion_matrix(outcomes)),
        ("False alarms", tables.false_alarms(outcomes)),
        ("Proofs", tables.proofs(outcomes)),
        ("Time to detection at medium severity", tables.detection_times(outcomes)),
        ("Pairs of faults", tables.pairs(outcomes)),
        ("Harm", tables.harms(outcomes)),
        ("Other tools' rules on the same logs", _peers(outcomes)),
        ("Every miss", tables.misses(outcomes)),
    )
    return "\n## Judged part\n" + "".join(f"\n### {title}\n\n{text}" for title, text in sections)


def _peers(outcomes: Sequence[Outcome]) -> str:
    omitted = "".join(f"- {name}: {reason}.\n" for name, reason in OMITTED.items())
    return PEERS_FILE.read_text(encoding="utf-8") + tables.peers(outcomes) + OMITTED_HEAD + omitted


def _tuning(outcomes: Sequence[Outcome]) -> str:
    if not outcomes:
        return "\n## Tuning part\n\nNot run yet.\n"
    sections = (
        ("First cause by severity", tables.severities(outcomes)),
        ("False alarms", tables.false_alarms(outcomes)),
        ("Misses", tables.misses(outcomes)),
    )
    return "\n## Tuning part\n" + "".join(f"\n### {title} (tuning)\n\n{text}" for title, text in sections)
