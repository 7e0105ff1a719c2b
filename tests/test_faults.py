"""Every declared fault, in every severity: it changes the run, from its step on, and not the manifest."""

import dataclasses
from functools import partial
from pathlib import Path

import pytest
from fault_runs import TINY, MemoryRecorder, recorded, tiny_corpus

from experiments.batches import PackedExamples
from experiments.checkpoint import load_checkpoint, save_checkpoint
from experiments.cli import main
from experiments.corpus import Corpus
from experiments.experiment import Experiment, configure, run_manifest
from experiments.faults import FAULTS, SEVERITIES, Fault, code_path_of, fault_named
from experiments.faults.resumes import RESUME_FAULTS
from experiments.faults.settings import SETTING_FAULTS
from experiments.log_reader import current_rows
from experiments.training import HEALTHY, Resume, TrainingConfig, TrainingState, train, training_step
from recorder import Cadence, Manifest, Recorder

LATE_START = 5
RESUME_STEP = 6  # two batches into the second epoch
LOOP_FAULTS = [fault for fault in FAULTS if fault not in RESUME_FAULTS + SETTING_FAULTS]
by_severity = pytest.mark.parametrize("severity", SEVERITIES)
each = partial(pytest.mark.parametrize, "fault", ids=lambda fault: fault.name)


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return tiny_corpus()


@pytest.fixture(scope="module")
def healthy(corpus: Corpus) -> MemoryRecorder:
    return recorded(corpus)


