"""The series: input rows, call, output rows."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
from query_call import answer
from synthetic import MANIFEST, Rows

NAN, INF = math.nan, math.inf


def test_training_loss_keeps_non_finite_steps(tmp_path: Path) -> None:
    """An infinite loss is a row, a step without a loss is none."""
    steps = [{"step": 0, "train_loss": 0.0}, {"step": 1, "train_loss": INF}, {"step": 2}]
    rows = answer(tmp_path, {"steps": steps}, "FROM training_loss_by_step()")
    assert rows == [("run", 0, 0.0, 1.0), ("run", 1, INF, INF)]


def evaluation(step: int, split: str, loss_sum: float, repeat: int = 0) -> dict[str, object]:
    """A row of `evaluations` over ten tokens, four of them the answer's, with half the loss."""
    return {
        "step": step,
        "split": split,
        "repeat": repeat,
        "loss_sum": loss_sum,
        "token_count": 10,
        "answer_loss_sum": loss_sum / 2,
        "answer_token_count": 4,
    }


def test_evaluation_loss_is_per_token_and_ignores_repeats(tmp_path: Path) -> None:
    """A repeated evaluation of the same weights is a check, not a point of the curve."""
    evaluations = [evaluation(0, "validation", 20.0), evaluation(0, "validation", 99.0, repeat=1)]
    rows = answer(tmp_path, {"evaluations": evaluations}, "FROM evaluation_loss_by_step()")
    assert rows == [("run", 0, "validation", 2.0, 2.5, 10)]


def test_evaluation_without_tokens_has_no_loss(tmp_path: Path) -> None:
    """Nothing evaluated is null, not zero and not infinite."""
    evaluations = [{"step": 0, "split": "validation", "loss_sum": 0.0, "token_count": 0}]
    rows = answer(tmp_path, {"evaluations": evaluations}, "SELECT loss FROM evaluation_loss_by_step()")
    assert rows == [(None,)]


def test_gap_compares_the_primary_split_with_train(tmp_path: Path) -> None:
    """Steps at which only one of the two was evaluated have no gap."""
    evaluations = [
        evaluation(0, "train", 20.0),
        evaluation(0, "validation", 25.0),
        evaluation(0, "held_out_verbs", 90.0),
        evaluation(50, "train", 10.0),
    ]
    rows = answer(tmp_path, {"evaluations": evaluations}, "FROM train_validation_gap()")
    assert rows == [("run", 0, 2.0, 2.5, 0.5)]


def test_gap_of_another_split(tmp_path: Path) -> None:
    """Both splits can be named in the call."""
    evaluations = [evaluation(0, "train", 20.0), evaluation(0, "held_out_verbs", 90.0)]
    sql = "SELECT gap FROM train_validation_gap(validation_split := 'held_out_verbs')"
    assert answer(tmp_path, {"evaluations": evaluations}, sql) == [(7.0,)]


def test_learning_rate_beside_the_plan(tmp_path: Path) -> None:
    """Applied and planned rate of each step."""
    steps = [{"step": 0, "learning_rate": 0.1, "planned_learning_rate": 0.2}, {"step": 1}]
    rows = answer(tmp_path, {"steps": steps}, "FROM learning_rate_by_step()")
    assert rows == [("run", 0, 0.1, 0.2)]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        # Half way down the cosine the rate is the mean of peak and final rate; a kind of its own is unknown.
        ("linear warmup, cosine decay", [0.5, 1.0, 0.55, 0.1]),
        ("linear warmup, constant", [0.5, 1.0, 1.0, 1.0]),
        ("one cycle", [None] * 4),
    ],
)
def test_the_declared_rate_comes_from_the_manifest(
    tmp_path: Path, kind: str, expected: list[float | None]
) -> None:
    """Whatever the loop plans and applies."""
    plan = {"kind": kind, "peak": 1.0, "final": 0.1, "warmup_steps": 2, "total_steps": 10}
    manifest = dataclasses.replace(MANIFEST, planned_schedule=plan)
    steps = [{"step": s, "learning_rate": 0.3, "planned_learning_rate": 0.3} for s in (0, 1, 6, 12)]
    sql = "SELECT declared_rate FROM declared_rate_by_step()"
    rates = [rate for (rate,) in answer(tmp_path, {"steps": steps}, sql, manifest)]
    # A cosine and four sums and products in double precision err in the sixteenth digit.
    assert [rate if rate is None else round(rate, 15) for rate in rates] == expected


def test_gradient_norm_before_and_after_clipping(tmp_path: Path) -> None:
    """A run that does not clip has the first of the two only."""
    steps = [
        {"step": 0, "gradient_norm": 4.0, "clipped_gradient_norm": 1.0},
        {"step": 1, "gradient_norm": INF},
    ]
    rows = answer(tmp_path, {"steps": steps}, "FROM gradient_norm_by_step()")
    assert rows == [("run", 0, 4.0, 1.0), ("run", 1, INF, None)]


