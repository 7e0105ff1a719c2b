"""What happens to the training, and to the log, when the world around the recorder fails."""

import errno
import io
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hand_driven_model import HandDrivenModel

from analyzer.run_log import open_runs
from analyzer.streams import read_stream
from recorder import EvaluationLosses, Recorder, RecorderError, segment
from recorder.schema import TENSORS
from recorder.writer import Block


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


def run_program(
    program: str, *arguments: object, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """A Python process of its own."""
    command = [sys.executable, "-c", textwrap.dedent(program), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd)


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
    return run_program(FULL_DISK, run, on_error)


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


def fill_the_disk(path: Path) -> None:
    """From now on the kernel refuses every write to this open file: its descriptor is /dev/full's."""
    (descriptor,) = (
        int(link.name) for link in Path("/proc/self/fd").iterdir() if os.path.realpath(link) == str(path)
    )
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, descriptor)
    os.close(full)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_no_space_left_is_told_by_its_name(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The kernel's own ENOSPC: what was flushed before is there, what came after is counted."""
    with Recorder(run, quiet=True) as recorder:
        record_steps(recorder, range(3))
        recorder.flush()
        fill_the_disk(run.resolve() / "log" / "steps-r0-s0.arrows")
        record_steps(recorder, range(3, 7))
        recorder.flush()
    first, last = capsys.readouterr().err.splitlines()
    assert "steps-r0-s0.arrows: can not write: [Errno 28] No space left on device" in first
    assert last.endswith("rows lost: 4 of steps")
    with open_runs([run]) as run_log:
        assert run_log.query("SELECT step FROM steps")["step"].to_pylist() == [0, 1, 2]
        assert run_log.query("SELECT message FROM events WHERE kind = 'warning'").num_rows == 1


class FileOnQuota(io.FileIO):
    """A file that takes 4,000 bytes, a header and some rows, and then refuses as a quota does."""

    def write(self, data: Any) -> int:
        """Raises EDQUOT when the quota is used up."""
        if self.tell() + len(data) > 4000:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        return super().write(data)


open_without_quota = Path.open


def open_on_quota(path: Path, mode: str = "r", buffering: int = -1, **options: Any) -> Any:
    """In place of Path.open."""
    if "x" not in mode:
        return open_without_quota(path, mode, buffering, **options)
    return io.BufferedWriter(FileOnQuota(path, mode), buffering)


@pytest.mark.parametrize("on_error", ["warn", "raise"])
def test_a_quota_is_like_a_full_disk(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], on_error: Any
) -> None:
    """It ends the stream, not the training; or it raises at the step that meets it."""
    monkeypatch.setattr(Path, "open", open_on_quota)
    recorder = Recorder(run, quiet=True, on_error=on_error)
    try:
        for step in range(200):
            record_steps(recorder, range(step, step + 1))
            recorder.flush()
    except RecorderError as error:
        assert on_error == "raise" and "Disk quota exceeded" in str(error) and 1 <= step < 100
        recorder.close()
        return
    assert on_error == "warn"
    recorder.close()
    told = capsys.readouterr().err.splitlines()
    assert "steps-r0-s0.arrows: can not write: [Errno 122] Disk quota exceeded" in told[0]
    with open_runs([run]) as run_log:
        kept = run_log.query("SELECT step FROM steps")["step"].to_pylist()
    assert kept == list(range(len(kept))) and len(kept) > 0
    assert f"rows lost: {200 - len(kept)} of steps" in told[-1]


FILE_LIMIT = """
    import os, resource, sys, time
    from recorder import Recorder
    run, on_error, fsync_seconds = sys.argv[1:]
    with Recorder(run, on_error=on_error, quiet=True, fsync_seconds=float(fsync_seconds)) as recorder:
        for step in range(10):
            with recorder.step(step) as record:
                record.log(loss_sum=1.0, loss_token_count=1)
                if step >= 1:  # the first of them would open a file
                    record.log_micro_batch(loss_sum=1.0, loss_token_count=1, gradient_norm=1.0)
            if step == 0:
                lowest_free = os.dup(1)
                os.close(lowest_free)
                resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, lowest_free))
            time.sleep(0.1)
        print("trained to the end")
"""


@pytest.mark.parametrize("fsync_seconds", [0.0, 0.2, 30.0])
def test_a_file_limit_costs_the_table_that_it_hits(run: Path, fsync_seconds: float) -> None:
    """No descriptor is left: a table that was not open is lost and told of, the open ones go on."""
    result = run_program(FILE_LIMIT, run, "warn", fsync_seconds)
    assert (result.returncode, result.stdout) == (0, "trained to the end\n"), result.stderr
    first, last = result.stderr.splitlines()
    assert "micro_batches-r0-s0.arrows: can not write: [Errno 24] Too many open files" in first
    assert last.endswith("rows lost: 9 of micro_batches")
    assert [row["step"] for row in rows(run, "steps")] == list(range(10))


