"""Threads beside the training loop: one drives the steps, any may log events and evaluations."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from recorded_rows import record_steps, rows

from recorder import EvaluationLosses, Recorder, RecorderError


def test_events_from_many_threads_are_all_kept(run: Path) -> None:
    """Evaluation and data threads may tell of events while the loop steps."""
    with Recorder(run) as recorder:
        threads = [
            threading.Thread(target=lambda: [recorder.log_event("note", "", step=0) for _ in range(50)])
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        record_steps(recorder, range(50))
        for thread in threads:
            thread.join()
    assert sum(event["kind"] == "note" for event in rows(run, "events")) == 200
    assert len(rows(run, "steps")) == 50


def in_thread(work: Callable[[], None]) -> None:
    """Run to the end in a thread of its own; what it raises is raised here."""
    errors: list[BaseException] = []

    def run_and_catch() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run_and_catch)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def test_a_second_thread_can_not_step_into_a_step(run: Path) -> None:
    """One thread drives the steps; which one does not matter, two at a time are refused."""
    with Recorder(run, quiet=True) as recorder:
        with recorder.step(0), pytest.raises(RecorderError, match="do not nest steps"):
            in_thread(lambda: record_steps(recorder, range(1, 2)))
        in_thread(lambda: record_steps(recorder, range(1, 4)))
        record_steps(recorder, range(4, 5))
    assert [row["step"] for row in rows(run, "steps")] == [0, 1, 2, 3, 4]


def test_evaluations_may_come_from_another_thread(run: Path) -> None:
    """An evaluation loop beside the training loop: every split of every step is there once, none mixed up."""
    count = 50
    ids = np.arange(count)

    def evaluate(split: str) -> None:
        for step in range(30):
            loss = np.full(count, step, np.float64)
            losses = EvaluationLosses(ids, loss, ids + 1, loss, ids + 1, ids > 0)
            recorder.log_evaluation(step, split, losses)

    with Recorder(run, quiet=True) as recorder:
        threads = [threading.Thread(target=evaluate, args=(split,)) for split in ("train", "validation")]
        for thread in threads:
            thread.start()
        record_steps(recorder, range(200))
        for thread in threads:
            thread.join()
    evaluations = rows(run, "evaluations")
    expected = [(step, split) for step in range(30) for split in ("train", "validation")]
    assert sorted((row["step"], row["split"]) for row in evaluations) == expected
    assert all(row["loss_sum"] == count * row["step"] for row in evaluations)
    losses = rows(run, "example_losses")
    assert len(losses) == 2 * 30 * count and all(row["loss_sum"] == row["step"] for row in losses)


def test_rows_of_other_threads_survive_a_new_segment(run: Path) -> None:
    """An evaluation beside a loop that goes back again and again: each row is in one segment or the next."""
    counts = {"events": 0, "evaluations": 0}
    ends = threading.Event()
    one = np.ones(1)

    def log_events() -> None:
        while not ends.is_set():
            recorder.log_event("note", "", step=counts["events"])
            counts["events"] += 1

    def evaluate() -> None:
        while not ends.is_set():
            losses = EvaluationLosses(one, one, one, one, one, one > 0)
            recorder.log_evaluation(counts["evaluations"], "train", losses)
            counts["evaluations"] += 1

    with Recorder(run, quiet=True) as recorder:
        threads = [threading.Thread(target=work) for work in (log_events, evaluate)]
        for thread in threads:
            thread.start()
        for _ in range(10):
            record_steps(recorder, range(2))
            time.sleep(0.01)
        ends.set()
        for thread in threads:
            thread.join()
    found: dict[str, list[int]] = {"events": [], "evaluations": []}
    for path in (run / "log").iterdir():
        table, _, number = path.stem.split("-")
        if table in found:
            of_segment = rows(run, table, segment=int(number[1:]))
            found[table] += [row["step"] for row in of_segment if row.get("kind", "note") == "note"]
    assert {table: sorted(steps) for table, steps in found.items()} == {
        table: list(range(count)) for table, count in counts.items()
    }
