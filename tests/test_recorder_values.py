"""What the recorder is given and can not take: a value of another kind, a hook that raises."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hand_driven_model import HandDrivenModel
from recorded_rows import record_steps, rows

from analyzer.run_log import open_runs
from recorder import EvaluationLosses, Manifest, Recorder, RecorderError
from recorder.manifest import read_manifest
from recorder.writer import Block


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("learning_rate", "fast"),
        ("loss_sum", [1.0, 2.0]),
        ("loss_sum", np.ones(2)),
        ("epoch", 1.5),
        ("epoch", float("nan")),
        ("training_mode", 2),
        ("batch_hash", 2.0**60),
    ],
)
def test_a_value_of_another_kind_is_told_where_it_is_logged(run: Path, column: str, value: Any) -> None:
    """The call that gave it fails; the rows around it, and of the same step, are there."""
    with Recorder(run, quiet=True) as recorder:
        for step in range(3):
            with recorder.step(step) as record:
                record.log(loss_sum=1.0, loss_token_count=1)
                if step == 1:
                    with pytest.raises(RecorderError, match=f"step 1: {column}=.*expected"):
                        record.log(**{column: value})
    assert [row["train_loss"] for row in rows(run, "steps")] == [1.0] * 3


def test_a_micro_batch_of_other_values_is_told_where_it_is_logged(run: Path) -> None:
    """As a step's own columns are: 3.7 tokens used to become 3."""
    with Recorder(run, quiet=True) as recorder, recorder.step(0) as record:
        record.log_micro_batch(loss_sum=np.float32(1.5), loss_token_count=3.0, gradient_norm=1)
        with pytest.raises(RecorderError, match=r"step 0: loss_token_count=3.7: expected a whole number"):
            record.log_micro_batch(loss_sum=1.0, loss_token_count=3.7, gradient_norm=1.0)
    micro_batches = [(row["micro"], row["loss_token_count"]) for row in rows(run, "micro_batches")]
    assert micro_batches == [(0, 3)]


@pytest.mark.parametrize("step", [1.5, "1", None, math.nan, [1, 2]])
def test_a_step_that_is_no_whole_number_is_refused(run: Path, step: Any) -> None:
    """Before anything of it is recorded; NumPy's whole numbers are whole numbers."""
    with Recorder(run, quiet=True) as recorder:
        with pytest.raises(RecorderError, match=r"step=.*: expected a whole number"):
            recorder.step(step)
        with pytest.raises(RecorderError, match=r"step=.*: expected a whole number"):
            recorder.log_evaluation(step, "train", evaluation(1, [True]))
        if step is not None:
            with pytest.raises(RecorderError, match=r"step=.*: expected a whole number"):
                recorder.log_event("note", "", step=step)
        with recorder.step(np.int64(3)):
            pass
    assert [row["step"] for row in rows(run, "steps")] == [3]


def test_numbers_of_any_library_are_numbers(run: Path) -> None:
    """A NumPy scalar, an array of one element, an int where a float goes: nothing to complain about."""
    with Recorder(run, quiet=True) as recorder, recorder.step(0) as record:
        record.log(loss_sum=np.float32(1.5), loss_token_count=np.int32(3), learning_rate=1)
        record.log(objective=np.array(0.5), epoch=2.0, training_mode=np.True_, gradient_norm=None)
    (row,) = rows(run, "steps")
    assert (row["train_loss"], row["learning_rate"], row["objective"]) == (0.5, 1.0, 0.5)
    assert (row["epoch"], row["training_mode"], row["gradient_norm"]) == (2, True, None)


