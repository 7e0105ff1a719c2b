"""Arrays to summary columns: moments, extremes, zeros, non-finite counts, spectral norms and hashes.

Everything is over finite elements; what is not finite is counted apart. That an array holds no NaN and
no infinity costs nothing to know: a single one makes the sum of squares non-finite.
Callers silence NumPy's floating-point warnings around a whole step: once is cheaper than per array.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from recorder.kernel import (
    ABSOLUTE_SUM,
    MAXIMUM,
    MINIMUM,
    SQUARE_SUM,
    SUM,
    ZERO_COUNT,
    Kernel,
    empty_totals,
)

Array = NDArray[Any]

# A float32 sum of squares is trusted between these: below, squares of float32 values near 1e-19 lose
# bits to underflow; above, they may have overflowed. Outside, the array is summarised in float64.
_SMALLEST_TRUSTED_SQUARE_SUM = 1e-24
# var = mean(x^2) - mean^2 loses log2(mean(x^2) / var) bits; a share of 1/64 leaves at least 17 of 23.
_SMALLEST_TRUSTED_VARIANCE_SHARE = 1 / 64


class Summary(NamedTuple):
    """The statistics of one array; names as in table ``tensors``."""

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


_STD = Summary._fields.index("std")


def summarize(array: Array, kernel: Kernel) -> Summary:
    """Summary of one array of any shape and float dtype."""
    return Summary(*summarize_all([array], kernel)[0].tolist())


def summarize_all(arrays: Sequence[Array], kernel: Kernel) -> Array:
    """(arrays, statistics) float64, columns in the order of Summary; any shapes and float dtypes.

    Moments of float32 input are float32 sums of a few terms and float64 sums of these;
    tests/test_statistics.py derives the error bound. Arrays that are not float32, not finite, or
    badly conditioned are done in float64. Without a finite element the moments are NaN.
    """
    flat_arrays = [array if array.ndim == 1 else array.ravel() for array in arrays]
    totals = empty_totals(len(arrays))
    if all(flat.dtype == np.float32 and flat.flags.c_contiguous for flat in flat_arrays):
        kernel.add_totals(flat_arrays, totals)
        statistics = _statistics(totals, np.array([max(flat.size, 1) for flat in flat_arrays], np.float64))
    else:
        statistics = np.full((len(arrays), len(Summary._fields)), np.nan)
    for index in np.flatnonzero(np.isnan(statistics[:, _STD])).tolist():
        if totals[index, SQUARE_SUM] > _SMALLEST_TRUSTED_SQUARE_SUM and statistics[index, 1] < np.inf:
            # Only the spread is lost in cancellation: gains near 1, biases near a constant.
            statistics[index, _STD] = np.std(flat_arrays[index], dtype=np.float64)
        else:
            statistics[index] = _summarize_slowly(flat_arrays[index])
    return statistics


def _statistics(totals: Array, element_count: Array) -> Array:
    """(arrays, statistics) in the order of Summary; NaN std marks a row that is not to be trusted."""
    sums = totals / element_count[:, None]
    mean, mean_square = sums[:, SUM], sums[:, SQUARE_SUM]
    variance = mean_square - mean * mean
    trusted = (
        (totals[:, SQUARE_SUM] > _SMALLEST_TRUSTED_SQUARE_SUM)
        & (mean_square < np.inf)
        & (variance >= _SMALLEST_TRUSTED_VARIANCE_SHARE * mean_square)
    )
    trusted |= totals[:, ZERO_COUNT] == element_count  # all zero: nothing to lose, and common in gradients
    statistics = np.zeros((len(totals), len(Summary._fields)))
    statistics[:, 0] = element_count
    statistics[:, 1] = np.sqrt(totals[:, SQUARE_SUM])
    statistics[:, 2] = mean
    statistics[:, 3] = sums[:, ABSOLUTE_SUM]
    statistics[:, _STD] = np.where(trusted, np.sqrt(variance), np.nan)
    statistics[:, 5] = totals[:, MINIMUM]
    statistics[:, 6] = totals[:, MAXIMUM]
    statistics[:, 7] = sums[:, ZERO_COUNT]
    return statistics


def _summarize_slowly(flat: Array) -> Summary:
    """The reference: float64 throughout, non-finite elements counted and left out."""
    values = flat.astype(np.float64)
    finite = values[np.isfinite(values)]
    counts = (
        int(np.count_nonzero(np.isnan(values))),
        int(np.count_nonzero(values == np.inf)),
        int(np.count_nonzero(values == -np.inf)),
    )
    if finite.size == 0:
        return Summary(values.size, *(math.nan,) * 7, *counts)
    return Summary(
        values.size,
        float(np.sqrt(np.dot(finite, finite))),
        float(finite.mean()),
        float(np.abs(finite).mean()),
        float(finite.std()),
        float(finite.min()),
        float(finite.max()),
        float(np.count_nonzero(finite == 0)) / finite.size,
        *counts,
    )


def all_finite(arrays: Sequence[Array], kernel: Kernel) -> bool:
    """No element is NaN or infinite. One streaming pass, two when squares overflow."""
    flat = [array.ravel() for array in arrays]
    if all(array.dtype == np.float32 for array in flat) and kernel.square_sums_finite(flat):
        return True
    return all(bool(np.isfinite(array).all()) for array in flat)


class SpectralNorm:
    """Largest singular value of one matrix over time, by power iteration warm-started from the last call.

    The estimate is |W v| for a unit vector v, so it never exceeds the true value. Weights move little
    between two calls, so two iterations keep up; the first call takes ``cold_iterations``.
    Source: Golub & Van Loan, Matrix Computations, section 8.2.
    """

    def __init__(self, cold_iterations: int = 60, warm_iterations: int = 2) -> None:
        self._vector: Array | None = None
        self._cold_iterations = cold_iterations
        self._warm_iterations = warm_iterations

    def estimate(self, matrix: Array) -> float:
        """Lower bound of the largest singular value of a finite (m, n) matrix; NaN when not finite."""
        iterations = self._warm_iterations
        if self._vector is None or self._vector.size != matrix.shape[1]:
            self._restart(matrix.shape[1], matrix.dtype)
            iterations = self._cold_iterations
        value = 0.0
        for _ in range(iterations):
            image = matrix @ self._vector
            value = float(np.linalg.norm(image))
            if value == 0.0 or not math.isfinite(value):
                self._vector = None
                return 0.0 if value == 0.0 else math.nan
            back = matrix.T @ image
            self._vector = back / np.linalg.norm(back)
        return float(np.linalg.norm(matrix @ self._vector))

    def upper_bound(self, matrix: Array, squarings: int = 11) -> float:
        """Certified upper bound of the largest singular value; restarts the iteration when it lags.

        trace(G^(2^k))^(1/2^k) >= lambda_max(G) for the Gram matrix G, within a relative
        n^(1/2^(k+1)) - 1 of the singular value: 1.2e-3 at n = 128, k = 11. Float64, rescaled each time.
        """
        wide = matrix.astype(np.float64)
        gram = wide @ wide.T if wide.shape[0] <= wide.shape[1] else wide.T @ wide
        log_scale, weight = 0.0, 1.0
        for _ in range(squarings):
            scale = float(np.trace(gram))
            if scale <= 0.0 or not math.isfinite(scale):
                return 0.0 if scale == 0.0 else math.nan
            log_scale += weight * math.log(scale)
            gram = gram / scale
            gram = gram @ gram
            weight /= 2.0
        bound = math.exp((log_scale + weight * math.log(float(np.trace(gram)))) / 2.0)
        relative_width = gram.shape[0] ** (0.5 * weight) - 1.0
        if self._vector is not None:
            estimate = float(np.linalg.norm(matrix @ self._vector))
            if estimate * (1.0 + 2.0 * relative_width) < bound / (1.0 + relative_width):
                self._vector = None  # stuck beside the leading direction: start again next time
        return bound

    def _restart(self, size: int, dtype: np.dtype[Any]) -> None:
        # A fixed generator of its own: a recorder must not touch the training's random state.
        vector = np.random.default_rng(size).standard_normal(size).astype(dtype)
        self._vector = vector / np.linalg.norm(vector)


def content_hash(*arrays: Array) -> int:
    """64-bit XXH3 hash of the bytes of arrays, in order; dtype and shape count too."""
    digest = xxhash.xxh3_64()  # 50 times faster than BLAKE2b; nobody attacks a training log
    for array in arrays:
        digest.update(f"{array.dtype.str}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.intdigest()


def combined_hash(hashes: Iterable[int]) -> int:
    """64-bit hash of a sequence of 64-bit hashes."""
    return content_hash(np.fromiter(hashes, np.uint64))


class AttentionSummary(NamedTuple):
    """Per-head statistics, each (H,) float64; names as in table ``attention``."""

    future_mass: Array
    future_mass_beyond_next: Array
    first_row_entropy: Array


def attention_mass(probabilities: Array, token_mask: NDArray[np.bool_], kernel: Kernel) -> AttentionSummary:
    """Attention on later keys, and the entropy in nats of query 0, per head.

    probabilities: (B, H, T, T) query x key; token_mask: (B, T). Means are over real queries.
    Sums of exact zeros are exactly zero, so ``future_mass > 0`` is proof, not a tolerance.
    """
    sums = kernel.future_mass(probabilities, token_mask)
    if not sums.any():  # causal (NaN would count as true): query 0 sees one key, so it has no entropy
        zeros = np.zeros(len(sums))
        return AttentionSummary(zeros, zeros, zeros)
    mass = sums / max(int(token_mask.sum()), 1)
    first_rows = probabilities[token_mask[:, 0], :, 0]  # (B, H, T)
    return AttentionSummary(mass[:, 0], mass[:, 1], _entropy_rows(first_rows).mean(axis=0))


def attention_entropy(probabilities: Array, token_mask: NDArray[np.bool_]) -> Array:
    """(H,) mean over real queries of the entropy / ln(allowed keys), causal rows with >= 2 keys."""
    length = probabilities.shape[-1]
    allowed = np.arange(length) + 1  # keys that a causal query may see
    rows = _entropy_rows(probabilities)  # (B, H, T)
    normalised: Array = rows / np.log(np.maximum(allowed, 2))
    weights = (token_mask & (allowed >= 2)).astype(np.float64)
    mean: Array = np.einsum("bht,bt->h", np.where(allowed >= 2, normalised, 0.0), weights)
    mean /= max(weights.sum(), 1.0)
    return mean


def attention_max_abs_logit(logits: Array, token_mask: NDArray[np.bool_]) -> Array:
    """(H,) largest absolute logit between a real query and a real key."""
    real = token_mask[:, None, :, None] & token_mask[:, None, None, :]
    largest: Array = np.max(np.abs(logits), axis=(0, 2, 3), where=real, initial=0.0)
    return largest


def _entropy_rows(probabilities: Array) -> Array:
    """-sum p ln p over the last axis, with 0 ln 0 = 0, in nats."""
    logarithm = np.log(np.where(probabilities > 0, probabilities, 1.0))
    entropy: Array = -np.einsum("...k,...k->...", probabilities, logarithm, dtype=np.float64)
    return entropy
