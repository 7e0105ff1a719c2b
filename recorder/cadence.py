"""How often each signal is taken, and how that adapts to a budget."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass


@dataclass(frozen=True)
class Cadence:
    """Every how many steps a signal is taken, counted from step 0; 0 is never.

    The loss, learning rate and gradient norm that the loop logs are kept at every step. Of a step whose loss
    or gradient norm is not finite, gradients, activations and attention are taken whatever the cadence says;
    gradients of activations, and the weights before the update, are gone by then. Weights that are not finite
    are taken at every step.
    """

    gradients: int = 1
    weights: int = 10
    updates: int = 10
    activations: int = 10
    activation_gradients: int = 50
    spectral_norms: int = 10
    spectral_bounds: int = 500  # float64 matrix products; the weights move slowly
    attention: int = 1  # future mass and first row
    attention_entropy: int = 50  # and largest logit
    hashes: int = 10
    unit_window: int = 50  # steps in which a unit must fire to be alive; at least an epoch

    def slowed(self, factor: int) -> Cadence:
        """Every signal ``factor`` times rarer; the unit window, which costs next to nothing, stays."""
        slower = {f.name: factor * getattr(self, f.name) for f in dataclasses.fields(self)}
        return Cadence(**slower | {"unit_window": self.unit_window})


def is_due(step: int, every: int) -> bool:
    """Whether a signal with cadence ``every`` is taken at this step."""
    return every > 0 and step % every == 0


class OverheadBudget:
    """Doubles or halves all cadences so that the recorder stays within a share of the training time."""

    WINDOW_STEPS = 100
    LARGEST_FACTOR = 1024
    COMFORT = 0.25  # speed up again only when that share of the budget is used: no flutter

    def __init__(self, budget: float) -> None:
        """budget: allowed recorder seconds / training seconds, for example 0.02."""
        self.factor = 1
        self._budget = budget
        self._steps = 0
        self._recorder_seconds = 0.0
        self._training_seconds = 0.0

    def spend(self, recorder_seconds: float, step_seconds: float) -> bool:
        """Account for one step; true when the factor changed."""
        self._steps += 1
        self._recorder_seconds += recorder_seconds
        self._training_seconds += step_seconds - recorder_seconds
        if self._steps < self.WINDOW_STEPS:
            return False
        share = self._recorder_seconds / max(self._training_seconds, 1e-9)
        self._steps, self._recorder_seconds, self._training_seconds = 0, 0.0, 0.0
        if share > self._budget and self.factor < self.LARGEST_FACTOR:
            self.factor *= 2
            return True
        if share < self.COMFORT * self._budget and self.factor > 1:
            self.factor //= 2
            return True
        return False
