"""Checkpoints: the five state machines of a run in one directory, published by one atomic rename.

``checkpoints/step-00000400/`` holds the state before update 400: weights and moments in safetensors, all
other state in JSON, and a manifest with a hash of each part. Nothing here can run code when it is loaded.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray
from safetensors import SafetensorError

from experiments.errors import ExperimentError
from recorder.schema import CHECKPOINT_DIRECTORY

if TYPE_CHECKING:  # the loop saves checkpoints, so it imports this module
    from experiments.training import TrainingState

CHECKPOINT_VERSION = 1
WEIGHTS_FILE = "weights.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
STATE_FILE = "state.json"
MANIFEST_FILE = "manifest.json"
PARTS = (WEIGHTS_FILE, OPTIMIZER_FILE, STATE_FILE)
KEPT_COUNT = 2  # a damaged newest one leaves one to fall back on
MOMENTS = ("first_moment", "second_moment")

Arrays = dict[str, NDArray[Any]]
Json = dict[str, Any]


class CheckpointError(ExperimentError):
    """A checkpoint can not be used: which one, expected against found, and what to do."""


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint; ``state`` is what ``TrainingState.load_state`` takes."""

    directory: Path
    step: int
    state: Json
    weights_hash: int
    optimizer_hash: int
    rng_hash: int

    def facts(self) -> Json:
        """What the log says of a resume; 64-bit hashes as decimal strings, since JSON readers use doubles."""
        return {
            "step": self.step,
            "checkpoint": f"{CHECKPOINT_DIRECTORY}/{self.directory.name}",
            "weights_hash": str(self.weights_hash),
            "optimizer_hash": str(self.optimizer_hash),
            "rng_hash": str(self.rng_hash),
            "epoch": self.state["data"]["epoch"],
            "data_position": self.state["data"]["data_position"],
        }


def checkpoint_path(run_directory: Path, step: int) -> Path:
    """Directory of the checkpoint that holds w_step."""
    return run_directory / CHECKPOINT_DIRECTORY / f"step-{step:08d}"


def checkpoint_steps(run_directory: Path) -> list[int]:
    """Steps of all published checkpoints, ascending; a temporary one never counts."""
    names = (path.name for path in (run_directory / CHECKPOINT_DIRECTORY).glob("step-*"))
    return sorted(int(name[5:]) for name in names if re.fullmatch(r"step-\d{8,}", name))


def save_checkpoint(run_directory: Path, step: int, run: TrainingState, config_hash: str) -> Path:
    """The published directory. A crash at any point leaves every earlier checkpoint as it was.

    Raises OSError when it can not be written.
    """
    target = checkpoint_path(run_directory, step)
    target.parent.mkdir(parents=True, exist_ok=True)
    for leftover in target.parent.glob(".step-*.tmp"):
        shutil.rmtree(leftover)
    temporary = target.parent / f".{target.name}.{os.getpid()}.tmp"
    temporary.mkdir()
    parts = _serialised(run)
    for name, content in parts.items():
        _write_durably(temporary / name, content)
    manifest = _manifest(step, run, config_hash, parts)
    _write_durably(temporary / MANIFEST_FILE, json.dumps(manifest, indent=2).encode())
    _sync_directory(temporary)
    if target.exists():  # damaged, or of a branch that a resume has abandoned
        shutil.rmtree(target)
    temporary.rename(target)
    _sync_directory(target.parent)
    return target


def remove_old_checkpoints(run_directory: Path) -> None:
    """Keep the newest KEPT_COUNT."""
    for step in checkpoint_steps(run_directory)[:-KEPT_COUNT]:
        shutil.rmtree(checkpoint_path(run_directory, step))


