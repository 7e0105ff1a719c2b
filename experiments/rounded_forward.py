"""The forward pass of the pre-norm ReLU transformer with every stored tensor rounded to a number format.

Weights, activations, attention logits and probabilities are rounded when they are stored. Sums inside a
matrix product, a layer norm or a softmax stay in float32, as mixed-precision hardware keeps them.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from experiments.autograd import LAYER_NORM_EPSILON, AttentionLayout, softmax_in_place
from experiments.batches import PackedBatch
from experiments.transformer import Block, Module, Transformer, attention_layout, causal_mask

Array = NDArray[np.float32]
Store = Callable[[str, Array], Array]
"""(name of a tensor, its float32 values) -> the values as they are stored."""


def rounded_logits(model: Transformer, batch: PackedBatch, store: Store) -> Array:
    """(N, V) logits in evaluation mode; ``store`` sees every tensor in the order of the pass."""
    layout = attention_layout(batch, causal_mask, model.dtype)
    embedding = _weights(model.embedding, "embedding", store)
    stream = embedding["token"][batch.tokens] + embedding["position"][batch.positions]
    stream = store("embedding", stream)
    for block in model.blocks:
        stream = _block(block, f"blocks.{block.layer}", stream, layout, store)
    assert model.final_norm is not None  # post-norm is refused before
    normal = _layer_norm(model.final_norm, "final_norm", stream, store)
    return store("head", normal @ embedding["token"].T)


def _block(block: Block, name: str, stream: Array, layout: AttentionLayout, store: Store) -> Array:
    normal = _layer_norm(block.norm1, f"{name}.norm1", stream, store)
    stream = store(f"{name}.stream1", stream + _attention(block, f"{name}.attention", normal, layout, store))
    inner = _layer_norm(block.norm2, f"{name}.norm2", stream, store)
    for part in ("up", "relu", "down"):
        if part == "relu":
            inner = np.maximum(inner, 0)
        else:
            weights = _weights(getattr(block, part), f"{name}.mlp.{part}", store)
            inner = store(f"{name}.mlp.{part}", inner @ weights["weight"] + weights["bias"])
    return store(name, stream + inner)


def _attention(block: Block, name: str, inputs: Array, layout: AttentionLayout, store: Store) -> Array:
    weights = _weights(block.attention, name, store)
    head_count = block.attention.head_count

    def project(values: Array, part: str) -> Array:
        return store(f"{name}.{part}", values @ weights[f"{part}_weight"] + weights[f"{part}_bias"])

    queries, keys, values = (
        layout.scatter(project(inputs, part), head_count) for part in ("query", "key", "value")
    )
    scale = np.float32(queries.shape[-1] ** -0.5)
    logits = store(f"{name}.logits", (queries * scale) @ keys.swapaxes(-1, -2))
    probabilities = logits + layout.bias
    softmax_in_place(probabilities)
    mixed = layout.gather(store(f"{name}.probabilities", probabilities) @ values)
    return project(store(f"{name}.mixed", mixed), "output")


def _layer_norm(module: Module, name: str, inputs: Array, store: Store) -> Array:
    weights = _weights(module, name, store)
    centred = inputs - inputs.mean(axis=-1, keepdims=True)
    variance = np.square(centred).mean(axis=-1, keepdims=True)
    normal = centred / np.sqrt(variance + np.float32(LAYER_NORM_EPSILON))
    return store(name, normal * weights["gain"] + weights["bias"])


def _weights(module: Module, name: str, store: Store) -> dict[str, Array]:
    return {part: store(f"{name}.{part}.weights", w.data) for part, w in module.parameters.items()}
