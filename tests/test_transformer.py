"""The model: padding, causality, gradients of the whole, and what a recorder can watch."""

import dataclasses

import numpy as np
import pytest

from experiments.autograd import LAYER_NORM_EPSILON, Array, Tensor, softmax_cross_entropy
from experiments.batches import PackedBatch, PackedExamples
from experiments.corpus import Corpus, load_corpus
from experiments.faults.masks import EVERYTHING, mask_with_later_keys
from experiments.transformer import (
    Dropout,
    MaskFunction,
    ModelSize,
    Transformer,
    add_branch,
    causal_mask,
    no_dropout,
)
from recorder.hooks import Attention

SEE_EVERYTHING = mask_with_later_keys(EVERYTHING)

SMALL = ModelSize(vocabulary_size=39, context_length=40, width=16, head_count=2, feed_forward_width=24)
POST_NORM = dataclasses.replace(SMALL, norm_placement="post")
GELU = dataclasses.replace(SMALL, activation="gelu")


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return load_corpus()


@pytest.fixture
def examples(corpus: Corpus) -> PackedExamples:
    return PackedExamples(corpus.split("train"))


def build(dtype: str = "float64", size: ModelSize = SMALL) -> Transformer:
    """A model with seed 0."""
    return Transformer(size, np.random.SeedSequence(0), dtype)


def token_losses(model: Transformer, batch: PackedBatch, mask: MaskFunction = causal_mask) -> np.ndarray:
    """(N,) losses in evaluation mode."""
    return softmax_cross_entropy(model(batch, mask, no_dropout), batch.targets)[1]


def with_token(batch: PackedBatch, index: int, token: int) -> PackedBatch:
    """The batch with one input token replaced."""
    tokens = batch.tokens.copy()
    tokens[index] = token
    return dataclasses.replace(batch, tokens=tokens)


def test_reference_model_has_about_100000_parameters(corpus: Corpus) -> None:
    """d=64, 4 heads, 2 layers, d_ff=256, tied embeddings."""
    model = build("float32", ModelSize(len(corpus.vocabulary), corpus.context_length()))
    assert model.parameter_count() == 105_152
    assert {weight.data.dtype for _, weight in model.named_parameters()} == {np.dtype("float32")}


@pytest.mark.parametrize("mask", [causal_mask, SEE_EVERYTHING])
def test_losses_do_not_depend_on_the_padding(examples: PackedExamples, mask: MaskFunction) -> None:
    """A sequence scores the same alone and batched with longer ones."""
    model = build()
    alone = examples.batch([3])
    longest = int(np.argmax([len(e.tokens) for e in examples.examples]))
    together = examples.batch([3, longest, 40])
    assert together.lengths[0] < together.lengths.max()
    # Other shapes may sum in another order: some 10 layers of float64 sums of at most 40 terms of order 1,
    # 10 * 40 * 2^-53 = 4e-14; a single padded key that counts moves a loss by about 1 / 40 of itself.
    np.testing.assert_allclose(
        token_losses(model, together, mask)[together.rows == 0],
        token_losses(model, alone, mask),
        rtol=0,
        atol=1e-12,
    )


def test_later_tokens_leave_earlier_losses_bit_identical(examples: PackedExamples) -> None:
    """The causal mask is exact: masked attention is 0.0, not small."""
    model = build("float32")
    batch = examples.batch([0, 5, 9])
    changed = with_token(batch, 6, int(batch.tokens[6]) + 1)
    before, after = token_losses(model, batch), token_losses(model, changed)
    assert batch.rows[6] == 0
    others = np.arange(len(before)) < 6
    others |= batch.rows > 0
    assert np.array_equal(before[others], after[others])
    assert before[6] != after[6]


def test_without_the_mask_later_tokens_reach_earlier_losses(examples: PackedExamples) -> None:
    """The same probe tells the fault."""
    model = build("float32")
    batch = examples.batch([0, 5, 9])
    changed = with_token(batch, 6, int(batch.tokens[6]) + 1)
    before, after = (token_losses(model, b, SEE_EVERYTHING) for b in (batch, changed))
    assert np.all(before[:6] != after[:6])
    assert np.array_equal(before[batch.rows > 0], after[batch.rows > 0])


