"""Every operation of the tape: gradients against central differences and against torch."""

import math
from collections.abc import Callable

import numpy as np
import pytest

from experiments import autograd
from experiments.autograd import Array, AttentionLayout, Tensor, parameter

LENGTHS = (3, 5, 1)  # sequences of the small batch: N = 9 real tokens, T = 5
TOKENS = np.array([0, 2, 1, 2, 2, 0, 3, 1, 0])
POSITIONS = np.array([0, 1, 2, 0, 1, 2, 3, 4, 0])
ROWS = np.array([0, 0, 0, 1, 1, 1, 1, 1, 2])

DIFFERENCE_STEP = 1e-5
# Central differences err by h^2 |f'''| / 6 (about 1e-11 for third derivatives of order 1 to 10) and by
# rounding, 2^-53 |f| / h (about 1e-11 for |f| of order 1): 1e-8 relative to the largest entry is ample,
# and a wrong term of a gradient is off by far more.
GRADIENT_TOLERANCE = 1e-8


def layout(causal: bool = True, dtype: str = "float64") -> AttentionLayout:
    """The padded grid of the small batch."""
    length = max(LENGTHS)
    token_mask = np.arange(length) < np.array(LENGTHS)[:, None]
    allowed = np.tril(np.ones((length, length), bool)) if causal else np.ones((length, length), bool)
    bias = np.where(allowed & token_mask[:, None, None, :], 0, -np.inf).astype(dtype)
    return AttentionLayout(ROWS * length + POSITIONS, token_mask, bias)


class FixedBits:
    """A bit generator that repeats itself, so that dropout is a function of its inputs."""

    def random_raw(self, size: int) -> np.ndarray:
        return np.random.PCG64(5).random_raw(size)


Operation = Callable[..., Tensor]
OPERATIONS: dict[str, tuple[Operation, tuple[tuple[int, ...], ...]]] = {
    "add": (autograd.add, ((9, 4), (9, 4))),
    "embed": (lambda table, place: autograd.embed(table, place, TOKENS, POSITIONS), ((4, 6), (5, 6))),
    "linear": (autograd.linear, ((9, 4), (4, 6), (6,))),
    "tied_logits": (autograd.tied_logits, ((9, 4), (5, 4))),
    "relu": (autograd.relu, ((9, 4),)),
    "gelu": (autograd.gelu, ((9, 4),)),
    "dropout": (lambda x: autograd.dropout(x, 0.3, FixedBits()), ((9, 4),)),
    "layer_norm": (autograd.layer_norm, ((9, 6), (6,), (6,))),
    "attention": (lambda q, k, v: autograd.attention(q, k, v, 2, layout())[0], ((9, 8), (9, 8), (9, 8))),
    "attention_all_ones_mask": (
        lambda q, k, v: autograd.attention(q, k, v, 2, layout(causal=False))[0],
        ((9, 8), (9, 8), (9, 8)),
    ),
    "softmax_cross_entropy": (lambda x: autograd.softmax_cross_entropy(x, TOKENS)[0], ((9, 5),)),
}


def random_parameters(shapes: tuple[tuple[int, ...], ...], seed: int = 0) -> list[Tensor]:
    """Standard normal weights; none is close enough to 0 for a difference to cross relu's kink."""
    generator = np.random.default_rng(seed)
    return [parameter(generator.normal(size=shape)) for shape in shapes]


def weighted_sum(output: Tensor) -> Tensor:
    """A scalar that weighs every output differently, so that no error cancels."""
    weights = np.random.default_rng(1).normal(size=output.data.shape)
    return Tensor(
        np.asarray((output.data * weights).sum()), (output,), lambda gradient: (gradient * weights,)
    )


def central_differences(function: Callable[[], float], array: Array) -> Array:
    """Gradient of ``function`` with respect to ``array``, which it reads."""
    gradient = np.zeros_like(array)
    for index in np.ndindex(array.shape):
        value = array[index]
        array[index] = value + DIFFERENCE_STEP
        above = function()
        array[index] = value - DIFFERENCE_STEP
        below = function()
        array[index] = value
        gradient[index] = (above - below) / (2 * DIFFERENCE_STEP)
    return gradient


@pytest.mark.parametrize("name", OPERATIONS)
def test_gradient_agrees_with_central_differences(name: str) -> None:
    """In float64, for every input of the operation."""
    operation, shapes = OPERATIONS[name]
    inputs = random_parameters(shapes)
    weighted_sum(operation(*inputs)).backward()
    for tensor in inputs:
        expected = central_differences(lambda: float(weighted_sum(operation(*inputs)).data), tensor.data)
        error = np.abs(tensor.gradient - expected).max()
        assert error <= GRADIENT_TOLERANCE * max(1.0, np.abs(expected).max())


