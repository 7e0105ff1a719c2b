"""Emulated half precision: rounding against the real types, range counts, and the rounded forward pass."""

from pathlib import Path

import numpy as np
import pytest

from experiments.batches import PackedBatch, PackedExamples
from experiments.corpus import Corpus, load_corpus
from experiments.experiment import load_experiment
from experiments.fp16_drift import fp16_drift, gradients, layer_of, measure_drift
from experiments.number_formats import BF16, FORMATS, FP16, RangeCount, count_range
from experiments.rounded_forward import rounded_logits
from experiments.training import TrainingConfig, TrainingState
from experiments.transformer import Transformer, causal_mask, no_dropout

CONFIG = TrainingConfig(total_steps=2, warmup_steps=1, evaluation_interval=2, width=16)


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return load_corpus()


@pytest.fixture(scope="module")
def model(corpus: Corpus) -> Transformer:
    return TrainingState(CONFIG, corpus).model


@pytest.fixture(scope="module")
def batch(corpus: Corpus) -> PackedBatch:
    return PackedExamples(corpus.split("validation")).batch(range(10))


def float32(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1 + 2**-8, 1.0),  # a tie goes to the even neighbour
        (1 + 3 * 2**-8, 1 + 2**-6),
        (1 + 2**-8 + 2**-20, 1 + 2**-7),  # just above the tie
        (-3.14159274, -3.140625),
        (3.4e38, np.inf),  # above the largest bfloat16 plus half its spacing
        (BF16.largest, BF16.largest),
        (np.inf, np.inf),
        (0.0, 0.0),
        (1e-40, 9.9492e-41),  # subnormal, a multiple of 2^-133
    ],
)
def test_bf16_rounds_to_nearest_even(value: float, expected: float) -> None:
    """Eight significant bits, the range of float32."""
    assert BF16.round(float32(value))[0] == pytest.approx(expected, rel=1e-4 if 0 < value < 1e-38 else 0)


def test_bf16_agrees_with_torch() -> None:
    """Bit for bit on random bit patterns, NaN apart."""
    torch = pytest.importorskip("torch")
    bits = np.random.default_rng(0).integers(0, 2**32, 20000, dtype=np.uint32)
    values = bits.view(np.float32)
    values = values[~np.isnan(values)]
    expected = torch.from_numpy(values).to(torch.bfloat16).to(torch.float32).numpy()
    assert np.array_equal(BF16.round(values).view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("number_format", FORMATS, ids=lambda f: f.name)
def test_rounding_keeps_nan_and_is_idempotent(number_format) -> None:
    """NaN is data; a second rounding changes nothing."""
    values = np.random.default_rng(2).standard_normal(1000).astype(np.float32)
    once = number_format.round(values)
    assert np.array_equal(number_format.round(once), once)
    assert np.isnan(number_format.round(float32(np.nan)))[0]


def test_range_counts_name_what_leaves_fp16() -> None:
    """Overflow from 65520 on, subnormal below 6.1e-5, zero at or below half of 6.0e-8."""
    values = float32(0.0, 1.0, 65519.0, 65520.0, -7e4, 5e-5, 2.9e-8, 3.1e-8, np.inf, np.nan)
    counted = count_range(values, FP16)
    assert counted == RangeCount(10, 9, 2, 2, 1, 7e4)
    assert (counted + counted).fractions() == counted.fractions() == (2 / 9, 2 / 9, 1 / 9)


def test_pass_without_rounding_is_the_model_s_own(model: Transformer, batch: PackedBatch) -> None:
    """The emulation computes the same function: it differs by float32 rounding only."""
    logits = rounded_logits(model, batch, lambda name, values: values)
    exact = model(batch, causal_mask, no_dropout).data
    # some 10 operations a layer, 2 layers, each off by sqrt(256) u at most relative to the row: 320 * 6e-8
    assert np.linalg.norm(logits - exact) / np.linalg.norm(exact) < 2e-5


def test_every_weight_is_rounded(model: Transformer, batch: PackedBatch) -> None:
    """Each parameter passes through ``store`` under a name of its own."""
    seen = {}
    rounded_logits(model, batch, lambda name, values: seen.setdefault(name, values))
    stored = {name.removesuffix(".weights") for name in seen if name.endswith(".weights")}
    assert stored == {name for name, _ in model.named_parameters()}


def test_fewer_bits_drift_further(model: Transformer, batch: PackedBatch) -> None:
    """Medians lie near each format's unit roundoff, 2^-11 and 2^-8, within a factor of 30."""
    fp16, bf16 = (np.median(measure_drift(model, batch, f).relative_errors) for f in (FP16, BF16))
    assert 2**-11 / 30 < fp16 < 30 * 2**-11
    assert 2**-8 / 30 < bf16 < 30 * 2**-8
    assert fp16 < bf16


def test_overflow_is_counted_where_it_happens(corpus: Corpus, batch: PackedBatch) -> None:
    """The products of a layer with weights 40,000 times too large overflow in fp16, not in bf16."""
    large = TrainingState(CONFIG, corpus).model
    large.blocks[0].up.parameters["weight"].data *= 4e4  # the weights themselves still fit
    fp16, bf16 = (measure_drift(large, batch, f).ranges for f in (FP16, BF16))
    assert fp16["blocks.0.mlp.up"].overflow_count > 0
    assert fp16["blocks.0.norm2"].overflow_count == 0
    assert bf16["blocks.0.mlp.up"].overflow_count == 0


def test_layers_group_tensors_and_keep_weights_apart() -> None:
    """What a row of the table stands for."""
    names = (
        "embedding",
        "embedding.token.weights",
        "blocks.1.attention.logits",
        "blocks.1.norm1.gain.weights",
    )
    assert [layer_of(name) for name in names] == [
        "embedding",
        "embedding weights",
        "blocks.1",
        "blocks.1 weights",
    ]


def test_gradients_leave_no_hook_and_no_gradient_behind(model: Transformer, batch: PackedBatch) -> None:
    """One gradient per module output and per weight."""
    found = gradients(model, batch)
    assert len(found["activations"]) == len(list(model.named_modules()))
    assert len(found["weights"]) == len(list(model.named_parameters()))
    assert all(weight.gradient is None for _, weight in model.named_parameters())
    assert not any(module._forward_hooks for _, module in model.named_modules())


def test_command_prints_three_tables_twice_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Trained once; the second call takes the checkpoints and prints the same figures."""
    experiment = load_experiment("18-fp16-drift")
    texts = []
    for _ in range(2):
        assert fp16_drift(experiment, CONFIG, tmp_path, overwrite=False) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert len(texts[0].split("\n\n")) == 3
