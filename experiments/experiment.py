"""Experiments as folders with a ``config.toml``, their settings, and their run with the recorder on."""

from __future__ import annotations

import dataclasses
import secrets
import shutil
import tomllib
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from experiments.code_path import CodePath
from experiments.corpus import DIRECTIONS, PRIMARY_SPLIT, Corpus, load_corpus
from experiments.errors import ExperimentError, UsageError
from experiments.faults import SEVERITIES, code_path_of, fault_named
from experiments.progress import ProgressBar
from experiments.reductions import REDUCTIONS, reduction_named
from experiments.reference_losses import reference_losses
from experiments.training import SCHEDULES, Progress, TrainingConfig, train
from experiments.transformer import (
    ACTIVATIONS,
    NORM_PLACEMENTS,
    ModelSize,
    Transformer,
    starts_with_part,
)
from recorder import Cadence, EvaluationLosses, LabelRoles, Manifest, Recorder
from recorder.manifest import json_hash
from recorder.schema import CHECKPOINT_DIRECTORY, DASHBOARD_FILE, LOG_DIRECTORY, MANIFEST_FILE

EXPERIMENTS_DIRECTORY = Path(__file__).parent
CONFIG_FILE = "config.toml"
LABEL_ROLES = LabelRoles(group="regularity", cluster="verb", map_rows="verb", map_columns="tense")
DTYPES = ("float32", "float64")


@dataclass(frozen=True)
class Experiment:
    """What a folder declares; ``config`` and ``cadence`` hold only what differs from the defaults."""

    name: str
    title: str
    purpose: str
    fault: str | None = None
    severity: str = SEVERITIES[1]
    fault_start: int | None = None  # step; None: the fault's own
    program: str | None = None  # what the command runs instead of one training; a name in PROGRAMS
    config: Mapping[str, Any] = field(default_factory=dict)
    cadence: Mapping[str, int] = field(default_factory=dict)

    def code_path(self) -> CodePath:
        """A fresh one, with the fault if there is any. Raises UsageError for a fault that does not fit."""
        return code_path_of(self.fault, self.severity, self.fault_start)

    def settings(self) -> Mapping[str, Any]:
        """``config``, and what the fault makes of it when it is a choice of configuration."""
        if self.fault is None:
            return self.config
        fault = fault_named(self.fault)
        return {**self.config, **fault.settings(fault.value(self.severity))}


def experiment_names() -> tuple[str, ...]:
    """Names of all experiments, sorted."""
    return tuple(sorted(path.parent.name for path in EXPERIMENTS_DIRECTORY.glob(f"*/{CONFIG_FILE}")))


def load_experiment(name: str) -> Experiment:
    """The experiment of that folder. Raises UsageError when there is none."""
    if name not in experiment_names():
        raise UsageError(f"{name}: no such experiment; choose one of {', '.join(experiment_names())}")
    path = EXPERIMENTS_DIRECTORY / name / CONFIG_FILE
    return Experiment(name=name, **tomllib.loads(path.read_text(encoding="utf-8")))


def configure(experiment: Experiment, seed: int | None, settings: Iterable[str]) -> TrainingConfig:
    """Defaults, then the experiment's own config, then ``key=value`` settings, then the seed.

    Raises UsageError for an unknown key, a value of the wrong type, or one out of range.
    """
    return apply_settings(TrainingConfig(**experiment.settings()), seed, settings)


def apply_settings(config: TrainingConfig, seed: int | None, settings: Iterable[str]) -> TrainingConfig:
    """``config`` with ``key=value`` settings, then the seed. Raises UsageError as ``configure`` does."""
    config = dataclasses.replace(config, **dict(_parse_setting(setting) for setting in settings))
    if seed is not None:
        config = dataclasses.replace(config, seed=seed)
    _check(config)
    return config


def _parse_setting(setting: str) -> tuple[str, Any]:
    key, equals, text = setting.partition("=")
    types = typing.get_type_hints(TrainingConfig)
    if not equals:
        raise UsageError(f"--set {setting}: expected key=value, for example --set total_steps=500")
    if key not in types:
        raise UsageError(f"--set {setting}: unknown setting {key!r}; choose one of {', '.join(types)}")
    try:
        return key, types[key](text)
    except ValueError:
        raise UsageError(f"--set {setting}: {key} takes {_TYPE_WORDS[types[key]]}, not {text!r}") from None


_TYPE_WORDS = {int: "a whole number", float: "a number", str: "text"}


