"""Rules of the user's own: a directory of SQL macros, each checked like those of ``queries/diagnoses``.

A file's comment begins with the question that it asks. It may have header lines of its own:
``-- title: ...``, ``-- severity: S1`` to ``S4``, ``-- evidence: proof`` or ``signature``, and
``-- requires: steps.train_loss, gradient.l2_norm``. The SQL is somebody else's: like a query of
``analyzer sql`` it runs in a child process.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import cast

import duckdb

from analyzer.diagnoses.assessment import assess_runs
from analyzer.diagnoses.declaration import (
    EVIDENCES,
    SEVERITIES,
    Assessment,
    Diagnosis,
    Evidence,
    Finding,
    Severity,
)
from analyzer.errors import AnalyzerError
from analyzer.query_library import Query, library, parse_query
from analyzer.run_log import RunLog, open_runs
from analyzer.sandbox import LIMITS, Answer, Json, Limits, ask, bounded, lock_down, serve

FINDING_COLUMNS = ("run", "first_step", "last_step", "subject", "observed", "threshold", "detail")
HEADER_LINE = re.compile(r"^-- (title|severity|evidence|requires): (.+)$", re.MULTILINE)
LOSS_PANEL = 1


def run_rules(
    paths: Sequence[Path], directory: Path, limits: Limits = LIMITS
) -> dict[str, tuple[Assessment, ...]]:
    """What the rules of a directory come to on each run, by run name, in a child process under limits.

    The time is for all of them. Raises AnalyzerError with one line for the first file that is not a rule, or
    that takes too long or too much memory.
    """
    rule_paths(directory)
    request = {"paths": [str(path) for path in paths], "directory": str(directory)}
    header, _ = ask("analyzer.diagnoses.user_rules", request, limits, f"{directory}: rules")
    return {run: tuple(map(_assessment, given)) for run, given in header["assessments"].items()}


def rule_paths(directory: Path) -> list[Path]:
    """The files of a directory of rules, by name. Raises AnalyzerError when there are none."""
    if not directory.is_dir():
        raise AnalyzerError(f"{directory}: no such directory: name one that holds rules as .sql files")
    paths = sorted(directory.glob("*.sql"))
    if not paths:
        raise AnalyzerError(f"{directory}: no .sql file in it: write one macro per rule, named like its file")
    return paths


def _assessment(given: Json) -> Assessment:
    """An assessment from its JSON, which has lists for tuples."""
    words = given["diagnosis"]
    lists = {name: tuple(words[name]) for name in ("explains", "requires")}
    return Assessment(
        Diagnosis(**{**words, **lists}),
        given["outcome"],
        tuple(given["missing"]),
        tuple(Finding(**finding) for finding in given["findings"]),
    )


def _answer(request: Json, limits: Limits) -> Answer:
    """The child's side of ``run_rules``."""
    started = time.monotonic()
    outcomes: dict[str, list[Json]] = {}
    with open_runs([Path(path) for path in request["paths"]]) as run_log:
        lock_down(run_log.connection, limits)  # before the first rule: its SQL is not ours
        for path in rule_paths(Path(request["directory"])):
            spent = time.monotonic() - started
            with bounded(run_log.connection, limits, f"{path}: rule", spent):
                assessments = _assess(run_log, path)
            for run, (assessment,) in assessments.items():
                outcomes.setdefault(run, []).append(asdict(assessment))
    return {"assessments": outcomes}, None


def _assess(run_log: RunLog, path: Path) -> dict[str, tuple[Assessment, ...]]:
    """What one rule comes to on each run, its findings of the types that ours have."""
    diagnosis = _load_rule(run_log, path)
    try:
        assessments = assess_runs(run_log, [diagnosis])
        return {
            run: tuple(replace(one, findings=tuple(map(_typed, one.findings))) for one in of_run)
            for run, of_run in assessments.items()
        }
    except (AnalyzerError, TypeError, ValueError, OverflowError) as error:
        raise AnalyzerError(f"{path}: {_first_line(error)}") from None


def _typed(finding: Finding) -> Finding:
    """The finding with whole steps, floats and text: SQL may have made decimals or wide integers of them."""
    first, last = (None if s is None else int(s) for s in (finding.first_step, finding.last_step))
    observed, threshold = (None if v is None else float(v) for v in (finding.observed, finding.threshold))
    return replace(
        finding,
        first_step=first,
        last_step=last,
        subject=str(finding.subject),
        observed=observed,
        threshold=threshold,
        detail=str(finding.detail),
    )


def _load_rule(run_log: RunLog, path: Path) -> Diagnosis:
    text = path.read_text(encoding="utf-8")
    header = {match[1]: match[2].strip() for match in HEADER_LINE.finditer(text)}
    query = parse_query(path.stem, "rules", HEADER_LINE.sub("", text).strip())
    _check_text(path, query, header)
    _create(run_log.connection, path, text)
    try:
        columns = tuple(run_log.query(f"FROM {path.stem}() LIMIT 0").column_names)
    except AnalyzerError as error:
        raise AnalyzerError(f"{path}: {_first_line(error)}") from None
    if columns != FINDING_COLUMNS:
        raise AnalyzerError(
            f"{path}: columns {', '.join(columns)}; expected {', '.join(FINDING_COLUMNS)}: select these"
        )
    return _declaration(query, header)


def _check_text(path: Path, query: Query, header: dict[str, str]) -> None:
    """Raises AnalyzerError for what the text alone shows to be wrong."""
    if query.name in {known.name for known in library()}:
        raise AnalyzerError(f"{path}: {query.name} is a query of the library: give the rule another name")
    if not query.summary:
        raise AnalyzerError(f"{path}: no comment above the macro: say in its first line what the rule asks")
    if not re.search(rf"CREATE (OR REPLACE )?MACRO {re.escape(query.name)}\s*\(", query.sql, re.IGNORECASE):
        raise AnalyzerError(f"{path}: no CREATE MACRO {query.name}(...): the macro is named like its file")
    for key, allowed in (("severity", SEVERITIES), ("evidence", EVIDENCES)):
        if header.get(key, allowed[0]) not in allowed:
            raise AnalyzerError(f"{path}: {key} {header[key]}; expected one of {', '.join(allowed)}")


def _create(connection: duckdb.DuckDBPyConnection, path: Path, text: str) -> None:
    try:
        statements = connection.extract_statements(text)
        if len(statements) != 1 or statements[0].type != duckdb.StatementType.CREATE:
            raise AnalyzerError(f"{path}: {len(statements)} statements; expected one CREATE MACRO")
        connection.execute(statements[0])
    except duckdb.Error as error:
        raise AnalyzerError(f"{path}: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _declaration(query: Query, header: dict[str, str]) -> Diagnosis:
    title = header.get("title") or query.name.replace("_", " ").capitalize()
    return Diagnosis(
        name=query.name,
        title=title,
        question=query.summary,
        meaning=query.source or query.summary,
        remedy="A rule of your own: its remedy is yours to know.",
        source=query.source or "the rule's own file",
        evidence=cast(Evidence, header.get("evidence", "signature")),
        severity=cast(Severity, header.get("severity", "S2")),
        explains=(),
        requires=tuple(need.strip() for need in header.get("requires", "").split(",") if need.strip()),
        panel=LOSS_PANEL,
    )


if __name__ == "__main__":
    raise SystemExit(serve(_answer, "rules"))
