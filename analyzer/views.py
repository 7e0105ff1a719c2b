"""Streams of one or more runs -> DuckDB views: each table's current rows, and `<table>_all`.

A row is current if its step is below the first step of every later segment of its run and rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import duckdb
import pyarrow as pa
import pyarrow.compute as pc

from analyzer.streams import Stream
from recorder.schema import EXAMPLES, TABLES, TENSOR_NAMES, Table

STUDENT_T_975 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
    1.960,
)
"""0.975 quantiles of Student's t for 1 to 30 degrees of freedom, the normal's beyond.

Source: NIST/SEMATECH e-Handbook of Statistical Methods, section 1.3.6.7.2.
"""


@dataclass(frozen=True)
class LoadedStream:
    """A stream under the name that DuckDB knows it by."""

    run: str
    stream: Stream
    relation: str  # name of the registered Arrow table
    current_below: int | None  # first step of the later segments; None when there is none

    def selection(self, current: bool) -> str:
        """SELECT of this stream's rows, all or only the current ones."""
        has_step = "step" in self.stream.table.column_names()
        cut = f" WHERE step IS NULL OR step < {self.current_below}"
        where = cut if current and has_step and self.current_below is not None else ""
        return f"SELECT {self._identity()}, * FROM {self.relation}{where}"

    def _identity(self) -> str:
        return (
            f"{quoted(self.run)} AS run, CAST({self.stream.rank} AS INTEGER) AS rank, "
            f"CAST({self.stream.segment} AS INTEGER) AS segment"
        )


def quoted(text: str) -> str:
    """The SQL string literal of a text."""
    return "'" + text.replace("'", "''") + "'"


def identifier(name: str) -> str:
    """The quoted SQL identifier of a name."""
    return '"' + name.replace('"', '""') + '"'


def create_table_views(
    connection: duckdb.DuckDBPyConnection, streams: Mapping[str, Sequence[Stream]]
) -> tuple[LoadedStream, ...]:
    """Register every stream and create the views of all tables; a table without a stream is empty."""
    loaded = tuple(_loaded(streams))
    for item in loaded:
        connection.register(item.relation, item.stream.rows)
    for table in TABLES:
        mine = [item for item in loaded if item.stream.table == table]
        _create_view(connection, f"{table.name}_all", table, mine, current=False)
        kept = _newest_with_rows(mine) if table == EXAMPLES else mine
        _create_view(connection, table.name, table, kept, current=table != TENSOR_NAMES)
    _create_example_labels(connection, [item for item in loaded if item.stream.table == EXAMPLES])
    return loaded


def _loaded(streams: Mapping[str, Sequence[Stream]]) -> list[LoadedStream]:
    loaded: list[LoadedStream] = []
    for run, run_streams in streams.items():
        first_steps = {(s.rank, s.segment): _first_step(s) for s in run_streams if s.table.name == "steps"}
        for stream in run_streams:
            later = [
                step
                for (rank, segment), step in first_steps.items()
                if rank == stream.rank and segment > stream.segment and step is not None
            ]
            relation = f"stream_{len(loaded)}"
            loaded.append(LoadedStream(run, stream, relation, min(later, default=None)))
    return loaded


def _first_step(stream: Stream) -> int | None:
    first: int | None = pc.min(stream.rows.column("step")).as_py()
    return first


def _newest_with_rows(items: Sequence[LoadedStream]) -> list[LoadedStream]:
    """Per run, the newest segment with rows, of the lowest rank: each restart lists all examples again."""
    newest: dict[str, LoadedStream] = {}
    for item in sorted(items, key=lambda i: (-i.stream.rank, i.stream.segment)):
        if item.stream.rows.num_rows:
            newest[item.run] = item
    return list(newest.values())


def _create_view(
    connection: duckdb.DuckDBPyConnection,
    name: str,
    table: Table,
    items: Sequence[LoadedStream],
    current: bool,
) -> None:
    selections = [item.selection(current) for item in items]
    if not selections:
        empty = f"empty_{table.name}"
        connection.register(empty, table.arrow_schema().empty_table())
        selections = [
            "SELECT CAST(NULL AS VARCHAR) AS run, CAST(NULL AS INTEGER) AS rank, "
            f"CAST(NULL AS INTEGER) AS segment, * FROM {empty}"
        ]
    connection.execute(f"CREATE OR REPLACE VIEW {name} AS " + " UNION ALL BY NAME ".join(selections))


def _create_example_labels(connection: duckdb.DuckDBPyConnection, items: Sequence[LoadedStream]) -> None:
    """View `example_labels`: the label columns of `examples` in long form, null labels left out."""
    labels = list(
        dict.fromkeys(name for item in _newest_with_rows(items) for name in item.stream.label_columns())
    )
    selections = [
        f"SELECT run, example_id, {quoted(name)} AS label, CAST({identifier(name)} AS VARCHAR) AS value "
        f"FROM examples WHERE {identifier(name)} IS NOT NULL"
        for name in labels
    ] or [
        "SELECT run, example_id, CAST(NULL AS VARCHAR) AS label, CAST(NULL AS VARCHAR) AS value "
        "FROM examples WHERE false"
    ]
    connection.execute("CREATE OR REPLACE VIEW example_labels AS " + " UNION ALL ".join(selections))


def create_segments(connection: duckdb.DuckDBPyConnection, loaded: Sequence[LoadedStream]) -> None:
    """View `segments`: the steps and the start of each segment, and the step its rows are current below."""
    keys = sorted(
        {(i.run, i.stream.rank, i.stream.segment, i.current_below) for i in loaded}, key=lambda k: k[:3]
    )
    columns = list(zip(*keys, strict=True)) or [(), (), (), ()]
    types = (pa.string(), pa.int32(), pa.int32(), pa.int64())
    names = ("run", "rank", "segment", "current_below")
    arrays = [pa.array(column, type) for column, type in zip(columns, types, strict=True)]
    connection.register("loaded_segments", pa.table(arrays, names=names))
    connection.execute(
        """
        CREATE OR REPLACE VIEW segments AS
        SELECT run, rank, segment, first_step, last_step, resumed_at, current_below
        FROM loaded_segments
        LEFT JOIN (
            SELECT run, rank, segment, min(step) AS first_step, max(step) AS last_step
            FROM steps_all GROUP BY ALL
        ) USING (run, rank, segment)
        LEFT JOIN (
            SELECT run, rank, segment, min(wall_time) AS resumed_at FROM events_all GROUP BY ALL
        ) USING (run, rank, segment)
        ORDER BY run, rank, segment
        """
    )


def create_t_quantiles(connection: duckdb.DuckDBPyConnection) -> None:
    """View `t_quantiles` (degrees_of_freedom, quantile) for two-sided 95% intervals; 31 stands for more."""
    degrees = pa.array(range(1, len(STUDENT_T_975) + 1), pa.int64())
    quantiles = pa.table({"degrees_of_freedom": degrees, "quantile": pa.array(STUDENT_T_975, pa.float64())})
    connection.register("t_quantiles", quantiles)
