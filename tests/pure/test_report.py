"""What a report says and how its page is built; a browser opens it in test_report_browser.py."""

import dataclasses
import itertools
import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import test_timeline
from report_cases import EVIL, log_lines, parsed, simulation, small_plan, unpacked

from megatron_hdp import cli
from megatron_hdp.cost import CostModel, load_profile
from megatron_hdp.errors import ConfigError, DataError
from megatron_hdp.planner import plan
from megatron_hdp.planner.baselines import plan_static_smallest
from megatron_hdp.report import chart
from megatron_hdp.report.build import parts_of, short_names
from megatron_hdp.report.command import report
from megatron_hdp.report.flags import PlanSetting
from megatron_hdp.report.inputs import PlanFile, RunFile, SimulationFile, read_input
from megatron_hdp.report.page import check_names, names, render
from megatron_hdp.report.palette import COMPUTING, KEYS, STATES
from megatron_hdp.report.training_charts import curve, loss_difference
from megatron_hdp.report.what_if import grouped
from megatron_hdp.simulator import Job, Timeline, cluster_of_profile, simulate_step
from megatron_hdp.simulator.files import StrategyRun, step_numbers, write_simulation


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    """A simulation, a plan and two logs in one page: (folder, HTML)."""
    folder = tmp_path_factory.mktemp("report")
    write_simulation(simulation(title=EVIL), folder / "sim.json")
    (folder / "plan.json").write_text(small_plan().to_json())
    for name, shift in (("hdp <b>.jsonl", 0.0), ("static.jsonl", 1e-6)):
        (folder / name).write_text("\n".join(log_lines(shift=shift)) + "\n")
    inputs = [folder / name for name in ("sim.json", "plan.json", "hdp <b>.jsonl", "static.jsonl")]
    report(inputs, folder / "report.html", setting=PlanSetting())
    return folder, (folder / "report.html").read_text()


def headings(part):
    return {one.name.split("-", 1)[1]: one.heading for section in part.sections for one in section.charts}


# The page


def test_every_element_ends_and_ids_are_unique(everything):
    page = parsed(everything[1])
    ids = [node.attributes["id"] for node in page.all() if "id" in node.attributes]
    assert len(ids) == len(set(ids)) > 20
    for link in page.all("a"):
        assert link.attributes["href"].removeprefix("#") in ids
    for label in page.all("label"):
        assert label.attributes["for"] in ids


def test_nothing_is_loaded_from_elsewhere(everything):
    page = parsed(everything[1])
    for node in page.all():
        for name in ("src", "href", "action", "data", "srcset", "poster"):
            address = node.attributes.get(name, "")
            assert address == "" or address.startswith(("#", "data:")), address
    policies = [node.attributes.get("content", "") for node in page.all("meta")]
    assert any(policy.startswith("default-src 'none';") for policy in policies)
    assert "@import" not in everything[1]
    assert "url(" not in everything[1]


def test_user_text_is_text(everything):
    page = parsed(everything[1])
    assert EVIL in next(page.all("article")).text()
    assert "hdp <b>" in page.text()
    assert not list(page.all("img"))
    assert len(list(page.all("script"))) == 4
    drawn = unpacked(page, "packed-data")
    assert "<img" not in drawn
    assert "<script" not in drawn
    assert "hdp &lt;b&gt;" in drawn  # plotly reads labels as a little HTML


def test_every_chart_has_a_statement_a_caption_a_table_and_units(everything):
    page = parsed(everything[1])
    figures = list(page.all("figure"))
    charts = {one["name"]: one for one in json.loads(unpacked(page, "packed-data"))["charts"]}
    assert len(figures) == len(charts) + 4  # two what-if panels of two charts, which the page's script makes
    for figure in figures:
        assert len(next(figure.all("h4")).text()) > 20
        assert len(next(figure.all("figcaption")).text()) > 80
        table = next(figure.all("table"))
        if figure.attributes["id"] in charts:
            assert len(list(table.all("tr"))) >= 2
            widths = {len([cell for cell in row.children if not isinstance(cell, str)]) for row in table.all("tr")}
            assert len(widths) == 1, figure.attributes["id"]
        assert next(figure.all("div", role="img")).attributes["aria-label"]
    for one in charts.values():
        axes = [value for key, value in one["layout"].items() if key.startswith("xaxis")]
        assert all(axis["title"]["text"] for axis in axes), one["name"]


