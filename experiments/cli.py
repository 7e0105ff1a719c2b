"""Command line of the experiments: run one, list them, show the whole path, pin the data."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments import break_it
from experiments.checkpoint_roundtrip import checkpoint_roundtrip
from experiments.corpus import DIRECTIONS, load_corpus
from experiments.errors import ExperimentError, UsageError
from experiments.evaluation import mean_loss
from experiments.experiment import (
    EXPERIMENTS_DIRECTORY,
    Experiment,
    configure,
    experiment_names,
    load_experiment,
    run_experiment,
)
from experiments.faults import FAULTS, SEVERITIES, fault_named
from experiments.faults.resumes import RESUME_FAULTS
from experiments.fp16_drift import fp16_drift
from experiments.resume import plan_resume, recorded_config, run_resume
from experiments.train_mini import train_mini
from experiments.training import TrainingConfig
from recorder import EvaluationLosses, RecorderError
from recorder.manifest import read_manifest

DEMO_EXPERIMENTS = ("19-healthy", "19-break-mask")
EXIT_ERROR, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0 fine, 1 error, 2 usage, 130 interrupted."""
    parsed = _parser().parse_args(arguments)
    try:
        code = int(parsed.command(parsed) or 0)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # ``| head`` has seen enough; Python would flush once more at exit, and complain
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ExperimentError, RecorderError) as error:
        print(f"experiments: {error}", file=sys.stderr)
        return EXIT_USAGE if isinstance(error, UsageError) else EXIT_ERROR
    except KeyboardInterrupt:
        print(
            "experiments: interrupted; the log up to here is kept and can be rendered; --resume continues",
            file=sys.stderr,
        )
        return EXIT_INTERRUPTED


PROGRAMS = {
    "checkpoint_roundtrip": checkpoint_roundtrip,
    "train_mini": train_mini,
    "fp16_drift": fp16_drift,
    "break_it": break_it.break_it,
}
"""What runs more than one training: (experiment, config, --out, --overwrite) -> exit code."""


def run(parsed: argparse.Namespace) -> int:
    """Train one experiment with the recorder on, or run its program."""
    experiment = with_fault(load_experiment(parsed.name), parsed.fault, parsed.severity, parsed.fault_start)
    if parsed.fault is not None:
        _refuse_without_effect(experiment, configure(experiment, parsed.seed, parsed.set), parsed.resume)
    if experiment.program is not None and not parsed.resume:
        config = configure(experiment, parsed.seed, parsed.set)
        return PROGRAMS[experiment.program](experiment, config, parsed.out, parsed.overwrite)
    if parsed.resume:
        _resume_and_report(experiment, parsed.out, parsed.seed, parsed.set)
    else:
        _run_and_report(experiment, parsed.out, parsed.seed, parsed.set, overwrite=parsed.overwrite)
    return 0


def with_fault(
    experiment: Experiment, fault: str | None, severity: str | None, first_step: int | None
) -> Experiment:
    """The experiment with a fault that the command line asks for. UsageError when it has one already."""
    if fault is None:
        if severity is not None or first_step is not None:
            raise UsageError("--severity and --fault-start belong to a --fault")
        return experiment
    if experiment.fault is not None:
        raise UsageError(f"--fault {fault}: {experiment.name} has the fault {experiment.fault} already")
    changed = dataclasses.replace(
        experiment, fault=fault, severity=severity or experiment.severity, fault_start=first_step
    )
    start = changed.code_path().first_step  # raises when name, severity and start do not fit
    title = f"{fault_named(fault).title}, {changed.severity}, from step {start}"
    return dataclasses.replace(changed, title=title)  # it is no healthy run any more


def _refuse_without_effect(experiment: Experiment, config: TrainingConfig, is_resume: bool) -> None:
    """UsageError when the fault could not act: nobody should look for one that is not there."""
    fault = fault_named(str(experiment.fault))
    if fault in RESUME_FAULTS and not is_resume:
        raise UsageError(
            f"--fault {fault.name}: acts on a resume: train with checkpoints first, then add it to --resume"
        )
    start = experiment.code_path().first_step
    if start >= config.total_steps:
        raise UsageError(
            f"--fault {fault.name}: starts at step {start}, the run ends at {config.total_steps}: "
            "give an earlier --fault-start"
        )


def list_faults(_: argparse.Namespace) -> None:
    """Print every deliberate fault with its three severities and the evidence that it must leave."""
    for fault in FAULTS:
        print(f"{fault.name}: {fault.title.lower()} (catalogue {fault.number}, from step {fault.first_step})")
        values = ", ".join(f"{severity} {fault.value(severity)!r}" for severity in SEVERITIES)
        print(f"    {fault.parameter}: {values}")
        print(f"    leaves: {fault.evidence}")
        print(f"    diagnosis: {fault.found_by()}")


def list_experiments(_: argparse.Namespace) -> None:
    """Print every experiment with its purpose."""
    for name in experiment_names():
        print(f"{name:30}{load_experiment(name).purpose}")


def demo(parsed: argparse.Namespace) -> int:
    """Train the healthy and the broken run, render both, print paths and verdicts."""
    directories = [parsed.out / name for name in DEMO_EXPERIMENTS]
    for name, directory in zip(DEMO_EXPERIMENTS, directories, strict=True):
        overwrite = parsed.overwrite or _holds_the_same_run(directory, name, parsed.set)
        _run_and_report(load_experiment(name), directory, None, parsed.set, overwrite=overwrite)
    print(f"why     {_analyzer()} diagnose {directories[-1]}", flush=True)
    code = subprocess.run([_analyzer(), "render", *map(str, directories)], check=False).returncode
    if code != 0:
        raise ExperimentError(f"analyzer render: exit code {code}; its message is above")
    return 0


