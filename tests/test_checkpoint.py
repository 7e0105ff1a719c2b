"""Checkpoints: what is stored, what is refused, and that a crash at any point costs only the newest one."""

import dataclasses
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from experiments import checkpoint as checkpoints
from experiments.batches import PackedExamples
from experiments.checkpoint import (
    MANIFEST_FILE,
    checkpoint_path,
    checkpoint_steps,
    load_checkpoint,
    newest_checkpoint,
    remove_old_checkpoints,
    save_checkpoint,
)
from experiments.checkpoint_parts import OPTIMIZER_FILE, PARTS, STATE_FILE, WEIGHTS_FILE, CheckpointError
from experiments.corpus import Corpus, load_corpus
from experiments.training import (
    HEALTHY,
    MACHINES,
    RESUMABLE_SETTINGS,
    TrainingConfig,
    TrainingState,
    training_step,
)

SMALL = TrainingConfig(total_steps=6, warmup_steps=2, batch_size=8, width=16, layer_count=1)
HASH = SMALL.resumable_hash()


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return load_corpus()


@pytest.fixture(scope="module")
def trained(corpus: Corpus) -> TrainingState:
    """A state after three steps, not to be changed."""
    return trained_state(corpus, 3)


def trained_state(corpus: Corpus, step_count: int, config: TrainingConfig = SMALL) -> TrainingState:
    """The state after ``step_count`` healthy steps."""
    run = TrainingState(config, corpus)
    train_on(run, corpus, step_count)
    return run


def train_on(run: TrainingState, corpus: Corpus, step_count: int) -> list[float]:
    """Objectives of ``step_count`` more steps."""
    examples = PackedExamples(corpus.split("train"))
    return [training_step(run, examples, SMALL.clip_norm, HEALTHY).objective for _ in range(step_count)]


def rewrite(directory: Path, part: str, change: Callable[[bytes], bytes]) -> None:
    """Change one part and the manifest's hash of it: a consistent checkpoint with other content."""
    content = change((directory / part).read_bytes())
    (directory / part).write_bytes(content)
    path = directory / MANIFEST_FILE
    manifest = json.loads(path.read_text())
    manifest["parts"][part] = checkpoints._digest(content)
    path.write_text(json.dumps(checkpoints._sealed(manifest)))


def with_tensors(change: Callable[[dict[str, Any]], Any]) -> Callable[[bytes], bytes]:
    """The same safetensors content with its tensors changed in place."""

    def rewritten(content: bytes) -> bytes:
        tensors = dict(safetensors.numpy.load(content))
        change(tensors)
        return safetensors.numpy.save(tensors)

    return rewritten


def test_restored_state_continues_bit_for_bit_across_an_epoch(corpus: Corpus, tmp_path: Path) -> None:
    """52 steps, a checkpoint, and 10 more, of which the third begins the second epoch (54 steps of 8)."""
    straight = trained_state(corpus, 52)
    directory = save_checkpoint(tmp_path, 52, straight, HASH)
    expected = train_on(straight, corpus, 10)
    resumed = TrainingState(SMALL, corpus)
    resumed.load_state(load_checkpoint(directory, resumed, HASH).state)
    assert train_on(resumed, corpus, 10) == expected
    assert resumed.data.epoch == 1
    assert resumed.hashes() == straight.hashes()


@pytest.mark.parametrize(
    "setting", [{"norm_placement": "post"}, {"frozen_modules": "blocks.0"}, {"schedule": "constant"}]
)
def test_other_configurations_continue_bit_for_bit_too(
    corpus: Corpus, tmp_path: Path, setting: dict[str, str]
) -> None:
    """Without a final norm, with weights that have no moments, and on a constant plan."""
    config = dataclasses.replace(SMALL, **setting)
    straight = trained_state(corpus, 4, config)
    directory = save_checkpoint(tmp_path, 4, straight, config.resumable_hash())
    expected = train_on(straight, corpus, 3)
    resumed = TrainingState(dataclasses.replace(config, seed=9), corpus)
    resumed.load_state(load_checkpoint(directory, resumed, config.resumable_hash()).state)
    assert train_on(resumed, corpus, 3) == expected
    assert resumed.hashes() == straight.hashes()


def test_setting_that_a_later_version_adds_leaves_checkpoints_usable() -> None:
    """At its default it is not hashed; any other value makes another configuration."""

    @dataclasses.dataclass(frozen=True)
    class LaterConfig(TrainingConfig):
        added: str = "as before"

    settings = {"width": 16, "dropout": 0.1}
    assert LaterConfig(**settings).resumable_hash() == TrainingConfig(**settings).resumable_hash()
    assert (
        LaterConfig(added="new", **settings).resumable_hash() != TrainingConfig(**settings).resumable_hash()
    )