def test_a_row_that_its_column_can_not_hold_costs_itself_alone(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A hash below zero: one row is lost and counted, the flusher lives on, an event says so."""
    with Recorder(run, quiet=True) as recorder:
        for step in range(5):
            with recorder.step(step) as record:
                record.log(loss_sum=1.0, loss_token_count=1, batch_hash=-1 if step == 2 else step)
        recorder.flush()
        record_steps(recorder, range(5, 7))
    assert [row["step"] for row in rows(run, "steps")] == [0, 1, 3, 4, 5, 6]
    told = capsys.readouterr().err
    assert "rows are lost that their columns can not hold" in told
    assert "rows lost: 1 of steps" in told
    assert "warning" in [row["kind"] for row in rows(run, "events")]


def test_a_failing_hook_is_named_and_the_step_survives(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The forward pass goes on, the step's other rows are there, and the hook is named once."""
    model = HandDrivenModel()
    with Recorder(run, quiet=True) as recorder:
        recorder.attach(model)
        for step in range(2):
            with recorder.step(step) as record:
                model.modules["mlp.relu"].forward_hooks.fire(object(), None)  # no output tensor at all
                record.log(loss_sum=1.0, loss_token_count=1)
    (line,) = capsys.readouterr().err.splitlines()
    assert "hook on mlp.relu" in line and "AttributeError" in line
    assert [row["step"] for row in rows(run, "steps")] == [0, 1]


def test_a_failing_hook_raises_where_it_was_asked_to(run: Path) -> None:
    """on_error="raise" also covers the recorder's own failures."""
    model = HandDrivenModel()
    with Recorder(run, on_error="raise") as recorder:
        recorder.attach(model)
        with pytest.raises(RecorderError, match=r"hook on mlp\.relu"), recorder.step(0):
            model.modules["mlp.relu"].forward_hooks.fire(object(), None)


def test_a_row_that_is_refused_while_closing_does_not_end_the_training(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A short run is flushed by its end only: the value is told there, and nothing is raised."""
    with Recorder(run, quiet=True) as recorder, recorder.step(0) as record:
        record.log(loss_sum=1.0, loss_token_count=1, batch_hash=-1)
    first, last = capsys.readouterr().err.splitlines()
    assert "rows are lost that their columns can not hold" in first and last.endswith("rows lost: 1 of steps")
    assert "warning" in [row["kind"] for row in rows(run, "events")]


def test_a_name_that_is_no_text_is_refused(run: Path) -> None:
    """A split or an event's kind that was no text cost every later row of its table."""
    with Recorder(run, quiet=True) as recorder:
        with pytest.raises(RecorderError, match="evaluation of 7: split=7; expected text"):
            recorder.log_evaluation(0, 7, evaluation(1, [True]))  # type: ignore[arg-type]
        with pytest.raises(RecorderError, match="event None: kind=None; expected text"):
            recorder.log_event(None, "x")  # type: ignore[arg-type]
        with pytest.raises(RecorderError, match=r"event note: message=KeyError\(\); expected text"):
            recorder.log_event("note", KeyError())  # type: ignore[arg-type]
        recorder.log_evaluation(1, "train", evaluation(1, [True]))
    assert [row["split"] for row in rows(run, "evaluations")] == ["train"]


def test_a_wrong_name_costs_its_own_row_alone(run: Path) -> None:
    """Also where no call looks at it: what is no text never gets among the names of a column."""
    with Recorder(run, quiet=True) as recorder:
        for step, kind in enumerate(("weight", 7, "weight")):
            recorder._segment.append([Block("tensors", 1, {"step": step, "kind": kind})])
    assert [(row["step"], row["kind"]) for row in rows(run, "tensors")] == [(0, "weight"), (2, "weight")]


def test_text_that_has_no_bytes_in_utf8_is_escaped(run: Path) -> None:
    """A file name in another encoding, as a name and in a text: its row and those after it are kept."""
    with Recorder(run, quiet=True) as recorder:
        recorder.log_event("bad \udc80", "caf\udce9", payload={"path": "\udce9"})
        recorder.log_event("note", "after it")
    events = [(row["kind"], row["message"]) for row in rows(run, "events")][1:-1]
    assert events == [("bad \\udc80", "caf\\udce9"), ("note", "after it")]
    assert json.loads(rows(run, "events")[1]["payload"]) == {"path": "\udce9"}
    with open_runs([run]) as run_log:
        assert run_log.query("SELECT kind FROM events WHERE message = 'after it'").num_rows == 1


@pytest.mark.parametrize("column", ["train_loss", "gradient_cosine_previous", "wall_time"])
def test_a_column_that_the_recorder_fills_in_is_told_as_such(run: Path, column: str) -> None:
    """It is in the table of the document, so "no such column" would be untrue."""
    message = f"step 0: {column}: filled in by the recorder"
    with (
        Recorder(run, quiet=True) as recorder,
        recorder.step(0) as record,
        pytest.raises(RecorderError, match=message),
    ):
        record.log(**{column: 1.0})


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({}, "at least one column"),
        ({"example_id": [1, 2], "split": ["train"]}, r"columns of \[1, 2\] rows"),
        ({"example_id": [1, 2], "length": [3, 4]}, "length holds 3; expected text"),
    ],
)
def test_examples_that_can_not_be_kept_are_told_where_they_are_logged(
    run: Path, columns: dict[str, Any], message: str
) -> None:
    """Before anything of them is written, so that the right ones may follow."""
    with Recorder(run, quiet=True) as recorder:
        with pytest.raises(RecorderError, match=message):
            recorder.log_examples(columns)
        recorder.log_examples({"example_id": [1], "split": ["train"]})
    assert [row["example_id"] for row in rows(run, "examples")] == [1]


