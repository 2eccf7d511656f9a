"""Megatron's .bin/.idx files: checked when opened, read by range of tokens, written.

Layout of the .idx, little-endian and without gaps (the .bin holds nothing but tokens):

    9 bytes    magic "MMIDIDX\\0\\0"
    uint64     version, 1
    uint8      code of the token type
    uint64     number of entries n
    uint64     number of document bounds m (documents + 1)
    int32[n]   tokens of each entry
    int64[n]   byte offset of each entry in the .bin
    int64[m]   index of the first entry of each document; the last bound is n
    int8[n]    modes, in multimodal files only; ignored here

Most files have one entry per document. Where a document has several (sentences), they are joined again: a sequence is a
document, and a sentence alone would see no context.
"""

import functools
import os
import struct
from collections.abc import Callable, Iterable
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_hdp.errors import DataError
from megatron_hdp.types import IntArray

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float64", 7: "float32", 8: "uint16"}
"""Token types by their code in the .idx."""

_OPEN_FILES = 256
"""At most this many .bin files are held open, far below the usual limit of 1,024, however many are blended."""
_HEADER = struct.Struct("<9sQBQQ")
_REMAKE = "make the files again with tools/preprocess_data.py, or copy them again if they were copied"


class IndexedFile:
    """One pair of .bin and .idx files; `open` makes it.

    The .idx is memory mapped, so that all processes share it. The .bin is not: a mapped file that is cut short during
    the run kills the process without a word, where a read can say which file it was.
    """

    def __init__(
        self,
        prefix: str,
        dtype: np.dtype[np.integer],
        lengths: npt.NDArray[np.integer],
        pointers: IntArray,
    ) -> None:
        self.prefix = prefix
        self.dtype = dtype
        """Type of one token in the .bin."""
        self.lengths = lengths
        """Tokens of every document, int32 or int64 [documents]; read only."""
        self.read_bytes = 0
        """Bytes that `read` has taken from the .bin so far."""
        self._pointers = pointers
        self._bin = f"{prefix}.bin"
        file = os.stat(self._bin)
        self._identity = (file.st_dev, file.st_ino)

    @classmethod
    def open(cls, prefix: str | Path) -> "IndexedFile":
        """Map ``prefix``.idx and check it and ``prefix``.bin.

        Raises `DataError` that names the file, the numbers and the remedy: missing, empty or truncated files, wrong
        magic, version or token type, no documents, bounds out of order, a .bin shorter than the index says.
        """
        prefix = os.fspath(prefix)
        sizes = {suffix: _size(prefix, suffix) for suffix in (".idx", ".bin")}
        raw = np.memmap(f"{prefix}.idx", dtype=np.uint8, mode="r")
        dtype, entries, bounds = _header(f"{prefix}.idx", raw[: _HEADER.size].tobytes())
        expected = _HEADER.size + 12 * entries + 8 * bounds
        if sizes[".idx"] < expected:
            raise DataError(
                f"{prefix}.idx: truncated: {entries} entries and {bounds} document bounds need {expected} bytes, "
                f"the file has {sizes['.idx']}: {_REMAKE}"
            )
        lengths = np.frombuffer(raw, "<i4", entries, _HEADER.size)
        pointers = np.frombuffer(raw, "<i8", entries, _HEADER.size + 4 * entries)
        firsts = np.frombuffer(raw, "<i8", bounds, _HEADER.size + 12 * entries)
        _check_entries(prefix, lengths, pointers, firsts, dtype, sizes[".bin"])
        document_lengths, document_pointers = _documents(f"{prefix}.idx", lengths, pointers, firsts, dtype)
        return cls(prefix, dtype, document_lengths, document_pointers)

    def read(self, document: int, begin: int, end: int) -> IntArray:
        """Tokens [begin, end) of one document, int64 [end - begin]; nothing else is read from the .bin.

        Raises `DataError` for a range outside of the document, and for a .bin that was cut short or removed since.
        """
        if not (0 <= document < self.lengths.size and 0 <= begin <= end <= int(self.lengths[document])):
            tokens = int(self.lengths[document]) if 0 <= document < self.lengths.size else 0
            raise DataError(
                f"{self.prefix}: tokens {begin} to {end} of document {document} were asked for, the file has "
                f"{self.lengths.size} documents and this one {tokens} tokens: was the file replaced during the run?"
            )
        if begin == end:
            return np.empty(0, np.int64)
        offset = int(self._pointers[document]) + begin * self.dtype.itemsize
        size = (end - begin) * self.dtype.itemsize
        try:
            data = _read(_opened(self._bin, self._identity), offset, size)
        except OSError as error:
            raise DataError(f"{self._bin}: cannot be read any more ({error.strerror})") from error
        self.read_bytes += size
        return np.frombuffer(data, self.dtype).astype(np.int64)


