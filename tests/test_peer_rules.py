"""Other tools' rules: each fires just past its documented threshold and is silent at it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rule_run import RUN, changed, healthy, opened
from synthetic import START, Columns, Rows

from analyzer.diagnoses import DIAGNOSES
from analyzer.diagnoses.user_rules import FINDING_COLUMNS
from analyzer.query_library import library, parse_query
from analyzer.run_log import open_runs
from calibration.peers import PEER_RULES, RULE_DIRECTORY, fired_rules, load_peer_rules
from experiments import cli
from experiments.faults import FAULTS

MATRIX, BIAS = 1, 50  # ids of tensors: a weight matrix of the synthetic run, and one that is added here
PRIMARY = "validation"


def fires(rule: str, changes: Mapping[str, Any] | None = None) -> bool:
    """Whether a rule fires on the healthy synthetic run in which some tables are replaced."""
    run_log = opened({RUN: [{**healthy(), **(changes or {})}]})
    load_peer_rules(run_log.connection)
    return run_log.query(f"FROM {rule}()").num_rows > 0


def tensor_rows(kind: str, **column: Mapping[int, Any]) -> dict[str, Columns]:
    """The healthy tensors with values of one column set at steps, for the matrix's rows of that kind."""
    ((name, values),) = column.items()
    tensors = healthy()["tensors"]
    rows = {
        row: values[step]
        for row, (step, tensor_id, row_kind) in enumerate(
            zip(tensors["step"], tensors["tensor_id"], tensors["kind"], strict=True)
        )
        if tensor_id == MATRIX and row_kind == kind and step in values
    }
    return {"tensors": changed("tensors", name, rows)}


def as_bias(changes: Mapping[str, Columns]) -> dict[str, Columns]:
    """The same changes to a tensor that is called a bias."""
    names = list(healthy()["tensor_names"]["name"])
    names[MATRIX] = names[MATRIX].replace("weight", "bias")
    return {**changes, "tensor_names": dict(healthy()["tensor_names"]) | {"name": names}}


def losses_of(evaluations: Mapping[int, float], train_losses: Any = None) -> dict[str, Rows | Columns]:
    """Mean losses of the primary split by step, one token each, and of every training step."""
    rows = [
        {"step": step, "split": PRIMARY, "repeat": 0, "loss_sum": loss, "token_count": 1}
        for step, loss in evaluations.items()
    ]
    steps = healthy()["steps"] if train_losses is None else changed("steps", "train_loss", train_losses)
    return {"evaluations": rows, "steps": steps}


def test_the_registry_and_the_folder_hold_the_same_rules() -> None:
    """A file without an entry would never be loaded."""
    assert sorted(rule.name for rule in PEER_RULES) == sorted(p.stem for p in RULE_DIRECTORY.glob("*.sql"))


def test_no_rule_hides_a_query_of_the_library() -> None:
    """The macros share one connection with ours."""
    assert {rule.name for rule in PEER_RULES} & {query.name for query in library()} == set()


def test_rules_find_faults_that_exist() -> None:
    """A misspelt name would make a peer look worse than it is."""
    known = {fault.name for fault in FAULTS} | {diagnosis.name for diagnosis in DIAGNOSES}
    assert {name for rule in PEER_RULES for name in rule.finds} - known == set()


@pytest.mark.parametrize("rule", PEER_RULES, ids=lambda rule: rule.name)
def test_a_rule_has_the_columns_of_a_finding_and_documents_them(rule: Any) -> None:
    """As in `queries/`: a question, a source, and a unit for each parameter and column."""
    query = parse_query(rule.name, "peers", (RULE_DIRECTORY / f"{rule.name}.sql").read_text())
    assert query.summary.endswith("?")
    assert "Source: " in query.source
    assert query.parameters
    assert tuple(column.name for column in query.columns) == FINDING_COLUMNS
    run_log = opened({RUN: [healthy()]})
    load_peer_rules(run_log.connection)
    assert tuple(run_log.query(f"FROM {rule.name}() LIMIT 0").column_names) == FINDING_COLUMNS


def test_an_empty_run_fires_nothing() -> None:
    """Missing rows are silence, not an error."""
    assert fired_rules(opened({RUN: [{}]})) == ()


@pytest.mark.parametrize(("size", "expected"), [(0.99e-7, True), (1.01e-7, False)])
def test_vanishing_gradient(size: float, expected: bool) -> None:
    """Below 1e-7 at any step; either side by 1%, which float32 holds."""
    assert fires("vanishing_gradient", tensor_rows("gradient", mean_abs={7: size})) is expected


def test_vanishing_gradient_leaves_biases_out() -> None:
    """The gradient of a key bias is round-off in a healthy run."""
    assert not fires("vanishing_gradient", as_bias(tensor_rows("gradient", mean_abs={7: 0.0})))


