"""Sentences of the verdict, from steps made up for it."""

import dataclasses

import numpy as np
import pytest

from megatron_hdp.memory import GIB
from megatron_hdp.simulate.report import render_search, render_strategies, render_sweep, render_time, render_verdict
from megatron_hdp.simulate.runs import Comparison
from megatron_hdp.simulate.search import Search, Tried, search_rows
from megatron_hdp.simulate.verdict import verdict
from megatron_hdp.simulator.files import StrategyRun
from megatron_hdp.simulator.models import MODELS
from megatron_hdp.simulator.result import CAUSES
from megatron_hdp.simulator.strategies import Setting

SETTING = Setting(model=MODELS["llama-7b"], gpus=16, context=32 << 10, tokens_per_rank=8192)
BATCH = np.array([8192, 4096, 4096, 8193, 32768 - 8193], np.int64)  # half of the tokens fit a rank


def numbers(seconds, *, ring=1, **idle):
    return {
        "seconds": seconds,
        "span_seconds": 0.9 * seconds,
        "tokens": int(BATCH.sum()),
        "tokens_per_second": BATCH.sum() / seconds,
        "mfu": None,
        "computing": 1 - sum(idle.values()),
        "idle": {cause: seconds * idle.get(cause, 0.0) for cause in CAUSES},
        "optimizer_seconds": 0.0,
        "bytes_by_link": {},
        "nic_peak": 1e9,
        "nic_mean": 1e8,
        "plan_seconds": 0.5,
        "ring_sizes": {"1": [1, 1], str(ring): [1, 1]},
    }


def ran(name, words, *steps):
    return StrategyRun(name=name, words=words, steps=steps)


def sentences(hdp, *others, floors=None, found=None, gib=10.0, setting=SETTING):
    floors = floors or tuple(0.9 * step["seconds"] for step in hdp.steps)
    compared = Comparison((hdp, *others), floors, None if gib is None else int(gib * GIB))
    return verdict(setting, [BATCH] * len(hdp.steps), compared, found, 4 << 20, (80 * GIB, "cluster h100"))


HDP = ran("hdp", "HDP", numbers(2.0, sync=0.05), numbers(4.0, sync=0.05))


def test_worth_it():
    static = ran("static", "static CP, ring of 8", numbers(8.0, ring=8), numbers(10.0, ring=8))
    found = sentences(HDP, ran("naive", "naive HDP", numbers(3.0), numbers(4.5)), static)
    assert found[:3] == (
        "HDP is worth it: with HDP a step takes 3.00 s, with static CP, ring of 8, 9.00 s. HDP is 3.00 times as fast "
        "(2.50 to 4.00 in 2 steps).",
        "Of the other ways, naive HDP comes closest: HDP is 1.25 times as fast (1.12 to 1.50 in 2 steps).",
        "At most: with this capacity no plan with rings across nodes makes the step shorter than 2.70 s, 3.33 times as "
        "fast as static; HDP reaches 90.0 % of that.",
    )
    assert found[-1] == (
        "On the training command: --hdp --hdp-tokens-per-rank 8192 --hdp-batch-tokens 4194304 --seq-length 32768"
    )


def test_plans_that_take_longer_than_steps_are_told():
    late = ran("hdp", "HDP", numbers(0.3) | {"plan_seconds": 0.8})
    assert not any("Planning" in sentence for sentence in sentences(HDP))
    assert sentences(late)[-3] == (
        "Planning a step took 0.80 s on this machine, longer than the step, which the seconds above leave out: "
        "training would wait for its plans."
    )


def test_an_estimate_is_no_plan():
    """And so is not what comes closest."""
    found = sentences(HDP, ran("naive", "naive HDP", *[numbers(6.0)] * 2), ran("blocks", "blocks", *[numbers(2.9)] * 2))
    assert found[1].startswith("Of the other ways, naive HDP comes closest: HDP is 2.00 times as fast")
    assert found[2] == (
        "No plan, but the best that its idea could do: blocks, 2.90 s a step. HDP is 0.97 times as fast (0.72 to "
        "1.45 in 2 steps)."
    )


def test_a_rival_that_wins_is_said_to_be_faster():
    hdp = ran("hdp", "HDP", numbers(75.22))
    found = sentences(hdp, ran("pow2", "dynamic CP, powers of two", numbers(75.16)))
    assert found[1] == "Of the other ways, dynamic CP, powers of two (pow2) is 0.1 % faster than HDP, 75.16 s a step."
    equal = sentences(hdp, ran("pow2", "dynamic CP, powers of two", numbers(75.21)))
    assert equal[1] == (
        "Of the other ways, dynamic CP, powers of two (pow2) comes closest: it is as fast as HDP, 75.21 s a step."
    )
    slower = sentences(hdp, ran("ulysses", "Ulysses, 8 ranks", numbers(150.44)))
    assert slower[1] == "Of the other ways, Ulysses, 8 ranks (ulysses) comes closest: HDP is 2.00 times as fast."


