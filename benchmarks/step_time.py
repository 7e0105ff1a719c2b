"""Time of one training step, NumPy against the same model in eager torch, paired in one process.

Run ``python -m benchmarks.step_time``. Both sides take the same batches, packed the same way, in
alternating blocks; torch gets its fused attention and its fused AdamW. One table row per thread count.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # NumPy and torch read their thread counts at import: only the child processes do so
    import torch

    from experiments.batches import PackedBatch
    from experiments.training import TrainingConfig

    Weights = dict[str, torch.nn.Parameter]

THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
WARMUP_STEPS = 20
BLOCK_STEPS = 10  # consecutive steps of one side; a block's median is robust to a neighbour's noise
BLOCK_COUNT = 30


@dataclass(frozen=True)
class Timing:
    """Median seconds a step of each block, pair by pair."""

    numpy: list[float]
    torch: list[float]

    def line(self, threads: int) -> str:
        """One table row: medians in milliseconds, ratio of each pair's times (median, 10% and 90%)."""
        ratios = sorted(n / t for n, t in zip(self.numpy, self.torch, strict=True))
        low, high = ratios[len(ratios) // 10], ratios[-1 - len(ratios) // 10]
        numpy_time, torch_time = (1e3 * statistics.median(side) for side in (self.numpy, self.torch))
        middle = statistics.median(ratios)
        return f"{threads:7}{numpy_time:11.2f}{torch_time:11.2f}{middle:9.2f}   {low:.2f} to {high:.2f}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table, one child process per thread count, since BLAS reads it at its import.

    Without torch, which no part of the package needs, say so.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, help="measure in this process; its environment is set already")
    threads = parser.parse_args(arguments).threads
    if importlib.util.find_spec("torch") is None:
        print("step time against eager torch: not measured, torch is not installed (the extra torch)")
        return 0
    if threads is not None:
        print(measure(threads).line(threads), flush=True)
        return 0
    print("threads  numpy, ms  torch, ms    ratio   10% to 90% of the paired blocks", flush=True)
    for count in dict.fromkeys((1, os.cpu_count() or 1)):
        environment = os.environ | {variable: str(count) for variable in THREAD_VARIABLES}
        command = [sys.executable, "-m", "benchmarks.step_time", "--threads", str(count)]
        subprocess.run(command, env=environment, check=True)
    return 0


def measure(threads: int) -> Timing:
    """Both sides' block medians."""
    import torch

    torch.set_num_threads(threads)
    sides = (numpy_step(), torch_step())
    for step in sides:
        for _ in range(WARMUP_STEPS):
            step()
    timing = Timing([], [])
    for _ in range(BLOCK_COUNT):
        for step, times in zip(sides, (timing.numpy, timing.torch), strict=True):
            times.append(statistics.median(_seconds(step) for _ in range(BLOCK_STEPS)))
    return timing


def _seconds(step: Callable[[], None]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def numpy_step() -> Callable[[], None]:
    """One step of the reference experiment's own loop, without a recorder."""
    from experiments.batches import PackedExamples
    from experiments.corpus import load_corpus
    from experiments.training import HEALTHY, TrainingConfig, TrainingState, training_step

    corpus = load_corpus()
    config = TrainingConfig()
    run = TrainingState(config, corpus)
    examples = PackedExamples(corpus.split("train"))
    return lambda: training_step(run, examples, config.clip_norm, HEALTHY) and None


def torch_step() -> Callable[[], None]:
    """The same step in eager torch: same data order, same packing, same schedule, clipping and optimizer."""
    import torch

    from experiments.batches import PackedExamples
    from experiments.corpus import load_corpus
    from experiments.training import TrainingConfig, TrainingState

    corpus = load_corpus()
    config = TrainingConfig()
    run = TrainingState(config, corpus)
    examples = PackedExamples(corpus.split("train"))
    weights = {name: torch.nn.Parameter(torch.tensor(w.data)) for name, w in run.model.named_parameters()}
    decayed = [weight for weight in weights.values() if weight.ndim >= 2]
    others = [weight for weight in weights.values() if weight.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed}, {"params": others, "weight_decay": 0.0}],
        betas=(config.beta1, config.beta2),
        eps=config.epsilon,
        weight_decay=config.weight_decay,
        fused=True,
    )

    def step() -> None:
        batch = examples.batch(run.data.draw().indices)
        logits = torch_logits(weights, config, batch)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(logits, torch.from_numpy(batch.targets)).backward()
        torch.nn.utils.clip_grad_norm_(weights.values(), config.clip_norm)
        learning_rate = run.schedule.next()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        optimizer.step()

    return step


def torch_logits(weights: Weights, config: TrainingConfig, batch: PackedBatch) -> torch.Tensor:
    """(N, V) logits of the twin model, with dropout."""
    import torch
    from torch.nn import functional

    def project(inputs: torch.Tensor, name: str) -> torch.Tensor:
        return torch.addmm(weights[f"{name}bias"], inputs, weights[f"{name}weight"])

    def norm(inputs: torch.Tensor, name: str) -> torch.Tensor:
        return functional.layer_norm(
            inputs, (config.width,), weights[f"{name}.gain"], weights[f"{name}.bias"]
        )

    def drop(inputs: torch.Tensor) -> torch.Tensor:
        return functional.dropout(inputs, config.dropout)

    size, length = len(batch.lengths), int(batch.lengths.max())
    slots = torch.from_numpy(batch.rows * length + batch.positions)
    tokens, positions = torch.from_numpy(batch.tokens), torch.from_numpy(batch.positions)

    def attend(inputs: torch.Tensor, name: str) -> torch.Tensor:
        padded = [
            inputs.new_zeros(size * length, config.width)
            .index_copy(0, slots, project(inputs, f"{name}.{part}_"))
            .view(size, length, config.head_count, -1)
            .transpose(1, 2)
            for part in ("query", "key", "value")
        ]
        mixed = functional.scaled_dot_product_attention(*padded, is_causal=True).transpose(1, 2)
        return project(mixed.reshape(size * length, config.width)[slots], f"{name}.output_")

    stream = functional.embedding(tokens, weights["embedding.token"])
    stream = drop(stream + functional.embedding(positions, weights["embedding.position"]))
    for block in (f"blocks.{layer}" for layer in range(config.layer_count)):
        stream = stream + drop(attend(norm(stream, f"{block}.norm1"), f"{block}.attention"))
        inner = functional.relu(project(norm(stream, f"{block}.norm2"), f"{block}.mlp.up."))
        stream = stream + drop(project(inner, f"{block}.mlp.down."))
    return norm(stream, "final_norm") @ weights["embedding.token"].T


if __name__ == "__main__":
    sys.exit(main())