def test_labels_may_be_an_array_and_begin_with_none(run: Path) -> None:
    """Text of NumPy, a missing first label, and no example at all."""
    with Recorder(run / "a", quiet=True) as recorder:
        recorder.log_examples(
            {"example_id": np.arange(2), "split": np.array(["train", "test"]), "verb": [None, "go"]}
        )
    with Recorder(run / "b", quiet=True) as recorder:
        recorder.log_examples({"example_id": [], "split": []})
    found = [(row["example_id"], row["split"], row["verb"]) for row in rows(run / "a", "examples")]
    assert found == [(0, "train", None), (1, "test", "go")]
    assert rows(run / "b", "examples") == []


def test_each_example_may_have_a_label_of_its_own(run: Path) -> None:
    """More names than a key of 2 bytes can tell apart."""
    labels = [f"verb {number}" for number in range(40_000)]
    with Recorder(run, quiet=True) as recorder:
        recorder.log_examples({"example_id": np.arange(40_000), "split": ["train"] * 40_000, "verb": labels})
    assert [row["verb"] for row in rows(run, "examples")] == labels
    with open_runs([run]) as run_log:
        query = "SELECT count(DISTINCT verb) AS verbs, max(verb) AS last FROM examples"
        assert run_log.query(query).to_pylist() == [{"verbs": 40_000, "last": "verb 9999"}]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 2, "world_size": 2}, "rank 2 of world_size 2; expected 0 to 1"),
        ({"rank": 1}, "rank 1 of world_size 1"),
        ({"on_error": "wran"}, "on_error='wran'; expected one of warn, raise"),
        ({"overhead_budget": 0.0}, "expected a share above 0"),
        ({"fsync_seconds": math.nan}, "expected seconds"),
    ],
)
def test_settings_that_would_be_misunderstood_are_refused(
    run: Path, settings: dict[str, Any], message: str
) -> None:
    """Before anything is written: the training has not begun."""
    with pytest.raises(RecorderError, match=message):
        Recorder(run, quiet=True, **settings)
    assert not run.exists()


def test_a_weight_that_is_no_array_is_refused(run: Path) -> None:
    """A list would be copied at every look; what an update does to it can not be told."""
    with Recorder(run, quiet=True) as recorder, pytest.raises(RecorderError, match="watch: w is a list"):
        recorder.watch({"w": [1.0, 2.0]})


