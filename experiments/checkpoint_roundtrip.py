"""Proof that a killed and resumed run is the run that was never killed, bit for bit.

Run ``python -m experiments run 18-checkpoint-roundtrip``. Each killed run is a process of its own that
gets SIGKILL; it is resumed by another process. Then each state machine in turn is left out of the
restored state, and the same comparison must notice it.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from experiments.checkpoint import MANIFEST_FILE, checkpoint_path, checkpoint_steps
from experiments.checkpoint_parts import PARTS
from experiments.errors import ExperimentError
from experiments.experiment import Experiment, clear_run_directory, load_experiment, run_experiment
from experiments.log_reader import current_rows, last_logged_step
from experiments.resume import plan_resume, run_resume
from experiments.training import HEALTHY, MACHINES, TrainingConfig, TrainingState

KILLS = ((17, 5), (26, 13), (41, 20), (59, 1))
"""(finished steps when SIGKILL comes, checkpoint interval). An epoch has 13 steps: 13 is its very end."""
UNREPEATABLE_COLUMNS = ("wall_time", "step_seconds", "recorder_seconds", "gradient_cosine_previous")
"""Times; and a cosine with a gradient that the first step after a resume does not have."""
STATE_HASH_COLUMNS = ("weights_hash", "optimizer_hash", "rng_hash")
"""Logged at every tenth step, and once more at the first step of a segment."""
COMPARED_TABLES = ("steps", "evaluations", "example_losses")
PATIENCE_SECONDS = 60.0


def checkpoint_roundtrip(
    experiment: Experiment, config: TrainingConfig, out: Path | None, overwrite: bool
) -> int:
    """Print both tables; 0 when every resumed run is identical and every left-out machine is noticed."""
    with tempfile.TemporaryDirectory() as scratch:
        directory = out or Path(scratch)
        straight = directory / "straight"
        for kill_step, _ in KILLS:
            clear_run_directory(_killed(directory, kill_step), overwrite=overwrite)
        run_experiment(experiment, config, straight, overwrite=overwrite)
        identical = _show_killed_runs(experiment, config, straight, directory)
        noticed = _show_left_out_machines(experiment, straight, directory)
    return 0 if identical and noticed else 1


def _killed(directory: Path, kill_step: int) -> Path:
    """Directory of the run that is killed after ``kill_step`` steps."""
    return directory / f"killed-{kill_step}"


def _show_killed_runs(
    experiment: Experiment, config: TrainingConfig, straight: Path, directory: Path
) -> bool:
    print(f"seed {config.seed}, dropout {config.dropout:g}, {config.total_steps} steps")
    print("killed after  resumed at  epoch  data position  rows compared  different")
    all_identical = True
    for kill_step, interval in KILLS:
        killed = _killed(directory, kill_step)
        train_and_kill(
            experiment, dataclasses.replace(config, checkpoint_interval=interval), killed, kill_step
        )
        facts = resume_in_new_process(experiment.name, killed)
        found, row_count = differences(straight, killed)
        all_identical &= not found
        print(
            f"{kill_step:12}{facts['step']:12}{facts['epoch']:7}{facts['data_position']:15}{row_count:15}  "
            f"{', '.join(found) or 'nothing'}"
        )
    return all_identical


def _show_left_out_machines(experiment: Experiment, straight: Path, directory: Path) -> bool:
    print("\nleft out    differences  the first of them")
    all_noticed = True
    for machine in MACHINES:
        mutated = directory / f"without-{machine}"
        resume_without(experiment, straight, mutated, machine)
        found, _ = differences(straight, mutated)
        all_noticed &= bool(found)
        print(f"{machine:10}{len(found):13}  {', '.join(found[:3]) or 'NOT NOTICED'}")
    return all_noticed


def train_and_kill(experiment: Experiment, config: TrainingConfig, out: Path, kill_step: int) -> None:
    """Train in another process, and send it SIGKILL after ``kill_step`` steps, when the log has them all."""
    arguments = [experiment.name, json.dumps(dataclasses.asdict(config)), str(out), str(kill_step)]
    command = [sys.executable, "-m", "experiments.checkpoint_roundtrip", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while last_logged_step(out) < kill_step - 1:
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            raise ExperimentError(
                f"{out}: training ended before step {kill_step}: {process.communicate()[1]}"
            )
        time.sleep(0.05)
    process.kill()
    process.communicate()


def resume_in_new_process(name: str, out: Path) -> dict[str, int]:
    """Train to the end with ``--resume``; what the log says about the state that it continued."""
    command = [sys.executable, "-m", "experiments", "run", name, "--resume", "--out", str(out)]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    if process.returncode != 0:
        raise ExperimentError(f"{out}: can not be resumed: {process.stderr.strip()}")
    events = current_rows(out, "events").to_pylist()
    payload: dict[str, int] = json.loads([e["payload"] for e in events if e["kind"] == "resumed"][-1])
    return payload


def resume_without(experiment: Experiment, straight: Path, out: Path, machine: str) -> None:
    """Resume a copy of a finished run at its first checkpoint, with one state machine left as it starts."""
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(straight, out)
    for step in checkpoint_steps(out)[1:]:
        shutil.rmtree(checkpoint_path(out, step))
    plan = plan_resume(experiment, out, None, [])

    def restore(run: TrainingState, state: dict[str, Any]) -> None:
        run.load_state(state, tuple(name for name in MACHINES if name != machine))

    run_resume(experiment, plan, out, dataclasses.replace(HEALTHY, restore=restore))


def differences(straight: Path, other: Path) -> tuple[list[str], int]:
    """Checkpoint parts and log columns that are not the same bytes, and the number of rows compared."""
    found = _different_parts(straight, other)
    row_count = 0
    for table in COMPARED_TABLES:
        one, two = (_rows(directory, table) for directory in (straight, other))
        row_count += one.num_rows
        if one.num_rows != two.num_rows:
            found.append(f"{table}: {one.num_rows} rows against {two.num_rows}")
            continue
        found += [f"{table}.{name}" for name in one.column_names if not _same(one, two, name)]
    return found, row_count


def _different_parts(straight: Path, other: Path) -> list[str]:
    """Parts of the last checkpoint whose hashes differ."""
    step = checkpoint_steps(straight)[-1]
    manifests = [
        json.loads((checkpoint_path(directory, step) / MANIFEST_FILE).read_text(encoding="utf-8"))
        for directory in (straight, other)
    ]
    return [name for name in PARTS if manifests[0]["parts"][name] != manifests[1]["parts"][name]]


def _rows(directory: Path, table: str) -> pa.Table:
    """Current rows, in the order of steps in which they were written."""
    unrepeatable = UNREPEATABLE_COLUMNS if table == "steps" else ()
    return current_rows(directory, table).drop_columns(list(unrepeatable))


def _same(one: pa.Table, two: pa.Table, name: str) -> bool:
    """The column has the same bytes; a state hash is compared where both runs logged it."""
    left, right = (_bits(table.column(name)) for table in (one, two))
    if name in STATE_HASH_COLUMNS:
        return all(a == b for a, b in zip(left, right, strict=True) if None not in (a, b))
    return left == right


def _bits(column: pa.ChunkedArray) -> list[object]:
    """Values that compare as their bytes do: NaN equals itself, -0.0 differs from 0.0."""
    if pa.types.is_floating(column.type):
        return [None if value is None else np.float64(value).tobytes() for value in column.to_pylist()]
    return list(column.to_pylist())


def _train_until_killed(arguments: Sequence[str]) -> None:
    """What the child process does: train, then wait for its end after ``kill_step`` steps."""
    name, config, out, kill_step = arguments

    def wait_at_kill_step(step: int, loss: float, learning_rate: float) -> None:
        if step == int(kill_step):
            time.sleep(PATIENCE_SECONDS)

    run_experiment(
        load_experiment(name), TrainingConfig(**json.loads(config)), Path(out), progress=wait_at_kill_step
    )


if __name__ == "__main__":
    _train_until_killed(sys.argv[1:])
