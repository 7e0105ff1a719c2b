"""Steps that come again, go back, nest or follow each other fast, and the end of a run."""

import contextlib
import errno
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recorded_rows import record_steps, rows

from analyzer.run_log import open_runs
from recorder import EvaluationLosses, Recorder, RecorderError, segment, writer
from recorder.writer import Block


def test_a_step_that_goes_back_begins_a_new_segment(run: Path) -> None:
    """Both histories are kept, each in its own segment, with the names of its tensors."""
    with Recorder(run) as recorder:
        recorder.watch({"w": np.ones(2, np.float32)})
        record_steps(recorder, range(3))
        record_steps(recorder, range(1, 4))
    assert [row["step"] for row in rows(run, "steps", segment=0)] == [0, 1, 2]
    assert [row["step"] for row in rows(run, "steps", segment=1)] == [1, 2, 3]
    assert [row["name"] for row in rows(run, "tensor_names", segment=1)] == ["w"]


def test_a_repeated_step_is_another_history(run: Path) -> None:
    """The same number again begins a segment: both rows are kept, the later one is current."""
    with Recorder(run, quiet=True) as recorder:
        for step, loss in ((0, 1.0), (1, 2.0), (1, 3.0), (2, 4.0)):
            with recorder.step(step) as record:
                record.log(loss_sum=loss, loss_token_count=1)
    assert [(row["step"], row["loss_sum"]) for row in rows(run, "steps", segment=0)] == [(0, 1.0), (1, 2.0)]
    with open_runs([run]) as run_log:
        current = run_log.query("SELECT step, loss_sum FROM steps ORDER BY step").to_pylist()
        assert [(row["step"], row["loss_sum"]) for row in current] == [(0, 1.0), (1, 3.0), (2, 4.0)]
        assert run_log.query("SELECT count(*) AS n FROM steps_all")["n"].to_pylist() == [4]


