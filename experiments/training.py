"""The training loop. It only trains and logs; what a run means is computed later, from its log."""

from __future__ import annotations

import math
import typing
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

import numpy as np

from experiments import corpus as data
from experiments.batches import EpochIterator, PackedExamples
from experiments.checkpoint import Checkpoint, remove_old_checkpoints, save_checkpoint
from experiments.code_path import HEALTHY, CodePath
from experiments.corpus import Corpus
from experiments.evaluation import EvaluationSplit, evaluate
from experiments.optimizer import AdamW, LearningRatePlan, Schedule
from experiments.reductions import reduction_named
from experiments.training_step import MicroBatch, training_step
from experiments.transformer import NORM_PLACEMENTS, Dropout, ModelSize, Transformer
from recorder import EvaluationLosses, Recorder, StepRecord
from recorder.cadence import is_due
from recorder.manifest import json_hash

RESUMABLE_SETTINGS = ("total_steps", "evaluation_interval", "checkpoint_interval")
"""What a resume may change; the learning-rate plan stays the one that the run was begun with."""
SCHEDULES = {"cosine": "linear warmup, cosine decay", "constant": "linear warmup, constant"}
"""What a schedule is called in the configuration, and in the manifest."""
REPEAT_INTERVAL = 10  # evaluations; a repeat of the primary split takes about 10 ms
STATE_HASH_INTERVAL = 10  # steps; hashing the moments takes about 1 ms


@dataclass(frozen=True)
class TrainingConfig:
    """Everything that a run is made from; the manifest carries it."""

    seed: int = 0
    direction: str = data.DIRECTIONS[0]
    split_seed: int = data.SPLIT_SEED
    batch_size: int = 32  # examples of an update
    accumulation_count: int = 1  # micro-batches that they are divided into
    loss_reduction: str = "token_mean"  # prompt tokens count too: a plain language model of the sequence
    total_steps: int = 2000
    warmup_steps: int = 100
    peak_learning_rate: float = 3e-3
    final_learning_rate: float = 3e-4  # of the cosine
    schedule: str = "cosine"  # a name in SCHEDULES
    weight_decay: float = 0.1
    clip_norm: float = 1.0  # inf: no clipping
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    dropout: float = 0.25  # chosen in 19-healthy/README.md: validation improves to the end
    evaluation_interval: int = 50  # steps
    checkpoint_interval: int = 500  # steps; 0: at the end only
    width: int = 64
    head_count: int = 4
    layer_count: int = 2
    feed_forward_width: int = 256
    norm_placement: str = NORM_PLACEMENTS[0]
    activation: str = "relu"  # a name in ACTIVATIONS
    frozen_modules: str = ""  # comma-separated starts of module names whose weights stay, e.g. "blocks.0"
    dtype: str = "float32"

    def resumable_hash(self) -> str:
        """Hash of every setting that a resume must share with its run, where it is not the default.

        Defaults are left out so that a setting which a later version adds, with a default that trains as
        before, leaves older checkpoints usable. A changed default makes them another configuration.
        """
        settings = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in RESUMABLE_SETTINGS}
        defaults = {f.name: f.default for f in fields(self)}
        return json_hash({name: value for name, value in settings.items() if value != defaults[name]})

    def to_json(self) -> dict[str, Any]:
        """Every setting by name; what is not finite as text, since JSON has no infinity."""
        return {
            name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in asdict(self).items()
        }

    @classmethod
    def from_json(cls, settings: Mapping[str, Any]) -> Self:
        """The configuration that ``to_json`` wrote; a setting that it did not know yet has its default."""
        types = typing.get_type_hints(cls)
        values: dict[str, Any] = {
            name: float(value) if types[name] is float else value for name, value in settings.items()
        }
        return cls(**values)

    def learning_rate_plan(self) -> LearningRatePlan:
        """The declared schedule."""
        final = self.peak_learning_rate if self.schedule == "constant" else self.final_learning_rate
        return LearningRatePlan(self.peak_learning_rate, final, self.warmup_steps, self.total_steps)

    def frozen_prefixes(self) -> tuple[str, ...]:
        """The parts of ``frozen_modules``."""
        return tuple(part.strip() for part in self.frozen_modules.split(",") if part.strip())

    def model_size(self, corpus: Corpus) -> ModelSize:
        """The declared model, for the vocabulary and the longest sequence of the corpus."""
        return ModelSize(
            len(corpus.vocabulary),
            corpus.context_length(),
            self.width,
            self.head_count,
            self.layer_count,
            self.feed_forward_width,
            self.norm_placement,
            self.activation,
        )


MACHINES = ("model", "optimizer", "schedule", "data", "dropout")
"""The state machines of a run, by the name of their attribute in ``TrainingState``."""


class TrainingState:
    """The five state machines of a run; together with the config they determine every later step."""

    def __init__(self, config: TrainingConfig, corpus: Corpus) -> None:
        model_seed, order_seed, dropout_seed = np.random.SeedSequence(config.seed).spawn(3)
        self.model = Transformer(config.model_size(corpus), model_seed, config.dtype)
        self.model.freeze(config.frozen_prefixes())
        self.optimizer = AdamW(
            [weight for _, weight in self.model.named_parameters() if weight.trainable],
            betas=(config.beta1, config.beta2),
            epsilon=config.epsilon,
            weight_decay=config.weight_decay,
        )
        self.schedule = Schedule(config.learning_rate_plan())
        self.data = EpochIterator(len(corpus.split("train")), config.batch_size, order_seed)
        self.dropout = Dropout(config.dropout, dropout_seed)

    def state(self) -> dict[str, Any]:
        """A copy of all state, by machine."""
        return {name: machine.state() for name, machine in self._machines().items()}

    def load_state(self, state: dict[str, Any], machines: tuple[str, ...] = MACHINES) -> None:
        """Continue exactly where ``state`` was taken; a machine that is left out stays as it is."""
        for name in machines:
            self._machines()[name].load_state(state[name])

    def hashes(self) -> dict[str, int]:
        """What the log says of the state before an update; names as in table ``steps``."""
        return {
            "weights_hash": self.model.content_hash(),
            "optimizer_hash": self.optimizer.content_hash(),
            "rng_hash": self.dropout.content_hash(),
        }

    def _machines(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "schedule": self.schedule,
            "data": self.data,
            "dropout": self.dropout,
        }