def _check(config: TrainingConfig) -> None:
    """Raises UsageError for the first setting that can not be trained with."""
    reductions = tuple(reduction.name for reduction in REDUCTIONS)
    positive = ("batch_size", "total_steps", "evaluation_interval", "width", "head_count", "layer_count")
    rules = [(name, getattr(config, name) >= 1, "at least 1") for name in (*positive, "feed_forward_width")]
    rules += [
        ("seed", config.seed >= 0, "0 or more"),
        ("split_seed", config.split_seed >= 0, "0 or more"),
        ("warmup_steps", config.warmup_steps >= 0, "0 or more"),
        (
            "accumulation_count",
            1 <= config.accumulation_count <= config.batch_size,
            "at least 1 and at most batch_size",
        ),
        ("loss_reduction", config.loss_reduction in reductions, f"one of {', '.join(reductions)}"),
        ("schedule", config.schedule in SCHEDULES, f"one of {', '.join(SCHEDULES)}"),
        ("norm_placement", config.norm_placement in NORM_PLACEMENTS, f"one of {', '.join(NORM_PLACEMENTS)}"),
        ("activation", config.activation in ACTIVATIONS, f"one of {', '.join(ACTIVATIONS)}"),
        ("direction", config.direction in DIRECTIONS, f"one of {', '.join(DIRECTIONS)}"),
        ("dtype", config.dtype in DTYPES, f"one of {', '.join(DTYPES)}"),
        ("dropout", 0 <= config.dropout < 1, "at least 0 and below 1"),
        ("clip_norm", config.clip_norm > 0, "above 0"),
        ("checkpoint_interval", config.checkpoint_interval >= 0, "0 or more"),
        ("width", config.width % max(1, config.head_count) == 0, "a multiple of head_count"),
    ]
    for name, holds, expected in rules:
        if not holds:
            raise UsageError(f"{name}={getattr(config, name)}: expected {expected}")
    if config.frozen_modules:
        _check_frozen_modules(config)


def _check_frozen_modules(config: TrainingConfig) -> None:
    """Raises UsageError for a prefix that no weight has, and when no weight is left to train."""
    # names depend on neither width nor vocabulary
    size = ModelSize(1, 1, 1, 1, config.layer_count, 1, config.norm_placement, config.activation)
    model = Transformer(size, np.random.SeedSequence(0))
    modules = [name for name, module in model.named_modules() if module.parameters]
    for prefix in config.frozen_prefixes():
        if not any(starts_with_part(name, prefix) for name, _ in model.named_parameters()):
            raise UsageError(
                f"frozen_modules={config.frozen_modules}: no weight is in {prefix!r}; "
                f"expected the start of one of {', '.join(modules)}"
            )
    model.freeze(config.frozen_prefixes())
    if not any(weight.trainable for _, weight in model.named_parameters()):
        raise UsageError(f"frozen_modules={config.frozen_modules}: expected some weights that are not frozen")


def run_manifest(experiment: Experiment, config: TrainingConfig, corpus: Corpus) -> Manifest:
    """The declaration of the run: intended settings only, never the fault."""
    return Manifest(
        run_id=f"{experiment.name}-seed{config.seed}-{secrets.token_hex(4)}",
        config=config.to_json(),
        seed=config.seed,
        loss_reduction=reduction_named(config.loss_reduction).sentence,
        mask_type="causal",
        planned_schedule={
            "kind": SCHEDULES[config.schedule],
            **dataclasses.asdict(config.learning_rate_plan()),
        },
        reference_losses=reference_losses(corpus),
        primary_split=PRIMARY_SPLIT,
        label_roles=LABEL_ROLES,
        data_manifest_hash=json_hash(corpus.manifest()),
    )


def run_experiment(
    experiment: Experiment,
    config: TrainingConfig,
    out: Path,
    *,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> dict[str, EvaluationLosses]:
    """The last losses of each split, after training with the recorder writing to ``out``.

    Raises ExperimentError when ``out`` holds a run already and ``overwrite`` is false.
    """
    corpus = load_corpus(config.direction, config.split_seed)
    example_count = len(corpus.split("train"))
    if config.batch_size > example_count:
        raise UsageError(
            f"batch_size={config.batch_size}: expected at most the {example_count} training examples"
        )
    code_path = experiment.code_path()
    clear_run_directory(out, overwrite=overwrite)
    bar = ProgressBar(config.total_steps)
    manifest = run_manifest(experiment, config, corpus)
    with Recorder(out, manifest, cadence=Cadence(**experiment.cadence)) as recorder:
        try:
            return train(config, corpus, recorder, code_path, progress or bar.show, out)
        finally:
            bar.close()  # before the recorder says its last line


def clear_run_directory(out: Path, *, overwrite: bool) -> None:
    """Make sure that ``out`` holds no run. Only what a run consists of is deleted, and only on demand."""
    parts = [out / name for name in (MANIFEST_FILE, LOG_DIRECTORY, CHECKPOINT_DIRECTORY, DASHBOARD_FILE)]
    if not any(part.exists() for part in parts[:2]):
        return
    if not overwrite:
        raise ExperimentError(
            f"{out}: already holds a run; choose another --out, or --overwrite to replace it"
        )
    for part in parts:
        if part.is_dir():
            shutil.rmtree(part)
        else:
            part.unlink(missing_ok=True)
