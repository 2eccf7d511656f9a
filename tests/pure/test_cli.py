"""The command line in this process, and once in another one without torch: output, files, exit codes, messages."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron_hdp import cli
from megatron_hdp.cost import CostModel, load_profile
from megatron_hdp.data.corpus import TokenBudget, open_corpus
from megatron_hdp.data.indexed import write_indexed
from megatron_hdp.memory import ModelShape, Parallel, estimate, sized
from megatron_hdp.mixes import draw, parse_mix
from megatron_hdp.plan_json import to_pieces_json
from megatron_hdp.plan_step import PlanOptions, plan_step, planner_of
from megatron_hdp.planner import check, plan, summarize
from megatron_hdp.planner.baselines import BASELINES, packed_rank_ends, plan_static_smallest
from megatron_hdp.planner.entry import default_cost
from megatron_hdp.planner.host import host_peaks
from megatron_hdp.types import Plan

BYTED = "--ranks 8 --tokens-per-rank 8K --context 32K --batch-tokens 512K --lengths byted".split()


def run(capsys, *arguments):
    """(exit code, stdout, stderr)"""
    code = cli.main([str(a) for a in arguments])
    out, err = capsys.readouterr()
    return code, out, err


def printed(out, label):
    """Numbers that stand behind a label."""
    line = next(line for line in out.splitlines() if line.startswith(label))
    return [float(word.replace(",", "")) for word in line.removeprefix(label).split()]


@pytest.fixture
def corpus(tmp_path):
    lengths = np.random.RandomState(0).geometric(0.005, 2000)
    lengths[5] = 9000
    write_indexed(tmp_path / "corpus", [np.zeros(v, np.int64) for v in lengths], np.uint16)
    return tmp_path / "corpus.idx"


def test_lengths_of_a_corpus(capsys, corpus):
    code, out, err = run(capsys, "lengths", corpus)
    assert (code, err) == (0, "")
    tokens = open_corpus([corpus.with_suffix("")], context=1, seed=0, size=TokenBudget(1)).tokens
    assert f"2,000 documents, {tokens:,} tokens" in out
    assert re.search(r"^ +16K +1 .* #", out, re.M)


def test_lengths_of_a_mix(capsys):
    code, out, err = run(capsys, "lengths", "github", "--documents", "8K", "--seed", 3)
    assert (code, err) == (0, "")
    total = int(parse_mix("github").sample(np.random.RandomState(3), 8192).sum())
    assert f"github: 8,192 documents, {total:,} tokens" in out
    assert "Figure 4 of ByteScale" in out


def test_lengths_of_a_named_field(capsys, tmp_path):
    (tmp_path / "a.csv").write_text("name,n\nx,70\ny,30\n")
    code, out, _ = run(capsys, "lengths", tmp_path / "a.csv", "--field", "n")
    assert code == 0
    assert "2 documents, 100 tokens" in out


def cost_of(layers=32, **settings):
    return CostModel(load_profile(settings.pop("profile", "bytescale")), layers, **settings)


BATCH = draw(parse_mix("byted"), 512 << 10, 32 << 10, (1234, 0))


@pytest.mark.parametrize(
    ("flags", "algorithm", "cost", "options"),
    [
        ("", "hdp", {}, {}),
        ("--algorithm static", "static", {}, {}),
        ("--offload", "hdp", {}, {"offload": True}),
        ("--algorithm naive --offload", "naive", {}, {"offload": True}),
        ("--algorithm pow2 --profile h100", "pow2", {"profile": "h100"}, {}),
        ("--stages 2 --virtual-stages 2", "hdp", {"layers": 16}, {"stages": 2, "virtual_stages": 2, "balance": "pp"}),
        ("--stages 2 --algorithm bytescale", "bytescale-pp", {"layers": 16}, {"stages": 2, "balance": "pp"}),
        ("--algorithm bytescale --layers-per-stage 7", "bytescale", {"layers": 7}, {}),
        ("--expert-group 4", "hdp", {}, {"expert_group": 4, "balance": "pp"}),
        ("--pad-multiple 8 --recompute full", "hdp", {"recompute": "full", "pad_multiple": 8}, {"pad_multiple": 8}),
        ("--window 4096 --layer figure-6a", "hdp", {"window": 4096, "layer": "figure-6a"}, {}),
        ("--profile FILE", "hdp", {"profile": "h100"}, {}),
    ],
)
def test_plan_of_one_step(capsys, tmp_path, flags, algorithm, cost, options):
    out_file, pieces_file, profile = tmp_path / "plan.json", tmp_path / "pieces.json", tmp_path / "profile.json"
    load_profile("h100").save(profile)
    words = [str(profile) if word == "FILE" else word for word in flags.split()]
    code, out, err = run(capsys, "plan", *BYTED, *words, "--json", out_file, "--json-pieces", pieces_file)
    assert (code, err) == (0, "")
    model = cost_of(**cost)
    expected = plan(BATCH, 8, 8192, algorithm=algorithm, cost=model, **options)
    written = Plan.from_json(out_file.read_text())
    assert written == expected
    assert out_file.read_text() == expected.to_json() + "\n"
    assert pieces_file.read_text() == to_pieces_json(expected) + "\n"
    layout = {name: value for name, value in options.items() if name in ("stages", "virtual_stages", "expert_group")}
    check(written, **layout)
    assert_printed(out, expected, summarize(expected, model, **layout))
    assert ("a pack's keys in one slice" in out) == (algorithm == "static")


def assert_printed(out, expected, summary):
    assert printed(out, "sequences") == [summary.sequences]
    assert printed(out, "tokens") == [512 << 10]
    assert printed(out, "padding, % of tokens held") == [pytest.approx(100 * summary.padding_fraction, abs=5e-5)]
    assert printed(out, "micro-batches, rank with fewest") == [summary.microbatches_min]
    assert printed(out, "micro-batches, rank with most") == [summary.microbatches_max]
    assert printed(out, "imbalance: busiest rank / mean work") == [pytest.approx(summary.imbalance, abs=5e-5)]
    assert printed(out, "span, s") == [pytest.approx(summary.span_seconds, abs=5.1e-5)]
    assert printed(out, "bound: no plan is faster, s") == [pytest.approx(summary.bound_seconds, abs=5.1e-5)]
    assert printed(out, "efficiency: bound / span, %") == [pytest.approx(100 * summary.efficiency, abs=5.1e-3)]
    assert f"{summary.binding} {summary.bound_seconds:.4f}" in out
    assert printed(out, "peers of a rank, most") == [summary.peers_max]
    assert printed(out, "plan time, ms")[0] > 0
    assert f"digest {expected.digest().hex()}" in out
    rows = re.findall(r"^(\d+)(?: - (\d+))? +([\d,]+) +[\d.]+ +[\d.]+", out, re.M)
    dull = {}
    for low, high, count in rows:
        dull[int(high or low)] = int(count.replace(",", ""))
    tops = {top: sum(1 for size in expected.ring_size if top // 2 < size <= top) for top in (1, 2, 4, 8)}
    assert dull == {top: count for top, count in tops.items() if count}


def test_a_static_mesh_holds_the_context_not_only_this_batch(capsys, tmp_path):
    """A run's mesh is fixed before its first batch is seen."""
    out_file = tmp_path / "plan.json"
    flags = "--ranks 8 --tokens-per-rank 8K --context 64K --batch-tokens 64K --algorithm static-smallest".split()
    code, out, err = run(capsys, "plan", "--lengths", "lognormal:128,64K,1K,0.5", *flags, "--json", out_file)
    assert (code, err) == (0, "")
    result = Plan.from_json(out_file.read_text())
    assert result.lengths.max() < 8192
    assert set(result.ring_size.tolist()) == {8}
    assert result == plan_static_smallest(result.lengths, 8, 8192, 2, cost=cost_of(), longest=64 << 10)
    together = packed_rank_ends(result, cost_of()).max() / 1e12
    assert printed(out, "span, a pack's keys in one slice, s") == [pytest.approx(together, abs=5.1e-5)]