@pytest.mark.parametrize("size", [SMALL, POST_NORM, GELU], ids=["pre-norm relu", "post-norm", "gelu"])
def test_gradient_of_the_whole_model_agrees_with_central_differences(
    examples: PackedExamples, size: ModelSize
) -> None:
    """In float64, along one random direction per weight, with dropout on."""
    model = build(size=size)
    batch = examples.batch([0, 70])
    generator = np.random.default_rng(2)

    def loss() -> float:
        dropout = Dropout(0.2, np.random.SeedSequence(3))
        return softmax_cross_entropy(model(batch, causal_mask, dropout), batch.targets)[0]

    loss().backward()
    step = 1e-6  # small: a unit of relu that crosses 0 within the step would spoil the difference
    for name, weight in model.named_parameters():
        original, direction = weight.data, generator.normal(size=weight.data.shape)
        direction /= np.linalg.norm(direction)
        weight.data = original + step * direction
        above = float(loss().data)
        weight.data = original - step * direction
        below = float(loss().data)
        weight.data = original
        expected = (above - below) / (2 * step)
        # Rounding: a loss of 3.7 carries some 10 * 2^-53 * 3.7 = 4e-15, over 2e-6: 2e-9. Truncation: step^2
        # / 6 = 2e-13 times a third derivative; layer norm of inputs of norm 0.1 makes it at most 1e3 to 1e4.
        assert (weight.gradient * direction).sum() == pytest.approx(expected, rel=0, abs=1e-8), name


def test_tied_embedding_gets_both_gradients(examples: PackedExamples) -> None:
    """A token that is only predicted, never read, still has a gradient through the head."""
    model = build()
    batch = examples.batch([0])
    end = int(batch.targets[-1])
    assert end not in batch.tokens
    softmax_cross_entropy(model(batch, causal_mask, no_dropout), batch.targets)[0].backward()
    assert np.abs(dict(model.named_parameters())["embedding.token"].gradient[end]).max() > 0
    assert list(model.tied_names()) == [("head.weight", "embedding.token")]


@pytest.mark.parametrize("size", [SMALL, POST_NORM, GELU], ids=["pre-norm relu", "post-norm", "gelu"])
def test_modules_are_seen_in_order_of_the_forward_pass(examples: PackedExamples, size: ModelSize) -> None:
    """Each named module fires its hook once, in the order of named_modules, with one row a real token."""
    model = build(size=size)
    batch = examples.batch([0, 1, 2])
    seen: list[tuple[str, int]] = []
    for name, module in model.named_modules():
        module.register_forward_hook(
            lambda output, mask, name=name: seen.append((name, len(output.data))) if mask is None else None
        )
    model(batch, causal_mask, no_dropout)
    assert seen == [(name, len(batch.tokens)) for name, _ in model.named_modules()]


def test_post_norm_normalises_the_sum_of_each_branch_with_the_stream(examples: PackedExamples) -> None:
    """norm(x + branch(x)), the branch reading x itself; the last sum goes to the head, with no final norm."""
    model = build(size=POST_NORM)
    sums: dict[str, Array] = {}
    inputs: dict[str, Array] = {}
    outputs: dict[str, Array] = {}

    def join(name: str, stream: Tensor, branch: Tensor) -> Tensor:
        inputs[name], sums[name] = stream.data, stream.data + branch.data
        return add_branch(name, stream, branch)

    for name, module in model.named_modules():
        module.register_forward_hook(lambda output, _, name=name: outputs.update({name: output.data}))
    model(examples.batch([0, 1]), causal_mask, no_dropout, join)
    assert list(sums) == [f"blocks.{layer}.{part}" for layer in (0, 1) for part in ("attention", "mlp")]
    for layer, before in ((0, "embedding"), (1, "blocks.0")):
        block = f"blocks.{layer}"
        for branch, norm, read in (("attention", "norm1", before), ("mlp", "norm2", f"{block}.norm1")):
            assert np.array_equal(inputs[f"{block}.{branch}"], outputs[read])
            rows = sums[f"{block}.{branch}"]
            centred = rows - rows.mean(axis=1, keepdims=True)
            expected = centred / np.sqrt(centred.var(axis=1, keepdims=True) + LAYER_NORM_EPSILON)
            # float64, 16 terms summed in another order, values of order 1: some 16 * 2^-53 = 2e-15
            np.testing.assert_allclose(outputs[f"{block}.{norm}"], expected, rtol=0, atol=1e-13)
    assert np.array_equal(outputs["blocks.1"], outputs["blocks.1.norm2"])
    head = outputs["blocks.1"] @ model.embedding.parameters["token"].data.T
    assert np.array_equal(outputs["head"], head)
    assert "final_norm" not in outputs


def test_both_norm_placements_start_from_the_same_matrices() -> None:
    """The choice draws nothing: only the final norm's two vectors are gone."""
    pre, post = build().state(), build(size=POST_NORM).state()
    assert pre.keys() - post.keys() == {"final_norm.gain", "final_norm.bias"}
    assert all(np.array_equal(pre[name], weight) for name, weight in post.items())


