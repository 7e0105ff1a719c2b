"""Resuming a run: what continues, what is refused, and the proof that it is the same run."""

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from experiments.checkpoint import checkpoint_path, checkpoint_steps
from experiments.checkpoint_parts import STATE_FILE
from experiments.checkpoint_roundtrip import (
    differences,
    resume_in_new_process,
    resume_without,
    train_and_kill,
)
from experiments.cli import main
from experiments.experiment import configure, load_experiment, run_experiment
from experiments.log_reader import current_rows, last_logged_step
from experiments.resume import plan_resume, run_resume
from experiments.training import MACHINES

NAME = "19-healthy"
SETTINGS = (
    "total_steps=30",
    "warmup_steps=5",
    "evaluation_interval=10",
    "checkpoint_interval=10",
    "width=16",
    "layer_count=1",
)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of 30 steps with checkpoints 10, 20 and 30; an epoch has 13 steps."""
    out = tmp_path_factory.mktemp("runs") / "straight"
    experiment = load_experiment(NAME)
    run_experiment(experiment, configure(experiment, None, SETTINGS), out)
    return out


def resume(directory: Path, *settings: str) -> int:
    """Exit code of the command."""
    return main(["run", NAME, "--resume", "--out", str(directory), *(f"--set={s}" for s in settings)])


def test_a_killed_run_resumes_to_the_same_bytes(straight: Path, tmp_path: Path) -> None:
    """SIGKILL after 24 steps, resumed at 20 by a new process: checkpoint and log are those of one run."""
    experiment = load_experiment(NAME)
    killed = tmp_path / "killed"
    train_and_kill(experiment, configure(experiment, None, SETTINGS), killed, 24)
    facts = resume_in_new_process(NAME, killed)
    assert (facts["step"], facts["epoch"], facts["checkpoint"]) == (20, 1, "checkpoints/step-00000020")
    assert differences(straight, killed)[0] == []
    assert current_rows(killed, "steps").column("step").to_pylist() == list(range(30))


@pytest.mark.parametrize("machine", MACHINES)
def test_a_machine_that_is_left_out_makes_the_comparison_fail(
    straight: Path, tmp_path: Path, machine: str
) -> None:
    """The proof would notice a checkpoint that forgets one of the five."""
    resume_without(load_experiment(NAME), straight, tmp_path / "mutated", machine)
    assert differences(straight, tmp_path / "mutated")[0] != []


def test_first_row_after_a_resume_has_the_hashes_that_the_event_promises(
    straight: Path, tmp_path: Path
) -> None:
    """Row N carries the live state, the event "resumed" what the checkpoint stored."""
    directory = copy_without_checkpoints_after(straight, tmp_path, 10)
    run_resume(load_experiment(NAME), plan_resume(load_experiment(NAME), directory, None, []), directory)
    events = [row for row in current_rows(directory, "events").to_pylist() if row["kind"] == "resumed"]
    payload = json.loads(events[0]["payload"])
    steps = current_rows(directory, "steps")
    row = steps.filter(pc.equal(steps.column("step"), 10)).to_pylist()[0]
    for name in ("weights_hash", "optimizer_hash", "rng_hash"):
        assert str(row[name]) == payload[name]
    assert (row["epoch"], row["data_position"]) == (payload["epoch"], payload["data_position"]) == (0, 320)


def copy_without_checkpoints_after(straight: Path, tmp_path: Path, step: int) -> Path:
    """A copy of the run as if it had been stopped before its later checkpoints."""
    directory = tmp_path / "copy"
    shutil.copytree(straight, directory)
    for later in checkpoint_steps(directory):
        if later > step:
            shutil.rmtree(checkpoint_path(directory, later))
    return directory


def test_resuming_a_finished_run_does_nothing(straight: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit 0, one line, and not one file is added."""
    before = sorted(straight.rglob("*"))
    assert resume(straight) == 0
    assert capsys.readouterr().out == f"{straight}: has finished its 30 steps; nothing to resume\n"
    assert sorted(straight.rglob("*")) == before


