"""Tiny runs of the loop, kept in memory, to hold a faulty one against the healthy one."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from experiments.code_path import HEALTHY, CodePath
from experiments.corpus import Corpus, load_corpus
from experiments.training import Resume, TrainingConfig, train

TINY = TrainingConfig(
    total_steps=12,
    warmup_steps=4,
    evaluation_interval=3,
    batch_size=10,
    width=16,
    head_count=2,
    feed_forward_width=32,
    dropout=0.1,
)
STEPS_PER_EPOCH = 4
EXAMPLES_PER_SPLIT = {"train": 40, "validation": 12, "held_out_verbs": 4}


def tiny_corpus() -> Corpus:
    """The first examples of each split."""
    corpus = load_corpus()
    chosen = [e for split, count in EXAMPLES_PER_SPLIT.items() for e in corpus.split(split)[:count]]
    return dataclasses.replace(corpus, examples=tuple(chosen))


@dataclass
class MemoryRecorder:
    """What a loop logs, as far as a fault can show in it."""

    steps: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[tuple[Any, ...]] = field(default_factory=list)
    examples: dict[str, list[Any]] = field(default_factory=dict)
    model: Any = None

    def attach(self, model: object) -> None:
        self.model = model

    def log_examples(self, columns: dict[str, list[Any]]) -> None:
        self.examples = columns

    def log_evaluation(self, step: int, split: str, losses: Any, *, weights_hash: int | None) -> None:
        evaluated = self.model.content_hash() if weights_hash is None else weights_hash
        self.evaluations.append((step, split, losses.loss_sum.tobytes(), evaluated))

    def log_event(self, kind: str, message: str, *, step: int, payload: object) -> None:
        return

    def step(self, step: int) -> "MemoryRecorder":
        self.steps.append({"step": step, "live_hash": self.model.content_hash()})
        return self

    def log(self, **columns: Any) -> None:
        self.steps[-1] |= columns

    def log_micro_batch(self, **columns: Any) -> None:
        self.steps[-1].setdefault("micro_batches", []).append(columns)

    def __enter__(self) -> "MemoryRecorder":
        return self

    def __exit__(self, *_: object) -> None:
        return

    def before(self, step: int) -> tuple[Any, ...]:
        """Everything that was logged about steps before ``step``, the examples included; NaN equals NaN."""
        steps = [repr(row) for row in self.steps if row["step"] < step]
        return steps, [e for e in self.evaluations if e[0] < step], self.examples

    def everything(self) -> tuple[Any, ...]:
        """All that was logged, and the weights at the end."""
        return self.before(1 << 30), self.model.content_hash()


def recorded(
    corpus: Corpus,
    code_path: CodePath = HEALTHY,
    config: TrainingConfig = TINY,
    resume: Resume | None = None,
) -> MemoryRecorder:
    """The log of a tiny run, or of what remains of it after ``resume``."""
    recorder = MemoryRecorder()
    train(config, corpus, recorder, code_path, resume=resume)  # type: ignore[arg-type]
    return recorder


def weights_of(recorder: MemoryRecorder) -> dict[str, np.ndarray]:
    """The weights at the end of the run, by name."""
    return dict(recorder.model.state())