@pytest.mark.parametrize("column", ["nan_count", "positive_infinity_count", "negative_infinity_count"])
@pytest.mark.parametrize(("count", "expected"), [(1, True), (0, False)])
def test_exploding_tensor(column: str, count: int, expected: bool) -> None:
    """One element is enough."""
    assert fires("exploding_tensor", tensor_rows("gradient", **{column: {7: count}})) is expected


def relu_deviations(ratio: float, step: int) -> dict[str, Columns]:
    """Variances of the two ReLUs whose ratio is given, at one step."""
    tensors = healthy()["tensors"]
    relu_ids = [i for i, role in enumerate(healthy()["tensor_names"]["role"]) if role == "relu"]
    rows = {
        row: math.sqrt(ratio) if tensor_id == relu_ids[0] else 1.0
        for row, (row_step, tensor_id, kind) in enumerate(
            zip(tensors["step"], tensors["tensor_id"], tensors["kind"], strict=True)
        )
        if row_step == step and kind == "activation" and tensor_id in relu_ids
    }
    return {"tensors": changed("tensors", "std", rows)}


@pytest.mark.parametrize(
    ("ratio", "step", "expected"), [(10.01, 0, True), (9.99, 0, False), (100, 10, False)]
)
def test_poor_weight_initialization_by_activations(ratio: float, step: int, expected: bool) -> None:
    """A ratio of variances above 10 in the first ten steps; float32 deviations err by less than 1e-6."""
    assert fires("poor_weight_initialization", relu_deviations(ratio, step)) is expected


@pytest.mark.parametrize(
    ("deviation", "rising_steps", "expected"),
    [(0.99e-3 / 3.29, 5, True), (1.01e-3 / 3.29, 5, False), (0.99e-3 / 3.29, 4, False)],
)
def test_poor_weight_initialization_by_gradients(deviation: float, rising_steps: int, expected: bool) -> None:
    """Narrow gradients count when the first ten steps have five in a row without a new lowest loss."""
    losses = np.linspace(4.0, 1.0, 200)
    losses[3 : 3 + rising_steps] = 5.0
    changes = tensor_rows("gradient", std={4: deviation}) | losses_of({}, losses)
    assert fires("poor_weight_initialization", changes) is expected


@pytest.mark.parametrize(("later", "expected"), [(1.0, True), (0.999, False), (1.5, True)])
def test_loss_not_decreasing(later: float, expected: bool) -> None:
    """Any decrease between two checks will do, none will not."""
    assert fires("loss_not_decreasing", losses_of({0: 1.0, 10: later})) is expected


def test_loss_not_decreasing_compares_losses_ten_steps_apart() -> None:
    """The documented example: saved every three steps, checks are at 0, 12 and 24."""
    losses = {step: 10.0 - step for step in range(0, 30, 3)}
    assert not fires("loss_not_decreasing", losses_of(losses | {15: 20.0}))
    assert fires("loss_not_decreasing", losses_of(losses | {24: 20.0}))


def test_loss_not_decreasing_looks_at_training_without_an_evaluation() -> None:
    """Losses of evaluation come first, as documented."""
    rising = np.linspace(1.0, 2.0, 200)
    assert fires("loss_not_decreasing", losses_of({}, rising))
    assert not fires("loss_not_decreasing", losses_of({0: 1.0, 50: 0.9}, rising))


@pytest.mark.parametrize(
    ("update_norm", "expected"), [(101.0, True), (99.0, False), (1.01e-7, False), (0.99e-7, True)]
)
def test_weight_update_ratio(update_norm: float, expected: bool) -> None:
    """Ratios above 10 and below 1e-8 of a weight of norm 10."""
    tensors = dict(tensor_rows("update", l2_norm={20: update_norm})["tensors"])
    weights = tensor_rows("weight", l2_norm={20: 10.0})["tensors"]["l2_norm"]
    is_weight = np.asarray(tensors["kind"]) == "weight"
    tensors["l2_norm"] = np.where(is_weight, weights, tensors["l2_norm"])
    assert fires("weight_update_ratio", {"tensors": tensors}) is expected


@pytest.mark.parametrize(("dead", "expected"), [(129, True), (128, False)])
def test_dead_relu(dead: int, expected: bool) -> None:
    """More than half of 256 units."""
    assert fires("dead_relu", {"units": changed("units", "dead_unit_count", {0: dead})}) is expected


@pytest.mark.parametrize("kind", ["weight", "gradient"])
@pytest.mark.parametrize(("share", "expected"), [(1.0, True), (4095 / 4096, False)])
def test_all_zero(kind: str, share: float, expected: bool) -> None:
    """One element that is not zero is enough to be silent, and so is the name of a bias."""
    changes = tensor_rows(kind, zero_fraction={20: share})
    assert fires("all_zero", changes) is expected
    assert not fires("all_zero", as_bias(changes))