def test_comparison_has_a_row_for_every_algorithm(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "megatron", None)  # importing it takes seconds; tests/megatron runs its scheduler
    code, out, err = run(capsys, "plan", *BYTED, "--compare", "--steps", 3)
    assert (code, err) == (0, "")
    batches = [draw(parse_mix("byted"), 512 << 10, 32 << 10, (1234, step)) for step in range(3)]
    spans = {}
    for name in ("hdp", *(name for name in BASELINES if name != "bytescale-pp")):
        options = PlanOptions(num_ranks=8, tokens_per_rank=8192, cost=cost_of(), algorithm=name, longest=32 << 10)
        summaries = [summarize(planner_of(options)(batch)) for batch in batches]
        spans[name] = sorted(summary.span_seconds for summary in summaries)[1]
        span, ratio, efficiency, *_ = printed(out, f"{name} ")
        assert span == pytest.approx(spans[name], abs=5.1e-5)
        assert ratio == pytest.approx(spans[name] / spans["hdp"], abs=5.1e-4)
        assert efficiency == pytest.approx(100 * sorted(s.efficiency for s in summaries)[1], abs=5.1e-3)
    assert re.search(r"^megatron +(\d|cannot: )", out, re.M)
    assert out.count("a pack in one slice") >= 2


def test_comparison_says_why_an_algorithm_cannot(capsys):
    code, out, err = run(capsys, "plan", *BYTED, "--compare", "--stages", 2)
    assert (code, err) == (0, "")
    assert re.search("^megatron +cannot: (.*without pipeline stages|no BalancedCPScheduler)", out, re.M)
    assert printed(out, "bytescale ")[0] > 0


