"""Evaluations that do not measure the model that is being trained."""

from __future__ import annotations

import dataclasses

import numpy as np

from experiments.code_path import HEALTHY, CodePath
from experiments.faults.fault import Fault
from experiments.training import TrainingState
from experiments.transformer import Dropout, Transformer

DROPOUT_SEED = 98  # apart from the training's generator: evaluation changes no update
NEVER = 0  # evaluations between two refreshes, when there is none after the first


def dropout_in_evaluation(probability: float) -> CodePath:
    """Evaluation runs with dropout, and says that it does not."""
    dropout = Dropout(probability, np.random.SeedSequence(DROPOUT_SEED))
    return dataclasses.replace(HEALTHY, evaluation_dropout=lambda run: dropout)


def copy_evaluated(evaluations_between: int) -> CodePath:
    """Evaluations read a copy of the weights that every so many evaluations is made anew."""
    return dataclasses.replace(HEALTHY, evaluated_model=StaleCopy(evaluations_between))


class StaleCopy:
    """The copy, and how many evaluations it has served."""

    def __init__(self, evaluations_between: int) -> None:
        self.evaluations_between = evaluations_between
        self.evaluation_count = 0
        self.last_step = -1
        self.copy: Transformer | None = None

    def __call__(self, run: TrainingState) -> Transformer:
        """The model to evaluate; a second evaluation at the same step counts as the same one."""
        if run.schedule.step != self.last_step:
            self.last_step = run.schedule.step
            if self._is_due():
                self.copy = copy_of(run.model)
            self.evaluation_count += 1
        assert self.copy is not None  # made at the first evaluation
        return self.copy

    def _is_due(self) -> bool:
        if self.evaluations_between == NEVER:
            return self.evaluation_count == 0
        return self.evaluation_count % self.evaluations_between == 0


def copy_of(model: Transformer) -> Transformer:
    """A model with the same weights in memory of its own, without hooks."""
    copy = Transformer(model.size, np.random.SeedSequence(0), str(model.dtype))
    copy.load_state(model.state())
    return copy


EVALUATION_FAULTS = (
    Fault(
        name="evaluation_in_training_mode",
        title="Evaluation in training mode",
        number=38,
        parameter="dropout in evaluations",
        mild=0.05,
        medium=0.25,
        severe=0.5,
        evidence="two evaluations of the same weights and examples with different losses",
        code_path=dropout_in_evaluation,
    ),
    Fault(
        name="stale_evaluation_weights",
        title="Stale weights in evaluation",
        number=39,
        parameter="evaluations between two refreshes of the copy; 0: none after the first",
        mild=2,
        medium=5,
        severe=NEVER,
        evidence="hash of the evaluated weights that of an earlier step",
        code_path=copy_evaluated,
    ),
)