@pytest.mark.parametrize(
    ("seconds", "lead"),
    [
        (3.5, "HDP is worth it: "),
        (3.25, "HDP helps a little: "),
        (3.03, "HDP is hardly worth it for this data: "),
        (2.5, "HDP is hardly worth it for this data: "),
    ],
)
def test_leads(seconds, lead):
    static = ran("static", "static CP", numbers(seconds), numbers(seconds))
    assert sentences(HDP, static)[0].startswith(lead)


def test_why():
    static = ran("static", "static CP", numbers(9.0, ring=8) | {"computing": 0.4})
    for step in static.steps:
        step["idle"] |= {"ring": 9.0 * 0.55, "sync": 9.0 * 0.04, "copy": 9.0 * 0.005}
    hdp = ran("hdp", "HDP", numbers(2.0, sync=0.002))
    why = next(sentence for sentence in sentences(hdp, static) if sentence.startswith("Why"))
    assert why == (
        "Why: 33 % of the tokens are in sequences of up to 8K tokens, which one rank holds and which need no "
        "transfers. Static context parallelism sends them all round rings of 8 ranks. Its GPUs compute 40 % of the "
        "step and wait for transfers of rings 55 %, the slowest rank 4 %; HDP's compute 100 % of the step."
    )
    alone = next(sentence for sentence in sentences(hdp) if sentence.startswith("Why"))
    assert alone.endswith("need no transfers. The GPUs compute 100 % of the step.")


def test_shares_are_of_the_seconds_of_all_steps():
    """A step of 1 s that computes wholly and one of 9 s that does not compute at all are 10 % of computing."""
    hdp = ran("hdp", "HDP", numbers(1.0) | {"mfu": 0.5}, numbers(9.0, ring=4, sync=1.0) | {"mfu": 0.1})
    why = next(s for s in sentences(hdp) if s.startswith("Why"))
    assert why.endswith("The GPUs compute 10 % of the step and wait for the slowest rank 90 %.")
    words = render_strategies((hdp,)).splitlines()[1].split()
    assert words[6:8] == ["14.0", "10.0"]  # MFU and computing
    time = [line.split() for line in render_time((hdp,)).splitlines()]
    assert time[0][-2:] == ["computing", "sync"]
    assert time[1] == ["hdp", "10.0", "90.0"]


def test_static_on_one_rank_sends_nothing():
    static = ran("static", "static CP, ring of 1", numbers(2.1))
    why = next(s for s in sentences(ran("hdp", "HDP", numbers(2.0)), static) if s.startswith("Why"))
    assert "rings of" not in why
    assert "Static context parallelism needs no ring for any, and is plain data parallelism. Its GPUs" in why


def tried(capacity, seconds, *, offload=False, gib=10.0, fits=True, static=None, host=0.0):
    return Tried(
        tokens_per_rank=capacity,
        offload=offload,
        seconds=seconds,
        static_seconds=static,
        device_bytes=int(gib * GIB),
        host_bytes=int(host * GIB),
        fits=fits,
    )


def test_best_setting_and_its_flags():
    rows = (
        tried(8192, 2.0, static=8.0),
        tried(16384, 1.8, static=5.4, gib=40),
        tried(16384, 1.5, gib=41, offload=True, host=12.3),
        tried(32768, 1.4, gib=90, fits=False, static=4.0),
    )
    found = Search(rows, 80 * GIB, "--device-gib", None)
    said = sentences(HDP, found=found)
    assert (
        "Best setting for a GPU of 80.00 GiB (--device-gib): 16,384 tokens per rank with offload, a first step of "
        "1.50 s, 25.0 % shorter than with the settings asked for, which need 10.00 GiB. The best one needs 41.00 "
        "GiB and 12.30 GiB of host memory for each GPU, 98.40 GiB for a node." in said
    )
    assert (
        "Each at its best: static context parallelism is fastest with 16,384 tokens per rank, a first step of 5.40 s; "
        "with its own best setting, HDP is 3.60 times as fast." in said
    )
    assert said[-1].endswith(
        "--hdp-tokens-per-rank 16384 --hdp-batch-tokens 4194304 --seq-length 32768 --hdp-offload --hdp-offload-gib 13"
    )
    table = render_search(found).splitlines()
    assert [line.split()[-1] for line in table[1:5]] == ["10.0", "40.0", "best", "fit"]
    assert [r["note"] for r in search_rows(found)] == [
        "10.00 GiB of a GPU",
        "40.00 GiB of a GPU",
        "41.00 GiB of a GPU, best",
        "90.00 GiB of a GPU, does not fit",
    ]


