"""Continues a run that was interrupted, killed or finished, at one of its checkpoints."""

from __future__ import annotations

import dataclasses
import shutil
import sys
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.checkpoint import Checkpoint, checkpoint_path, checkpoint_steps, newest_checkpoint
from experiments.corpus import Corpus, load_corpus
from experiments.errors import ExperimentError, UsageError
from experiments.experiment import Experiment, apply_settings
from experiments.log_reader import has_finished, last_logged_step
from experiments.progress import ProgressBar
from experiments.training import RESUMABLE_SETTINGS, CodePath, Resume, TrainingConfig, TrainingState, train
from recorder import Cadence, EvaluationLosses, Manifest, Recorder
from recorder.manifest import read_manifest


@dataclass(frozen=True)
class ResumePlan:
    """What a resume would do; ``checkpoint`` is None when the run has finished."""

    config: TrainingConfig
    corpus: Corpus
    resume: Resume | None
    manifest: Manifest


def plan_resume(
    experiment: Experiment, directory: Path, seed: int | None, settings: Sequence[str]
) -> ResumePlan:
    """Reads manifest, log and checkpoints of ``directory`` and changes nothing.

    The run's own manifest is the configuration; ``settings`` may change RESUMABLE_SETTINGS only. Raises
    UsageError for another experiment or setting, ExperimentError when no checkpoint can be used.
    """
    manifest = read_manifest(directory)
    if not manifest.run_id.startswith(f"{experiment.name}-seed"):
        raise UsageError(
            f"{directory}: holds {manifest.run_id}, not a run of {experiment.name}; name its own"
        )
    begun = recorded_config(manifest)
    config = apply_settings(begun, seed, settings)
    for field in dataclasses.fields(TrainingConfig):
        old, new = getattr(begun, field.name), getattr(config, field.name)
        if old != new and field.name not in RESUMABLE_SETTINGS:
            raise UsageError(
                f"{field.name}={new}: the run in {directory} was begun with {old}; "
                f"a resume may change only {', '.join(RESUMABLE_SETTINGS)}"
            )
    corpus = load_corpus(config.direction, config.split_seed)
    steps = checkpoint_steps(directory)
    if has_finished(directory) and steps and steps[-1] >= config.total_steps:
        return ResumePlan(config, corpus, None, manifest)
    checkpoint = _choose_checkpoint(directory, config, corpus)
    return ResumePlan(config, corpus, Resume(checkpoint, begun.learning_rate_plan()), manifest)


def recorded_config(manifest: Manifest) -> TrainingConfig:
    """The configuration that a manifest declares. ExperimentError for unknown settings."""
    unknown = manifest.config.keys() - typing.get_type_hints(TrainingConfig).keys()
    if unknown:
        raise ExperimentError(
            f"{manifest.run_id}: unknown settings {', '.join(sorted(unknown))} in its manifest; "
            "use the version of this program that wrote it"
        )
    return TrainingConfig.from_json(manifest.config)


def run_resume(
    experiment: Experiment, plan: ResumePlan, directory: Path, code_path: CodePath | None = None
) -> dict[str, EvaluationLosses]:
    """The last losses of each split, after the rest of the training was logged as the next segment."""
    assert plan.resume is not None
    resumed_step = plan.resume.checkpoint.step
    bar = ProgressBar(plan.config.total_steps)
    with Recorder(directory, plan.manifest, cadence=Cadence(**experiment.cadence)) as recorder:
        for step in checkpoint_steps(directory):  # of the history that this resume abandons
            if step > resumed_step:
                shutil.rmtree(checkpoint_path(directory, step))
        try:
            return train(
                plan.config,
                plan.corpus,
                recorder,
                code_path or experiment.code_path(),
                bar.show,
                directory,
                plan.resume,
            )
        finally:
            bar.close()


def _choose_checkpoint(directory: Path, config: TrainingConfig, corpus: Corpus) -> Checkpoint:
    """The newest whole one that the log reaches, so that no row is missing before it.

    A checkpoint is on the disk at once, while rows of a killed process may be lost: a checkpoint ahead of
    the log is taken only when there is no other.
    """
    steps = [step for step in checkpoint_steps(directory) if step < config.total_steps]
    last_step = last_logged_step(directory)
    template = TrainingState(config, corpus)
    reached = [step for step in steps if step <= last_step + 1]
    checkpoint, refusals = newest_checkpoint(directory, reached or steps, template, config.resumable_hash())
    for refusal in refusals:
        print(f"experiments: skipped {refusal}", file=sys.stderr)
    if checkpoint.step > last_step + 1:
        print(
            f"experiments: the log ends at step {last_step}; rows up to step {checkpoint.step - 1} are lost",
            file=sys.stderr,
        )
    return checkpoint
