"""DIAGNOSES: every rule, in display order; one per file of ``queries/diagnoses``."""

from __future__ import annotations

from analyzer.diagnoses.attention_and_units import ATTENTION_AND_UNITS
from analyzer.diagnoses.data_and_generalisation import DATA_AND_GENERALISATION
from analyzer.diagnoses.loss_and_gradient import LOSS_AND_GRADIENT
from analyzer.diagnoses.optimisation import OPTIMISATION
from analyzer.diagnoses.reproduction_and_evaluation import REPRODUCTION_AND_EVALUATION

DIAGNOSES = (
    *ATTENTION_AND_UNITS,
    *OPTIMISATION,
    *LOSS_AND_GRADIENT,
    *DATA_AND_GENERALISATION,
    *REPRODUCTION_AND_EVALUATION,
)