@dataclass(frozen=True)
class Resume:
    """Where a run continues, and the schedule that it was begun with."""

    checkpoint: Checkpoint
    plan: LearningRatePlan


Progress = Callable[[int, float, float], None]
"""Called with (finished steps, loss in nats/token, learning rate) after each step."""


def train(
    config: TrainingConfig,
    corpus: Corpus,
    recorder: Recorder | None = None,
    code_path: CodePath = HEALTHY,
    progress: Progress | None = None,
    run_directory: Path | None = None,
    resume: Resume | None = None,
) -> dict[str, EvaluationLosses]:
    """The last evaluation of each split, after ``config.total_steps`` updates.

    Every split is evaluated in full at step 0, every ``evaluation_interval`` steps and at the end, now and
    then the primary one twice: an evaluation of the same weights must give the same losses.
    Checkpoints go to ``run_directory``; None makes none.
    """
    corpus = code_path.corpus(corpus)
    run = TrainingState(config, corpus)
    plan = config.learning_rate_plan() if resume is None else resume.plan
    first_step = 0 if resume is None else resume.checkpoint.step
    reduction = reduction_named(config.loss_reduction)
    training_examples = PackedExamples(corpus.split("train"))
    splits = [EvaluationSplit(name, PackedExamples(corpus.split(name))) for name in data.SPLITS]
    primary = splits[data.SPLITS.index(data.PRIMARY_SPLIT)]
    if recorder is not None:
        recorder.log_examples(corpus.example_columns())
        recorder.attach(run.model)
    if resume is not None:
        code_path.restore(run, resume.checkpoint.state)
        log_resume(recorder, resume.checkpoint)
    # A diverging run is recorded to its end, so overflow and NaN are values here, not warnings.
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        for step in range(first_step, config.total_steps):
            path = code_path.at(step)
            if step == path.first_step and (resume is None or step > first_step):
                path.alter_state(run)  # a checkpoint of this step has it already
            if step % config.evaluation_interval == 0:
                evaluate_splits(run, splits, path, recorder, step)
            if step % (REPEAT_INTERVAL * config.evaluation_interval) == 0:
                evaluate_splits(run, [primary], path, recorder, step)
            if run_directory is not None and step > first_step and is_due(step, config.checkpoint_interval):
                if recorder is not None:
                    recorder.flush()  # the log must not end before the checkpoint that continues it
                save_checkpoint(run_directory, step, run, config.resumable_hash())
                remove_old_checkpoints(run_directory)
            with _recorded(recorder, step) as record:
                if record is not None and (step == first_step or is_due(step, STATE_HASH_INTERVAL)):
                    record.log(**run.hashes())
                result = training_step(
                    run, training_examples, config.clip_norm, path, reduction, config.accumulation_count
                )
                if record is not None:
                    log_micro_batches(record, result.micro_batches)
                    record.log(**result.columns(path.planned_rate(plan, step)))
            if progress is not None:
                progress(step + 1, result.objective, result.learning_rate)
        path = code_path.at(config.total_steps)
        losses = evaluate_splits(run, splits, path, recorder, config.total_steps)
    if run_directory is not None:
        save_checkpoint(run_directory, config.total_steps, run, config.resumable_hash())
    return losses


def log_micro_batches(record: StepRecord, micro_batches: Sequence[MicroBatch]) -> None:
    """One row each, where there is more than one."""
    for micro in micro_batches if len(micro_batches) > 1 else ():
        record.log_micro_batch(
            loss_sum=micro.loss_sum,
            loss_token_count=micro.loss_token_count,
            gradient_norm=micro.gradient_norm,
        )


def log_resume(recorder: Recorder | None, checkpoint: Checkpoint) -> None:
    """Say in the log which state the rows that follow continue."""
    if recorder is not None:
        message = f"resumed at step {checkpoint.step}"
        recorder.log_event("resumed", message, step=checkpoint.step, payload=checkpoint.facts())


def evaluate_splits(
    run: TrainingState,
    splits: list[EvaluationSplit],
    code_path: CodePath,
    recorder: Recorder | None,
    step: int,
) -> dict[str, EvaluationLosses]:
    """Losses of each split under the weights w_step, also logged."""
    model, dropout = code_path.evaluated_model(run), code_path.evaluation_dropout(run)
    weights_hash = None if model is run.model else model.content_hash()
    losses = {}
    for split in splits:
        losses[split.name] = evaluate(model, split, code_path.evaluation_mask, dropout, code_path.join)
        if recorder is not None:
            recorder.log_evaluation(step, split.name, losses[split.name], weights_hash=weights_hash)
    return losses


def _recorded(recorder: Recorder | None, step: int) -> AbstractContextManager[StepRecord | None]:
    """The recorder's context of one step; gives None without a recorder."""
    return nullcontext() if recorder is None else recorder.step(step)