def torch_operations(torch: object) -> dict[str, Callable[..., object]]:
    """The same operations in torch, on the same packed rows."""
    functional = torch.nn.functional
    tokens, positions = torch.from_numpy(TOKENS), torch.from_numpy(POSITIONS)
    bias = torch.from_numpy(layout().bias)
    slots = torch.from_numpy(layout().slots)

    def scatter(packed: object) -> object:
        padded = packed.new_zeros(15, 8).index_copy(0, slots, packed)
        return padded.view(3, 5, 2, 4).transpose(1, 2)

    def attend(q: object, k: object, v: object) -> object:
        mixed = functional.scaled_dot_product_attention(scatter(q), scatter(k), scatter(v), attn_mask=bias)
        return mixed.transpose(1, 2).reshape(15, 8)[slots]

    return {
        "add": torch.add,
        "embed": lambda t, p: functional.embedding(tokens, t) + functional.embedding(positions, p),
        "linear": lambda x, w, b: functional.linear(x, w.T, b),
        "tied_logits": functional.linear,
        "relu": functional.relu,
        "gelu": lambda x: functional.gelu(x, approximate="tanh"),
        "layer_norm": lambda x, g, b: functional.layer_norm(x, (6,), g, b),
        "attention": attend,
        "softmax_cross_entropy": lambda x: functional.cross_entropy(x, tokens),
    }


# Both sides are float64 with sums of at most 15 terms of order 1 to 10: 1e-12 is 4500 units of 2^-52.
TORCH_TOLERANCE = 1e-12


@pytest.mark.parametrize(
    "name", [name for name in OPERATIONS if name not in ("dropout", "attention_all_ones_mask")]
)
def test_value_and_gradient_agree_with_torch(name: str) -> None:
    """In float64, for outputs and for every input's gradient."""
    torch = pytest.importorskip("torch")
    operation, shapes = OPERATIONS[name]
    inputs = random_parameters(shapes)
    output = operation(*inputs)
    weighted_sum(output).backward()
    twins = [torch.tensor(tensor.data, requires_grad=True) for tensor in inputs]
    expected = torch_operations(torch)[name](*twins)
    weights = np.random.default_rng(1).normal(size=output.data.shape)
    (expected * torch.from_numpy(np.asarray(weights))).sum().backward()
    np.testing.assert_allclose(output.data, expected.detach().numpy(), rtol=0, atol=TORCH_TOLERANCE)
    for tensor, twin in zip(inputs, twins, strict=True):
        np.testing.assert_allclose(tensor.gradient, twin.grad.numpy(), rtol=0, atol=TORCH_TOLERANCE)


def test_gradients_of_a_tensor_used_twice_add_up() -> None:
    """d(x + x)/dx is 2, exactly."""
    x = parameter(np.array([1.5]))
    autograd.add(x, x).backward()
    assert x.gradient.tolist() == [2.0]


def test_backward_visits_a_diamond_once() -> None:
    """y = relu(x) is used on two paths; its gradient is complete before it is propagated."""
    x = parameter(np.array([3.0]))
    y = autograd.relu(x)
    seen = []
    y.register_gradient_hook(lambda gradient: seen.append(gradient.tolist()))
    autograd.add(autograd.relu(y), autograd.add(y, y)).backward()
    assert seen == [[3.0]]
    assert x.gradient.tolist() == [3.0]


def test_gradients_accumulate_over_backward_passes_until_they_are_cleared() -> None:
    """Two passes without zeroing give the sum, as an accumulating loop needs."""
    x = parameter(np.array([1.0]))
    for _ in range(2):
        autograd.relu(x).backward()
    assert x.gradient.tolist() == [2.0]


def test_gelu_is_near_the_normal_distribution_function() -> None:
    """x P(Z <= x), which the tanh approximates to 4.8e-4 (largest error of the formula, near |x| = 2.2)."""
    x = np.linspace(-6, 6, 241)
    expected = np.array([value * 0.5 * math.erfc(-value / math.sqrt(2)) for value in x])
    np.testing.assert_allclose(autograd.gelu(Tensor(x)).data, expected, rtol=0, atol=5e-4)


def test_frozen_weight_keeps_no_gradient_and_passes_none_to_its_hooks() -> None:
    """The other inputs of the operation get theirs."""
    x, weight, bias = random_parameters(((9, 4), (4, 6), (6,)))
    weight.trainable = False
    seen: list[Array] = []
    weight.register_gradient_hook(seen.append)
    weighted_sum(autograd.linear(x, weight, bias)).backward()
    assert (weight.gradient, seen) == (None, [])
    assert x.gradient.any() and bias.gradient.any()