@pytest.mark.parametrize("what", ["files", "threads"])
def test_a_history_without_a_segment_is_given_up(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    """A step that goes back needs files and a thread; without them training goes on, and the end tells it."""

    def refuse(*_: object) -> None:
        if what == "files":
            raise OSError(errno.EMFILE, "Too many open files")
        raise RuntimeError("can't start new thread")

    with Recorder(run, quiet=True) as recorder:
        record_steps(recorder, range(5))
        with monkeypatch.context() as patch:
            patch.setattr(*((segment, "Stream") if what == "files" else (threading.Thread, "start")), refuse)
            record_steps(recorder, range(2, 8))
        one = np.ones(1)
        recorder.log_evaluation(8, "validation", EvaluationLosses(one, one, one, one, one, one > 0))
    assert [row["step"] for row in rows(run, "steps")] == [0, 1, 2, 3, 4]
    first, last = capsys.readouterr().err.splitlines()
    assert "everything from step 2 on, which went back failed: " in first
    assert last.endswith("not recorded: everything from step 2 on, which went back")
    assert sorted(path.name for path in (run / "log").iterdir()) == [
        "events-r0-s0.arrows",
        "steps-r0-s0.arrows",
    ]
    assert [row["kind"] for row in rows(run, "events")] == ["segment_started", "warning", "finished"]


def test_a_run_without_a_thread_is_refused_before_it_begins(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One clear error, and no segment that looks like a run that was killed."""

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RecorderError, match="can not record here: can't start new thread"):
        Recorder(run, quiet=True)
    assert list((run / "log").iterdir()) == []


def test_a_refused_nested_step_leaves_the_outer_one_whole(run: Path) -> None:
    """The mistake is told to who makes it; the step that is running is recorded as if nothing had been."""
    with Recorder(run, quiet=True) as recorder:
        recorder.watch({"w": np.ones(2, np.float32)})
        with recorder.step(7) as record:
            record.add_gradients({"w": np.full(2, 3.0, np.float32)})
            with pytest.raises(RecorderError, match="step 8: step 7 has not ended; do not nest steps"):
                recorder.step(8).__enter__()
            record.log(loss_sum=1.0, loss_token_count=1)
        record_steps(recorder, range(8, 9))
    assert [row["step"] for row in rows(run, "steps")] == [7, 8]
    gradients = [row["mean"] for row in rows(run, "tensors") if row["kind"] == "gradient"]
    assert gradients == [3.0, None]  # the second step gave none


def test_a_clock_that_is_set_back_harms_nothing(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Times are as the clock said; order, durations and flushing do not depend on it."""
    now = [2_000_000_000_000_000_000]

    def step_back() -> int:
        now[0] -= 3_600_000_000_000
        return now[0]

    monkeypatch.setattr(time, "time_ns", step_back)
    with Recorder(run, quiet=True) as recorder:
        record_steps(recorder, range(4))
        path = run / "log" / "steps-r0-s0.arrows"
        header_bytes = path.stat().st_size
        deadline = time.monotonic() + 10
        while path.stat().st_size == header_bytes and time.monotonic() < deadline:
            time.sleep(0.05)  # the flusher brings the rows out by itself
        assert path.stat().st_size > header_bytes
    steps = rows(run, "steps")
    assert [row["step"] for row in steps] == [0, 1, 2, 3]
    times = [row["wall_time"] for row in steps]
    assert times == sorted(times, reverse=True) and len(set(times)) == 4
    assert all(0 < row["recorder_seconds"] <= row["step_seconds"] < 60 for row in steps)
    with open_runs([run]) as run_log:
        assert run_log.query("SELECT step FROM steps ORDER BY step")["step"].to_pylist() == [0, 1, 2, 3]
        assert run_log.query("SELECT status FROM runs")["status"].to_pylist() == ["finished"]


def test_rows_of_short_steps_do_not_pile_up(run: Path) -> None:
    """The flusher is woken by a number of rows too, not by time alone."""
    columns = {"kind": "weight", "tensor_id": np.arange(100)}
    with Recorder(run, quiet=True) as recorder:
        block_count = segment.MOST_WAITING_ROWS // 100 + 1
        blocks = [Block("tensors", 100, {"step": step, **columns}) for step in range(block_count)]
        recorder._segment.append(blocks)
        deadline = time.monotonic() + segment.FLUSH_SECONDS / 2  # before the oldest row is due
        stream = recorder._segment._streams["tensors"]
        while not stream.written_row_count and time.monotonic() < deadline:
            time.sleep(0.005)
        assert (stream.written_row_count, stream.waiting_row_count) == (100 * block_count, 0)


def test_the_thread_that_appends_makes_the_record_batch_and_the_flusher_writes_it(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that are due are encoded when ``append`` returns; no flusher is in the middle of a step then."""
    monkeypatch.setattr(segment, "ENCODE_SECONDS", 0.0)
    with Recorder(run, quiet=True) as recorder:
        recorder.flush()  # the event that a segment starts with
        monkeypatch.setattr(segment, "FLUSH_SECONDS", 60.0)  # of the rows that wait, none is the flusher's
        recorder._segment.append([Block("steps", 1, {"step": 0})])
        stream = recorder._segment._streams["steps"]
        assert stream.waiting_row_count == 0
        deadline = time.monotonic() + 10.0
        while not stream.written_row_count and time.monotonic() < deadline:
            time.sleep(0.005)
        assert stream.written_row_count == 1


@contextlib.contextmanager
def held_by_another_thread(lock: Any) -> Iterator[None]:
    """Nobody else gets the lock meanwhile."""
    is_held, ends = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            is_held.set()
            ends.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    is_held.wait()
    yield
    ends.set()
    thread.join()


def test_an_append_does_not_wait_for_a_disk(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the flusher writes, rows that are due go on waiting, and the next append takes them."""
    monkeypatch.setattr(segment, "ENCODE_SECONDS", 0.0)
    with Recorder(run, quiet=True) as recorder:
        monkeypatch.setattr(segment, "FLUSH_SECONDS", 60.0)
        with held_by_another_thread(recorder._segment._write_lock):  # as the flusher holds it during a write
            recorder._segment.append([Block("steps", 1, {"step": 0})])
            assert recorder._segment._streams["steps"].waiting_row_count == 1
        recorder._segment.append([Block("steps", 1, {"step": 1})])
        assert recorder._segment._streams["steps"].waiting_row_count == 0
    assert [row["step"] for row in rows(run, "steps")] == [0, 1]


def test_a_write_that_hangs_does_not_fill_the_memory(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of many waiting rows the last ones are lost, which is told at once and counted; training goes on."""
    monkeypatch.setattr(writer, "MOST_HELD_ROWS", 10 * (1 + writer.ROWS_OF_A_BLOCK))
    with Recorder(run, quiet=True) as recorder:
        recorder.flush()
        with held_by_another_thread(recorder._segment._write_lock):
            record_steps(recorder, range(20))
            told = capsys.readouterr().err
        recorder.flush()
        record_steps(recorder, range(20, 22))
    assert "steps-r0-s0.arrows: the disk takes no rows" in told and "training goes on" in told
    assert [row["step"] for row in rows(run, "steps")] == [*range(11), 20, 21]
    assert capsys.readouterr().err.endswith("rows lost: 9 of steps\n")
    assert [row["kind"] for row in rows(run, "events")] == ["segment_started", "warning", "finished"]


def test_the_budget_slows_the_cadences_and_says_so(run: Path) -> None:
    """A recorder that costs more than it may doubles its cadences; the cheap signals stay."""
    weights = {f"w{index}": np.ones((64, 64), np.float32) for index in range(20)}
    with Recorder(run, overhead_budget=1e-6) as recorder:
        recorder.watch(weights)
        record_steps(recorder, range(250))
    events = [event for event in rows(run, "events") if event["kind"] == "cadence"]
    assert [json.loads(event["payload"])["weights"] for event in events] == [20, 40]
    assert [event["step"] for event in events] == [99, 199]
    weight_steps = {row["step"] for row in rows(run, "tensors") if row["kind"] == "weight"}
    assert weight_steps == {*range(0, 100, 10), *range(100, 200, 20), *range(200, 250, 40)}
    assert len(rows(run, "steps")) == 250


def test_nothing_can_be_added_to_a_closed_run(run: Path) -> None:
    """One clear error of ours, not one of the file format's."""
    recorder = Recorder(run, quiet=True)
    recorder.close()
    with pytest.raises(RecorderError, match=r"event note: the recorder of .* is closed"):
        recorder.log_event("note", "too late")
    with pytest.raises(RecorderError, match="is closed"):
        record_steps(recorder, range(1))


def test_the_last_line_tells_all_segments_and_the_next_command(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Steps of both histories, a size that is not 0.0 MB, and how the run ended."""
    with pytest.raises(ValueError, match="out of data"), Recorder(run) as recorder:
        record_steps(recorder, range(3))
        record_steps(recorder, range(2))
        raise ValueError("out of data")
    first, last = capsys.readouterr().err.splitlines()
    assert first.startswith(f"recorder: logging to {run}, ")
    assert last.startswith("recorder: 5 steps, ")
    assert " kB logged when the run ended by ValueError: out of data; " in last
    assert last.endswith(f"; see them: analyzer render {run}")


def test_a_live_run_is_read_without_a_warning_before_its_rows_are_written(run: Path) -> None:
    """A file is empty until then, which may take half a second: that is nothing to warn of."""
    with Recorder(run, quiet=True) as recorder:
        record_steps(recorder, range(1))
        with open_runs([run]) as run_log:
            assert [warning for warning in run_log.warnings if "cut" in warning] == []
