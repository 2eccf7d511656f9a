"""A corpus of real documents that every machine with Python has: the sources of the standard library, as bytes.

Source files have the heavy-tailed lengths that make static context parallelism slow: many short ones, a few huge ones.
"""

import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_hdp.data.indexed import IndexedFile, write_indexed
from megatron_hdp.errors import DataError
from megatron_hdp.types import IntArray

END_OF_DOCUMENT = 256
"""Token after every document; tokens 0 .. 255 are bytes."""
VOCABULARY_SIZE = 257

_LEFT_OUT = {"site-packages", "dist-packages", "__pycache__"}
_TESTS = {"test", "tests", "idle_test"}
_QUANTILES = (0.1, 0.5, 0.9, 0.99)


@dataclass(frozen=True)
class CorpusSummary:
    """What a corpus holds; lengths in tokens."""

    documents: int
    tokens: int
    longest: int
    quantiles: dict[float, int]
    """Document length below which this fraction of the documents lies."""


def build_stdlib_corpus(prefix: str | Path, max_documents: int | None = None, *, tests: bool = False) -> CorpusSummary:
    """Write ``prefix``.bin and ``prefix``.idx from the running Python's standard library, in order of path.

    The first ``max_documents`` files, or all of them; with ``tests`` also those of its test folders. The same Python
    gives the same bytes. Raises `DataError` if the library's sources are not installed.
    """
    root = Path(sysconfig.get_path("stdlib"))
    paths = _sources(root, tests)[:max_documents]
    if not paths:
        raise DataError(f"{root}: no Python source files: install Python with its standard library's sources")
    write_indexed(prefix, _documents(paths), np.uint16)
    lengths = IndexedFile.open(prefix).lengths
    quantiles = {q: int(np.quantile(lengths, q)) for q in _QUANTILES}
    return CorpusSummary(int(lengths.size), int(lengths.sum(dtype=np.int64)), int(lengths.max()), quantiles)


def _sources(root: Path, tests: bool) -> list[Path]:
    """Source files below ``root``, sorted by their path inside of it."""
    left_out = _LEFT_OUT if tests else _LEFT_OUT | _TESTS
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in left_out]
        found += [Path(folder) / name for name in names if name.endswith(".py")]
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def _documents(paths: list[Path]) -> Iterator[IntArray]:
    for path in paths:
        yield np.append(np.frombuffer(path.read_bytes(), np.uint8).astype(np.int64), END_OF_DOCUMENT)
