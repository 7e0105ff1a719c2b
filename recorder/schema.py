"""The log contract: tables, columns, dtypes, units and file names.

A file is the only thing that recorder and analyzer share; this module is its definition.
STREAMS is what a segment writes, TABLES is what its reader shows: they differ in ``tensors``, whose rows are
by far the most, and in the width of some integers. The analyzer's help and the README's table are generated
from it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import pyarrow as pa

SCHEMA_VERSION = 2
"""Raised when a column changes its meaning or its type; new nullable columns do not raise it.

1: a row of ``tensors`` has everything, in 95 bytes. 2: in 46; ``nonfinite`` and ``weights`` have the rest.
"""

VERSION_KEY = b"flight_recorder.schema_version"
TABLE_KEY = b"flight_recorder.table"

LOG_DIRECTORY = "log"
MANIFEST_FILE = "manifest.json"
CHECKPOINT_DIRECTORY = "checkpoints"
DASHBOARD_FILE = "dashboard.html"

TENSOR_KINDS = ("weight", "gradient", "activation", "activation_gradient", "update")
"""What a row of ``tensors`` describes; ``update`` is w_(s+1) - w_s."""

WALL_TIME = pa.timestamp("us", tz="UTC")
KEYED_STRING = pa.dictionary(pa.int16(), pa.string())
"""Repeated strings are stored once per stream and referred to by a 2-byte key."""
KEYED_KIND = pa.dictionary(pa.int8(), pa.string())
"""The same with a 1-byte key, for at most 128 different strings."""
KEYED_LABEL = pa.dictionary(pa.int32(), pa.string())
"""The same with a 4-byte key, for label columns: each example may have a label of its own."""
HASH = pa.uint64()

CLOSING_EVENTS = ("finished", "exception")
"""Kinds of the event that closes a segment: ``rows`` in its payload counts the rows of each stream."""


@dataclass(frozen=True)
class Column:
    """One logged quantity: its Arrow type, its unit in words and what it says."""

    name: str
    type: pa.DataType
    unit: str
    description: str
    stored_type: pa.DataType | None = None  # in the stream, where that is narrower


@dataclass(frozen=True)
class Table:
    """A table of the log; ``key`` columns identify a row of a rank and segment."""

    name: str
    row: str
    key: tuple[str, ...]
    columns: tuple[Column, ...]
    open_columns: bool = False  # the user may add label columns of his own

    def arrow_schema(self) -> pa.Schema:
        """What a reader gets, whatever the width in the stream."""
        return pa.schema([pa.field(c.name, c.type) for c in self.columns])

    def stream_schema(self) -> pa.Schema:
        """The stream's Arrow schema, with table name and schema version in its metadata."""
        metadata = {VERSION_KEY: str(SCHEMA_VERSION).encode(), TABLE_KEY: self.name.encode()}
        return pa.schema([pa.field(c.name, c.stored_type or c.type) for c in self.columns], metadata=metadata)

    def column_names(self) -> tuple[str, ...]:
        """Names in stream order."""
        return tuple(column.name for column in self.columns)


def _integer(name: str, unit: str, description: str, stored_type: pa.DataType | None = None) -> Column:
    return Column(name, pa.int64(), unit, description, stored_type)


def _float(name: str, unit: str, description: str) -> Column:
    return Column(name, pa.float64(), unit, description)


def _statistic(name: str, unit: str, description: str) -> Column:
    return Column(name, pa.float32(), unit, description)


def _hash(name: str, description: str) -> Column:
    return Column(name, HASH, "64-bit hash", description)


def _flag(name: str, description: str) -> Column:
    return Column(name, pa.bool_(), "true or false", description)


def _text(name: str, description: str) -> Column:
    return Column(name, pa.string(), "text", description)