@pytest.fixture(scope="module")
def resume(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Resume:
    """A healthy run's checkpoint after six steps."""
    run = TrainingState(TINY, corpus)
    examples = PackedExamples(corpus.split("train"))
    for _ in range(RESUME_STEP):
        training_step(run, examples, TINY.clip_norm, HEALTHY)
    directory = save_checkpoint(tmp_path_factory.mktemp("run"), RESUME_STEP, run, TINY.resumable_hash())
    template = TrainingState(TINY, corpus)
    return Resume(load_checkpoint(directory, template, TINY.resumable_hash()), TINY.learning_rate_plan())


def config_for(fault: Fault, severity: str) -> TrainingConfig:
    """The tiny configuration with what the fault asks for."""
    return dataclasses.replace(TINY, **fault.settings(fault.value(severity)))


def test_names_are_unique_and_the_diagnoses_known() -> None:
    """One name each; a fault that another one's diagnosis finds names that one."""
    names = [fault.name for fault in FAULTS]
    assert len(set(names)) == len(names)
    assert {fault.found_by() for fault in FAULTS} <= set(names)


@each(LOOP_FAULTS)
@by_severity
def test_a_fault_changes_the_log(
    fault: Fault, severity: str, corpus: Corpus, healthy: MemoryRecorder
) -> None:
    """From its first step on, some logged number or the weights differ from the healthy run's."""
    config = config_for(fault, severity)
    control = healthy if config == TINY else recorded(corpus, config=config)
    faulty = recorded(corpus, fault.active_path(severity, 0), config)
    assert faulty.everything() != control.everything()


@each([fault for fault in LOOP_FAULTS if not fault.starts_with_the_run])
def test_a_late_fault_changes_nothing_before_its_step(
    fault: Fault, corpus: Corpus, healthy: MemoryRecorder
) -> None:
    """Rows before the start are those of the healthy run; the run as a whole is not."""
    config = config_for(fault, "severe")
    control = healthy if config == TINY else recorded(corpus, config=config)
    faulty = recorded(corpus, fault.active_path("severe", LATE_START), config)
    assert faulty.before(LATE_START) == control.before(LATE_START)
    assert faulty.everything() != control.everything()


@each([fault for fault in FAULTS if fault.duration_steps is not None])
def test_a_short_fault_ends(fault: Fault) -> None:
    """After its duration the healthy code path runs again."""
    path = fault.active_path("medium", LATE_START)
    last = LATE_START + fault.duration_steps - 1
    assert path.at(LATE_START - 1) is path.at(last + 1) is HEALTHY
    assert path.at(LATE_START) is path.at(last) is path


@each(RESUME_FAULTS)
@by_severity
def test_a_resume_fault_changes_what_follows_the_resume(
    fault: Fault, severity: str, corpus: Corpus, healthy: MemoryRecorder, resume: Resume
) -> None:
    """A run that is never resumed is the healthy one; after a resume the rows are not a healthy resume's."""
    path = fault.active_path(severity)
    assert recorded(corpus, path).everything() == healthy.everything()
    rest = recorded(corpus, resume=resume)
    assert recorded(corpus, path, resume=resume).everything() != rest.everything()


def test_a_resume_does_not_put_the_fault_in_twice(corpus: Corpus, resume: Resume) -> None:
    """The checkpoint of the fault's first step holds the altered weights: they are not altered again."""
    path = code_path_of("attention_entropy_collapse", "severe", RESUME_STEP)
    assert recorded(corpus, path, resume=resume).everything() == recorded(corpus, resume=resume).everything()


@each(SETTING_FAULTS)
@by_severity
def test_a_fault_of_configuration_changes_declared_settings_only(fault: Fault, severity: str) -> None:
    """The loop is the healthy one; the settings can be trained with and show in the configuration."""
    experiment = Experiment("mine", "", "", fault=fault.name, severity=severity)
    config = configure(experiment, None, [])
    changes = fault.settings(fault.value(severity))
    assert config == dataclasses.replace(configure(Experiment("mine", "", ""), None, []), **changes)
    assert experiment.code_path() == HEALTHY


@each([fault for fault in FAULTS if fault not in SETTING_FAULTS])
def test_the_manifest_does_not_tell_the_fault(fault: Fault, corpus: Corpus) -> None:
    """It is that of a healthy run of the same configuration, but for the run's id."""
    manifests = []
    for name in (None, fault.name):
        experiment = Experiment("mine", "", "", fault=name, severity="severe")
        manifest = run_manifest(experiment, config_for(fault, "severe"), corpus)
        manifests.append(dataclasses.replace(manifest, run_id=""))
    assert manifests[0] == manifests[1]


@each(FAULTS)
def test_a_fault_is_recorded_to_the_end(fault: Fault, corpus: Corpus, tmp_path: Path) -> None:
    """20 steps with every signal at every step: all rows are there, and no warning of the recorder."""
    config = dataclasses.replace(config_for(fault, "severe"), total_steps=20)
    every_step = Cadence(**{f.name: 1 for f in dataclasses.fields(Cadence)})
    start = 0 if fault.starts_with_the_run else LATE_START
    with Recorder(tmp_path, Manifest("r"), cadence=every_step, quiet=True) as recorder:
        train(config, corpus, recorder, fault.active_path("severe", start))
    assert current_rows(tmp_path, "steps").column("step").to_pylist() == list(range(20))
    kinds = current_rows(tmp_path, "events").column("kind").to_pylist()
    assert kinds == ["segment_started", "finished"]


def test_the_command_line_runs_any_fault_without_a_folder(tmp_path: Path) -> None:
    """The experiment is the healthy one, the loop is not: the applied rate is twenty times the manifest's."""
    quick = ("total_steps=4", "warmup_steps=0", "evaluation_interval=4", "width=16")
    code = main(
        ["run", "19-healthy", "--fault", "learning_rate_too_high", "--severity", "mild"]
        + ["--fault-start", "2", "--out", str(tmp_path / "run")]
        + [word for setting in quick for word in ("--set", setting)]
    )
    assert code == 0
    plan = dataclasses.replace(TINY, total_steps=4, warmup_steps=0).learning_rate_plan()
    rates = current_rows(tmp_path / "run", "steps").column("learning_rate").to_pylist()
    factors = [rate / plan.learning_rate(step) for step, rate in enumerate(rates)]
    assert factors == pytest.approx([1, 1, 20, 20], rel=1e-15)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("19-healthy", "--fault", "gremlins"),
            "fault gremlins: no such fault; choose one of",
        ),
        (
            ("19-healthy", "--fault", "label_noise", "--fault-start", "9"),
            "label_noise: fault start 9; expected 0: this fault starts with the run",
        ),
        (
            ("19-healthy", "--fault", "frozen_layer", "--fault-start", "-1"),
            "frozen_layer: fault start -1; expected 0 or more",
        ),
        (("19-healthy", "--severity", "mild"), "--severity and --fault-start belong to a --fault"),
        (
            ("19-break-mask", "--fault", "frozen_layer"),
            "--fault frozen_layer: 19-break-mask has the fault causal_mask_absent already",
        ),
    ],
)
def test_a_fault_that_can_not_be_is_one_line_and_exit_code_2(
    arguments: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is written."""
    assert main(["run", *arguments, "--out", str(tmp_path / "run")]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"experiments: {message}")
    assert not (tmp_path / "run").exists()


def test_the_list_shows_every_fault_with_its_severities_and_evidence(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Four lines each, in the order of FAULTS."""
    assert main(["faults"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines[::4]] == [fault.name for fault in FAULTS]
    for fault, values, evidence in zip(FAULTS, lines[1::4], lines[2::4], strict=True):
        assert all(f"{severity} {fault.value(severity)!r}" in values for severity in SEVERITIES)
        assert evidence.endswith(fault.evidence)


def test_each_run_gets_parts_of_its_own() -> None:
    """A part that keeps state must not carry it from one run into the next."""
    first, second = (code_path_of("stale_evaluation_weights") for _ in range(2))
    assert first.evaluated_model is not second.evaluated_model
    assert code_path_of(None) is HEALTHY
    assert fault_named("bad_batch").active_path("mild").end_step == 121
