"""The passes that statistics are made of, against the smallest work that could do: one row per limit.

    python -m benchmarks.statistics_kernel [--steps 400]

First table: all statistics of one float32 array against one sum of squares over the same memory,
np.dot(x, x); the two take turns, and the ratio is the median over pairs. Second: the warm spectral norm of a
128 x 512 matrix against np.linalg.svd, in turn too: its default, which makes all 512 right vectors, the thin
one, and values only. Third: its error on the matrices of the reference training, at the default cadence,
after the first 100 steps.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # as the reference experiments do

import numpy as np

from experiments.batches import PackedExamples
from experiments.code_path import HEALTHY
from experiments.corpus import load_corpus
from experiments.training import TrainingConfig, TrainingState
from experiments.training_step import training_step
from recorder import Cadence
from recorder.kernel import Kernel, NumpyKernel, Summary, best_kernel
from recorder.statistics import SpectralNorm

SIZES = (10_000, 100_000, 1_000_000, 4_000_000, 16_000_000)
PAIRS = 31
SHORTEST_SECONDS = 2e-3  # of one timing: many calls of a small array make one

LARGEST_PASS_RATIO = 1.25
SMALLEST_SVD_RATIO = 800.0
LARGEST_ERROR = 2e-3
SHAPE = (128, 512)
SVD_KINDS: tuple[tuple[str, dict[str, bool]], ...] = (
    ("default", {}),
    ("thin", {"full_matrices": False}),
    ("values only", {"compute_uv": False}),
)
FIRST_STEPS = 100
FLOAT32_ROUNDING, FLOAT64_ROUNDING = 1e-6, 1e-12
"""Relative; of an estimate from float32 products of 512 terms, and of the reference itself."""


@dataclass(frozen=True)
class Comparison:
    """Median seconds of one call each, and the median ratio of the pairs."""

    seconds: float
    peer_seconds: float
    ratio: float


def compare(work: Callable[[], object], peer: Callable[[], object]) -> Comparison:
    """Time two callables in turn."""
    repeats = [_repeats(call) for call in (work, peer)]
    pairs = np.array(
        [[_seconds(call, n) for call, n in zip((work, peer), repeats, strict=True)] for _ in range(PAIRS)]
    )
    own, other = np.median(pairs, axis=0)
    return Comparison(float(own), float(other), float(np.median(pairs[:, 0] / pairs[:, 1])))


def _repeats(call: Callable[[], object]) -> int:
    call()
    return max(1, round(SHORTEST_SECONDS / _seconds(call, 3)))


def _seconds(call: Callable[[], object], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats


def pass_rows(kernel: Kernel) -> list[str]:
    """One line per size: the pass of a kernel against one dot product."""
    lines = []
    for size in SIZES:
        array = np.random.default_rng(0).standard_normal(size, dtype=np.float32)
        statistics = np.empty((1, len(Summary._fields)))
        c = compare(
            lambda a=array, s=statistics: kernel.summarize([a], s),  # type: ignore[misc]
            lambda a=array: np.dot(a, a),  # type: ignore[misc]
        )
        speed, peer_speed = (1e-9 * array.nbytes / seconds for seconds in (c.seconds, c.peer_seconds))
        verdict = "" if c.ratio <= LARGEST_PASS_RATIO else "  over"
        lines.append(f"{kernel.name:<10}{size:12,}{speed:10.1f}{peer_speed:10.1f}{c.ratio:8.2f}{verdict}")
    return lines


def svd_rows(kernel: Kernel) -> list[str]:
    """One line per kind of SVD: the warm estimate against it."""
    matrix = np.random.default_rng(0).standard_normal(SHAPE, dtype=np.float32)
    spectral = SpectralNorm(kernel)
    spectral.estimate(matrix)  # cold
    lines = []
    for name, options in SVD_KINDS:
        c = compare(
            lambda o=options: np.linalg.svd(matrix, **o),  # type: ignore[misc]
            lambda: spectral.estimate(matrix),
        )
        verdict = "" if c.ratio >= SMALLEST_SVD_RATIO else "  under"
        own, other = 1e6 * c.peer_seconds, 1e6 * c.seconds
        lines.append(f"{kernel.name:<10}{name:<14}{own:10.1f}{other:12.0f}{c.ratio:8.0f}{verdict}")
    return lines


def spectral_errors(steps: int, kernel: Kernel) -> tuple[np.ndarray, int]:
    """(relative errors after the first 100 steps, all matrices; certificates that did not hold)."""
    corpus, config = load_corpus(), TrainingConfig()
    examples, state = PackedExamples(corpus.split("train")), TrainingState(config, corpus)
    cadence = Cadence()
    spectral: dict[str, SpectralNorm] = {}
    errors, violations = [], 0
    for step in range(steps):
        if step % cadence.spectral_norms == 0:
            for name, parameter in state.model.named_parameters():
                if parameter.data.ndim != 2:
                    continue
                iteration = spectral.setdefault(name, SpectralNorm(kernel))
                estimate = iteration.estimate(parameter.data)
                truth = np.linalg.norm(parameter.data.astype(np.float64), 2)
                if step >= FIRST_STEPS:
                    errors.append(abs(estimate / truth - 1))
                if step % cadence.spectral_bounds == 0:
                    upper = iteration.upper_bound(parameter.data)
                    violations += bool(estimate > truth * (1 + FLOAT32_ROUNDING))
                    violations += bool(upper < truth * (1 - FLOAT64_ROUNDING))
        training_step(state, examples, config.clip_norm, HEALTHY)
    return np.array(errors), violations


def main() -> None:
    """Print the three tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=400)
    arguments = parser.parse_args()
    compiled = best_kernel()
    kernels = [compiled] if compiled.name == "numpy" else [compiled, NumpyKernel()]
    print(f"all statistics against one sum of squares, at most {LARGEST_PASS_RATIO} times (compiled)")
    print(f"{'kernel':<10}{'elements':>12}{'GB/s':>10}{'dot GB/s':>10}{'ratio':>8}")
    for kernel in kernels:
        print("\n".join(pass_rows(kernel)), flush=True)
    limit = f"at least {SMALLEST_SVD_RATIO:.0f} times cheaper"
    print(f"\nwarm spectral norm of {SHAPE[0]} x {SHAPE[1]} against an SVD, {limit}")
    print(f"{'kernel':<10}{'SVD':<14}{'warm, us':>10}{'SVD, us':>12}{'ratio':>8}")
    for kernel in kernels:
        print("\n".join(svd_rows(kernel)), flush=True)
    print(f"\nits relative error in training, 95th percentile at most {LARGEST_ERROR}")
    print(f"{'kernel':<10}{'estimates':>10}{'median':>10}{'p95':>10}{'max':>10}{'bounds broken':>15}")
    for kernel in kernels:
        errors, violations = spectral_errors(arguments.steps, kernel)
        middle, high = np.percentile(errors, (50, 95))
        verdict = "" if high <= LARGEST_ERROR else "  over"
        print(
            f"{kernel.name:<10}{errors.size:10}{middle:10.1e}{high:10.1e}{errors.max():10.1e}{violations:15}"
            f"{verdict}"
        )


if __name__ == "__main__":
    main()
