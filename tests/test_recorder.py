"""The recorder on a bare NumPy loop: what is asked to be recorded is in the streams, exactly."""

import json
import math
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from recorded_rows import rows

from recorder import Cadence, EvaluationLosses, Manifest, Recorder, RecorderError
from recorder.kernel import KERNEL_VARIABLE, best_kernel
from recorder.manifest import read_manifest
from recorder.schema import STREAMS
from recorder.segment import Segment
from recorder.statistics import SpectralNorm, combined_hash, content_hash
from recorder.writer import Block, Matrix


def train(run: Path, steps: Iterable[int], cadence: Cadence | None = None, poison: int | None = None) -> None:
    """A loop of two weights with exactly known gradients; a NaN gradient at step ``poison``."""
    weights = {"a.weight": np.ones((2, 3), np.float32), "a.bias": np.zeros(3, np.float32)}
    with Recorder(run, Manifest("test"), cadence=cadence) as recorder:
        recorder.watch(weights)
        for step in steps:
            with recorder.step(step) as record:
                gradients = {name: np.full_like(w, step + 1.0) for name, w in weights.items()}
                if step == poison:
                    gradients["a.bias"][0] = np.nan
                record.add_gradients(gradients)
                for name, weight in weights.items():
                    weight -= 0.5 * gradients[name]
                loss = math.nan if step == poison else 6.0
                record.log(loss_sum=loss, loss_token_count=4, learning_rate=0.5)


def test_each_step_has_one_row_with_what_was_logged(run: Path) -> None:
    """Logged columns come back, the mean loss is derived, what was not logged is null."""
    train(run, range(3))
    steps = rows(run, "steps")
    assert [row["step"] for row in steps] == [0, 1, 2]
    assert steps[1]["train_loss"] == 1.5 and steps[1]["learning_rate"] == 0.5
    assert steps[1]["clipped_gradient_norm"] is None
    assert 0 < steps[1]["recorder_seconds"] <= steps[1]["step_seconds"]


def gradient_norms(run: Path, gradients: list[dict[str, Any]], **logged: float) -> list[float | None]:
    """What a recorder of two weights logs as the norm of each step's gradients."""
    weights = {"a": np.ones((2, 3), np.float32), "b": np.ones(4, np.float32)}
    with Recorder(run, quiet=True) as recorder:
        recorder.watch(weights)
        for step, given in enumerate(gradients):
            with recorder.step(step) as record:
                record.add_gradients({name: np.array(array, np.float32) for name, array in given.items()})
                record.log(**logged)
    return [row["gradient_norm"] for row in rows(run, "steps")]


def test_the_gradient_norm_is_that_of_all_gradients_unless_it_is_logged(tmp_path: Path) -> None:
    """3, 4 and 12 make 13, exactly; what the loop says itself is not overwritten."""
    given = {"a": [[3, 0, 0], [0, 4, 0]], "b": [0, 0, 12, 0]}
    assert gradient_norms(tmp_path / "derived", [given]) == [13.0]
    assert gradient_norms(tmp_path / "logged", [given], gradient_norm=1.0) == [1.0]


def test_the_gradient_norm_is_null_where_a_gradient_is_missing_and_not_finite_where_one_is_not(
    tmp_path: Path,
) -> None:
    """A norm of some would pass for the norm of all; NaN and infinity stay different."""
    whole, a = np.ones((2, 3)), np.ones(4)
    found = gradient_norms(
        tmp_path / "run",
        [
            {"a": whole},
            {"a": whole, "misspelt": a},
            {"a": whole, "b": a * np.nan},
            {"a": whole * -np.inf, "b": a},
            {"a": whole, "b": a},
        ],
    )
    assert found[:2] == [None, None]
    assert found[2] is not None and math.isnan(found[2])
    # ten ones: float32 sums of squares are exact, the square root rounds once
    assert found[3:] == [math.inf, pytest.approx(math.sqrt(10), rel=1e-15)]


def test_the_cosine_with_the_gradient_before_is_null_where_there_is_none(run: Path) -> None:
    """Not measured is not NaN: step 0 has no gradient before it, nor has a step after a gap."""
    train(run, (0, 1, 2, 4, 5))
    cosines = [row["gradient_cosine_previous"] for row in rows(run, "steps")]
    assert cosines[0] is None and cosines[3] is None
    # Every gradient is a multiple of the first; float32 squares, products and 9 sums round.
    assert [cosines[step] for step in (1, 2, 4)] == pytest.approx([1, 1, 1], abs=16 * 1.2e-7)