TENSOR_NAMES: Rows = [
    {"tensor_id": 0, "name": "up.weight", "module": "up", "layer": 0, "role": "linear", "shape": "[4, 4]"},
    {"tensor_id": 1, "name": "up.bias", "module": "up", "layer": 0, "role": "linear", "shape": "[4]"},
    {"tensor_id": 2, "name": "up", "module": "up", "layer": 0, "role": "linear", "shape": "[4]"},
]


def tensor(step: int, tensor_id: int, kind: str, **columns: float) -> dict[str, object]:
    """A row of `tensors` with 16 elements."""
    return {"step": step, "tensor_id": tensor_id, "kind": kind, "element_count": 16, **columns}


def test_activation_sizes_are_over_finite_elements(tmp_path: Path) -> None:
    """Twelve of sixteen elements are finite: root mean square = 6 / sqrt(12)."""
    row = tensor(0, 2, "activation", l2_norm=6.0, mean_abs=0.5, nan_count=3, positive_infinity_count=1)
    tables = {"tensor_names": TENSOR_NAMES, "tensors": [row, tensor(0, 0, "weight", l2_norm=1.0)]}
    rows = answer(tmp_path, tables, "FROM activation_by_layer()")
    assert rows == [("run", 0, "up", 0, "linear", 0.5, 6 / math.sqrt(12), 4)]


def test_spectral_norm_is_a_bracket(tmp_path: Path) -> None:
    """Rows without a certified upper bound stay, rows without a norm do not."""
    tensors = [
        tensor(0, 0, "weight", spectral_norm=2.0, spectral_norm_upper=2.5),
        tensor(1, 0, "weight", spectral_norm=3.0),
        tensor(1, 1, "weight"),
    ]
    tables = {"tensor_names": TENSOR_NAMES, "tensors": tensors}
    rows = answer(tmp_path, tables, "FROM spectral_norm_by_step()")
    assert rows == [("run", 0, "up.weight", 2.0, 2.5), ("run", 1, "up.weight", 3.0, None)]


def test_dead_fraction(tmp_path: Path) -> None:
    """Dead units over all units of the layer."""
    units = [{"step": 13, "layer": 1, "window_steps": 14, "unit_count": 8, "dead_unit_count": 2}]
    rows = answer(tmp_path, {"units": units}, "FROM dead_units_by_layer()")
    assert rows == [("run", 13, 1, 14, 8, 2, 0.25)]


def test_gradient_activation_ratio_is_of_root_mean_squares(tmp_path: Path) -> None:
    """Sixteen and four finite elements: (2 / 4) / (8 / 2) = 1/8; an all-zero output has no ratio."""
    tensors = [
        tensor(0, 2, "activation", l2_norm=8.0, nan_count=12),
        tensor(0, 2, "activation_gradient", l2_norm=2.0),
        tensor(1, 2, "activation", l2_norm=0.0),
        tensor(1, 2, "activation_gradient", l2_norm=2.0),
    ]
    tables = {"tensor_names": TENSOR_NAMES, "tensors": tensors}
    rows = answer(tmp_path, tables, "FROM gradient_activation_ratio_by_layer()")
    assert rows == [("run", 0, "up", 0, 0.125, 12), ("run", 1, "up", 0, None, 0)]


def test_gradient_activation_ratio_counts_what_is_not_finite_in_both(tmp_path: Path) -> None:
    """All sixteen elements of both lost: no ratio is left, and the count says that it was measured."""
    tensors = [
        tensor(0, 2, "activation", l2_norm=0.0, positive_infinity_count=16),
        tensor(0, 2, "activation_gradient", l2_norm=0.0, nan_count=15, negative_infinity_count=1),
    ]
    tables = {"tensor_names": TENSOR_NAMES, "tensors": tensors}
    rows = answer(tmp_path, tables, "FROM gradient_activation_ratio_by_layer()")
    assert rows == [("run", 0, "up", 0, None, 32)]


def test_update_ratio_is_of_matrices(tmp_path: Path) -> None:
    """Biases are left out, and a matrix that is still zero."""
    tensors = [
        tensor(0, 0, "weight", l2_norm=4.0),
        tensor(0, 0, "update", l2_norm=0.01),
        tensor(0, 1, "weight", l2_norm=1.0),
        tensor(0, 1, "update", l2_norm=1.0),
        tensor(1, 0, "weight", l2_norm=0.0),
        tensor(1, 0, "update", l2_norm=1.0),
    ]
    tables = {"tensor_names": TENSOR_NAMES, "tensors": tensors}
    rows = answer(tmp_path, tables, "FROM update_ratio_by_step()")
    assert rows == [("run", 0, "up.weight", 0.0025)]