def test_a_gradient_of_no_watched_weight_is_told(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its weight, known by another name, is not said to have had none; with its own name all is well."""
    weights = {"a": np.ones(2, np.float32), "b": np.ones((2, 3), np.float32)}
    with Recorder(run, quiet=True) as recorder:
        recorder.watch(weights)
        for step, gradients in enumerate(
            ({"A": weights["a"], "b": weights["b"]}, weights, {"b": weights["b"]})
        ):
            with recorder.step(step) as record:
                record.add_gradients(gradients)
    (line,) = capsys.readouterr().err.splitlines()
    assert "step 0: gradient 'A' is of no watched weight; expected one of a, b; training goes on" in line
    found = [(row["step"], row["tensor_id"], row["has_gradient"]) for row in rows(run, "tensors")]
    gradients_found = [row for row in found if row[2] is not None]
    assert gradients_found == [(0, 1, True), (1, 0, True), (1, 1, True), (2, 1, True), (2, 0, False)]
    assert [row["kind"] for row in rows(run, "events")] == ["segment_started", "warning", "finished"]


def test_a_gradient_of_another_shape_is_told(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Once, although it comes at every step; where asked, it is raised."""
    weights = {f"w{number}": np.ones((2, 3), np.float32) for number in range(7)}
    transposed = {name: weight.T for name, weight in weights.items() if name == "w2"}
    with Recorder(run, quiet=True) as recorder:
        recorder.watch(weights)
        for step in range(2):
            with recorder.step(step) as record:
                record.add_gradients(weights | transposed)
    assert capsys.readouterr().err == (
        "recorder: step 0: gradient 'w2' is (3, 2), and its weight (2, 3); training goes on\n"
    )
    with Recorder(run, on_error="raise", quiet=True) as recorder:
        recorder.watch(weights)
        message = r"step 0: gradient 'x' is of no watched weight; expected one of w0, w1, w2, w3, w4, \.\.\."
        with pytest.raises(RecorderError, match=message), recorder.step(0) as record:
            record.add_gradients({"x": np.ones(2, np.float32)})


def evaluation(example_count: int, correct: Any) -> Any:
    """Of plain lists, as a loop without NumPy has them."""
    ones = [1.0] * example_count
    return EvaluationLosses(list(range(example_count)), ones, ones, ones, ones, correct)


def test_an_evaluation_may_come_in_lists(run: Path) -> None:
    """They are summed like arrays; columns of different lengths are told, and write nothing."""
    with Recorder(run, quiet=True) as recorder:
        with pytest.raises(RecorderError, match=r"evaluation of train: .*correct \(1,\)"):
            recorder.log_evaluation(0, "train", evaluation(2, [True]))
        recorder.log_evaluation(0, "train", evaluation(2, [True, False]))
    (sums,) = rows(run, "evaluations")
    assert (sums["loss_sum"], sums["token_count"], sums["repeat"]) == (2.0, 2, 0)
    assert [row["correct"] for row in rows(run, "example_losses")] == [True, False]


def test_arrays_may_be_written_over_when_they_are_logged(run: Path) -> None:
    """A loop that fills the same buffers at each evaluation: every row has its own numbers."""
    ids, losses, one = np.arange(2), np.ones(2), np.ones(2, np.int64)
    correct = np.ones(2, np.bool_)
    with Recorder(run, quiet=True) as recorder:
        recorder.log_examples({"example_id": ids, "content_hash": one})
        ids += 5
        for step in range(2):
            losses[:] = step + 1.0
            recorder.log_evaluation(step, "train", EvaluationLosses(ids, losses, one, losses, one, correct))
        losses[:] = 0.0
        one += 1
    assert [(row["example_id"], row["content_hash"]) for row in rows(run, "examples")] == [(0, 1), (1, 1)]
    assert [row["loss_sum"] for row in rows(run, "example_losses")] == [1.0, 1.0, 2.0, 2.0]
    assert [row["loss_sum"] for row in rows(run, "evaluations")] == [2.0, 4.0]


def test_every_bit_of_an_examples_hash_is_kept(run: Path) -> None:
    """Python's whole numbers below and above 2**63 in one list, of which NumPy makes floats."""
    hashes = [2**63 + 12345, 5, 2**64 - 1]
    with Recorder(run, quiet=True) as recorder:
        recorder.log_examples({"example_id": [0, 1, 2], "content_hash": hashes})
    assert [row["content_hash"] for row in rows(run, "examples")] == hashes


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("content_hash", [-1, 2], "content_hash holds -1; expected whole numbers from 0"),
        (
            "content_hash",
            np.array([2.0**63, 1.0]),
            r"content_hash holds 9.22.*e\+18; expected whole numbers from 0",
        ),
        ("content_hash", [None, 1], "content_hash: .*NoneType.*; expected whole numbers"),
        ("content_hash", ["a", "b"], "content_hash: values of type .U1; expected whole numbers"),
        ("example_id", [math.nan, 1.5], "example_id holds nan; expected whole numbers"),
    ],
)
def test_ids_and_hashes_that_are_no_whole_numbers_are_refused(
    run: Path, column: str, values: Any, message: str
) -> None:
    """They would become other numbers in their columns, and no one could tell."""
    with Recorder(run, quiet=True) as recorder, pytest.raises(RecorderError, match="examples: " + message):
        recorder.log_examples({"example_id": [0, 1]} | {column: values})


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("example_id", [math.nan, 1.0], "example_id holds nan; expected whole numbers"),
        ("token_count", [2.5, 1.0], "token_count holds 2.5; expected whole numbers"),
        ("correct", np.array([1.0, math.nan]), "correct holds nan; expected true or false"),
        ("correct", [2, 0], "correct holds 2; expected true or false"),
        ("loss_sum", [None, 1.0], "loss_sum: values of type object; expected numbers"),
        ("loss_sum", [[1.0], [1.0, 2.0]], "loss_sum: .*; expected numbers"),
    ],
)
def test_an_evaluation_of_other_values_is_refused(run: Path, column: str, values: Any, message: str) -> None:
    """A NaN is a loss, but not an id, a count or an answer."""
    losses = dataclasses.replace(evaluation(2, [True, False]), **{column: values})
    with Recorder(run, quiet=True) as recorder:
        with pytest.raises(RecorderError, match="evaluation of train: " + message):
            recorder.log_evaluation(0, "train", losses)
        losses = dataclasses.replace(evaluation(2, [1, 0]), loss_sum=[math.nan, 1.0])
        recorder.log_evaluation(0, "train", losses)
    assert [row["correct"] for row in rows(run, "example_losses")] == [True, False]
    assert math.isnan(rows(run, "evaluations")[0]["loss_sum"])


