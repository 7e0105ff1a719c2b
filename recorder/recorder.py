"""The flight recorder: what a training loop calls, and how often each signal is taken.

with Recorder("runs/mine", Manifest("mine")) as recorder:
    recorder.attach(model)
    for step in range(total_steps):
        with recorder.step(step) as record:
            ...  # forward, backward, update
            record.log(loss_sum=loss_sum, loss_token_count=tokens, learning_rate=rate)
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, get_args

import numpy as np
import pyarrow as pa

from recorder import schema
from recorder.cadence import Cadence, OverheadBudget
from recorder.capture import Capture, Place, attach_hooks
from recorder.errors import RecorderError
from recorder.hooks import Array, Handle, WatchedModel
from recorder.kernel import best_kernel
from recorder.manifest import Manifest, environment
from recorder.segment import OnError, Segment, say
from recorder.signals import StepSignals, TensorCatalogue
from recorder.step_record import EvaluationLosses, StepRecord, column_array, whole_step
from recorder.writer import Block, Value


class Recorder:
    """Records one process of a training run, in one or more segments of its run directory.

    One thread drives the steps; events and evaluations may come from any thread. In a forked child (a data
    worker) every call does nothing. A step number that does not increase begins a new segment, so that
    both histories stay readable.
    """

    def __init__(
        self,
        run_directory: str | os.PathLike[str],
        manifest: Manifest | None = None,
        *,
        cadence: Cadence | None = None,
        overhead_budget: float | None = None,
        rank: int = 0,
        world_size: int = 1,
        on_error: OnError = "warn",
        fsync_seconds: float = 30.0,
        quiet: bool = False,
    ) -> None:
        """Create or continue a run. Raises RecorderError when it can not be written, or as it was asked for.

        overhead_budget: share of the training time, for example 0.02; cadences slow down to keep it, and
            an event says which cadence is in force.
        rank, world_size: each rank writes its own files; rank 0 writes the manifest.
        on_error: "warn" lets training go on when something can not be recorded, with one line on stderr, an
            event, and a summary at the end of what is missing; "raise" raises RecorderError at the next call.
        fsync_seconds: how much a power loss may cost; 0 leaves it to the operating system.
        quiet: do not say on stderr where the log is and what it cost.
        """
        _check_settings(overhead_budget, rank, world_size, on_error, fsync_seconds)
        self.run_directory = Path(run_directory)
        self.cadence = cadence or Cadence()
        self.rank, self.world_size = rank, world_size
        self._on_error = on_error
        self._fsync_seconds = fsync_seconds
        self._quiet = quiet
        self._handles: list[Handle] = []
        self._places: dict[str, Place] = {}
        self._catalogue = TensorCatalogue()
        self._kernel = best_kernel()
        self.capture = Capture(self._kernel)
        self._signals = StepSignals(self.cadence, self._catalogue, self._kernel)
        self._budget = None if overhead_budget is None else OverheadBudget(overhead_budget)
        self._current: StepRecord | None = None
        self._step_start = 0.0
        self._recorder_seconds = 0.0
        self._append_seconds = 0.0  # of the row before
        self._total_recorder_seconds = self._total_step_seconds = 0.0
        self._last_step: int | None = None  # of this segment
        self._evaluated: dict[tuple[int, str], int] = {}
        self._told: set[str] = set()
        self._closed = False
        self._given_up = ""  # what is not recorded any more
        self._finished_rows: dict[str, int] = {}  # of segments that are closed, by table
        self._finished_bytes = 0
        self._segment = self._open(manifest or Manifest(self.run_directory.name))
        self._log_segment_start()
        continued = f", continued as segment {self.segment}" if self.segment else ""
        self._say(f"logging to {self.run_directory}{continued}, {self._kernel.name} statistics kernel")

    @property
    def segment(self) -> int:
        """Number of the segment that is being written."""
        return self._segment.number

    # What a training loop calls ---------------------------------------------------------------

    def attach(self, model: WatchedModel) -> list[Handle]:
        """Watch a model's weights, gradients, activations and attention; the handles take it back."""
        handles, places = attach_hooks(model, self.capture)
        self._handles += handles
        self._places.update(places)
        tied = {first: second for second, first in model.tied_names()}
        for name, parameter in model.named_parameters():
            flags = parameter.trainable, parameter.weight_decay, tied.get(name)
            self._catalogue.add_weight(places[name], parameter.data, *flags)
        return handles

    def watch(self, weights: Mapping[str, Array]) -> None:
        """Watch the weights of a loop without hooks: arrays by name that updates change in place.

        Raises RecorderError for anything else, of which no change would be seen.
        """
        for name, weight in weights.items():
            if not isinstance(weight, np.ndarray):
                raise RecorderError(
                    f"watch: {name} is a {type(weight).__name__}; expected the NumPy array that is trained"
                )
            place = Place(name, name.rpartition(".")[0], None, "parameter")
            self._places[name] = place
            self._catalogue.add_weight(place, weight, None, None, None)

    def detach(self) -> None:
        """Take every hook out of the model again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def step(self, step: int) -> StepRecord:
        """Context of one optimizer step, entered while the weights are w_step, left after the update."""
        return StepRecord(self, whole_step(step))

    def log_examples(self, columns: Mapping[str, Sequence[Any]]) -> None:
        """Write the table of examples once: example_id, split, content_hash, and label columns of text."""
        self._check_open("examples")
        if self._is_silent():
            return
        values = {name: _column_values(name, column) for name, column in columns.items()}
        if len(lengths := {len(column) for column in values.values()}) != 1:
            raise RecorderError(
                f"examples: columns of {sorted(lengths)} rows; expected one number, and at least one column"
            )
        arrow_schema = schema.EXAMPLES.stream_schema()
        for name in columns:
            if name not in arrow_schema.names:
                arrow_schema = arrow_schema.append(pa.field(name, schema.KEYED_LABEL))
        self._segment.open("examples", arrow_schema)
        if row_count := lengths.pop():
            self._append([Block("examples", row_count, values)])

    def log_evaluation(
        self,
        step: int,
        split: str,
        losses: EvaluationLosses,
        *,
        evaluation_mode: bool = True,
        weights_hash: int | None = None,
    ) -> None:
        """Record one evaluation of a whole split: its sums, and the loss of each example.

        A second evaluation of the same step and split is a repeat, of which the sums are kept. The arrays
        may be written over as soon as this returns.
        Raises RecorderError when the columns of ``losses`` have different lengths.
        weights_hash: of the weights that were evaluated, when they are not the watched ones (an average).
        """
        what = f"evaluation of {split}"
        self._check_open(what)
        if self._is_silent():
            return
        _check_texts(what, split=split)
        step = whole_step(step)
        types = {column.name: column.type for column in schema.EXAMPLE_LOSSES.columns}
        columns = {
            name: column_array(f"{what}: {name}", column, types[name])
            for name, column in vars(losses).items()
        }
        if len({column.shape for column in columns.values()}) != 1 or columns["example_id"].ndim != 1:
            shapes = ", ".join(f"{name} {column.shape}" for name, column in columns.items())
            raise RecorderError(f"{what}: {shapes}; expected one value per example in each")
        repeat = self._evaluated.get((step, split), 0)
        self._evaluated[step, split] = repeat + 1
        row = {
            "step": step,
            "split": split,
            "repeat": repeat,
            "weights_hash": self._catalogue.weights_hash() if weights_hash is None else weights_hash,
            "evaluation_mode": evaluation_mode,
        }
        sums = {name: column.sum() for name, column in columns.items() if name.endswith(("sum", "count"))}
        blocks = [Block("evaluations", 1, row | sums)]
        if repeat == 0:
            examples = columns | {"step": step, "split": split}
            blocks.append(Block("example_losses", len(columns["example_id"]), examples))
        self._append(blocks)

    def log_event(
        self, kind: str, message: str, *, step: int | None = None, payload: Mapping[str, Any] | None = None
    ) -> None:
        """Record that something happened; it reaches the operating system before this returns.

        From a signal handler that interrupts the recorder itself, within a second.
        """
        self._check_open(f"event {kind}")
        _check_texts(f"event {kind}", kind=kind, message=message)
        self._event(kind, message, None if step is None else whole_step(step), payload)

    def flush(self) -> None:
        """Hand every waiting row to the operating system, for example before a checkpoint is published."""
        self._segment.flush()

    def close(self) -> None:
        """Log the event ``finished`` and close the run. A second call finishes one that was interrupted."""
        self._close("finished", "the run finished")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._close("exception", f"{type(error).__name__}: {error}".splitlines()[0])

    # The step ---------------------------------------------------------------------------------

    def begin_step(self, record: StepRecord) -> None:
        """Take what must be seen before the update; called by ``with recorder.step(step)``."""
        if self._is_silent():
            return
        if self._current is not None:
            raise RecorderError(
                f"step {record.step}: step {self._current.step} has not ended; do not nest steps"
            )
        self._check_open(f"step {record.step}")
        self._step_start = time.perf_counter()
        if self._last_step is not None and record.step <= self._last_step:
            self._begin_next_segment(record.step)
            if self._given_up:
                return
        try:
            self._signals.before_update(record.step)
        except Exception as failure:  # whatever it is: the training must go on
            self._tell("weights", record.step, failure)
        self.capture.begin(record.step, self._signals.due_in_hooks(record.step))
        self._last_step = record.step
        self._recorder_seconds = time.perf_counter() - self._step_start
        self._current = record  # last: a step that did not begin, after an interrupt, can not end either

    def end_step(self, record: StepRecord, *, completed: bool) -> None:
        """Summarise and append the step's rows; called at the end of ``with recorder.step(step)``."""
        if self._is_silent():
            return
        start = time.perf_counter()
        self._current = None
        try:
            blocks = self._blocks_after_update(record, completed)
            now = time.perf_counter()  # letting go of the step's arrays below is the training's own work
            seconds = self._append_seconds + self._recorder_seconds + self.capture.seconds + now - start
            step_seconds = self._append_seconds + now - self._step_start
            row = self._step_row(record, seconds, step_seconds)
            self._append([*blocks, *record.micro_batches, Block("steps", 1, row)])
            self._append_seconds = time.perf_counter() - now
        finally:  # whatever comes in between, the next step must not find this one's arrays
            hook_errors = self.capture.end()
        for hook, error in hook_errors:
            self._tell(f"hook on {hook}", record.step, error)
        doubts, self._signals.doubts = self._signals.doubts, {}
        for name, doubt in doubts.items():
            self._warn(f"gradient {name}", record.step, f"gradient {name!r} is {doubt}")
        self._account(record.step, seconds, step_seconds)

    def _blocks_after_update(self, record: StepRecord, completed: bool) -> list[Block]:
        try:
            return self._signals.after_update(
                record.step, record.logged, self.capture, self._places, completed
            )
        except Exception as failure:  # whatever it is: the training must go on
            self._tell("statistics", record.step, failure)
            return []

    def _event(self, kind: str, message: str, step: int | None, payload: Mapping[str, Any] | None) -> None:
        row = {
            "step": self._last_step if step is None else step,
            "wall_time": _microseconds(),
            "kind": kind,
            "message": message,
            "payload": json.dumps(payload or {}, ensure_ascii=False, default=str),
        }
        self._append([Block("events", 1, row)], flush=True)

    def _append(self, blocks: list[Block], flush: bool = False) -> None:
        while not (segment := self._segment).append(blocks, flush):
            if segment is self._segment:  # else another thread has begun the next one
                raise RecorderError(f"the recorder of {self.run_directory} is closed")

    def _step_row(self, record: StepRecord, recorder_seconds: float, step_seconds: float) -> dict[str, Value]:
        row = record.logged
        row.setdefault("weights_hash", self._signals.weights_hash)
        row.setdefault("gradient_norm", self._signals.gradient_norm)
        if row.get("loss_token_count") and row.get("loss_sum") is not None:
            row["train_loss"] = row["loss_sum"] / row["loss_token_count"]
        row["gradient_cosine_previous"] = self._signals.gradient_cosine_previous
        row["step"] = record.step
        row["wall_time"] = _microseconds()
        row["step_seconds"] = step_seconds
        row["recorder_seconds"] = recorder_seconds
        return row

    def _account(self, step: int, recorder_seconds: float, step_seconds: float) -> None:
        """Sum up the cost, and slow the cadences down when it is over the budget."""
        self._total_recorder_seconds += recorder_seconds
        self._total_step_seconds += step_seconds
        if self._budget is not None and self._budget.spend(recorder_seconds, step_seconds):
            self._signals.cadence = self.cadence.slowed(self._budget.factor)
            in_force = dataclasses.asdict(self._signals.cadence)
            message = f"cadences {self._budget.factor} times slower from the next step"
            self.log_event("cadence", message, step=step, payload=in_force)

    def _tell(self, what: str, step: int, error: Exception) -> None:
        """Report a failure of the recorder itself."""
        line = f"recording {what} failed: {type(error).__name__}: {error}; rows are missing"
        self._warn(what, step, line, error)

    def _warn(self, what: str, step: int, line: str, error: Exception | None = None) -> None:
        """Tell of what is wrong with the recording, each kind once."""
        line = f"step {step}: {line}"
        if self._on_error == "raise":
            raise RecorderError(line) from error
        if what not in self._told:
            self._told.add(what)
            say(f"{line}; training goes on")
            self.log_event("warning", line, step=step)

    # Segments ---------------------------------------------------------------------------------

    def _open(self, manifest: Manifest) -> Segment:
        try:
            self.run_directory.mkdir(parents=True, exist_ok=True)
            if self.rank == 0 and not (self.run_directory / schema.MANIFEST_FILE).exists():
                manifest.completed().write(self.run_directory)
            return Segment(self.run_directory, self.rank, self._on_error, self._fsync_seconds)
        except OSError as error:
            raise RecorderError(
                f"{self.run_directory}: can not record here: {error.strerror}; "
                "free the path or name another run directory"
            ) from error

    def _log_segment_start(self, step: int | None = None) -> None:
        payload = {
            "environment": environment(),
            "cadence": dataclasses.asdict(self._signals.cadence),
            "kernel": self._kernel.name,
            "world_size": self.world_size,
        }
        message = f"segment {self.segment} of rank {self.rank}"
        self.log_event("segment_started", message, step=step, payload=payload)

    def _begin_next_segment(self, step: int) -> None:
        """The step number went back: what follows is another history of the same run."""
        self._end_windows()
        try:
            following = Segment(self.run_directory, self.rank, self._on_error, self._fsync_seconds)
        except OSError as error:
            # Rows of another history must not go into this segment.
            self._given_up = f"everything from step {step} on, which went back"
            self._tell(self._given_up, step, error)
            return
        previous = self._segment
        self._catalogue.write_again()
        self._segment, self._evaluated = following, {}  # first: other threads go on logging meanwhile
        self._log_segment_start(step)
        self._close_segment(previous)

    def _close_segment(self, segment: Segment) -> None:
        segment.close()
        if not segment.is_closed:
            return
        for table, count in segment.row_counts().items():
            self._finished_rows[table] = self._finished_rows.get(table, 0) + count
        self._finished_bytes += segment.size()

    def _end(self, kind: str, message: str) -> None:
        """Let go of the model, and tell how the run ended even where not all of it can be recorded."""
        try:
            self.detach()
            if not self._given_up:
                self._end_windows()
            self._segment.write_all()
        finally:  # the rows that are there are counted, so that a reader sees what is gone
            counts = self._segment.row_counts().items()
            rows = {table: count for table, count in counts if table != schema.EVENTS.name}
            self._event(kind, message, None, {"rows": rows})

    def _end_windows(self) -> None:
        if self._last_step is not None:
            self._append(self._signals.close_windows(self._last_step, self.capture))

    def _is_silent(self) -> bool:
        """Nothing more is recorded: in a fork of the process, or where no segment could be opened."""
        return bool(self._given_up) or self._segment.foreign

    def _check_open(self, what: str) -> None:
        if self._closed:
            raise RecorderError(f"{what}: the recorder of {self.run_directory} is closed")

    def _close(self, kind: str, message: str) -> None:
        if self._segment.is_closed or self._segment.foreign:
            return
        was_closed, self._closed = self._closed, True  # by a call that was interrupted
        try:
            if not was_closed:
                self._end(kind, message)
        finally:
            self._close_segment(self._segment)
        if not self._segment.is_closed:  # this is a signal handler in the middle of an append
            return
        if self._given_up:
            say(f"{self.run_directory}: not recorded: {self._given_up}")
        training_seconds = self._total_step_seconds - self._total_recorder_seconds
        share = 100 * self._total_recorder_seconds / max(training_seconds, 1e-9)
        size = self._finished_bytes
        ending = "" if kind == "finished" else f" when the run ended by {message}"
        self._say(
            f"{self._finished_rows.get('steps', 0)} steps, {sum(self._finished_rows.values())} rows, "
            f"{f'{size / 1e6:.1f} MB' if size >= 1e6 else f'{size / 1e3:.0f} kB'} logged{ending}; "
            f"{share:.1f}% on top of the training's own time, by the recorder's clock; "
            f"see them: analyzer render {self.run_directory}"
        )

    def _say(self, line: str) -> None:
        if not self._quiet:
            say(line)


