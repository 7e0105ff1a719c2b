"""Export to a real MLflow store: what goes in comes out, and what can not is named."""

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from analyzer.cli import main
from analyzer.exporters.mlflow import scalar_points
from analyzer.run_log import open_runs
from recorder import Manifest, Recorder

os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
pytest.importorskip("mlflow", reason="the mlflow extra is not installed")

# MLflow 3 uses a loader strategy that SQLAlchemy 2.1 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")

LOSSES = [2.0, math.nan, math.inf, -math.inf, 1.5]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(client, MLflow run) of an exported run with NaN and infinities in its loss."""
    from mlflow.tracking import MlflowClient

    directory = tmp_path_factory.mktemp("mlflow")
    run = directory / "run"
    with Recorder(run, Manifest("night", config={"optimizer": {"beta1": 0.9}}, seed=3)) as recorder:
        for step, loss in enumerate(LOSSES):
            with recorder.step(step) as record:
                record.log(loss_sum=loss, loss_token_count=1, learning_rate=0.1)
    uri = f"sqlite:///{directory}/store.db"
    previous = Path.cwd()
    os.chdir(directory)  # MLflow puts artifacts of a sqlite store into the working directory
    try:
        assert main(["export", "mlflow", str(run), "--tracking-uri", uri]) == 0
        client = MlflowClient(tracking_uri=uri)
        experiment = client.get_experiment_by_name("flight-recorder")
        (found,) = client.search_runs([experiment.experiment_id])
        yield client, found
    finally:
        os.chdir(previous)


def test_nan_survives_and_infinities_are_not_bent(exported: Any) -> None:
    """Finite points and NaN are there at their steps; no point pretends to be 1.797e308."""
    client, run = exported
    history = {m.step: m.value for m in client.get_metric_history(run.info.run_id, "train_loss")}
    assert history.keys() == {0, 1, 4}
    assert (history[0], history[4]) == (2.0, 1.5) and math.isnan(history[1])


def test_what_mlflow_can_not_hold_is_named(exported: Any) -> None:
    """The tag lists series, value and steps."""
    _, run = exported
    report = json.loads(run.data.tags["flight_recorder.not_representable"])
    assert report == {"train_loss": {"Infinity": [2], "-Infinity": [3]}}


def test_the_manifest_becomes_parameters(exported: Any) -> None:
    """Nested configuration is flattened; what was not declared is not a parameter."""
    _, run = exported
    assert run.data.params["config.optimizer.beta1"] == "0.9"
    assert run.data.params["seed"] == "3"
    assert "mask_type" not in run.data.params


def test_the_dashboard_is_an_artifact(exported: Any) -> None:
    """The page travels with the run, and the run's end is the log's."""
    client, run = exported
    assert [artifact.path for artifact in client.list_artifacts(run.info.run_id)] == ["dashboard.html"]
    assert run.info.status == "FINISHED"


def test_a_metric_is_of_rank_0(tmp_path: Path) -> None:
    """Another rank's loss of the same step is no second value of the same metric."""
    for rank in range(2):
        with Recorder(tmp_path / "run", rank=rank, world_size=2, quiet=True) as recorder:
            for step in range(3):
                with recorder.step(step) as record:
                    record.log(loss_sum=10.0 * rank + step, loss_token_count=1)
    with open_runs([tmp_path / "run"]) as run_log:
        points = [(p.series, p.step, p.value) for p in scalar_points(run_log, "run")]
    assert points == [("train_loss", step, float(step)) for step in range(3)]
