"""Emulated 16-bit floats: values rounded to a format, kept in float32, and what falls out of its range."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]


@dataclass(frozen=True)
class NumberFormat:
    """A binary floating-point format narrower than float32."""

    name: str
    round: Callable[[Array], Array]  # to nearest, ties to even; beyond the range: infinity
    smallest_normal: float
    largest: float


@dataclass(frozen=True)
class RangeCount:
    """What happens to the elements of one tensor when they are rounded to a format."""

    element_count: int = 0
    nonzero_count: int = 0
    overflow_count: int = 0  # finite values that become infinite
    subnormal_count: int = 0  # non-zero results below the smallest normal number: fewer significant bits
    flushed_count: int = 0  # non-zero values that become zero
    largest: float = 0.0  # absolute value before rounding

    def __add__(self, other: RangeCount) -> RangeCount:
        return RangeCount(
            self.element_count + other.element_count,
            self.nonzero_count + other.nonzero_count,
            self.overflow_count + other.overflow_count,
            self.subnormal_count + other.subnormal_count,
            self.flushed_count + other.flushed_count,
            max(self.largest, other.largest),
        )

    def fractions(self) -> tuple[float, float, float]:
        """(overflow, subnormal, flushed) as shares of the non-zero elements."""
        total = max(self.nonzero_count, 1)
        return self.overflow_count / total, self.subnormal_count / total, self.flushed_count / total


def round_to_fp16(values: Array) -> Array:
    """IEEE 754 binary16: 11 significant bits, 6.1e-5 to 65504, subnormal down to 6.0e-8."""
    with np.errstate(over="ignore"):
        return values.astype(np.float16).astype(np.float32)


def round_to_bf16(values: Array) -> Array:
    """bfloat16: 8 significant bits in the range of float32. NaN stays NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    last_kept_bit = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = (bits + np.uint32(0x7FFF) + last_kept_bit) & np.uint32(0xFFFF0000)
    return np.where(np.isnan(values), values, rounded.view(np.float32))


FP16 = NumberFormat("fp16", round_to_fp16, 2.0**-14, 65504.0)
BF16 = NumberFormat("bf16", round_to_bf16, 2.0**-126, 3.3895313892515355e38)
FORMATS = (FP16, BF16)


def count_range(values: Array, number_format: NumberFormat) -> RangeCount:
    """Elements that overflow, lose bits or vanish in the format."""
    rounded = number_format.round(values)
    nonzero = values != 0
    magnitude = np.abs(values)
    return RangeCount(
        element_count=values.size,
        nonzero_count=int(np.count_nonzero(nonzero)),
        overflow_count=int(np.count_nonzero(np.isinf(rounded) & np.isfinite(values))),
        subnormal_count=int(
            np.count_nonzero((rounded != 0) & (np.abs(rounded) < number_format.smallest_normal))
        ),
        flushed_count=int(np.count_nonzero(nonzero & (rounded == 0))),
        largest=float(magnitude[np.isfinite(magnitude)].max(initial=0.0)),
    )
