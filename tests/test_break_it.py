"""The blind test: what is sealed, what stays hidden, and how a diagnosis is scored."""

import json
from pathlib import Path

import pytest

from experiments import break_it
from experiments.break_it import DESIGNED_FAULTS, RUN_NAMES, open_seal, reveal, score, seal
from experiments.cli import main
from experiments.errors import ExperimentError
from experiments.experiment import EXPERIMENTS_DIRECTORY, configure, load_experiment
from recorder.manifest import read_manifest

SALT = "0f" * 16


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a seal of a fixed salt."""
    seal(tmp_path, SALT)
    return tmp_path


def test_seal_names_each_designed_fault_once(folder: Path) -> None:
    """Three runs, three faults, and the file does not show them in plain words."""
    mapping = open_seal(folder)
    assert tuple(mapping) == RUN_NAMES
    assert sorted(mapping.values()) == sorted(fault for fault, _ in DESIGNED_FAULTS)
    text = (folder / break_it.SEALED_FILE).read_text()
    assert not any(fault in text for fault in mapping.values())


def test_order_depends_on_the_salt_alone(tmp_path: Path) -> None:
    """The same salt gives the same file; among ten salts there are several orders."""
    texts = [seal(tmp_path, SALT).read_text() for _ in range(2)]
    assert texts[0] == texts[1]
    orders = set()
    for number in range(10):
        seal(tmp_path, f"{number:032x}")
        orders.add(tuple(open_seal(tmp_path).values()))
    assert len(orders) >= 3


def test_a_mapping_that_was_changed_is_noticed(folder: Path) -> None:
    """The hash covers salt and mapping."""
    path = folder / break_it.SEALED_FILE
    document = json.loads(path.read_text())
    document["salt"] = "00" * 16
    path.write_text(json.dumps(document))
    with pytest.raises(ExperimentError, match="not the one that was sealed"):
        open_seal(folder)


@pytest.mark.parametrize("content", ["", "[]", '{"salt": "0", "mapping": "%%%", "hash": ""}'])
def test_an_unreadable_seal_gives_one_line(folder: Path, content: str) -> None:
    """No JSON, no object, no base64."""
    (folder / break_it.SEALED_FILE).write_text(content)
    with pytest.raises(ExperimentError, match=r"sealed\.json"):
        open_seal(folder)


def test_nothing_is_revealed_before_a_diagnosis_is_written(folder: Path) -> None:
    """Neither by reveal nor by score; an empty page is none."""
    for command in (reveal, score):
        with pytest.raises(ExperimentError, match="write your diagnoses first"):
            command(folder)
    (folder / break_it.DIAGNOSES_FILE).write_text("# Notes\n")
    with pytest.raises(ExperimentError, match="no diagnosis found"):
        reveal(folder)


def test_reveal_opens_the_seal(folder: Path) -> None:
    """One line a run."""
    (folder / break_it.DIAGNOSES_FILE).write_text("01: overfitting\n")
    assert reveal(folder) == [f"{run}: {fault}" for run, fault in open_seal(folder).items()]


def test_score_compares_names_and_titles_and_counts_what_is_missing(folder: Path) -> None:
    """A fault's name or title is right however it is spelled; another one, or none, is wrong."""
    first, second, _ = open_seal(folder).values()
    title = {
        "initialisation_too_large": "INITIALISATION too large",
        "warmup_missing": "Missing warmup",
        "causal_mask_absent": "broken causal mask",
    }[first]
    wrong = "overfitting"
    (folder / break_it.DIAGNOSES_FILE).write_text(f"# Mine\n\n01: {title} - it shows\n02: {wrong}\n")
    assert [(s.diagnosis, s.is_right) for s in score(folder)] == [
        (title, True),
        (wrong, False),
        (None, False),
    ]
    page = (folder / break_it.SCORE_FILE).read_text()
    assert "1 of 3 right" in page
    assert f"| 02 | {second} | {wrong} | wrong |" in page


def test_runs_carry_the_intended_configuration_and_no_hint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three runs, the same manifest but for id and time; no fault's name in any file or on any line."""
    monkeypatch.setattr(
        break_it, "open_seal", lambda _: dict(zip(RUN_NAMES, (f for f, _ in DESIGNED_FAULTS), strict=True))
    )
    experiment = load_experiment("19-break-it")
    config = configure(experiment, None, ["total_steps=2", "width=16", "layer_count=1"])
    assert break_it.break_it(experiment, config, tmp_path, overwrite=False) == 0
    manifests = [read_manifest(tmp_path / run) for run in RUN_NAMES]
    assert all(m.config == manifests[0].config and m.mask_type == "causal" for m in manifests)
    assert all(m.run_id.startswith("19-break-it-seed0") for m in manifests)
    printed = "".join(capsys.readouterr())
    files = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    for fault, _ in DESIGNED_FAULTS:
        assert fault not in printed
        assert fault.encode() not in files


def test_commands_refuse_an_experiment_without_hidden_faults(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit 2, and a name that would do."""
    for command in ("seal", "reveal", "score"):
        assert main([command, "19-healthy"]) == 2
        assert "19-break-it" in capsys.readouterr().err


def test_committed_seal_is_whole_and_its_score_is_that_of_the_committed_diagnoses(tmp_path: Path) -> None:
    """Whoever changes the diagnoses afterwards must change the score too."""
    folder = EXPERIMENTS_DIRECTORY / "19-break-it"
    for name in (break_it.SEALED_FILE, break_it.DIAGNOSES_FILE):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    score(tmp_path)
    assert (tmp_path / break_it.SCORE_FILE).read_text() == (folder / break_it.SCORE_FILE).read_text()
