"""Schedule values, AdamW against torch, clipping, and state that can be saved."""

import math

import numpy as np
import pytest

from experiments.autograd import parameter
from experiments.optimizer import AdamW, LearningRatePlan, Schedule, clip_scale, global_norm

PLAN = LearningRatePlan(peak=3e-3, final=3e-4, warmup_steps=100, total_steps=2000)


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (0, 3e-5),  # a hundredth of the peak
        (49, 1.5e-3),
        (99, 3e-3),  # the last warmup step
        (100, 3e-3),
        (1050, 1.65e-3),  # half-way: mean of peak and final
        (2000, 3e-4),
        (5000, 3e-4),  # stays there
    ],
)
def test_learning_rate_plan(step: int, expected: float) -> None:
    """Linear warmup, then half a cosine, then the final rate."""
    assert PLAN.learning_rate(step) == pytest.approx(expected, rel=1e-14)  # a dozen float64 operations


def test_plan_without_warmup_starts_at_the_peak() -> None:
    """No division by zero, and no step is lost."""
    assert LearningRatePlan(1.0, 0.0, warmup_steps=0, total_steps=10).learning_rate(0) == 1.0


def test_plan_whose_final_rate_is_its_peak_is_constant_after_warmup() -> None:
    """Bit for bit, so that a declared constant rate can be compared exactly."""
    plan = LearningRatePlan(3e-3, 3e-3, warmup_steps=4, total_steps=50)
    assert [plan.learning_rate(step) for step in range(3, 60)] == [3e-3] * 57
    assert plan.learning_rate(0) == 3e-3 / 4


def test_infinite_limit_clips_nothing() -> None:
    """Factor 1 for every norm."""
    assert [clip_scale(norm, math.inf) for norm in (0.0, 1e30, math.inf)] == [1.0, 1.0, 1.0]


def test_schedule_walks_along_the_plan_and_resumes() -> None:
    """next() gives the plan's rates in order, also after its state went into a new schedule."""
    schedule = Schedule(PLAN)
    rates = [schedule.next() for _ in range(3)]
    resumed = Schedule(PLAN)
    resumed.load_state(schedule.state())
    assert [*rates, resumed.next()] == [PLAN.learning_rate(step) for step in range(4)]


def weights(dtype: str = "float64") -> list[np.ndarray]:
    """A matrix, a vector, another matrix."""
    generator = np.random.default_rng(0)
    return [generator.normal(size=shape).astype(dtype) for shape in ((3, 4), (4,), (2, 3))]


def adam(parameters: list, weight_decay: float = 0.1) -> AdamW:
    """AdamW with the reference settings."""
    return AdamW(parameters, betas=(0.9, 0.95), epsilon=1e-8, weight_decay=weight_decay)


def test_adamw_agrees_with_torch() -> None:
    """Ten float64 updates, matrices decayed, the vector not."""
    torch = pytest.importorskip("torch")
    parameters = [parameter(array) for array in weights()]
    twins = [torch.nn.Parameter(torch.tensor(array)) for array in weights()]
    optimizer = adam(parameters)
    groups = [
        {"params": [twins[0], twins[2]], "weight_decay": 0.1},
        {"params": [twins[1]], "weight_decay": 0.0},
    ]
    twin = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95), eps=1e-8)
    generator = np.random.default_rng(1)
    for _ in range(10):
        for one, other in zip(parameters, twins, strict=True):
            one.gradient = generator.normal(size=one.data.shape)
            other.grad = torch.tensor(one.gradient)
        optimizer.update(optimizer.flat_gradient(), 0.01)
        twin.step()
    for one, other in zip(parameters, twins, strict=True):
        # ten updates of a dozen operations on values of order 1: 120 * 2^-53 = 1.4e-14
        np.testing.assert_allclose(one.data, other.detach().numpy(), rtol=0, atol=2e-14)


def test_only_matrices_decay() -> None:
    """With zero gradients a matrix shrinks by lr * decay and a vector stays as it is."""
    parameters = [parameter(np.ones((2, 2))), parameter(np.ones(2))]
    optimizer = adam(parameters)
    for p in parameters:
        p.gradient = np.zeros_like(p.data)
    optimizer.update(optimizer.flat_gradient(), learning_rate=0.5)
    assert parameters[0].data.tolist() == [[0.95, 0.95], [0.95, 0.95]]
    assert parameters[1].data.tolist() == [1.0, 1.0]


def test_gradient_scale_equals_a_scaled_gradient() -> None:
    """Clipping by a factor gives the same weights as clipping the array, and leaves the array alone."""
    results = []
    for scale, factor in ((0.25, 1.0), (1.0, 0.25)):
        p = parameter(np.ones((2, 2)))
        optimizer = adam([p])
        gradient = np.full(4, 8.0) * factor
        optimizer.update(gradient, 0.1, gradient_scale=scale)
        assert gradient.tolist() == [8.0 * factor] * 4
        results.append(p.data.copy())
    assert np.array_equal(*results)  # powers of two scale exactly


def test_weight_without_gradient_counts_as_zero() -> None:
    """A branch that backward never reached moves by decay only."""
    p = parameter(np.ones((2, 2)))
    optimizer = adam([p])
    optimizer.zero_gradients()
    assert optimizer.flat_gradient().tolist() == [0.0] * 4


def test_optimizer_state_resumes_bit_for_bit() -> None:
    """Two updates, state into a fresh optimizer, two more: the same bytes as four in a row."""

    def updates(optimizer: AdamW, steps: range) -> None:
        for step in steps:
            optimizer.update(np.random.default_rng(step).normal(size=22), 0.01)

    straight = adam([parameter(array) for array in weights()])
    updates(straight, range(4))
    first = adam([parameter(array) for array in weights()])
    updates(first, range(2))
    resumed = adam([parameter(p.data.copy()) for p in first.parameters])
    resumed.load_state(first.state())
    updates(resumed, range(2, 4))
    assert np.array_equal(straight.weights, resumed.weights)


def test_global_norm_is_euclidean_in_float64() -> None:
    """3-4-5, and no overflow at values whose float32 square is infinite."""
    assert global_norm(np.array([3, 4], dtype=np.float32)) == 5.0
    assert global_norm(np.full(4, 2.0**100, dtype=np.float32)) == 2.0**101


@pytest.mark.parametrize(
    ("norm", "expected"), [(0.5, 1.0), (1.0, 1.0), (4.0, 0.25), (math.inf, 1.0), (math.nan, 1.0)]
)
def test_clip_scale(norm: float, expected: float) -> None:
    """Down to the limit, never up; a non-finite gradient passes as it is."""
    assert clip_scale(norm, 1.0) == expected