def test_attention_by_step(tmp_path: Path) -> None:
    """One row per step, layer and head, in this order."""
    attention = [
        {"step": 0, "layer": 0, "head": head, "entropy": 0.5, "future_mass": 0.25 * head} for head in (1, 0)
    ]
    sql = "SELECT layer, head, entropy, future_mass FROM attention_by_step()"
    assert answer(tmp_path, {"attention": attention}, sql) == [(0, 0, 0.5, 0.0), (0, 1, 0.5, 0.25)]


@pytest.mark.parametrize("quantity", ["train_loss", "gradient_norm"])
def test_robust_z_of_one_jump(tmp_path: Path, quantity: str) -> None:
    """ln cycles through 0, 0.1, 0.3: differences 0.1, 0.2, -0.3, so median, MAD and baseline are 0.1."""
    steps = [{"step": step, quantity: math.exp((0.0, 0.1, 0.3)[step % 3])} for step in range(64)]
    steps.append({"step": 64, quantity: math.exp(1.1)})
    call = f"robust_z_by_step(quantity_name := '{quantity}')"
    sql = f"SELECT prominence, z, past_count FROM {call} WHERE step = 64"
    ((prominence, z, past_count),) = answer(tmp_path, {"steps": steps}, sql)
    assert prominence == pytest.approx(1.0, rel=1e-12)
    assert z == pytest.approx(1.0 / (0.14826 / math.sqrt(2)), rel=1e-12)
    assert past_count == 64


def test_robust_z_leaves_non_finite_and_non_positive_rows_out(tmp_path: Path) -> None:
    """They have no logarithm; a NaN must not rank as the largest value of a window."""
    steps = [
        {"step": step, "train_loss": value}
        for step, value in enumerate([1.0, NAN, INF, -INF, 0.0, -1.0, None, 2.0])
    ]
    rows = answer(tmp_path, {"steps": steps}, "SELECT step, value, past_count FROM robust_z_by_step()")
    assert rows == [(0, 1.0, 0), (7, 2.0, 1)]


def test_robust_z_has_a_floor_under_its_scale(tmp_path: Path) -> None:
    """A curve without noise is judged as if it had 2%: ln 2 / 0.02."""
    steps = [{"step": step, "train_loss": 1.0} for step in range(30)] + [{"step": 30, "train_loss": 2.0}]
    ((z,),) = answer(tmp_path, {"steps": steps}, "SELECT z FROM robust_z_by_step() WHERE step = 30")
    assert z == pytest.approx(math.log(2) / 0.02, rel=1e-12)


def test_nonfinite_values_come_in_the_order_of_a_step(tmp_path: Path) -> None:
    """Weight, activation, loss, gradient, update; gradients from the output back."""
    tables = {
        "tensor_names": TENSOR_NAMES,
        "tensors": [
            tensor(3, 0, "update", nan_count=1),
            tensor(3, 0, "gradient", nan_count=16),
            tensor(3, 1, "gradient", nan_count=4),
            tensor(3, 2, "activation", negative_infinity_count=2),
            tensor(3, 2, "activation_gradient", nan_count=1),
            tensor(3, 0, "weight", positive_infinity_count=1),
            tensor(2, 0, "weight", nan_count=0),
        ],
        "steps": [{"step": 3, "train_loss": NAN, "gradient_norm": INF, "objective": 1.0}],
        "evaluations": [{"step": 3, "split": "validation", "loss_sum": -INF}],
    }
    sql = "SELECT source, subject, kind, nan_count, infinity_count FROM nonfinite_values_by_step()"
    assert answer(tmp_path, tables, sql) == [
        ("tensors", "up.weight", "weight", 0, 1),
        ("tensors", "up", "activation", 0, 2),
        ("evaluations", "validation", "loss", 0, 1),
        ("steps", "train_loss", "loss", 1, 0),
        ("tensors", "up", "activation_gradient", 1, 0),
        ("tensors", "up.bias", "gradient", 4, 0),
        ("tensors", "up.weight", "gradient", 16, 0),
        ("steps", "gradient_norm", "gradient", 0, 1),
        ("tensors", "up.weight", "update", 1, 0),
    ]


EXAMPLES: Rows = [
    {"example_id": 0, "verb": "walk", "regularity": "regular"},
    {"example_id": 1, "verb": "talk", "regularity": "regular"},
    {"example_id": 2, "verb": "call", "regularity": "regular"},
    {"example_id": 3, "verb": "go", "regularity": "irregular"},
    {"example_id": 4, "verb": "go", "regularity": "irregular"},
]


