"""The command line of the experiments, as real processes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from experiments.cli import PROGRAMS, main
from experiments.experiment import (
    EXPERIMENTS_DIRECTORY,
    configure,
    experiment_names,
    load_experiment,
)
from experiments.faults import FAULTS
from experiments.log_reader import current_rows
from experiments.resume import recorded_config
from recorder.manifest import read_manifest

ROOT = EXPERIMENTS_DIRECTORY.parent
QUICK = ("--set", "total_steps=4", "--set", "evaluation_interval=2", "--set", "width=16")


def experiments(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The finished process of ``python -m experiments``."""
    command = [sys.executable, "-m", "experiments", *arguments]
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "2"}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.fixture(scope="module")
def quick_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A run of four steps and what it printed."""
    out = tmp_path_factory.mktemp("runs") / "broken"
    return out, experiments("run", "19-break-mask", "--seed", "3", "--out", str(out), *QUICK)


def test_run_says_where_the_log_is_and_how_to_render_it(quick_run) -> None:
    """Three lines on stdout: log, losses per split, render command."""
    out, process = quick_run
    assert process.returncode == 0, process.stderr
    log, loss, render = process.stdout.splitlines()
    assert log.endswith(str(out))
    assert all(f"{split} " in loss for split in ("train", "validation", "held_out_verbs"))
    assert render.endswith(f"analyzer render {out}")


def test_run_is_quiet_when_stderr_is_no_terminal(quick_run) -> None:
    """A line that says what is trained, whole lines from the recorder, no bar that is redrawn."""
    _, process = quick_run
    first, *others = process.stderr.splitlines()
    assert first == "19-break-mask: broken causal mask, 4 steps, seed 3"
    assert all(line.startswith("recorder: ") for line in others)
    assert "\r" not in process.stderr


def test_a_run_with_a_fault_is_not_called_healthy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Who asked for the fault reads of it; the log does not say."""
    fault = ("--fault", "gradients_not_zeroed", "--severity", "severe", "--fault-start", "2")
    assert main(["run", "19-healthy", "--out", str(tmp_path / "run"), *QUICK, *fault]) == 0
    first = capsys.readouterr().err.splitlines()[0]
    assert first == "19-healthy: gradients not zeroed, severe, from step 2, 4 steps, seed 0"


def test_manifest_declares_the_intended_run_and_hides_the_fault(quick_run) -> None:
    """Settings, seed, causal mask, schedule, references; no word about the all-ones mask."""
    out, _ = quick_run
    manifest = read_manifest(out)
    assert manifest.run_id.startswith("19-break-mask-seed3-")
    assert manifest.config["total_steps"] == 4
    assert manifest.mask_type == "causal"
    assert manifest.planned_schedule["total_steps"] == 4
    assert manifest.primary_split == "validation"
    assert set(manifest.reference_losses.entropy_floor) == {"train", "validation", "held_out_verbs"}
    assert "fault" not in json.dumps(manifest.config)


def test_blas_threads_are_pinned_and_recorded(quick_run) -> None:
    """One thread, although the caller's environment asked for two."""
    out, _ = quick_run
    assert set(read_manifest(out).environment["threads"].values()) == {"1"}


def test_second_run_into_the_same_directory_is_refused(quick_run) -> None:
    """One line, exit 1, and the choice to overwrite."""
    out, _ = quick_run
    process = experiments("run", "19-healthy", "--out", str(out), *QUICK)
    assert process.returncode == 1
    assert process.stderr.splitlines()[-1] == (
        f"experiments: {out}: already holds a run; choose another --out, or --overwrite to replace it"
    )