def test_a_file_limit_raises_where_it_was_asked_to(run: Path) -> None:
    """on_error="raise" stops at the step that needs the file."""
    result = run_program(FILE_LIMIT, run, "raise", 0.0)
    assert result.returncode == 1
    assert "micro_batches-r0-s0.arrows: can not write" in result.stderr.splitlines()[-1]


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
    assert run_program(program, run).returncode == 0
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


READ_ONLY = """
    import os
    from recorder import Recorder, RecorderError
    if os.geteuid() == 0:
        os.setuid(65534)  # root may write everywhere
    try:
        Recorder("run")
    except RecorderError as error:
        print(error)
"""


def test_a_read_only_directory_is_one_clear_error(tmp_path: Path) -> None:
    """Nothing can be recorded, so it is said before the first step."""
    tmp_path.chmod(0o555)
    result = run_program(READ_ONLY, cwd=tmp_path)
    assert result.stdout == (
        "run: can not record here: Permission denied; free the path or name another run directory\n"
    ), result.stderr


DATA_WORKERS = """
    import multiprocessing, sys
    from recorder import Recorder

    def work(item):
        recorder.log_event("from a worker", "must not be written")
        with recorder.step(100 + item) as record:
            record.log(loss_sum=1.0, loss_token_count=1)
        return item

    recorder = Recorder(sys.argv[1], quiet=True)
    for epoch in range(3):
        with multiprocessing.get_context("fork").Pool(2) as pool:
            for step, _ in enumerate(pool.imap(work, range(20)), start=20 * epoch):
                with recorder.step(step) as record:
                    record.log(loss_sum=1.0, loss_token_count=1)
                recorder.flush()
            pool.close()
            pool.join()  # workers end by themselves and run what Python runs at exit
    recorder.close()
"""


def test_data_workers_leave_the_log_alone(run: Path) -> None:
    """Forked pools come and go beside a loop that flushes at every step; only the loop's rows are there."""
    result = run_program(DATA_WORKERS, run)
    assert (result.returncode, result.stderr) == (0, "")
    assert [row["step"] for row in rows(run, "steps")] == list(range(60))
    assert [event["kind"] for event in rows(run, "events")] == ["segment_started", "finished"]


def race_for_a_segment(run: Path, barrier: Any, numbers: Any) -> None:
    """One of several processes that open the same run, as the same rank, at the same moment."""
    barrier.wait()
    with Recorder(run, quiet=True) as recorder:
        numbers.put(recorder.segment)
        for step in range(20):
            with recorder.step(step) as record:
                record.log(loss_sum=float(recorder.segment), loss_token_count=1)


def test_processes_on_one_directory_never_share_a_file(run: Path) -> None:
    """Each gets a segment of its own, whoever is first, and its file holds its rows only."""
    context = multiprocessing.get_context("spawn")
    barrier, numbers = context.Barrier(3), context.Queue()
    processes = [context.Process(target=race_for_a_segment, args=(run, barrier, numbers)) for _ in range(3)]
    for process in processes:
        process.start()
    assert sorted(numbers.get(timeout=60) for _ in processes) == [0, 1, 2]
    for process in processes:
        process.join()
        assert process.exitcode == 0
    for number in range(3):
        assert {row["loss_sum"] for row in rows(run, "steps", segment=number)} == {float(number)}
    assert json.loads((run / "manifest.json").read_text(encoding="utf-8"))["run_id"] == "run"


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


WRITER = """
    import sys, time
    import numpy as np
    from recorder import Recorder
    names = [f"w{index}" for index in range(30)]
    with Recorder(sys.argv[1], quiet=True) as recorder:
        recorder.watch({name: np.ones(4, np.float32) for name in names})
        for step in range(400):
            with recorder.step(step) as record:
                record.add_gradients({name: np.full(4, step, np.float32) for name in names})
                record.log(loss_sum=float(step), loss_token_count=1)
            recorder.flush()
            time.sleep(0.004)
            if step == 0:
                print("first step", flush=True)
"""


def test_a_reading_process_beside_a_writing_process(run: Path) -> None:
    """Two processes: each look sees whole steps, in order, with their own numbers, and never fewer."""
    command = [sys.executable, "-c", textwrap.dedent(WRITER), str(run)]
    seen = [0]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        while writer.poll() is None:
            seen.append(look_at_gradients(run))
    assert seen == sorted(seen)
    assert len(set(seen)) > 50  # it did look while rows were coming
    assert look_at_gradients(run) == 400