def test_more_steps_keep_the_plan_that_the_run_was_begun_with(straight: Path, tmp_path: Path) -> None:
    """A longer run goes on at the plan's final rate, and says that this was planned."""
    directory = copy_without_checkpoints_after(straight, tmp_path, 30)
    assert resume(directory, "total_steps=33") == 0
    rows = current_rows(directory, "steps")
    assert last_logged_step(directory) == 32
    for name in ("learning_rate", "planned_learning_rate"):
        assert np.array_equal(rows.column(name).to_numpy()[30:], np.full(3, 3e-4))
    assert checkpoint_steps(directory)[-1] == 33


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("dropout=0.1", "dropout=0.1: the run in"),
        ("seed=4", "seed=4: the run in"),
        ("warmup_steps=3", "warmup_steps=3: the run in"),
    ],
)
def test_other_settings_are_refused(
    straight: Path, setting: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit 2 and what may be changed."""
    assert resume(straight, setting) == 2
    error = capsys.readouterr().err
    assert f"experiments: {message}" in error
    assert "a resume may change only total_steps, evaluation_interval, checkpoint_interval" in error


def test_another_experiment_is_refused(straight: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run continues under its own name."""
    assert main(["run", "19-break-mask", "--resume", "--out", str(straight)]) == 2
    assert "not a run of 19-break-mask" in capsys.readouterr().err


def test_a_directory_without_a_run_or_checkpoint_is_refused(
    straight: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line each, exit 1."""
    assert resume(tmp_path) == 1
    assert "not a run directory" in capsys.readouterr().err
    assert resume(copy_without_checkpoints_after(straight, tmp_path, 0)) == 1
    assert "no checkpoint to resume from" in capsys.readouterr().err


def test_a_damaged_newest_checkpoint_is_skipped_and_named(
    straight: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The one before it gives the same run."""
    directory = copy_without_checkpoints_after(straight, tmp_path, 20)
    (checkpoint_path(directory, 20) / STATE_FILE).write_text("{}")
    assert resume(directory) == 0
    errors = capsys.readouterr().err
    assert "experiments: skipped" in errors and "damaged" in errors
    assert "resumed at step 10 of 30" in errors
    assert differences(straight, directory)[0] == []


def test_rows_that_a_kill_has_lost_are_trained_again(straight: Path, tmp_path: Path) -> None:
    """A checkpoint ahead of the log is not chosen while an earlier one is there."""
    directory = copy_without_checkpoints_after(straight, tmp_path, 20)
    keep_first_steps(directory, 15)
    plan = plan_resume(load_experiment(NAME), directory, None, [])
    assert plan.resume is not None
    assert plan.resume.checkpoint.step == 10
    run_resume(load_experiment(NAME), plan, directory)
    assert current_rows(directory, "steps").column("step").to_pylist() == list(range(30))


def test_a_lone_checkpoint_ahead_of_the_log_is_taken_and_the_hole_is_named(
    straight: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Better a run with lost rows than none."""
    directory = copy_without_checkpoints_after(straight, tmp_path, 10)
    keep_first_steps(directory, 4)
    assert resume(directory) == 0
    assert "the log ends at step 3; rows up to step 9 are lost" in capsys.readouterr().err


def keep_first_steps(directory: Path, step_count: int) -> None:
    """Make the log's ``steps`` end early, as a kill would."""
    path = directory / "log" / "steps-r0-s0.arrows"
    rows = current_rows(directory, "steps").slice(0, step_count)
    with pa.ipc.new_stream(path, rows.schema) as writer:
        writer.write_table(rows)


def test_resume_changes_neither_manifest_nor_its_configuration(straight: Path, tmp_path: Path) -> None:
    """The manifest is written once; a resume reads its settings from it."""
    directory = copy_without_checkpoints_after(straight, tmp_path, 10)
    before = (directory / "manifest.json").read_bytes()
    assert resume(directory) == 0
    assert (directory / "manifest.json").read_bytes() == before
    plan = plan_resume(load_experiment(NAME), directory, None, ["total_steps=40"])
    assert dataclasses.asdict(plan.config) == json.loads(before)["config"] | {"total_steps": 40}
