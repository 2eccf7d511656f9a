"""`megatron-hdp simulate` as people run it: what it prints and writes against the simulator called by hand."""

import dataclasses
import json
import re
import statistics
import subprocess
import sys

import numpy as np
import pytest

from megatron_hdp import cli
from megatron_hdp.cost import load_profile
from megatron_hdp.memory import estimate, sized
from megatron_hdp.mixes import draw, parse_mix
from megatron_hdp.planner.bound import lower_bound
from megatron_hdp.simulate.runs import Progress, compare
from megatron_hdp.simulate.search import Search, Tried, candidates, search
from megatron_hdp.simulate.setting import parallel
from megatron_hdp.simulate.sweeps import Asked, sweep
from megatron_hdp.simulator import load_cluster
from megatron_hdp.simulator.files import read_simulation
from megatron_hdp.simulator.models import MODELS
from megatron_hdp.simulator.result import KINDS
from megatron_hdp.simulator.strategies import STRATEGIES, Setting, run_strategy

SMALL = "--lengths byted --model llama-7b --gpus 16 --context 32K --batch-tokens 512K --profile h100".split()
SETTING = Setting(
    model=MODELS["llama-7b"],
    gpus=16,
    context=32 << 10,
    hardware=load_profile("h100"),
    cluster=load_cluster("h100"),
)
BATCHES = [draw(parse_mix("byted"), 512 << 10, 32 << 10, (1234, step)) for step in range(3)]


def run(capsys, *arguments):
    """(exit code, stdout, stderr)"""
    code = cli.main(["simulate", *map(str, arguments)])
    out, err = capsys.readouterr()
    return code, out, err


def flat(text):
    """Without line breaks, which are where a line is full."""
    return " ".join(text.split())


def quiet(total):
    return Progress(total, clock=lambda: 0.0)


def row(out, label, *, table=0):
    """Numbers behind a label, of the n-th table that has it."""
    lines = [line for line in out.splitlines() if line.startswith(f"{label} ")]
    return [float(word.replace(",", "")) for word in lines[table].split()[1:] if word != "-"]


def test_numbers_are_those_of_the_simulator(capsys):
    code, out, err = run(capsys, *SMALL, "--no-search", "--strategies", "static,naive")
    assert (code, err) == (0, "")
    steps = {
        name: [run_strategy(name, lengths, SETTING, longest=32 << 10) for lengths in BATCHES]
        for name in ("hdp", "naive", "static")
    }
    seconds = {name: [step.result.seconds for step in found] for name, found in steps.items()}
    for name, found in steps.items():
        mean, least, most, times, tokens, mfu, compute, nic, _ = row(out, name)
        of = seconds[name]
        assert [mean, least, most] == pytest.approx([statistics.mean(of), min(of), max(of)], abs=0.0051)
        assert times == pytest.approx(sum(seconds["static"]) / sum(of), abs=0.0051)
        assert tokens == pytest.approx(sum(map(int, (b.sum() for b in BATCHES))) / sum(of), abs=0.51)
        assert mfu == pytest.approx(100 * sum(s.result.mfu * s.result.seconds for s in found) / sum(of), abs=0.051)
        assert compute == pytest.approx(100 * sum(s.result.compute.mean() for s in found) / sum(of), abs=0.051)
        assert nic == pytest.approx(8e-9 * max(s.result.nic_peak for s in found), abs=0.51)
        assert row(out, name, table=1)[0] == compute
    gains = [a / b for a, b in zip(seconds["static"], seconds["hdp"])]
    gain = sum(seconds["static"]) / sum(seconds["hdp"])
    assert f"HDP is {gain:.2f} times as fast ({min(gains):.2f} to {max(gains):.2f} in 3 steps)" in flat(out)
    short = sum(int(b[b <= 8192].sum()) for b in BATCHES) / sum(int(b.sum()) for b in BATCHES)
    assert f"{100 * short:.0f} % of the tokens are in sequences of up to 8K tokens" in flat(out)
    assert "--hdp --hdp-tokens-per-rank 8192 --hdp-batch-tokens 524288 --seq-length 32768" in out
    assert "tokens per rank" not in out.split("--seq-length")[1], "a table of the search, which was not asked for"


def test_where_time_goes_adds_up(capsys):
    """computing, optimizer and all causes are the whole step; causes without a column are below 0.05 % each."""
    names = [name for name in STRATEGIES if name != "megatron"]  # which imports torch
    _, out, _ = run(capsys, *SMALL, "--no-search", "--steps", 1, "--strategies", ",".join(names))
    able = [name for name in names if not re.search(rf"^{name} +cannot:", out, re.M)]
    assert len(able) >= 5
    for name in able:
        assert sum(row(out, name, table=1)) == pytest.approx(100, abs=0.9)


