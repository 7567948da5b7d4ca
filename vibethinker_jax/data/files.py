"""Rows of JSONL, Parquet and CSV files, numbered so that every later error can name the line.

Row numbers start at 1: the line in JSONL and CSV (the one a record starts on), the row in Parquet.
"""

import csv
import io
import json
from collections.abc import Iterator
from typing import Any, NoReturn

from etils import epath

from vibethinker_jax.errors import UserError

NumberedRow = tuple[int, dict[str, Any]]


def read_rows(path: epath.Path) -> Iterator[NumberedRow]:
    """Yields (number, row) for every record of a file, by its suffix.

    Raises:
        UserError: absent file, unknown suffix, text that is not UTF-8, or a line that is not a JSON object.
    """
    readers = {".jsonl": _read_jsonl, ".parquet": _read_parquet, ".csv": _read_csv}
    if path.suffix not in readers:
        raise UserError(f"{path}: the suffix is {path.suffix!r}; use one of {', '.join(readers)}")
    if not path.is_file():
        raise UserError(f"{path}: no such file; give the path of a {path.suffix} file")
    return readers[path.suffix](path)


def parse_json(text: str, where: str) -> Any:
    """Strict JSON: NaN and infinities, which Python's parser would let through, are errors."""

    def refuse(constant: str) -> NoReturn:
        raise UserError(f"{where}: a value is {constant}, which is not JSON; write a finite number or null")

    try:
        return json.loads(text, parse_constant=refuse)
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: not JSON: {error.msg} at column {error.colno}; mend the line") from error
    except RecursionError as error:
        raise UserError(f"{where}: the JSON is nested too deeply; flatten it") from error


def _read_jsonl(path: epath.Path) -> Iterator[NumberedRow]:
    # Binary lines end at "\n" alone. Text mode and str.splitlines also split at characters such as U+2028,
    # which JSON allows inside strings.
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            where = f"{path}:{number}"
            text = _decode(line, where).removeprefix("\ufeff").rstrip()
            if not text:
                continue
            row = parse_json(text, where)
            if not isinstance(row, dict):
                raise UserError(f"{where}: the line is a {type(row).__name__}; write a JSON object")
            yield number, row


def _read_csv(path: epath.Path) -> Iterator[NumberedRow]:
    data = path.read_bytes()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path}:{line}: not UTF-8 ({error.reason}); convert the file to UTF-8") from error
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    number = 1
    try:
        header = next(reader, [])
        while True:
            number = reader.line_num + 1  # a quoted cell may span lines: this is where the next record starts
            cells = next(reader, None)
            if cells is None:
                return
            if not cells:
                continue
            if len(cells) != len(header):
                raise UserError(f"{path}:{number}: {len(cells)} cells under {len(header)} columns; mend the line")
            yield number, dict(zip(header, cells, strict=True))
    except csv.Error as error:
        raise UserError(f"{path}:{number}: not CSV: {error}; mend the line") from error


def _read_parquet(path: epath.Path) -> Iterator[NumberedRow]:
    import pyarrow  # imported here: the other formats load without it, and faster
    import pyarrow.parquet

    with path.open("rb") as file:
        try:
            batches = pyarrow.parquet.ParquetFile(file).iter_batches(batch_size=1024)
            number = 0
            for batch in batches:
                for row in batch.to_pylist():
                    number += 1
                    yield number, _without_nulls(row)
        except pyarrow.ArrowException as error:
            raise UserError(f"{path}: not a Parquet file that can be read: {error}; write it again") from error


def _without_nulls(value: Any) -> Any:
    """Drops null fields: a Parquet struct has every row's fields, so null is how a row says that it has none."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


def _decode(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{where}: byte {error.start} is 0x{data[error.start]:02x}, not UTF-8 ({error.reason}); "
            "convert the file to UTF-8"
        ) from error
