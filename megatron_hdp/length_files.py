"""Document lengths from a corpus or a list. No torch.

| file | what is read |
|---|---|
| .idx | Megatron's index (the .bin must lie beside it; no token is read) |
| .jsonl | field `length`, else the number of `tokens`, or a named field of either kind |
| .parquet | the same with columns; needs pyarrow |
| .csv | the only column, else the one named `length`, or a named one; with or without a header |
| .txt | one length a line |
"""

import csv
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from megatron_hdp.data.indexed import IndexedFile
from megatron_hdp.errors import ConfigError, DataError
from megatron_hdp.types import IntArray

_LONGEST = 1 << 40
"""No document is longer: more than all text there is."""


def read_lengths(path: str | Path, field: str | None = None) -> IntArray:
    """Tokens of every document of a file, int64 [documents], in the order of the file; empty documents are 0.

    Args:
        path: a file of a kind listed above, by its ending; or the prefix of an .idx, as --data-path takes it.
        field: field or column to read from .jsonl, .parquet and .csv: lengths, or lists whose lengths count.

    Raises:
        DataError: missing or empty file, unknown ending, a length that is no whole number from 0 to 2^40, or a column
            or field that is there twice; names the line (the row for .parquet).
        ConfigError: ``field`` for a kind of file that has none.
    """
    path = Path(path)
    if not path.is_file() and Path(f"{path}.idx").is_file():
        path = Path(f"{path}.idx")
    reader = _READERS.get(path.suffix.lower())
    if path.is_dir():
        raise DataError(f"{path}: is a folder, not a file with lengths")
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    if reader is None:
        raise DataError(f"{path}: lengths are read from {', '.join(_READERS)}, not from {path.suffix or 'no ending'!r}")
    if field is not None and path.suffix.lower() in (".idx", ".txt"):
        raise ConfigError(f"field {field!r}: {path.suffix} files have no fields; leave it out")
    if path.stat().st_size == 0:
        raise DataError(f"{path}: empty file (0 bytes)")
    lengths = reader(path, field)
    if lengths.size == 0:
        raise DataError(f"{path}: no lengths in it")
    total = float(lengths.sum(dtype=np.float64))
    if total >= 2**63:
        raise DataError(f"{path}: the lengths add up to {total:.2g} tokens: are these numbers really lengths?")
    return lengths


def _read_idx(path: Path, field: str | None) -> IntArray:
    prefix = str(path.with_suffix(""))
    if not Path(f"{prefix}.bin").is_file():
        raise DataError(f"{path}: {prefix}.bin is missing: an index is read with its .bin beside it, as training does")
    return IndexedFile.open(prefix).lengths.astype(np.int64)


def _read_txt(path: Path, field: str | None) -> IntArray:
    with _opened(path) as file:
        return _array(_whole(text, path, f"line {number}") for number, text in _lines(file, path))


def _read_jsonl(path: Path, field: str | None) -> IntArray:
    with _opened(path) as file:
        return _array(_json_length(text, path, number, field) for number, text in _lines(file, path))


def _json_length(text: str, path: Path, number: int, field: str | None) -> int:
    """Length in one line of JSON."""
    where = f"line {number}"
    try:
        record = json.loads(text, object_pairs_hook=_fields)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}, {where}: not valid JSON: {error}") from error
    if isinstance(record, _Twice):
        raise DataError(f"{path}, {where}: field {record.name!r} appears twice: which one counts?")
    if not isinstance(record, dict):
        raise DataError(f"{path}, {where}: expected an object with fields, found {text[:40]!r}")
    name = next((n for n in ([field] if field is not None else ["length", "tokens"]) if n in record), None)
    if name is None:
        wanted = f"no field {field!r}" if field is not None else "neither a field 'length' nor 'tokens'"
        listed = ", ".join(map(str, record)) or "none"
        raise DataError(f"{path}, {where}: {wanted} (fields: {listed}); name one with --field")
    value = record[name]
    return len(value) if isinstance(value, list) else _whole(value, path, f"{where}, field {name!r}")


@dataclass(frozen=True)
class _Twice:
    """An object of JSON with two fields of the same name, of which Python would keep the last one silently."""

    name: str


def _fields(pairs: list[tuple[str, Any]]) -> dict[str, Any] | _Twice:
    """An object of JSON. Only the outermost one is looked at, so inner ones may be what they like."""
    record = dict(pairs)
    if len(record) == len(pairs):
        return record
    names = [name for name, _ in pairs]
    return _Twice(next(name for name in names if names.count(name) > 1))


def _read_csv(path: Path, field: str | None) -> IntArray:
    with _opened(path, newline="") as file, _fields_of_any_size():
        rows = csv.reader(file)
        try:
            first = next((row for row in rows if row), [])
            number = rows.line_num
            has_header = not any(_is_number(cell) for cell in first)
            names = [cell.strip() for cell in first] if has_header else None
            column = _column(names, len(first), path, number, field)
            values = [] if has_header else [_cell(first, column, path, number)]
            blank = 0
            for row in rows:
                if not row:
                    blank = blank or rows.line_num
                elif blank:
                    raise DataError(f"{path}, line {blank}: blank line inside of the file")
                else:
                    values.append(_cell(row, column, path, rows.line_num))
        except csv.Error as error:
            raise DataError(f"{path}, line {rows.line_num}: not valid CSV: {error}") from error
    return _array(values)