def test_asked_setting_is_best():
    found = Search((tried(8192, 2.0), tried(16384, 1.99)), 80 * GIB, "cluster h100", None)
    said = sentences(HDP, found=found)
    assert any(s.endswith("a first step of 2.00 s, as asked. It needs 10.00 GiB.") for s in said)


@pytest.mark.parametrize(
    ("static", "lead", "fair"),
    [(2.2, "HDP is worth it", "1.10"), (2.1, "HDP helps a little", "1.05"), (2.0, "HDP is hardly worth it", "1.00")],
)
def test_best_settings_of_both_decide_where_they_are_known(static, lead, fair):
    rows = (tried(8192, 2.0, static=8.0), tried(16384, 2.1, static=static), tried(32768, 2.0, static=1.0, fits=False))
    run = ran("static", "static CP, ring of 4", numbers(8.0), numbers(16.0))
    first = sentences(HDP, run, found=Search(rows, 80 * GIB, "cluster h100", None))[0]
    assert first.startswith(f"{lead}")
    assert first.endswith(
        "with static CP, ring of 4, 12.00 s. HDP is 4.00 times as fast (4.00 to 4.00 in 2 steps) at 8K tokens per "
        f"rank; with each at its best capacity {fair} times as fast, by the first step."
    )
    nothing_fits = tuple(dataclasses.replace(row, fits=False) for row in rows)
    first = sentences(HDP, run, found=Search(nothing_fits, 80 * GIB, "cluster h100", None))[0]
    assert first.startswith("HDP is worth it: ")
    assert first.endswith("HDP is 4.00 times as fast (4.00 to 4.00 in 2 steps).")


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(1.9, "5.0 % shorter than with"), (2.01, "0.5 % longer than with"), (2.0001, "as long as with")],
)
def test_the_best_setting_against_the_one_asked_for(seconds, words):
    """A smaller capacity is better even if its step is a little longer."""
    found = Search((tried(4096, seconds, gib=9), tried(8192, 2.0, gib=11)), 80 * GIB, "cluster h100", None)
    said = next(s for s in sentences(HDP, found=found, gib=11) if s.startswith("Best"))
    assert said.endswith(f" s, {words} the settings asked for, which need 11.00 GiB. The best one needs 9.00 GiB.")


def test_what_the_settings_asked_for_need_is_said_without_a_search():
    assert sentences(HDP, gib=79.5)[-2:] == (
        "A GPU needs 79.50 GiB with the settings asked for, and has 80.00 GiB (cluster h100).",
        "On the training command: --hdp --hdp-tokens-per-rank 8192 --hdp-batch-tokens 4194304 --seq-length 32768",
    )
    assert sentences(HDP, gib=80.5)[-2:] == (
        "A GPU needs 80.50 GiB with the settings asked for, which does not fit its 80.00 GiB (cluster h100). Lower "
        "--tokens-per-rank, use more --tp or --stages, or --recompute full, or leave out --no-search to look for what "
        "fits.",
        "On the training command, though it does not fit a GPU: --hdp --hdp-tokens-per-rank 8192 --hdp-batch-tokens "
        "4194304 --seq-length 32768",
    )
    experts = dataclasses.replace(SETTING, model=MODELS["mixtral-8x7b"], gpus=128)
    assert sentences(HDP, gib=None, setting=experts)[-2] == (
        "What a GPU needs is not known, because models with experts have no estimate of memory (docs/memory.md)."
    )


def test_flags_that_do_not_fit_are_marked_where_nothing_fits():
    found = Search((tried(8192, 2.0, gib=95, fits=False), tried(4096, 3.0, gib=90, fits=False)), 80 * GIB, "x", None)
    said = sentences(HDP, found=found, gib=95)
    assert said[-2].startswith(
        "Best setting: none of those tried fits a GPU of 80.00 GiB (x); the least that any needs is 90.00 GiB, the one "
        "asked for 95.00 GiB."
    )
    assert said[-1].startswith("On the training command, though it does not fit a GPU: --hdp ")


def test_tables_are_not_wider_than_a_terminal():
    failed = StrategyRun(name="ulysses", words="", steps=(), failed="heads " * 60)
    runs = (HDP, ran("static", "static CP", numbers(9e5), numbers(8e5)), failed)
    rows = ({"value": 1, "label": "8K", "hdp": 2.0, "static": None, "pow2": 3.0, "note": "needs more " * 30},)
    text = "\n".join(
        [render_strategies(runs), render_time(runs[:2]), render_sweep("ranks", rows, ["hdp", "static", "pow2"])]
    )
    assert max(map(len, text.splitlines())) <= 120
    assert "MFU needs a --cluster" in " ".join(text.split())
    assert render_verdict(["a " * 100, "On the command: --hdp " + "--x " * 90]).count("\n") == 3
