"""Our .bin/.idx files against Megatron's reader and writer, our document ranges against Megatron's builder."""

import numpy as np
import pytest
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.blended_megatron_dataset_config import (
    convert_split_vector_to_split_matrix,
    parse_and_normalize_split,
)
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

from megatron_hdp.data.corpus import document_range
from megatron_hdp.data.indexed import IndexedFile, write_indexed

DTYPES = [np.uint8, np.int8, np.int16, np.uint16, np.int32, np.int64]


def documents(dtype):
    random = np.random.default_rng(3)
    limits = np.iinfo(dtype)
    return [random.integers(limits.min, limits.max, n, dtype=np.int64) for n in (5, 1, 0, 300, 2)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_megatron_reads_what_we_write(tmp_path, dtype):
    prefix = str(tmp_path / "ours")
    write_indexed(prefix, documents(dtype), dtype)
    theirs = IndexedDataset(prefix)
    assert theirs.index.dtype == dtype
    assert theirs.document_indices.tolist() == [0, 1, 2, 3, 4, 5]
    assert len(theirs) == 5
    for number, document in enumerate(documents(dtype)):
        assert theirs[number].tolist() == document.tolist()


@pytest.mark.parametrize("dtype", DTYPES)
def test_we_read_what_megatron_writes(tmp_path, dtype):
    prefix = str(tmp_path / "theirs")
    builder = IndexedDatasetBuilder(prefix + ".bin", dtype)
    for document in documents(dtype):
        builder.add_document(torch.from_numpy(document), [document.size])
    builder.finalize(prefix + ".idx")
    ours = IndexedFile.open(prefix)
    assert ours.dtype == np.dtype(dtype)
    for number, document in enumerate(documents(dtype)):
        assert ours.read(number, 0, int(ours.lengths[number])).tolist() == document.tolist()


def test_files_are_the_same_bytes(tmp_path):
    write_indexed(tmp_path / "ours", documents(np.uint16), np.uint16)
    builder = IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), np.uint16)
    for document in documents(np.uint16):
        builder.add_item(torch.from_numpy(document))
        builder.end_document()
    builder.finalize(str(tmp_path / "theirs.idx"))
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"ours{suffix}").read_bytes() == (tmp_path / f"theirs{suffix}").read_bytes()


def test_sentences_are_joined_to_documents(tmp_path):
    prefix = str(tmp_path / "theirs")
    builder = IndexedDatasetBuilder(prefix + ".bin", np.int32)
    builder.add_document(torch.arange(6), [1, 2, 3])
    builder.add_document(torch.arange(10, 14), [4])
    builder.finalize(prefix + ".idx")
    ours = IndexedFile.open(prefix)
    assert ours.lengths.tolist() == [6, 4]
    assert ours.read(0, 0, 6).tolist() == [0, 1, 2, 3, 4, 5]
    assert ours.read(1, 1, 4).tolist() == [11, 12, 13]


class Elements:
    """Stands in for a dataset class: keeps the documents that the builder gives to a split."""

    def __init__(self, low, path, indices, size, split, config):
        self.indices = indices

    @staticmethod
    def build_low_level_dataset(path, config):
        return path

    @staticmethod
    def numel_low_level_dataset(low):
        return low


def megatron_ranges(split, documents):
    """What Megatron's own builder makes of --split for a file of so many documents."""
    matrix = convert_split_vector_to_split_matrix(parse_and_normalize_split(split))
    builder = object.__new__(BlendedMegatronDatasetBuilder)
    builder.cls, builder.config, builder.is_built_on_rank = Elements, None, lambda: True
    built = builder._build_megatron_dataset_splits(documents, matrix, [0, 0, 0])
    return [None if part is None else part.indices.tolist() for part in built]


@pytest.mark.parametrize("split", ["969,30,1", "98,2,0", "1,1,1", "100", "0,1,0", ".5,.25,.25", "8,1,1", "99,1"])
def test_document_ranges_are_megatrons(split):
    parts = [float(part) for part in split.split(",")]
    parts += [0.0] * (3 - len(parts))
    shares = [part / sum(parts) for part in parts]
    for count in [*range(1, 120), 150, 500, 999, 1000, 12345]:
        for index, expected in enumerate(megatron_ranges(split, count)):
            assert list(range(*document_range(count, shares, index))) == (expected or []), (count, index)
