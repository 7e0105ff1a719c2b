"""What a rule asks, its evidence, thresholds and sources: for the terminal and docs/diagnoses.md."""

from __future__ import annotations

import sys

from analyzer.diagnoses.declaration import Diagnosis
from analyzer.diagnoses.registry import DIAGNOSES
from analyzer.query_library import Query, library

EVIDENCE_WORDS = {
    "proof": "proof: an exact invariant is violated",
    "signature": "signature: consistent with the fault, not proof of it",
    "anomaly": "anomaly: something moved; unexplained when no other rule fires",
}
HEAD = """# Diagnoses

Generated from the rules; a test compares. `analyzer explain NAME` prints a rule with its SQL, and
`analyzer diagnose RUN` applies all of them. Every threshold is a default of the rule's macro:
`analyzer sql RUN "FROM dead_units(share_threshold := 0.05)"` asks with another one.

Severity is declared: S1 anomaly without measured harm, S2 worse on held-out data, S3 the result is invalid,
S4 diverged or not finite. A rule that lacks an input, or a run long enough for it, says *not evaluated*,
never *clear*.
"""


def queries() -> dict[str, Query]:
    """The query of every rule, by name."""
    return {query.name: query for query in library() if query.layer == "diagnoses"}


def explanation(diagnosis: Diagnosis) -> str:
    """Everything about a rule, as text for a terminal."""
    query = queries()[diagnosis.name]
    thresholds = [f"  {p.name} := {p.default}   {p.description}" for p in query.parameters]
    explained = ", ".join(diagnosis.explains) or "nothing"
    return "\n".join(
        [
            f"{diagnosis.title} ({diagnosis.name})",
            "",
            f"question    {diagnosis.question}",
            f"meaning     {diagnosis.meaning}",
            f"evidence    {EVIDENCE_WORDS[diagnosis.evidence]}",
            f"severity    {diagnosis.severity}",
            f"requires    {', '.join(diagnosis.requires)}",
            f"explains    {explained}",
            f"source      {diagnosis.source}",
            f"            {query.source.removeprefix('Source: ')}",
            f"remedy      {diagnosis.remedy}",
            "",
            "thresholds",
            *thresholds,
            "",
            query.sql.rstrip(),
            "",
        ]
    )


def index() -> str:
    """Name, evidence, severity and question of every rule, one a line."""
    width = max(len(diagnosis.name) for diagnosis in DIAGNOSES)
    return "".join(f"{d.name:<{width}}  {d.evidence:<9}  {d.severity}  {d.question}\n" for d in DIAGNOSES)


def markdown() -> str:
    """The text of docs/diagnoses.md."""
    return HEAD + "".join(_section(diagnosis, queries()[diagnosis.name]) for diagnosis in DIAGNOSES)


def _section(diagnosis: Diagnosis, query: Query) -> str:
    thresholds = "; ".join(f"`{p.name} := {p.default}` ({p.description})" for p in query.parameters)
    facts = {
        "Question": diagnosis.question,
        "Meaning": diagnosis.meaning,
        "Evidence": f"{EVIDENCE_WORDS[diagnosis.evidence]}; severity {diagnosis.severity}",
        "Thresholds": thresholds,
        "Source": query.source.removeprefix("Source: "),
        "Needs": ", ".join(f"`{need}`" for need in diagnosis.requires),
        "Remedy": diagnosis.remedy,
        "Explains": ", ".join(f"`{name}`" for name in diagnosis.explains),
    }
    lines = "".join(f"- **{name}** {words}\n" for name, words in facts.items() if words)
    return f"\n## {diagnosis.title}\n\n`{diagnosis.name}`\n\n{lines}"


if __name__ == "__main__":
    sys.stdout.write(markdown())