STEP = _integer("step", "optimizer updates", "the row describes the weights after this many updates")
NARROW_STEP = dataclasses.replace(STEP, stored_type=pa.int32())
"""For tables with many rows a step. The writer refuses what does not fit: two billion steps are far away."""
WALL_CLOCK = Column("wall_time", WALL_TIME, "UTC", "when the row was made")
TENSOR_ID = Column("tensor_id", pa.int32(), "id", "joins tensor_names within a rank and segment")
LAYER = Column("layer", pa.int32(), "index", "block of the model, counted from 0")
SPLIT = Column("split", KEYED_STRING, "name", "data split")
EXAMPLE_ID = _integer("example_id", "id", "joins examples")
LOSS_SUM = _float("loss_sum", "nats", "sum of the negative log-likelihood over the counted tokens")
TOKEN_COUNT = _integer("token_count", "tokens", "tokens that loss_sum is over")
ANSWER_LOSS_SUM = _float("answer_loss_sum", "nats", "the same over the tokens after the prompt")
ANSWER_TOKEN_COUNT = _integer("answer_token_count", "tokens", "tokens that answer_loss_sum is over")
NARROW_TOKEN_COUNT = dataclasses.replace(TOKEN_COUNT, stored_type=pa.int32())
NARROW_ANSWER_TOKEN_COUNT = dataclasses.replace(ANSWER_TOKEN_COUNT, stored_type=pa.int32())

STEPS = Table(
    "steps",
    "optimizer step",
    ("step",),
    (
        STEP,
        WALL_CLOCK,
        _float("step_seconds", "s", "duration of the step, recorder included: also what the row before cost"),
        _float("recorder_seconds", "s", "the recorder's own share of step_seconds"),
        _integer("epoch", "passes", "pass over the training data, from 0"),
        _integer("data_position", "examples", "examples of this epoch consumed before the step"),
        _float("objective", "as trained", "the scalar that was backpropagated"),
        LOSS_SUM,
        _integer("loss_token_count", "tokens", "tokens that loss_sum is over"),
        _integer("non_padding_token_count", "tokens", "target tokens of the batch that are not padding"),
        _integer("example_count", "examples", "examples in the batch"),
        _float("train_loss", "nats/token", "loss_sum / loss_token_count"),
        _float("learning_rate", "1", "learning rate of the update that follows"),
        _float("planned_learning_rate", "1", "what the declared schedule says for this step"),
        _float("gradient_norm", "objective/weight", "L2 norm over all parameters, before clipping"),
        _float("clipped_gradient_norm", "objective/weight", "the same after clipping"),
        _float("gradient_cosine_previous", "-1..1", "cosine between this gradient and the step before's"),
        _integer("accumulation_count", "micro-batches", "micro-batches summed into the gradient"),
        _float("loss_scale", "1", "factor on the loss in mixed precision; 1 without"),
        _hash("batch_hash", "token ids and targets of the batch"),
        _hash("order_hash", "order of the examples of the epoch"),
        _hash("weights_hash", "all weights before the update"),
        _hash("optimizer_hash", "optimizer state before the update"),
        _hash("rng_hash", "state of the training random generator"),
        _flag("training_mode", "model was in training mode (dropout on)"),
    ),
)

MICRO_BATCHES = Table(
    "micro_batches",
    "micro-batch of an accumulated step",
    ("step", "micro"),
    (
        STEP,
        _integer("micro", "index", "micro-batch within the step, from 0"),
        LOSS_SUM,
        _integer("loss_token_count", "tokens", "tokens that loss_sum is over"),
        _float("gradient_norm", "objective/weight", "L2 norm of the micro-batch's own gradient"),
    ),
)

