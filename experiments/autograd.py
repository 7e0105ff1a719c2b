"""Reverse-mode differentiation over NumPy arrays: a tape of fused operations with hand-written gradients.

Shapes: N real tokens of a batch, D model width, F inner width, V vocabulary, B sequences, H heads,
T longest sequence of the batch. Padding exists only inside ``causal_attention``. Every gradient is a
fresh array, never changed in place: a hook may keep it until the step ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from experiments.hook_registry import HookHandle, HookRegistry

Array = NDArray[np.floating]
Indices = NDArray[np.integer]
Backward = Callable[[Array], tuple[Array, ...]]
"""Gradient of the output -> gradient of each parent, in the order of ``parents``."""

LAYER_NORM_EPSILON = 1e-5  # Ba et al. 2016 leave it open; the common default of the frameworks
DROPOUT_LEVELS = 1 << 16  # dropout draws 16 random bits an element
GELU_SCALE = math.sqrt(2 / math.pi)  # Hendrycks and Gimpel 2016, the approximation by tanh
GELU_CUBIC = 0.044715  # of the same


class Tensor:
    """A value in the computation, how it came about, and the gradient of a weight.

    ``trainable`` tensors are the leaves: backward adds into their ``gradient`` (None: never reached).
    Any other leaf is a constant or a frozen weight: it keeps no gradient, and its hooks are not called.
    """

    __slots__ = ("_backward", "_hooks", "data", "gradient", "parents", "trainable", "weight_decay")

    def __init__(
        self, data: Array, parents: tuple[Tensor, ...] = (), backward: Backward | None = None
    ) -> None:
        self.data = data
        self.parents = parents
        self.gradient: Array | None = None
        self.trainable = False
        self.weight_decay = False
        self._backward = backward
        self._hooks: HookRegistry | None = None

    def register_gradient_hook(self, hook: Callable[[Array], None]) -> HookHandle:
        """Call ``hook(gradient)`` once in each backward pass, when this tensor's gradient is complete.

        A weight shows what it has accumulated since its gradient was last zeroed: what an update would use.
        """
        if self._hooks is None:
            self._hooks = HookRegistry()
        return self._hooks.register(hook)

    def backward(self) -> None:
        """Propagate d(self)/d(everything) from this scalar; weights accumulate into ``gradient``."""
        pending = {id(self): np.ones_like(self.data)}
        for tensor in reversed(_topological_order(self)):
            gradient = pending.pop(id(tensor))
            if tensor.trainable:
                gradient = gradient if tensor.gradient is None else tensor.gradient + gradient
                tensor.gradient = gradient
            elif tensor._backward is None:
                continue
            if tensor._hooks:
                tensor._hooks.fire(gradient)
            if tensor._backward is None:
                continue
            for parent, part in zip(tensor.parents, tensor._backward(gradient), strict=True):
                known = pending.get(id(parent))
                pending[id(parent)] = part if known is None else known + part


def parameter(data: Array) -> Tensor:
    """A weight. Matrices are decayed; biases, gains and other vectors are not."""
    tensor = Tensor(data)
    tensor.trainable = True
    tensor.weight_decay = data.ndim >= 2
    return tensor


def _topological_order(root: Tensor) -> list[Tensor]:
    """Every tensor that ``root`` depends on, each after all of its parents; ``root`` is last."""
    order: list[Tensor] = []
    seen: set[int] = set()
    stack = [(root, False)]
    while stack:
        tensor, parents_are_done = stack.pop()
        if parents_are_done:
            order.append(tensor)
        elif id(tensor) not in seen:
            seen.add(id(tensor))
            stack.append((tensor, True))
            stack.extend((parent, False) for parent in tensor.parents)
    return order


def add(left: Tensor, right: Tensor) -> Tensor:
    """left + right, of one shape."""
    return Tensor(left.data + right.data, (left, right), lambda gradient: (gradient, gradient))


def embed(table: Tensor, position_table: Tensor, tokens: Indices, positions: Indices) -> Tensor:
    """Token embedding plus position embedding: (N,) indices -> (N, D)."""

    def backward(gradient: Array) -> tuple[Array, ...]:
        return (
            _sum_rows_by_index(gradient, tokens, len(table.data)),
            _sum_rows_by_index(gradient, positions, len(position_table.data)),
        )

    return Tensor(table.data[tokens] + position_table.data[positions], (table, position_table), backward)


def _sum_rows_by_index(rows: Array, indices: Indices, count: int) -> Array:
    """(count, D): entry i is the sum of the rows whose index is i; a product, since np.add.at is slow."""
    one_hot = np.zeros((len(indices), count), dtype=rows.dtype)
    one_hot[np.arange(len(indices)), indices] = 1
    return one_hot.T @ rows


def linear(inputs: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """inputs @ weight + bias: (N, D) @ (D, F) + (F,) -> (N, F)."""
    outputs = inputs.data @ weight.data
    outputs += bias.data

    def backward(gradient: Array) -> tuple[Array, ...]:
        return gradient @ weight.data.T, inputs.data.T @ gradient, _column_sum(gradient)

    return Tensor(outputs, (inputs, weight, bias), backward)


def tied_logits(inputs: Tensor, table: Tensor) -> Tensor:
    """inputs @ table.T: (N, D) and the (V, D) token embedding -> (N, V)."""

    def backward(gradient: Array) -> tuple[Array, ...]:
        return gradient @ table.data, gradient.T @ inputs.data

    return Tensor(inputs.data @ table.data.T, (inputs, table), backward)


def relu(inputs: Tensor) -> Tensor:
    """max(inputs, 0); its gradient at 0 is 0."""
    outputs = np.maximum(inputs.data, 0)
    return Tensor(outputs, (inputs,), lambda gradient: (gradient * (outputs > 0),))


def gelu(inputs: Tensor) -> Tensor:
    """inputs * P(Z <= inputs) for a standard normal Z, approximated by tanh. Hendrycks and Gimpel 2016."""
    values = inputs.data
    squares = values * values
    curve = np.tanh(GELU_SCALE * values * (1 + GELU_CUBIC * squares))

    def backward(gradient: Array) -> tuple[Array, ...]:
        slope = GELU_SCALE * (1 + 3 * GELU_CUBIC * squares) * (1 - curve * curve)
        return (gradient * (0.5 * (1 + curve + values * slope)),)

    return Tensor(0.5 * values * (1 + curve), (inputs,), backward)


def dropout(inputs: Tensor, probability: float, bits: np.random.BitGenerator) -> Tensor:
    """inputs with elements zeroed at ``probability`` and the others scaled by 1 / (1 - probability).

    The probability is rounded to a multiple of 2^-16. Srivastava et al. 2014, in its inverted form.
    """
    threshold = round(probability * DROPOUT_LEVELS)
    shape, size = inputs.data.shape, inputs.data.size
    draws = bits.random_raw(-(-size // 4)).view(np.uint16)[:size].reshape(shape)
    kept = (draws >= threshold).astype(inputs.data.dtype)
    kept *= DROPOUT_LEVELS / (DROPOUT_LEVELS - threshold)
    return Tensor(inputs.data * kept, (inputs,), lambda gradient: (gradient * kept,))


def layer_norm(inputs: Tensor, gain: Tensor, bias: Tensor) -> Tensor:
    """Each row of (N, D) to mean 0 and variance 1, then times gain plus bias. Ba et al. 2016."""
    width = inputs.data.shape[-1]
    normal = inputs.data - _row_sum(inputs.data) / width
    variance = np.einsum("nd,nd->n", normal, normal)[:, None] / width
    inverse_deviation = 1 / np.sqrt(variance + LAYER_NORM_EPSILON)
    normal *= inverse_deviation
    outputs = normal * gain.data
    outputs += bias.data

    def backward(gradient: Array) -> tuple[Array, ...]:
        normal_gradient = gradient * gain.data
        projection = np.einsum("nd,nd->n", normal_gradient, normal)[:, None] / width
        gain_gradient = np.einsum("nd,nd->d", gradient, normal)
        normal_gradient -= _row_sum(normal_gradient) / width
        normal_gradient -= normal * projection
        normal_gradient *= inverse_deviation
        return normal_gradient, gain_gradient, _column_sum(gradient)

    return Tensor(outputs, (inputs, gain, bias), backward)


def _row_sum(rows: Array) -> Array:
    """(..., 1) sums; a product with ones, since NumPy's reduction over short rows is seven times slower."""
    return rows @ np.ones((rows.shape[-1], 1), dtype=rows.dtype)


