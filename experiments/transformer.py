"""A decoder-only transformer in plain NumPy: pre-norm or post-norm, learned positions, tied embeddings.

Layers work on the N packed tokens of a batch, (N, D); only attention sees the padded grid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from experiments import autograd
from experiments.autograd import Array, AttentionLayout, Tensor, parameter
from experiments.batches import PackedBatch
from experiments.hook_registry import HookHandle, HookRegistry
from recorder import combined_hash, content_hash
from recorder.hooks import Attention, AttentionHook, ForwardHook

EMBEDDING_STD = 0.02  # Radford et al. 2019 (GPT-2); tied logits start small, so the first loss is near ln V

NORM_PLACEMENTS = ("pre", "post")
"""Where a block normalises: what a branch reads (Xiong et al. 2020), or its sum with the residual stream
(Vaswani et al. 2017). Only pre-norm has a final norm: the last sum of post-norm is normalised already."""

MaskFunction = Callable[[int], NDArray[np.bool_]]
"""Length T -> (T, T) bool, true where query i may attend to key j."""


def causal_mask(length: int) -> NDArray[np.bool_]:
    """Query i may attend to keys 0 to i."""
    return np.tril(np.ones((length, length), dtype=np.bool_))


@dataclass(frozen=True)
class ModelSize:
    """What the model is built from; 105,000 weights with the defaults and the corpus."""

    vocabulary_size: int
    context_length: int
    width: int = 64
    head_count: int = 4
    layer_count: int = 2
    feed_forward_width: int = 256
    norm_placement: str = NORM_PLACEMENTS[0]
    activation: str = "relu"  # a name in ACTIVATIONS


class Dropout:
    """Training-mode noise, with a generator apart from the one that shuffles the data."""

    def __init__(self, probability: float, seed: np.random.SeedSequence) -> None:
        self.probability = probability
        self.bits = np.random.SFC64(seed)

    def __call__(self, inputs: Tensor) -> Tensor:
        """``inputs`` with dropout; the same tensor at probability 0."""
        return autograd.dropout(inputs, self.probability, self.bits) if self.probability else inputs

    def state(self) -> dict[str, Any]:
        """State of the generator."""
        return dict(self.bits.state)

    def load_state(self, state: Any) -> None:
        """Continue with the draws that followed ``state``."""
        self.bits.state = state

    def content_hash(self) -> int:
        """64-bit hash of the generator's state."""
        state = self.bits.state
        return content_hash(state["state"]["state"], np.array([state["has_uint32"], state["uinteger"]]))


def no_dropout(inputs: Tensor) -> Tensor:
    """``inputs``: evaluation mode."""
    return inputs


DropoutFunction = Callable[[Tensor], Tensor]

Join = Callable[[str, Tensor, Tensor], Tensor]
"""(name of the branch, residual stream, what the branch adds) -> residual stream."""


def add_branch(name: str, stream: Tensor, branch: Tensor) -> Tensor:
    """The residual connection (He et al. 2015)."""
    return autograd.add(stream, branch)


class Module:
    """A part of the model with one output that can be watched; its hooks cost a truth test each."""

    def __init__(self, role: str, layer: int | None, **parameters: Array) -> None:
        self.role = role
        self.layer = layer
        self.parameters = {name: parameter(array) for name, array in parameters.items()}
        self._forward_hooks = HookRegistry()

    def register_forward_hook(self, hook: ForwardHook) -> HookHandle:
        """Call ``hook(output, None)`` after each forward pass: packed outputs hold real tokens only."""
        return self._forward_hooks.register(hook)

    def watched(self, output: Tensor) -> Tensor:
        """``output``, shown to the hooks."""
        if self._forward_hooks:
            self._forward_hooks.fire(output, None)
        return output


@final
class Embedding(Module):
    """Token embedding plus learned position embedding, then dropout: (N,) -> (N, D)."""

    def __init__(self, size: ModelSize, generator: np.random.Generator) -> None:
        token = generator.normal(0, EMBEDDING_STD, (size.vocabulary_size, size.width))
        position = generator.normal(0, EMBEDDING_STD, (size.context_length, size.width))
        super().__init__("embedding", None, token=token, position=position)

    def __call__(self, batch: PackedBatch, dropout: DropoutFunction) -> Tensor:
        """The first state of the residual stream."""
        token, position = self.parameters["token"], self.parameters["position"]
        return self.watched(dropout(autograd.embed(token, position, batch.tokens, batch.positions)))


@final
class LayerNorm(Module):
    """Layer normalisation, (N, D) -> (N, D)."""

    def __init__(self, layer: int | None, width: int) -> None:
        super().__init__("layer_norm", layer, gain=np.ones(width), bias=np.zeros(width))

    def __call__(self, inputs: Tensor) -> Tensor:
        """Normalised rows."""
        return self.watched(autograd.layer_norm(inputs, self.parameters["gain"], self.parameters["bias"]))


