"""Writes the golden log of the present schema version: python tests/golden/make.py

A golden log is made once per schema version and never again: later analyzers must read it as it is.
The last step has one gradient, of every kind of value that there is; the others did not arrive.
Host, process and git state are fixed, since they say nothing about the contract.
"""

from pathlib import Path
from unittest.mock import patch

import numpy as np

from experiments.corpus import load_corpus
from experiments.training import TrainingConfig, train
from recorder import Cadence, LabelRoles, Manifest, Recorder
from recorder.schema import SCHEMA_VERSION

CONFIG = TrainingConfig(
    total_steps=25,
    evaluation_interval=25,
    width=16,
    head_count=2,
    layer_count=1,
    feed_forward_width=16,
)
ENVIRONMENT = {"host": "golden", "pid": 1, "packages": {}, "threads": {}, "command": []}


def main() -> None:
    """Write tests/golden/v<schema version>."""
    manifest = Manifest(
        "golden",
        config={"total_steps": CONFIG.total_steps, "width": CONFIG.width},
        seed=CONFIG.seed,
        mask_type="causal",
        primary_split="validation",
        label_roles=LabelRoles("regularity", "verb", "verb", "tense"),
        created="2026-11-30T00:00:00+00:00",
        git={"sha": "", "dirty": False},
        environment=ENVIRONMENT,
    )
    directory = Path(__file__).parent / f"v{SCHEMA_VERSION}"
    with (
        patch("recorder.recorder.environment", lambda: ENVIRONMENT),
        Recorder(directory, manifest, cadence=Cadence(gradients=5, attention=5)) as recorder,
    ):
        train(CONFIG, load_corpus(), recorder)
        with recorder.step(CONFIG.total_steps) as record:
            values = np.array([np.nan, np.nan, np.inf, -np.inf, 3.0, -4.0], np.float32)
            record.add_gradients({"blocks.0.mlp.up.weight": values})


if __name__ == "__main__":
    main()