def look_at_gradients(run: Path) -> int:
    """Number of steps that a reader finds; asserts that their rows are whole."""
    stream = read_stream(run / "log" / "tensors-r0-s0.arrows", TENSORS, rank=0, segment=0)
    table = stream.rows.select(["step", "kind", "max", "tensor_id"])
    gradients = table.filter(pc.equal(table["kind"].cast(pa.string()), "gradient"))
    steps = gradients["step"].to_numpy()
    assert (steps == np.repeat(np.arange(len(steps) // 30), 30)).all()
    assert (gradients["max"].to_numpy() == steps).all()
    assert (gradients["tensor_id"].to_numpy().reshape(-1, 30) == np.arange(30)).all()
    return len(steps) // 30


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("learning_rate", "fast"),
        ("loss_sum", [1.0, 2.0]),
        ("loss_sum", np.ones(2)),
        ("epoch", 1.5),
        ("epoch", float("nan")),
        ("training_mode", 2),
    ],
)
def test_a_value_of_another_kind_is_told_where_it_is_logged(run: Path, column: str, value: Any) -> None:
    """The call that gave it fails; the rows around it, and of the same step, are there."""
    with Recorder(run, quiet=True) as recorder:
        for step in range(3):
            with recorder.step(step) as record:
                record.log(loss_sum=1.0, loss_token_count=1)
                if step == 1:
                    with pytest.raises(RecorderError, match=f"step 1: {column}=.*expected"):
                        record.log(**{column: value})
    assert [row["train_loss"] for row in rows(run, "steps")] == [1.0] * 3


def test_numbers_of_any_library_are_numbers(run: Path) -> None:
    """A NumPy scalar, an array of one element, an int where a float goes: nothing to complain about."""
    with Recorder(run, quiet=True) as recorder, recorder.step(0) as record:
        record.log(loss_sum=np.float32(1.5), loss_token_count=np.int32(3), learning_rate=1)
        record.log(objective=np.array(0.5), epoch=2.0, training_mode=np.True_, gradient_norm=None)
    (row,) = rows(run, "steps")
    assert (row["train_loss"], row["learning_rate"], row["objective"]) == (0.5, 1.0, 0.5)
    assert (row["epoch"], row["training_mode"], row["gradient_norm"]) == (2, True, None)


def test_a_row_that_its_column_can_not_hold_costs_itself_alone(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A hash below zero: one row is lost and counted, the flusher lives on, an event says so."""
    with Recorder(run, quiet=True) as recorder:
        for step in range(5):
            with recorder.step(step) as record:
                record.log(loss_sum=1.0, loss_token_count=1, batch_hash=-1 if step == 2 else step)
        recorder.flush()
        record_steps(recorder, range(5, 7))
    assert [row["step"] for row in rows(run, "steps")] == [0, 1, 3, 4, 5, 6]
    told = capsys.readouterr().err
    assert "rows are lost that their columns can not hold" in told
    assert "rows lost: 1 of steps" in told
    assert "warning" in [row["kind"] for row in rows(run, "events")]


def test_rows_of_short_steps_do_not_pile_up(run: Path) -> None:
    """The flusher is woken by a number of rows too, not by time alone."""
    columns = {"kind": "weight", "tensor_id": np.arange(100)}
    with Recorder(run, quiet=True) as recorder:
        stream_rows = segment.MOST_WAITING_ROWS + 100
        blocks = [Block("tensors", 100, {"step": step, **columns}) for step in range(stream_rows // 100 + 1)]
        recorder._segment.append(blocks)
        deadline = time.monotonic() + segment.FLUSH_SECONDS / 2  # before the oldest row is due
        stream = recorder._segment._streams["tensors"]
        while stream.waiting_row_count and time.monotonic() < deadline:
            time.sleep(0.005)
        assert stream.waiting_row_count == 0


def test_a_history_without_a_segment_is_given_up(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A step that goes back needs new files; without them training goes on and the old rows stay alone."""

    def refuse(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with Recorder(run, quiet=True) as recorder:
        record_steps(recorder, range(5))
        monkeypatch.setattr("recorder.recorder.Segment", refuse)
        record_steps(recorder, range(2, 8))
    assert [row["step"] for row in rows(run, "steps")] == [0, 1, 2, 3, 4]
    assert "everything from step 2 on, which went back failed" in capsys.readouterr().err
    assert [row["kind"] for row in rows(run, "events")] == ["segment_started", "warning", "finished"]


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
