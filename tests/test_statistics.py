"""Summaries against float64 references, with the error bounds that the formulas give."""

import math
from collections.abc import Iterator

import numpy as np
import pytest

from recorder.kernel import CompiledKernel, Kernel, NumpyKernel
from recorder.statistics import (
    SpectralNorm,
    all_finite,
    attention_entropy,
    attention_mass,
    attention_max_abs_logit,
    content_hash,
    summarize,
    summarize_all,
)

EPS32 = float(np.finfo(np.float32).eps)


@pytest.fixture(autouse=True)
def silent_floating_point() -> Iterator[None]:
    """As the recorder calls these functions."""
    with np.errstate(all="ignore"):
        yield


@pytest.fixture(params=[CompiledKernel, NumpyKernel])
def kernel(request: pytest.FixtureRequest) -> Kernel:
    """Both implementations; the compiled one is skipped where it was not built."""
    try:
        return request.param()
    except ImportError:
        pytest.skip("no compiled kernel")


def summation_bound(count: int) -> float:
    """Relative error bound of a float32 sum of positive terms, for both kernels.

    NumPy adds blocks of 128 with 8 running sums (16 + 3 roundings for a term) and the blocks pairwise
    (log2 of their number); the compiled kernel adds 32 vectors before it goes to float64. One more
    rounding makes the term itself, one the cast of the result
    (Higham, Accuracy and Stability of Numerical Algorithms, section 4.2).
    """
    return max(21 + math.log2(max(count / 128, 1)), 34) * EPS32


@pytest.mark.parametrize("shape", [(1,), (7,), (64, 256), (3, 5, 40), (70_000,)])
@pytest.mark.parametrize("scale", [1e-30, 1e-6, 1.0, 1e6, 1e30])
def test_summary_agrees_with_float64(shape: tuple[int, ...], scale: float, kernel: Kernel) -> None:
    """Every statistic of a finite float32 array is within its derived bound of the float64 one."""
    array = (np.random.default_rng(0).standard_normal(shape) * scale).astype(np.float32)
    wide = array.astype(np.float64)
    summary = summarize(array, kernel)
    bound = summation_bound(array.size)
    assert summary.element_count == array.size
    assert summary.l2_norm == pytest.approx(np.sqrt((wide**2).sum()), rel=bound)
    assert summary.mean_abs == pytest.approx(np.abs(wide).mean(), rel=bound)
    assert summary.mean == pytest.approx(wide.mean(), abs=bound * np.abs(wide).mean())
    # The variance is trusted only while it is at least 1/64 of the mean square: 64 times the bound.
    assert summary.std == pytest.approx(wide.std(), rel=64 * bound, abs=1e-300)
    assert (summary.min, summary.max) == (wide.min(), wide.max())
    assert summary.finite


def test_arrays_summarised_together_do_not_mix(kernel: Kernel) -> None:
    """Packing small arrays into a chunk and cutting large ones gives each the summary it has alone."""
    generator = np.random.default_rng(2)
    sizes = [5, 40_000, 1, 70_000, 200_000, 33_000, 64, 31_000]
    arrays = [generator.standard_normal(size).astype(np.float32) for size in sizes]
    arrays.append(np.array([np.nan, 1.0], np.float32))
    together = summarize_all(arrays, kernel)
    alone = np.array([summarize(array, kernel) for array in arrays])
    assert together[:, [0, 5, 6, 7, 8]] == pytest.approx(alone[:, [0, 5, 6, 7, 8]], abs=0, nan_ok=True)
    assert together == pytest.approx(alone, rel=64 * summation_bound(max(sizes)), abs=EPS32, nan_ok=True)


def test_zeros_of_either_sign_are_counted(kernel: Kernel) -> None:
    """A dropout mask times a negative value gives -0.0, which is a zero like any other."""
    array = np.array([0.0, -0.0, 1.0, -2.0], np.float32)
    assert summarize(array, kernel).zero_fraction == 0.5


def test_non_finite_elements_are_counted_and_left_out_of_the_moments(kernel: Kernel) -> None:
    """NaN and both infinities have a column each; moments are over what is finite."""
    array = np.array([np.nan, np.inf, np.inf, -np.inf, 3.0, 5.0], np.float32)
    summary = summarize(array, kernel)
    assert (summary.nan_count, summary.positive_infinity_count, summary.negative_infinity_count) == (1, 2, 1)
    assert (summary.mean, summary.min, summary.max, summary.element_count) == (4.0, 3.0, 5.0, 6)
    assert not summary.finite


def test_an_array_without_finite_elements_has_nan_moments(kernel: Kernel) -> None:
    """Zero would be a lie: nothing finite was there to be averaged."""
    summary = summarize(np.full(3, np.nan, np.float32), kernel)
    assert math.isnan(summary.mean) and math.isnan(summary.l2_norm) and summary.nan_count == 3


def test_values_whose_squares_leave_float32_are_still_measured(kernel: Kernel) -> None:
    """1e30 squared overflows float32 and 1e-30 squared underflows; the norm must do neither."""
    for value in (1e30, 1e-30):
        summary = summarize(np.full(4, value, np.float32), kernel)
        assert summary.l2_norm == pytest.approx(2 * value, rel=4 * EPS32)