def test_hash_of_the_configuration_changes_with_all_but_the_resumable_settings() -> None:
    """Each setting in turn; interval and length are what a resume may change."""
    for field in dataclasses.fields(TrainingConfig):
        value = field.default + "x" if isinstance(field.default, str) else field.default + 1
        changed = dataclasses.replace(SMALL, **{field.name: value})
        assert (changed.resumable_hash() == HASH) == (field.name in RESUMABLE_SETTINGS), field.name


@pytest.mark.parametrize("machine", MACHINES)
def test_each_machine_that_is_not_restored_is_noticed(corpus: Corpus, tmp_path: Path, machine: str) -> None:
    """Five more steps give other losses when one state machine starts afresh."""
    straight = trained_state(corpus, 30)
    directory = save_checkpoint(tmp_path, 30, straight, HASH)
    resumed = TrainingState(SMALL, corpus)
    state = load_checkpoint(directory, resumed, HASH).state
    resumed.load_state(state, tuple(name for name in MACHINES if name != machine))
    assert train_on(resumed, corpus, 5) != train_on(straight, corpus, 5)


def test_all_state_comes_back_from_the_files(trained: TrainingState, corpus: Corpus, tmp_path: Path) -> None:
    """Weights, moments, counters, order and both generators; another seed's template does not matter."""
    directory = save_checkpoint(tmp_path, 3, trained, HASH)
    other = TrainingState(dataclasses.replace(SMALL, seed=9), corpus)
    loaded = load_checkpoint(directory, other, HASH)
    other.load_state(loaded.state)
    assert other.hashes() == trained.hashes()
    assert other.schedule.state() == trained.schedule.state()
    assert other.data.generator.bit_generator.state == trained.data.generator.bit_generator.state
    assert np.array_equal(other.data.order, trained.data.order)
    assert loaded.facts()["weights_hash"] == str(trained.model.content_hash())


def test_tied_weight_is_stored_once_and_its_alias_noted(trained: TrainingState, tmp_path: Path) -> None:
    """The head's weight is the token embedding."""
    directory = save_checkpoint(tmp_path, 3, trained, HASH)
    tensors = safetensors.numpy.load((directory / WEIGHTS_FILE).read_bytes())
    assert "embedding.token" in tensors
    assert not any(name.startswith("head") for name in tensors)
    assert json.loads((directory / MANIFEST_FILE).read_text())["tied"] == {"head.weight": "embedding.token"}


def test_state_is_json_without_numbers_beyond_a_double(trained: TrainingState, tmp_path: Path) -> None:
    """Whole numbers are decimal strings, so that any JSON reader keeps all bits of a generator."""
    directory = save_checkpoint(tmp_path, 3, trained, HASH)
    state = json.loads((directory / STATE_FILE).read_text())
    assert int(state["data"]["generator"]["state"]["inc"]) > 2**64
    assert state["schedule"]["step"] == "3"


@pytest.mark.parametrize("name", ["model.pkl", "model.pt", "weights.npz", "notes.txt"])
def test_any_other_file_is_refused(trained: TrainingState, tmp_path: Path, name: str) -> None:
    """Nothing but safetensors and JSON is loaded, and a stray file is named."""
    directory = save_checkpoint(tmp_path, 3, trained, HASH)
    (directory / name).write_bytes(b"")
    with pytest.raises(CheckpointError, match=rf"{name}: not part of a checkpoint.*remove it"):
        load_checkpoint(directory, trained, HASH)


def test_a_missing_part_is_named(trained: TrainingState, tmp_path: Path) -> None:
    """Each of the four files is needed."""
    directory = save_checkpoint(tmp_path, 3, trained, HASH)
    (directory / OPTIMIZER_FILE).unlink()
    with pytest.raises(CheckpointError, match=rf"{OPTIMIZER_FILE}: missing"):
        load_checkpoint(directory, trained, HASH)


def test_any_damage_is_one_clear_error(trained: TrainingState, tmp_path: Path) -> None:
    """200 times a byte of a file is changed, or the file cut there: always refused, always in one line."""
    generator = np.random.default_rng(6)
    directory = save_checkpoint(tmp_path, 3, trained, HASH)
    whole = {path: path.read_bytes() for path in sorted(directory.iterdir())}
    for index in range(200):
        path = list(whole)[index % 4]
        content = bytearray(whole[path])
        place = int(generator.integers(len(content)))
        if index % 3:
            content[place] ^= int(generator.integers(1, 256))
        else:
            del content[place:]
        path.write_bytes(content)
        with pytest.raises(CheckpointError):
            load_checkpoint(directory, trained, HASH)
        path.write_bytes(whole[path])
    assert load_checkpoint(directory, trained, HASH).step == 3