def test_numbers_of_a_page_are_plain_json(everything):
    data = json.loads(unpacked(parsed(everything[1]), "packed-data"), parse_constant=pytest.fail)
    assert set(data["panels"]) == {"what-if-0", "what-if-1"}


def test_equal_inputs_give_equal_pages():
    parts = [parts_of([SimulationFile(Path("x"), simulation())], PlanSetting()) for _ in range(2)]
    assert render(parts[0], "t", "2026-01-01") == render(parts[1], "t", "2026-01-01")


def test_names_of_charts_are_unique(everything):
    inputs = [read_input(everything[0] / name) for name in ("sim.json", "sim.json", "plan.json", "static.jsonl")]
    parts = parts_of(inputs, PlanSetting())
    check_names(parts)
    assert len(names(parts)) == len(set(names(parts)))
    with pytest.raises(ValueError, match="charts of one name"):
        check_names([parts[0], parts[0]])


def test_a_step_of_1024_ranks_is_below_5_megabytes(tmp_path):
    lengths = np.minimum(np.random.default_rng(0).lognormal(7.5, 1.6, 12000).astype(np.int64) + 1, 1 << 21)
    made = plan(lengths, 1024, 8192)
    cost = CostModel(load_profile("bytescale"), 32)
    found = simulate_step(made, Job(cost=cost, cluster=cluster_of_profile(cost.profile)))
    run = StrategyRun(name="hdp", words="HDP", steps=(step_numbers(made, found, 0.1),), timeline=found.timeline)
    both = (run, dataclasses.replace(run, name="static", words="static"))
    large = dataclasses.replace(simulation(strategies=("hdp",), seeds=(0,)), lengths=lengths, runs=both)
    text = render(parts_of([SimulationFile(Path("x"), large)], PlanSetting()), "t", "2026-01-01")
    assert len(text.encode()) < 5e6
    assert found.timeline.lane.max() == 1023


# What it says


def run_of(name, words, *seconds, computing=0.5, idle=None, sent=10**9):
    steps = tuple(
        {
            "seconds": value,
            "span_seconds": value,
            "tokens": 1000,
            "tokens_per_second": 1000 / value,
            "mfu": None,
            "computing": computing,
            "idle": idle or {"ring": 0.4 * value, "sync": 0.1 * value},
            "optimizer_seconds": 0.0,
            "bytes_by_link": {"inside_node": 0, "across_nodes": sent},
            "nic_peak": 1e9,
            "nic_mean": 1e8,
            "plan_seconds": 0.01,
            "ring_sizes": {"1": [9, 500], "4": [1, 500]},
        }
        for value in seconds
    )
    return StrategyRun(name=name, words=words, steps=steps)


def part_of(*runs):
    given = dataclasses.replace(simulation(strategies=("hdp",), seeds=(0,)), runs=runs)
    return parts_of([SimulationFile(Path("x"), given)], PlanSetting())[0]


def test_headings_have_the_right_numbers():
    part = part_of(run_of("hdp", "HDP, ours", 9.0, 11.0), run_of("static", "static CP, ring of 4", 30.0, 30.0))
    found = headings(part)
    assert found["steps"] == "HDP needs 10.0 s a step, static CP 30.0 s: HDP is 3.00 times as fast"
    assert found["idle"].startswith(
        "With static CP ranks wait 50 % of the time, most of it for transfers of a ring (12.0 s"
    )
    assert found["rings"].startswith("With HDP 90 % of the sequences and 50 % of the tokens stay on one rank")
    assert found["bytes"] == "HDP sends 1.00 GB between nodes in a step, static CP 1.00 GB"
    assert found["planning"].startswith("Planning a step takes 10.0 ms, 0.10 % of the step")
    assert [tile.value for tile in part.tiles] == ["3.00 ×", "100 tokens/s", "33.3 tokens/s", "50 %"]