def _check_settings(
    overhead_budget: float | None, rank: int, world_size: int, on_error: str, fsync_seconds: float
) -> None:
    """RecorderError for what would be misunderstood in silence until the run is over."""
    if not 0 <= rank < world_size:
        raise RecorderError(f"rank {rank} of world_size {world_size}; expected 0 to {world_size - 1}")
    if on_error not in get_args(OnError):
        raise RecorderError(f"on_error={on_error!r}; expected one of {', '.join(get_args(OnError))}")
    if overhead_budget is not None and not overhead_budget > 0:
        raise RecorderError(f"overhead_budget={overhead_budget}; expected a share above 0, such as 0.02")
    if not fsync_seconds >= 0:
        raise RecorderError(f"fsync_seconds={fsync_seconds}; expected seconds, or 0 for never")


def _check_texts(what: str, **texts: object) -> None:
    for name, text in texts.items():
        if not isinstance(text, str):
            raise RecorderError(f"{what}: {name}={text!r}; expected text")


def _column_values(name: str, column: Sequence[Any]) -> Any:
    """A copy: ids and hashes as an array, split and labels as a list of texts. RecorderError for others."""
    if name in ("example_id", "content_hash"):
        return column_array(f"examples: {name}", column, schema.EXAMPLES.arrow_schema().field(name).type)
    names = column.tolist() if isinstance(column, np.ndarray) else list(column)
    for value in names:
        if value is not None and not isinstance(value, str):
            raise RecorderError(f"examples: {name} holds {value!r}; expected text, or None: write it as text")
    return names


def _microseconds() -> int:
    return time.time_ns() // 1000
