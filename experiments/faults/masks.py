"""Attention masks that show a query more than it may see."""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from experiments.code_path import HEALTHY, CodePath
from experiments.faults.fault import Fault
from experiments.transformer import MaskFunction, causal_mask

EVERYTHING = 1 << 20  # later keys; more than any context is long


def mask_with_later_keys(later_key_count: int) -> MaskFunction:
    """A mask under which query i sees the keys up to i + ``later_key_count``."""

    def mask(length: int) -> NDArray[np.bool_]:
        return np.tril(np.ones((length, length), dtype=np.bool_), min(later_key_count, length))

    return mask


def mask_with_next_key(query_stride: int) -> MaskFunction:
    """A causal mask, but every ``query_stride``-th query, the first included, sees one key too far."""

    def mask(length: int) -> NDArray[np.bool_]:
        visible = causal_mask(length)
        queries = np.arange(0, length - 1, query_stride)
        visible[queries, queries + 1] = True
        return visible

    return mask


def future_visible(later_key_count: int) -> CodePath:
    """The same wrong mask in training and in evaluation, as when both share the code."""
    mask = mask_with_later_keys(later_key_count)
    return dataclasses.replace(HEALTHY, training_mask=mask, evaluation_mask=mask)


def future_visible_in_training(later_key_count: int) -> CodePath:
    """The wrong mask in training; evaluation masks correctly."""
    return dataclasses.replace(HEALTHY, training_mask=mask_with_later_keys(later_key_count))


def mask_off_by_one(query_stride: int) -> CodePath:
    """The diagonal above the allowed one is open too, in training and in evaluation."""
    mask = mask_with_next_key(query_stride)
    return dataclasses.replace(HEALTHY, training_mask=mask, evaluation_mask=mask)


MASK_FAULTS = (
    Fault(
        name="causal_mask_absent",
        title="Broken causal mask",
        number=9,
        parameter="later keys that a query sees, in training and evaluation",
        mild=2,
        medium=8,
        severe=EVERYTHING,
        evidence="attention on future keys above 0 at the first step; losses end below the entropy floor",
        code_path=future_visible,
    ),
    Fault(
        name="causal_mask_absent_in_training",
        title="Broken causal mask in training only",
        number=9,
        parameter="later keys that a query sees, in training",
        mild=2,
        medium=8,
        severe=EVERYTHING,
        evidence="attention on future keys above 0 at the first step; validation far above train",
        code_path=future_visible_in_training,
        diagnosis="causal_mask_absent",
    ),
    Fault(
        name="causal_mask_off_by_one",
        title="Causal mask off by one",
        number=10,
        parameter="distance between the queries that see the next key too",
        mild=4,
        medium=2,
        severe=1,
        evidence="attention on the next key above 0 and on later ones 0; entropy of query 0 above 0",
        code_path=mask_off_by_one,
    ),
)
