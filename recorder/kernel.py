"""The passes over memory that statistics are made of: compiled where possible, else NumPy.

Both do the same sums within the same error bound; recorder/kernel.c is three to twenty times faster.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any, Protocol, final

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

SUM, SQUARE_SUM, ABSOLUTE_SUM, ZERO_COUNT, MINIMUM, MAXIMUM = range(6)
"""Columns of a totals row, as in kernel.c."""

KERNEL_VARIABLE = "FLIGHT_RECORDER_KERNEL"
"""Set to "numpy" to do without the compiled kernel."""

_CHUNK = 1 << 16
"""Elements that NumPy works on at a time: a chunk and its scratch copy stay in a 2 MiB cache."""


class Kernel(Protocol):
    """Sums over lists of flat C-contiguous float32 arrays."""

    @property
    def name(self) -> str:
        """ "compiled" or "numpy"."""

    def add_totals(self, arrays: list[Array], totals: Array) -> None:
        """Add each array's sums and extremes to its row of totals, (arrays, 6) float64."""

    def dot_and_replace(self, arrays: list[Array], previous: Array) -> float:
        """Dot product of the arrays, end to end, with ``previous``, which then holds the arrays."""

    def square_sums_finite(self, arrays: list[Array]) -> bool:
        """False when an array holds NaN or infinity, or when its squares overflow float32."""

    def future_mass(self, probabilities: Array, token_mask: NDArray[np.bool_]) -> Array:
        """(H, 2) float64: attention of real queries on later keys, and on keys later than the next one.

        probabilities: (B, H, T, T); token_mask: (B, T). Sums of exact zeros are exactly zero.
        """


def empty_totals(count: int) -> Array:
    """Totals of ``count`` arrays of which nothing has been seen."""
    totals = np.zeros((count, 6))
    totals[:, MINIMUM] = np.inf
    totals[:, MAXIMUM] = -np.inf
    return totals


def best_kernel() -> Kernel:
    """The compiled kernel if it was built, else NumPy."""
    if os.environ.get(KERNEL_VARIABLE) != "numpy":
        try:
            return CompiledKernel()
        except ImportError:  # no compiler when the package was installed
            pass
    return NumpyKernel()


@final
class CompiledKernel:
    """recorder/kernel.c."""

    name = "compiled"

    def __init__(self) -> None:
        """Raises ImportError where the extension was not built."""
        from recorder import _kernel  # an extension module; NumPy does the same without it

        self.add_totals = _kernel.add_totals
        self.dot_and_replace = _kernel.dot_and_replace
        self.square_sums_finite = _kernel.square_sums_finite
        self._future_mass = _kernel.future_mass

    def future_mass(self, probabilities: Array, token_mask: NDArray[np.bool_]) -> Array:
        """As in the protocol."""
        sums = np.zeros((probabilities.shape[1], 2))
        real = np.ascontiguousarray(token_mask)
        self._future_mass(np.ascontiguousarray(probabilities, np.float32), real.view(np.uint8), sums)
        return sums


@final
class NumpyKernel:
    """Small arrays are packed into one chunk and large ones are cut into chunks.

    Each sum of a chunk is one NumPy call for all of its arrays: calls, not arithmetic, are what small
    arrays cost.
    """

    name = "numpy"

    def __init__(self) -> None:
        self._packed = np.empty(_CHUNK, np.float32)
        self._scratch = np.empty(_CHUNK, np.float32)
        self._is_zero = np.empty(_CHUNK, np.bool_)

    def add_totals(self, arrays: list[Array], totals: Array) -> None:
        """As in the protocol."""
        packed: list[tuple[int, Array]] = []  # pieces that share the next chunk, with their array's index
        packed_size = 0
        for index, flat in enumerate(arrays):
            for start in range(0, flat.size, _CHUNK):
                piece = flat[start : start + _CHUNK]
                if piece.size > _CHUNK // 2:
                    self._add(totals, [index], piece, [0])
                    continue
                if packed_size + piece.size > _CHUNK:
                    self._add_packed(totals, packed)
                    packed_size = 0
                packed.append((index, piece))
                packed_size += piece.size
        self._add_packed(totals, packed)

    def dot_and_replace(self, arrays: list[Array], previous: Array) -> float:
        """As in the protocol."""
        flat = np.concatenate(arrays)
        if flat.size != previous.size:
            raise ValueError("previous: expected as many elements as the arrays have")
        product = float(np.dot(flat, previous))
        previous[:] = flat
        return product

    def square_sums_finite(self, arrays: list[Array]) -> bool:
        """As in the protocol."""
        return all(math.isfinite(np.dot(array, array)) for array in arrays)

    def future_mass(self, probabilities: Array, token_mask: NDArray[np.bool_]) -> Array:
        """As in the protocol."""
        batch, heads, length, _ = probabilities.shape
        every_key = np.ones((length, length), probabilities.dtype)
        later_keys = np.stack([np.triu(every_key, k=1 + beyond) for beyond in (0, 1)])  # (2, T, T)
        # A healthy mask leaves exact zeros everywhere, and one matrix-vector product sees that.
        if not (probabilities.reshape(batch * heads, -1) @ later_keys[0].ravel()).any():
            return np.zeros((heads, 2))
        selectors = later_keys * token_mask[:, None, :, None]  # real queries only
        # (B, H, TT) @ (B, TT, 2): one small matrix product for each row of the batch
        sums = probabilities.reshape(batch, heads, -1) @ selectors.reshape(batch, 2, -1).transpose(0, 2, 1)
        mass: Array = sums.sum(axis=0, dtype=np.float64)
        return mass

    def _add_packed(self, totals: Array, packed: list[tuple[int, Array]]) -> None:
        """Add the pieces to their arrays' totals and clear the list."""
        if packed:
            sizes = [piece.size for _, piece in packed]
            chunk = self._packed[: sum(sizes)]
            np.concatenate([piece for _, piece in packed], out=chunk)
            self._add(totals, [index for index, _ in packed], chunk, np.cumsum([0, *sizes[:-1]]))
            packed.clear()

    def _add(self, totals: Array, indices: list[int], chunk: Array, starts: Array | Sequence[int]) -> None:
        """Add the segments of a chunk, which begin at ``starts``, to the totals of their arrays."""
        scratch = self._scratch[: chunk.size]
        sums = np.empty((len(indices), 4))
        sums[:, SUM] = np.add.reduceat(chunk, starts)
        sums[:, SQUARE_SUM] = np.add.reduceat(np.multiply(chunk, chunk, out=scratch), starts)
        # Clearing the sign bit is |x| and turns -0.0 into 0; integers compare faster than floats.
        magnitude = scratch.view(np.int32)
        np.bitwise_and(chunk.view(np.int32), 0x7FFFFFFF, out=magnitude)
        sums[:, ABSOLUTE_SUM] = np.add.reduceat(scratch, starts)
        is_zero = np.equal(magnitude, 0, out=self._is_zero[: chunk.size])
        sums[:, ZERO_COUNT] = np.add.reduceat(is_zero, starts, dtype=np.int32)
        totals[indices, :MINIMUM] += sums
        minimum, maximum = np.minimum.reduceat(chunk, starts), np.maximum.reduceat(chunk, starts)
        totals[indices, MINIMUM] = np.minimum(totals[indices, MINIMUM], minimum)
        totals[indices, MAXIMUM] = np.maximum(totals[indices, MAXIMUM], maximum)