def example_loss(
    example_id: int, loss_sum: float, step: int = 0, split: str = "validation"
) -> dict[str, object]:
    """A row of `example_losses` over ten tokens."""
    return {"step": step, "split": split, "example_id": example_id, "loss_sum": loss_sum, "token_count": 10}


def test_label_loss_with_its_jackknife_interval(tmp_path: Path) -> None:
    """Three verbs at 1, 2, 3: deletions 2.5, 2, 1.5, so the error is 1/sqrt 3 and t(2) = 4.303."""
    losses = [example_loss(i, loss) for i, loss in enumerate([10.0, 20.0, 30.0])]
    sql = "SELECT value, loss, lower, upper, cluster_count, token_count FROM label_loss_by_step()"
    ((value, loss, lower, upper, clusters, tokens),) = answer(
        tmp_path, {"examples": EXAMPLES, "example_losses": losses}, sql
    )
    assert (value, loss, clusters, tokens) == ("regular", 2.0, 3, 30)
    assert lower == pytest.approx(2 - 4.303 / math.sqrt(3), rel=1e-12)
    assert upper == pytest.approx(2 + 4.303 / math.sqrt(3), rel=1e-12)


def test_label_loss_of_one_cluster_has_no_interval(tmp_path: Path) -> None:
    """Two examples of one verb are one observation."""
    losses = [example_loss(3, 10.0), example_loss(4, 30.0)]
    sql = "SELECT value, loss, lower, upper, cluster_count FROM label_loss_by_step()"
    rows = answer(tmp_path, {"examples": EXAMPLES, "example_losses": losses}, sql)
    assert rows == [("irregular", 2.0, None, None, 1)]


def test_label_loss_counts_what_is_not_finite(tmp_path: Path) -> None:
    """A NaN example is left out of the mean, and said."""
    losses = [example_loss(3, 10.0), example_loss(4, NAN)]
    sql = "SELECT loss, token_count, nonfinite_count FROM label_loss_by_step()"
    rows = answer(tmp_path, {"examples": EXAMPLES, "example_losses": losses}, sql)
    assert rows == [(1.0, 10, 1)]


def test_label_loss_of_other_labels_and_splits(tmp_path: Path) -> None:
    """Label, cluster and split can be named; other splits stay out."""
    losses = [
        example_loss(0, 10.0),
        example_loss(1, 20.0, split="train"),
        example_loss(2, 40.0, split="train"),
    ]
    sql = (
        "SELECT value, loss FROM label_loss_by_step("
        "label_name := 'verb', cluster_name := 'regularity', split_name := 'train')"
    )
    rows = answer(tmp_path, {"examples": EXAMPLES, "example_losses": losses}, sql)
    assert rows == [("call", 4.0), ("talk", 2.0)]


def test_values_of_a_label_add_up_to_the_total(tmp_path: Path) -> None:
    """Token-weighted losses times their tokens are the split's loss sum."""
    losses = [example_loss(i, 7.0 * i) for i in range(5)]
    sql = "SELECT sum(loss * token_count) FROM label_loss_by_step()"
    ((total,),) = answer(tmp_path, {"examples": EXAMPLES, "example_losses": losses}, sql)
    assert total == pytest.approx(70.0, rel=1e-12)


def test_loss_rise_pairs_the_same_examples(tmp_path: Path) -> None:
    """Verbs at 1 and 3 rise by 0.1 and 0.3: the rise is 0.2, its error 0.1, t(1) = 12.706."""
    losses = [
        example_loss(0, 10.0),
        example_loss(1, 30.0),
        example_loss(0, 11.0, 50),
        example_loss(1, 33.0, 50),
    ]
    sql = "SELECT step, loss, minimum_step, minimum_loss, rise, lower FROM loss_rise_by_step()"
    first, second = answer(tmp_path, {"examples": EXAMPLES, "example_losses": losses}, sql)
    assert first == (0, 2.0, 0, 2.0, None, None)
    assert second[:4] == (50, 2.2, 0, 2.0)
    assert second[4:] == (pytest.approx(0.2, rel=1e-12), pytest.approx(0.2 - 12.706 * 0.1, rel=1e-12))


def test_series_show_current_rows_of_every_run(tmp_path: Path) -> None:
    """Rank 1 logs its own shard and is not a second curve."""
    from synthetic import write_run

    from analyzer.run_log import open_runs

    for name in ("b", "a"):
        write_run(tmp_path / name, {"steps": [{"step": 0, "train_loss": 1.0}]})
    write_run(tmp_path / "a", {"steps": [{"step": 0, "train_loss": 9.0}]}, rank=1)
    with open_runs([tmp_path / "b", tmp_path / "a"]) as run_log:
        rows = run_log.connection.execute("SELECT run, train_loss FROM training_loss_by_step()").fetchall()
    assert rows == [("a", 1.0), ("b", 1.0)]