KIND = Column("kind", KEYED_STRING, "name", "one of " + ", ".join(TENSOR_KINDS), KEYED_KIND)
HAS_GRADIENT = _flag("has_gradient", "false: backward never reached the tensor; null: not a gradient")
ALL_FINITE = _flag("all_finite", "false: the counts are in nonfinite; null: nothing was counted")
MOMENTS = (
    _integer("element_count", "elements", "elements seen; real tokens only for activations", pa.uint32()),
    _float("l2_norm", "as tensor", "Euclidean norm over finite elements"),
    _statistic("mean", "as tensor", "mean over finite elements"),
    _statistic("mean_abs", "as tensor", "mean absolute value over finite elements"),
    _statistic("std", "as tensor", "population standard deviation over finite elements"),
    _statistic("min", "as tensor", "smallest finite element"),
    _statistic("max", "as tensor", "largest finite element"),
    _statistic("zero_fraction", "0..1", "share of finite elements that are exactly zero"),
)
NONFINITE_COUNTS = (
    _integer("nan_count", "elements", "NaN elements"),
    _integer("positive_infinity_count", "elements", "+inf elements"),
    _integer("negative_infinity_count", "elements", "-inf elements"),
)
WEIGHT_VALUES = (
    _statistic("spectral_norm", "as tensor", "largest singular value: lower bound by Lanczos iteration"),
    _statistic("spectral_norm_upper", "as tensor", "certified upper bound of the same"),
    _hash("content_hash", "bytes of the tensor"),
)

TENSOR_ROWS = Table(
    "tensors",
    "recorded step, tensor and kind",
    ("step", "tensor_id", "kind"),
    # The norm keeps 64 bits: that of a float32 tensor can be beyond the range of float32.
    (NARROW_STEP, TENSOR_ID, KIND, *MOMENTS, HAS_GRADIENT, ALL_FINITE),
)

NONFINITE = Table(
    "nonfinite",
    "row of tensors that is not all_finite",
    TENSOR_ROWS.key,
    (NARROW_STEP, TENSOR_ID, KIND, *NONFINITE_COUNTS),
)

WEIGHTS = Table(
    "weights",
    "weight at steps where one of these is due",
    ("step", "tensor_id"),
    (NARROW_STEP, TENSOR_ID, *WEIGHT_VALUES),
)

TENSORS = Table(
    TENSOR_ROWS.name,
    TENSOR_ROWS.row,
    TENSOR_ROWS.key,
    (STEP, TENSOR_ID, KIND, *MOMENTS, *NONFINITE_COUNTS, HAS_GRADIENT, *WEIGHT_VALUES),
)
"""What a reader makes of these three: counts of 0 where a row is all finite, null for values not due."""

TENSOR_NAMES = Table(
    "tensor_names",
    "tensor",
    ("tensor_id",),
    (
        TENSOR_ID,
        _text("name", "full dotted name"),
        _text("module", "module that owns or makes it"),
        LAYER,
        _text("role", "what it is: embedding, attention, relu, ..."),
        _text("shape", "shape as JSON; the leading axes of activations are tokens and left out"),
        _text("dtype", "element type"),
        _flag("trainable", "the optimizer updates it; null for activations"),
        _flag("weight_decay", "the optimizer decays it; null for activations"),
        _text("tied_to", "other name of the same memory"),
    ),
)

UNITS = Table(
    "units",
    "window of steps and layer",
    ("step", "layer"),
    (
        Column("step", pa.int64(), "optimizer updates", "last step of the window"),
        LAYER,
        _integer("window_steps", "steps", "steps that the window covers"),
        _integer("unit_count", "units", "units of the layer's activation function"),
        _integer("dead_unit_count", "units", "units that were zero on every real token of the window"),
        _integer("token_count", "tokens", "real tokens seen in the window"),
    ),
)

ATTENTION = Table(
    "attention",
    "recorded step, layer and head",
    ("step", "layer", "head"),
    (
        NARROW_STEP,
        LAYER,
        Column("head", pa.int32(), "index", "attention head, from 0"),
        _statistic("entropy", "0..1", "mean entropy of a row / ln(its allowed keys), rows with >= 2 keys"),
        _statistic("first_row_entropy", "nats", "entropy of query 0, which may see one key only"),
        _float("future_mass", "0..1", "mean attention that a real query gives to later keys"),
        _float("future_mass_beyond_next", "0..1", "the same to keys later than the next one"),
        _statistic("max_abs_logit", "nats", "largest absolute logit between a real query and a real key"),
    ),
)