@pytest.mark.parametrize("stages", [1, 2])
def test_no_strategy_is_below_the_floor(stages):
    """The floor is a bound for every plan of the same capacity, whoever makes it."""
    setting = dataclasses.replace(SETTING, gpus=16 * stages, stages=stages)
    names = ("hdp", "bytescale", "naive", "pow2", "static")
    found = compare(names, BATCHES[:2], setting, longest=32 << 10, megatron=None, keep=(), progress=quiet(10))
    assert [run.name for run in found.runs] == list(names)
    for run_ in found.runs:
        assert (run_.failed, run_.timeline) == (None, None)
        for step, floor in zip(run_.steps, found.floors, strict=True):
            assert step["seconds"] > 0.999 * floor
    step = run_strategy("hdp", BATCHES[0], setting, longest=32 << 10)
    bound = lower_bound(BATCHES[0], 8, 8192, setting.cost, stages=stages)
    besides = step.result.seconds - step.result.span_seconds
    assert found.floors[0] == pytest.approx(besides + 1e-12 * bound.picoseconds)


def test_files(capsys, tmp_path):
    out_json, out_trace = tmp_path / "a.json", tmp_path / "b.json"
    flags = ["--strategies", "static,pow2", "--steps", 2, "--sweep", "offload", "--json", out_json]
    code, out, _ = run(capsys, *SMALL, *flags, "--trace", out_trace)
    assert code == 0
    found = read_simulation(out_json)
    assert found.lengths.tolist() == BATCHES[0].tolist()
    assert [run_.name for run_ in found.runs] == ["hdp", "pow2", "static"]
    assert [run_.timeline is not None for run_ in found.runs] == [True, False, True]
    for run_ in found.runs:
        for lengths, step in zip(BATCHES, run_.steps, strict=False):
            by_hand = run_strategy(run_.name, lengths, SETTING, longest=32 << 10)
            assert step["seconds"] == by_hand.result.seconds
            assert sum(tokens for _, tokens in step["ring_sizes"].values()) == int(lengths.sum())
            sizes, counts = np.unique(by_hand.plan.ring_size, return_counts=True)
            assert {int(k): v[0] for k, v in step["ring_sizes"].items()} == dict(zip(sizes, counts))
    assert all(sentence in flat(out) for sentence in found.verdict[:-1])
    assert found.setting["ranks"] == 8
    assert found.setting["shape"] == dataclasses.asdict(MODELS["llama-7b"].shape)
    assert set(found.sweeps) == {"offload", "search"}
    assert found.layer["attention_forward"] == SETTING.cost.layer_profile.attention_forward
    assert found.layer["link_bandwidth"] == load_cluster("h100").nic_bandwidth
    _check_trace(json.loads(out_trace.read_text()), [found.runs[0], found.runs[2]])


def _check_trace(data, runs):
    """Every bar of every timeline, once, where it is."""
    names = [e["args"]["name"] for e in data["traceEvents"] if e["name"] == "process_name"]
    assert names == [f"{run_.name}: {run_.words}" for run_ in runs]
    for pid, run_ in enumerate(runs):
        bars = [e for e in data["traceEvents"] if e["ph"] == "X" and e["pid"] == pid]
        line = run_.timeline
        assert [e["tid"] for e in bars] == line.lane.tolist()
        assert [e["cat"] for e in bars] == [KINDS[kind] for kind in line.kind]
        assert [e["ts"] for e in bars] == pytest.approx((1e6 * line.start).tolist(), abs=1)
        assert [e["ts"] + e["dur"] for e in bars] == pytest.approx((1e6 * line.end).tolist(), abs=1)
        ring = sum(e["args"].get("ring", 0) for e in bars)
        assert ring == pytest.approx(line.ring.sum(), abs=1e-6 * len(bars))


