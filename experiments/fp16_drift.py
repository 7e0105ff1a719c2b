"""Forward pass of trained checkpoints in emulated fp16 and bf16, beside float32. A preview: no training.

Run ``python -m experiments run 18-fp16-drift``.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from experiments.autograd import Tensor, softmax_cross_entropy
from experiments.batches import PackedBatch, PackedExamples
from experiments.checkpoint import checkpoint_path, load_checkpoint
from experiments.corpus import PRIMARY_SPLIT, Corpus, load_corpus
from experiments.errors import UsageError
from experiments.experiment import Experiment, run_experiment
from experiments.number_formats import FORMATS, FP16, Array, NumberFormat, RangeCount, count_range
from experiments.rounded_forward import rounded_logits
from experiments.training import TrainingConfig, TrainingState
from experiments.transformer import Transformer, causal_mask, no_dropout

SEED_COUNT = 3
LOSS_SCALES = (1.0, 2.0**8, 2.0**16)  # none, a small one, the common first guess of dynamic loss scaling
Ranges = dict[str, RangeCount]


@dataclass(frozen=True)
class Drift:
    """How far the logits of one checkpoint move in a format."""

    relative_errors: Array  # (N,) |difference| / |float32| of each token's centred logits
    flip_count: int  # tokens whose most likely successor changes
    loss_change: float  # nats/token
    ranges: Ranges  # by tensor


def fp16_drift(experiment: Experiment, config: TrainingConfig, out: Path | None, overwrite: bool) -> int:
    """Train the seeds where their last checkpoint is missing, print three tables; always 0.

    Raises UsageError for a model whose forward pass ``rounded_forward`` does not spell out.
    """
    if (config.norm_placement, config.activation) != ("pre", "relu"):
        raise UsageError(
            f"norm_placement={config.norm_placement}, activation={config.activation}: "
            f"{experiment.name} rounds the forward pass of pre and relu only"
        )
    directory = out or Path("runs") / experiment.name
    corpus = load_corpus(config.direction, config.split_seed)
    configs = [dataclasses.replace(config, seed=config.seed + offset) for offset in range(SEED_COUNT)]
    models = [trained_model(experiment, c, corpus, directory / f"seed-{c.seed}", overwrite) for c in configs]
    batch = PackedExamples(corpus.split(PRIMARY_SPLIT)).batch(range(len(corpus.split(PRIMARY_SPLIT))))
    drifts = {f.name: [measure_drift(model, batch, f) for model in models] for f in FORMATS}
    show_logits(drifts, [c.seed for c in configs], len(batch.targets))
    show_ranges({name: total_ranges(found) for name, found in drifts.items()})
    show_loss_scaling(models, batch)
    return 0


def trained_model(
    experiment: Experiment, config: TrainingConfig, corpus: Corpus, directory: Path, overwrite: bool
) -> Transformer:
    """The model at the end of training, from its checkpoint; trained when there is none."""
    checkpoint = checkpoint_path(directory, config.total_steps)
    if overwrite or not checkpoint.exists():
        run_experiment(experiment, config, directory, overwrite=overwrite)
    run = TrainingState(config, corpus)
    run.load_state(load_checkpoint(checkpoint, run, config.resumable_hash()).state)
    return run.model


def measure_drift(model: Transformer, batch: PackedBatch, number_format: NumberFormat) -> Drift:
    """The rounded pass against the model's own, on every token of the batch."""
    ranges: Ranges = {}

    def store(name: str, values: Array) -> Array:
        ranges[name] = count_range(values, number_format)
        return number_format.round(values)

    with np.errstate(invalid="ignore"):  # an overflow makes later layers non-finite; that is counted
        rounded = rounded_logits(model, batch, store)
    exact = model(batch, causal_mask, no_dropout).data
    losses = [float(softmax_cross_entropy(Tensor(x), batch.targets)[0].data) for x in (exact, rounded)]
    return Drift(
        relative_errors=_relative_errors(rounded, exact),
        flip_count=int(np.count_nonzero(rounded.argmax(axis=1) != exact.argmax(axis=1))),
        loss_change=losses[1] - losses[0],
        ranges=ranges,
    )


