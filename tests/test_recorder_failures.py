"""What happens to the training, and to the log, when the world around the recorder fails."""

import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hand_driven_model import HandDrivenModel

from recorder import Recorder, RecorderError, segment


def rows(run: Path, table: str, rank: int = 0, segment: int = 0) -> list[dict]:
    """All rows of one stream."""
    path = run / "log" / f"{table}-r{rank}-s{segment}.arrows"
    return pa.ipc.open_stream(path.read_bytes()).read_all().to_pylist()


def record_steps(recorder: Recorder, steps: range) -> None:
    """Log a loss at each step."""
    for step in steps:
        with recorder.step(step) as record:
            record.log(loss_sum=1.0, loss_token_count=1)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Directory of a run that does not exist yet."""
    return tmp_path / "run"


FULL_DISK = """
    import resource, signal, sys
    from recorder import Recorder
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with Recorder(sys.argv[1], on_error=sys.argv[2], quiet=True) as recorder:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        for step in range(400):
            with recorder.step(step) as record:
                record.log(loss_sum=1.0, loss_token_count=1)
            if step % 50 == 49:
                recorder._segment.write(recorder._segment._streams["steps"])
        print("trained to the end")
"""


def train_with_file_limit(run: Path, on_error: str) -> subprocess.CompletedProcess[str]:
    """A process whose files may not grow past 20 kB: the kernel refuses writes as on a full disk."""
    command = [sys.executable, "-c", textwrap.dedent(FULL_DISK), str(run), on_error]
    return subprocess.run(command, capture_output=True, text=True)


def test_a_full_disk_costs_rows_and_not_the_training(run: Path) -> None:
    """Training ends; one line tells at once, one at the end counts what is missing, an event stays."""
    result = train_with_file_limit(run, "warn")
    assert (result.returncode, result.stdout) == (0, "trained to the end\n")
    first, last = result.stderr.splitlines()
    assert "steps-r0-s0.arrows: can not write" in first and "training goes on" in first
    kept = []
    with (run / "log" / "steps-r0-s0.arrows").open("rb") as file, pytest.raises((pa.ArrowInvalid, OSError)):
        for batch in pa.ipc.open_stream(file):
            kept += batch["step"].to_pylist()
    assert kept == list(range(len(kept))) and len(kept) >= 50
    assert last.endswith(f"rows lost: {400 - len(kept)} of steps")
    assert "warning" in [event["kind"] for event in rows(run, "events")]


def test_a_full_disk_raises_where_it_was_asked_to(run: Path) -> None:
    """on_error="raise" stops the training with one clear error."""
    result = train_with_file_limit(run, "raise")
    assert result.returncode == 1
    assert "RecorderError" in result.stderr.splitlines()[-1] and "can not write" in result.stderr


def test_a_deleted_directory_is_noticed(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Writing to a deleted file succeeds, so the heartbeat has to notice."""
    monkeypatch.setattr(segment, "HEARTBEAT_SECONDS", 0.0)
    with Recorder(run, quiet=True) as recorder:
        record_steps(recorder, range(1))
        shutil.rmtree(run)
        deadline = time.monotonic() + 10
        while recorder._segment._streams["steps"].error is None and time.monotonic() < deadline:
            time.sleep(0.01)
        record_steps(recorder, range(1, 3))
    told = capsys.readouterr().err
    assert "steps-r0-s0.arrows: can not write: [Errno 2] No such file or directory" in told
    assert "rows lost" in told and "of steps" in told


