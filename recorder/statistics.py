"""Arrays to summary columns: moments, extremes, zeros, non-finite counts, spectral norms and hashes.

Everything is over finite elements; what is not finite is counted apart. That an array holds no NaN and
no infinity costs nothing to know: a single one makes the sum of squares non-finite.
Callers silence NumPy's floating-point warnings around a whole step: once is cheaper than per array.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from recorder.kernel import STD, Kernel, Summary, entropy_rows

Array = NDArray[Any]


def summarize(array: Array, kernel: Kernel) -> Summary:
    """Summary of one array of any shape and float dtype."""
    return Summary(*summarize_all([array], kernel)[0].tolist())


def summarize_all(arrays: Sequence[Array], kernel: Kernel) -> Array:
    """(arrays, statistics) float64, columns in the order of Summary; any shapes and float dtypes.

    Moments of float32 input are float32 sums of a few terms and float64 sums of these;
    tests/test_statistics.py derives the error bound. Arrays that are not float32, not finite, or
    badly conditioned are done in float64. Without a finite element the moments are NaN.
    """
    statistics = np.empty((len(arrays), len(Summary._fields)))
    if not kernel.summarize(list(arrays), statistics):
        replace_doubtful(statistics, arrays)
    return statistics


def replace_doubtful(statistics: Array, arrays: Sequence[Array]) -> None:
    """Fill again the rows that a kernel does not trust."""
    for index in np.flatnonzero(np.isnan(statistics[:, STD])).tolist():
        statistics[index] = summarize_slowly(arrays[index])


def summarize_slowly(array: Array) -> Summary:
    """The reference: float64 throughout, non-finite elements counted and left out."""
    values = array.astype(np.float64).ravel()
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
    try:
        if kernel.square_sums_finite(list(arrays)):
            return True
    except (TypeError, BufferError):  # other dtypes, strided arrays
        pass
    return all(bool(np.isfinite(array).all()) for array in arrays)


class SpectralNorm:
    """Largest singular value of one matrix over time, by Lanczos iteration warm-started from the last call.

    The estimate is the largest Ritz value of a small subspace, so it does not exceed the true value by more
    than float32 rounding. Weights move little between two calls, so four products with W'W keep up where
    power iteration, which forgets all but the last product, lags by two percent; the first call takes
    ``cold_steps``. Source: Golub & Van Loan, Matrix Computations, section 10.1.
    """

    def __init__(self, kernel: Kernel, cold_steps: int = 24, warm_steps: int = 4) -> None:
        self._kernel = kernel
        self._vector: Array | None = None
        self._cold_steps = cold_steps
        self._warm_steps = warm_steps

    def estimate(self, matrix: Array) -> float:
        """Lower bound of the largest singular value of a finite (m, n) matrix; NaN when not finite."""
        steps = self._warm_steps
        if self._vector is None or self._vector.size != matrix.shape[1]:
            self._vector = _start(matrix.shape[1])
            steps = self._cold_steps
        value = self._kernel.lanczos(np.ascontiguousarray(matrix, np.float32), self._vector, steps)
        if value == 0.0 or not math.isfinite(value):
            self._vector = None
            return 0.0 if value == 0.0 else math.nan
        return value

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


def _start(size: int) -> Array:
    """(n,) float32 unit vector."""
    # A fixed generator of its own: a recorder must not touch the training's random state.
    vector = np.random.default_rng(size).standard_normal(size, np.float32)
    unit: Array = vector / np.linalg.norm(vector)
    return unit


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


ATTENTION_MASS = ("future_mass", "future_mass_beyond_next", "first_row_entropy")
"""Columns of ``attention_mass``; names as in table ``attention``."""


def attention_mass(probabilities: Array, token_mask: NDArray[np.bool_], kernel: Kernel) -> Array:
    """(H, 3) float64 in the order of ATTENTION_MASS: attention on later keys, entropy in nats of query 0.

    probabilities: (B, H, T, T) query x key; token_mask: (B, T). Means are over real queries.
    Sums of exact zeros are exactly zero, so ``future_mass > 0`` is proof, not a tolerance.
    """
    mass = np.zeros((probabilities.shape[1], len(ATTENTION_MASS)))
    sums = kernel.future_mass(probabilities, token_mask)
    if sums.any():  # NaN counts as true. A causal query 0 sees one key, so it has no entropy
        mass[:, :2] = sums / max(int(token_mask.sum()), 1)
        mass[:, 2] = entropy_rows(probabilities[token_mask[:, 0], :, 0]).mean(axis=0)
    return mass


def attention_entropy(probabilities: Array, token_mask: NDArray[np.bool_], kernel: Kernel) -> Array:
    """(H,) mean over real queries of the entropy / ln(allowed keys), causal rows with >= 2 keys."""
    counted = int(token_mask[:, 1:].sum())
    return kernel.attention_entropy(probabilities, token_mask) / max(counted, 1)


def attention_max_abs_logit(logits: Array, token_mask: NDArray[np.bool_]) -> Array:
    """(H,) largest absolute logit between a real query and a real key; logits: (B, H, T, T)."""
    real = token_mask[:, None, :, None] & token_mask[:, None, None, :]
    magnitudes = np.abs(logits)
    # A maximum with ``where``, or over the batch first, takes twice as long.
    np.copyto(magnitudes, 0.0, where=~real)
    largest: Array = magnitudes.reshape(*magnitudes.shape[:2], -1).max(axis=2).max(axis=0)
    return largest
