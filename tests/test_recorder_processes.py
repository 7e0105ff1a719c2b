"""Forks, ranks and readers beside one log: no file is shared, no row is torn."""

import json
import multiprocessing
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from recorded_rows import record_steps, rows, run_program

from analyzer.streams import read_stream
from recorder import Recorder
from recorder.schema import TENSORS


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
        assert [row["step"] for row in rows(run, "steps", rank=rank)] == list(range(5))
        assert json.loads(rows(run, "events", rank=rank)[0]["payload"])["world_size"] == 4
    assert (run / "manifest.json").exists()


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


def test_a_reader_beside_the_writer_never_sees_a_torn_row(run: Path) -> None:
    """Whole batches only, in order, while the writer flushes as fast as it can."""
    with Recorder(run, quiet=True) as recorder:
        seen = 0
        for step in range(1500):
            record_steps(recorder, range(step, step + 1))
            stream = recorder._segment._streams["steps"]
            recorder._segment.write("steps")
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
