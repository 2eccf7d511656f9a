"""Bad data, lost ranks and disagreeing ranks: a clear message, exit code not 0, nothing left behind."""

import os
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import ADAM, MODEL, NO_EVALUATION, train

FLAGS = [*MODEL, *ADAM, *NO_EVALUATION, "--train-iters", "6", "--global-batch-size", "8", "--hdp"]


@pytest.fixture
def damaged(corpus, tmp_path):
    """A private copy of the corpus, to be damaged."""
    for suffix in (".idx", ".bin"):
        shutil.copy(corpus + suffix, tmp_path / f"data{suffix}")
    return str(tmp_path / "data")


def refuse(prefix, tmp_path, *more):
    """Run and return the output; the run must fail by our own error, leave no checkpoint and name no stack."""
    save = tmp_path / "checkpoints"
    flags = [*FLAGS, "--data-path", prefix, "--hdp-tokens-per-rank", "48", "--save", str(save), *more]
    outcome = train(2, [*flags, "--save-interval", "1"], tmp_path / "run")
    assert 0 not in outcome.codes, outcome.output[-3000:]
    # 1: by its own error; 70: another rank had the same error first and told this one
    assert set(outcome.codes) <= {1, 70}
    assert "Traceback" not in outcome.outputs[0], outcome.outputs[0][-3000:]
    assert not list(save.glob("iter_*"))
    return outcome.outputs[0]


def test_empty_index(damaged, tmp_path):
    Path(damaged + ".idx").write_bytes(b"")
    assert f"{damaged}.idx" in refuse(damaged, tmp_path)


def test_truncated_index(damaged, tmp_path):
    size = os.path.getsize(damaged + ".idx")
    os.truncate(damaged + ".idx", size - 100)
    output = refuse(damaged, tmp_path)
    assert str(size - 100) in output
    assert str(size) in output


def test_bin_shorter_than_the_index_says(damaged, tmp_path):
    size = os.path.getsize(damaged + ".bin")
    os.truncate(damaged + ".bin", size - 10)
    output = refuse(damaged, tmp_path)
    assert f"{damaged}.bin" in output
    assert str(size) in output


def test_missing_corpus(tmp_path):
    assert str(tmp_path / "none") in refuse(str(tmp_path / "none"), tmp_path)


def test_sequence_longer_than_the_pool(corpus, tmp_path):
    output = refuse(corpus, tmp_path, "--hdp-tokens-per-rank", "46")
    assert "longest sequence has 96 tokens, but the pool holds 2 ranks x 46 = 92" in output
    assert "--hdp-tokens-per-rank to at least 48" in output
    assert "use 3 ranks" in output


@pytest.mark.parametrize(("path", "ranks"), [("/proc/none/log.jsonl", 2), ("/tmp", 1)])
def test_log_that_cannot_be_written(corpus, tmp_path, path, ranks):
    """Only the last rank writes; the others, started without torchrun, would wait for it in vain."""
    flags = [*FLAGS, "--data-path", corpus, "--hdp-tokens-per-rank", "96", "--hdp-log", path]
    outcome = train(ranks, flags, tmp_path, timeout=60)
    assert set(outcome.codes) == {1}
    for output in outcome.outputs:
        assert f"ConfigError: --hdp-log {path}: cannot be written" in output
        assert "Traceback" not in output


def test_tokens_beyond_the_vocabulary(tmp_path):
    from megatron_hdp.data.indexed import write_indexed

    # also where padding has made the embedding larger: 257 entries become 384
    write_indexed(tmp_path / "data", [np.array([1, 2, 257])] * 20, np.uint16)
    output = refuse(str(tmp_path / "data"), tmp_path)
    assert "the data holds token id 257, but the vocabulary has 257 entries" in output


def test_ranks_with_different_data_are_told_apart(corpus, tmp_path):
    from megatron_hdp.data.indexed import write_indexed

    write_indexed(tmp_path / "other", [np.arange(n % 40 + 1) for n in range(100)], np.uint16)
    flags = [*FLAGS, "--hdp-tokens-per-rank", "48"]
    environment = {"DATA_OF_RANK_0": corpus, "DATA_OF_RANK_1": str(tmp_path / "other")}
    outcome = train(2, flags, tmp_path / "run", script="train_other_data.py", environment=environment)
    assert set(outcome.codes) <= {1, 70}
    assert all("the ranks do not hold the same plan" in output for output in outcome.outputs)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_rank_that_dies_in_mid_step_is_named(corpus, tmp_path, where):
    flags = [*FLAGS, "--data-path", corpus, "--hdp-tokens-per-rank", "32", "--train-iters", "1000"]
    start = time.monotonic()
    environment = {"DIE": where, "DIE_RANK": "1", "DIE_STEP": "3"}
    outcome = train(3, flags, tmp_path, script="train_dying.py", environment=environment, timeout=100)
    assert time.monotonic() - start < 60
    assert outcome.codes[1] == -9
    for rank in (0, 2):
        assert outcome.codes[rank] not in (0, None)
        assert "rank 1 (host" in outcome.outputs[rank], outcome.outputs[rank][-2000:]
        assert "during step 3" in outcome.outputs[rank]
