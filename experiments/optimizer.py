"""AdamW over one contiguous buffer, gradient clipping by global norm, and the learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from experiments.autograd import Array, Tensor
from recorder import content_hash


@dataclass(frozen=True)
class LearningRatePlan:
    """Linear warmup to the peak, then half a cosine down to the final rate (Loshchilov and Hutter 2017).

    With a final rate equal to the peak it is constant after warmup, exactly: 0 times the cosine is added.
    """

    peak: float
    final: float
    warmup_steps: int
    total_steps: int

    def learning_rate(self, step: int) -> float:
        """The rate of the update from w_step to w_(step + 1); the peak is reached at the last warmup step."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        decay_steps = max(1, self.total_steps - self.warmup_steps)
        progress = min(1.0, (step - self.warmup_steps) / decay_steps)
        return self.final + (self.peak - self.final) * (1 + math.cos(math.pi * progress)) / 2


class Schedule:
    """The plan with a place in it: what the loop really applies, step after step."""

    def __init__(self, plan: LearningRatePlan) -> None:
        self.plan = plan
        self.step = 0

    def next(self) -> float:
        """The rate of the coming update; moves on by one."""
        rate = self.plan.learning_rate(self.step)
        self.step += 1
        return rate

    def state(self) -> dict[str, Any]:
        """The place in the plan, and the plan's shape."""
        return {"step": self.step, "plan": asdict(self.plan)}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go to a place in a plan. A resume with more steps keeps the plan that the run was begun with."""
        self.step = state["step"]
        self.plan = LearningRatePlan(**state["plan"])


class AdamW:
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019), decaying what asks for it: matrices.

    All weights, decayed ones first, are moved into one flat buffer, so that an update is a dozen
    array operations in all. Each ``Tensor.data`` becomes a view of that buffer.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        *,
        betas: tuple[float, float],
        epsilon: float,
        weight_decay: float,
    ) -> None:
        self.parameters = sorted(parameters, key=lambda parameter: not parameter.weight_decay)
        self.betas = betas
        self.epsilon = epsilon
        self.weight_decay = weight_decay
        self.decayed_count = sum(p.data.size for p in self.parameters if p.weight_decay)
        self.weights = np.concatenate([parameter.data.ravel() for parameter in self.parameters])
        self.first_moment = np.zeros_like(self.weights)
        self.second_moment = np.zeros_like(self.weights)
        self.update_count = 0
        self._scratch = np.empty_like(self.weights)
        self._share_memory()

    def zero_gradients(self) -> None:
        """Forget the gradients of the last backward pass."""
        for parameter in self.parameters:
            parameter.gradient = None

    def flat_gradient(self) -> Array:
        """All gradients in one fresh array, in the order of the buffer; zero where backward never came."""
        return np.concatenate(
            [
                np.zeros(p.data.size, p.data.dtype) if p.gradient is None else p.gradient.ravel()
                for p in self.parameters
            ]
        )

    def update(self, gradient: Array, learning_rate: float, gradient_scale: float = 1.0) -> None:
        """Move the weights by one step along ``gradient_scale * gradient``, a flat array, not changed."""
        beta1, beta2 = self.betas
        self.update_count += 1
        scratch = np.multiply(gradient, (1 - beta1) * gradient_scale, out=self._scratch)
        self.first_moment *= beta1
        self.first_moment += scratch
        np.multiply(gradient, gradient, out=scratch)
        scratch *= (1 - beta2) * gradient_scale**2
        self.second_moment *= beta2
        self.second_moment += scratch
        np.sqrt(self.second_moment, out=scratch)
        scratch *= (1 - beta2**self.update_count) ** -0.5
        scratch += self.epsilon
        np.divide(self.first_moment, scratch, out=scratch)
        scratch *= learning_rate / (1 - beta1**self.update_count)
        self.weights[: self.decayed_count] *= 1 - learning_rate * self.weight_decay
        self.weights -= scratch

    def state(self) -> dict[str, Any]:
        """Copies of both moments and the number of updates."""
        return {
            "first_moment": self.first_moment.copy(),
            "second_moment": self.second_moment.copy(),
            "update_count": self.update_count,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue exactly where ``state`` was taken."""
        self.first_moment[...] = state["first_moment"]
        self.second_moment[...] = state["second_moment"]
        self.update_count = state["update_count"]

    def content_hash(self) -> int:
        """64-bit hash of both moments and the number of updates."""
        return content_hash(self.first_moment, self.second_moment, np.array([self.update_count]))

    def pieces(self, flat: Array) -> Iterator[tuple[Tensor, Array]]:
        """(weight, shaped view) of each weight's piece of a flat array in the order of the buffer."""
        start = 0
        for parameter in self.parameters:
            end = start + parameter.data.size
            yield parameter, flat[start:end].reshape(parameter.data.shape)
            start = end

    def _share_memory(self) -> None:
        for parameter, piece in self.pieces(self.weights):
            parameter.data = piece


def global_norm(gradient: Array) -> float:
    """Euclidean norm of a flat array, summed in float64."""
    wide = gradient.astype(np.float64)
    return float(np.sqrt(np.dot(wide, wide)))


def clip_scale(norm: float, limit: float) -> float:
    """The factor that brings a gradient of that norm down to the limit; 1 below it (Pascanu et al. 2013).

    An infinite limit clips nothing.
    A non-finite norm gives factor 1: the update is then as non-finite as the gradient, and recorded.
    """
    return limit / norm if math.isfinite(norm) and norm > limit else 1.0