def _relative_errors(rounded: Array, exact: Array) -> Array:
    """Row by row; centred, since a softmax does not see what all logits of a row share."""
    one, two = (rows - rows.mean(axis=1, keepdims=True) for rows in (rounded, exact))
    errors: Array = np.linalg.norm(one - two, axis=1) / np.linalg.norm(two, axis=1)
    return errors


def total_ranges(drifts: Sequence[Drift]) -> Ranges:
    """Counts of each tensor over all seeds."""
    totals: Ranges = defaultdict(RangeCount)
    for drift in drifts:
        for name, count in drift.ranges.items():
            totals[name] += count
    return totals


def layer_of(tensor_name: str) -> str:
    """ "embedding", "blocks.0", ..., "final_norm", "head"; weights of a layer apart from its activations."""
    parts = tensor_name.split(".")
    layer = ".".join(parts[:2]) if parts[0] == "blocks" else parts[0]
    return f"{layer} weights" if parts[-1] == "weights" else layer


def show_logits(drifts: dict[str, list[Drift]], seeds: Sequence[int], token_count: int) -> None:
    """One row per format and seed."""
    print(f"{PRIMARY_SPLIT}, {token_count} tokens: relative error of a token's logits against float32")
    print("format  seed    median       99%   largest  argmax flips  loss change, nats/token")
    for name, found in drifts.items():
        for seed, drift in zip(seeds, found, strict=True):
            median, high = np.quantile(drift.relative_errors, (0.5, 0.99))
            print(
                f"{name:6}{seed:6}{median:10.2e}{high:10.2e}{drift.relative_errors.max():10.2e}"
                f"{drift.flip_count:14}{drift.loss_change:+25.1e}"
            )


def show_ranges(ranges: dict[str, Ranges]) -> None:
    """Shares of the non-zero elements of each layer that leave the format's range, all seeds together."""
    print("\nshare of the non-zero elements, all seeds; largest: absolute value before rounding")
    print("layer                  largest " + "".join(f"  {n} over  subnormal    flushed" for n in ranges))
    by_layer = {name: _by_layer(counts) for name, counts in ranges.items()}
    for layer in by_layer[FP16.name]:
        cells = "".join(
            "{:11.1e}{:11.1e}{:11.1e}".format(*counts[layer].fractions()) for counts in by_layer.values()
        )
        print(f"{layer:21}{by_layer[FP16.name][layer].largest:9.3g} {cells}")


def _by_layer(counts: Ranges) -> Ranges:
    layers: Ranges = defaultdict(RangeCount)
    for name, count in counts.items():
        layers[layer_of(name)] += count
    return layers


def show_loss_scaling(models: Sequence[Transformer], batch: PackedBatch) -> None:
    """What fp16 would do to float32 gradients at several loss scales; the forward pass has no part in it."""
    print("\nfloat32 gradients cast to fp16, all seeds: share of the non-zero elements")
    print("loss scale  gradients of    overflow  subnormal    flushed    largest")
    found = [gradients(model, batch) for model in models]
    for scale in LOSS_SCALES:
        for kind in ("activations", "weights"):
            total = sum(
                (count_range(g * np.float32(scale), FP16) for model in found for g in model[kind]),
                RangeCount(),
            )
            cells = "".join(f"{share:11.1e}" for share in total.fractions())
            print(f"{scale:10.0f}  {kind:12}{cells}{total.largest:11.3g}")


def gradients(model: Transformer, batch: PackedBatch) -> dict[str, list[Array]]:
    """Gradients of the mean token loss in evaluation mode, of module outputs and of weights."""
    found: dict[str, list[Array]] = {"activations": [], "weights": []}

    def watch(output: Tensor, token_mask: object) -> None:
        output.register_gradient_hook(found["activations"].append)

    handles = [module.register_forward_hook(watch) for _, module in model.named_modules()]
    softmax_cross_entropy(model(batch, causal_mask, no_dropout), batch.targets)[0].backward()
    for handle in handles:
        handle.remove()
    for _, weight in model.named_parameters():
        if weight.gradient is not None:
            found["weights"].append(weight.gradient)
            weight.gradient = None
    return found
