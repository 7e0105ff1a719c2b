"""The loggers that are compared: how each writes the scalars of a step, and how it gives one curve back.

A writer is a context that yields ``log(step, values)``; values are (tensors, 8) float64. A curve is what a
person asks for first: the first statistic of the last tensor, at every step that can be read. Versions that
these were written for (2026-12-01): TensorBoard 2.21, wandb 0.31, trackio 0.43, trainscope 1.8.1.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from recorder import Manifest
from recorder.schema import TENSORS, WEIGHTS
from recorder.segment import Segment
from recorder.writer import Block, Matrix

MOMENTS = ("l2_norm", "mean", "mean_abs", "std", "min", "max", "zero_fraction")
STATISTICS = (*MOMENTS, "spectral_norm")
TRAINSCOPE_COLUMNS = (
    "grad_l2_norm",
    "grad_mean",
    "grad_max_abs",
    "weight_l2_norm",
    "weight_mean",
    "weight_std",
    "weight_min",
    "weight_max_abs",
)

Log = Callable[[int, np.ndarray], None]


@dataclass(frozen=True)
class Peer:
    """One logger."""

    name: str
    writer: Callable[[Path, int], contextlib.AbstractContextManager[Log]]  # (directory, tensors)
    curve: Callable[[Path, int], np.ndarray]  # (directory, tensors) -> (steps,)


def scalar_names(tensors: int) -> list[str]:
    """Names as a user would give them."""
    return [f"blocks.{index}.weight/{statistic}" for index in range(tensors) for statistic in STATISTICS]


def named(names: list[str], values: np.ndarray) -> dict[str, float]:
    """The scalars of one step by name."""
    return dict(zip(names, values.ravel().tolist(), strict=True))


@contextlib.contextmanager
def flight_recorder(directory: Path, tensors: int) -> Iterator[Log]:
    """The recorder's own write path: two blocks of rows a step, as the last statistic is one of weights."""
    directory.mkdir(parents=True)
    Manifest("benchmark").completed().write(directory)
    segment = Segment(directory, 0, "raise", fsync_seconds=0)
    ids = np.arange(tensors)

    def log(step: int, values: np.ndarray) -> None:
        key = {"step": step, "tensor_id": ids}
        columns = key | {"kind": "weight", "all_finite": True}
        moments, spectral_norms = Matrix(MOMENTS, values[:, :-1]), values[:, -1]
        segment.append(
            [
                Block(TENSORS.name, tensors, columns, moments),
                Block(WEIGHTS.name, tensors, key | {"spectral_norm": spectral_norms}),
            ]
        )

    yield log
    segment.close()


def flight_recorder_curve(directory: Path, tensors: int) -> np.ndarray:
    """By the analyzer, in SQL."""
    from analyzer.run_log import open_runs

    with open_runs([directory]) as run_log:
        sql = f"SELECT l2_norm FROM tensors WHERE tensor_id = {tensors - 1} ORDER BY step"
        return run_log.query(sql)["l2_norm"].to_numpy()


@contextlib.contextmanager
def raw_write(directory: Path, tensors: int) -> Iterator[Log]:
    """The floor: the same numbers as bytes, one write per step, no schema, no flush guarantee."""
    directory.mkdir(parents=True)
    with (directory / "raw.bin").open("wb", buffering=0) as file:
        yield lambda step, values: file.write(struct.pack("q", step) + values.tobytes()) and None