def test_a_failing_hook_is_named_and_the_step_survives(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The forward pass goes on, the step's other rows are there, and the hook is named once."""
    model = HandDrivenModel()
    with Recorder(run, quiet=True) as recorder:
        recorder.attach(model)
        for step in range(2):
            with recorder.step(step) as record:
                model.modules["mlp.relu"].forward_hooks.fire(object(), None)  # no output tensor at all
                record.log(loss_sum=1.0, loss_token_count=1)
    (line,) = capsys.readouterr().err.splitlines()
    assert "hook on mlp.relu" in line and "AttributeError" in line
    assert [row["step"] for row in rows(run, "steps")] == [0, 1]


def test_a_failing_hook_raises_where_it_was_asked_to(run: Path) -> None:
    """on_error="raise" also covers the recorder's own failures."""
    model = HandDrivenModel()
    with Recorder(run, on_error="raise") as recorder:
        recorder.attach(model)
        with pytest.raises(RecorderError, match=r"hook on mlp\.relu"), recorder.step(0):
            model.modules["mlp.relu"].forward_hooks.fire(object(), None)


def test_a_forked_child_writes_nothing(run: Path) -> None:
    """A data worker that inherits the recorder neither writes nor hangs nor closes it."""
    with Recorder(run) as recorder:
        record_steps(recorder, range(2))
        child = os.fork()
        if child == 0:
            record_steps(recorder, range(2, 5))
            recorder.log_event("from the child", "must not be written")
            recorder.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        record_steps(recorder, range(2, 3))
    assert [row["step"] for row in rows(run, "steps")] == [0, 1, 2]
    assert [event["kind"] for event in rows(run, "events")] == ["segment_started", "finished"]


def test_a_step_that_goes_back_begins_a_new_segment(run: Path) -> None:
    """Both histories are kept, each in its own segment, with the names of its tensors."""
    with Recorder(run) as recorder:
        recorder.watch({"w": np.ones(2, np.float32)})
        record_steps(recorder, range(3))
        record_steps(recorder, range(1, 4))
    assert [row["step"] for row in rows(run, "steps", segment=0)] == [0, 1, 2]
    assert [row["step"] for row in rows(run, "steps", segment=1)] == [1, 2, 3]
    assert [row["name"] for row in rows(run, "tensor_names", segment=1)] == ["w"]


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


def record_rank(run: Path, rank: int) -> None:
    """One process of four."""
    with Recorder(run, rank=rank, world_size=4, quiet=True) as recorder:
        record_steps(recorder, range(5))


def test_four_ranks_write_their_own_files(run: Path) -> None:
    """Real processes on one directory: no file is shared, rank 0 owns the manifest."""
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=record_rank, args=(run, rank)) for rank in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    for rank in range(4):
        assert [row["step"] for row in rows(run, "steps", rank)] == list(range(5))
        assert json.loads(rows(run, "events", rank)[0]["payload"])["world_size"] == 4
    assert (run / "manifest.json").exists()


def test_a_reader_beside_the_writer_never_sees_a_torn_row(run: Path) -> None:
    """Whole batches only, in order, while the writer flushes as fast as it can."""
    with Recorder(run, quiet=True) as recorder:
        seen = 0
        for step in range(1500):
            record_steps(recorder, range(step, step + 1))
            stream = recorder._segment._streams["steps"]
            recorder._segment.write(stream)
            if step % 5 == 0:
                steps = []
                with stream.path.open("rb") as file:
                    try:
                        for batch in pa.ipc.open_stream(file):
                            steps += batch["step"].to_pylist()
                    except (pa.ArrowInvalid, OSError):  # the tail of a file that is being written
                        pass
                assert steps == list(range(len(steps))) and len(steps) >= seen
                seen = len(steps)
    assert seen == 1496


def test_rows_survive_a_process_that_never_closes(run: Path) -> None:
    """A loop without ``with`` and without close loses nothing when the interpreter ends."""
    program = """
        import sys
        from recorder import Recorder
        recorder = Recorder(sys.argv[1])
        for step in range(3):
            with recorder.step(step) as record:
                record.log(learning_rate=0.1)
    """
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), str(run)], check=True, capture_output=True
    )
    assert [row["step"] for row in rows(run, "steps")] == [0, 1, 2]


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


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_directory_is_one_clear_error(tmp_path: Path) -> None:
    """Nothing can be recorded, so it is said before the first step."""
    tmp_path.chmod(0o500)
    with pytest.raises(RecorderError, match="can not record here: Permission denied"):
        Recorder(tmp_path / "run")
