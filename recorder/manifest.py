"""What a run is: one JSON document, written atomically before step 0 and never rewritten.

It carries the *intended* configuration. A deliberate fault changes the code path, not this file.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from recorder.errors import RecorderError
from recorder.schema import MANIFEST_FILE, SCHEMA_VERSION

RECORDED_PACKAGES = ("numpy", "pyarrow", "safetensors", "torch")
THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")

Json = dict[str, Any]


@dataclass(frozen=True)
class LabelRoles:
    """Which label columns of ``examples`` the per-label panel uses; nothing else knows their names."""

    group: str | None = None  # compared with each other, e.g. regularity
    cluster: str | None = None  # sampling unit of the uncertainty, e.g. verb
    map_rows: str | None = None  # rows of the loss map, e.g. verb
    map_columns: str | None = None  # its columns, e.g. tense


@dataclass(frozen=True)
class ReferenceLosses:
    """Losses in nats/token that the curves are read against; an absent one is not drawn."""

    uniform: float | None = None  # ln V
    unigram: float | None = None  # entropy of the token frequencies
    n_gram: float | None = None  # best n-gram model on the primary split
    entropy_floor: Mapping[str, float] = field(default_factory=dict)  # split -> prefix-tree entropy


@dataclass(frozen=True)
class Manifest:
    """The declaration of one run. Everything has a default, so that a bare loop can record too."""

    run_id: str
    config: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None
    loss_reduction: str | None = None  # one sentence
    mask_type: str | None = None  # "causal", "bidirectional", "prefix"; intended, not observed
    planned_schedule: Mapping[str, Any] = field(default_factory=dict)
    reference_losses: ReferenceLosses = field(default_factory=ReferenceLosses)
    primary_split: str | None = None  # the only split that drives alarms
    label_roles: LabelRoles = field(default_factory=LabelRoles)
    data_manifest_hash: str | None = None
    created: str = ""  # UTC, ISO 8601; filled in when the run starts
    config_hash: str = ""
    git: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    schema_version: int = SCHEMA_VERSION

    def completed(self) -> Manifest:
        """This manifest with time, config hash, git state and environment filled in."""
        return dataclasses.replace(
            self,
            created=self.created or datetime.now(UTC).isoformat(timespec="seconds"),
            config_hash=json_hash(self.config),
            git=self.git or git_state(),
            environment=self.environment or environment(),
        )

    def write(self, run_directory: Path) -> None:
        """Publish ``manifest.json`` by one atomic rename: a reader sees all of it or nothing."""
        target = run_directory / MANIFEST_FILE
        temporary = target.with_suffix(f".{os.getpid()}.tmp")
        text = _json_text(dataclasses.asdict(self), indent=2)
        with temporary.open("w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(target)


def read_manifest(run_directory: Path) -> Manifest:
    """The manifest of a run directory. Fields that are unknown to this version are ignored.

    Raises RecorderError when the file is missing, is no JSON object, or has a newer schema version.
    """
    path = run_directory / MANIFEST_FILE
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RecorderError(
            f"{run_directory}: not a run directory: no {MANIFEST_FILE}; "
            "name a directory that a recorder wrote, for example runs/19-healthy"
        ) from None
    except (OSError, ValueError) as error:
        raise RecorderError(f"{path}: unreadable manifest: {error}") from None
    if not isinstance(document, dict) or not isinstance(document.get("run_id"), str):
        raise RecorderError(f"{path}: not a manifest: expected a JSON object with a run_id")
    version = document.get("schema_version")
    if not isinstance(version, int) or version > SCHEMA_VERSION:
        raise RecorderError(
            f"{path}: schema version {version}; this analyzer reads 1-{SCHEMA_VERSION}: upgrade it"
        )
    known = {f.name for f in dataclasses.fields(Manifest)}
    values = {name: value for name, value in document.items() if name in known}
    values["label_roles"] = _known_fields(LabelRoles, values.get("label_roles"))
    values["reference_losses"] = _known_fields(ReferenceLosses, values.get("reference_losses"))
    return Manifest(**values)


def _known_fields(cls: type, document: object) -> Any:
    """An instance of a dataclass from the JSON fields that it knows."""
    if not isinstance(document, dict):
        return cls()
    return cls(**{f.name: document[f.name] for f in dataclasses.fields(cls) if f.name in document})


def json_hash(document: Mapping[str, Any]) -> str:
    """Hex digest of a JSON document, independent of key order."""
    text = _json_text(document).encode(errors="backslashreplace")
    return hashlib.blake2b(text, digest_size=8).hexdigest()


def _json_text(document: Mapping[str, Any], indent: int | None = None) -> str:
    """What JSON has no type for is written as a number where it is one, else as its text. RecorderError."""
    try:
        return json.dumps(document, indent=indent, ensure_ascii=False, sort_keys=True, default=_plain)
    except (TypeError, ValueError) as error:  # keys that can not be sorted or written; a circle
        raise RecorderError(f"{MANIFEST_FILE}: {error}; use text for keys") from None


def _plain(value: Any) -> Any:
    """A NumPy scalar or array as Python's own values; a path, a dtype, a class as text."""
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else str(value)


def git_state() -> Json:
    """``{"sha": ..., "dirty": ...}`` of the working directory's repository; empty outside one."""
    try:
        sha = _git("rev-parse", "HEAD")
        return {"sha": sha, "dirty": bool(_git("status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return {}


def _git(*arguments: str) -> str:
    result = subprocess.run(["git", *arguments], capture_output=True, text=True, check=True, timeout=5)
    return result.stdout.strip()


def environment() -> Json:
    """Host, process, versions, processor and thread counts of this process."""
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor_count": os.cpu_count(),
        "packages": {name: v for name in RECORDED_PACKAGES if (v := _version(name)) is not None},
        "threads": {name: os.environ.get(name) for name in THREAD_VARIABLES},
        "command": _command(),
    }


def _command() -> list[str]:
    """Where the program lies is nobody's business; a file name in another encoding is told with escapes."""
    words = [Path(sys.argv[0]).name, *sys.argv[1:]]
    return [word.encode(errors="backslashreplace").decode() for word in words]


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