def load_checkpoint(directory: Path, run: TrainingState, config_hash: str) -> Checkpoint:
    """The checkpoint, checked in full against ``run``, which only serves as a template and is not changed.

    Raises CheckpointError for any other file in it, a newer version, another config, a part whose hash
    differs, and a tensor or value that is missing, extra, or of another shape or type.
    """
    _check_files(directory)
    manifest = _read_json((directory / MANIFEST_FILE).read_bytes(), directory / MANIFEST_FILE)
    _check_manifest(directory, manifest, config_hash)
    content = {name: (directory / name).read_bytes() for name in PARTS}
    for name in PARTS:
        if _digest(content[name]) != manifest["parts"].get(name):
            raise CheckpointError(
                f"{directory / name}: damaged: its hash is not the manifest's; delete {directory}"
            )
    template = run.state()
    state = _decoded(
        _read_json(content[STATE_FILE], directory / STATE_FILE),
        _without_tensors(template),
        f"{directory / STATE_FILE}",
    )
    weights = _read_tensors(content[WEIGHTS_FILE], template["model"], directory / WEIGHTS_FILE)
    moments = _read_tensors(content[OPTIMIZER_FILE], _named_moments(run), directory / OPTIMIZER_FILE)
    state["model"] = weights
    state["optimizer"] |= _flat_moments(run, moments)
    hashes = {name: int(manifest[name]) for name in ("weights_hash", "optimizer_hash", "rng_hash")}
    return Checkpoint(directory=directory, step=manifest["step"], state=state, **hashes)


def newest_checkpoint(
    run_directory: Path, steps: Sequence[int], run: TrainingState, config_hash: str
) -> tuple[Checkpoint, list[str]]:
    """The newest of the checkpoints ``steps`` that is whole, and why newer ones are not.

    Raises CheckpointError when there is none.
    """
    refusals: list[str] = []
    for step in sorted(steps, reverse=True):
        try:
            return load_checkpoint(checkpoint_path(run_directory, step), run, config_hash), refusals
        except CheckpointError as error:
            refusals.append(str(error))
    if refusals:
        raise CheckpointError(refusals[0])
    raise CheckpointError(f"{run_directory}: no checkpoint to resume from; train it again with --overwrite")


# Writing --------------------------------------------------------------------------------------


def _serialised(run: TrainingState) -> dict[str, bytes]:
    """The content of each part; a tied weight is in it once, under its first name."""
    state = _encoded(_without_tensors(run.state()))
    return {
        WEIGHTS_FILE: safetensors.numpy.save(run.model.state()),
        OPTIMIZER_FILE: safetensors.numpy.save(_named_moments(run)),
        STATE_FILE: json.dumps(state, indent=1).encode(),
    }


def _manifest(step: int, run: TrainingState, config_hash: str, parts: Mapping[str, bytes]) -> Json:
    return {
        "schema_version": CHECKPOINT_VERSION,
        "step": step,
        "config_hash": config_hash,
        "tied": dict(run.model.tied_names()),
        "parts": {name: _digest(content) for name, content in parts.items()},
        **{name: str(value) for name, value in run.hashes().items()},
    }


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


def _write_durably(path: Path, content: bytes) -> None:
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(path: Path) -> None:
    """Make names durable: a file's own fsync does not."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# Reading --------------------------------------------------------------------------------------


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _check_files(directory: Path) -> None:
    expected, found = {*PARTS, MANIFEST_FILE}, {path.name for path in directory.iterdir()}
    for name in sorted(found - expected):
        raise CheckpointError(
            f"{directory / name}: not part of a checkpoint, which is {', '.join(sorted(expected))}; "
            "only safetensors and JSON are ever loaded: remove it"
        )
    for name in sorted(expected - found):
        raise CheckpointError(f"{directory / name}: missing; delete {directory}")


def _check_manifest(directory: Path, manifest: Json, config_hash: str) -> None:
    path, version = directory / MANIFEST_FILE, manifest.get("schema_version")
    if not isinstance(version, int) or version > CHECKPOINT_VERSION:
        raise CheckpointError(
            f"{path}: version {version}; this program reads 1-{CHECKPOINT_VERSION}: upgrade it"
        )
    if manifest.get("config_hash") != config_hash:
        raise CheckpointError(
            f"{path}: of a run with another configuration ({manifest.get('config_hash')}, "
            f"expected {config_hash}); resume it with the settings it was begun with"
        )
    if f"step-{manifest.get('step'):08d}" != directory.name:
        raise CheckpointError(f"{path}: of step {manifest.get('step')}; delete or rename {directory}")


def _read_json(content: bytes, path: Path) -> Json:
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