def raw_write_curve(directory: Path, tensors: int) -> np.ndarray:
    """One strided view of the whole file."""
    width = 1 + tensors * len(STATISTICS)
    numbers = np.fromfile(directory / "raw.bin", np.float64)
    return numbers[: len(numbers) // width * width].reshape(-1, width)[:, -len(STATISTICS)].copy()


@contextlib.contextmanager
def json_lines(directory: Path, tensors: int) -> Iterator[Log]:
    """One JSON object per step, flushed."""
    directory.mkdir(parents=True)
    names = scalar_names(tensors)
    with (directory / "log.jsonl").open("w", encoding="utf-8") as file:

        def log(step: int, values: np.ndarray) -> None:
            file.write(json.dumps({"step": step, **named(names, values)}) + "\n")
            file.flush()

        yield log


def json_lines_curve(directory: Path, tensors: int) -> np.ndarray:
    """Every line is parsed; a torn last one is left out."""
    name = scalar_names(tensors)[-len(STATISTICS)]
    lines = (directory / "log.jsonl").read_text(encoding="utf-8").split("\n")[:-1]
    return np.array([json.loads(line)[name] for line in lines])


@contextlib.contextmanager
def tensorboard(directory: Path, tensors: int) -> Iterator[Log]:
    """TensorBoard's own event writer, scalar by scalar."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(directory))
    names = scalar_names(tensors)

    def log(step: int, values: np.ndarray) -> None:
        for name, value in named(names, values).items():
            summary = Summary(value=[Summary.Value(tag=name, simple_value=value)])
            writer.add_event(Event(step=step, wall_time=time.time(), summary=summary))

    yield log
    writer.close()


def tensorboard_curve(directory: Path, tensors: int) -> np.ndarray:
    """By TensorBoard's own accumulator, which reads all events and keeps what it is asked to."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(directory), size_guidance={"scalars": 0})
    accumulator.Reload()
    name = scalar_names(tensors)[-len(STATISTICS)]
    return np.array([scalar.value for scalar in accumulator.Scalars(name)])


@contextlib.contextmanager
def wandb_offline(directory: Path, tensors: int) -> Iterator[Log]:
    """W&B in offline mode, one call per step."""
    import wandb

    directory.mkdir(parents=True)
    os.environ["WANDB_SILENT"] = "true"
    run = wandb.init(project="benchmark", mode="offline", dir=str(directory))
    names = scalar_names(tensors)
    yield lambda step, values: run.log(named(names, values), step=step)
    run.finish()


def wandb_offline_curve(directory: Path, tensors: int) -> np.ndarray:
    """No reader comes with the package: its record file, as LevelDB's log format has it."""
    from wandb.proto.wandb_internal_pb2 import Record

    name = scalar_names(tensors)[-len(STATISTICS)]
    (path,) = directory.rglob("*.wandb")
    values = []
    for payload in _leveldb_records(path.read_bytes()):
        record = Record()
        record.ParseFromString(payload)
        values += [json.loads(i.value_json) for i in record.history.item if name in (i.key, *i.nested_key)]
    return np.array(values)


def _leveldb_records(content: bytes) -> Iterator[bytes]:
    """Whole records: blocks of 32 KiB with chunks of (checksum, length, kind: whole, first, middle, last)."""
    position, record = 7, b""  # after the file's own header
    while position + 7 <= len(content):
        rest_of_block = -position % 32768
        if 0 < rest_of_block < 7:  # a chunk's header is never split
            position += rest_of_block
            continue
        _, length, kind = struct.unpack_from("<IHB", content, position)
        chunk = content[position + 7 : position + 7 + length]
        if kind == 0 or len(chunk) < length:
            return
        position += 7 + length
        record = chunk if kind in (1, 2) else record + chunk
        if kind in (1, 4):
            yield record


@contextlib.contextmanager
def trackio(directory: Path, tensors: int) -> Iterator[Log]:
    """Trackio on its local SQLite store, one call per step."""
    os.environ["TRACKIO_DIR"] = str(directory)
    import trackio as library

    names = scalar_names(tensors)
    with contextlib.redirect_stdout(io.StringIO()):
        library.init(project="benchmark", embed=False)
        yield lambda step, values: library.log(named(names, values), step=step)
        library.finish()


def trackio_curve(directory: Path, tensors: int) -> np.ndarray:
    """By its own storage class, which parses every step's JSON."""
    os.environ["TRACKIO_DIR"] = str(directory)
    from trackio.sqlite_storage import SQLiteStorage

    (run,) = SQLiteStorage.get_runs("benchmark")
    name = scalar_names(tensors)[-len(STATISTICS)]
    return np.array([row["value"] for row in SQLiteStorage.get_metric_values("benchmark", run, name)])


@contextlib.contextmanager
def trainscope(directory: Path, tensors: int) -> Iterator[Log]:
    """trainscope's writer, which has a file per layer; eight of its layer columns take the statistics."""
    from trainscope.core.config import TrainScopeConfig
    from trainscope.io.writer import DiskWriter

    names = [f"blocks.{index}.weight" for index in range(tensors)]
    with DiskWriter(directory, TrainScopeConfig()) as writer:

        def log(step: int, values: np.ndarray) -> None:
            for name, row in zip(names, values.tolist(), strict=True):
                columns = dict(zip(TRAINSCOPE_COLUMNS, row, strict=True))
                writer.append_layer(name, {"step": step, **columns})

        yield log


def trainscope_curve(directory: Path, tensors: int) -> np.ndarray:
    """By its own reader, of one layer's file."""
    from trainscope.io.writer import read_arrow_rows_sync

    path = directory / "layers" / f"blocks.{tensors - 1}.weight.arrow"
    return np.array([row[TRAINSCOPE_COLUMNS[0]] for row in read_arrow_rows_sync(path)])


PEERS = (
    Peer("flight recorder", flight_recorder, flight_recorder_curve),
    Peer("raw write", raw_write, raw_write_curve),
    Peer("json lines", json_lines, json_lines_curve),
    Peer("tensorboard", tensorboard, tensorboard_curve),
    Peer("wandb offline", wandb_offline, wandb_offline_curve),
    Peer("trackio", trackio, trackio_curve),
    Peer("trainscope", trainscope, trainscope_curve),
)
