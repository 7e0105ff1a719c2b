"""The passes over memory that statistics are made of: compiled where possible, else NumPy.

Both do the same sums within the same error bound; recorder/kernel.c is three to twenty times faster.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Protocol, final

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


class Summary(NamedTuple):
    """The statistics of one array, a row that kernels fill; names as in table ``tensors``."""

    element_count: int
    l2_norm: float
    mean: float
    mean_abs: float
    std: float
    min: float
    max: float
    zero_fraction: float
    nan_count: int
    positive_infinity_count: int
    negative_infinity_count: int

    @property
    def finite(self) -> bool:
        """No element is NaN or infinite."""
        return self.nan_count + self.positive_infinity_count + self.negative_infinity_count == 0


STD = Summary._fields.index("std")

_SMALLEST_TRUSTED_SQUARE_SUM = 1e-24
"""Below, squares of float32 values near 1e-19 lose bits to underflow."""
_SMALLEST_TRUSTED_VARIANCE_SHARE = 1 / 64
"""var = mean(x^2) - mean^2 loses log2(mean(x^2) / var) bits; this share leaves at least 17 of 23."""

_SUM, _SQUARE_SUM, _ABSOLUTE_SUM, _ZERO_COUNT, _MINIMUM, _MAXIMUM, _TOTALS = range(7)

KERNEL_VARIABLE = "FLIGHT_RECORDER_KERNEL"
"""Set to "numpy" to do without the compiled kernel."""

_CHUNK = 1 << 16
"""Elements that NumPy works on at a time: a chunk and its scratch copy stay in a 2 MiB cache."""


class Chunk(NamedTuple):
    """Neighbouring arrays, or parts of them, end to end."""

    first: int  # which array begins the chunk
    values: Array
    starts: Array  # where each array begins in the chunk


class Kernel(Protocol):
    """Passes over lists of C-contiguous float32 arrays of any shape."""

    @property
    def name(self) -> str:
        """ "compiled" or "numpy"."""

    @property
    def eager(self) -> bool:
        """One array costs no more than its share of many, so hooks summarise it while it is in the cache."""

    def summarize(self, arrays: list[Array], statistics: Array) -> bool:
        """Fill the (arrays, 11) float64 rows of Summary; whether all of them are to be trusted.

        The std is NaN where a row is not: other dtypes, strided arrays, a value or a square that is not
        finite, squares that underflow.
        """

    def summarize_into(self, array: Array, statistics: Array, row: int) -> bool:
        """Fill one row of (rows, 11) float64; false where it is not to be trusted."""

    def summarize_and_compare(
        self, arrays: list[Array], previous: Array, statistics: Array
    ) -> tuple[float, bool]:
        """The dot product of the arrays, end to end, with ``previous``; and ``summarize``.

        Afterwards ``previous`` holds the arrays. Raises TypeError or BufferError for other than contiguous
        float32 arrays.
        """

    def summarize_differences(self, arrays: list[Array], before: Array, statistics: Array) -> bool:
        """``summarize`` of the arrays, end to end, minus ``before``. Raises the same."""

    def square_sums_finite(self, arrays: list[Array]) -> bool:
        """False when an array holds NaN or infinity, or when its squares overflow float32."""

    def future_mass(self, probabilities: Array, token_mask: NDArray[np.bool_]) -> Array:
        """(H, 2) float64: attention of real queries on later keys, and on keys later than the next one.

        probabilities: (B, H, T, T); token_mask: (B, T). Sums of exact zeros are exactly zero.
        """

    def attention_entropy(self, probabilities: Array, token_mask: NDArray[np.bool_]) -> Array:
        """(H,) float64: sum over real queries with two allowed keys or more of entropy / ln(allowed keys)."""

    def mark_fired(self, outputs: Array, fired: NDArray[np.bool_]) -> None:
        """Set the (units,) flags of units that are not zero on some row of the (tokens, units) outputs."""

    def lanczos(self, matrix: Array, vector: Array, steps: int) -> float:
        """Square root of the largest Ritz value of W'W after 1 to 32 steps from the unit (n,) vector.

        The Ritz vector takes the vector's place. NaN or 0 leaves one that is good for nothing.
        """


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
    eager = True

    def __init__(self) -> None:
        """Raises ImportError where the extension was not built."""
        from recorder import _kernel  # an extension module; NumPy does the same without it

        self.summarize = _kernel.summarize
        self.summarize_into = _kernel.summarize_into
        self.summarize_and_compare = _kernel.summarize_and_compare
        self.summarize_differences = _kernel.summarize_differences
        self.square_sums_finite = _kernel.square_sums_finite
        self._future_mass = _kernel.future_mass
        self._attention_entropy = _kernel.attention_entropy
        self._mark_fired = _kernel.mark_fired
        self.lanczos = _kernel.lanczos

    def future_mass(self, probabilities: Array, token_mask: NDArray[np.bool_]) -> Array:
        """As in the protocol."""
        sums = np.zeros((probabilities.shape[1], 2))
        self._future_mass(*_float32_attention(probabilities, token_mask), sums)
        return sums

    def attention_entropy(self, probabilities: Array, token_mask: NDArray[np.bool_]) -> Array:
        """As in the protocol."""
        sums = np.zeros(probabilities.shape[1])
        self._attention_entropy(*_float32_attention(probabilities, token_mask), sums)
        return sums

    def mark_fired(self, outputs: Array, fired: NDArray[np.bool_]) -> None:
        """As in the protocol."""
        self._mark_fired(np.ascontiguousarray(outputs, np.float32), fired)


def _float32_attention(
    probabilities: Array, token_mask: NDArray[np.bool_]
) -> tuple[Array, NDArray[np.uint8]]:
    real = np.ascontiguousarray(token_mask)
    return np.ascontiguousarray(probabilities, np.float32), real.view(np.uint8)


@final
class NumpyKernel:
    """Small arrays are packed into one chunk and large ones are cut into chunks.

    Each sum of a chunk is one NumPy call for all of its arrays: calls, not arithmetic, are what small
    arrays cost.
    """

    name = "numpy"
    eager = False

    def __init__(self) -> None:
        self._packed_values = np.empty(_CHUNK, np.float32)
        self._scratch = np.empty(_CHUNK, np.float32)
        self._is_zero = np.empty(_CHUNK, np.bool_)

    def summarize(self, arrays: list[Array], statistics: Array) -> bool:
        """As in the protocol."""
        if any(array.dtype != np.float32 for array in arrays):
            statistics[:] = math.nan
            return False
        flat = [array.ravel() for array in arrays]
        sizes = np.array([array.size for array in flat])
        return self._summarize(sizes, self._packed(flat), flat.__getitem__, statistics)

    def summarize_into(self, array: Array, statistics: Array, row: int) -> bool:
        """As in the protocol."""
        return self.summarize([array], statistics[row : row + 1])

    def summarize_and_compare(
        self, arrays: list[Array], previous: Array, statistics: Array
    ) -> tuple[float, bool]:
        """As in the protocol."""
        flat = _end_to_end(arrays, previous)
        product = float(np.dot(flat, previous))
        previous[:] = flat
        return product, self._summarize_parts(flat, arrays, statistics)

    def summarize_differences(self, arrays: list[Array], before: Array, statistics: Array) -> bool:
        """As in the protocol."""
        differences = _end_to_end(arrays, before)
        differences -= before
        return self._summarize_parts(differences, arrays, statistics)

    def square_sums_finite(self, arrays: list[Array]) -> bool:
        """As in the protocol."""
        return all(math.isfinite(np.dot(flat, flat)) for flat in map(np.ravel, arrays))

    def future_mass(self, probabilities: Array, token_mask: NDArray[np.bool_]) -> Array:
        """As in the protocol."""
        batch, heads, length, _ = probabilities.shape
        later_keys = _later_keys(length, probabilities.dtype)
        # A healthy mask leaves exact zeros everywhere, and one matrix-vector product sees that.
        if not (probabilities.reshape(batch * heads, -1) @ later_keys[0].ravel()).any():
            return np.zeros((heads, 2))
        selectors = later_keys * token_mask[:, None, :, None]  # real queries only
        # (B, H, TT) @ (B, TT, 2): one small matrix product for each row of the batch
        sums = probabilities.reshape(batch, heads, -1) @ selectors.reshape(batch, 2, -1).transpose(0, 2, 1)
        mass: Array = sums.sum(axis=0, dtype=np.float64)
        return mass

    def attention_entropy(self, probabilities: Array, token_mask: NDArray[np.bool_]) -> Array:
        """As in the protocol."""
        allowed = np.arange(probabilities.shape[-1]) + 1  # keys that a causal query may see
        rows = entropy_rows(probabilities) / np.log(np.maximum(allowed, 2))  # (B, H, T)
        counted = token_mask & (allowed >= 2)
        sums: Array = np.einsum("bht,bt->h", np.where(counted[:, None], rows, 0.0), counted)
        return sums

    def mark_fired(self, outputs: Array, fired: NDArray[np.bool_]) -> None:
        """As in the protocol."""
        silent = np.flatnonzero(~fired)
        if silent.size:  # most units fire in the first step of a window and need no second look
            candidates = outputs if silent.size > outputs.shape[1] // 4 else outputs[:, silent]
            # Extremes are fast passes, and NaN comes through them: a unit that is NaN is not silent.
            fires = (candidates.max(axis=0, initial=0.0) != 0) | (candidates.min(axis=0, initial=0.0) != 0)
            fired[fires if candidates is outputs else silent[fires]] = True

    def lanczos(self, matrix: Array, vector: Array, steps: int) -> float:
        """As in the protocol."""
        basis = [vector.copy()]
        projected = np.zeros((steps, steps))  # of W'W onto the basis: tridiagonal
        for size in range(1, steps + 1):
            image = matrix @ basis[-1]
            square = float(np.dot(image, image))
            if not math.isfinite(square) or (square == 0.0 and size == 1):
                return 0.0 if square == 0.0 else math.nan
            projected[size - 1, size - 1] = square
            following = matrix.T @ image
            for earlier in (*basis, *basis):  # twice is enough
                following -= np.dot(earlier, following) * earlier
            length = float(np.linalg.norm(following))
            if size == steps or not length > 1e-6 * projected[0, 0]:  # only rounding is left
                break
            projected[size, size - 1] = projected[size - 1, size] = length
            basis.append(following / np.float32(length))
        values, vectors = np.linalg.eigh(projected[:size, :size])
        vector[:] = np.stack(basis, axis=1) @ vectors[:, -1]
        vector /= np.linalg.norm(vector)
        return math.sqrt(values[-1])

    def _summarize_parts(self, flat: Array, arrays: list[Array], statistics: Array) -> bool:
        """Fill the rows of the parts of a flat array that are as large as the arrays."""
        sizes = np.array([array.size for array in arrays])
        ends = np.cumsum(sizes)

        def part(index: int) -> Array:
            return flat[ends[index] - sizes[index] : ends[index]]

        return self._summarize(sizes, _cut(flat, ends), part, statistics)

    def _summarize(
        self, sizes: Array, chunks: Iterable[Chunk], part: Callable[[int], Array], statistics: Array
    ) -> bool:
        """Fill the rows of flat arrays, given in chunks and by index; whether all are to be trusted."""
        nothing = np.array([0, 0, 0, 0, np.inf, -np.inf])  # in the order of the totals
        totals = np.tile(nothing, (len(sizes), 1))
        for chunk in chunks:
            self._add(totals[chunk.first : chunk.first + len(chunk.starts)], chunk.values, chunk.starts)
        totals[sizes == 0] = nothing  # reduceat takes an element for the sum of none
        statistics[:] = _statistics(totals, sizes)
        for index in np.flatnonzero(statistics[:, STD] < 0).tolist():
            statistics[index, STD] = np.std(part(index), dtype=np.float64)
        return not np.isnan(statistics[:, STD]).any()

    def _packed(self, arrays: list[Array]) -> Iterator[Chunk]:
        """Neighbours share a chunk as long as they fit; what is larger is cut where it lies."""
        neighbours: list[Array] = []
        size = 0
        for index, array in enumerate(arrays):
            if size + array.size > _CHUNK:
                yield from self._pack(index - len(neighbours), neighbours)
                neighbours, size = [], 0
            neighbours.append(array)
            size += array.size
        yield from self._pack(len(arrays) - len(neighbours), neighbours)

    def _pack(self, first: int, arrays: list[Array]) -> Iterator[Chunk]:
        """Chunks of arrays that fit into one, from index ``first`` on, or of one array of any size."""
        if len(arrays) == 1:
            for begin in range(0, arrays[0].size, _CHUNK):
                yield Chunk(first, arrays[0][begin : begin + _CHUNK], _AT_ZERO)
        elif arrays:
            ends = np.cumsum([array.size for array in arrays])
            values = np.concatenate(arrays, out=self._packed_values[: ends[-1]])
            for chunk in _cut(values, ends):
                yield chunk._replace(first=first + chunk.first)

    def _add(self, totals: Array, chunk: Array, starts: Array) -> None:
        """Add the segments of a chunk, which begin at ``starts``, to the totals of their arrays."""
        scratch = self._scratch[: chunk.size]
        totals[:, _SUM] += np.add.reduceat(chunk, starts)
        totals[:, _SQUARE_SUM] += np.add.reduceat(np.multiply(chunk, chunk, out=scratch), starts)
        totals[:, _ABSOLUTE_SUM] += np.add.reduceat(np.abs(chunk, out=scratch), starts)
        is_zero = np.equal(chunk, 0, out=self._is_zero[: chunk.size])
        totals[:, _ZERO_COUNT] += np.add.reduceat(is_zero, starts, dtype=np.int32)
        for column, extreme in ((_MINIMUM, np.minimum), (_MAXIMUM, np.maximum)):
            extreme(totals[:, column], extreme.reduceat(chunk, starts), out=totals[:, column])


_AT_ZERO = np.zeros(1, np.int64)


def _cut(flat: Array, ends: Array) -> Iterator[Chunk]:
    """Chunks of the end-to-end arrays that end at ``ends``; an empty array is a part of none."""
    begins = np.concatenate([[0], ends[:-1]])
    for begin in range(0, flat.size, _CHUNK):
        end = min(begin + _CHUNK, flat.size)
        first, last = np.searchsorted(ends, [begin, end - 1], side="right")
        yield Chunk(first, flat[begin:end], np.maximum(begins[first : last + 1], begin) - begin)


def _statistics(totals: Array, element_counts: Array) -> Array:
    """(arrays, 11) rows of Summary; std is NaN in a row that is not to be trusted, -1 where it cancelled."""
    elements = np.maximum(element_counts, 1)
    means = totals / elements[:, None]
    mean, mean_square = means[:, _SUM], means[:, _SQUARE_SUM]
    variance = mean_square - mean * mean
    trusted = (totals[:, _SQUARE_SUM] > _SMALLEST_TRUSTED_SQUARE_SUM) & (mean_square < np.inf)
    trusted |= totals[:, _ZERO_COUNT] == elements  # all zero: nothing to lose, and common in gradients
    cancelled = variance < _SMALLEST_TRUSTED_VARIANCE_SHARE * mean_square
    statistics = np.zeros((len(totals), len(Summary._fields)))
    statistics[:, 0] = element_counts
    statistics[:, 1] = np.sqrt(totals[:, _SQUARE_SUM])
    statistics[:, 2] = mean
    statistics[:, 3] = means[:, _ABSOLUTE_SUM]
    statistics[:, STD] = np.where(trusted, np.where(cancelled, -1, np.sqrt(variance)), np.nan)
    statistics[:, 5:7] = totals[:, _MINIMUM : _MAXIMUM + 1]
    statistics[:, 7] = means[:, _ZERO_COUNT]
    return statistics


def _end_to_end(arrays: list[Array], other: Array) -> Array:
    """The arrays as one flat array. Raises as the compiled kernel does when ``other`` does not fit."""
    if any(array.dtype != np.float32 for array in arrays):
        raise TypeError("expected C-contiguous float32 arrays")
    flat: Array = np.concatenate([array.ravel() for array in arrays])
    if flat.size != other.size:
        raise ValueError("expected a flat buffer of as many elements as the arrays have")
    return flat


@functools.lru_cache(maxsize=64)  # lengths of batches
def _later_keys(length: int, dtype: np.dtype[Any]) -> Array:
    """(2, T, T): 1 where a key is later than the query, and where it is later than the next one."""
    every_key = np.ones((length, length), dtype)
    later_keys = np.stack([np.triu(every_key, k=1 + beyond) for beyond in (0, 1)])
    later_keys.setflags(write=False)
    return later_keys


def entropy_rows(probabilities: Array) -> Array:
    """-sum p ln p over the last axis, with 0 ln 0 = 0, in nats."""
    logarithm = np.log(np.where(probabilities > 0, probabilities, 1.0))
    entropy: Array = -np.einsum("...k,...k->...", probabilities, logarithm, dtype=np.float64)
    return entropy