@contextmanager
def _fields_of_any_size() -> Iterator[None]:
    """Python's limit of 128 KiB is below the texts that lie beside lengths; it can only be set for the process."""
    limit = csv.field_size_limit(2**31 - 1)
    try:
        yield
    finally:
        csv.field_size_limit(limit)


def _cell(row: list[str], column: int, path: Path, number: int) -> int:
    if column >= len(row):
        raise DataError(f"{path}, line {number}: {len(row)} columns, the length is in column {column + 1}")
    return _whole(row[column].strip(), path, f"line {number}")


def _column(names: list[str] | None, width: int, path: Path, number: int, field: str | None) -> int:
    """Index of the column with the lengths; ``number``: the line with the names."""
    listed = f"columns: {', '.join(names)}" if names is not None else f"no header, {width} columns"
    usual = "tokens" if names is not None and "length" not in names else "length"
    wanted = field if field is not None else usual
    if names is not None and wanted in names:
        if names.count(wanted) > 1:
            raise DataError(f"{path}, line {number}: {names.count(wanted)} columns {wanted!r} ({listed}): rename one")
        return names.index(wanted)
    if field is not None:
        raise DataError(f"{path}, line {number}: no column {field!r} ({listed})")
    if width != 1:
        raise DataError(f"{path}, line {number}: which column holds the lengths? Name one with --field ({listed})")
    if names is not None and re.match(r"[-+.]?[0-9]", names[0]):
        raise DataError(f"{path}, line {number}: {names[0]!r} is neither a length nor the name of a column")
    return 0


def _read_parquet(path: Path, field: str | None) -> IntArray:
    """Batch by batch: pyarrow decodes a list column on the way, but only offsets are looked at and kept."""
    try:
        import pyarrow as arrow  # type: ignore[import-not-found,import-untyped,unused-ignore]
        import pyarrow.parquet as parquet  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError as error:
        raise DataError(f"{path}: reading .parquet needs pyarrow: pip install pyarrow") from error
    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            wanted = [field] if field is not None else ["length", "tokens", *(names if len(names) == 1 else [])]
            name = next((n for n in wanted if n in names), None)
            if name is None:
                missing = f"no column {' or '.join(map(repr, wanted))} (columns: {', '.join(names)})"
                raise DataError(f"{path}: {missing}; name one with --field")
            row, parts = 0, [np.empty(0, np.int64)]
            for batch in file.iter_batches(columns=[name]):
                parts.append(_arrow_lengths(arrow, batch.column(0), path, name, row))
                row += batch.num_rows
    except (arrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: cannot be read as Parquet: {error}") from error
    return np.concatenate(parts)


def _arrow_lengths(arrow: Any, column: Any, path: Path, name: str, row: int) -> IntArray:
    """Lengths in one batch of a column of whole numbers or lists; ``row``: rows before it."""
    import pyarrow.compute as compute  # type: ignore[import-not-found,import-untyped,unused-ignore]

    kind = column.type
    if column.null_count:
        wrong = compute.index(compute.is_null(column), True).as_py()
        raise DataError(f"{path}, row {row + wrong + 1}: column {name!r} has no value there")
    if any(getattr(arrow.types, f"is_{k}")(kind) for k in ("list", "large_list", "fixed_size_list")):
        return np.asarray(compute.list_value_length(column), dtype=np.int64)
    if not arrow.types.is_integer(kind):
        raise DataError(f"{path}: column {name!r} holds {kind}, must hold whole numbers or lists of tokens")
    values = np.asarray(column)
    wrong = np.flatnonzero((values < 0) | (values > _LONGEST))
    if wrong.size:
        raise DataError(f"{path}, row {row + wrong[0] + 1}: length {values[wrong[0]]}: must be from 0 to 2^40")
    return values.astype(np.int64)


_READERS: dict[str, Callable[[Path, str | None], IntArray]] = {
    ".idx": _read_idx,
    ".jsonl": _read_jsonl,
    ".parquet": _read_parquet,
    ".csv": _read_csv,
    ".txt": _read_txt,
}


@contextmanager
def _opened(path: Path, newline: str | None = None) -> Iterator[TextIO]:
    """A text file, its errors turned into `DataError`."""
    try:
        with open(path, encoding="utf-8-sig", newline=newline) as file:
            yield file
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text: {error.reason} near byte {error.start}") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error


def _lines(file: TextIO, path: Path) -> Iterator[tuple[int, str]]:
    """Line numbers and lines. Blank lines may only come at the end: elsewhere a length may have been lost."""
    blank = 0
    for number, line in enumerate(file, 1):
        text = line.strip()
        if not text:
            blank = blank or number
        elif blank:
            raise DataError(f"{path}, line {blank}: blank line inside of the file")
        else:
            yield number, text


def _whole(value: object, path: Path, where: str) -> int:
    """A length: an int, or a string of decimal digits, of at least 0 and at most 2^40."""
    if isinstance(value, str) and re.fullmatch(r"-?[0-9]{1,19}", value):
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _LONGEST:
        raise DataError(f"{path}, {where}: {str(value)[:40]!r} is no length: must be a whole number from 0 to 2^40")
    return value


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _array(values: Any) -> IntArray:
    return np.fromiter(values, np.int64)