def test_the_recorders_own_time_counts_what_a_row_cost_after_it_was_made(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row can not tell how long its own append took; the next one does."""
    append = Segment.append

    def slow_append(segment: Segment, blocks: Iterable[Block], flush: bool = False) -> bool:
        time.sleep(0.0 if flush else 0.02)
        return append(segment, blocks, flush)

    monkeypatch.setattr(Segment, "append", slow_append)
    train(run, range(2))
    first, second = (row["recorder_seconds"] for row in rows(run, "steps"))
    assert first < 0.02 <= second <= rows(run, "steps")[1]["step_seconds"]


def test_weights_without_any_gradient_are_told_from_the_first_step_on(run: Path) -> None:
    """Nothing arrived is a row for each weight, also for one that is watched later."""
    weight = np.ones((2, 2), np.float32)
    with Recorder(run, cadence=Cadence(weights=0, updates=0, spectral_norms=0, hashes=0)) as recorder:
        recorder.watch({"a": weight})
        with recorder.step(0):
            pass
        recorder.watch({"b": weight})
        with recorder.step(1):
            pass
    found = [(row["step"], row["tensor_id"], row["has_gradient"]) for row in rows(run, "tensors")]
    assert found == [(0, 0, False), (1, 0, False), (1, 1, False)]


def test_a_name_that_is_watched_again_keeps_its_id(run: Path) -> None:
    """A loop that loads other weights under the same names: no two tensors share an id."""
    weights = {value: np.full((2, 2), value, np.float32) for value in (1, 2, 3, 4)}
    with Recorder(run, cadence=Cadence(gradients=0, updates=0, weights=1)) as recorder:
        recorder.watch({"a": weights[1], "b": weights[2]})
        with recorder.step(0):
            pass
        recorder.watch({"a": weights[4]})
        recorder.watch({"c": weights[3]})
        with recorder.step(1):
            pass
        recorder.watch({"b": np.full(3, 5, np.float32)})  # another shape: another tensor
        with recorder.step(2):
            pass
    names = [(row["tensor_id"], row["name"], row["shape"]) for row in rows(run, "tensor_names")]
    assert names == [(0, "a", "[2, 2]"), (1, "b", "[2, 2]"), (2, "c", "[2, 2]"), (3, "b", "[3]")]
    found = [(row["step"], row["tensor_id"], row["mean"]) for row in rows(run, "tensors")]
    assert found == [(0, 0, 1), (0, 1, 2), (1, 0, 4), (1, 1, 2), (1, 2, 3), (2, 0, 4), (2, 2, 3), (2, 3, 5)]


def test_a_matrix_and_columns_of_a_stream_make_one_table(run: Path) -> None:
    """Blocks with a matrix, without one and with nulls keep their rows and their order."""
    names = ("element_count", "max", "zero_fraction")
    values = np.arange(9, dtype=np.float64).reshape(3, 3)
    with Recorder(run) as recorder:
        ids = {"kind": "weight", "tensor_id": np.arange(3)}
        recorder._segment.append(
            [
                Block("tensors", 3, {"step": 0, **ids}, Matrix(names, values)),
                Block("tensors", 2, {"step": 1, "kind": "gradient", "has_gradient": False}),
                Block("tensors", 3, {"step": 2, **ids, "l2_norm": 2.5}, Matrix(names, 2 * values)),
            ]
        )
    table = rows(run, "tensors")
    assert [row["step"] for row in table] == [0] * 3 + [1] * 2 + [2] * 3
    assert [row["element_count"] for row in table] == [0, 3, 6, None, None, 0, 6, 12]
    assert [row["max"] for row in table] == [1, 4, 7, None, None, 2, 8, 14]
    assert [row["l2_norm"] for row in table] == [None] * 5 + [2.5] * 3
    assert [row["tensor_id"] for row in table] == [0, 1, 2, None, None, 0, 1, 2]


def test_a_stream_refuses_columns_that_it_does_not_have(run: Path) -> None:
    """A misspelt column is an error at once, never a value that is silently dropped."""
    with Recorder(run) as recorder:
        for block in (
            Block("tensors", 1, {"stepp": 0}),
            Block("tensors", 1, {"step": 0}, Matrix(("meann",), np.zeros((1, 1)))),
        ):
            with pytest.raises(KeyError, match=r"stepp|meann"):
                recorder._segment.append([block])


def test_weights_are_those_before_the_update_and_update_is_the_difference(run: Path) -> None:
    """Row ``step = s`` holds w_s; its update is w_(s+1) - w_s."""
    train(run, range(2), Cadence(weights=1, updates=1))
    tensors = {(row["step"], row["kind"], row["tensor_id"]): row for row in rows(run, "tensors")}
    assert tensors[0, "weight", 0]["mean"] == 1.0
    assert tensors[0, "update", 0]["mean"] == -0.5  # gradient 1 times learning rate .5
    assert tensors[1, "weight", 0]["mean"] == 0.5
    assert tensors[1, "update", 0]["mean"] == -1.0
    assert tensors[1, "gradient", 1]["has_gradient"] is True


def test_an_update_is_never_the_difference_to_another_step(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the weights before it could not be taken, there is no update to tell of."""
    weight = np.zeros((2, 2), np.float32)
    estimate = SpectralNorm.estimate

    def fail_once(self: SpectralNorm, matrix: np.ndarray) -> float:
        if weight[0, 0] == 1:
            raise np.linalg.LinAlgError("did not converge")
        return estimate(self, matrix)

    monkeypatch.setattr(SpectralNorm, "estimate", fail_once)
    with Recorder(run, cadence=Cadence(gradients=0, updates=1, spectral_norms=1), quiet=True) as recorder:
        recorder.watch({"w": weight})
        for step in range(3):
            with recorder.step(step):
                weight += 1
    updates = [(row["step"], row["mean"]) for row in rows(run, "tensors") if row["kind"] == "update"]
    assert updates == [(0, 1.0), (2, 1.0)]


def test_a_gradient_that_never_arrived_is_not_a_zero(run: Path) -> None:
    """has_gradient is false and every statistic is null."""
    with Recorder(run) as recorder:
        recorder.watch({"used": np.ones(2, np.float32), "unused": np.ones(2, np.float32)})
        with recorder.step(0) as record:
            record.add_gradients({"used": np.zeros(2, np.float32)})
    gradients = {row["tensor_id"]: row for row in rows(run, "tensors") if row["kind"] == "gradient"}
    assert gradients[0]["has_gradient"] is True and gradients[0]["l2_norm"] == 0.0
    assert gradients[1]["has_gradient"] is False and gradients[1]["l2_norm"] is None


def test_a_nan_between_two_cadences_is_recorded_in_full(run: Path) -> None:
    """The loss tells, so the step's gradients are kept although they were not due, and it never raises."""
    train(run, range(8), Cadence(gradients=100, weights=100, updates=0), poison=5)
    gradients = [row for row in rows(run, "tensors") if row["kind"] == "gradient"]
    assert sorted({row["step"] for row in gradients}) == [0, 5]
    assert [row["all_finite"] for row in gradients if row["step"] == 5] == [True, False]
    poisoned = [
        (row["step"], row["kind"], row["tensor_id"], row["nan_count"]) for row in rows(run, "nonfinite")
    ]
    assert poisoned == [
        (5, "gradient", 1, 1),
        (6, "weight", 1, 1),
        (7, "weight", 1, 1),
    ]  # the update carried it
    assert math.isnan(rows(run, "steps")[5]["train_loss"])


def test_hashes_follow_the_weights(run: Path) -> None:
    """Equal weights give equal hashes; the step's hash is the hash of the tensors' hashes."""
    weight = np.arange(4, dtype=np.float32)
    with Recorder(run, cadence=Cadence(hashes=1)) as recorder:
        recorder.watch({"w": weight})
        for step in range(3):
            with recorder.step(step):
                weight += step == 1
    first, second, third = (row["weights_hash"] for row in rows(run, "steps"))
    assert first == second == combined_hash([content_hash(np.arange(4, dtype=np.float32))])
    assert third != first


def test_every_bit_of_a_hash_is_kept(run: Path) -> None:
    """Rows without a hash in the same batch are nulls, they do not make its column one of floats."""
    weight = np.arange(4, dtype=np.float32)
    with Recorder(run, cadence=Cadence(hashes=2, spectral_norms=1)) as recorder:
        recorder.watch({"w": weight.reshape(2, 2)})
        for step in range(2):
            with recorder.step(step):
                pass
    (found,) = (row["content_hash"] for row in rows(run, "weights") if row["content_hash"] is not None)
    assert found == content_hash(weight.reshape(2, 2)) > 1 << 53


def test_an_evaluation_is_recorded_by_split_and_by_example(run: Path) -> None:
    """Sums are over the examples; a second evaluation of the same step is a repeat."""
    losses = EvaluationLosses(
        np.array([7, 8]), np.array([1.5, 2.5]), np.array([3, 4]), np.array([0.5, 0.25]), np.array([1, 2]),
        np.array([True, False]),
    )  # fmt: skip
    with Recorder(run) as recorder:
        recorder.log_evaluation(0, "validation", losses)
        recorder.log_evaluation(0, "validation", losses, evaluation_mode=False)
    first, second = rows(run, "evaluations")
    assert (first["loss_sum"], first["token_count"], first["answer_loss_sum"]) == (4.0, 7, 0.75)
    assert (first["repeat"], second["repeat"], second["evaluation_mode"]) == (0, 1, False)
    assert [row["example_id"] for row in rows(run, "example_losses")] == [7, 8]


def test_labels_are_the_users_own_columns(run: Path) -> None:
    """Any text column of the examples is kept beside the contract's."""
    with Recorder(run) as recorder:
        recorder.log_examples(
            {"example_id": [0, 1], "split": ["a", "a"], "content_hash": [1, 2], "colour": ["red", "blue"]}
        )
    assert [row["colour"] for row in rows(run, "examples")] == ["red", "blue"]


def test_a_second_recorder_gets_its_own_segment(run: Path) -> None:
    """Nothing is appended to, and the manifest stays what it was."""
    train(run, range(2))
    manifest = read_manifest(run)
    train(run, range(1, 3))
    assert [row["step"] for row in rows(run, "steps", segment=0)] == [0, 1]
    assert [row["step"] for row in rows(run, "steps", segment=1)] == [1, 2]
    assert read_manifest(run) == manifest


def test_two_open_recorders_never_share_a_file(run: Path) -> None:
    """Two writers on one directory at the same time get two segments."""
    with Recorder(run) as first, Recorder(run) as second:
        assert (first.segment, second.segment) == (0, 1)


def test_an_exception_closes_the_run_and_is_told(run: Path) -> None:
    """The failing step's row is there, and so is the reason."""
    with pytest.raises(ZeroDivisionError), Recorder(run) as recorder, recorder.step(3) as record:
        record.log(learning_rate=0.1)
        1 / 0  # noqa: B018 -- the point of the test
    assert [row["step"] for row in rows(run, "steps")] == [3]
    last = rows(run, "events")[-1]
    assert (last["kind"], last["message"], last["step"]) == (
        "exception",
        "ZeroDivisionError: division by zero",
        3,
    )


def test_a_finished_run_says_so(run: Path) -> None:
    """First event: the segment and its process; last event: finished."""
    train(run, range(1))
    events = rows(run, "events")
    assert [event["kind"] for event in events] == ["segment_started", "finished"]
    assert json.loads(events[0]["payload"])["environment"]["pid"] > 0


def test_unknown_columns_are_refused_with_the_choice(run: Path) -> None:
    """A typing error in a column name must not vanish in the log."""
    with (
        Recorder(run) as recorder,
        recorder.step(0) as record,
        pytest.raises(RecorderError, match="learning_rte"),
    ):
        record.log(learning_rte=0.1)


def test_steps_do_not_nest(run: Path) -> None:
    """A step inside a step is a mistake in the loop, told at once."""
    with (
        Recorder(run) as recorder,
        recorder.step(0),
        pytest.raises(RecorderError, match="do not nest"),
        recorder.step(1),
    ):
        pass


def test_a_directory_that_can_not_be_made_is_one_clear_error(tmp_path: Path) -> None:
    """A file is in the way."""
    (tmp_path / "file").write_text("")
    with pytest.raises(RecorderError, match="can not record here"):
        Recorder(tmp_path / "file" / "run")


def test_training_goes_on_when_the_log_can_not_be_written(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A full disk costs rows, is told once and summed up at the end; the loop never notices."""
    with Recorder(run, quiet=True) as recorder:
        with recorder.step(0) as record:
            record.log(learning_rate=0.1)
        stream = recorder._segment._streams["steps"]
        recorder._segment.write("steps")
        stream.error = OSError(28, "No space left on device")
        for step in (1, 2):
            with recorder.step(step) as record:
                record.log(learning_rate=0.1)
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 2
    assert "No space left on device" in told[0] and "training goes on" in told[0]
    assert told[1].endswith("rows lost: 2 of steps")


def test_every_stream_of_the_contract_can_be_written(run: Path) -> None:
    """The writer knows every type that the contract uses."""
    with Recorder(run) as recorder:
        for stream in STREAMS:
            if stream.name not in ("events", "examples"):
                recorder._segment.append([Block(stream.name, 1, {})])
    assert {path.name.split("-")[0] for path in (run / "log").iterdir()} >= {
        stream.name for stream in STREAMS if stream.name != "examples"
    }


def test_cadence_zero_is_never(run: Path) -> None:
    """A signal with cadence 0 leaves no row."""
    train(run, range(3), Cadence(gradients=0, weights=0, updates=0, spectral_norms=0, hashes=0))
    assert not (run / "log" / "tensors-r0-s0.arrows").exists()


def test_a_loop_that_raises_on_nan_is_not_broken_by_the_recorder(run: Path) -> None:
    """NumPy's error state belongs to the training; the recorder's arithmetic must not trip over it."""
    weight = np.full((2, 2), 1e30, np.float32)
    with np.errstate(all="raise"), Recorder(run) as recorder:
        recorder.watch({"w": weight})
        for step in range(2):
            with recorder.step(step) as record:
                record.add_gradients({"w": np.array([[np.nan, np.inf], [1e-30, 1e30]], np.float32)})
                record.log(gradient_norm=math.nan)
    assert [row["nan_count"] for row in rows(run, "nonfinite") if row["kind"] == "gradient"] == [1, 1]


def test_micro_batches_are_numbered_within_their_step(run: Path) -> None:
    """An accumulated step keeps the loss and gradient norm of each of its parts."""
    with Recorder(run) as recorder, recorder.step(4) as record:
        for loss in (1.0, 3.0):
            record.log_micro_batch(loss_sum=loss, loss_token_count=2, gradient_norm=0.5)
        record.log(loss_sum=4.0, loss_token_count=4, accumulation_count=2)
    micro_batches = [(row["step"], row["micro"], row["loss_sum"]) for row in rows(run, "micro_batches")]
    assert micro_batches == [(4, 0, 1.0), (4, 1, 3.0)]


def test_an_evaluation_of_other_weights_says_so(run: Path) -> None:
    """The hash of evaluated weights is the caller's, when the watched weights are not what was evaluated."""
    one = np.array([1])
    losses = EvaluationLosses(one, one / 2, one, one / 4, one, one > 0)
    with Recorder(run) as recorder:
        recorder.watch({"w": np.ones(2, np.float32)})
        recorder.log_evaluation(0, "validation", losses)
        recorder.log_evaluation(1, "validation", losses, weights_hash=7)
    live, other = (row["weights_hash"] for row in rows(run, "evaluations"))
    assert (live, other) == (combined_hash([content_hash(np.ones(2, np.float32))]), 7)


def test_flush_hands_out_waiting_rows(run: Path) -> None:
    """After a flush a reader sees every row that was recorded before."""
    with Recorder(run) as recorder:
        with recorder.step(0) as record:
            record.log(learning_rate=0.1)
        recorder.flush()
        batch = pa.ipc.open_stream((run / "log" / "steps-r0-s0.arrows").read_bytes()).read_next_batch()
    assert batch["step"].to_pylist() == [0]


@pytest.mark.parametrize("kernel", ["compiled", "numpy"])
def test_strided_arrays_are_recorded_like_their_copies(
    run: Path, monkeypatch: pytest.MonkeyPatch, kernel: str
) -> None:
    """A transposed weight and a transposed gradient, as a NumPy loop makes them: every row is there."""
    if kernel == "compiled" and best_kernel().name != "compiled":
        pytest.skip("no compiled kernel")
    monkeypatch.setenv(KERNEL_VARIABLE, kernel)
    recorded, hashes = {}, {}
    for name, order in (("copy", "C"), ("transposed", "F")):
        weight = np.arange(6, dtype=np.float32).reshape(2, 3).copy(order=order)
        with Recorder(run / name, on_error="raise", quiet=True) as recorder:
            recorder.watch({"w": weight})
            for step in range(2):
                with recorder.step(step) as record:
                    record.add_gradients({"w": (weight + 1).copy(order=order)})
                    weight -= 0.5
        recorded[name] = [
            (row["step"], row["kind"], row["l2_norm"], row["max"]) for row in rows(run / name, "tensors")
        ]
        hashes[name] = [(row["step"], row["content_hash"]) for row in rows(run / name, "weights")]
    assert hashes["transposed"] == hashes["copy"] != []
    assert [row[1] for row in recorded["copy"]] == ["weight", "gradient", "update", "gradient"]
    assert [row[:2] + row[3:] for row in recorded["transposed"]] == [
        row[:2] + row[3:] for row in recorded["copy"]
    ]
    # six float32 squares, summed in another order
    norms = [[row[2] for row in of_run] for of_run in recorded.values()]
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)
