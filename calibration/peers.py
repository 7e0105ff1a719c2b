"""Other tools' rules on our logs: the documented ones of SageMaker Debugger, and lone thresholds.

SageMaker Debugger's own rules are not public, its documentation is. What that leaves open is read in the
peer's favour, as the comment of each file of `peer_rules/` says: every recorded row is looked at where its
default is every 500th step (awslabs/sagemaker-debugger-rulesconfig, ruleConfigs.json), and tensors are left
out on which it would fire in every healthy run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import duckdb

from analyzer.errors import AnalyzerError
from analyzer.run_log import RunLog
from analyzer.views import quoted

RULE_DIRECTORY = Path(__file__).parent / "peer_rules"
DOCUMENTATION = (
    'Amazon SageMaker Developer Guide, "List of Debugger built-in rules" (awsdocs/amazon-sagemaker-developer-'
    "guide, doc_source/debugger-built-in-rules.md at c6db92f), rule {}"
)
COMMON_ALERT = "an alert that loops and dashboards commonly carry"

RuleSet = Literal["SageMaker Debugger", "lone thresholds"]


@dataclass(frozen=True)
class PeerRule:
    """One rule. ``name`` is its macro and its file.

    ``rule_set`` groups the rules in the report.
    ``finds`` are the faults that a reader of the rule's message would be led to, by their names in
    ``experiments.faults``: causes that the tool's documentation or a textbook names for the symptom. It is
    generous: whenever the rule fires on one of them, that counts as found, without a rank and whatever else
    fired. A fault that merely happens to move the same number is no such cause: nobody who reads "overfit"
    looks for stale weights.
    """

    name: str
    rule_set: RuleSet
    finds: tuple[str, ...]
    source: str


def _debugger(name: str, documented_name: str, *finds: str) -> PeerRule:
    return PeerRule(name, "SageMaker Debugger", finds, DOCUMENTATION.format(documented_name))


def _threshold(name: str, *finds: str) -> PeerRule:
    return PeerRule(name, "lone thresholds", finds, COMMON_ALERT)


PEER_RULES: tuple[PeerRule, ...] = (
    _debugger(
        "vanishing_gradient",
        "VanishingGradient",
        "vanishing_gradients",
        "initialisation_too_small",
        "zero_initialisation",
        "dead_units",  # no gradient passes a unit that never fires
        "detached_branch",
    ),
    _debugger(
        "exploding_tensor",
        "ExplodingTensor",
        "nonfinite_value",
        "exploding_gradients",
        "learning_rate_too_high",
        "initialisation_too_large",
    ),
    _debugger(
        "poor_weight_initialization",
        "PoorWeightInitialization",
        "initialisation_too_large",
        "initialisation_too_small",
        "zero_initialisation",
        "vanishing_gradients",  # "too small an initialization can lead to vanishing gradients"
        "exploding_gradients",  # "too large an initialization can lead to exploding gradients"
    ),
    _debugger(
        "loss_not_decreasing",
        "LossNotDecreasing",
        "learning_rate_too_high",
        "learning_rate_too_low",
        "underfitting",
        "overfitting",  # the rule looks at the losses of evaluation first
        "zero_initialisation",
        "initialisation_too_large",
        "initialisation_too_small",
    ),
    _debugger(
        "weight_update_ratio",
        "WeightUpdateRatio",
        "learning_rate_too_high",
        "learning_rate_too_low",
        "warmup_missing",
        "frozen_layer",
        "detached_branch",
        "zero_initialisation",
    ),
    _debugger("dead_relu", "DeadRelu", "dead_units", "learning_rate_too_high"),
    _debugger(
        "all_zero", "AllZero", "zero_initialisation", "dead_units", "detached_branch", "vanishing_gradients"
    ),
    _debugger(
        "unchanged_tensor", "UnchangedTensor", "frozen_layer", "detached_branch", "zero_initialisation"
    ),
    _debugger("overfit", "Overfit", "overfitting"),
    _debugger("overtraining", "Overtraining", "overfitting", "underfitting"),
    _debugger("stalled_training", "StalledTrainingRule"),  # a machine that stands still is none of our faults
    _threshold(
        "loss_not_finite",
        "nonfinite_value",
        "exploding_gradients",
        "learning_rate_too_high",
        "initialisation_too_large",
    ),
    _threshold(
        "loss_above_median",
        "bad_batch",
        "learning_rate_too_high",
        "warmup_missing",
        "exploding_gradients",
        "optimizer_state_lost",  # a loss that jumps at a resume
        "schedule_reset_on_resume",
    ),
    _threshold(
        "gradient_norm_above_limit",
        "exploding_gradients",
        "learning_rate_too_high",
        "initialisation_too_large",
        "bad_batch",
        "loss_summed_not_averaged",
        "accumulation_not_normalised",
        "gradients_not_zeroed",
    ),
)

OMITTED: Mapping[str, str] = {
    "TensorVariance": "its two thresholds have no default, so that it never fires by default",
    "SaturatedActivation": "is about tanh and sigmoid layers, of which the reference model has none",
    "SimilarAcrossRuns": "compares two runs and names no fault",
    "ClassImbalance": "needs labels and predictions of a classifier",
    "Confusion": "needs labels and predictions of a classifier",
    "CheckInputImages": "is about images",
    "NLPSequenceRatio": "is about how batches are put together",
    "TreeDepth": "is about XGBoost",
    "FeatureImportanceOverweight": "is about XGBoost",
}
"""Documented rules that are not here, and why. The profiler's rules are about machines."""


def load_peer_rules(connection: duckdb.DuckDBPyConnection) -> None:
    """Create the macro of every rule; the views and the query library must be there.

    Raises AnalyzerError with the file's name when its SQL does not bind.
    """
    for rule in PEER_RULES:
        path = RULE_DIRECTORY / f"{rule.name}.sql"
        try:
            connection.execute(path.read_text(encoding="utf-8"))
        except duckdb.Error as error:
            raise AnalyzerError(f"{path}: {error}") from None


def fired_rules(run_log: RunLog) -> tuple[str, ...]:
    """Names of the rules that fire on the one opened run, or the first of several, in the order of the rules.

    A rule without the rows that it needs is silent, like its original. Loads the rules first.
    """
    load_peer_rules(run_log.connection)
    run = quoted(next(iter(run_log.paths)))
    selections = [
        f"SELECT {place} AS place, EXISTS (FROM {rule.name}() WHERE run = {run}) AS fired"
        for place, rule in enumerate(PEER_RULES)
    ]
    rows = run_log.query(" UNION ALL ".join(selections)).to_pylist()
    fired = {row["place"] for row in rows if row["fired"]}
    return tuple(rule.name for place, rule in enumerate(PEER_RULES) if place in fired)
