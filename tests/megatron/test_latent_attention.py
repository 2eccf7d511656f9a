"""Latent attention (MLA) over rings: the training of stock Megatron on one rank."""

from types import SimpleNamespace

import pytest
from conftest import ADAM, MODEL, NO_EVALUATION, stock, train
from record import read_steps

from megatron_hdp.seams.refuse import REFUSALS

STEPS = 3
# the plain layer spec shapes its output by --kv-channels, so it is the size of values
LATENT = (
    "--multi-latent-attention --kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 8 --kv-channels 8"
).split()
COMPRESSED = ["--q-lora-rank", "20"]
PLAIN, YARN = ["--rope-type", "rope"], "--rope-type yarn --rotary-scaling-factor 4 --mscale 0.7".split()
ROWS_CUT_BY_FOUR = "--tensor-model-parallel-size 4 --sequence-parallel --make-vocab-size-divisible-by 32".split()
ROWS_CUT_BY_TWO = "--tensor-model-parallel-size 2 --sequence-parallel --make-vocab-size-divisible-by 64".split()
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1".split()
# name -> model, and flags of the run with --hdp; 4 ranks each
CASES = {
    "yarn, rings": ([*COMPRESSED, *YARN], ["--hdp-tokens-per-rank", "24", "--use-distributed-optimizer"]),
}
MORE = {
    f"{exchange}, {name}": (model, ["--hdp-exchange", exchange, "--hdp-tokens-per-rank", "24", *more])
    for exchange in ("gather", "heads")
    for name, model in {"yarn": YARN, "plain": [*COMPRESSED, *PLAIN]}.items()
    for more in ([], ["--recompute-granularity", "selective"])
}
MORE["plain, one head of a process, rows cut, recompute"] = (
    PLAIN,
    [*ROWS_CUT_BY_FOUR, *FULL, "--hdp-tokens-per-rank", "96"],
)
MORE["rings, rows cut"] = ([*COMPRESSED, *YARN], [*ROWS_CUT_BY_TWO, "--hdp-tokens-per-rank", "48"])


def flags_of(corpus, model):
    grouped = MODEL.index("--group-query-attention")
    common = [*MODEL[:grouped], *MODEL[grouped + 3 :], *ADAM, "--adam-eps", "1e-2", *NO_EVALUATION, *LATENT, *model]
    return [*common, "--global-batch-size", "8", "--train-iters", str(STEPS), "--data-path", corpus]


def assert_equal_to_stock(corpus, case, folder):
    model, more = case
    flags = flags_of(corpus, model)
    train(4, [*flags, "--hdp", *more], folder / "hdp").check()
    ours, theirs = read_steps(folder / "hdp" / "record"), stock(flags, folder / "stock")
    assert len(ours) == len(theirs) == STEPS
    for a, b in zip(ours, theirs, strict=True):
        assert a["lm loss"] == pytest.approx(b["lm loss"], rel=1e-6)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_equal_to_stock_megatron(name, corpus, tmp_path):
    assert_equal_to_stock(corpus, CASES[name], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_equal_to_stock_megatron_with_other_exchanges(name, corpus, tmp_path):
    assert_equal_to_stock(corpus, MORE[name], tmp_path)


@pytest.mark.parametrize("is_fused", [True, False])
def test_fused_positions_are_refused(is_fused):
    """On CPU ranks the flag is off, so no command line gets there."""
    args = SimpleNamespace(multi_latent_attention=True, apply_rope_fusion=is_fused)
    (refusal,) = [known for known in REFUSALS if known.flag.startswith("--multi-latent-attention")]
    assert refusal.applies(args) == is_fused
    assert "--no-rope-fusion" in refusal.why
