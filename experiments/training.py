"""The training loop. It only trains and logs; what a run means is computed later, from its log."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from experiments import corpus as data
from experiments.autograd import softmax_cross_entropy
from experiments.batches import Draw, EpochIterator, PackedBatch, PackedExamples
from experiments.corpus import Corpus
from experiments.evaluation import EvaluationSplit, evaluate
from experiments.optimizer import AdamW, LearningRatePlan, Schedule, clip_scale, global_norm
from experiments.transformer import Dropout, MaskFunction, ModelSize, Transformer, causal_mask
from recorder import EvaluationLosses, Recorder, StepRecord

LOSS_REDUCTION = "sum of NLL over all non-pad target tokens / their number"
"""Prompt tokens count too: this is a plain language model of the whole sequence."""


@dataclass(frozen=True)
class TrainingConfig:
    """Everything that a run is made from; the manifest carries it."""

    seed: int = 0
    direction: str = data.DIRECTIONS[0]
    split_seed: int = data.SPLIT_SEED
    batch_size: int = 32  # examples
    total_steps: int = 2000
    warmup_steps: int = 100
    peak_learning_rate: float = 3e-3
    final_learning_rate: float = 3e-4
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    dropout: float = 0.25  # chosen in 19-healthy/README.md: validation improves to the end
    evaluation_interval: int = 50  # steps
    width: int = 64
    head_count: int = 4
    layer_count: int = 2
    feed_forward_width: int = 256
    dtype: str = "float32"

    def learning_rate_plan(self) -> LearningRatePlan:
        """The declared schedule."""
        return LearningRatePlan(
            self.peak_learning_rate, self.final_learning_rate, self.warmup_steps, self.total_steps
        )

    def model_size(self, corpus: Corpus) -> ModelSize:
        """The declared model, for the vocabulary and the longest sequence of the corpus."""
        return ModelSize(
            len(corpus.vocabulary),
            corpus.context_length(),
            self.width,
            self.head_count,
            self.layer_count,
            self.feed_forward_width,
        )


@dataclass(frozen=True)
class CodePath:
    """What the loop really runs. A deliberate fault replaces a part of it; the declaration stays."""

    training_mask: MaskFunction = causal_mask
    evaluation_mask: MaskFunction = causal_mask


HEALTHY = CodePath()


class TrainingState:
    """The five state machines of a run; together with the config they determine every later step."""

    def __init__(self, config: TrainingConfig, corpus: Corpus) -> None:
        model_seed, order_seed, dropout_seed = np.random.SeedSequence(config.seed).spawn(3)
        self.model = Transformer(config.model_size(corpus), model_seed, config.dtype)
        self.optimizer = AdamW(
            [weight for _, weight in self.model.named_parameters()],
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

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue exactly where ``state`` was taken."""
        for name, machine in self._machines().items():
            machine.load_state(state[name])

    def _machines(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "schedule": self.schedule,
            "data": self.data,
            "dropout": self.dropout,
        }


@dataclass(frozen=True)
class StepResult:
    """What one step computed about the weights before its update."""

    draw: Draw
    batch: PackedBatch
    objective: float  # what was backpropagated, nats/token
    loss_sum: float  # nats
    loss_token_count: int
    learning_rate: float
    gradient_norm: float
    clipped_gradient_norm: float

    def columns(self, planned_learning_rate: float) -> dict[str, Any]:
        """The step's columns of the log's table ``steps``."""
        return {
            "epoch": self.draw.epoch,
            "data_position": self.draw.data_position,
            "objective": self.objective,
            "loss_sum": self.loss_sum,
            "loss_token_count": self.loss_token_count,
            "non_padding_token_count": self.batch.non_padding_token_count(),
            "example_count": len(self.batch.lengths),
            "learning_rate": self.learning_rate,
            "planned_learning_rate": planned_learning_rate,
            "gradient_norm": self.gradient_norm,
            "clipped_gradient_norm": self.clipped_gradient_norm,
            "accumulation_count": 1,
            "loss_scale": 1.0,
            "batch_hash": self.batch.content_hash(),
            "order_hash": self.draw.order_hash,
            "training_mode": True,
        }


Progress = Callable[[int, float, float], None]
"""Called with (finished steps, loss in nats/token, learning rate) after each step."""


def train(
    config: TrainingConfig,
    corpus: Corpus,
    recorder: Recorder | None = None,
    code_path: CodePath = HEALTHY,
    progress: Progress | None = None,
) -> dict[str, EvaluationLosses]:
    """The last evaluation of each split, after ``config.total_steps`` updates.

    Every split is evaluated in full at step 0, every ``evaluation_interval`` steps and at the end.
    """
    run = TrainingState(config, corpus)
    plan = config.learning_rate_plan()
    training_examples = PackedExamples(corpus.split("train"))
    splits = [EvaluationSplit(name, PackedExamples(corpus.split(name))) for name in data.SPLITS]
    if recorder is not None:
        recorder.log_examples(corpus.example_columns())
        recorder.attach(run.model)
    # A diverging run is recorded to its end, so overflow and NaN are values here, not warnings.
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        for step in range(config.total_steps):
            if step % config.evaluation_interval == 0:
                evaluate_splits(run.model, splits, code_path, recorder, step)
            with _recorded(recorder, step) as record:
                result = training_step(run, training_examples, config.clip_norm, code_path)
                if record is not None:
                    record.log(**result.columns(plan.learning_rate(step)))
            if progress is not None:
                progress(step + 1, result.objective, result.learning_rate)
        return evaluate_splits(run.model, splits, code_path, recorder, config.total_steps)


def training_step(
    run: TrainingState, examples: PackedExamples, clip_norm: float, code_path: CodePath
) -> StepResult:
    """One update: draw, forward, backward, clip, AdamW."""
    draw = run.data.draw()
    batch = examples.batch(draw.indices)
    logits = run.model(batch, code_path.training_mask, run.dropout)
    objective, token_losses = softmax_cross_entropy(logits, batch.targets)

    run.optimizer.zero_gradients()
    objective.backward()
    gradient = run.optimizer.flat_gradient()
    gradient_norm = global_norm(gradient)
    scale = clip_scale(gradient_norm, clip_norm)
    learning_rate = run.schedule.next()
    run.optimizer.update(gradient, learning_rate, scale)

    return StepResult(
        draw=draw,
        batch=batch,
        objective=float(objective.data),
        loss_sum=float(token_losses.sum(dtype=np.float64)),
        loss_token_count=len(token_losses),
        learning_rate=learning_rate,
        gradient_norm=gradient_norm,
        clipped_gradient_norm=gradient_norm * scale,
    )


def evaluate_splits(
    model: Transformer,
    splits: list[EvaluationSplit],
    code_path: CodePath,
    recorder: Recorder | None,
    step: int,
) -> dict[str, EvaluationLosses]:
    """Losses of each split under the weights w_step, also logged."""
    losses = {split.name: evaluate(model, split, code_path.evaluation_mask) for split in splits}
    if recorder is not None:
        for name, split_losses in losses.items():
            recorder.log_evaluation(step, name, split_losses, evaluation_mode=True)
    return losses


def _recorded(recorder: Recorder | None, step: int) -> AbstractContextManager[StepRecord | None]:
    """The recorder's context of one step; gives None without a recorder."""
    return nullcontext() if recorder is None else recorder.step(step)