def test_a_loss_is_called_a_loss():
    found = headings(part_of(run_of("hdp", "HDP", 12.0), run_of("static", "static CP", 10.0)))
    assert "HDP is 1.20 times as slow" in found["steps"]
    found = headings(part_of(run_of("hdp", "HDP", 10.0), run_of("static", "static CP", 10.01)))
    assert "HDP is equally fast" in found["steps"]


def test_an_estimate_is_no_rival():
    """blocks is the best that an idea could do, and comes last."""
    blocks = run_of("blocks", "blocks (estimate)", 9.0)
    pow2, naive = run_of("pow2", "dynamic CP, powers of two", 11.0), run_of("naive", "ByteScale, naive", 12.0)
    found = headings(part_of(run_of("hdp", "HDP", 10.0), pow2, naive, run_of("static", "static CP", 30.0), blocks))
    assert found["steps"] == (
        "HDP needs 10.0 s a step, static CP 30.0 s: HDP is 3.00 times as fast; next best is dynamic CP, powers of two, "
        "11.0 s"
    )
    found = headings(part_of(run_of("hdp", "HDP", 10.0), pow2, naive, blocks))
    assert found["steps"].startswith("HDP needs 10.0 s a step, ByteScale 12.0 s: ")
    assert headings(part_of(run_of("hdp", "HDP", 10.0), blocks))["steps"] == "HDP needs 10.0 s a step"


def test_a_rival_that_wins_is_faster():
    pow2, static = run_of("pow2", "dynamic CP, powers of two", 9.5), run_of("static", "static CP", 30.0)
    found = headings(part_of(run_of("hdp", "HDP", 10.0), pow2, static))
    assert found["steps"].endswith("3.00 times as fast; faster is dynamic CP, powers of two, 9.50 s")


def test_shares_are_of_the_seconds_of_all_steps():
    """As `megatron-hdp simulate` counts: a step of 1 s that computes wholly, and one of 9 s that never does."""
    whole, never = (
        run_of("hdp", "HDP", 1.0, computing=1.0, idle={"ring": 0.0}),
        run_of("hdp", "HDP", 9.0, computing=0.0),
    )
    steps = ({**whole.steps[0], "mfu": 0.5}, {**never.steps[0], "mfu": 0.1})
    part = part_of(dataclasses.replace(whole, steps=steps))
    assert part.tiles[-1].value == "10 %"
    charts = {one.name.split("-", 1)[1]: one for section in part.sections for one in section.charts}
    assert charts["steps"].table.rows[0][4:6] == ("10 %", "14 %")
    assert charts["idle"].table.rows[0][1].endswith("(10 %)")


def test_timelines_say_which_step_they_are():
    made = simulation()
    for changed, words in (
        (made, " of the first step, with static CP "),
        (dataclasses.replace(made, shown_step=1), " of step 2, with static CP "),
        (simulation(seeds=(0,)), " of the step, with static CP "),
    ):
        part = parts_of([SimulationFile(Path("x"), changed)], PlanSetting())[0]
        assert words in headings(part)["raster"]


def test_error_bars_are_the_deviation_over_steps():
    part = part_of(run_of("hdp", "HDP", 9.0, 11.0), run_of("static", "static CP", 30.0, 30.0))
    steps = next(one for s in part.sections for one in s.charts if one.name.endswith("-steps"))
    bars = steps.traces[0]["error_x"]
    assert bars["visible"]
    assert bars["array"] == [pytest.approx(2**0.5), 0.0]
    single = part_of(run_of("hdp", "HDP", 9.0), run_of("static", "static CP", 30.0))
    steps = next(one for s in single.sections for one in s.charts if one.name.endswith("-steps"))
    assert not steps.traces[0]["error_x"]["visible"]


def test_parts_of_idle_bars_add_up_to_the_step():
    part = parts_of([SimulationFile(Path("x"), simulation(stages=2))], PlanSetting())[0]
    idle = next(one for s in part.sections for one in s.charts if one.name.endswith("-idle"))
    steps = next(one for s in part.sections for one in s.charts if one.name.endswith("-steps"))
    total = np.sum([trace["x"] for trace in idle.traces], axis=0)
    assert total == pytest.approx(steps.traces[0]["x"], rel=1e-5)


