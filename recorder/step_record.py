"""What a training loop hands over: the columns of a step, and the losses of an evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from recorder import schema
from recorder.errors import RecorderError
from recorder.hooks import Array
from recorder.writer import DTYPES, Block, Value

if TYPE_CHECKING:
    from recorder.recorder import Recorder

_PYTHON_TYPES = {pa.float64(): float, pa.bool_(): bool}
_USUAL_TYPE = {column.name: _PYTHON_TYPES.get(column.type, int) for column in schema.STEPS.columns}
MADE_COLUMNS = frozenset(
    {"step", "wall_time", "step_seconds", "recorder_seconds", "train_loss", "gradient_cosine_previous"}
)
"""Columns of ``steps`` that the recorder fills in itself."""
LOGGED_COLUMNS = frozenset(schema.STEPS.column_names()) - MADE_COLUMNS


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
        self.micro_batches: list[Block] = []
        self._recorder = recorder

    def log(self, **columns: Value) -> None:
        """Set columns of this step's row of ``steps``: loss_sum, learning_rate, gradient_norm, ..."""
        if not columns.keys() <= LOGGED_COLUMNS:
            unknown = columns.keys() - LOGGED_COLUMNS
            if made := sorted(unknown & MADE_COLUMNS):
                raise RecorderError(
                    f"step {self.step}: {', '.join(made)}: filled in by the recorder; for the training loss "
                    "log loss_sum and loss_token_count"
                )
            raise RecorderError(
                f"step {self.step}: no column {', '.join(sorted(unknown))} in table steps; "
                f"expected some of {', '.join(sorted(LOGGED_COLUMNS))}"
            )
        self.logged.update(_checked(self.step, columns))

    def add_gradients(self, gradients: Mapping[str, Array]) -> None:
        """Give the finished gradients by parameter name, for a loop whose model has no hooks."""
        self._recorder.capture.gradients.update(gradients)

    def add_activations(self, activations: Mapping[str, Array]) -> None:
        """Give outputs of modules by name, real tokens only, for a loop whose model has no hooks."""
        self._recorder.capture.activations.update(activations)

    def log_micro_batch(self, *, loss_sum: float, loss_token_count: int, gradient_norm: float) -> None:
        """Record one micro-batch of an accumulated step: nats, tokens, and the norm of its own gradient."""
        row: dict[str, Value] = {"step": self.step, "micro": len(self.micro_batches)}
        logged = {"loss_sum": loss_sum, "loss_token_count": loss_token_count, "gradient_norm": gradient_norm}
        row |= _checked(self.step, logged)
        self.micro_batches.append(Block("micro_batches", 1, row))

    def __enter__(self) -> Self:
        self._recorder.begin_step(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        self._recorder.end_step(self, completed=kind is None)


_EXPECTED = {
    "b": "true or false",
    "f": "numbers",
    "i": "whole numbers",
    "u": "whole numbers from 0 to 2**64-1",
}
_FLOATS = (float, np.floating)
_LARGEST_EXACT = 2**53
"""Not every whole number beyond it is a float: one that came as a float has lost digits already."""


def column_array(what: str, column: Sequence[Any], arrow_type: pa.DataType) -> NDArray[Any]:
    """A copy of the column in that type. Raises RecorderError for a value that would become another one."""
    dtype = np.dtype(DTYPES[arrow_type])
    expected, is_float = _EXPECTED[dtype.kind], dtype.kind == "f"
    try:
        given = np.asarray(column)
        if given.dtype.kind == "f" and not is_float and not any(isinstance(v, _FLOATS) for v in column):
            given = np.array(column, object)  # NumPy makes floats of whole numbers below and above 2**63
        if given.dtype.kind not in ("biuf" if is_float else "biufO"):
            raise TypeError(f"values of type {given.dtype}")
        with np.errstate(invalid="ignore"):
            values = given.astype(dtype)
    except (TypeError, ValueError, OverflowError) as error:
        raise RecorderError(f"{what}: {error}; expected {expected}") from None
    if not is_float:
        is_changed = values != given
        if given.dtype.kind == "f":
            is_changed |= np.abs(given) > _LARGEST_EXACT
        if is_changed.any():
            raise RecorderError(f"{what} holds {given[is_changed].flat[0]}; expected {expected}")
    return values


def whole_step(step: Any) -> int:
    """The number of a step as Python's own. Raises RecorderError for anything else, such as 1.5."""
    number = step if type(step) is int else _number(step, int)
    if number is None:
        raise RecorderError(f"step={step!r}: expected a whole number")
    return int(number)


def _checked(step: int, columns: dict[str, Value]) -> dict[str, Value]:
    """The columns, numbers in their own types. Raises RecorderError for what would lose its meaning there.

    A wrong value must be told where it is logged: later, between other rows, nobody could say whose it was.
    """
    for name, value in columns.items():
        usual = _USUAL_TYPE[name]
        if type(value) is not usual and value is not None:
            columns[name] = number = _number(value, usual)
            if number is None:
                expected = {float: "a number", int: "a whole number", bool: "true or false"}[usual]
                raise RecorderError(
                    f"step {step}: {name}={value!r}: expected {expected}, or None when it was not measured"
                )
    return columns


def _number(value: Any, usual: type) -> float | int | bool | None:
    """The value as that type; None when it would be another one there."""
    plain = value.item() if isinstance(value, np.generic | np.ndarray) and value.size == 1 else value
    if not isinstance(plain, bool | int | float):
        return None
    is_whole = isinstance(plain, int) or (plain.is_integer() and abs(plain) <= _LARGEST_EXACT)
    if usual is float or (usual is bool and plain in (0, 1)) or (usual is int and is_whole):
        number: float | int | bool = usual(plain)
        return number
    return None
