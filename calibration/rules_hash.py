"""What the rules were when they were measured, as one hash: results of other rules are not comparable."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence

from analyzer.diagnoses import DIAGNOSES, Diagnosis
from analyzer.diagnoses.ranking import DETECTION_LAG_STEPS
from analyzer.query_library import Query, library

HASH_DIGITS = 16
LITERAL_OR_COMMENT = re.compile(r"('(?:[^']|'')*')|--[^\n]*")


def normalised(sql: str) -> str:
    """The SQL without comments, and with one space for any white space; text literals stay as they are."""
    without_comments = LITERAL_OR_COMMENT.sub(lambda match: match[1] or " ", sql)
    parts = re.split(r"('(?:[^']|'')*')", without_comments)
    parts[::2] = [re.sub(r"\s+", " ", part) for part in parts[::2]]
    return "".join(parts).strip()


def rules_hash(
    queries: Sequence[Query] | None = None,
    diagnoses: Sequence[Diagnosis] = DIAGNOSES,
    lag_steps: int = DETECTION_LAG_STEPS,
) -> str:
    """Hash over every query, what each rule declares about outcomes, and the constant of the ranking.

    Severity is left out, as it is a result of the calibration. It breaks ties of the ranking only, and the
    report ranks anew from the fired rules.
    """
    declared = [[d.name, d.evidence, list(d.explains), list(d.requires)] for d in diagnoses]
    sql = [[query.name, normalised(query.sql)] for query in (library() if queries is None else queries)]
    text = json.dumps([declared, sql, lag_steps])
    return hashlib.sha256(text.encode()).hexdigest()[:HASH_DIGITS]
