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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.checkpoint_parts import PARTS, CheckpointError, Json, parsed, read_json, serialised
from recorder.manifest import json_hash
from recorder.schema import CHECKPOINT_DIRECTORY

if TYPE_CHECKING:  # the loop saves checkpoints, so it imports this module
    from experiments.training import TrainingState

CHECKPOINT_VERSION = 1
MANIFEST_FILE = "manifest.json"
SEAL = "manifest_hash"
KEPT_COUNT = 2  # a damaged newest one leaves one to fall back on


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

    Raises CheckpointError when it can not be written.
    """
    target = checkpoint_path(run_directory, step)
    try:
        _publish(target, step, run, config_hash)
    except OSError as error:
        raise CheckpointError(
            f"{target}: can not write: {error.strerror}; make room, then continue with --resume"
        ) from error
    return target


def _publish(target: Path, step: int, run: TrainingState, config_hash: str) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    for leftover in target.parent.glob(".step-*.tmp"):
        shutil.rmtree(leftover)
    temporary = target.parent / f".{target.name}.{os.getpid()}.tmp"
    temporary.mkdir()
    parts = serialised(run)
    for name, content in parts.items():
        _write_durably(temporary / name, content)
    manifest = _manifest(step, run, config_hash, parts)
    _write_durably(temporary / MANIFEST_FILE, json.dumps(manifest, indent=2).encode())
    _sync_directory(temporary)
    if target.exists():  # damaged, or of a branch that a resume has abandoned
        shutil.rmtree(target)
    temporary.rename(target)
    _sync_directory(target.parent)


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
    manifest = read_json((directory / MANIFEST_FILE).read_bytes(), directory / MANIFEST_FILE)
    _check_manifest(directory, manifest, config_hash)
    content = {name: (directory / name).read_bytes() for name in PARTS}
    for name in PARTS:
        if _digest(content[name]) != manifest["parts"].get(name):
            raise CheckpointError(
                f"{directory / name}: damaged: its hash is not the manifest's; delete {directory}"
            )
    state = parsed(content, directory, run)
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


def _manifest(step: int, run: TrainingState, config_hash: str, parts: Mapping[str, bytes]) -> Json:
    return _sealed(
        {
            "schema_version": CHECKPOINT_VERSION,
            "step": step,
            "config_hash": config_hash,
            "tied": dict(run.model.tied_names()),
            "parts": {name: _digest(content) for name, content in parts.items()},
            **{name: str(value) for name, value in run.hashes().items()},
        }
    )


def _sealed(manifest: Json) -> Json:
    """The manifest with the hash of everything else in it."""
    rest = {name: value for name, value in manifest.items() if name != SEAL}
    return rest | {SEAL: json_hash(rest)}


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
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: no such checkpoint; name a directory step-00000000")
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
    if manifest.get(SEAL) != _sealed(manifest)[SEAL]:
        raise CheckpointError(f"{path}: damaged: it does not match its own hash; delete {directory}")
    if manifest["config_hash"] != config_hash:
        raise CheckpointError(
            f"{path}: of a run with another configuration ({manifest['config_hash']}, "
            f"expected {config_hash}); resume it with the settings it was begun with"
        )
    if checkpoint_path(Path(), manifest["step"]).name != directory.name:
        raise CheckpointError(f"{path}: of step {manifest['step']}; delete or rename {directory}")