@functools.lru_cache(maxsize=_OPEN_FILES)
def _opened(path: str, identity: tuple[int, int]) -> FileIO:
    """The file, kept open. ``identity``: its device and inode, lest a file that took its name be taken for it.

    One that falls out of the cache is closed when the last reader lets go of it.
    """
    return open(path, "rb", buffering=0)


def _read(file: FileIO, offset: int, size: int) -> bytes:
    """``size`` bytes from ``offset`` on. Raises `DataError` if the file ends before."""
    data = os.pread(file.fileno(), size, offset)
    while len(data) < size:  # a signal, or more than the 2 GiB that one call gives
        more = os.pread(file.fileno(), size - len(data), offset + len(data))
        if not more:
            raise DataError(
                f"{file.name}: cut short during the run: bytes {offset} to {offset + size} were asked for, the file "
                f"has {os.fstat(file.fileno()).st_size} now: copy it again, and start again from the last checkpoint"
            )
        data += more
    return data


def _size(prefix: str, suffix: str) -> int:
    """Bytes of ``prefix + suffix``. Raises `DataError` if it is missing, unreadable or empty."""
    path = prefix + suffix
    try:
        size = os.stat(path).st_size
        with open(path, "rb"):  # a file that may not be read is better found here than by the memory map
            pass
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read ({error.strerror}). --data-path takes what the .bin and .idx file have in common, "
            "without the ending"
        ) from error
    if size == 0:
        raise DataError(f"{path}: empty file (0 bytes): {_REMAKE}")
    return size


def _header(path: str, raw: bytes) -> tuple[np.dtype[np.integer], int, int]:
    """Token type, entries and document bounds from the first bytes of an .idx."""
    if raw[: len(MAGIC)] != MAGIC[: len(raw)]:
        raise DataError(f"{path}: not a Megatron index: it starts with {raw[:9]!r}, not with {MAGIC!r}: {_REMAKE}")
    if len(raw) < _HEADER.size:
        raise DataError(f"{path}: truncated: the header has {_HEADER.size} bytes, the file {len(raw)}: {_REMAKE}")
    _, version, code, entries, bounds = _HEADER.unpack(raw)
    if version != VERSION:
        raise DataError(f"{path}: index version {version}, this reader knows version {VERSION}: {_REMAKE}")
    name = DTYPES.get(code)
    if name is None:
        known = ", ".join(f"{key} {value}" for key, value in DTYPES.items())
        raise DataError(f"{path}: unknown token type code {code} (known: {known}): {_REMAKE}")
    if name.startswith("float"):
        raise DataError(f"{path}: holds {name} numbers, not token ids: give the prefix of a tokenized corpus")
    if entries == 0 or bounds < 2:
        raise DataError(f"{path}: no documents ({entries} entries, {max(bounds - 1, 0)} documents): {_REMAKE}")
    return np.dtype(name).newbyteorder("<"), entries, bounds


def _check_entries(
    prefix: str, lengths: IntArray, pointers: IntArray, firsts: IntArray, dtype: np.dtype[np.integer], bin_size: int
) -> None:
    """Raise `DataError` unless entries lie inside of the .bin and documents in order inside of the entries."""
    if int(lengths.min()) < 0 or int(pointers.min()) < 0:
        entry = int(np.argmax((lengths < 0) | (pointers < 0)))
        raise DataError(
            f"{prefix}.idx: entry {entry} has {lengths[entry]} tokens at byte {pointers[entry]}; neither may be "
            f"negative: {_REMAKE}"
        )
    if firsts[0] != 0 or firsts[-1] != lengths.size or bool((firsts[1:] < firsts[:-1]).any()):
        raise DataError(
            f"{prefix}.idx: document bounds go from {firsts[0]} to {firsts[-1]}; they must rise from 0 to the number "
            f"of entries, {lengths.size}: {_REMAKE}"
        )
    needed = int((pointers + lengths * np.int64(dtype.itemsize)).max())
    if bin_size < needed:
        raise DataError(
            f"{prefix}.bin: shorter than its index says: {needed} bytes are needed, the file has {bin_size}: "
            f"copy it again, or make both files again"
        )


