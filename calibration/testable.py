"""The first step of a run whose rows can show a fault: time to detection counts from there."""

from __future__ import annotations

from collections.abc import Iterable

from analyzer.diagnoses import Diagnosis
from analyzer.run_log import RunLog
from analyzer.views import identifier, quoted
from recorder.schema import TENSOR_KINDS

TABLES_WITHOUT_STEPS = ("manifest", "tensor_names", "examples")

ROWS_NEEDED = {"detached_branch": 3, "frozen_layer": 2}
"""Recorded steps that one invariant is about: an exact zero in each of three, a hash that stays in two."""

FIRST_VISIBLE = {
    # Weights are zero at the first record; their gradients must be at the first three, which come sooner than
    # three records of weights.
    "zero_initialisation": """
        SELECT max(step) FROM (
            SELECT DISTINCT step FROM tensors
            WHERE run = {run} AND step >= {start} AND kind = 'gradient' AND l2_norm IS NOT NULL
            ORDER BY step LIMIT 3
        ) HAVING count(*) = 3""",
    # Nothing has risen at the minimum, which only the whole log tells: ``start`` is that of the finding.
    "overfitting": """
        SELECT min(step) FROM loss_rise_by_step()
        WHERE run = {run} AND minimum_step = {start} AND step > {start} AND lower > 0""",
    # The order of an epoch repeats that of the one before: both must be the fault's.
    "data_not_shuffled": """
        SELECT min(step) FROM steps WHERE run = {run} AND epoch > (
            SELECT max(epoch) + CAST(min(is_inside) AS INTEGER) FROM (
                SELECT epoch, data_position > 0 AS is_inside FROM steps WHERE run = {run} AND step = {start}
            )
        )""",
    # A rate parts from the plan where the two first differ: a doubled horizon shares the ramp with the plan.
    "schedule_not_followed": """
        SELECT min(step) FROM steps
        WHERE run = {run} AND step >= {start} AND learning_rate <> planned_learning_rate""",
    # An update of the fault's first step shows in the weights of the next.
    "nondeterminism": """
        SELECT min(step) FROM tensors
        WHERE run = {run} AND step > {start} AND kind = 'weight' AND content_hash IS NOT NULL""",
    "evaluation_in_training_mode": """
        SELECT min(step) FROM evaluations WHERE run = {run} AND step >= {start} AND repeat > 0""",
    # The first evaluation makes the copy. The first later one whose live weights are hashed is of old
    # weights, unless the copy was made anew for it.
    "stale_evaluation_weights": """
        SELECT min(step) FROM evaluations JOIN steps USING (run, step)
        WHERE run = {run} AND step > {start} AND evaluations.weights_hash <> steps.weights_hash""",
}
"""Faults that act later than they begin, or whose invariant joins rows; as SQL, by name of the rule."""


def testable_step(run_log: RunLog, run: str, diagnosis: Diagnosis, start: int) -> int | None:
    """The first step at which the log holds what the rule needs to see a fault of ``start``; None: never."""
    if diagnosis.name in FIRST_VISIBLE:
        return _step(run_log, FIRST_VISIBLE[diagnosis.name].format(run=quoted(run), start=start))
    needed = ROWS_NEEDED.get(diagnosis.name, 1)
    steps = [_nth_step(run_log, run, need, start, needed) for need in _needs_with_steps(diagnosis)]
    found = [step for step in steps if step is not None]
    return None if len(found) < len(steps) else max(found, default=start)


def _needs_with_steps(diagnosis: Diagnosis) -> Iterable[str]:
    """The required columns of tables whose rows belong to a step."""
    for need in diagnosis.requires:
        table, dot, _ = need.partition(".")
        if dot and table not in TABLES_WITHOUT_STEPS:
            yield need


def _nth_step(run_log: RunLog, run: str, need: str, start: int, count: int) -> int | None:
    """The step of the count-th row from ``start`` on that holds a value of that column."""
    table, _, column = need.partition(".")
    kind = f" AND kind = {quoted(table)}" if table in TENSOR_KINDS else ""
    source = "tensors" if table in TENSOR_KINDS else table
    return _step(
        run_log,
        f"SELECT max(step) FROM (SELECT DISTINCT step FROM {source} "
        f"WHERE run = {quoted(run)} AND step >= {start} AND {identifier(column)} IS NOT NULL{kind} "
        f"ORDER BY step LIMIT {count}) HAVING count(*) = {count}",
    )


def _step(run_log: RunLog, sql: str) -> int | None:
    rows = run_log.connection.execute(sql).fetchall()
    return int(rows[0][0]) if rows and rows[0][0] is not None else None
