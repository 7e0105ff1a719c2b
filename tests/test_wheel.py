"""The wheel, installed elsewhere, has its queries and its page templates."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from recorder import Recorder

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory that the wheel was unpacked into; it is built without network and without isolation."""
    directory = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    command += ["--wheel-dir", str(directory), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    (wheel,) = directory.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(directory / "site")
    return directory / "site"


def run_analyzer(installed: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """``python -m analyzer`` of the unpacked wheel, away from the repository."""
    environment = os.environ | {"PYTHONPATH": str(installed)}
    command = [sys.executable, "-m", "analyzer", *arguments]
    return subprocess.run(command, cwd=installed.parent, env=environment, capture_output=True, text=True)


def test_the_installed_analyzer_finds_its_queries(installed: Path, tmp_path: Path) -> None:
    """Named queries answer from the wheel's own copy."""
    assert list((installed / "analyzer" / "queries").rglob("loss_spikes.sql"))
    with Recorder(tmp_path / "run") as recorder:
        for step in range(3):
            with recorder.step(step) as record:
                record.log(loss_sum=2.0 - step, loss_token_count=1)
    result = run_analyzer(installed, "sql", str(tmp_path / "run"), "FROM training_loss_by_step()", "--csv")
    assert result.returncode == 0, result.stderr
    assert [line.split(",")[1] for line in result.stdout.splitlines()] == ["step", "0", "1", "2"]


def test_the_installed_analyzer_renders(installed: Path, tmp_path: Path) -> None:
    """Templates of the page are in the wheel."""
    with Recorder(tmp_path / "run") as recorder, recorder.step(0) as record:
        record.log(loss_sum=2.0, loss_token_count=1)
    result = run_analyzer(installed, "render", str(tmp_path / "run"))
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "run" / "dashboard.html").stat().st_size > 1_000_000
