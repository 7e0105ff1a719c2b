"""Results as tables, CSV and JSON: nothing is lost, and null, NaN and infinity stay apart."""

from __future__ import annotations

import json
import math
import os
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from analyzer.errors import AnalyzerError
from analyzer.output import csv_text, json_text, table_text, write_parquet, write_whole

NUMBERS = pa.table({"x": pa.array([1.5, math.nan, math.inf, -math.inf, None])})


def test_json_spells_non_finite_numbers() -> None:
    """JSON has no NaN: the words of the design stand for it, and null stays null."""
    values = [row["x"] for row in json.loads(json_text(NUMBERS))]
    assert values == [1.5, "NaN", "Infinity", "-Infinity", None]


def test_csv_spells_non_finite_numbers() -> None:
    """Null is the empty field."""
    assert csv_text(NUMBERS) == 'x\n1.5\nNaN\nInfinity\n-Infinity\n""\n'


def test_a_table_spells_non_finite_numbers() -> None:
    """Numbers stand at the right, under their name."""
    text, left_out = table_text(NUMBERS, None)
    assert text == "        x\n      1.5\n      NaN\n Infinity\n-Infinity\n     NULL\n"
    assert left_out is None


OTHER_TYPES: list[tuple[pa.Array, Any]] = [
    (pa.array([datetime(2026, 1, 2, 3, tzinfo=UTC)]), "2026-01-02T03:00:00+00:00"),
    (pa.array([1], pa.timestamp("ns")), "1970-01-01T00:00:00"),
    (pa.array([date(2026, 1, 2)]), "2026-01-02"),
    (pa.array([Decimal("12")], pa.decimal128(38, 0)), 12),
    (pa.array([Decimal("0.25")], pa.decimal128(5, 2)), 0.25),
    (pa.array([[1.0, math.nan]]), [1.0, "NaN"]),
    (pa.array([{"a": math.inf}]), {"a": "Infinity"}),
    (pa.array([b"\x01\xff"]), "01ff"),
    (pa.array([True]), True),
    (pa.array([2**64 - 1], pa.uint64()), 2**64 - 1),
    (pa.array([0.1], pa.float32()), 0.1),
    (pa.array([pa.MonthDayNano([1, 2, 3_000_000_000])]), "1 months 2 days 3 s"),
    (pa.array(["a"]).dictionary_encode(), "a"),
    (pa.nulls(1), None),
]


@pytest.mark.parametrize(
    ("values", "expected"), OTHER_TYPES, ids=[str(values.type) for values, _ in OTHER_TYPES]
)
def test_every_type_prints(values: pa.Array, expected: object) -> None:
    """What DuckDB can return has a form in JSON."""
    assert json.loads(json_text(pa.table({"x": values}))) == [{"x": expected}]


def test_nested_values_are_json_in_csv() -> None:
    """A list is one field, quoted where it must be."""
    assert csv_text(pa.table({"x": [[1, 2]], "flag": [True]})) == 'x,flag\n"[1, 2]",true\n'


def test_columns_of_one_name_are_numbered_in_json() -> None:
    """A JSON object holds each name once."""
    table = pa.table([pa.array([1]), pa.array([2])], names=["x", "x"])
    assert json.loads(json_text(table)) == [{"x": 1, "x_2": 2}]


def test_no_rows_are_an_empty_array() -> None:
    """A program can always parse the answer."""
    empty = pa.table({"x": pa.array([], pa.int64())})
    assert (json.loads(json_text(empty)), csv_text(empty)) == ([], "x\n")


def test_a_table_is_cut_to_the_terminal_and_says_so() -> None:
    """Rows and columns that do not fit are counted."""
    table = pa.table({f"column_{i}": list(range(100)) for i in range(20)})
    text, left_out = table_text(table, os.terminal_size((40, 24)))
    lines = text.splitlines()
    assert len(lines) == 21
    assert max(len(line) for line in lines) <= 40
    assert left_out == "20 of 100 rows shown, 4 of 20 columns shown; --csv or --json print all"


def test_a_table_in_a_pipe_is_whole() -> None:
    """Without a terminal nothing is shortened."""
    long = "x" * 200
    text, left_out = table_text(pa.table({"x": [long] * 100}), None)
    assert (text.count(long), left_out) == (100, None)


def test_floats_in_a_table_have_six_digits() -> None:
    """A person compares, a program reads CSV."""
    table = pa.table({"x": [1 / 3, 1e-9 / 3]})
    assert table_text(table, None)[0] == "          x\n   0.333333\n3.33333e-10\n"
    assert csv_text(table) == f"x\n{1 / 3}\n{1e-9 / 3}\n"


def test_parquet_holds_the_same_rows(tmp_path: Path) -> None:
    """NaN and null stay apart in the file."""
    write_parquet(tmp_path / "x.parquet", NUMBERS)
    read = pq.read_table(tmp_path / "x.parquet").column("x")
    assert (read.null_count, math.isnan(read[1].as_py())) == (1, True)


def test_a_type_that_parquet_lacks_is_one_line(tmp_path: Path) -> None:
    """An interval has no Parquet form; the error says what to do, and leaves no file."""
    table = pa.table({"x": pa.array([pa.MonthDayNano([1, 2, 3])])})
    with pytest.raises(AnalyzerError, match=r"Parquet has no such type: .*: cast the column"):
        write_parquet(tmp_path / "x.parquet", table)
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    """A writer that fails leaves the old file, and nothing of its own."""
    path = tmp_path / "page.html"
    path.write_text("old")

    def failing(file: Any) -> None:
        file.write(b"half")
        raise OSError(28, "No space left on device")

    with pytest.raises(AnalyzerError) as caught:
        write_whole(path, failing)
    assert str(caught.value) == f"{path}: cannot write: No space left on device: name another file with -o"
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("page.html", "old")]
