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


def test_an_empty_array_takes_nothing_from_its_neighbours(kernel: Kernel) -> None:
    """A module without units has a gradient of no elements: a row without moments, wherever it stands."""
    arrays = [np.full(size, size, np.float32) for size in (0, 5, 0, 0, 7, 0)]
    statistics = np.empty((6, 11))
    kernel.summarize_differences(arrays, np.zeros(12, np.float32), statistics)
    for rows in (statistics, summarize_all(arrays, kernel)):
        assert rows[:, 0].tolist() == [0, 5, 0, 0, 7, 0]
        assert rows[[1, 4], 2:7].tolist() == [[5, 5, 0, 5, 5], [7, 7, 0, 7, 7]]
        assert np.isnan(rows[[0, 2, 3, 5], 4]).all()


def test_differences_are_those_of_the_subtracted_arrays(kernel: Kernel) -> None:
    """Arrays minus a flat buffer have the statistics of their differences, also where the spread cancels."""
    generator = np.random.default_rng(3)
    arrays = [generator.standard_normal(shape).astype(np.float32) for shape in ((5,), (40, 30), (64,))]
    arrays[2] += np.float32(1000)
    before = np.concatenate([array.ravel() for array in arrays])
    before[:1205] *= np.float32(0.9)
    before[1205:] = 0
    differences = np.split(np.concatenate([array.ravel() for array in arrays]) - before, [5, 1205])
    statistics = np.empty((3, 11))
    kernel.summarize_differences(arrays, before, statistics)
    assert statistics == pytest.approx(summarize_all(differences, kernel), rel=1e-15)


def test_comparing_gives_the_product_and_keeps_the_arrays(kernel: Kernel) -> None:
    """The rows are those without comparing; the buffer holds the arrays afterwards, end to end."""
    generator = np.random.default_rng(4)
    arrays = [generator.standard_normal(shape).astype(np.float32) for shape in ((3,), (70, 40), (129,))]
    flat = np.concatenate([array.ravel() for array in arrays])
    previous = generator.standard_normal(flat.size).astype(np.float32)
    exact = np.dot(flat.astype(np.float64), previous.astype(np.float64))
    magnitude = np.dot(np.abs(flat), np.abs(previous))
    statistics = np.empty((3, 11))
    product, trusted = kernel.summarize_and_compare(arrays, previous, statistics)
    assert trusted
    # Of two terms of any sign the sum of magnitudes bounds what rounding can do.
    assert product == pytest.approx(exact, abs=summation_bound(flat.size) * float(magnitude))
    assert (previous == flat).all()
    assert (statistics == summarize_all(arrays, kernel)).all()


def test_comparing_refuses_what_it_cannot_compare(kernel: Kernel) -> None:
    """Another dtype and another number of elements are errors, never a wrong product."""
    statistics = np.empty((1, 11))
    with pytest.raises(TypeError, match="float32"):
        kernel.summarize_and_compare([np.zeros(4)], np.zeros(4, np.float32), statistics)
    for size in (3, 5):
        with pytest.raises(ValueError, match="flat buffer"):
            kernel.summarize_and_compare([np.zeros(4, np.float32)], np.zeros(size, np.float32), statistics)


def test_a_strided_array_is_summarised_like_its_copy(kernel: Kernel) -> None:
    """A transposed or sliced gradient costs a copy, no error."""
    array = np.random.default_rng(5).standard_normal((30, 20)).astype(np.float32)
    assert summarize(array.T, kernel).l2_norm == pytest.approx(
        summarize(array, kernel).l2_norm, rel=summation_bound(array.size)
    )


@pytest.mark.parametrize("tokens", [1, 31, 32, 100])
@pytest.mark.parametrize("units", [1, 15, 16, 17, 40])
def test_every_unit_that_fires_is_marked_and_no_other(tokens: int, units: int, kernel: Kernel) -> None:
    """One firing token is enough, wherever it stands; what fired before stays marked."""
    generator = np.random.default_rng(units)
    outputs = np.zeros((tokens, units), np.float32)
    firing = generator.random(units) < 0.5
    outputs[generator.integers(tokens, size=units), np.arange(units)] = np.where(firing, 0.1, -0.0)
    fired = generator.random(units) < 0.2
    expected = fired | firing
    kernel.mark_fired(outputs, fired)
    assert fired.tolist() == expected.tolist()