def test_plans_of_several_steps(capsys, tmp_path):
    out_file = tmp_path / "plans.json"
    code, out, err = run(capsys, "plan", *BYTED, "--steps", 3, "--seed", 5, "--json", out_file)
    assert (code, err) == (0, "")
    plans = [plan(draw(parse_mix("byted"), 512 << 10, 32 << 10, (5, step)), 8, 8192) for step in range(3)]
    written = json.loads(out_file.read_text())
    assert [Plan.from_json(json.dumps(p)) for p in written] == plans
    assert out_file.read_text().splitlines()[1].rstrip(",") == plans[0].to_json()
    low, median, high = sorted(p.num_sequences for p in plans)
    assert printed(out, "sequences") == [low, median, high]
    summaries = [summarize(p) for p in plans]
    imbalances = sorted(summary.imbalance for summary in summaries)
    assert printed(out, "imbalance: busiest rank / mean work") == pytest.approx(imbalances, abs=5e-5)
    spans = sorted(summary.span_seconds for summary in summaries)
    assert printed(out, "span, s") == pytest.approx(spans, abs=5.1e-5)
    binding = [summary.binding for summary in summaries]
    assert all(f"in {binding.count(name)}" in out for name in binding)
    again = run(capsys, "plan", *BYTED, "--steps", 3, "--seed", 5)[1]
    digest = re.search(r"digest of all 3 digests ([0-9a-f]{64})", out)[1]
    assert digest in again
    assert digest not in run(capsys, "plan", *BYTED, "--steps", 3, "--seed", 6)[1]


def test_hops_equal_a_dull_walk_over_pieces():
    lengths = np.array([30000, 5, 8193, 100, 20000])
    step = plan_step(lengths, PlanOptions(num_ranks=4, tokens_per_rank=8192, cost=default_cost()))
    planned = plan(lengths, 4, 8192)
    hops = sum(
        piece.real_tokens * (piece.ring.size - 1)
        for rank in planned
        for micro_batch in rank
        for piece in micro_batch.pieces
    )
    assert step.hops == pytest.approx(hops / lengths.sum())
    assert step.hops > 1


def test_steps_of_a_corpus_are_those_of_training(capsys, corpus, tmp_path):
    out_file = tmp_path / "plans.json"
    flags = "--ranks 4 --tokens-per-rank 1K --context 4K --batch-tokens 32K --steps 2 --seed 7".split()
    for name in (corpus, corpus.with_suffix("")):
        code, _, err = run(capsys, "plan", "--lengths", name, *flags, "--json", out_file)
        assert (code, err) == (0, "")
        run_corpus = open_corpus([corpus.with_suffix("")], context=4096, seed=7, size=TokenBudget(32 << 10))
        steps = [p["lengths"] for p in json.loads(out_file.read_text())]
        assert steps == [run_corpus.batch(step).lengths.tolist() for step in range(2)]


