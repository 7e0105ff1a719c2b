"""Command line of the experiments: run one, list them, show the whole path, pin the data."""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments.corpus import DIRECTIONS, load_corpus
from experiments.errors import ExperimentError, UsageError
from experiments.evaluation import mean_loss
from experiments.experiment import configure, experiment_names, load_experiment, run_experiment
from recorder import EvaluationLosses, RecorderError
from recorder.manifest import read_manifest

DEMO_EXPERIMENTS = ("19-healthy", "19-break-mask")
EXIT_ERROR, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130
FINDINGS = 3  # the analyzer's exit code when it found something: no failure of the demo


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0 fine, 1 error, 2 usage, 130 interrupted."""
    parsed = _parser().parse_args(arguments)
    try:
        return int(parsed.command(parsed) or 0)
    except (ExperimentError, RecorderError) as error:
        print(f"experiments: {error}", file=sys.stderr)
        return EXIT_USAGE if isinstance(error, UsageError) else EXIT_ERROR
    except KeyboardInterrupt:
        print("experiments: interrupted; the log up to here is kept and can be rendered", file=sys.stderr)
        return EXIT_INTERRUPTED


def run(parsed: argparse.Namespace) -> None:
    """Train one experiment with the recorder on."""
    _run_and_report(parsed.name, parsed.out, parsed.seed, parsed.set, overwrite=parsed.overwrite)


def list_experiments(_: argparse.Namespace) -> None:
    """Print every experiment with its purpose."""
    for name in experiment_names():
        print(f"{name:30}{load_experiment(name).purpose}")


def demo(parsed: argparse.Namespace) -> int:
    """Train the healthy and the broken run, render both, print paths and verdicts."""
    directories = [parsed.out / name for name in DEMO_EXPERIMENTS]
    for name, directory in zip(DEMO_EXPERIMENTS, directories, strict=True):
        overwrite = parsed.overwrite or _holds_the_same_run(directory, name, parsed.set)
        _run_and_report(name, directory, None, parsed.set, overwrite=overwrite)
    for directory in directories:
        for command in ("render", "diagnose"):
            code = subprocess.run([_analyzer(), command, str(directory)], check=False).returncode
            if code not in (0, FINDINGS):
                raise ExperimentError(
                    f"analyzer {command} {directory}: exit code {code}; its message is above"
                )
    return 0


def _holds_the_same_run(directory: Path, name: str, settings: Sequence[str]) -> bool:
    """An earlier demo with the same settings: training again gives the same weights, so nothing is lost."""
    config = dataclasses.asdict(configure(load_experiment(name), None, settings))
    try:
        manifest = read_manifest(directory)
    except RecorderError:
        return False
    return manifest.run_id.startswith(f"{name}-seed") and manifest.config == config


def corpus(parsed: argparse.Namespace) -> None:
    """Print the data manifest: counts, vocabulary and hash; experiments/data/manifest.json pins it."""
    print(json.dumps(load_corpus(parsed.direction).manifest(), indent=2, ensure_ascii=False))


def _run_and_report(
    name: str, out: Path | None, seed: int | None, settings: Sequence[str], *, overwrite: bool
) -> None:
    experiment = load_experiment(name)
    config = configure(experiment, seed, settings)
    directory = out or Path("runs") / name
    print(
        f"{name}: {experiment.title.lower()}, {config.total_steps} steps, seed {config.seed}", file=sys.stderr
    )
    losses = run_experiment(experiment, config, directory, overwrite=overwrite)
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
    _add_options(run_parser)
    run_parser.set_defaults(command=run)

    commands.add_parser("list", help=list_experiments.__doc__).set_defaults(command=list_experiments)

    demo_parser = commands.add_parser("demo", help=demo.__doc__)
    demo_parser.add_argument(
        "--out", type=Path, default=Path("runs"), help="where both runs go (default runs)"
    )
    _add_options(demo_parser)
    demo_parser.set_defaults(command=demo)

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