@pytest.mark.parametrize("name", ["relu", "gelu"])
def test_activation_module_is_called_what_it_is(name: str) -> None:
    """Silent units are counted where the role is relu: gelu has no exact zeros."""
    model = build(size=dataclasses.replace(SMALL, activation=name))
    found = {
        (path, module.role) for path, module in model.named_modules() if path.startswith("blocks.0.mlp.")
    }
    assert found == {
        ("blocks.0.mlp.up", "linear"),
        (f"blocks.0.mlp.{name}", name),
        ("blocks.0.mlp.down", "linear"),
    }


def test_freeze_takes_whole_parts_of_names() -> None:
    """blocks.1 is not blocks.10, and mlp means both of its matrices; what is frozen is not decayed either."""
    model = build(size=dataclasses.replace(SMALL, layer_count=11))
    model.freeze(["blocks.1", "blocks.2.mlp", "embedding"])
    frozen = {name for name, weight in model.named_parameters() if not weight.trainable}
    starts = ("blocks.1.", "blocks.2.mlp.", "embedding.")
    assert frozen == {name for name in model.state() if name.startswith(starts)}
    weights = dict(model.named_parameters())
    assert not any(weights[name].weight_decay for name in frozen)
    assert weights["blocks.10.mlp.up.weight"].weight_decay


def test_gradient_hooks_on_outputs_fire_once(examples: PackedExamples) -> None:
    """Every module's output gets one finished gradient of its own shape per backward pass."""
    model = build()
    batch = examples.batch([0, 1])
    shapes: dict[str, list[tuple[tuple[int, ...], tuple[int, ...]]]] = {}

    def watch(name: str) -> None:
        def hook(output: object, _: object) -> None:
            output.register_gradient_hook(
                lambda gradient: shapes.setdefault(name, []).append((gradient.shape, output.data.shape))
            )

        dict(model.named_modules())[name].register_forward_hook(hook)

    for name, _ in model.named_modules():
        watch(name)
    softmax_cross_entropy(model(batch, causal_mask, no_dropout), batch.targets)[0].backward()
    assert set(shapes) == {name for name, _ in model.named_modules()}
    assert all(len(found) == 1 and found[0][0] == found[0][1] for found in shapes.values())


def test_attention_hook_gets_the_probabilities_of_the_padded_grid(examples: PackedExamples) -> None:
    """(B, H, T, T), zero above the diagonal, with the mask of real tokens."""
    model = build()
    batch = examples.batch([0, 1, 2])
    seen: list[Attention] = []
    model.blocks[1].attention.register_attention_hook(seen.append)
    model(batch, causal_mask, no_dropout)
    length = int(batch.lengths.max())
    assert seen[0].probabilities.shape == seen[0].logits().shape == (3, 2, length, length)
    assert np.all(np.triu(seen[0].probabilities, 1) == 0)
    assert seen[0].token_mask.sum(axis=1).tolist() == batch.lengths.tolist()


def test_removed_hooks_leave_nothing_behind(examples: PackedExamples) -> None:
    """After remove() the registries are empty and no hook is called."""
    model = build()
    calls: list[object] = []
    handles = [m.register_forward_hook(lambda *a: calls.append(a)) for _, m in model.named_modules()]
    handles += [w.register_gradient_hook(calls.append) for _, w in model.named_parameters()]
    handles += [block.attention.register_attention_hook(calls.append) for block in model.blocks]
    for handle in handles:
        handle.remove()
    batch = examples.batch([0])
    softmax_cross_entropy(model(batch, causal_mask, no_dropout), batch.targets)[0].backward()
    assert calls == []
    assert not any(module._forward_hooks for _, module in model.named_modules())
    assert not any(weight._hooks for _, weight in model.named_parameters())


def test_first_loss_is_near_that_of_a_uniform_guess(corpus: Corpus, examples: PackedExamples) -> None:
    """Loss at step 0 / ln V is between 1 and 1.25: the initialisation is neither too large nor broken."""
    model = build("float32", ModelSize(len(corpus.vocabulary), corpus.context_length()))
    mean = token_losses(model, examples.batch(range(100))).mean()
    assert 0.99 < mean / np.log(len(corpus.vocabulary)) < 1.25


def test_packed_batch_shifts_targets_and_marks_the_answer(corpus: Corpus, examples: PackedExamples) -> None:
    """Targets are the next tokens; the answer starts after the separator and includes the end."""
    batch = examples.batch([7, 2])
    example = examples.examples[7]
    row = batch.rows == 0
    assert tuple(batch.tokens[row]) == example.tokens[:-1]
    assert tuple(batch.targets[row]) == example.tokens[1:]
    assert batch.positions[row].tolist() == list(range(len(example.tokens) - 1))
    assert batch.is_answer[row].sum() == len(example.answer) + 1
    assert batch.non_padding_token_count() == batch.lengths.sum() == len(batch.targets)