@final
class Linear(Module):
    """inputs @ weight + bias, (N, inputs) -> (N, outputs)."""

    def __init__(self, layer: int, weight: Array) -> None:
        super().__init__("linear", layer, weight=weight, bias=np.zeros(weight.shape[1]))

    def __call__(self, inputs: Tensor) -> Tensor:
        """The affine map of each row."""
        return self.watched(autograd.linear(inputs, self.parameters["weight"], self.parameters["bias"]))


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": autograd.relu, "gelu": autograd.gelu}


@final
class Activation(Module):
    """One of ACTIVATIONS on each element, (N, F) -> (N, F); its role is that name.

    The recorder counts silent units, which are exactly zero, where the role is "relu"; gelu has none.
    """

    def __init__(self, layer: int, name: str) -> None:
        super().__init__(name, layer)
        self.function = ACTIVATIONS[name]

    def __call__(self, inputs: Tensor) -> Tensor:
        """The function of each element."""
        return self.watched(self.function(inputs))


@final
class SelfAttention(Module):
    """Multi-head self-attention with its output projection, (N, D) -> (N, D)."""

    def __init__(self, layer: int, size: ModelSize, generator: np.random.Generator) -> None:
        weights = {
            "query_weight": _scaled_normal(generator, size.width, size.width),
            "key_weight": _scaled_normal(generator, size.width, size.width),
            "value_weight": _scaled_normal(generator, size.width, size.width),
            "output_weight": _residual_normal(generator, size.width, size),
        }
        biases = {name.replace("weight", "bias"): np.zeros(size.width) for name in weights}
        super().__init__("attention", layer, **weights, **biases)
        self.head_count = size.head_count
        self._attention_hooks = HookRegistry()

    def register_attention_hook(self, hook: AttentionHook) -> HookHandle:
        """Call ``hook(attention)`` after each forward pass."""
        return self._attention_hooks.register(hook)

    def __call__(self, inputs: Tensor, layout: AttentionLayout) -> Tensor:
        """What each token takes from the tokens that it may see."""
        queries, keys, values = (self._project(inputs, name) for name in ("query", "key", "value"))
        mixed, probabilities, logits = autograd.attention(queries, keys, values, self.head_count, layout)
        if self._attention_hooks:
            self._attention_hooks.fire(Attention(probabilities, layout.token_mask, logits))
        return self.watched(self._project(mixed, "output"))

    def _project(self, inputs: Tensor, name: str) -> Tensor:
        return autograd.linear(inputs, self.parameters[f"{name}_weight"], self.parameters[f"{name}_bias"])


@final
class Block(Module):
    """Residual stream + attention, + feed-forward network; its output is the residual stream."""

    def __init__(self, layer: int, size: ModelSize, generator: np.random.Generator) -> None:
        super().__init__("block", layer)
        self.norm_placement = size.norm_placement
        self.norm1 = LayerNorm(layer, size.width)
        self.attention = SelfAttention(layer, size, generator)
        self.norm2 = LayerNorm(layer, size.width)
        self.up = Linear(layer, _scaled_normal(generator, size.width, size.feed_forward_width))
        self.activation = Activation(layer, size.activation)
        self.down = Linear(layer, _residual_normal(generator, size.feed_forward_width, size))

    def parts(self) -> Iterator[tuple[str, Module]]:
        """(name within the block, module), in order of the forward pass."""
        attention: tuple[tuple[str, Module], ...] = (("norm1", self.norm1), ("attention", self.attention))
        feed_forward: tuple[tuple[str, Module], ...] = (
            ("mlp.up", self.up),
            (f"mlp.{self.activation.role}", self.activation),
            ("mlp.down", self.down),
        )
        if self.norm_placement == "pre":
            yield from (*attention, ("norm2", self.norm2), *feed_forward)
        else:
            yield from (*reversed(attention), *feed_forward, ("norm2", self.norm2))

    def __call__(
        self, stream: Tensor, layout: AttentionLayout, dropout: DropoutFunction, join: Join
    ) -> Tensor:
        """The residual stream after this block."""
        attention_name, mlp_name = f"blocks.{self.layer}.attention", f"blocks.{self.layer}.mlp"
        if self.norm_placement == "pre":
            mixed = self.attention(self.norm1(stream), layout)
            stream = join(attention_name, stream, dropout(mixed))
            inner = self._feed_forward(self.norm2(stream))
            return self.watched(join(mlp_name, stream, dropout(inner)))
        mixed = self.attention(stream, layout)
        stream = self.norm1(join(attention_name, stream, dropout(mixed)))
        inner = self._feed_forward(stream)
        return self.watched(self.norm2(join(mlp_name, stream, dropout(inner))))

    def _feed_forward(self, inputs: Tensor) -> Tensor:
        return self.down(self.activation(self.up(inputs)))