def sweep(what, *rows):
    given = dataclasses.replace(simulation(strategies=("hdp",), seeds=(0,)), sweeps={what: rows})
    part = parts_of([SimulationFile(Path("x"), given)], PlanSetting())[0]
    return next(one for s in part.sections for one in s.charts if "-sweep-" in one.name)


def test_sweeps_name_the_best_setting_that_fits():
    rows = [
        {"value": 2048, "hdp": None, "note": "the pool is too small"},
        {"value": 4096, "hdp": 2.0},
        {"value": 8192, "hdp": 1.5},
        {"value": 16384, "hdp": 1.4, "note": "needs 81 GiB of a GPU"},
    ]
    found = sweep("tokens_per_rank", *rows)
    assert found.heading == "Tokens per rank (capacity): HDP needs 1.50 s a step with the best, 8K, and 2.00 s with 4K"
    assert "2K: the pool is too small" in found.caption
    assert [row[:2] for row in found.table.rows] == [("2K", "-"), ("4K", "2.00"), ("8K", "1.50"), ("16K", "1.40")]
    assert found.table.rows[3][2] == "needs 81 GiB of a GPU"
    marked = sweep(
        "search", *rows[:2], {"value": 1, "label": "8K, offload", "hdp": 1.6, "note": "9 GiB, best"}, rows[2]
    )
    assert (
        marked.heading == "Capacity and offload: HDP needs 1.60 s a step with the best, 8K, offload, and 2.00 s with 4K"
    )
    none = sweep("tokens_per_rank", rows[0])
    assert none.heading == "tokens per rank (capacity): no setting could run"


def test_sweeps_of_what_is_given_go_from_one_end_to_the_other():
    found = sweep(
        "bandwidth", *({"value": v, "label": f"{v} Gb/s", "hdp": 40 / v, "static": 400 / v} for v in (10, 20))
    )
    assert found.heading == (
        "Bandwidth between nodes: HDP goes from 4.00 s to 2.00 s a step from 10 Gb/s to 20 Gb/s, "
        "static goes from 40.0 s to 20.0 s a step"
    )
    assert found.traces[1]["y"] == [40.0, 20.0]


def test_who_cannot_run_is_named():
    part = parts_of([SimulationFile(Path("x"), simulation())], PlanSetting())[0]
    section = next(section for section in part.sections if section.name.endswith("comparison"))
    assert "Ulysses cannot run these steps: too few heads" in section.words
    assert any("too few heads" in cell for row in section.charts[0].table.rows for cell in row)


def test_nothing_to_show():
    with pytest.raises(DataError, match="nothing to show: hdp could not run: too large"):
        part_of(StrategyRun(name="hdp", words="HDP", steps=(), failed="too large"), run_of("static", "s", 1.0))


def test_simulation_without_timelines_rivals_and_sweeps():
    found = headings(part_of(run_of("hdp", "HDP", 10.0)))
    assert "raster" not in found
    assert found["steps"] == "HDP needs 10.0 s a step"


def test_length_heading_counts_what_does_not_fit():
    given = simulation(strategies=("hdp",), seeds=(0,))
    found = headings(parts_of([SimulationFile(Path("x"), given)], PlanSetting())[0])["lengths"]
    long = given.lengths > given.setting["tokens_per_rank"]
    squares = given.lengths.astype(float) ** 2
    assert f"{chart.percent(long.mean())} of the sequences" in found
    assert f"{chart.percent(given.lengths[long].sum() / given.lengths.sum())} of the tokens" in found
    assert f"{chart.percent(squares[long].sum() / squares.sum())} of the attention work" in found
    short = dataclasses.replace(given, lengths=np.array([10, 20, 8192]))
    found = headings(parts_of([SimulationFile(Path("x"), short)], PlanSetting())[0])["lengths"]
    assert found == "Every sequence fits one rank: the longest has 8K tokens"


# Plans


