"""What a disk that is full, gone or forbidden costs: rows, never the training, and it is told."""

import errno
import io
import os
import shutil
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from recorded_rows import record_steps, rows, run_program

from analyzer.run_log import open_runs
from recorder import Recorder, RecorderError, segment

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
                recorder._segment.write("steps")
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


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_a_full_disk_that_takes_stderr_with_it_does_not_end_the_training(run: Path) -> None:
    """Where a run's output lies beside its log, the line that tells can not be written either."""
    with Path("/dev/full").open("w") as full:
        result = run_program(FULL_DISK, run, "warn", stderr=full)
    assert (result.returncode, result.stdout) == (0, "trained to the end\n")
    assert "warning" in [event["kind"] for event in rows(run, "events")]


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
    return FileOnQuota(path, mode)


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
        recorder.flush()
        shutil.rmtree(run)
        deadline = time.monotonic() + 10
        while recorder._segment._streams["steps"].error is None and time.monotonic() < deadline:
            time.sleep(0.01)
        record_steps(recorder, range(1, 3))
    told = capsys.readouterr().err
    assert "steps-r0-s0.arrows: can not write: [Errno 2] No such file or directory; its rows are lost" in told
    assert "rows lost: 4 of events, 3 of steps\n" in told  # also what had been written before


def test_a_deleted_file_is_noticed_when_the_run_ends(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before any heartbeat, and where only one of the files is gone."""
    with Recorder(run, quiet=True) as recorder:
        record_steps(recorder, range(3))
        recorder.flush()
        (run / "log" / "steps-r0-s0.arrows").unlink()
        record_steps(recorder, range(3, 5))
    first, last = capsys.readouterr().err.splitlines()
    assert (
        "steps-r0-s0.arrows: can not write: [Errno 2] No such file or directory; its rows are lost" in first
    )
    assert last.endswith("rows lost: 5 of steps")
    assert [row["kind"] for row in rows(run, "events")] == ["segment_started", "finished", "warning"]


def test_a_directory_that_is_moved_is_not_a_deleted_one(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its open files go with it: nothing is lost, and the run goes on to look alive."""
    monkeypatch.setattr(segment, "HEARTBEAT_SECONDS", 0.0)
    moved = run.with_name("moved")
    with Recorder(run, quiet=True) as recorder:
        record_steps(recorder, range(1))
        run.rename(moved)
        events = moved / "log" / "events-r0-s0.arrows"
        os.utime(events, (0, 0))
        deadline = time.monotonic() + 10
        while events.stat().st_mtime == 0 and time.monotonic() < deadline:
            time.sleep(0.01)
        record_steps(recorder, range(1, 3))
    assert events.stat().st_mtime > 0 and capsys.readouterr().err == ""
    assert [row["step"] for row in rows(moved, "steps")] == [0, 1, 2]


def test_a_run_that_raises_while_closing_is_closed_all_the_same(run: Path) -> None:
    """Its last rows can not be written: the event that ends it is there, and the flusher is gone."""
    recorder = Recorder(run, on_error="raise", quiet=True)
    threads = recorder._segment._threads
    record_steps(recorder, range(2))
    recorder._segment._streams["steps"].error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with pytest.raises(RecorderError, match="No space left on device"):
        recorder.close()
    assert not any(thread.is_alive() for thread in threads)
    assert [row["kind"] for row in rows(run, "events")] == ["segment_started", "finished"]
    recorder.close()


def test_a_run_recorded_anew_in_its_place_costs_a_row_and_not_a_training(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Deleted and begun again by another process while the first still trains: both want the same file."""
    with Recorder(run, quiet=True):
        shutil.rmtree(run)
        with Recorder(run, quiet=True) as second:
            (run / "log" / "steps-r0-s0.arrows").write_bytes(b"")
            record_steps(second, range(2))
    told = capsys.readouterr().err
    assert "steps-r0-s0.arrows: can not write: [Errno 17] File exists" in told
    assert "rows lost: 2 of steps" in told


def test_rows_do_not_wait_for_a_disk_that_is_slow_to_sync(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They reach the operating system meanwhile, as a kill may come meanwhile."""
    begins, ends = threading.Event(), threading.Event()

    def slow_fsync(_: int) -> None:
        begins.set()
        ends.wait(10)

    monkeypatch.setattr(segment, "FLUSH_SECONDS", 0.05)
    with Recorder(run, quiet=True, fsync_seconds=0.01) as recorder:
        monkeypatch.setattr(os, "fsync", slow_fsync)  # the manifest is there
        assert begins.wait(10)
        record_steps(recorder, range(1))
        deadline = time.monotonic() + 5
        while not recorder._segment._streams["steps"].written_row_count and time.monotonic() < deadline:
            time.sleep(0.01)
        assert recorder._segment._streams["steps"].written_row_count == 1
        ends.set()


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


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_a_disk_that_fills_up_at_the_end_does_not_end_the_training(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last flush is made while closing: what it loses is told and counted as at any other time."""
    with Recorder(run, quiet=True) as recorder:
        record_steps(recorder, range(3))
        recorder.flush()
        fill_the_disk(run.resolve() / "log" / "steps-r0-s0.arrows")
        record_steps(recorder, range(3, 5))
    first, last = capsys.readouterr().err.splitlines()
    assert "No space left on device" in first and last.endswith("rows lost: 2 of steps")
    assert [row["kind"] for row in rows(run, "events")] == ["segment_started", "finished", "warning"]