def _holds_the_same_run(directory: Path, name: str, settings: Sequence[str]) -> bool:
    """An earlier demo with the same settings: training again gives the same weights, so nothing is lost."""
    try:
        manifest = read_manifest(directory)
        config = recorded_config(manifest)
    except (RecorderError, ExperimentError):
        return False
    declared = configure(load_experiment(name), None, settings)
    return manifest.run_id.startswith(f"{name}-seed") and config == declared


def seal(parsed: argparse.Namespace) -> None:
    """Draw a new hidden order of the faults; earlier runs and diagnoses lose their meaning."""
    print(break_it.seal(_blind_folder(parsed.name)))


def reveal(parsed: argparse.Namespace) -> None:
    """Say which fault was in which run, once diagnoses.md is written."""
    print("\n".join(break_it.reveal(_blind_folder(parsed.name))))


def score(parsed: argparse.Namespace) -> None:
    """Compare diagnoses.md with the seal and write diagnosis-score.md."""
    folder = _blind_folder(parsed.name)
    scores = break_it.score(folder)
    print(f"{sum(s.is_right for s in scores)} of {len(scores)} right: {folder / break_it.SCORE_FILE}")


def _blind_folder(name: str) -> Path:
    if load_experiment(name).program != "break_it":
        raise UsageError(f"{name}: has no hidden faults; name a blind experiment, such as 19-break-it")
    return EXPERIMENTS_DIRECTORY / name


def corpus(parsed: argparse.Namespace) -> None:
    """Print the data manifest: counts, vocabulary and hash; experiments/data/manifest.json pins it."""
    print(json.dumps(load_corpus(parsed.direction).manifest(), indent=2, ensure_ascii=False))


def _run_and_report(
    experiment: Experiment, out: Path | None, seed: int | None, settings: Sequence[str], *, overwrite: bool
) -> None:
    config = configure(experiment, seed, settings)
    directory = out or Path("runs") / experiment.name
    print(
        f"{experiment.name}: {experiment.title.lower()}, {config.total_steps} steps, seed {config.seed}",
        file=sys.stderr,
    )
    losses = run_experiment(experiment, config, directory, overwrite=overwrite)
    _report(directory, losses)


def _resume_and_report(
    experiment: Experiment, out: Path | None, seed: int | None, settings: Sequence[str]
) -> None:
    directory = out or Path("runs") / experiment.name
    plan = plan_resume(experiment, directory, seed, settings)
    if plan.resume is None:
        print(f"{directory}: has finished its {plan.config.total_steps} steps; nothing to resume")
        return
    print(
        f"{experiment.name}: resumed at step {plan.resume.checkpoint.step} of {plan.config.total_steps}",
        file=sys.stderr,
    )
    _report(directory, run_resume(experiment, plan, directory))


def _report(directory: Path, losses: dict[str, EvaluationLosses]) -> None:
    print(f"log     {directory}")
    print(f"loss    {_loss_line(losses)}")
    print(f"render  {_analyzer()} render {directory}", flush=True)


def _loss_line(losses: dict[str, EvaluationLosses]) -> str:
    parts = [f"{split} {mean_loss(split_losses):.3f}" for split, split_losses in losses.items()]
    return ", ".join(parts) + " nats/token"


def _analyzer() -> str:
    """The analyzer's command next to this interpreter, as short as it can be typed from here."""
    path = Path(sys.executable).parent / "analyzer"
    if not path.exists():
        return "analyzer"
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="experiments", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="command")

    run_parser = commands.add_parser("run", help=run.__doc__)
    run_parser.add_argument("name", help="a name that `list` prints")
    run_parser.add_argument("--seed", type=int, help="training seed: weights, order, dropout (default 0)")
    run_parser.add_argument("--out", type=Path, help="run directory (default runs/NAME)")
    run_parser.add_argument(
        "--resume", action="store_true", help="continue at the newest checkpoint, with the run's own settings"
    )
    run_parser.add_argument("--fault", metavar="NAME", help="put in a deliberate fault that `faults` prints")
    run_parser.add_argument("--severity", choices=SEVERITIES, help="of the fault (default medium)")
    run_parser.add_argument(
        "--fault-start", type=int, metavar="STEP", help="first step of the fault (default: its own)"
    )
    _add_options(run_parser)
    run_parser.set_defaults(command=run)

    commands.add_parser("list", help=list_experiments.__doc__).set_defaults(command=list_experiments)
    commands.add_parser("faults", help=list_faults.__doc__).set_defaults(command=list_faults)

    demo_parser = commands.add_parser("demo", help=demo.__doc__)
    demo_parser.add_argument(
        "--out", type=Path, default=Path("runs"), help="where both runs go (default runs)"
    )
    _add_options(demo_parser)
    demo_parser.set_defaults(command=demo)

    for blind_command in (seal, reveal, score):
        blind_parser = commands.add_parser(blind_command.__name__, help=blind_command.__doc__)
        blind_parser.add_argument("name", help="a blind experiment, such as 19-break-it")
        blind_parser.set_defaults(command=blind_command)

    corpus_parser = commands.add_parser("corpus", help=corpus.__doc__)
    corpus_parser.add_argument("--direction", choices=DIRECTIONS, default=DIRECTIONS[0])
    corpus_parser.set_defaults(command=corpus)
    return parser


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--overwrite", action="store_true", help="delete a run that is there already")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override a training setting, for example total_steps=500; may be given again",
    )