def test_plan_is_simulated_with_the_profile(tmp_path):
    made = small_plan()
    (tmp_path / "p.json").write_text(made.to_json())
    given = read_input(tmp_path / "p.json")
    assert isinstance(given, PlanFile)
    part = parts_of([given], PlanSetting(profile="h100", layers_per_stage=16))[0]
    cost = CostModel(load_profile("h100"), 16)
    job = Job(cost=cost, cluster=cluster_of_profile(cost.profile))
    own = simulate_step(made, job).seconds
    static = plan_static_smallest(made.lengths, made.num_ranks, made.capacity, made.pad_multiple, cost=cost)
    rival = simulate_step(static, dataclasses.replace(job, one_slice=True)).seconds
    assert headings(part)["steps"] == (
        f"This plan needs {chart.seconds(own)} a step, static CP {chart.seconds(rival)}: this plan is "
        f"{chart.faster(own, rival)}"
    )
    assert "planning" not in headings(part)  # a file does not say how long planning took
    with pytest.raises(ConfigError, match="stages is 0"):
        parts_of([given], PlanSetting(stages=0))


def test_several_plans_are_several_steps(tmp_path):
    plans = [small_plan(seed=seed) for seed in (1, 2, 3)]
    (tmp_path / "p.json").write_text("[\n" + ",\n".join(one.to_json() for one in plans) + "\n]\n")
    given = read_input(tmp_path / "p.json")
    assert [one.digest() for one in given.plans] == [one.digest() for one in plans]
    assert "over 3 steps" in next(
        one.caption for s in parts_of([given], PlanSetting())[0].sections for one in s.charts if "steps" in one.name
    )


# Runs


def test_log_of_a_run(tmp_path):
    (tmp_path / "run.jsonl").write_text("\n".join(log_lines()) + "\n")
    given = read_input(tmp_path / "run.jsonl")
    assert isinstance(given, RunFile)
    part = parts_of([given], PlanSetting())[0]
    found = headings(part)
    assert found["loss"] == "The loss of run ends at 4.4"
    assert found["tokens"] == "Median step: run 2.00 k tokens/s"  # the first step took 2 s
    assert found["rings"].startswith("With run 90 % of the sequences stay on one rank; the widest ring has 2 ranks")
    assert found["micro-batches"] == "Ranks run between 2 and 5 micro-batches a step"
    assert found["planning"] == "Planning a step takes 3.50 ms (median), at most 6.00 ms"
    assert "loss-difference" not in found


def test_losses_of_runs_are_compared(everything):
    inputs = [read_input(everything[0] / name) for name in ("static.jsonl", "hdp <b>.jsonl")]
    part = parts_of(inputs, PlanSetting())[0]
    assert headings(part)["loss"] == "Losses of static and hdp <b>, 6 steps, differ by at most 1.0e-06"
    chart_of = next(one for s in part.sections for one in s.charts if one.name.endswith("loss-difference"))
    assert chart_of.traces[0]["y"] == pytest.approx([0, 0, -1e-6, 0, 0, 0])
    steps = [json.loads(line) for line in log_lines(3)]
    other = [dict(step, iteration=step["iteration"] + 10) for step in steps]
    assert loss_difference({"a": steps, "b": other}) is None
    assert loss_difference({"a": steps, "b": [dict(steps[0], loss=None)]}) is None


def test_log_of_a_killed_and_resumed_run(tmp_path):
    lines = log_lines(4)
    again = [json.dumps(json.loads(line) | {"loss": 1.0}) for line in lines[2:]]
    (tmp_path / "run.jsonl").write_text("\n".join([*lines, *again]) + '\n{"iteration": 5, "lo')
    given = read_input(tmp_path / "run.jsonl")
    assert [step["loss"] for step in given.steps] == [4.9, 4.8, 1.0, 1.0]
    assert (given.repeated, given.cut) == (2, True)
    notes = parts_of([given], PlanSetting())[0].notes
    assert any("2 steps were trained again" in note for note in notes)
    assert any("incomplete" in note for note in notes)


def test_old_logs_with_few_fields_and_losses_that_are_none(tmp_path):
    lines = [json.dumps({"iteration": i, "loss": None, "seconds": 1.0, "tokens": 10}) for i in (1, 2)]
    (tmp_path / "run.jsonl").write_text("\n".join(lines) + "\n")
    found = headings(parts_of([read_input(tmp_path / "run.jsonl")], PlanSetting())[0])
    assert found == {"loss": "The log has no loss", "tokens": "Median step: run 10.0 tokens/s"}