@pytest.mark.parametrize(("steps", "expected"), [((20, 30, 40), True), ((20, 30), False)])
def test_unchanged_tensor(steps: tuple[int, ...], expected: bool) -> None:
    """Three recorded rows in a row with one hash."""
    changes = tensor_rows("weight", content_hash=dict.fromkeys(steps, 77))
    assert fires("unchanged_tensor", changes) is expected


@pytest.mark.parametrize(("loss", "expected"), [(1.101, True), (1.099, False)])
def test_overfit(loss: float, expected: bool) -> None:
    """More than a tenth above the training loss, at one evaluation."""
    assert fires("overfit", losses_of({0: 9.0, 50: loss}, np.ones(200))) is expected


def test_overfit_takes_the_mean_since_the_evaluation_before() -> None:
    """Training losses that an earlier evaluation has seen do not count: 1.5 against 1, not against 2."""
    training = np.where(np.arange(200) < 50, 3.0, 1.0)
    assert fires("overfit", losses_of({50: 3.0, 100: 1.5}, training))
    assert not fires("overfit", losses_of({100: 1.5}, training))


@pytest.mark.parametrize(
    ("validation_gain", "train_gain", "expected"),
    [(0.09, 0.09, True), (0.11, 0.09, False), (0.09, 0.11, False)],
)
def test_overtraining(validation_gain: float, train_gain: float, expected: bool) -> None:
    """Both losses have less than delta to show for their patience."""
    evaluations = {10 * i: 1.0 for i in range(1, 11)} | {110: 1.0 - validation_gain}
    training = np.where(np.arange(200) < 109, 1.0, 1.0 - train_gain)  # step 109 is the last before 110
    assert fires("overtraining", losses_of(evaluations, training)) is expected


def test_overtraining_waits_for_ten_evaluations() -> None:
    """Nine after the optimum are not enough, ten are."""
    evaluations = {10 * i: 1.0 for i in range(1, 11)}
    assert not fires("overtraining", losses_of(evaluations, np.ones(200)))
    assert fires("overtraining", losses_of(evaluations | {110: 1.0}, np.ones(200)))


@pytest.mark.parametrize(("seconds", "expected"), [(1801, True), (1800, False)])
def test_stalled_training(seconds: int, expected: bool) -> None:
    """Half an hour between two rows."""
    start = int(START.timestamp() * 1e6)
    wall_time = start + np.arange(200) + np.where(np.arange(200) > 90, seconds * 1_000_000 - 1, 0)
    assert fires("stalled_training", {"steps": changed("steps", "wall_time", wall_time)}) is expected


@pytest.mark.parametrize(
    ("loss", "expected"), [(math.nan, True), (math.inf, True), (1e300, False), (None, False)]
)
def test_loss_not_finite(loss: float | None, expected: bool) -> None:
    """A large loss is finite, and one that was not recorded is no loss."""
    assert fires("loss_not_finite", {"steps": changed("steps", "train_loss", {9: loss})}) is expected


@pytest.mark.parametrize(
    ("step", "loss", "expected"), [(10, 2.01, True), (10, 1.99, False), (9, 2.01, False)]
)
def test_loss_above_median(step: int, loss: float, expected: bool) -> None:
    """Twice the median of at least ten losses before."""
    losses = np.ones(200)
    losses[step] = loss
    assert fires("loss_above_median", losses_of({}, losses)) is expected


@pytest.mark.parametrize(
    ("norm", "expected"), [(10.01, True), (10.0, False), (math.inf, True), (math.nan, False)]
)
def test_gradient_norm_above_limit(norm: float, expected: bool) -> None:
    """NaN compares as not above, as in the alert's own language."""
    changes = {"steps": changed("steps", "gradient_norm", {9: norm})}
    assert fires("gradient_norm_above_limit", changes) is expected


@pytest.fixture(scope="module")
def healthy_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The reference experiment, its first 300 steps."""
    out = tmp_path_factory.mktemp("peers") / "healthy"
    assert cli.main(["run", "19-healthy", "--seed", "3", "--out", str(out), "--set", "total_steps=300"]) == 0
    return out


def test_a_healthy_run_fires_no_peers_rule(healthy_run: Path) -> None:
    """300 steps of the reference model; what a longer or another run fires is the calibration's to count."""
    with open_runs([healthy_run]) as run_log:
        assert fired_rules(run_log) == ()


def test_fired_rules_are_those_of_the_first_run() -> None:
    """Of several opened runs the first is asked; the synthetic one overfits by the peer's measure."""
    broken = {**healthy(), "steps": changed("steps", "gradient_norm", {9: 11.0})}
    assert fired_rules(opened({RUN: [healthy()], "other": [broken]})) == ("overfit",)
    assert fired_rules(opened({"other": [broken], RUN: [healthy()]})) == (
        "overfit",
        "gradient_norm_above_limit",
    )