def test_a_configuration_may_hold_what_json_has_no_type_for(run: Path) -> None:
    """As ``vars(args)`` does: a path, NumPy numbers; they must not end a training before it begins."""
    config = {
        "data": Path("corpus"),
        "rate": np.float32(0.5),
        "widths": np.array([2, 3]),
        "dtype": np.float32,
    }
    with Recorder(run, Manifest("run", config=config), quiet=True):
        pass
    kept = read_manifest(run).config
    assert kept == {"data": "corpus", "rate": 0.5, "widths": [2, 3], "dtype": "<class 'numpy.float32'>"}
    with pytest.raises(RecorderError, match=r"manifest.json: keys must be str.*use text for keys"):
        Recorder(run.with_name("other"), Manifest("other", config={(1, 2): 3}), quiet=True)


def test_a_command_line_in_another_encoding_is_told_with_escapes(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file name of another system among the arguments, or in the configuration, must not stop the run."""
    monkeypatch.setattr("sys.argv", ["train.py", "caf\udce9"])
    with Recorder(run, Manifest("run", config={"data": "caf\udce9"}), quiet=True):
        pass
    manifest = read_manifest(run)
    assert manifest.environment["command"] == ["train.py", "caf\\udce9"]
    assert manifest.config == {"data": "caf\udce9"}


def test_a_row_that_is_refused_while_closing_is_raised_where_asked(run: Path) -> None:
    """The files are closed all the same, with their end-of-stream marks."""
    recorder = Recorder(run, on_error="raise", quiet=True)
    with recorder.step(0) as record:
        record.log(batch_hash=-1)
    with pytest.raises(RecorderError, match="their columns can not hold"):
        recorder.close()
    assert (run / "log" / "events-r0-s0.arrows").read_bytes().endswith(b"\xff\xff\xff\xff\0\0\0\0")