def _documents(
    path: str, lengths: IntArray, pointers: IntArray, firsts: IntArray, dtype: np.dtype[np.integer]
) -> tuple[npt.NDArray[np.integer], IntArray]:
    """Tokens and byte offset of every document, its entries joined."""
    if firsts.size == lengths.size + 1 and bool((firsts[1:] > firsts[:-1]).all()):
        return lengths, pointers  # one entry per document: the mapped arrays as they are
    ends = pointers + lengths * np.int64(dtype.itemsize)
    starts_document = np.zeros(lengths.size + 1, bool)
    starts_document[firsts] = True
    apart = (pointers[1:] != ends[:-1]) & ~starts_document[1:-1]
    if bool(apart.any()):
        raise DataError(
            f"{path}: entries {int(np.argmax(apart))} and {int(np.argmax(apart)) + 1} belong to one document but do "
            f"not lie together in the .bin: {_REMAKE}"
        )
    sums = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    # a document without entries may begin after the last one; it has no tokens, so that any offset will do
    return np.diff(sums[firsts]), pointers[np.minimum(firsts[:-1], lengths.size - 1)]


def write_indexed(prefix: str | Path, documents: Iterable[npt.ArrayLike], dtype: npt.DTypeLike) -> None:
    """Write documents (1-D arrays of token ids, one entry each) to ``prefix``.bin and ``prefix``.idx.

    Both files get their names at the end: a failure leaves nothing. Raises `DataError` for no documents, for a token
    that ``dtype`` cannot hold, and for a document of more than 2**31 - 1 tokens.
    """
    prefix = os.fspath(prefix)
    token_type: np.dtype[Any] = np.dtype(dtype)
    code = next((key for key, name in DTYPES.items() if name == token_type.name), None)
    if code is None or token_type.kind not in "iu":
        raise DataError(f"{prefix}: tokens cannot be written as {token_type.name}; use uint16 or int32")
    temporary = {suffix: f"{prefix}{suffix}.{os.getpid()}.part" for suffix in (".bin", ".idx")}
    try:
        with open(temporary[".bin"], "wb") as file:
            lengths = np.fromiter((_write_document(prefix, file.write, d, token_type) for d in documents), np.int64)
        if lengths.size == 0:
            raise DataError(f"{prefix}: no documents to write")
        pointers = (np.cumsum(lengths) - lengths) * token_type.itemsize
        with open(temporary[".idx"], "wb") as file:
            file.write(_HEADER.pack(MAGIC, VERSION, code, lengths.size, lengths.size + 1))
            for array, kind in ((lengths, "<i4"), (pointers, "<i8"), (np.arange(lengths.size + 1), "<i8")):
                file.write(array.astype(kind).tobytes())
        for suffix in (".bin", ".idx"):  # the index last: where it is, the data is
            os.replace(temporary[suffix], prefix + suffix)
    finally:
        for path in temporary.values():
            Path(path).unlink(missing_ok=True)


def _write_document(
    prefix: str, write: Callable[[bytes], int], document: npt.ArrayLike, dtype: np.dtype[np.integer]
) -> int:
    """Write one document; its tokens."""
    tokens = np.asarray(document)
    if tokens.ndim != 1 or (tokens.size and tokens.dtype.kind not in "iu"):
        raise DataError(f"{prefix}: a document must be a 1-D array of integers, not {tokens.dtype} {tokens.shape}")
    limits = np.iinfo(dtype)
    if tokens.size and not limits.min <= int(tokens.min()) <= int(tokens.max()) <= limits.max:
        raise DataError(
            f"{prefix}: tokens {tokens.min()} to {tokens.max()} do not fit into {dtype.name} "
            f"({limits.min} to {limits.max}): use a wider type"
        )
    if tokens.size > np.iinfo(np.int32).max:
        raise DataError(f"{prefix}: a document of {tokens.size} tokens; the format ends at {np.iinfo(np.int32).max}")
    write(tokens.astype(dtype.newbyteorder("<")).tobytes())
    return int(tokens.size)
