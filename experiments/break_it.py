"""The blind test: three faults under shuffled names. Write a diagnosis from the log, then open the seal.

``sealed.json`` holds the order of the faults, encoded and hashed with a salt. That is honesty, not secrecy:
nobody reads it by accident, and a mapping changed afterwards does not match its hash.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import hashlib
import json
import re
import secrets
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from experiments.errors import ExperimentError
from experiments.experiment import EXPERIMENTS_DIRECTORY, Experiment, clear_run_directory, run_experiment
from experiments.faults import FAULTS, fault_named
from experiments.training import TrainingConfig

SEALED_FILE = "sealed.json"
DIAGNOSES_FILE = "diagnoses.md"
SCORE_FILE = "diagnosis-score.md"
RUN_NAMES = ("01", "02", "03")
DESIGNED_FAULTS = (
    ("initialisation_too_large", "severe"),
    ("warmup_missing", "mild"),
    ("causal_mask_absent", "severe"),
)
"""(fault, severity): all matrices times 100, no warmup at the planned rate, all-ones mask."""


@dataclass(frozen=True)
class Score:
    """One run's truth and what the reader wrote; None when he wrote nothing."""

    run: str
    fault: str
    diagnosis: str | None

    @property
    def is_right(self) -> bool:
        """The diagnosis names the fault, by its name or its title."""
        return self.diagnosis is not None and _plain(self.diagnosis) in {
            _plain(self.fault),
            _plain(fault_named(self.fault).title),
        }


def break_it(experiment: Experiment, config: TrainingConfig, out: Path | None, overwrite: bool) -> int:
    """Train the three runs; nothing that is printed or recorded as intended tells which fault is where."""
    directory = out or Path("runs") / experiment.name
    severity_of = dict(DESIGNED_FAULTS)
    mapping = open_seal(EXPERIMENTS_DIRECTORY / experiment.name)
    for run, fault in mapping.items():
        clear_run_directory(directory / run, overwrite=overwrite)
        print(f"{experiment.name}: {run}, {config.total_steps} steps, seed {config.seed}", file=sys.stderr)
        hidden = dataclasses.replace(experiment, fault=fault, severity=severity_of[fault])
        run_experiment(hidden, config, directory / run)
    pages = " ".join(str(directory / run) for run in mapping)
    print(f"read    analyzer render --blind {pages}")
    print(f"write   {Path('experiments') / experiment.name / DIAGNOSES_FILE}, one line a run, such as")
    print("        01: overfitting - what in the page says so")
    print(f"then    python -m experiments score {experiment.name}")
    return 0


def seal(folder: Path, salt: str | None = None) -> Path:
    """A new ``sealed.json``, whose order is drawn from the salt."""
    salt = salt or secrets.token_hex(16)
    order = np.random.default_rng(int(salt, 16)).permutation(len(DESIGNED_FAULTS))
    mapping = {run: DESIGNED_FAULTS[index][0] for run, index in zip(RUN_NAMES, order, strict=True)}
    text = json.dumps(mapping)
    document = {
        "salt": salt,
        "mapping": base64.b64encode(text.encode()).decode(),
        "hash": _hash(salt, text),
    }
    path = folder / SEALED_FILE
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return path


def open_seal(folder: Path) -> dict[str, str]:
    """Run name -> fault. Raises ExperimentError when there is no seal, or its hash does not match."""
    path = folder / SEALED_FILE
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        text = base64.b64decode(document["mapping"]).decode()
        matches = _hash(document["salt"], text) == document["hash"]
    except FileNotFoundError:
        raise ExperimentError(
            f"{path}: no seal; make one with: python -m experiments seal {folder.name}"
        ) from None
    except (ValueError, KeyError, TypeError, binascii.Error) as error:
        raise ExperimentError(f"{path}: no seal that can be read: {error}") from None
    if not matches:
        raise ExperimentError(f"{path}: the mapping is not the one that was sealed: its hash differs")
    mapping: dict[str, str] = json.loads(text)
    return mapping


def reveal(folder: Path) -> list[str]:
    """The lines that open the seal. Raises ExperimentError while no diagnosis has been written."""
    read_diagnoses(folder)
    return [f"{run}: {fault}" for run, fault in open_seal(folder).items()]


def score(folder: Path) -> list[Score]:
    """Each run's truth and diagnosis, also written to ``diagnosis-score.md``."""
    diagnoses = read_diagnoses(folder)
    scores = [Score(run, fault, diagnoses.get(run)) for run, fault in open_seal(folder).items()]
    (folder / SCORE_FILE).write_text(_score_page(scores), encoding="utf-8")
    return scores


def read_diagnoses(folder: Path) -> Mapping[str, str]:
    """Run name -> diagnosis, from lines such as ``01: overfitting - reasons``. At least one must be there."""
    path = folder / DIAGNOSES_FILE
    example = f"01: {FAULTS[0].name} - what in the page says so"
    if not path.exists():
        raise ExperimentError(f"{path}: write your diagnoses first, one line a run, such as: {example}")
    lines = path.read_text(encoding="utf-8").splitlines()
    found = [re.fullmatch(r"(\d\d): *(.+?)(?: [-\u2013\u2014] .*)?", line.strip()) for line in lines]
    diagnoses = {match[1]: match[2] for match in found if match and match[1] in RUN_NAMES}
    if not diagnoses:
        raise ExperimentError(f"{path}: no diagnosis found; expected lines such as: {example}")
    return diagnoses


def _score_page(scores: list[Score]) -> str:
    right = sum(score.is_right for score in scores)
    rows = [
        f"| {s.run} | {s.fault} | {s.diagnosis or 'none'} | {'right' if s.is_right else 'wrong'} |"
        for s in scores
    ]
    return "\n".join(
        [
            "# Score of the blind diagnoses",
            "",
            f"{right} of {len(scores)} right, by `python -m experiments score`; the seal's hash matched.",
            "",
            "| run | sealed fault | diagnosis | |",
            "|---|---|---|---|",
            *rows,
            "",
        ]
    )


def _hash(salt: str, text: str) -> str:
    return hashlib.sha256(f"{salt}\n{text}".encode()).hexdigest()


def _plain(text: str) -> str:
    """Letters and digits alone, so that case, spaces and underscores do not decide."""
    return re.sub(r"[^a-z0-9]", "", text.lower())