def changed(**flags):
    """The flags of `BYTED`, some of them changed."""
    base = dict(zip(BYTED[::2], BYTED[1::2]))
    base.update({f"--{name.replace('_', '-')}": value for name, value in flags.items()})
    return [word for pair in base.items() for word in pair]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["lengths", "gone.txt"], "gone.txt: no such file"),
        (["lengths", "commoncrawl"], "commoncrawl: no such file.*byted, github"),
        (["lengths", "lognormal:1,2"], "give four numbers"),
        (["lengths", "byted", "--documents", "many"], "--documents is 'many'"),
        (["lengths", "byted", "--documents", "1G"], "--documents is 1,073,741,824: draw at most"),
        (["lengths", "byted", "--seed", "-1"], "--seed is -1"),
        (["lengths", "byted", "--field", "n"], "--field n: a mix has no fields"),
        (["plan", *changed(field="n")], "--field n: a mix has no fields"),
        (["plan", *changed(tokens_per_rank="8Q")], "--tokens-per-rank is '8Q'.*8K or 2M"),
        (["plan", *changed(tokens_per_rank="8191")], "--tokens-per-rank is 8191.*so use 8190 or 8192"),
        (["plan", *changed(tokens_per_rank="7", context="2M")], "--tokens-per-rank is 7:.*multiples of 2 .*use 6 or 8"),
        (["plan", *changed(tokens_per_rank="1")], "--tokens-per-rank is 1:.* use 2$"),
        (["plan", *changed(tokens_per_rank="2G")], "--tokens-per-rank is 2,147,483,648: .* at most 2,147,483,647"),
        (["plan", *changed(tokens_per_rank="999999999999999999G")], "--tokens-per-rank is .* at most 2,147,483,647"),
        (["plan", *changed(context="999999999999999999G")], "--context is .* at most 2,147,483,647"),
        (["plan", *changed(batch_tokens="999999999999999999G")], "--batch-tokens is .* at most 2,147,483,647"),
        (["plan", *changed(window="99999999999999999999")], "--window is .*: too large, .* at most 2,147,483,647"),
        (
            ["plan", *changed(pad_multiple="1000000000")],
            "--pad-multiple is 1,000,000,000: too large, .* at most 65,536",
        ),
        (["plan", *changed(layers_per_stage="99999999999999999999")], "--layers-per-stage is .*: too large"),
        (["plan", *changed(ranks="1048577")], "--ranks is 1,048,577: plan for at most 1,048,576"),
        (["plan", *changed(ranks="999999999999")], "--ranks is 999,999,999,999: plan for at most 1,048,576"),
        (
            ["plan", *changed(stages="3", virtual_stages="11")],
            "--virtual-stages is 11, .* 10 layers .assumed: 32 over 3",
        ),
        (
            ["plan", *changed(stages="2", virtual_stages="3", layers_per_stage="8")],
            "--virtual-stages is 3, and a stage has 8 layers .--layers-per-stage.: they must divide into equal parts",
        ),
        (["plan", *changed(lengths="lognormal:1,1,1,0", batch_tokens="1G")], "lower --batch-tokens to 16,777,216"),
        (["plan", *changed(json="a.json", json_pieces="./a.json")], "--json and --json-pieces are both a.json"),
        (["plan", *changed(json="")], "--json .: cannot be written .it is a folder"),
        (["plan", *changed(context="x")], "--context is 'x'"),
        (["plan", *changed(batch_tokens="-5K")], "--batch-tokens is '-5K'"),
        (["plan", *changed(batch_tokens="4G")], "--batch-tokens is 4,294,967,296.*int32"),
        (["plan", *changed(ranks="0")], "--ranks is 0"),
        (["plan", *changed(ranks="-1")], "--ranks is -1"),
        (["plan", *changed(ranks="3")], "--ranks to at least 4, --tokens-per-rank to at least 10,924, or --context"),
        (["plan", *changed(steps="0")], "--steps is 0"),
        (["plan", *changed(seed="4294967296")], "--seed is 4294967296"),
        (["plan", *changed(algorithm="magic")], "--algorithm is 'magic': choose one of hdp, static"),
        (["plan", *changed(balance="none")], "--balance is 'none': choose one of auto, dp, pp"),
        (["plan", *changed(balance="dp", stages="2")], "--balance dp with 2 pipeline stages"),
        (["plan", *changed(virtual_stages="2")], "--virtual-stages is 2 with one pipeline stage"),
        (["plan", *changed(stages="0")], "--stages is 0"),
        (["plan", *changed(stages="2", virtual_stages="0")], "--stages is 2 and --virtual-stages 0"),
        (["plan", *changed(expert_group="3")], "expert groups of 3 .* pool of 8: use a divisor as --expert-group"),
        (["plan", *changed(expert_group="2", balance="dp")], "--balance dp with expert groups of 2"),
        (["plan", *changed(layers_per_stage="0")], "--layers-per-stage is 0"),
        (["plan", *changed(profile="tpu")], "--profile 'tpu' is neither a shipped one .bytescale, h100."),
        (["plan", *changed(layer="gpt")], "gpt.*llama-7b"),
        (["plan", *changed(window="0")], "--window is 0: .*leave --window out"),
        (["plan", *changed(pad_multiple="3")], "--pad-multiple is 3"),
        (["plan", *changed(pad_multiple="6")], "--tokens-per-rank is 8192.* 8190 or 8196"),
        (["plan", *changed(algorithm="bytescale-pp")], "--algorithm is 'bytescale-pp'"),
        (["plan", *changed(megatron_checkout="/")], "--megatron-checkout does nothing with --algorithm hdp"),
        (["plan", *changed(json="plan.json"), "--compare"], "--json with --compare: whose plan"),
        (["plan", *changed(json_pieces="no/such/folder/out.json")], "--json-pieces .*no folder no/such/folder"),
        (["plan", *changed(ranks="3"), "--compare"], "--ranks to at least 4"),
        (["plan", *changed(lengths="nothing")], "nothing: no such file"),
        (["plan", *changed(json="no/such/folder/out.json")], "no folder no/such/folder"),
    ],
)
def test_bad_requests_end_with_2_and_one_line(capsys, monkeypatch, tmp_path, arguments, message):
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, *arguments)
    assert code == 2
    assert out == ""
    assert re.search(f"^megatron-hdp: .*{message}", err)
    assert err.count("\n") == 1
    assert "--hdp-" not in err