def test_removed_gradient_hook_is_not_called() -> None:
    """After remove(), twice over, a backward pass calls nothing."""
    x = parameter(np.array([1.0]))
    seen: list[Array] = []
    handle = x.register_gradient_hook(seen.append)
    handle.remove()
    handle.remove()
    autograd.relu(x).backward()
    assert seen == []


def test_kept_gradients_never_change() -> None:
    """Arrays that hooks kept are the same after the pass, for every tensor of a small graph."""
    x, gain, bias = random_parameters(((9, 6), (6,), (6,)))
    kept: list[tuple[Array, Array]] = []
    normal = autograd.layer_norm(x, gain, bias)
    tensors = [x, gain, bias, normal, autograd.add(normal, autograd.relu(normal))]
    for tensor in tensors:
        tensor.register_gradient_hook(lambda gradient: kept.append((gradient, gradient.copy())))
    weighted_sum(tensors[-1]).backward()
    assert len(kept) == 5
    assert all(np.array_equal(now, then) for now, then in kept)


def test_attention_probabilities_are_exactly_zero_where_masked() -> None:
    """No mass on later keys or on padding; each row sums to 1."""
    q, k, v = random_parameters(((9, 8),) * 3)
    _, probabilities, _ = autograd.attention(q, k, v, 2, layout())
    masked = np.broadcast_to(layout().bias == -np.inf, probabilities.shape)
    assert np.all(probabilities[masked] == 0)
    # at most 5 terms below 1, each rounded a few times
    np.testing.assert_allclose(probabilities.sum(axis=-1), 1, rtol=0, atol=20 * 2**-52)


def test_attention_logits_are_those_before_masking() -> None:
    """The recomputed logits equal q k / sqrt(d) at a pair of real tokens."""
    q, k, v = random_parameters(((9, 8),) * 3)
    _, _, logits = autograd.attention(q, k, v, 2, layout())
    expected = q.data[3, 4:] @ k.data[5, 4:] / 2  # second sequence, query 0, key 2, head 1, width 4
    assert logits()[1, 1, 0, 2] == pytest.approx(expected, rel=1e-14)  # four products: 10 * 2^-53 at most


def test_dropout_keeps_the_mean_and_the_share() -> None:
    """Of 10^6 ones, 30% become 0 and the rest 1 / 0.7, within four standard errors."""
    output = autograd.dropout(Tensor(np.ones((1000, 1000))), 0.3, np.random.SFC64(0)).data
    share = (output == 0).mean()
    assert abs(share - 0.3) < 4 * (0.3 * 0.7 / 1e6) ** 0.5
    assert np.unique(output).tolist() == [0.0, autograd.DROPOUT_LEVELS / (autograd.DROPOUT_LEVELS - 19661)]


def test_cross_entropy_of_huge_logits_is_finite() -> None:
    """The softmax is taken relative to the largest logit."""
    loss, terms = autograd.softmax_cross_entropy(
        Tensor(np.array([[1e30, 0.0], [0.0, 1e30]])), np.array([0, 0])
    )
    assert terms.tolist() == [0.0, 1e30]
    assert float(loss.data) == 5e29


def test_float32_stays_float32() -> None:
    """No operation widens its result or its gradients."""
    for name, (operation, shapes) in OPERATIONS.items():
        inputs = [parameter(t.data.astype(np.float32)) for t in random_parameters(shapes)]
        if name.startswith("attention"):
            output = autograd.attention(*inputs, 2, layout(dtype="float32"))[0]
        else:
            output = operation(*inputs)
        ones = np.ones_like(output.data)
        Tensor(np.asarray(0.0), (output,), lambda _, ones=ones: (ones,)).backward()
        assert {tensor.gradient.dtype for tensor in inputs} == {np.dtype("float32")}, name


def test_embedding_gradient_sums_rows_of_repeated_tokens() -> None:
    """Token 3 occurs once, token 2 three times; unused positions get zero."""
    table, places = parameter(np.zeros((5, 2))), parameter(np.zeros((7, 2)))
    output = autograd.embed(table, places, TOKENS, POSITIONS)
    Tensor(np.asarray(0.0), (output,), lambda _: (np.ones_like(output.data),)).backward()
    assert table.gradient[:, 0].tolist() == [3, 2, 3, 1, 0]
    assert places.gradient[:, 0].tolist() == [3, 2, 2, 1, 1, 0, 0]