def test_numbers_that_json_does_not_have_are_not_known(tmp_path):
    (tmp_path / "run.jsonl").write_text(
        '{"iteration": 1, "loss": NaN, "seconds": 1.0, "tokens": 10, "grad_norm": Infinity}\n'
    )
    part = parts_of([read_input(tmp_path / "run.jsonl")], PlanSetting())[0]
    assert headings(part)["loss"] == "The log has no loss"
    assert "grad-norm" not in headings(part)


def log_of(tmp_path, **fields):
    step = {"loss": 1.0, "seconds": 1.0, "tokens": 10} | fields
    (tmp_path / "run.jsonl").write_text("".join(json.dumps({"iteration": i} | step) + "\n" for i in (1, 2, 3)))
    return read_input(tmp_path / "run.jsonl")


@pytest.mark.parametrize(
    "fields",
    [
        {"tokens": 10**400, "bytes_sent": 10**400},
        {"loss": 1e308, "efficiency": 1e308, "grad_norm": 1e200},
        {"ring_sizes": {"1": 0}},
        {"loss": None, "seconds": None, "tokens": None, "plan_seconds": None, "ring_sizes": {}},
        {"seconds": 0, "tokens": 0},
    ],
)
def test_odd_numbers_of_logs_are_drawn_or_left_out(tmp_path, fields):
    part = parts_of([log_of(tmp_path, **fields)], PlanSetting())[0]
    assert not {"grad-norm", "efficiency", "sent", "rings"} & set(headings(part))
    render([part], "t", "2026-11-30")


def test_lines_of_logs_end_where_json_lines_end(tmp_path):
    (tmp_path / "run.jsonl").write_text(
        '{"iteration": 1, "loss": 1, "seconds": 1, "tokens": 1, "note": "a\u2028b\x85"}\n', encoding="utf-8"
    )
    assert len(read_input(tmp_path / "run.jsonl").steps) == 1


def test_timeline_of_waiting_only_and_of_no_time():
    made = simulation()
    line = made.runs[0].timeline
    waits = dataclasses.replace(line, kind=np.full_like(line.kind, 4))
    none = dataclasses.replace(line, start=0 * line.start, end=0 * line.end)
    for changed, shown in ((waits, True), (none, False)):
        run = dataclasses.replace(made.runs[0], timeline=changed)
        part = part_of(run)
        render([part], "t", "2026-11-30")
        assert ("zoom" in headings(part)) is shown
        if shown:
            assert headings(part)["zoom"].endswith(" 0")


def test_measured_step_beside_its_simulation(tmp_path):
    setting = test_timeline.setting_of(stages=2)
    there = test_timeline.writers(tmp_path, setting)
    for number in range(3):
        test_timeline.write_step(there, test_timeline.plan_of(setting, number), setting, number)
    given = read_input(tmp_path)
    part = parts_of([given], PlanSetting())[0]
    measured, replayed, simulated = (chart.seconds(span) for span in given.run.overlay().spans)
    found = headings(part)["overlay-bars"]
    assert found.startswith(
        f"Measured {measured}, replayed from what it computed {replayed}, simulated by the profile {simulated}: "
    )
    assert [tile.value for tile in part.tiles] == [measured, "3"]
    (only,) = part.sections[0].charts
    rows = [(f"rank {rank}, stage {stage}, {way}") for rank in range(3) for stage in range(2) for way in WAYS]
    assert only.layout["yaxis"]["categoryarray"] == rows
    assert len(only.table.rows) == 6
    assert "shared CPU cores" in only.caption
    assert part.what_if is None


WAYS = ("measured", "replayed", "simulated")


def test_timeline_without_a_bar(tmp_path):
    given = simulation(strategies=("hdp",), seeds=(0,))
    bars = given.runs[0].timeline
    empty = Timeline(**{field.name: getattr(bars, field.name)[:0] for field in dataclasses.fields(Timeline)})
    bare = dataclasses.replace(given, runs=(dataclasses.replace(given.runs[0], timeline=empty),))
    assert "raster" not in headings(parts_of([SimulationFile(Path("x"), bare)], PlanSetting())[0])


