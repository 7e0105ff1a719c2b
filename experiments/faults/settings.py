"""Choices of configuration that lead to a bad result; the manifest carries them like any other choice."""

from __future__ import annotations

from experiments.faults.fault import Fault, Settings


def regularisation(dropout_and_decay: tuple[float, float]) -> Settings:
    """Dropout and weight decay."""
    dropout, weight_decay = dropout_and_decay
    return {"dropout": dropout, "weight_decay": weight_decay}


def capacity(width: int) -> Settings:
    """A model of that width, with a feed-forward network four times as wide, as in the reference."""
    return {"width": width, "feed_forward_width": 4 * width}


SETTING_FAULTS = (
    Fault(
        name="overfitting",
        title="Overfitting",
        number=30,
        parameter="dropout and weight decay",
        mild=(0.05, 0.1),
        medium=(0.0, 0.1),
        severe=(0.0, 0.0),
        evidence="validation above its minimum at three evaluations in a row while train falls",
        settings=regularisation,
        starts_with_the_run=True,
    ),
    Fault(
        name="underfitting",
        title="Underfitting",
        number=31,
        parameter="model width",
        mild=16,
        medium=8,
        severe=4,
        evidence="train far above its floor and flat at a normal learning rate",
        settings=capacity,
        starts_with_the_run=True,
    ),
)
