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
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from recorder import schema
from recorder.capture import Capture, Place, attach_hooks
from recorder.errors import RecorderError
from recorder.hooks import Array, Handle, WatchedModel
from recorder.kernel import best_kernel
from recorder.manifest import Manifest, environment
from recorder.signals import Block, Cadence, StepSignals, TensorCatalogue
from recorder.statistics import combined_hash, content_hash
from recorder.writer import Stream, Value

FLUSH_SECONDS = 0.5
"""Rows wait at most this long, so that a killed process loses less than a second of them."""
HEARTBEAT_SECONDS = 5.0

Steps = Mapping[str, Value]


@dataclass(frozen=True)
class EvaluationLosses:
    """Per-example results of one evaluation; all arrays are (examples,)."""

    example_id: NDArray[np.int64]
    loss_sum: NDArray[np.float64]  # nats, over all counted tokens
    token_count: NDArray[np.int64]
    answer_loss_sum: NDArray[np.float64]  # nats, over the tokens after the prompt
    answer_token_count: NDArray[np.int64]
    correct: NDArray[np.bool_]


class StepRecord:
    """What the loop tells about the step that it is in; a context manager made by ``Recorder.step``."""

    def __init__(self, recorder: Recorder, step: int) -> None:
        self.step = step
        self.logged: dict[str, Value] = {}
        self._recorder = recorder

    def log(self, **columns: Value) -> None:
        """Set columns of this step's row of ``steps``: loss_sum, learning_rate, gradient_norm, ..."""
        unknown = columns.keys() - LOGGED_COLUMNS
        if unknown:
            raise RecorderError(
                f"step {self.step}: no column {', '.join(sorted(unknown))} in table steps; "
                f"expected some of {', '.join(sorted(LOGGED_COLUMNS))}"
            )
        self.logged.update(columns)

    def add_gradients(self, gradients: Mapping[str, Array]) -> None:
        """Give the finished gradients by parameter name, for a loop whose model has no hooks."""
        self._recorder.capture.gradients.update(gradients)

    def add_activations(self, activations: Mapping[str, Array]) -> None:
        """Give outputs of modules by name, real tokens only, for a loop whose model has no hooks."""
        self._recorder.capture.activations.update(activations)

    def __enter__(self) -> Self:
        self._recorder.begin_step(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        self._recorder.end_step(self, completed=kind is None)


MADE_COLUMNS = frozenset({"step", "wall_time", "step_seconds", "recorder_seconds", "train_loss"})
"""Columns of ``steps`` that the recorder fills in itself."""
LOGGED_COLUMNS = frozenset(schema.STEPS.column_names()) - MADE_COLUMNS


class Recorder:
    """Appends one segment of a run directory: opens its streams, writes its manifest, closes cleanly.

    on_error: "warn" lets training go on when the log can not be written, with one line on stderr and
    a summary at the end of what is missing; "raise" raises RecorderError at the next call.
    """

    def __init__(
        self,
        run_directory: str | os.PathLike[str],
        manifest: Manifest | None = None,
        *,
        cadence: Cadence | None = None,
        rank: int = 0,
        on_error: Literal["warn", "raise"] = "warn",
    ) -> None:
        """Create or continue a run. Raises RecorderError when the directory can not be written."""
        self.run_directory = Path(run_directory)
        self.cadence = cadence or Cadence()
        self.rank = rank
        self.capture = Capture()
        self._on_error = on_error
        self._lock = threading.Lock()
        self._streams: dict[str, Stream] = {}
        self._warned: set[str] = set()
        self._handles: list[Handle] = []
        self._places: dict[str, Place] = {}
        self._catalogue = TensorCatalogue()
        self._kernel = best_kernel()
        self._signals = StepSignals(self.cadence, self._catalogue, self._kernel)
        self._current: StepRecord | None = None
        self._step_start = 0.0
        self._recorder_seconds = 0.0
        self._last_step = 0
        self._evaluated: dict[tuple[int, str], int] = {}
        self._closed = threading.Event()
        self._open_directory(manifest or Manifest(self.run_directory.name))
        self._flusher = threading.Thread(target=self._flush_regularly, name="recorder-flush", daemon=True)
        self._flusher.start()

    # What a training loop calls ---------------------------------------------------------------

    def attach(self, model: WatchedModel) -> list[Handle]:
        """Watch a model's weights, gradients, activations and attention; the handles take it back."""
        handles, places = attach_hooks(model, self.capture)
        self._handles += handles
        self._places.update(places)
        tied = {first: second for second, first in model.tied_names()}
        for name, parameter in model.named_parameters():
            weight = parameter.data
            self._catalogue.add_weight(
                places[name], weight, parameter.trainable, parameter.weight_decay, tied.get(name)
            )
        return handles

    def watch(self, weights: Mapping[str, Array]) -> None:
        """Watch the weights of a loop without hooks: arrays by name that updates change in place."""
        for name, weight in weights.items():
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
        return StepRecord(self, step)

    def log_examples(self, columns: Mapping[str, Sequence[Any]]) -> None:
        """Write the table of examples once: example_id, split, content_hash, and label columns of text."""
        contract = schema.EXAMPLES.arrow_schema()
        labels = [name for name in columns if name not in contract.names]
        for name in labels:
            contract = contract.append(pa.field(name, schema.KEYED_STRING))
        if "examples" in self._streams:
            raise RecorderError(f"{self.run_directory}: the examples of this segment are logged already")
        values = {name: _column_values(column) for name, column in columns.items()}
        with self._lock:
            self._streams["examples"] = self._open_stream("examples", contract)
            self._streams["examples"].append(values, len(next(iter(columns.values()))))

    def log_evaluation(
        self, step: int, split: str, losses: EvaluationLosses, *, evaluation_mode: bool = True
    ) -> None:
        """Record one evaluation of a whole split: its sums, and the loss of each example."""
        repeat = self._evaluated.get((step, split), 0)
        self._evaluated[step, split] = repeat + 1
        weights = self._catalogue.weights.values()
        columns = dataclasses.asdict(losses)
        sums = {name: column.sum() for name, column in columns.items() if name.endswith(("sum", "count"))}
        row = {
            "step": step,
            "split": split,
            "repeat": repeat,
            "weights_hash": combined_hash(content_hash(weight) for weight in weights) if weights else None,
            "evaluation_mode": evaluation_mode,
        }
        with self._lock:
            self._append("evaluations", row | sums)
            if repeat == 0:
                examples = columns | {"step": step, "split": split}
                self._append("example_losses", examples, len(losses.example_id))
        self._after_write()

    def log_event(
        self, kind: str, message: str, *, step: int | None = None, payload: Mapping[str, Any] | None = None
    ) -> None:
        """Record that something happened; it reaches the operating system before this returns."""
        row = {
            "step": self._last_step if step is None else step,
            "wall_time": _microseconds(),
            "kind": kind,
            "message": message,
            "payload": json.dumps(payload or {}, ensure_ascii=False, default=str),
        }
        with self._lock:
            self._append("events", row)
            self._streams["events"].flush()
        self._after_write()

    def close(self) -> None:
        """Log the event ``finished`` and close the run. A second call does nothing."""
        self._close("finished", "the run finished", {})

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._close("exception", f"{type(error).__name__}: {error}".splitlines()[0], {})

    # The step ---------------------------------------------------------------------------------

    def begin_step(self, record: StepRecord) -> None:
        """Take what must be seen before the update; called by ``with recorder.step(step)``."""
        if self._current is not None:
            raise RecorderError(
                f"step {record.step}: step {self._current.step} has not ended; do not nest steps"
            )
        if self._closed.is_set():
            raise RecorderError(f"step {record.step}: the recorder of {self.run_directory} is closed")
        self._step_start = time.perf_counter()
        self._current = record
        self._last_step = record.step
        self.capture.begin(record.step)
        self._signals.before_update(record.step)
        self._recorder_seconds = time.perf_counter() - self._step_start

    def end_step(self, record: StepRecord, *, completed: bool) -> None:
        """Summarise and append the step's rows; called at the end of ``with recorder.step(step)``."""
        start = time.perf_counter()
        blocks = self._signals.after_update(record.step, record.logged, self.capture, self._places, completed)
        self.capture.end()
        self._current = None
        now = time.perf_counter()
        row = dict(record.logged)
        if record.logged.get("loss_token_count"):
            row["train_loss"] = record.logged["loss_sum"] / record.logged["loss_token_count"]
        row |= {"weights_hash": self._signals.weights_hash} if row.get("weights_hash") is None else {}
        row |= {
            "gradient_cosine_previous": self._signals.gradient_cosine_previous,
            "step": record.step,
            "wall_time": _microseconds(),
            "step_seconds": now - self._step_start,
            "recorder_seconds": self._recorder_seconds + self.capture.seconds + now - start,
        }
        self._append_blocks([*blocks, Block("steps", 1, row)])
        self._after_write()

    # Files ------------------------------------------------------------------------------------

    def _open_directory(self, manifest: Manifest) -> None:
        log = self.run_directory / schema.LOG_DIRECTORY
        try:
            log.mkdir(parents=True, exist_ok=True)
            if not (self.run_directory / schema.MANIFEST_FILE).exists():
                manifest.completed().write(self.run_directory)
            self.segment = self._claim_segment(log)
        except OSError as error:
            raise RecorderError(
                f"{self.run_directory}: can not record here: {error.strerror}; "
                "free the path or name another run directory"
            ) from error
        start = {
            "environment": environment(),
            "cadence": dataclasses.asdict(self.cadence),
            "kernel": self._kernel.name,
        }
        self.log_event("segment_started", f"segment {self.segment} of rank {self.rank}", payload=start)

    def _claim_segment(self, log: Path) -> int:
        """The number of the segment that this process owns, by creating its events stream exclusively."""
        parsed = [schema.parse_stream_name(path.name) for path in log.iterdir()]
        segment = 1 + max((s for p in parsed if p for _, rank, s in [p] if rank == self.rank), default=-1)
        while True:
            try:
                path = log / schema.stream_name("events", self.rank, segment)
                self._streams["events"] = Stream(path, schema.EVENTS.arrow_schema())
                return segment
            except FileExistsError:
                segment += 1  # another process was quicker

    def _open_stream(self, table_name: str, arrow_schema: pa.Schema) -> Stream:
        log = self.run_directory / schema.LOG_DIRECTORY
        return Stream(log / schema.stream_name(table_name, self.rank, self.segment), arrow_schema)

    def _append(self, table_name: str, columns: Steps, count: int = 1) -> None:
        if table_name not in self._streams:
            self._streams[table_name] = self._open_stream(table_name, schema.table(table_name).arrow_schema())
        self._streams[table_name].append(columns, count)

    def _append_blocks(self, blocks: Iterable[Block]) -> None:
        with self._lock:
            for block in blocks:
                self._append(block.table, block.columns, block.row_count)

    def _flush_regularly(self) -> None:
        """Runs in a thread of its own, so that rows also leave during a long step."""
        beat = time.monotonic()
        while not self._closed.wait(FLUSH_SECONDS / 4):
            with self._lock:
                for stream in self._streams.values():
                    if stream.oldest_age > FLUSH_SECONDS:
                        stream.flush()
            if time.monotonic() - beat > HEARTBEAT_SECONDS:
                beat = time.monotonic()
                _touch(self._streams["events"].path)

    def _after_write(self) -> None:
        """Tell of a broken stream once, or raise, as the user chose."""
        broken = [
            s for s in self._streams.values() if s.error is not None and s.path.name not in self._warned
        ]
        for stream in broken:
            self._warned.add(stream.path.name)
            line = f"{stream.path}: can not write: {stream.error}; its later rows are lost"
            if self._on_error == "raise":
                raise RecorderError(line) from stream.error
            print(f"recorder: {line}; training goes on", file=sys.stderr)

    def _close(self, kind: str, message: str, payload: Mapping[str, Any]) -> None:
        if self._closed.is_set():
            return
        self._append_blocks(self._signals.close_windows(self._last_step, self.capture))
        self.log_event(kind, message, payload=payload)
        self._closed.set()
        self._flusher.join()
        self.detach()
        for stream in self._streams.values():
            stream.close()
        self._after_write()
        lost = {name: s.lost_row_count for name, s in self._streams.items() if s.lost_row_count}
        if lost:
            rows = ", ".join(f"{count} of {name}" for name, count in lost.items())
            print(f"recorder: {self.run_directory}: rows lost: {rows}", file=sys.stderr)


def _column_values(column: Sequence[Any]) -> Any:
    """Names stay a sequence of str; numbers become an array."""
    return column if isinstance(column[0], str) else np.asarray(column)


def _microseconds() -> int:
    return time.time_ns() // 1000


def _touch(path: Path) -> None:
    """The heartbeat of a live run is the age of its events stream."""
    try:
        os.utime(path)
    except OSError:  # the directory was deleted under us: the next write tells
        return