def test_long_runs_are_drawn_as_means():
    steps = [{"iteration": i, "loss": float(i % 7)} for i in range(1, 10_001)]
    x, y = curve(steps, lambda step: step["loss"])
    size = 7
    assert len(x) <= 1500
    for place in (0, 100, 1428):
        group = steps[place * size : (place + 1) * size]
        assert x[place] == pytest.approx(np.mean([step["iteration"] for step in group]))
        assert y[place] == pytest.approx(np.mean([step["loss"] for step in group]))
    with_gaps = [dict(step, loss=None) if step["iteration"] <= 14 else step for step in steps]
    assert curve(with_gaps, lambda step: step["loss"])[1][:3] == [None, None, pytest.approx(3.0)]


def test_names_of_runs_tell_them_apart():
    assert short_names([Path("a/x.jsonl"), Path("a/y.jsonl")]) == ["x", "y"]
    assert short_names([Path("a/log.jsonl"), Path("b/log.jsonl")]) == ["a/log", "b/log"]
    assert short_names([Path("log.jsonl"), Path("log.jsonl")]) == ["log (1)", "log (2)"]


# Inputs that cannot be


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is empty"),
        ("hello", "neither a plan"),
        ("[1, 2]", "neither a plan"),
        ('{"a": 1}', "neither a plan"),
        ('{"pieces_schema": 2, "ranks": []}', "--json-pieces"),
        ('{"reproduce_schema": 1, "figures": []}', "what megatron-hdp reproduce wrote"),
        ('{"num_ranks": 2, "ring_start": []}', "not a plan of schema"),
        ('[{"num_ranks": 2, "ring_start": []', "Expecting"),
        ('{"simulation_schema": 99}', "version 99"),
        ('{"iteration": 1}', "line 1: not a step of --hdp-log"),
        ('{"iteration": -1, "loss": 1, "seconds": 1, "tokens": 1}', "iteration is '-1', must be a whole number from 0"),
        ('{"iteration": 1, "loss": 1, "seconds": 1, "tokens": 1, "ring_sizes": {"1": -2}}', "none below 0"),
        ('{"iteration": 1.5, "loss": 1, "seconds": 1, "tokens": 1}', "must be a whole number"),
        ('{"iteration": 1, "loss": "x", "seconds": 1, "tokens": 1}', "loss is 'x', must be a number"),
        ('{"iteration": 1, "loss": 1, "seconds": 1, "tokens": 1, "ring_sizes": [1]}', "must be an object of numbers"),
        ('{"iteration": 1, "loss": 1, "seconds": 1, "tokens": 1, "ring_sizes": {"x": 1}}', "ring_sizes"),
        ('{"iteration": 1,\n', "line 1: not JSON"),
        ('{"iteration": 1, "lo', "no complete line"),
    ],
)
def test_bad_inputs(tmp_path, text, words):
    (tmp_path / "in").write_text(text)
    with pytest.raises(DataError, match=words) as error:
        read_input(tmp_path / "in")
    assert str(tmp_path / "in") in str(error.value)


def test_inputs_that_cannot_be_read(tmp_path):
    with pytest.raises(DataError, match="No such file"):
        read_input(tmp_path / "none")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="UTF-8"):
        read_input(tmp_path / "bytes")
    (tmp_path / "folder").mkdir()
    with pytest.raises(DataError, match="--hdp-timeline"):
        read_input(tmp_path / "folder")


# The command


def test_command_writes_page_and_trace(tmp_path, capsys):
    write_simulation(simulation(), tmp_path / "s.json")
    page, trace = tmp_path / "r.html", tmp_path / "t.json"
    assert cli.main(["report", str(tmp_path / "s.json"), "--out", str(page), "--trace", str(trace)]) == 0
    assert "written: " in capsys.readouterr().out
    assert "A run" in next(parsed(page.read_text()).all("title")).text()
    assert json.loads(trace.read_text())["traceEvents"]