@final
class Head(Module):
    """Logits over the vocabulary, by the token embedding: (N, D) -> (N, V)."""

    def __init__(self, table: Tensor) -> None:
        super().__init__("head", None)
        self.table = table

    def __call__(self, inputs: Tensor) -> Tensor:
        """Logits of the next token."""
        return self.watched(autograd.tied_logits(inputs, self.table))


@final
class Transformer:
    """The whole model; offers what ``recorder.hooks.WatchedModel`` asks for."""

    def __init__(self, size: ModelSize, seed: np.random.SeedSequence, dtype: str = "float32") -> None:
        generator = np.random.Generator(np.random.PCG64(seed))
        self.size = size
        self.dtype = np.dtype(dtype)
        self.embedding = Embedding(size, generator)
        self.blocks = tuple(Block(layer, size, generator) for layer in range(size.layer_count))
        self.final_norm = LayerNorm(None, size.width) if size.norm_placement == "pre" else None
        self.head = Head(self.embedding.parameters["token"])
        for _, weight in self.named_parameters():
            weight.data = weight.data.astype(self.dtype)

    def __call__(
        self, batch: PackedBatch, mask: MaskFunction, dropout: DropoutFunction, join: Join = add_branch
    ) -> Tensor:
        """(N, V) logits for the token after each token of the batch."""
        layout = attention_layout(batch, mask, self.dtype)
        stream = self.embedding(batch, dropout)
        for block in self.blocks:
            stream = block(stream, layout, dropout, join)
        return self.head(stream if self.final_norm is None else self.final_norm(stream))

    def named_modules(self) -> Iterator[tuple[str, Module]]:
        """Each module once, in order of the forward pass."""
        yield "embedding", self.embedding
        for block in self.blocks:
            for name, module in block.parts():
                yield f"blocks.{block.layer}.{name}", module
            yield f"blocks.{block.layer}", block
        if self.final_norm is not None:
            yield "final_norm", self.final_norm
        yield "head", self.head

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Each weight once; the head's is the token embedding."""
        for module_name, module in self.named_modules():
            for name, weight in module.parameters.items():
                yield f"{module_name}.{name}", weight

    def tied_names(self) -> Iterator[tuple[str, str]]:
        """(second name, first name) of the weight that is used twice."""
        yield "head.weight", "embedding.token"

    def freeze(self, prefixes: Sequence[str]) -> None:
        """Declare that no update changes the weights of those modules, decay included."""
        for name, weight in self.named_parameters():
            if any(starts_with_part(name, prefix) for prefix in prefixes):
                weight.trainable = weight.weight_decay = False

    def parameter_count(self) -> int:
        """Number of weights, tied ones once."""
        return sum(weight.data.size for _, weight in self.named_parameters())

    def state(self) -> dict[str, Array]:
        """A copy of every weight by name."""
        return {name: weight.data.copy() for name, weight in self.named_parameters()}

    def content_hash(self) -> int:
        """64-bit hash of all weights, the number that the log calls weights_hash."""
        return combined_hash(content_hash(weight.data) for _, weight in self.named_parameters())

    def load_state(self, state: dict[str, Array]) -> None:
        """Overwrite every weight in place, so that an optimizer keeps sharing their memory."""
        for name, weight in self.named_parameters():
            weight.data[...] = state[name]


def starts_with_part(name: str, prefix: str) -> bool:
    """``prefix`` is the first parts of a dotted name: blocks.1 of blocks.1.norm1.gain, not of blocks.10."""
    return f"{name}.".startswith(f"{prefix}.")


def attention_layout(batch: PackedBatch, mask: MaskFunction, dtype: np.dtype[Any]) -> AttentionLayout:
    """The batch's padded grid; a query may see the keys that ``mask`` allows and that are real tokens."""
    length = int(batch.lengths.max())
    token_mask = np.arange(length) < batch.lengths[:, None]  # (B, T)
    visible = mask(length) & token_mask[:, None, None, :]  # (B, 1, T, T)
    bias = np.where(visible, 0, -np.inf).astype(dtype)
    return AttentionLayout(batch.rows * length + batch.positions, token_mask, bias)


def _scaled_normal(generator: np.random.Generator, inputs: int, outputs: int) -> Array:
    """(inputs, outputs) weights that keep the variance of unit inputs (LeCun et al. 1998)."""
    return generator.normal(0, inputs**-0.5, (inputs, outputs))


def _residual_normal(generator: np.random.Generator, inputs: int, size: ModelSize) -> Array:
    """The same, scaled down so that 2 branches a layer add variance 1 in all (Radford et al. 2019)."""
    std = float(2 * size.layer_count * inputs) ** -0.5
    return generator.normal(0, std, (inputs, size.width))