def test_search_takes_the_shortest_step_that_fits():
    gib = 2**30
    found = search(BATCHES[0], SETTING, (45 * gib, "test"), longest=32 << 10, with_static=True, progress=quiet)
    shape, spread = SETTING.spec.shape, parallel(SETTING)
    for tried in found.rows:
        setting = dataclasses.replace(SETTING, tokens_per_rank=tried.tokens_per_rank, offload=tried.offload)
        step = run_strategy("hdp", BATCHES[0], setting, longest=32 << 10)
        needed = estimate(shape, spread, tried.tokens_per_rank, longest=32 << 10, cost=setting.cost, plan=step.plan)
        assert (tried.seconds, tried.device_bytes) == (step.result.seconds, needed.device)
        assert tried.host_bytes == needed.host
        assert tried.fits == (needed.device <= 45 * gib)
        if tried.offload:
            assert tried.static_seconds is None
        else:
            static = run_strategy("static", BATCHES[0], setting, longest=32 << 10)
            assert tried.static_seconds == static.result.seconds
    best = found.best
    assert best.fits
    assert best.seconds <= 1.01 * min(tried.seconds for tried in found.rows if tried.fits)
    cheaper = [
        t for t in found.rows if t.fits and (t.offload, t.tokens_per_rank) < (best.offload, best.tokens_per_rank)
    ]
    assert all(t.seconds > 1.01 * min(u.seconds for u in found.rows if u.fits) for t in cheaper)


@pytest.mark.parametrize("gib", [20, 35, 45, 75, 1000])
@pytest.mark.parametrize("context", [16 << 10, 60_000, 256 << 10])
def test_capacities_that_are_tried(gib, context):
    setting = dataclasses.replace(SETTING, context=context, gpus=64)
    found = candidates(setting, context, gib << 30)
    assert found == sorted(set(found))
    assert 8192 in found, "the asked one is always tried"
    shape, spread = setting.spec.shape, parallel(setting)
    for capacity in found:
        assert capacity % setting.cost.pad_multiple == 0
        if capacity != 8192:
            assert capacity * setting.ranks >= context
            assert estimate(shape, spread, capacity, longest=context).device <= gib << 30
            assert capacity < 2 * context


def _tried(capacity, offload, seconds, *, fits=True, static=None):
    return Tried(
        tokens_per_rank=capacity,
        offload=offload,
        seconds=seconds,
        static_seconds=static,
        device_bytes=None if fits is None else 1,
        host_bytes=0,
        fits=fits,
    )


def test_best_of_a_search():
    def best(*rows):
        return Search(rows, 1, "", None).best

    assert best(_tried(8192, False, 2.0), _tried(8192, True, 1.0)).offload
    assert not best(_tried(8192, False, 1.009), _tried(8192, True, 1.0)).offload, "nearly as good, without offload"
    assert best(_tried(4096, False, 1.005), _tried(8192, False, 1.0)).tokens_per_rank == 4096
    assert best(_tried(4096, False, 1.5), _tried(8192, False, 1.0, fits=False)).tokens_per_rank == 4096
    assert best(_tried(4096, False, None), _tried(8192, False, 1.0, fits=False)) is None
    assert best(_tried(4096, False, 1.0, fits=None)) is None, "nobody knows what fits"
    rows = (_tried(4096, False, 1.0, static=9.0), _tried(8192, False, 1.0, static=3.0, fits=False))
    assert Search(rows, 1, "", None).best_static.static_seconds == 9.0


def asked(setting=SETTING, names=("hdp", "static"), longest=32 << 10):
    def lengths(context):
        return draw(parse_mix("byted"), 512 << 10, context, (1234, 0))

    return Asked(setting=setting, lengths=lengths, longest=longest, names=names, megatron=None, device_bytes=80 * 10**9)


@pytest.mark.parametrize(
    ("name", "value"),
    [("tokens-per-rank", 8192), ("ranks", 8), ("context", 32 << 10), ("bandwidth", 45e9), ("offload", 0)],
)
def test_a_sweep_passes_through_what_was_asked(name, value):
    rows = sweep(name, asked(), quiet)
    assert [r["value"] for r in rows] == sorted({r["value"] for r in rows})
    mine = next(r for r in rows if r["value"] == value)
    for strategy in ("hdp", "static"):
        assert mine[strategy] == run_strategy(strategy, BATCHES[0], SETTING, longest=32 << 10).result.seconds
    assert len(rows) >= 4


def test_sweeps_change_what_they_say():
    spread = sweep("bandwidth", asked(dataclasses.replace(SETTING, gpus=64)), quiet)
    static = [r["static"] for r in spread]
    assert static == sorted(static, reverse=True), "more bandwidth never hurts a fixed mesh"
    assert spread[0]["label"] == "90 Gb/s a GPU"
    pools = sweep("ranks", asked(), quiet)
    assert [r["label"] for r in pools] == [f"{n} ({2 * n} GPUs)" for n in (2, 4, 8, 16, 32)]
    assert pools[0]["hdp"] is None
    assert pools[0]["note"] == "the pool holds 16,384 tokens, the longest sequence has 32,768"
    assert pools[4]["hdp"] < 0.4 * pools[2]["hdp"]