def test_the_spread_of_a_large_constant_survives_cancellation(kernel: Kernel) -> None:
    """std of 1000 +- 0.01 is not lost in mean(x^2) - mean(x)^2."""
    array = np.array([1000.0, 1000.02] * 500, np.float32)
    assert summarize(array, kernel).std == pytest.approx(array.astype(np.float64).std(), rel=1e-12)


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_other_float_dtypes_take_the_reference_path(dtype: type, kernel: Kernel) -> None:
    """A half or double array is summarised in float64."""
    array = np.array([1.0, -2.0, 0.5], dtype)
    summary = summarize(array, kernel)
    assert (summary.max, summary.min, summary.mean_abs) == (1.0, -2.0, 3.5 / 3)


def test_all_finite_is_not_fooled_by_overflow(kernel: Kernel) -> None:
    """Squares that overflow are no reason to call finite values infinite."""
    assert all_finite([np.full(8, 1e30, np.float32)], kernel)
    assert not all_finite([np.array([1.0, np.nan], np.float32)], kernel)


def test_power_iteration_is_a_lower_bound_that_converges() -> None:
    """The estimate never exceeds the largest singular value and reaches it within 2e-3 when warm."""
    matrix = np.random.default_rng(1).standard_normal((64, 256)).astype(np.float32)
    exact = float(np.linalg.svd(matrix.astype(np.float64), compute_uv=False)[0])
    iteration = SpectralNorm()
    estimates = [iteration.estimate(matrix) for _ in range(100)]
    # A float32 matrix-vector product errs by at most sqrt(n) roundings in the norm.
    assert max(estimates) <= exact * (1 + 16 * EPS32)
    assert estimates[-1] >= exact * (1 - 2e-3)


def test_the_upper_bound_is_certified_and_tight() -> None:
    """Gram squaring bounds the spectral norm from above within n^(1/2^(k+1)) - 1."""
    for rows, columns in ((64, 64), (64, 256), (128, 32)):
        matrix = np.random.default_rng(rows).standard_normal((rows, columns)).astype(np.float32)
        exact = float(np.linalg.svd(matrix.astype(np.float64), compute_uv=False)[0])
        bound = SpectralNorm().upper_bound(matrix)
        smaller_side = min(rows, columns)
        assert exact * (1 - 1e-12) <= bound <= exact * smaller_side ** (0.5**12) * (1 + 1e-12)


def test_spectral_norm_of_zero_and_of_nan() -> None:
    """A zero matrix has norm 0; a NaN in it is passed on, not hidden."""
    iteration = SpectralNorm()
    assert iteration.estimate(np.zeros((3, 4), np.float32)) == 0.0
    assert math.isnan(iteration.estimate(np.full((3, 4), np.nan, np.float32)))
    assert iteration.upper_bound(np.zeros((3, 4), np.float32)) == 0.0


def test_equal_bytes_hash_equal_and_shape_counts() -> None:
    """The hash depends on bytes, dtype and shape, and on nothing else."""
    array = np.arange(6, dtype=np.float32)
    assert content_hash(array) == content_hash(array.copy())
    assert content_hash(array) != content_hash(array.reshape(2, 3))
    assert content_hash(array) != content_hash(array.view(np.int32))


def causal_attention(lengths: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Uniform causal attention (B, 1, T, T) and the mask of real tokens (B, T)."""
    longest = max(lengths)
    probabilities = np.tri(longest) / np.arange(1, longest + 1)[:, None]
    token_mask = np.arange(longest) < np.array(lengths)[:, None]
    return np.tile(probabilities, (len(lengths), 1, 1, 1)).astype(np.float32), token_mask


def test_a_causal_mask_has_exactly_no_future_mass(kernel: Kernel) -> None:
    """Zeros sum to zero, so a single positive value is proof."""
    mass = attention_mass(*causal_attention([5, 3]), kernel)
    assert (mass.future_mass[0], mass.future_mass_beyond_next[0], mass.first_row_entropy[0]) == (
        0.0,
        0.0,
        0.0,
    )


def test_future_mass_is_the_mean_over_real_queries(kernel: Kernel) -> None:
    """Uniform attention over 2 keys in a 2-token row gives query 0 half of its mass to key 1."""
    probabilities = np.full((1, 1, 3, 3), 1.0, np.float32)
    probabilities[0, 0, :2] = [0.5, 0.5, 0.0]
    token_mask = np.array([[True, True, False]])
    mass = attention_mass(probabilities, token_mask, kernel)
    assert mass.future_mass[0] == 0.25  # query 0: .5, query 1: 0, query 2 is padding
    assert mass.future_mass_beyond_next[0] == 0.0
    assert mass.first_row_entropy[0] == pytest.approx(math.log(2), rel=1e-6)


def test_uniform_causal_attention_has_entropy_one() -> None:
    """Entropy is measured in units of ln(allowed keys), over rows with a choice."""
    # ln is within 1 ulp and each p ln p adds one rounding: 8 float32 roundings are generous for T = 5.
    assert attention_entropy(*causal_attention([5, 3]))[0] == pytest.approx(1.0, abs=8 * EPS32)


def test_the_largest_logit_ignores_padding() -> None:
    """A huge logit at a padded key never enters the model, so it is not evidence."""
    logits = np.zeros((1, 1, 2, 2), np.float32)
    logits[0, 0, 0, 0] = -7.0
    logits[0, 0, 0, 1] = 99.0
    assert attention_max_abs_logit(logits, np.array([[True, False]]))[0] == 7.0