def test_command_says_what_is_wrong(tmp_path, capsys, monkeypatch):
    def fails(*arguments):
        assert cli.main(["report", *map(str, arguments)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    (tmp_path / "p.json").write_text(small_plan().to_json())
    (tmp_path / "r.jsonl").write_text("\n".join(log_lines()) + "\n")
    out = tmp_path / "r.html"
    assert "give a plan" in fails("--out", out)
    assert "--out" in fails(tmp_path / "p.json", "--out", tmp_path / "none" / "r.html")
    assert "--trace: give a simulation or a plan" in fails(
        tmp_path / "r.jsonl", "--out", out, "--trace", tmp_path / "t"
    )
    assert "no layer 'x'" in fails(tmp_path / "p.json", "--out", out, "--layer", "x")
    line = fails(tmp_path / "none", "--out", out)
    assert "No such file" in line
    (tmp_path / "other").write_text("[1]")
    assert "--hdp-log, --hdp-timeline" in fails(tmp_path / "other", "--out", out)  # flags of training keep their names
    before = (tmp_path / "p.json").read_text()
    for flag in ("--out", "--trace"):
        assert "which it would overwrite" in fails(tmp_path / "p.json", "--out", out, flag, tmp_path / "p.json")
    assert "which it would overwrite" in fails(tmp_path / "p.json", "--out", out, "--trace", out)
    assert "--trace" in fails(tmp_path / "p.json", "--out", out, "--trace", tmp_path / "none" / "t")
    assert (tmp_path / "p.json").read_text() == before
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "no Chromium or Chrome" in fails(tmp_path / "p.json", "--out", out, "--png", tmp_path / "png")
    for module in ("plotly.offline", "jinja2"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, module, None)
            line = fails(tmp_path / "p.json", "--out", out)
            assert module.partition(".")[0] in line
            assert "pip install" in line
    assert not out.exists()


def test_names_that_are_no_text(tmp_path, capsys):
    """Bytes that are no UTF-8 in a file's name, and halves of characters in JSON, are no reason for half a page."""
    made = dataclasses.replace(simulation(), title="half \ud83d")
    given = tmp_path / os.fsdecode(b"\xff.json")
    write_simulation(made, given)
    out = tmp_path / "r.html"
    assert cli.main(["report", str(given), "--out", str(out)]) == 0
    assert next(parsed(out.read_text()).all("title")).text() == "half ?"


# Small things


def test_groups_of_lengths_keep_sequences_and_attention_work():
    lengths = np.random.default_rng(1).integers(1, 1 << 21, 20_000)
    values, counts = grouped(lengths, 500)
    assert len(values) <= 500
    assert sum(counts) == lengths.size
    assert sum(c * v**2 for v, c in zip(values, counts)) == pytest.approx((lengths.astype(float) ** 2).sum(), rel=1e-3)
    assert values == sorted(values)
    assert grouped(np.array([5, 3, 5]), 10) == ([3, 5], [1, 2])


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (chart.seconds(157.2), "157 s"),
        (chart.seconds(0.0123), "12.3 ms"),
        (chart.seconds(4.2e-6), "4.20 µs"),
        (chart.seconds(0), "0 s"),
        (chart.percent(0.9999), "99.99 %"),
        (chart.percent(0.00001), "< 0.01 %"),
        (chart.percent(0), "0.00 %"),
        (chart.percent(1), "100 %"),
        (chart.amount(4.46e15), "4.46 PB"),
        (chart.amount(12), "12 B"),
        (chart.rate(408_123), "408 k tokens/s"),
        (chart.digits(1234.5), "1,234"),
        (chart.digits(0.00123), "0.00123"),
    ],
)
def test_numbers_for_people(found, words):
    assert found == words


def luminance(colour):
    """Of sRGB, 0 .. 1."""
    values = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    linear = np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)
    return float(linear @ [0.2126, 0.7152, 0.0722])


def test_grey_print_tells_computing_from_waiting():
    lights = {state: luminance(key.colour) for state, key in KEYS.items()}
    order = [lights[state] for state in ("forward", "backward", "ring")]
    assert all((b + 0.05) / (a + 0.05) > 1.6 for a, b in itertools.pairwise(order))
    waits = {state: key for state, key in KEYS.items() if state in STATES[COMPUTING:]}
    assert min(lights[state] for state in waits) == lights["ring"]
    looks = [(round(lights[state], 1), key.pattern) for state, key in waits.items()]
    assert len(looks) == len(set(looks))