def test_a_step_that_could_be_empty_names_this_commands_flag(capsys, corpus):
    flags = "--ranks 4 --tokens-per-rank 8K --context 16K --batch-tokens 1K".split()
    code, _, err = run(capsys, "plan", "--lengths", corpus, *flags)
    assert code == 2
    assert "set --batch-tokens to at least 9000" in err


def test_output_that_cannot_be_written(capsys, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("megatron_hdp.plan_command.plan_step", None)  # nothing is planned before it is refused
        for flag in ("--json", "--json-pieces"):
            code, _, err = run(capsys, "plan", *BYTED, flag, tmp_path)
            assert code == 2
            assert f"{flag} {tmp_path}: cannot be written (it is a folder)" in err
    if os.path.exists("/dev/full"):
        code, _, err = run(capsys, "plan", *BYTED, "--json", "/dev/full")
        assert code == 2
        assert re.fullmatch(r"megatron-hdp: --json /dev/full: cannot be written \(.*\)\n", err)


def test_a_file_that_a_step_would_repeat_many_times_names_this_commands_flag(capsys, tmp_path):
    (tmp_path / "a.txt").write_text("700\n800\n")
    flags = "--ranks 4 --tokens-per-rank 8K --context 16K --batch-tokens 100M".split()
    code, _, err = run(capsys, "plan", "--lengths", tmp_path / "a.txt", *flags)
    assert code == 2
    assert "has 1,500 tokens: a step would repeat it more than 64 times; set --batch-tokens to at most 96,000" in err


def test_a_folder_is_called_one(capsys, tmp_path):
    (tmp_path / "x.txt").mkdir()
    code, out, err = run(capsys, "lengths", tmp_path / "x.txt")
    assert (code, out) == (2, "")
    assert "x.txt: is a folder" in err


@pytest.mark.parametrize(
    ("words", "layers"),
    [
        ("--stages 3", "10 layers a stage (assumed: 32 over 3 stages)"),
        ("", "32 layers a stage (assumed: 32 over 1 stage)"),
        ("--stages 2 --layers-per-stage 9 --virtual-stages 3", "9 layers a stage\n"),
        ("--stages 2 --virtual-stages 16", "16 layers a stage (assumed: 32 over 2 stages)"),
    ],
)
def test_the_head_says_what_layers_are_assumed(capsys, words, layers):
    code, out, err = run(capsys, "plan", *BYTED, *words.split())
    assert (code, err) == (0, "")
    assert layers in out
    assert out.startswith(f"byted: {parse_mix('byted').source}\n")


def test_ctrl_c_ends_quietly(capsys, monkeypatch):
    def stopped(install: bool = True) -> int:
        """Stop."""
        print("half")
        raise KeyboardInterrupt

    monkeypatch.setitem(cli.COMMANDS, "doctor", stopped)
    assert run(capsys, "doctor") == (130, "half\n", "")


@pytest.mark.parametrize("words", ["lengths byted --documents 1K", "plan --help"])
def test_a_closed_pipe_ends_quietly(words):
    read_end, write_end = os.pipe()
    os.close(read_end)
    with open(write_end, "wb") as closed:
        done = alone(words, closed)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_one_line():
    with open("/dev/full", "wb") as full:
        done = alone("lengths byted --documents 1K", full)
    assert done.returncode == 2
    assert re.fullmatch("megatron-hdp: the output cannot be written: .*\n", done.stderr)


def alone(words, output):
    """The command in a process of its own that writes to an open file."""
    command = [sys.executable, "-m", "megatron_hdp.cli", *words.split()]
    return subprocess.run(command, stdout=output, stderr=subprocess.PIPE, text=True, timeout=60)


def test_pages_hold_no_placeholder():
    pages = list((Path(__file__).parents[2] / "docs").glob("*.md"))
    assert {"planner.md", "cost-model.md", "plan-schema.md"} <= {page.name for page in pages}
    assert [page.name for page in pages if re.search("@[A-Z_]+@", page.read_text())] == []


@pytest.mark.parametrize(
    "arguments", [["nonsense"], ["plan", "--lengths", "byted"], ["plan", *changed(ranks="many")], ["lengths"], []]
)
def test_what_the_parser_refuses_also_ends_with_2(arguments):
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 2


@pytest.mark.parametrize("command", ["lengths", "plan"])
def test_help_states_the_units(capsys, command):
    with pytest.raises(SystemExit) as stop:
        cli.main([command, "--help"])
    assert stop.value.code == 0
    words = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "1024, 1024^2 and 1024^3" in words
    if command == "plan":
        assert "measured on this machine" in words
        assert "no plan of the same batch can be faster than the bound" in words


BLOCKED = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "megatron"):
            raise ModuleNotFoundError(f"No module named {name!r}")
