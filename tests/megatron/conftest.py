"""Shared by the tests that run Megatron: a small corpus with every awkward length, model flags, stock runs."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from forked import Outcome, run_ranks
from record import read_steps

HERE = Path(__file__).parent
CONTEXT = 96
LENGTHS = [1, 0, 2, 3, 5, 7, 8, 15, 16, 17, 31, 32, 33, 40, 60, 64, 63, 65, 90, 96, 97, 1, 12, 9, 48, 10, 11, 20, 22]
LENGTHS += [80, 193]
SEQUENCES_PER_STEP = 8

MODEL = (
    "--num-layers 2 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 --group-query-attention "
    "--num-query-groups 2 --normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope "
    "--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 "
    f"--seq-length {CONTEXT} --max-position-embeddings {CONTEXT} --tokenizer-type NullTokenizer --vocab-size 257 "
    "--log-interval 1 --seed 7 --lr-decay-style cosine"
).split()
SGD = ["--optimizer", "sgd", "--sgd-momentum", "0.9", "--lr", "2e-1", "--min-lr", "2e-2", "--weight-decay", "0"]
ADAM = ["--lr", "1e-3", "--min-lr", "1e-4"]
NO_EVALUATION = ["--split", "1,0,0", "--eval-iters", "0", "--eval-interval", "1000"]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> str:
    """Prefix of a .bin/.idx corpus whose tokens can be learned a little (so that losses move)."""
    from megatron_hdp.data.indexed import write_indexed

    random = np.random.RandomState(0)
    documents = []
    for length in LENGTHS * 4:
        start, stride = random.randint(0, 250), random.randint(1, 4)
        documents.append((start + stride * np.arange(length)) % 250)
    prefix = tmp_path_factory.mktemp("corpus") / "documents"
    write_indexed(prefix, documents, np.uint16)
    return str(prefix)


def train(
    ranks: int, flags: list[str], folder: Path, *, script: str = "train.py", environment: dict | None = None, **options
) -> Outcome:
    """Run the recorded pretraining script through the launcher."""
    environment = {"RECORD": str(folder / "record"), **(environment or {})}
    return run_ranks(ranks, [str(HERE / script), *flags], folder, environment=environment, **options)


def stock(flags: list[str], folder: Path) -> list[dict]:
    """Steps of stock Megatron on one rank, one sequence per micro-batch; the folder keeps weights as well."""
    flags = [*flags, "--micro-batch-size", "1", "--calculate-per-token-loss", "--dataloader-type", "external"]
    train(1, flags, folder, script="oracle.py", launcher=False).check()
    return read_steps(folder / "record")