def test_sweep_of_contexts_ends_at_the_longest_document():
    for longest, last in ((20_000, 32768), (32_768, 32768), (32_769, 65536)):
        rows = sweep("context", asked(names=("hdp",), longest=longest), quiet)
        assert [r["value"] for r in rows] == [v for v in (4096, 8192, 16384, 32768, 65536) if v <= last]


def test_sweep_says_what_does_not_fit():
    rows = sweep("tokens-per-rank", asked(names=("hdp",)), quiet)
    notes = {r["label"]: r.get("note", "") for r in rows}
    assert "the pool holds" in notes["2K"]
    assert re.fullmatch(r"needs [0-9.]+ GiB of a GPU", notes["32K"])
    assert notes["8K"] == ""


def test_one_sided_sweep_of_pools_with_experts():
    """Pools are multiples of the expert group."""
    setting = dataclasses.replace(SETTING, expert_group=4, gpus=24)
    rows = sweep("ranks", asked(setting, names=("hdp",)), quiet)
    assert [r["value"] for r in rows] == [4, 12, 24, 48]
    assert all(r["hdp"] is not None for r in rows)


def test_a_strategy_that_cannot_run_is_a_row(capsys, monkeypatch):
    from megatron_hdp.errors import PlanError

    def refuse(asked):
        raise PlanError("rings of 8 ranks and --seq-length, but 4 heads")

    broken = dataclasses.replace(STRATEGIES["naive"], plan=refuse)
    monkeypatch.setitem(STRATEGIES, "naive", broken)
    code, out, err = run(capsys, *SMALL, "--no-search", "--steps", 1, "--strategies", "naive,static")
    assert (code, err) == (0, "")
    assert "naive           cannot: rings of 8 ranks and --context, but 4 heads" in out
    monkeypatch.setitem(STRATEGIES, "static", dataclasses.replace(broken, words="static CP"))
    code, out, _ = run(capsys, *SMALL, "--no-search", "--steps", 1, "--strategies", "static")
    assert code == 0
    assert "static context parallelism cannot run this: rings of 8 ranks" in flat(out)
    monkeypatch.setitem(STRATEGIES, "hdp", broken)
    code, out, err = run(capsys, *SMALL)
    assert (code, out) == (2, "")
    assert err == "megatron-hdp: rings of 8 ranks and --context, but 4 heads\n"


def test_how_long_planning_took_changes_no_step(monkeypatch):
    """Or the same command would print other seconds on a busy machine."""
    calm = run_strategy("hdp", BATCHES[0], SETTING, longest=32 << 10)
    ticks = iter([0.0, 1e6])
    monkeypatch.setattr("megatron_hdp.simulator.strategies.time.perf_counter", lambda: next(ticks))
    busy = run_strategy("hdp", BATCHES[0], SETTING, longest=32 << 10)
    assert busy.plan_seconds == 1e6
    assert busy.result.seconds == calm.result.seconds
    assert busy.result.idle_seconds()["load"] == 0


def test_meshes_that_heads_do_not_divide_say_which_do(capsys):
    code, out, _ = run(capsys, *SMALL, "--gpus", 12, "--steps", 1, "--no-search", "--strategies", "ulysses")
    assert code == 0
    assert "a mesh of 6 ranks holds 32,768 tokens, and attention cannot be cut over so many" in flat(out)
    assert "and 1, 2, 4, 8, 16 ranks can share them: use --gpus or --tokens-per-rank" in flat(out)


def test_more_ranks_than_heads_are_a_row(capsys):
    flags = (
        "--lengths byted --model llama-7b --gpus 64 --context 256K --batch-tokens 512K --steps 1 --no-search".split()
    )
    code, out, _ = run(capsys, *flags, "--strategies", "static,ulysses")
    assert code == 0
    assert re.search(r"^ulysses +cannot: a mesh of 32 ranks holds 262,144 tokens", out, re.M)
    assert re.search(r"^static +[0-9]", out, re.M)


def test_without_an_estimate(capsys):
    flags = "--lengths byted --model mixtral-8x7b --gpus 128 --context 64K --batch-tokens 512K --steps 1".split()
    code, out, _ = run(capsys, *flags, "--profile", "h100", "--strategies", "static")
    assert code == 0
    assert "Best setting: not known, because models with experts have no estimate of memory" in flat(out)
    assert "--hdp-tokens-per-rank 8192" in out