def test_a_unit_that_is_nan_is_not_silent(kernel: Kernel) -> None:
    """A NaN is a fault of its own; calling the unit dead would hide it."""
    fired = np.zeros(2, np.bool_)
    kernel.mark_fired(np.array([[np.nan, 0.0]], np.float32), fired)
    assert fired.tolist() == [True, False]


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


def test_the_spectral_norm_is_a_lower_bound_that_converges(kernel: Kernel) -> None:
    """The estimate never exceeds the largest singular value and reaches it within 2e-3 when warm."""
    matrix = np.random.default_rng(1).standard_normal((64, 256)).astype(np.float32)
    exact = float(np.linalg.svd(matrix.astype(np.float64), compute_uv=False)[0])
    iteration = SpectralNorm(kernel)
    estimates = [iteration.estimate(matrix) for _ in range(100)]
    # A float32 matrix-vector product errs by at most sqrt(n) roundings in the norm.
    assert max(estimates) <= exact * (1 + 16 * EPS32)
    assert estimates[-1] >= exact * (1 - 2e-3)


def test_the_spectral_norm_follows_a_matrix_that_moves(kernel: Kernel) -> None:
    """Hundred calls of a matrix that changes by 2% each: 95% of the estimates are within 2e-3."""
    generator = np.random.default_rng(7)
    matrix = generator.standard_normal((64, 128))
    iteration = SpectralNorm(kernel)
    errors = []
    for _ in range(100):
        matrix += 0.02 * generator.standard_normal((64, 128))
        exact = np.linalg.svd(matrix, compute_uv=False)[0]
        errors.append(1 - iteration.estimate(matrix.astype(np.float32)) / exact)
    assert min(errors) > -16 * EPS32  # never above
    assert np.quantile(errors, 0.95) < 2e-3


@pytest.mark.parametrize("shape", [(1, 1), (3, 2), (2, 40), (50, 1)])
def test_the_spectral_norm_of_few_directions(shape: tuple[int, int], kernel: Kernel) -> None:
    """Fewer columns, or a lower rank, than steps: nothing but rounding is left, and nothing is made of it."""
    generator = np.random.default_rng(8)
    full = generator.standard_normal(shape).astype(np.float32)
    rank_one = np.outer(full[:, 0], full[0]).astype(np.float32)
    for matrix in (full, rank_one):
        exact = float(np.linalg.svd(matrix.astype(np.float64), compute_uv=False)[0])
        iteration = SpectralNorm(kernel)
        for _ in range(3):
            # Norms of float32 products of at most 50 terms.
            assert iteration.estimate(matrix) == pytest.approx(exact, rel=50 * EPS32)


def test_the_upper_bound_is_certified_and_tight(kernel: Kernel) -> None:
    """Gram squaring bounds the spectral norm from above within n^(1/2^(k+1)) - 1."""
    for rows, columns in ((64, 64), (64, 256), (128, 32)):
        matrix = np.random.default_rng(rows).standard_normal((rows, columns)).astype(np.float32)
        exact = float(np.linalg.svd(matrix.astype(np.float64), compute_uv=False)[0])
        bound = SpectralNorm(kernel).upper_bound(matrix)
        smaller_side = min(rows, columns)
        assert exact * (1 - 1e-12) <= bound <= exact * smaller_side ** (0.5**12) * (1 + 1e-12)


def test_spectral_norm_of_zero_and_of_nan(kernel: Kernel) -> None:
    """A zero matrix has norm 0; a NaN in it is passed on, not hidden."""
    iteration = SpectralNorm(kernel)
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
    assert mass.tolist() == [[0.0, 0.0, 0.0]]