def test_an_unwritable_checkpoint_gives_one_line(trained: TrainingState, tmp_path: Path) -> None:
    """A file in the way, named, and what to do."""
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(CheckpointError, match=r"step-00000003: can not write: .*continue with --resume"):
        save_checkpoint(tmp_path, 3, trained, HASH)


def test_a_missing_checkpoint_gives_one_line(trained: TrainingState, tmp_path: Path) -> None:
    """A directory that is not there."""
    with pytest.raises(CheckpointError, match="no such checkpoint"):
        load_checkpoint(tmp_path / "step-00000001", trained, HASH)


@pytest.mark.parametrize("part", PARTS)
def test_a_changed_byte_is_noticed(trained: TrainingState, tmp_path: Path, part: str) -> None:
    """One flipped bit in the middle of a part."""
    directory = save_checkpoint(tmp_path, 3, trained, HASH)
    content = bytearray((directory / part).read_bytes())
    content[len(content) // 2] ^= 1
    (directory / part).write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"{part}: damaged"):
        load_checkpoint(directory, trained, HASH)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("final_norm.gain"), "tensor final_norm.gain is missing"),
        (lambda t: t.update(extra=np.zeros(1)), "tensor extra is not expected"),
        (
            lambda t: t.update({"final_norm.gain": np.zeros(15, np.float32)}),
            r"final_norm.gain is float32 \(15,\), expected float32 \(16,\)",
        ),
        (
            lambda t: t.update({"final_norm.gain": np.zeros(16)}),
            r"final_norm.gain is float64 \(16,\), expected float32 \(16,\)",
        ),
    ],
)
def test_wrong_tensors_are_refused_by_name(
    trained: TrainingState, tmp_path: Path, change: Callable[[dict[str, Any]], Any], message: str
) -> None:
    """Missing, extra, of another shape, of another type."""
    directory = save_checkpoint(tmp_path, 3, trained, HASH)
    rewrite(directory, WEIGHTS_FILE, with_tensors(change))
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(directory, trained, HASH)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b'"step": "3"', b'"steps": "3"', "schedule: value step is missing"),
        (b'"step": "3"', b'"step": "three"', "schedule: step: 'three' does not fit a whole number"),
        (b'"SFC64"', b'"PCG64"', "bit_generator: 'PCG64', expected 'SFC64'"),
        (b'"order": "', b'"order": "7 ', "order: .* does not fit 432 numbers"),
        (b"{", b"[", "no JSON"),
    ],
)
def test_wrong_state_is_refused_by_name(
    trained: TrainingState, tmp_path: Path, old: bytes, new: bytes, message: str
) -> None:
    """A missing value, a wrong type, another generator, another number of examples, no JSON."""
    directory = save_checkpoint(tmp_path, 3, trained, HASH)
    rewrite(directory, STATE_FILE, lambda content: content.replace(old, new, 1))
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(directory, trained, HASH)