def _column_sum(rows: Array) -> Array:
    """(D,) sums over the rows of (N, D), in the same way."""
    return np.ones(len(rows), dtype=rows.dtype) @ rows


@dataclass(frozen=True)
class AttentionLayout:
    """Where the N packed tokens stand in the padded (B, T) grid, and which keys a query may see.

    slots: (N,) index into the B * T places. token_mask: (B, T), true at real tokens.
    bias: (B, 1, T, T), 0 where the query may attend to the key, -inf elsewhere.
    """

    slots: Indices
    token_mask: NDArray[np.bool_]
    bias: Array

    def scatter(self, packed: Array, head_count: int) -> Array:
        """(N, D) -> (B, H, T, D / H), zero at padding."""
        batch_size, length = self.token_mask.shape
        padded = np.zeros((batch_size * length, packed.shape[1]), dtype=packed.dtype)
        padded[self.slots] = packed
        return padded.reshape(batch_size, length, head_count, -1).transpose(0, 2, 1, 3)

    def gather(self, padded: Array) -> Array:
        """(B, H, T, D / H) -> (N, D), the real tokens only."""
        batch_size, head_count, length, width = padded.shape
        flat = padded.transpose(0, 2, 1, 3).reshape(batch_size * length, head_count * width)
        return flat[self.slots]


