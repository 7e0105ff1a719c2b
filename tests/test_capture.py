"""Hooks on a model: what they keep, for how long, and that detaching leaves nothing."""

from pathlib import Path

import numpy as np
from hand_driven_model import HandDrivenModel
from recorded_rows import rows

from recorder import Cadence, Recorder
from recorder.hooks import Attention


def test_statistics_are_over_real_tokens(run: Path) -> None:
    """A padded row enters neither the activation's nor its gradient's statistics."""
    model = HandDrivenModel()
    with Recorder(run) as recorder:
        recorder.attach(model)
        with recorder.step(0):
            output = model.relu([[1.0, 3.0], [100.0, 100.0]], [True, False])
            output.gradient_hooks.fire(np.array([[0.5, 0.5], [9.0, 9.0]], np.float32))
    recorded = {row["kind"]: row for row in rows(run, "tensors") if "activation" in row["kind"]}
    assert (recorded["activation"]["mean"], recorded["activation"]["element_count"]) == (2.0, 2)
    assert recorded["activation_gradient"]["max"] == 0.5


def test_a_unit_is_dead_only_if_it_never_fired_in_the_window(run: Path) -> None:
    """Unit 0 fires in one step of the window, unit 1 only on padding, unit 2 never."""
    model = HandDrivenModel()
    with Recorder(run, cadence=Cadence(unit_window=2)) as recorder:
        recorder.attach(model)
        for step, first in enumerate([0.0, 1.0, 0.0]):
            with recorder.step(step):
                model.relu([[first, 0.0, 0.0], [0.0, 5.0, 0.0]], [True, False])
    windows = [(row["step"], row["window_steps"], row["dead_unit_count"]) for row in rows(run, "units")]
    assert windows == [(1, 2, 2), (2, 1, 3)]


def test_attention_is_recorded_per_head(run: Path) -> None:
    """Head 1 looks ahead, head 0 does not."""
    model = HandDrivenModel()
    probabilities = np.array([[[[1.0, 0.0], [0.5, 0.5]], [[0.5, 0.5], [0.5, 0.5]]]], np.float32)
    with Recorder(run) as recorder:
        recorder.attach(model)
        with recorder.step(0):
            model.modules["attention"].attention_hooks.fire(
                Attention(probabilities, np.ones((1, 2), bool), lambda: np.full((1, 2, 2, 2), -3.0))
            )
    mass = {
        row["head"]: (row["layer"], row["future_mass"], row["max_abs_logit"])
        for row in rows(run, "attention")
    }
    assert mass == {0: (1, 0.0, 3.0), 1: (1, 0.25, 3.0)}


def test_hooks_outside_a_step_keep_nothing(run: Path) -> None:
    """An evaluation between two steps is not part of either."""
    model = HandDrivenModel()
    with Recorder(run) as recorder:
        recorder.attach(model)
        model.relu([[1.0, 1.0]])
        assert recorder.capture.activations == {}


def test_arrays_are_let_go_when_the_step_ends(run: Path) -> None:
    """The recorder must not hold memory of the training between steps."""
    model = HandDrivenModel()
    with Recorder(run) as recorder:
        recorder.attach(model)
        with recorder.step(0):
            model.relu([[1.0, 1.0]])
            assert set(recorder.capture.activations) == {"mlp.relu"}
        assert recorder.capture.activations == {}


def test_detaching_leaves_nothing_in_the_model(run: Path) -> None:
    """Every hook that attach put in is taken out again, also by closing."""
    model = HandDrivenModel()
    with Recorder(run) as recorder:
        recorder.attach(model)
        assert len(model.all_hooks()) == 5  # one weight, three modules, one attention
    assert model.all_hooks() == []


def test_tensors_are_named_with_their_place(run: Path) -> None:
    """A weight belongs to its module and layer, and the second name of a tied one is noted."""
    model = HandDrivenModel()
    with Recorder(run) as recorder:
        recorder.attach(model)
        with recorder.step(0):
            model.relu([[1.0, 1.0]])
    weight, relu = rows(run, "tensor_names")
    assert (weight["name"], weight["module"], weight["layer"], weight["tied_to"]) == (
        "mlp.weight", "mlp", 0, "head.weight",
    )  # fmt: skip
    assert (relu["name"], relu["role"], relu["shape"], relu["trainable"]) == ("mlp.relu", "relu", "[2]", None)