def test_a_pickle_under_a_part_s_name_is_refused(trained: TrainingState, tmp_path: Path) -> None:
    """Even with the right hash in the manifest, nothing is unpickled."""
    directory = save_checkpoint(tmp_path, 3, trained, HASH)
    rewrite(directory, WEIGHTS_FILE, lambda _: b"\x80\x04cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(CheckpointError, match="no safetensors file"):
        load_checkpoint(directory, trained, HASH)


def test_a_newer_version_is_refused(trained: TrainingState, tmp_path: Path) -> None:
    """One line that says which versions are read."""
    directory = save_checkpoint(tmp_path, 3, trained, HASH)
    path = directory / MANIFEST_FILE
    path.write_text(path.read_text().replace('"schema_version": 1', '"schema_version": 2'))
    with pytest.raises(CheckpointError, match="version 2; this program reads 1-1: upgrade it"):
        load_checkpoint(directory, trained, HASH)


def test_a_checkpoint_of_another_configuration_is_refused(trained: TrainingState, tmp_path: Path) -> None:
    """Every setting but the resumable ones is in the hash."""
    directory = save_checkpoint(tmp_path, 3, trained, HASH)
    longer = dataclasses.replace(SMALL, total_steps=9, evaluation_interval=1, checkpoint_interval=1)
    assert load_checkpoint(directory, trained, longer.resumable_hash()).step == 3
    other = dataclasses.replace(SMALL, dropout=0.1).resumable_hash()
    with pytest.raises(CheckpointError, match="of a run with another configuration"):
        load_checkpoint(directory, trained, other)


def test_a_renamed_directory_is_refused(trained: TrainingState, tmp_path: Path) -> None:
    """The manifest's step must be the directory's."""
    save_checkpoint(tmp_path, 3, trained, HASH).rename(checkpoint_path(tmp_path, 4))
    with pytest.raises(CheckpointError, match="of step 3"):
        load_checkpoint(checkpoint_path(tmp_path, 4), trained, HASH)


def test_newest_whole_checkpoint_is_used(trained: TrainingState, tmp_path: Path) -> None:
    """A damaged one is skipped and named; without any whole one the first reason is raised."""
    for step in (3, 4):
        save_checkpoint(tmp_path, step, trained, HASH)
    (checkpoint_path(tmp_path, 4) / STATE_FILE).write_text("{}")
    found, refusals = newest_checkpoint(tmp_path, [3, 4], trained, HASH)
    assert found.step == 3
    assert len(refusals) == 1 and "damaged" in refusals[0]
    shutil.rmtree(checkpoint_path(tmp_path, 3))
    with pytest.raises(CheckpointError, match="damaged"):
        newest_checkpoint(tmp_path, [4], trained, HASH)
    with pytest.raises(CheckpointError, match="no checkpoint to resume from"):
        newest_checkpoint(tmp_path, [], trained, HASH)


def test_the_newest_two_are_kept(trained: TrainingState, tmp_path: Path) -> None:
    """Older ones go."""
    for step in (1, 2, 3, 10):
        save_checkpoint(tmp_path, step, trained, HASH)
    remove_old_checkpoints(tmp_path)
    assert checkpoint_steps(tmp_path) == [3, 10]


@pytest.mark.parametrize("call", ["fsync", "rename"])
def test_a_crash_at_any_call_leaves_the_previous_checkpoint(
    trained: TrainingState, tmp_path: Path, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The write fails at its first, second, ... call to the disk; what is published is always whole."""
    save_checkpoint(tmp_path, 3, trained, HASH)
    owner = checkpoints.os if call == "fsync" else Path
    real = getattr(owner, call)
    crash_count = 0
    for allowed in range(10):
        remaining = [allowed]

        def crashing(*arguments: Any, remaining: list[int] = remaining) -> Any:
            if remaining[0] == 0:
                raise KeyboardInterrupt
            remaining[0] -= 1
            return real(*arguments)

        monkeypatch.setattr(owner, call, crashing)
        try:
            save_checkpoint(tmp_path, 4, trained, HASH)
        except KeyboardInterrupt:
            crash_count += 1
        monkeypatch.undo()
        steps = checkpoint_steps(tmp_path)
        assert steps[0] == 3
        assert [load_checkpoint(checkpoint_path(tmp_path, s), trained, HASH).step for s in steps] == steps
        shutil.rmtree(checkpoint_path(tmp_path, 4), ignore_errors=True)
    assert crash_count == {"fsync": 6, "rename": 1}[call]  # four files and two directories; one rename


def test_sigkill_while_writing_leaves_whole_checkpoints(corpus: Corpus, tmp_path: Path) -> None:
    """A process that writes one checkpoint after another is killed at five moments."""
    program = (
        "import sys; from pathlib import Path; from itertools import count\n"
        "from experiments.checkpoint import save_checkpoint, remove_old_checkpoints\n"
        "from experiments.corpus import load_corpus\n"
        "from experiments.training import TrainingConfig, TrainingState\n"
        f"config = {SMALL!r}\n"
        "run = TrainingState(config, load_corpus())\n"
        "for step in count(1):\n"
        "    save_checkpoint(Path(sys.argv[1]), step, run, config.resumable_hash())\n"
        "    remove_old_checkpoints(Path(sys.argv[1]))\n"
    )
    template = TrainingState(SMALL, corpus)
    for index, delay in enumerate((0.0, 0.003, 0.007, 0.011, 0.02)):
        directory = tmp_path / str(index)
        process = subprocess.Popen([sys.executable, "-c", program, str(directory)])
        while len(checkpoint_steps(directory)) < 2 and process.poll() is None:
            time.sleep(0.001)
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=60)
        steps = checkpoint_steps(directory)
        found, refusals = newest_checkpoint(directory, steps, template, HASH)
        assert (found.step, refusals) == (steps[-1], [])