def attention(
    queries: Tensor, keys: Tensor, values: Tensor, head_count: int, layout: AttentionLayout
) -> tuple[Tensor, Array, Callable[[], Array]]:
    """Scaled dot-product attention over each sequence, (N, D) each. Vaswani et al. 2017.

    Returns the (N, D) result, the (B, H, T, T) probabilities that multiplied the values, and a
    function that recomputes the (B, H, T, T) scaled logits before masking.
    """
    scale = float(queries.data.shape[1] // head_count) ** -0.5
    q = layout.scatter(queries.data * scale, head_count)
    k = layout.scatter(keys.data, head_count)
    v = layout.scatter(values.data, head_count)
    probabilities = q @ k.swapaxes(-1, -2)
    probabilities += layout.bias
    softmax_in_place(probabilities)
    outputs = layout.gather(probabilities @ v)

    def backward(gradient: Array) -> tuple[Array, ...]:
        padded = layout.scatter(gradient, head_count)
        value_gradient = probabilities.swapaxes(-1, -2) @ padded
        # sum over keys of p * dp equals the row's output * gradient (Dao et al. 2022, section B.4)
        row_sums = layout.scatter(gradient * outputs, head_count).sum(axis=-1, keepdims=True)
        logit_gradient = padded @ v.swapaxes(-1, -2)
        logit_gradient -= row_sums
        logit_gradient *= probabilities
        query_gradient = layout.gather(logit_gradient @ k) * scale
        key_gradient = logit_gradient.swapaxes(-1, -2) @ q
        return query_gradient, layout.gather(key_gradient), layout.gather(value_gradient)

    tensor = Tensor(outputs, (queries, keys, values), backward)
    return tensor, probabilities, lambda: q @ k.swapaxes(-1, -2)


def softmax_in_place(logits: Array) -> None:
    """Overwrite the last axis by its softmax; -inf gives exactly 0."""
    logits -= logits.max(axis=-1, keepdims=True)
    np.exp(logits, out=logits)
    logits /= _row_sum(logits)


def softmax_cross_entropy(
    logits: Tensor, targets: Indices, weights: Array | None = None
) -> tuple[Tensor, Array]:
    """Mean negative log-likelihood of (N,) targets under (N, V) logits, and its (N,) terms, in nats.

    With (N,) weights it is the sum of weight times term instead.
    """
    token_count = len(targets)
    probabilities = logits.data - logits.data.max(axis=-1, keepdims=True)
    target_logits = probabilities[np.arange(token_count), targets]
    np.exp(probabilities, out=probabilities)
    totals = _row_sum(probabilities)
    token_losses = np.log(totals[:, 0]) - target_logits

    def backward(gradient: Array) -> tuple[Array, ...]:
        logit_gradient = probabilities / totals
        logit_gradient[np.arange(token_count), targets] -= 1
        row_gradients = gradient / token_count if weights is None else (gradient * weights)[:, None]
        logit_gradient *= np.asarray(row_gradients, dtype=logits.data.dtype)
        return (logit_gradient,)

    # float64: a sum over many float32 terms
    reduced = token_losses.mean(dtype=np.float64) if weights is None else np.dot(weights, token_losses)
    return Tensor(np.asarray(reduced, dtype=np.float64), (logits,), backward), token_losses