def test_overwrite_replaces_the_run_and_nothing_else(tmp_path: Path) -> None:
    """A user's own file in the directory stays."""
    (tmp_path / "notes.txt").write_text("mine")
    first = experiments("run", "19-healthy", "--out", str(tmp_path), *QUICK)
    first_id = read_manifest(tmp_path).run_id
    second = experiments("run", "19-healthy", "--out", str(tmp_path), "--overwrite", *QUICK)
    assert (first.returncode, second.returncode) == (0, 0)
    assert read_manifest(tmp_path).run_id != first_id
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert {path.name.rsplit("-", 1)[1] for path in (tmp_path / "log").iterdir()} == {"s0.arrows"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("run", "20-nothing"), "20-nothing: no such experiment; choose one of 18-checkpoint-roundtrip"),
        (
            ("run", "19-healthy", "--set", "speed=9"),
            "--set speed=9: unknown setting 'speed'; choose one of seed",
        ),
        (("run", "19-healthy", "--set", "dropout"), "--set dropout: expected key=value"),
        (
            ("run", "19-healthy", "--set", "total_steps=many"),
            "--set total_steps=many: total_steps takes a whole number, not 'many'",
        ),
        (("run", "19-healthy", "--set", "total_steps=0"), "total_steps=0: expected at least 1"),
        (("run", "19-healthy", "--set", "dropout=1"), "dropout=1.0: expected at least 0 and below 1"),
        (("run", "19-healthy", "--set", "width=30"), "width=30: expected a multiple of head_count"),
        (("run", "19-healthy", "--set", "direction=up"), "direction=up: expected one of english_to_spanish"),
        (
            ("run", "19-healthy", "--set", "batch_size=500"),
            "batch_size=500: expected at most the 432 training examples",
        ),
        (("run", "19-healthy", "--seed", "-1"), "seed=-1: expected 0 or more"),
        (
            ("run", "19-healthy", "--set", "norm_placement=mid"),
            "norm_placement=mid: expected one of pre, post",
        ),
        (("run", "19-healthy", "--set", "activation=tanh"), "activation=tanh: expected one of relu, gelu"),
        (("run", "19-healthy", "--set", "schedule=step"), "schedule=step: expected one of cosine, constant"),
        (
            ("run", "19-healthy", "--set", "frozen_modules=blocks.0,blocks.7"),
            "frozen_modules=blocks.0,blocks.7: no weight is in 'blocks.7'; expected the start of one of em",
        ),
        (
            ("run", "19-healthy", "--set", "frozen_modules=embedding,blocks,final_norm"),
            "frozen_modules=embedding,blocks,final_norm: expected some weights that are not frozen",
        ),
        (("run", "19-healthy", "--set", "clip_norm=nan"), "clip_norm=nan: expected above 0"),
        (
            ("run", "18-fp16-drift", "--set", "activation=gelu"),
            "norm_placement=pre, activation=gelu: 18-fp16-drift rounds the forward pass of pre and relu only",
        ),
    ],
)
def test_wrong_usage_gives_one_line_and_exit_code_2(
    arguments: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was given, what was expected; no traceback, and nothing is written."""
    code = main([*arguments, "--out", str(tmp_path / "run")])
    assert code == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"experiments: {message}")
    assert not (tmp_path / "run").exists()


def test_process_ends_with_the_exit_code_of_its_command() -> None:
    """Usage errors reach the shell as 2, without a traceback."""
    process = experiments("run", "20-nothing")
    assert process.returncode == 2
    assert len(process.stderr.splitlines()) == 1


def test_unwritable_output_gives_one_line_and_exit_code_1(tmp_path: Path) -> None:
    """A file in the way is named."""
    (tmp_path / "file").write_text("")
    process = experiments("run", "19-healthy", "--out", str(tmp_path / "file" / "run"), *QUICK)
    assert process.returncode == 1
    assert str(tmp_path / "file" / "run") in process.stderr.splitlines()[-1]
    assert "Traceback" not in process.stderr


def test_interrupt_ends_with_one_line_and_exit_code_130(tmp_path: Path) -> None:
    """Ctrl-C closes the log: its last event says how the run ended."""
    command = [sys.executable, "-m", "experiments", "run", "19-healthy", "--out", str(tmp_path / "run")]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    steps = tmp_path / "run" / "log" / "steps-r0-s0.arrows"
    while process.poll() is None and not (steps.exists() and steps.stat().st_size > 0):
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert errors.splitlines()[-1].startswith("experiments: interrupted; the log up to here is kept")
    assert "Traceback" not in errors


def test_demo_trains_renders_and_names_the_verdict_of_each(tmp_path: Path) -> None:
    """Both dashboards exist, the verdicts are "clear" and "Broken causal mask"; it can be run again."""
    for _ in range(2):
        process = experiments("demo", "--out", str(tmp_path), *QUICK)
        assert process.returncode == 0, process.stderr
        for name, verdict in (("19-healthy", "clear"), ("19-break-mask", "Broken causal mask")):
            dashboard = tmp_path / name / "dashboard.html"
            assert dashboard.exists()
            assert f"{dashboard}: {verdict}" in process.stdout


def test_demo_does_not_delete_a_run_with_other_settings(tmp_path: Path) -> None:
    """Only a run that training would reproduce is replaced unasked."""
    experiments("run", "19-healthy", "--seed", "5", "--out", str(tmp_path / "19-healthy"), *QUICK)
    process = experiments("demo", "--out", str(tmp_path), *QUICK)
    assert process.returncode == 1
    assert "already holds a run" in process.stderr
    assert read_manifest(tmp_path / "19-healthy").seed == 5


def test_list_prints_every_experiment_with_its_purpose() -> None:
    """One line each."""
    process = experiments("list")
    assert process.returncode == 0
    assert [line.split()[0] for line in process.stdout.splitlines()] == list(experiment_names())


def test_corpus_prints_the_pinned_manifest() -> None:
    """What a person commits after correcting a form."""
    pinned = (EXPERIMENTS_DIRECTORY / "data" / "manifest.json").read_text(encoding="utf-8")
    assert experiments("corpus").stdout == pinned


def test_every_folder_loads_and_names_a_known_fault_and_program() -> None:
    """Folder, config, FAULTS and PROGRAMS agree."""
    loaded = [load_experiment(name) for name in experiment_names()]
    assert {e.fault for e in loaded} <= {None, *(fault.name for fault in FAULTS)}
    assert {e.program for e in loaded} <= {None, *PROGRAMS}
    assert all(configure(e, None, []).total_steps >= 1 for e in loaded)


def test_infinite_clip_norm_comes_back_from_a_manifest_of_strict_json(tmp_path: Path) -> None:
    """JSON has no infinity, so the manifest says "inf"; the run can be resumed with more steps."""
    arguments = ("run", "19-healthy", "--out", str(tmp_path), *QUICK, "--set", "clip_norm=inf")
    assert main(list(arguments)) == 0

    def refuse(token: str) -> None:
        raise AssertionError(token)

    document = json.loads((tmp_path / "manifest.json").read_text(), parse_constant=refuse)
    assert document["config"]["clip_norm"] == "inf"
    config = recorded_config(read_manifest(tmp_path))
    assert config == configure(load_experiment("19-healthy"), None, [*QUICK[1::2], "clip_norm=inf"])
    assert main(["run", "19-healthy", "--resume", "--out", str(tmp_path), "--set", "total_steps=5"]) == 0


def test_manifest_declares_a_constant_schedule_and_a_freeze(tmp_path: Path) -> None:
    """The plan's kind and final rate; the log says of each weight whether it is trained."""
    settings = ("--set", "schedule=constant", "--set", "frozen_modules=blocks.0")
    assert main(["run", "19-healthy", "--out", str(tmp_path), *QUICK, *settings]) == 0
    manifest = read_manifest(tmp_path)
    plan = manifest.planned_schedule
    assert plan["kind"] == "linear warmup, constant"
    assert plan["final"] == plan["peak"] == manifest.config["peak_learning_rate"]
    trainable = {row["name"]: row["trainable"] for row in current_rows(tmp_path, "tensor_names").to_pylist()}
    frozen = {name for name, flag in trainable.items() if flag is False}
    assert {name.rpartition(".")[0] for name in frozen} == {
        f"blocks.0.{part}" for part in ("norm1", "attention", "norm2", "mlp.up", "mlp.down")
    }
    assert trainable["blocks.1.norm1.gain"] is True


def test_settings_override_the_experiment_and_the_seed_comes_last() -> None:
    """--set wins over config.toml; values take the type of the setting."""
    config = configure(load_experiment("19-healthy"), 7, ["total_steps=10", "dropout=0", "seed=1"])
    assert (config.total_steps, config.dropout, config.seed) == (10, 0.0, 7)


WITHOUT_EFFECT = [
    (("--fault", "optimizer_state_lost"), "acts on a resume"),
    (("--fault", "dead_units", "--fault-start", "4"), "starts at step 4, the run ends at 4"),
    (("--fault", "bad_batch"), "starts at step 120, the run ends at 4"),
]


@pytest.mark.parametrize(("fault", "message"), WITHOUT_EFFECT, ids=[m[1] for m in WITHOUT_EFFECT])
def test_a_fault_that_could_not_act_is_refused(
    fault: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody should look for a fault that is not there."""
    assert main(["run", "19-healthy", *fault, "--out", str(tmp_path / "run"), *QUICK]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_closed_pipe_is_no_error() -> None:
    """`| head -1` has seen enough."""
    command = f"{sys.executable} -m experiments faults | head -1; exit ${{PIPESTATUS[0]}}"
    completed = subprocess.run(
        ["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert (completed.returncode, completed.stderr) == (0, "")