EVALUATIONS = Table(
    "evaluations",
    "step, split and repeat",
    ("step", "split", "repeat"),
    (
        STEP,
        SPLIT,
        Column("repeat", pa.int32(), "index", "0, or more when the same weights are evaluated again"),
        LOSS_SUM,
        TOKEN_COUNT,
        ANSWER_LOSS_SUM,
        ANSWER_TOKEN_COUNT,
        _hash("weights_hash", "the weights that were evaluated"),
        _flag("evaluation_mode", "dropout was off"),
    ),
)

EXAMPLE_LOSSES = Table(
    "example_losses",
    "step, split and example",
    ("step", "split", "example_id"),
    (
        NARROW_STEP,
        SPLIT,
        EXAMPLE_ID,
        LOSS_SUM,
        NARROW_TOKEN_COUNT,
        ANSWER_LOSS_SUM,
        NARROW_ANSWER_TOKEN_COUNT,
        _flag("correct", "every answer token had the highest probability, given the true ones before it"),
    ),
)

EXAMPLES = Table(
    "examples",
    "example",
    ("example_id",),
    (EXAMPLE_ID, SPLIT, _hash("content_hash", "the full token sequence")),
    open_columns=True,
)

EVENTS = Table(
    "events",
    "event",
    (),
    (
        STEP,
        WALL_CLOCK,
        Column("kind", KEYED_STRING, "name", "segment_started, finished, exception, warning, ..."),
        _text("message", "one line for a person"),
        _text("payload", "JSON object"),
    ),
)

STREAMS = (
    STEPS,
    MICRO_BATCHES,
    TENSOR_ROWS,
    NONFINITE,
    WEIGHTS,
    TENSOR_NAMES,
    UNITS,
    ATTENTION,
    EVALUATIONS,
    EXAMPLE_LOSSES,
    EXAMPLES,
    EVENTS,
)
"""One Arrow IPC stream each per rank and segment."""
WRITTEN_BEFORE = {TENSOR_ROWS.name: (NONFINITE.name, WEIGHTS.name)}
"""Streams whose rows must be in their file before the rows of this one that they belong to."""
TABLES = tuple(TENSORS if t == TENSOR_ROWS else t for t in STREAMS if t not in (NONFINITE, WEIGHTS))


def stream(name: str) -> Table:
    """What the stream of that name holds; KeyError when the contract has none."""
    return {s.name: s for s in STREAMS}[name]


def table(name: str) -> Table:
    """What a reader makes of the stream of that name; KeyError when the contract has none."""
    return {t.name: t for t in (*STREAMS, *TABLES)}[name]


def stream_name(table_name: str, rank: int, segment: int) -> str:
    """File name of one stream, for example ``steps-r0-s0.arrows``."""
    return f"{table_name}-r{rank}-s{segment}.arrows"


def parse_stream_name(file_name: str) -> tuple[str, int, int] | None:
    """(table, rank, segment) of a stream's file name; None for any other file."""
    stem, dot, suffix = file_name.rpartition(".")
    parts = stem.rsplit("-", 2)
    if suffix != "arrows" or not dot or len(parts) != 3 or parts[0] not in {s.name for s in STREAMS}:
        return None
    name, rank, segment = parts
    if rank[:1] != "r" or segment[:1] != "s" or not (rank[1:] + segment[1:]).isdigit():
        return None
    return name, int(rank[1:]), int(segment[1:])


def markdown_table() -> str:
    """The streams as a Markdown table, one row per stream; the README carries it."""
    rows = [f"| `{s.name}` | {s.row} | {', '.join(s.column_names())} |" for s in STREAMS]
    return "\n".join(["| stream | one row per | columns |", "|---|---|---|", *rows])
