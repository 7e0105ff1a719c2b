"""The content of a checkpoint's parts: state machines to safetensors and JSON, and back, checked in full."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray
from safetensors import SafetensorError

from experiments.errors import ExperimentError

if TYPE_CHECKING:  # the loop saves checkpoints, so it imports this module
    from experiments.training import TrainingState

WEIGHTS_FILE = "weights.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
STATE_FILE = "state.json"
PARTS = (WEIGHTS_FILE, OPTIMIZER_FILE, STATE_FILE)
MOMENTS = ("first_moment", "second_moment")

Arrays = dict[str, NDArray[Any]]
Json = dict[str, Any]


class CheckpointError(ExperimentError):
    """A checkpoint can not be used: which one, expected against found, and what to do."""


def serialised(run: TrainingState) -> dict[str, bytes]:
    """The content of each part; a tied weight is in it once, under its first name."""
    state = _encoded(_without_tensors(run.state()))
    return {
        WEIGHTS_FILE: safetensors.numpy.save(run.model.state()),
        OPTIMIZER_FILE: safetensors.numpy.save(_named_moments(run)),
        STATE_FILE: json.dumps(state, indent=1).encode(),
    }


def parsed(content: Mapping[str, bytes], directory: Path, run: TrainingState) -> Json:
    """The state by machine that ``serialised`` wrote; ``run`` is the template of its names, shapes and types.

    Raises CheckpointError for the first thing that does not fit.
    """
    template = run.state()
    path = directory / STATE_FILE
    state: Json = _decoded(read_json(content[STATE_FILE], path), _without_tensors(template), str(path))
    state["model"] = _read_tensors(content[WEIGHTS_FILE], template["model"], directory / WEIGHTS_FILE)
    moments = _read_tensors(content[OPTIMIZER_FILE], _named_moments(run), directory / OPTIMIZER_FILE)
    state["optimizer"] |= _flat_moments(run, moments)
    return state


def _named_moments(run: TrainingState) -> Arrays:
    """Both moments of each weight, under names such as ``head.bias.first_moment``."""
    return {
        f"{name}.{moment}": array.copy()
        for moment in MOMENTS
        for name, array in _by_name(run, run.optimizer.state()[moment])
    }


def _flat_moments(run: TrainingState, moments: Mapping[str, NDArray[Any]]) -> Arrays:
    """The same in the optimizer's flat layout."""
    names = [name for name, _ in _by_name(run, run.optimizer.weights)]
    return {
        moment: np.concatenate([moments[f"{name}.{moment}"].ravel() for name in names]) for moment in MOMENTS
    }


def _by_name(run: TrainingState, flat: NDArray[Any]) -> Iterator[tuple[str, NDArray[Any]]]:
    """(name, shaped view) of each weight's piece of a flat array, in the optimizer's order."""
    name_of = {id(weight): name for name, weight in run.model.named_parameters()}
    for weight, piece in run.optimizer.pieces(flat):
        yield name_of[id(weight)], piece


def _without_tensors(state: Json) -> Json:
    """State by machine without what goes into safetensors."""
    rest = {name: machine for name, machine in state.items() if name != "model"}
    optimizer = {name: value for name, value in state["optimizer"].items() if name not in MOMENTS}
    return rest | {"optimizer": optimizer}


def _encoded(value: Any) -> Any:
    """JSON for nested state: whole numbers as decimal strings, since generators hold up to 128 bits."""
    if isinstance(value, Mapping):
        return {name: _encoded(item) for name, item in value.items()}
    if isinstance(value, np.ndarray):
        return " ".join(map(str, value.ravel().tolist()))
    return str(value) if isinstance(value, int) else value


def read_json(content: bytes, path: Path) -> Json:
    try:
        document = json.loads(content)
    except ValueError as error:
        raise CheckpointError(f"{path}: no JSON: {error}; delete {path.parent}") from None
    if not isinstance(document, dict):
        raise CheckpointError(f"{path}: expected a JSON object; delete {path.parent}")
    return document


def _read_tensors(content: bytes, expected: Mapping[str, NDArray[Any]], path: Path) -> Arrays:
    """The tensors of a safetensors file, exactly those that are expected."""
    try:
        tensors = safetensors.numpy.load(content)
    except (SafetensorError, KeyError, ValueError) as error:
        raise CheckpointError(f"{path}: no safetensors file: {error}; delete {path.parent}") from None
    _check_names(tensors, expected, "tensor", str(path))
    for name, array in tensors.items():
        found, wanted = ((a.dtype.name, a.shape) for a in (array, expected[name]))
        if found != wanted:
            raise CheckpointError(
                f"{path}: {name} is {found[0]} {found[1]}, expected {wanted[0]} {wanted[1]}"
            )
    return tensors


def _decoded(value: Any, template: Any, where: str) -> Any:
    """The state that ``_encoded`` made, in the types and shapes of ``template``."""
    if isinstance(template, Mapping):
        if not isinstance(value, Mapping):
            raise CheckpointError(f"{where}: expected an object, found {value!r:.40}")
        _check_names(value, template, "value", where)
        return {name: _decoded(value[name], item, f"{where}: {name}") for name, item in template.items()}
    try:
        if isinstance(template, np.ndarray):
            numbers = np.array([int(word) for word in value.split()], template.dtype)
            return numbers.reshape(template.shape)
        decoded = type(template)(value)
    except (AttributeError, TypeError, ValueError, OverflowError):
        raise CheckpointError(f"{where}: {value!r:.40} does not fit {_kind(template)}") from None
    if isinstance(template, str) and decoded != template:
        raise CheckpointError(f"{where}: {value!r:.40}, expected {template!r}")
    return decoded


def _kind(template: Any) -> str:
    if isinstance(template, np.ndarray):
        return f"{template.size} numbers of type {template.dtype.name}"
    return {int: "a whole number", float: "a number", str: "text"}[type(template)]


def _check_names(found: Mapping[str, Any], expected: Mapping[str, Any], what: str, where: str) -> None:
    for name in sorted(expected.keys() - found.keys()):
        raise CheckpointError(f"{where}: {what} {name} is missing")
    for name in sorted(found.keys() - expected.keys()):
        raise CheckpointError(f"{where}: {what} {name} is not expected")
