"""Resumes that do not restore everything. They show only in a run that is resumed."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from experiments.code_path import HEALTHY, CodePath
from experiments.faults.fault import Fault
from experiments.training import MACHINES, TrainingState

State = dict[str, Any]
FROM_THE_START = -1  # batches to go back by: to the first of the run


def machine_forgotten(machine: str) -> CodePath:
    """One state machine stays as a fresh run makes it."""
    restored = tuple(name for name in MACHINES if name != machine)
    return dataclasses.replace(HEALTHY, restore=lambda run, state: run.load_state(state, restored))


def moments_lost(parts: tuple[str, ...]) -> CodePath:
    """Those parts of the optimizer's state are zero after the resume."""

    def restore(run: TrainingState, state: State) -> None:
        fresh = run.optimizer.state()
        run.load_state(state | {"optimizer": state["optimizer"] | {part: fresh[part] for part in parts}})

    return dataclasses.replace(HEALTHY, restore=restore)


def schedule_set_back(share: float) -> CodePath:
    """The schedule continues at ``1 - share`` of the steps that were taken: 1 is its beginning."""

    def restore(run: TrainingState, state: State) -> None:
        place = state["schedule"] | {"step": round((1 - share) * state["schedule"]["step"])}
        run.load_state(state | {"schedule": place})

    return dataclasses.replace(HEALTHY, restore=restore)


def epoch_replayed(batches: int) -> CodePath:
    """The data position is set back by so many batches, at most to the beginning of its epoch."""

    def restore(run: TrainingState, state: State) -> None:
        position = max(0, state["data"]["data_position"] - batches * run.data.batch_size)
        run.load_state(state | {"data": state["data"] | {"data_position": position}})

    return dataclasses.replace(HEALTHY, restore=restore)


def data_replayed(batches: int) -> CodePath:
    """The data goes back by so many batches; FROM_THE_START: to the first batch of the run."""
    return machine_forgotten("data") if batches == FROM_THE_START else epoch_replayed(batches)


def generator_lost(kind: str) -> CodePath:
    """The dropout generator restarts from its first state, a constant, or the machine's entropy."""
    if kind == "the run's first state":
        return machine_forgotten("dropout")
    seed = np.random.SeedSequence(0) if kind == "a constant" else np.random.SeedSequence()

    def restore(run: TrainingState, state: State) -> None:
        run.load_state(state | {"dropout": dict(np.random.SFC64(seed).state)})

    return dataclasses.replace(HEALTHY, restore=restore)


RESUME_FAULTS = (
    Fault(
        name="optimizer_state_lost",
        title="Optimizer state lost on resume",
        number=33,
        parameter="parts of the optimizer's state that restart at zero",
        mild=("first_moment",),
        medium=("first_moment", "second_moment", "update_count"),
        severe=("second_moment",),
        evidence="optimizer hash of the first row after a resume other than the checkpoint's",
        code_path=moments_lost,
        starts_with_the_run=True,
    ),
    Fault(
        name="schedule_reset_on_resume",
        title="Schedule reset on resume",
        number=34,
        parameter="share of the steps taken that the schedule goes back by",
        mild=0.1,
        medium=0.5,
        severe=1.0,
        evidence="applied rate different from the planned one from the resume on",
        code_path=schedule_set_back,
        starts_with_the_run=True,
    ),
    Fault(
        name="data_replayed_on_resume",
        title="Data replayed on resume",
        number=35,
        parameter="batches that the data goes back by, within the epoch; -1: to the first of the run",
        mild=1,
        medium=1000,
        severe=FROM_THE_START,
        evidence="data position and batch hashes that come a second time after a resume",
        code_path=data_replayed,
        starts_with_the_run=True,
    ),
    Fault(
        name="random_state_lost_on_resume",
        title="Random state lost on resume",
        number=36,
        parameter="what the dropout generator restarts from",
        mild="a constant",
        medium="the run's first state",
        severe="entropy",
        evidence="generator hash of the first row after a resume other than the checkpoint's",
        code_path=generator_lost,
        starts_with_the_run=True,
    ),
)