def test_a_gpu_that_is_too_small(capsys):
    code, out, _ = run(capsys, *SMALL, "--steps", 1, "--strategies", "static", "--device-gib", 30)
    assert code == 0
    assert "none of those tried fits a GPU of 30.00 GiB (--device-gib); the least that any needs is" in flat(out)
    code, out, _ = run(capsys, *SMALL, "--steps", 1, "--strategies", "hdp", "--device-gib", 35)
    needed = estimate(MODELS["llama-7b"].shape, parallel(SETTING), 8192, longest=32 << 10).device
    assert f"the asked one would need {sized(needed)} and does not fit" in flat(out)
    assert "static context parallelism was not asked for" in flat(out)
    best = re.search(r"Best setting for a GPU of 35.00 GiB \(--device-gib\): ([0-9,]+) tokens per rank", flat(out))
    assert int(best[1].replace(",", "")) < 8192
    assert f"--hdp-tokens-per-rank {best[1].replace(',', '')} " in out


def test_without_a_search_what_is_asked_for_is_held_against_the_gpu(capsys):
    asked = [*SMALL, "--steps", 1, "--strategies", "hdp", "--no-search"]
    plan = run_strategy("hdp", BATCHES[0], SETTING, longest=32 << 10).plan
    found = estimate(MODELS["llama-7b"].shape, parallel(SETTING), 8192, longest=32 << 10, cost=SETTING.cost, plan=plan)
    _, out, _ = run(capsys, *asked)
    assert f"A GPU needs {sized(found.device)} with the settings asked for, and has 74.51 GiB" in flat(out)
    assert "On the training command:\n" in out
    _, out, _ = run(capsys, *asked, "--device-gib", 35)
    assert f"A GPU needs {sized(found.device)} with the settings asked for, which does not fit its 35.00" in flat(out)
    assert "On the training command, though it does not fit a GPU:\n  --hdp " in out


def test_offload_flags_for_training(capsys):
    code, out, _ = run(
        capsys, *SMALL, "--steps", 1, "--strategies", "hdp", "--no-search", "--offload", "--host-gib", 7.5
    )
    assert code == 0
    assert "offload in 7.50 GiB of a GPU's host memory" in out
    assert out.count("--hdp-offload --hdp-offload-gib 8\n") == 1


def test_progress_is_told_only_to_who_waits(capsys):
    now = [0.0]
    told = Progress(4, clock=lambda: now[0])
    for seconds in (0.0, 4.9, 5.1, 6.0):
        now[0] = seconds
        told.step(f"at {seconds}")
    assert capsys.readouterr().err == "megatron-hdp simulate: 2 of 4 simulations done in 5 s; now at 5.1\n"


def test_a_file_of_lengths(capsys, tmp_path):
    """The data of a file are those of the training run: the same batches as `megatron-hdp plan` has."""
    lengths = np.random.RandomState(0).geometric(1 / 3000, 4000)
    lengths[17] = 50_000
    (tmp_path / "a.txt").write_text("\n".join(map(str, lengths)))
    flags = ["--lengths", tmp_path / "a.txt", *SMALL[2:], "--steps", 2, "--strategies", "static", "--no-search"]
    code, out, _ = run(capsys, *flags)
    assert code == 0
    assert f"4,000 documents, {lengths.sum():,} tokens" in out
    code, _, err = run(capsys, *flags, "--field", "n")
    assert code == 2
    assert "n" in err


BLOCKED = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "megatron", "plotly", "jinja2"):
            raise ModuleNotFoundError(f"No module named {name!r}")
sys.meta_path.insert(0, Blocked())
from megatron_hdp.cli import main
sys.exit(main(sys.argv[1:]))
"""


def test_in_a_process_without_torch_and_megatron(capsys):
    flags = [*SMALL, "--steps", "1", "--no-search", "--strategies", "static,megatron"]
    alone = subprocess.run(
        [sys.executable, "-c", BLOCKED, "simulate", *flags], capture_output=True, text=True, timeout=120
    )
    assert alone.returncode == 0, alone.stderr
    assert re.search(r"megatron +cannot: .*install megatron-core", flat(alone.stdout))
    _, here, _ = run(capsys, *flags[:-1], "static")
    first = here.index("HDP is")
    assert alone.stdout[: first + 200] == here[: first + 200]
