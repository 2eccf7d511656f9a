"""Pipelines with a different shape in every micro-batch against stock Megatron on one rank; inputs of public reports.

All runs start from a checkpoint that stock Megatron made after its first step, because initial weights depend on the
layout. Losses and gradient norms are those of stock Megatron's next steps.
"""

import functools
import json
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
from conftest import ADAM, MODEL, stock, train
from record import read_steps

STEPS = 3
DOCUMENTS = {
    # longer than a rank holds, so that rings span columns, among others of every length
    "mixed": [96, 1, 90, 2, 3, 65, 5, 7, 64, 8, 15, 63, 16, 40, 17, 31, 97, 32, 33, 80, 12, 48, 9, 20, 193, 22] * 4,
    # sequences shorter than ring x tensor-parallel ranks have pieces that are padding alone
    "tiny": [*range(1, 16)] * 6,
    # padded to 520 over 2 rings of 2 by another system, and to 512
    "odd": [517, 502, 517, 64, 502, 517, 33, 517, 3, 502] * 4,
}
CONTEXT = {"mixed": 96, "tiny": 16, "odd": 520}


def flags(corpus: str, layers: int) -> list[str]:
    context = str(CONTEXT[corpus])
    return [
        *MODEL,
        *ADAM,
        *("--adam-eps", "1e-2"),
        *("--num-layers", str(layers), "--global-batch-size", "7", "--train-iters", str(STEPS)),
        *("--seq-length", context, "--max-position-embeddings", context),
        *("--split", "70,30,0", "--eval-iters", "1", "--eval-interval", "2"),
    ]


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Name of the documents and layers of the model -> flags that go on after stock Megatron's first step; what it did
    itself: later steps, and evaluations."""

    @functools.cache
    def run(corpus: str, layers: int) -> tuple[list[str], list[dict], list[float]]:
        from megatron_hdp.data.indexed import write_indexed

        folder = tmp_path_factory.mktemp(f"{corpus}_{layers}_layers")
        random = np.random.RandomState(3)
        texts = [(random.randint(0, 250) + 3 * np.arange(length)) % 250 for length in DOCUMENTS[corpus]]
        write_indexed(folder / "documents", texts, np.uint16)
        common = [*flags(corpus, layers), "--data-path", str(folder / "documents")]
        steps = stock([*common, "--save", str(folder / "ckpt"), "--save-interval", "1"], folder)
        (folder / "ckpt" / "latest_checkpointed_iteration.txt").write_text("1")
        return [*common, "--load", str(folder / "ckpt")], steps[1:], evaluations(folder)

    return run


def evaluations(folder) -> list[float]:
    lines = (folder / "record" / "evaluations.jsonl").read_text().splitlines()
    return [json.loads(line)["lm loss"] for line in lines]


@dataclass(frozen=True)
class Layout:
    """How many processes hold the model in which parts."""

    name: str
    processes: int
    tokens: int
    """That one rank holds in one micro-batch."""
    corpus: str = "mixed"
    tensor: int = 1
    stages: int = 1
    parts: int = 1
    more: tuple[str, ...] = ()

    @property
    def columns(self) -> int:
        return self.processes // (self.tensor * self.stages)

    @property
    def flags(self) -> list[str]:
        # the vocabulary is padded to a multiple of 128 in all layouts
        found = ["--tensor-model-parallel-size", str(self.tensor)]
        found += ["--make-vocab-size-divisible-by", str(128 // self.tensor)]
        found += ["--pipeline-model-parallel-size", str(self.stages)]
        if self.parts > 1:
            found += ["--num-virtual-stages-per-pipeline-rank", str(self.parts)]
        return [*found, "--hdp", "--hdp-tokens-per-rank", str(self.tokens), *self.more]

    def __str__(self) -> str:
        return self.name


ROWS = ("--sequence-parallel",)
STATIC = ("--hdp-algorithm", "static")
FAST = [
    Layout("pp2 x 2 parts, 2 columns", 4, 48, stages=2, parts=2),
    Layout("pp4", 4, 96, stages=4),
]
SLOW = [
    Layout("pp2, 2 columns", 4, 48, stages=2),
    Layout("pp4, 2 columns", 8, 48, stages=4),
    Layout("pp4 x 2 parts, 2 columns", 8, 48, stages=4, parts=2),
    Layout("pp4 x 2 parts, messages together", 8, 48, stages=4, parts=2, more=("--no-overlap-p2p-communication",)),
    Layout("pp2 x 2 parts, warm-up flushed", 4, 48, stages=2, parts=2,
           more=("--overlap-p2p-communication-warmup-flush",)),
    Layout("pp2 x 4 parts, 4 columns", 8, 24, stages=2, parts=4),
    # Megatron-LM 620, 622: several columns whose micro-batches differ
    Layout("tp2 sp pp4, 2 columns", 16, 48, tensor=2, stages=4, more=ROWS),
    Layout("tp2 sp pp2, 2 columns", 8, 48, tensor=2, stages=2, more=ROWS),
    # NVIDIA-NeMo Speech 15339: packing with and without rings
    Layout("tp4", 4, 96, tensor=4),
    Layout("tp2, ring of 2", 4, 48, tensor=2, more=STATIC),
    # verl 4656: every sequence of 1 to 15 tokens on a ring
    Layout("tiny, tp2 pp2, ring of 2", 8, 8, "tiny", tensor=2, stages=2, more=STATIC),
    Layout("tiny, tp2 sp pp2, ring of 2", 8, 8, "tiny", tensor=2, stages=2, more=(*ROWS, *STATIC)),
    Layout("tiny, ring of 8", 8, 2, "tiny", more=STATIC),
    # NeMo-RL 3563, 2182, 2110: lengths that no product of rings and tensor-parallel ranks divides
    Layout("odd, tp2 sp, ring of 2", 4, 260, "odd", tensor=2, more=ROWS),
    Layout("odd, tp4 sp, ring of 2", 8, 264, "odd", tensor=4, more=ROWS),
]  # fmt: skip


def close(ours: float, theirs: float) -> bool:
    return ours == pytest.approx(theirs, rel=1e-5, nan_ok=True)


def run_and_compare(layout: Layout, start, folder, timeout: float = 200) -> None:
    begin, steps, evaluated = start(layout.corpus, max(4, layout.stages * layout.parts))
    log = folder / "hdp.jsonl"
    environment = {"MESSAGES": str(folder / "messages")}
    given = [*begin, *layout.flags, "--hdp-log", str(log)]
    train(layout.processes, given, folder, script="train_messages.py", environment=environment, timeout=timeout).check()
    ours = read_steps(folder / "record")
    assert len(ours) == len(steps) == STEPS - 1
    for mine, theirs in zip(ours, steps):
        assert close(mine["lm loss"], theirs["lm loss"])
        assert close(mine["grad_norm"], theirs["grad_norm"])
    assert all(close(mine, theirs) for mine, theirs in zip(evaluations(folder), evaluated, strict=True))
    rings = [int(size) for line in log.read_text().splitlines() for size in json.loads(line)["ring_sizes"]]
    assert max(rings) == layout.columns  # the run has the rings that it is meant to test
    if layout.stages > 1:
        require_messages(layout, folder / "messages")


def require_messages(layout: Layout, folder) -> None:
    """Every border between model parts is passed once by each micro-batch, in each phase, and by nothing else."""
    by_rank = [
        [json.loads(line) for line in (folder / f"rank{rank}.jsonl").read_text().splitlines()]
        for rank in range(layout.processes)
    ]
    borders = layout.stages * layout.parts - 1
    differing = False
    for calls in zip(*by_rank, strict=True):
        assert not any(call["device_waits"] or call["shape_exchanges"] for call in calls)
        for first in range(layout.processes // layout.stages):  # rank: stage by stage, all columns and tensor ranks
            column = [calls[first + stage * layout.processes // layout.stages] for stage in range(layout.stages)]
            tokens = column[0]["tokens"]
            assert all(call["tokens"] == tokens for call in column)
            ranks = layout.tensor if "--sequence-parallel" in layout.more else 1
            expected = Counter(rows for each in tokens for rows in [each // ranks] * borders)
            for way in ("send_next", "recv_prev", "send_prev", "recv_next"):
                passed = [shape for call in column for name, shape in call["messages"] if name == way]
                backward = way in ("send_prev", "recv_next")
                forward_only = column[0]["forward_only"]
                assert Counter(shape[0] for shape in passed) == (expected if not (backward and forward_only) else {})
                assert all(shape[1:] == [1, 32] for shape in passed)
            differing |= len(set(tokens)) > 1
    assert differing  # shapes must differ inside a step, or nothing is shown


@pytest.mark.parametrize("layout", FAST, ids=str)
def test_different_shapes_in_a_pipeline(layout, start, tmp_path):
    run_and_compare(layout, start, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("layout", SLOW, ids=str)
def test_different_shapes_in_every_layout(layout, start, tmp_path):
    run_and_compare(layout, start, tmp_path, timeout=600)