sys.meta_path.insert(0, Blocked())
from megatron_hdp.cli import main
sys.exit(main(sys.argv[1:]))
"""


def test_in_a_process_without_torch_and_megatron(capsys, corpus):
    flags = [
        "plan",
        "--lengths",
        str(corpus),
        *"--ranks 2 --tokens-per-rank 8K --context 16K --batch-tokens 32K".split(),
    ]
    alone = subprocess.run([sys.executable, "-c", BLOCKED, *flags], capture_output=True, text=True, timeout=60)
    assert (alone.returncode, alone.stderr) == (0, "")
    _, here, _ = run(capsys, *flags)

    def timeless(text):
        return [line for line in text.splitlines() if not line.startswith("plan time")]

    assert timeless(alone.stdout) == timeless(here)
    rival = subprocess.run(
        [sys.executable, "-c", BLOCKED, *flags, "--algorithm", "megatron"], capture_output=True, text=True, timeout=60
    )
    assert rival.returncode == 2
    assert re.search("no BalancedCPScheduler to compare with .*install megatron-core", rival.stderr)
    bad = subprocess.run(
        [sys.executable, "-c", BLOCKED, "lengths", "gone.csv"], capture_output=True, text=True, timeout=60
    )
    assert bad.returncode == 2
    assert bad.stdout == ""
    assert "gone.csv: no such file" in bad.stderr
    assert "Traceback" not in bad.stderr


MODEL = "--heads 16 --kv-heads 4 --tp 2 --hidden 4096 --ffn 11008 --vocab 32K".replace("32K", "32000").split()


def gib_of(out, name):
    return float(re.search(rf"^  {name} +([\d.]+)", out, re.M)[1])


def test_plan_within_host_memory(capsys, tmp_path):
    profile = replace(load_profile("bytescale"), host_memory=64.0 * 2**30)
    profile.save(tmp_path / "own.json")
    figure = ["--layer", "figure-21", "--offload"]
    base = {"cost": cost_of(layer="figure-21"), "offload": True}
    for words, limit in (
        (["--host-gib", "1.5"], 3 << 29),
        (["--host-gib", "0"], 0),
        (["--profile", tmp_path / "own.json"], 8 << 30),  # a node's over 8 GPUs
        ([], None),
    ):
        code, out, err = run(capsys, "plan", *BYTED, *figure, *words, "--json", tmp_path / "plan.json")
        assert (code, err) == (0, "")
        expected = plan(BATCH, 8, 8192, host_bytes=limit, **base)
        assert Plan.from_json((tmp_path / "plan.json").read_text()) == expected
        assert (f"offload in {sized(limit or 0)} of a GPU's" in out) == (limit is not None)
        offloading = int((expected.offload > 0).sum())
        assert (offloading > 0) == ("sequences that offload" in out)
        if offloading:
            assert printed(out, "sequences that offload") == [offloading]
            peak = host_peaks(expected, base["cost"]).max() / 2**30
            assert printed(out, "host memory of a GPU, most, GiB") == [pytest.approx(peak, abs=0.006)]


def test_plan_says_what_memory_a_gpu_needs(capsys):
    code, out, err = run(capsys, "plan", *BYTED, *MODEL, "--memory", "--offload", "--layer", "figure-21")
    assert (code, err) == (0, "")
    cost = cost_of(layer="figure-21", heads=16, kv_heads=4)
    model = ModelShape(layers=32, hidden=4096, ffn=11008, heads=32, kv_heads=8, head_dim=128, vocabulary=32000)
    made = plan(BATCH, 8, 8192, cost=cost, offload=True)
    found = estimate(model, Parallel(ranks=8, tensor_parallel=2), 8192, longest=32 << 10, cost=cost, plan=made)
    for name in ("weights", "gradients", "optimizer", "activations", "working", "attention", "logits", "reserve"):
        assert gib_of(out, name) == pytest.approx(getattr(found, name) / 2**30, abs=0.006)
    assert gib_of(out, "peak") == pytest.approx(found.device / 2**30, abs=0.006)
    assert gib_of(out, "host") == pytest.approx(found.host / 2**30, abs=0.006)
    assert "counted from the model's shape" in out


def test_plan_refuses_a_capacity_that_does_not_fit(capsys):
    words = ["plan", *BYTED, *MODEL, "--memory", "--device-gib", "36"]
    code, out, err = run(capsys, *words)
    assert (code, out) == (2, "")
    most = int(re.search(r"--tokens-per-rank that fits is ([\d,]+);", err)[1].replace(",", ""))
    assert "--tokens-per-rank is 8,192: a GPU of the only stage would need" in err
    assert 1024 < most < 8192
    words[words.index("8K")] = str(most)
    assert run(capsys, *words, "--ranks", "16")[0] == 0
    words[words.index(str(most))] = str(most + 2)
    assert run(capsys, *words, "--ranks", "8")[0] == 2
    assert "no --tokens-per-rank fits" in run(capsys, *words, "--device-gib", "9")[2]
    assert run(capsys, "plan", *BYTED, *MODEL, "--memory", "--profile", "h100")[0] == 0  # 80 GB, by the profile


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--host-gib 3", "--host-gib 3 without --offload"),
        ("--offload --host-gib -1", "--host-gib is -1: it must be from 0 to"),
        ("--memory --heads 16 --kv-heads 4", "--memory without --hidden, --ffn, --vocab"),
        ("--memory --hidden 4097 --ffn 8 --vocab 8 --heads 16 --kv-heads 4", "--hidden is 4097, which 16 x 1 heads"),
        ("--memory --hidden 4096 --ffn 8 --vocab 8 --heads 16 --kv-heads 4 --tp 0", "--tp is 0"),
        ("--memory --hidden 64 --ffn 7 --vocab 8 --heads 2 --kv-heads 1 --tp 2", "which does not divide 4 heads"),
        ("--memory --hidden 64 --ffn 8 --vocab 8 --heads 2 --kv-heads 1 --device-gib 0", "--device-gib is 0"),
        ("--memory --hidden 64 --ffn 8 --vocab 8 --heads 2 --kv-heads 1 --reserve-gib -2", "--reserve-gib is -2"),
    ],
)
def test_wrong_memory_flags(capsys, words, message):
    code, out, err = run(capsys, "plan", *BYTED, *words.split())
    assert (code, out) == (2, "")
    assert message in err
