"""Every layout trains as stock Megatron does on one rank with one sequence per micro-batch: the parity matrix.

Ten steps in fp32 from a checkpoint that stock Megatron made, because initial weights depend on the layout. Compared are
losses, gradient norms, losses of routers, and all weights at the end. These are read from Megatron's distributed
checkpoint, which every run saves: it has the same tensors whatever ranks, stages and experts the model was cut into.
"""

import functools
import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from conftest import ADAM, CONTEXT, MODEL, NO_EVALUATION, SEQUENCES_PER_STEP, train
from record import read_steps, read_whole_model

STEPS = 10
LOSS, GRAD_NORM, ROUTER_LOSS = 1e-6, 1e-5, 1e-5
"""Largest relative differences."""
MOVED = 1e-4
"""Largest difference of a tensor of weights from stock's, in parts of what training moved it (Euclidean norms)."""

# with a large epsilon Adam does not blow rounding up; the vocabulary is padded to 384 with two tensor ranks as well
UNTIED = "--untie-embeddings-and-output-weights"
COMMON = [*(flag for flag in MODEL if flag != UNTIED), *ADAM, "--adam-eps", "1e-2", "--lr", "1e-2", *NO_EVALUATION]
COMMON += ["--global-batch-size", str(SEQUENCES_PER_STEP), "--make-vocab-size-divisible-by", "192"]
# coefficients are large, so that a wrong scale shows
MIXTRAL = (
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --moe-token-dispatcher-type alltoall "
    "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.3 --moe-z-loss-coeff 0.05"
).split()
ZERO = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")
RESHARDABLE = "--dist-ckpt-optim-fully-reshardable"
FULL = tuple("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1".split())
SELECTIVE = ("--recompute-granularity", "selective", "--recompute-modules", "core_attn")
OFFLOAD = ("--hdp-offload", "--hdp-offload-gib", "0.02")
IN_TURN = "0.3 0 1 0.5"
"""Offload ratios, each for every fourth micro-batch of a rank, whatever the plan says."""


