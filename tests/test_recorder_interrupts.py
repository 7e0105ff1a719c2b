"""Ctrl-C and signal handlers: whatever call they come after, no row is lost, doubled or torn."""

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recorded_rows import record_steps, rows, run_program

from recorder import Recorder
from recorder.writer import Stream


class Once:
    """In place of a method: interrupts one call of it, before or after its work."""

    def __init__(self, method: Any, *, after: bool) -> None:
        self.method, self.after, self.is_spent = method, after, False

    def __call__(self, *arguments: Any) -> Any:
        """What the method returns."""
        if self.is_spent:
            return self.method(*arguments)
        self.is_spent = True
        if self.after:
            self.method(*arguments)
        raise KeyboardInterrupt


class HalfAFile:
    """A file whose first write is interrupted in the middle."""

    def __init__(self, file: Any) -> None:
        self.file, self.is_spent = file, False

    def __getattr__(self, name: str) -> Any:
        """Everything else is the file's own."""
        return getattr(self.file, name)

    def write(self, data: Any) -> Any:
        """Raises KeyboardInterrupt when half of the data is in the file."""
        if self.is_spent:
            return self.file.write(data)
        self.is_spent = True
        self.file.write(data[: len(data) // 2])
        raise KeyboardInterrupt


def interrupt(stream: Stream, where: str) -> None:
    """Interrupt the stream once from now on."""
    if where == "in a write":
        stream._file = HalfAFile(stream._file)  # type: ignore[assignment]
    elif where == "while a batch is built":
        stream._batch = Once(stream._batch, after=False)  # type: ignore[method-assign]
    elif where == "before a write":
        stream._hand_over = Once(stream._hand_over, after=False)  # type: ignore[method-assign]
    elif where == "after a write":
        stream._hand_over = Once(stream._hand_over, after=True)  # type: ignore[method-assign]
    else:
        stream._writer = InterruptedWriter(stream._writer)


class InterruptedWriter:
    """An Arrow writer whose first batch is interrupted: as Python does it, when the call is over."""

    def __init__(self, writer: Any) -> None:
        self.write_batch, self.close = Once(writer.write_batch, after=True), writer.close


PLACES = ("while a batch is built", "after a batch is built", "before a write", "in a write", "after a write")


@pytest.mark.parametrize("where", PLACES)
def test_an_interrupt_loses_no_row_and_doubles_none(
    run: Path, capsys: pytest.CaptureFixture[str], where: str
) -> None:
    """What was being encoded or written is taken up by the next call, which the end of the run is too."""
    with Recorder(run, quiet=True) as recorder:
        record_steps(recorder, range(3))
        recorder.flush()
        record_steps(recorder, range(3, 6))
        interrupt(recorder._segment._streams["steps"], where)
        with pytest.raises(KeyboardInterrupt):
            recorder.flush()
        record_steps(recorder, range(6, 8))
        recorder.flush()
        record_steps(recorder, range(8, 9))
    assert [row["step"] for row in rows(run, "steps")] == list(range(9))
    assert (run / "log" / "steps-r0-s0.arrows").read_bytes().count(b"\xff\xff\xff\xff\0\0\0\0") == 1
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("method", ["before_update", "after_update"])
def test_a_loop_that_catches_an_interrupt_may_step_on(run: Path, method: str) -> None:
    """Ctrl-C at the beginning of a step, or at its end, leaves no step open and no array of it behind."""
    with Recorder(run, quiet=True) as recorder:
        recorder.watch({"w": np.ones(2, np.float32)})
        setattr(recorder._signals, method, Once(getattr(recorder._signals, method), after=False))
        with pytest.raises(KeyboardInterrupt), recorder.step(0) as record:
            record.add_gradients({"w": np.ones(2, np.float32)})
        assert not recorder.capture.recording and not recorder.capture.gradients
        record_steps(recorder, range(1, 3))
    assert [row["step"] for row in rows(run, "steps")] == [1, 2]
    gradients = [row for row in rows(run, "tensors") if row["kind"] == "gradient"]
    assert [row["has_gradient"] for row in gradients] == [False, False]


def test_a_second_close_finishes_an_interrupted_one(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while the end of a run waits for a slow disk: the rows are there after the next call."""
    recorder = Recorder(run, quiet=True)
    record_steps(recorder, range(3))
    flusher = recorder._segment._threads[0]
    monkeypatch.setattr(flusher, "join", Once(flusher.join, after=False))
    with pytest.raises(KeyboardInterrupt):
        recorder.close()
    assert not recorder._segment.is_closed
    recorder.close()
    recorder.close()
    assert [row["step"] for row in rows(run, "steps")] == [0, 1, 2]
    assert [row["kind"] for row in rows(run, "events")] == ["segment_started", "finished"]


INTERRUPTED_END = """
    import sys
    from recorder import Recorder
    with Recorder(sys.argv[1], quiet=True) as recorder:
        with recorder.step(0) as record:
            record.log(loss_sum=1.0, loss_token_count=1)
        flusher = recorder._segment._threads[0]
        join = flusher.join
        def interrupted_join():
            flusher.join = join
            raise KeyboardInterrupt
        flusher.join = interrupted_join
"""


def test_the_end_of_the_process_finishes_an_interrupted_close(run: Path) -> None:
    """Nobody calls close again after ``with``."""
    assert "KeyboardInterrupt" in run_program(INTERRUPTED_END, run).stderr
    assert [row["step"] for row in rows(run, "steps")] == [0]
    assert [row["kind"] for row in rows(run, "events")] == ["segment_started", "finished"]


@pytest.mark.parametrize("method", ["append", "_batch"])
def test_a_signal_handler_may_log_an_event_at_any_moment(run: Path, method: str) -> None:
    """In the middle of an append or an encoding of its own thread: the event waits, nobody else does."""
    with Recorder(run, quiet=True) as recorder:
        record_steps(recorder, range(1))
        recorder.flush()
        steps, events = (recorder._segment._streams[name] for name in ("steps", "events"))
        interrupted = getattr(steps, method)

        def handle_a_signal(*arguments: Any) -> Any:
            setattr(steps, method, interrupted)
            recorder.log_event("preempted", "SIGTERM")
            return interrupted(*arguments)

        setattr(steps, method, handle_a_signal)
        record_steps(recorder, range(1, 2))
        recorder.flush()
        record_steps(recorder, range(2, 3))
        deadline = time.monotonic() + 10
        while events.written_row_count < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert events.written_row_count == 2
    assert [row["step"] for row in rows(run, "steps")] == [0, 1, 2]
    assert [row["kind"] for row in rows(run, "events")] == ["segment_started", "preempted", "finished"]


def test_a_signal_handler_that_closes_leaves_it_to_the_end_of_the_run(run: Path) -> None:
    """It ends the process next; the rows that were being encoded are there all the same."""
    with pytest.raises(SystemExit), Recorder(run, quiet=True) as recorder:
        record_steps(recorder, range(2))
        steps = recorder._segment._streams["steps"]
        interrupted = steps._batch

        def handle_a_signal(*arguments: Any) -> Any:
            steps._batch = interrupted  # type: ignore[method-assign]
            recorder.close()
            sys.exit()

        steps._batch = handle_a_signal  # type: ignore[method-assign]
        recorder.flush()
    assert [row["step"] for row in rows(run, "steps")] == [0, 1]
    assert [row["kind"] for row in rows(run, "events")] == ["segment_started", "finished"]