@pytest.mark.parametrize("length", [2, 15, 16, 17, 18, 32, 33, 40])
def test_attention_on_any_single_later_key_is_seen(length: int, kernel: Kernel) -> None:
    """Whatever the place of a key in the row: it is in the sum, and one exactly at the diagonal is not."""
    probabilities, token_mask = causal_attention([length])
    for query, key in zip(*np.triu_indices(length, k=1), strict=True):
        changed = probabilities.copy()
        changed[0, 0, query, key] = 0.5
        assert kernel.future_mass(changed, token_mask).tolist() == [[0.5, 0.5 * (key > query + 1)]]


def test_future_mass_is_the_mean_over_real_queries(kernel: Kernel) -> None:
    """Uniform attention over 2 keys in a 2-token row gives query 0 half of its mass to key 1."""
    probabilities = np.full((1, 1, 3, 3), 1.0, np.float32)
    probabilities[0, 0, :2] = [0.5, 0.5, 0.0]
    token_mask = np.array([[True, True, False]])
    mass = attention_mass(probabilities, token_mask, kernel)
    assert mass[0, :2].tolist() == [0.25, 0.0]  # query 0: .5, query 1: 0, query 2 is padding
    assert mass[0, 2] == pytest.approx(math.log(2), rel=1e-6)


def test_uniform_causal_attention_has_entropy_one(kernel: Kernel) -> None:
    """Entropy is measured in units of ln(allowed keys), over rows with a choice."""
    # ln is within 1 ulp and each p ln p adds one rounding: 8 float32 roundings are generous for T = 5.
    assert attention_entropy(*causal_attention([5, 3]), kernel)[0] == pytest.approx(1.0, abs=8 * EPS32)


@pytest.mark.parametrize("length", [2, 15, 16, 17, 50])
def test_attention_entropy_agrees_with_float64(length: int, kernel: Kernel) -> None:
    """Of random attention, with padding, and with a mask that lets later keys through."""
    generator = np.random.default_rng(length)
    probabilities = generator.random((3, 2, length, length), np.float32) ** 8
    probabilities /= probabilities.sum(axis=-1, keepdims=True)
    token_mask = np.arange(length) < np.array([[length], [max(1, length // 2)], [1]])
    wide = probabilities.astype(np.float64)
    rows = -(wide * np.log(np.where(wide > 0, wide, 1))).sum(axis=-1)
    counted = token_mask & (np.arange(length) > 0)
    exact = (rows / np.log(np.maximum(np.arange(length) + 1, 2)) * counted[:, None]).sum(axis=(0, 2))
    # A term is a logarithm (3 roundings), a weight and two products; lanes add 32 rows of up to length / 16
    # vectors before float64, NumPy adds float64. Near p = 1 ln p loses no digits: m - 1 is exact there.
    bound = (6 + 32 * (length // 16 + 1)) * EPS32
    assert attention_entropy(probabilities, token_mask, kernel) * counted.sum() == pytest.approx(
        exact, rel=bound
    )


def test_nan_attention_has_nan_entropy(kernel: Kernel) -> None:
    """What is not a number must not be taken for nothing."""
    probabilities, token_mask = causal_attention([5, 3])
    probabilities[0, 0, 3, 1] = np.nan
    assert math.isnan(attention_entropy(probabilities, token_mask, kernel)[0])


def test_the_largest_logit_ignores_padding() -> None:
    """A huge logit at a padded key never enters the model, so it is not evidence."""
    logits = np.zeros((1, 1, 2, 2), np.float32)
    logits[0, 0, 0, 0] = -7.0
    logits[0, 0, 0, 1] = 99.0
    assert attention_max_abs_logit(logits, np.array([[True, False]]))[0] == 7.0


def test_the_largest_logit_of_each_head_is_over_all_sequences() -> None:
    """Whatever their sign and place, as long as query and key are real tokens."""
    logits = np.random.default_rng(9).standard_normal((3, 2, 4, 4)).astype(np.float32)
    lengths = [4, 1, 3]
    token_mask = np.arange(4) < np.array(lengths)[:, None]
    real = [np.abs(sequence[:, :count, :count]) for sequence, count in zip(logits, lengths, strict=True)]
    expected = [max(part[head].max() for part in real) for head in range(2)]
    assert attention_max_abs_logit(logits, token_mask).tolist() == expected