@dataclass(frozen=True)
class Layout:
    """How many processes hold the model in which parts."""

    pool: int
    tensor: int = 1
    """Ranks; with more than one, sequence parallelism is on."""
    stages: int = 1
    parts: int = 1
    """Model parts of a pipeline stage (VPP)."""
    experts: int = 0
    """Expert-parallel ranks; 0 for a model without experts."""
    expert_parts: int | None = None
    """Tensor-parallel ranks of one expert; None for those of everything else."""
    more: tuple[str, ...] = ZERO
    tokens: int = 0
    """That one rank holds in one micro-batch; 0: the longest sequences need rings over the whole pool."""

    @property
    def processes(self) -> int:
        return self.pool * self.tensor * self.stages

    @property
    def expert_group(self) -> int:
        """Pool ranks that share experts, which have equal numbers of micro-batches."""
        parts = self.expert_parts or self.tensor
        return max(1, self.experts * parts // self.tensor)

    @property
    def model(self) -> tuple[str, ...]:
        """Flags of the model: four layers, or one for each model part."""
        layers = ["--num-layers", str(max(4, self.stages * self.parts))]
        return (*layers, UNTIED, *(MIXTRAL if self.experts else ()))

    @property
    def flags(self) -> list[str]:
        found = ["--tensor-model-parallel-size", str(self.tensor)]
        found += ["--pipeline-model-parallel-size", str(self.stages)]
        if self.tensor > 1:
            found += ["--sequence-parallel"]
        if self.parts > 1:
            found += ["--num-virtual-stages-per-pipeline-rank", str(self.parts)]
        if self.experts:
            found += ["--expert-model-parallel-size", str(self.experts)]
        if self.expert_parts:
            found += ["--expert-tensor-parallel-size", str(self.expert_parts)]
        found += ["--hdp", "--hdp-tokens-per-rank", str(self.tokens or CONTEXT // self.pool)]
        # the planner prefers to gather sequences as short as these
        return [*found, "--hdp-exchange", "auto" if self.experts else "ring", *self.more]

    def __str__(self) -> str:
        expert_parts = f" etp{self.expert_parts}" if self.expert_parts else ""
        experts = f" ep{self.experts}{expert_parts}" if self.experts else ""
        name = f"tp{self.tensor} pp{self.stages} vpp{self.parts} pool{self.pool}{experts}"
        return f"{'mixtral' if self.experts else 'dense'} {name}"


def columns() -> list[Layout]:
    """Everything that fits into 8 processes, without experts."""
    return [
        Layout(pool, tensor, stages, parts)
        for tensor in (1, 2)
        for stages in (1, 2, 4)
        for parts in ((1, 2) if stages > 1 else (1,))
        for pool in (2, 3, 4)
        if pool * tensor * stages <= 8
    ]


def with_experts(layout: Layout) -> list[Layout]:
    """``layout`` with 1, 2 and 4 expert-parallel ranks whose groups are whole pool ranks that divide the pool.

    Experts are cut over the tensor ranks where that is possible, else each is on one of them.
    """
    found = []
    for ranks in (1, 2, 4):
        for expert_parts in dict.fromkeys((None, 1 if layout.tensor > 1 else None)):
            each = replace(layout, experts=ranks, expert_parts=expert_parts)
            if layout.pool % each.expert_group == 0:
                found.append(each)
                break
    return found


MATRIX = [*columns(), *(layout for column in columns() for layout in with_experts(column))]
# those that use the most kinds of parallelism first
MATRIX.sort(key=lambda each: (each.processes, each.stages * each.parts, each.tensor, each.experts), reverse=True)
FAST = [
    Layout(2, stages=2, parts=2),
    Layout(2, stages=2, experts=2),
]
"""More of them are in test_training.py (TP) and test_experts.py (EP 4)."""


def run(ranks: int, flags: list[str], folder: Path, *, script: str = "train.py", ratios: str = "", **options) -> Path:
    """Ten steps, with records in ``folder``/record."""
    flags = [*COMMON, "--train-iters", str(STEPS), *flags]
    environment = {"SCRIPT": script, "RATIOS": ratios, "RECORD_SHARDS": "1"}
    options = {"timeout": 300, **options}
    train(ranks, flags, folder, script="router_metrics.py", environment=environment, **options).check()
    return folder


def run_stock(flags: list[str], folder: Path) -> Path:
    flags = [*flags, "--micro-batch-size", "1", "--calculate-per-token-loss", "--dataloader-type", "external"]
    return run(1, flags, folder, script="oracle.py", launcher=False)


def save(folder: Path, step: int) -> list[str]:
    """Flags that end a run at ``step`` with a checkpoint."""
    return ["--save", str(folder / "ckpt"), "--save-interval", "100", "--exit-interval", str(step)]


@dataclass(frozen=True)
class Oracle:
    """A run of stock Megatron."""

    model: list[str]
    """Flags of model and data."""
    start: Path
    """Records of the run that made the checkpoint with the weights to start from."""
    folder: Path

    @property
    def begin(self) -> list[str]:
        """Flags that start another run from the same weights."""
        return [*self.model, "--load", str(self.start / "ckpt"), "--finetune", "--no-load-optim", "--no-load-rng"]


@pytest.fixture(scope="module")
def oracles(corpus, tmp_path_factory):
    """Stock Megatron's run by flags of the model, each made once."""

    @functools.cache
    def make(model: tuple[str, ...], *more: str) -> Oracle:
        folder = tmp_path_factory.mktemp("stock")
        oracle = Oracle([*model, *more, "--data-path", corpus], folder / "first", folder / "run")
        run_stock([*oracle.model, *save(oracle.start, 1)], oracle.start)
        run_stock(oracle.begin, oracle.folder)
        return oracle

    return make


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def router_losses(folder: Path) -> list[dict]:
    path = folder / "record" / "router_losses.jsonl"
    return read_lines(path) if path.exists() else []


def relative(ours: float, theirs: float) -> float:
    return abs(ours - theirs) / abs(theirs)


def worst_of_steps(ours: list[dict], theirs: list[dict], name: str) -> float:
    assert len(ours) == len(theirs) > 0
    return max(relative(a[name], b[name]) for a, b in zip(ours, theirs))


def worst_of_routers(ours: list[dict], theirs: list[dict]) -> float:
    steps = zip(ours, theirs, strict=True)
    pairs = [(x, y) for a, b in steps for key in b for x, y in zip(a[key], b[key], strict=True)]
    assert all(y > 0.1 for _, y in pairs)
    return max((relative(x, y) for x, y in pairs), default=0.0)


def worst_of_weights(ours: Path, theirs: Path, start: Path) -> float:
    """Largest difference of a tensor, in parts of the way that training moved it."""
    a, b, first = (read_whole_model(folder / "record") for folder in (ours, theirs, start))
    assert a.keys() == b.keys() == first.keys()
    return max(float((a[key] - b[key]).norm() / (b[key] - first[key]).norm()) for key in b)


def compare(folder: Path, oracle: Oracle, record_property, steps: int = STEPS) -> None:
    """The run in ``folder`` had the last ``steps`` of stock Megatron's; ``record_property`` is told how far away."""
    ours, theirs = read_steps(folder / "record"), read_steps(oracle.folder / "record")[-steps:]
    assert len(ours) == steps
    found = {
        "loss": worst_of_steps(ours, theirs, "lm loss"),
        "grad norm": worst_of_steps(ours, theirs, "grad_norm"),
        "router losses": worst_of_routers(router_losses(folder), router_losses(oracle.folder)[-steps:]),
        "weights": worst_of_weights(folder, oracle.folder, oracle.start),
    }
    for name, value in found.items():
        record_property(name, value)
    bounds = {"loss": LOSS, "grad norm": GRAD_NORM, "router losses": ROUTER_LOSS, "weights": MOVED}
    assert all(found[name] <= bound for name, bound in bounds.items()), found
    assert [step["lr"] for step in ours] == [step["lr"] for step in theirs]


def run_layout(layout: Layout, oracle: Oracle, folder: Path, *more: str, **options) -> Path:
    flags = [*oracle.begin, *layout.flags, "--hdp-log", str(folder / "hdp.jsonl"), *more]
    return run(layout.processes, flags, folder, **options)


def require_rings(layout: Layout, folder: Path) -> None:
    """The run has the rings that it is meant to test, and columns with different numbers of micro-batches."""
    steps = read_lines(folder / "hdp.jsonl")
    widest = max(int(size) for step in steps for size in step["ring_sizes"])
    assert widest > 1 if layout.tokens else widest == layout.pool
    if layout.expert_group == 1 or layout.tokens:
        assert any(step["micro_batches_min"] < step["micro_batches_max"] for step in steps)


@pytest.fixture(scope="module")
def trained(oracles, tmp_path_factory):
    """Folder of a run by layout, each made once."""

    @functools.cache
    def make(layout: Layout) -> Path:
        return run_layout(layout, oracles(layout.model), tmp_path_factory.mktemp("trained"))

    return make


def compare_layout(layout: Layout, trained, oracles, record_property) -> None:
    require_rings(layout, trained(layout))
    compare(trained(layout), oracles(layout.model), record_property)


@pytest.mark.parametrize("layout", FAST, ids=str)
def test_a_layout_trains_as_stock_megatron(layout, trained, oracles, record_property):
    compare_layout(layout, trained, oracles, record_property)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("layout", MATRIX, ids=str)
def test_every_layout_trains_as_stock_megatron(layout, trained, oracles, record_property):
    compare_layout(layout, trained, oracles, record_property)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("layout", MATRIX, ids=str)
def test_two_runs_give_the_same_bits(layout, trained, oracles, tmp_path):
    first, second = trained(layout), run_layout(layout, oracles(layout.model), tmp_path)
    assert read_steps(first / "record") == read_steps(second / "record")
    assert router_losses(first) == router_losses(second)
    ours, again = (read_whole_model(folder / "record") for folder in (first, second))
    assert all(torch.equal(ours[name], again[name]) for name in ours)


TIED = ("--num-layers", "8")
CLIPPED = ("--clip-grad", "0.3")
# name -> layout with its flags; flags of the model, for stock as well; offload ratios
COMBINATIONS = {
    "no ZeRO-1": (Layout(3, stages=2, more=()), None, ""),
    "gradients reduced early, no ZeRO-1": (Layout(2, tensor=2, stages=2, more=ZERO[1:2]), None, ""),
    "ZeRO-1 without overlap": (Layout(2, stages=2, parts=2, experts=2, more=ZERO[:1]), None, ""),
    "parameters gathered by each stage for itself": (
        Layout(2, stages=4, parts=2, more=(*ZERO, "--no-align-param-gather")),
        None,
        "",
    ),
    "clipping": (Layout(2, tensor=2, stages=2, parts=2), ("--num-layers", "4", UNTIED, *CLIPPED), ""),
    "clipping, experts": (
        Layout(4, stages=2, experts=4),
        ("--num-layers", "4", UNTIED, *MIXTRAL, *CLIPPED),
        "",
    ),
    "tied embeddings, pp4 vpp2": (Layout(2, stages=4, parts=2), TIED, ""),
    "tied embeddings, tp2 pp2": (Layout(2, tensor=2, stages=2), TIED, ""),
    "full recompute, pp2 vpp2": (Layout(2, stages=2, parts=2, more=(*ZERO, *FULL)), None, ""),
    "selective recompute, tp2 pp2": (Layout(2, tensor=2, stages=2, more=(*ZERO, *SELECTIVE)), None, ""),
    "expert groups with different counts": (Layout(4, stages=2, parts=2, experts=2, tokens=48), None, ""),
    "offload, pp2 vpp2": (
        Layout(2, stages=2, parts=2, more=(*ZERO, *OFFLOAD)),
        ("--num-layers", "12", UNTIED),
        IN_TURN,
    ),
    "offload, full recompute, clipping, tied embeddings, experts, tp2 pp2": (
        Layout(2, tensor=2, stages=2, experts=2, more=(*ZERO, *OFFLOAD, *FULL)),
        ("--num-layers", "6", *MIXTRAL, *CLIPPED),
        IN_TURN,
    ),
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", COMBINATIONS)
def test_what_trains_together(name, oracles, tmp_path, record_property):
    layout, model, ratios = COMBINATIONS[name]
    oracle = oracles(model or layout.model)
    if CLIPPED[0] in oracle.model:  # and something is clipped
        assert min(step["grad_norm"] for step in read_steps(oracle.folder / "record")) > float(CLIPPED[1])
    script = "train_offload.py" if ratios else "train.py"
    run_layout(layout, oracle, tmp_path, script=script, ratios=ratios)
    require_rings(layout, tmp_path)
    compare(tmp_path, oracle, record_property)
    for rank in range(layout.processes if ratios else 0):
        assert sum(line["out"] for line in read_lines(tmp_path / "record" / f"arena{rank}.jsonl")) > 0


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("layout", [Layout(2, tensor=2, stages=2), Layout(2, stages=2, experts=2)], ids=str)
def test_bf16_is_as_near_to_fp32_as_stock_megatrons(layout, oracles, tmp_path, record_property):
    """Parameters in bf16, gradients summed in fp32: rounding differs with the micro-batches, and must not be larger."""
    exact, rounded = oracles(layout.model), oracles(layout.model, "--bf16")
    run_layout(layout, rounded, tmp_path)
    steps = {
        name: read_steps(folder / "record")
        for name, folder in {"exact": exact.folder, "stock": rounded.folder, "ours": tmp_path}.items()
    }
    for key in ("lm loss", "grad_norm"):
        noise = worst_of_steps(steps["stock"], steps["exact"], key)
        found = worst_of_steps(steps["ours"], steps["exact"], key)
        record_property(key, found / noise)
        assert 1e-5 < noise < 0.05  # it was bf16
        assert found < 2 * noise
    weights = {
        name: {key: value.double() for key, value in read_whole_model(folder / "record").items()}
        for name, folder in {"exact": exact.folder, "stock": rounded.folder, "ours": tmp_path}.items()
    }
    for key, value in weights["exact"].items():
        found, noise = (float((weights[name][key] - value).norm()) for name in ("ours", "stock"))
        record_property(key, found / noise)
        assert found < 2 * noise, key


HALF = STEPS // 2
SPREAD = (*ZERO, RESHARDABLE)
"""ZeRO-1 whose checkpoint fits any layout."""
# Megatron has two optimizers where experts are spread over ranks, else one, and cannot load the state of the others
NEW_OPTIMIZER = ("--no-load-optim",)
# name -> what saves after half of the steps, what goes on (None: stock Megatron) with which more flags
RESUMED = {
    "pool 4 to tp2 pool 2": (Layout(4, more=()), Layout(2, tensor=2, more=()), ()),
    "pool 4 to tp2 pool 2, ZeRO-1": (Layout(4, more=SPREAD), Layout(2, tensor=2, more=SPREAD), ()),
    "pool 4 to stock, ZeRO-1": (Layout(4, more=SPREAD), None, (ZERO[0], RESHARDABLE)),
    "pool 4 to pool 4, ZeRO-1 as it lies": (Layout(4), Layout(4), ()),
    "pp2 vpp2 to pp1": (Layout(2, stages=2, parts=2, more=()), Layout(3, more=()), ()),
    "pp2 to pp1, ZeRO-1": (Layout(3, stages=2, more=SPREAD), Layout(2, more=SPREAD), ()),
    "tp2 pp2 vpp2 to stock": (Layout(2, tensor=2, stages=2, parts=2, more=()), None, ()),
    "experts, pp2 ep2 to pp1 ep4": (Layout(2, stages=2, experts=2, more=()), Layout(4, experts=4, more=()), ()),
    "experts, ep4 to pp2 ep2, ZeRO-1": (
        Layout(4, experts=4, more=SPREAD),
        Layout(2, stages=2, experts=2, more=SPREAD),
        (),
    ),
    "experts, pool 3 to stock": (Layout(3, experts=1, more=()), None, ()),
    "experts, ep2 to ep1": (Layout(2, experts=2, more=()), Layout(3, experts=1, more=()), NEW_OPTIMIZER),
    "experts, ep2 to ep1, ZeRO-1": (
        Layout(4, experts=2, more=SPREAD),
        Layout(2, experts=1, more=SPREAD),
        NEW_OPTIMIZER,
    ),
    "experts, pp2 ep4 to stock": (Layout(4, stages=2, experts=4, more=()), None, NEW_OPTIMIZER),
    "experts, ep1 to tp2 pp2 ep2": (
        Layout(2, experts=1, more=()),
        Layout(2, tensor=2, stages=2, experts=2, more=()),
        NEW_OPTIMIZER,
    ),
}


def compare_first_step(folder: Path, oracle: Oracle, record_property) -> None:
    """Of a run that went on with the weights alone: what the first step computes before the optimizer changes them."""
    ours, theirs = read_steps(folder / "record")[:1], read_steps(oracle.folder / "record")[HALF : HALF + 1]
    assert [step["iteration"] for step in ours] == [HALF + 1]
    loss, norm = (worst_of_steps(ours, theirs, name) for name in ("lm loss", "grad_norm"))
    routers = worst_of_routers(router_losses(folder)[:1], router_losses(oracle.folder)[HALF : HALF + 1])
    for name, value in {"loss": loss, "grad norm": norm, "router losses": routers}.items():
        record_property(name, value)
    assert loss <= LOSS
    assert norm <= GRAD_NORM
    assert routers <= ROUTER_LOSS


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", RESUMED)
def test_another_layout_goes_on(name, oracles, tmp_path, record_property):
    saving, resuming, more = RESUMED[name]
    oracle = oracles(saving.model)
    run_layout(saving, oracle, tmp_path / "saved", *save(tmp_path / "saved", HALF))
    flags = [*oracle.model, "--load", str(tmp_path / "saved" / "ckpt"), *more]
    if resuming is None:
        run_stock([*flags], tmp_path / "resumed")
    else:
        run(resuming.processes, [*flags, *resuming.flags], tmp_path / "resumed")
    if more == NEW_OPTIMIZER:
        compare_first_step(tmp_path / "resumed", oracle, record_property)
    else:
        compare(tmp_path / "resumed", oracle, record_property, STEPS - HALF)
