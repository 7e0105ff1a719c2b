"""Deliberate faults: each changes one thing in the code path, and nothing in the manifest."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from experiments.training import HEALTHY, CodePath


@dataclass(frozen=True)
class Fault:
    """One change to what the loop runs, named like the diagnosis that must find it."""

    name: str
    change: str
    code_path: CodePath


def all_ones_mask(length: int) -> NDArray[np.bool_]:
    """Every query may attend to every key, the future included."""
    return np.ones((length, length), dtype=np.bool_)


FAULTS = (
    Fault(
        name="causal_mask_absent",
        change="all-ones attention mask in training and evaluation",
        code_path=dataclasses.replace(HEALTHY, training_mask=all_ones_mask, evaluation_mask=all_ones_mask),
    ),
    Fault(
        name="causal_mask_absent_in_training",
        change="all-ones attention mask in training; evaluation masks correctly",
        code_path=dataclasses.replace(HEALTHY, training_mask=all_ones_mask),
    ),
)


def code_path_of(fault_name: str | None) -> CodePath:
    """The code path with that fault; the healthy one for None. KeyError when there is no such fault."""
    return HEALTHY if fault_name is None else {fault.name: fault for fault in FAULTS}[fault_name].code_path
