"""A report in a real browser: no errors, every chart drawn, fits phones, prints; the what-if panel's arithmetic."""

import json
import re
import struct
import zlib

import numpy as np
import pytest
from report_cases import EVIL, log_lines, simulation, small_plan

from megatron_hdp.cost import CostModel, Tier, load_profile
from megatron_hdp.errors import ConfigError
from megatron_hdp.report.browser import Browser, find_chromium, opened
from megatron_hdp.report.build import parts_of
from megatron_hdp.report.command import report
from megatron_hdp.report.flags import PlanSetting
from megatron_hdp.report.inputs import read_input
from megatron_hdp.report.page import names
from megatron_hdp.report.png import write_pngs
from megatron_hdp.simulator.files import write_simulation

pytestmark = pytest.mark.skipif(find_chromium() is None, reason="no Chromium or Chrome on the search path")

OVERFLOW = """[...document.querySelectorAll("main *")]
    .filter((node) => !node.closest(".scroll") && node.getBoundingClientRect().right > innerWidth + 1)
    .map((node) => node.tagName + "." + node.className.toString() + " " + node.id)"""
"""JavaScript: what sticks out of the page."""
COVERED = """(() => {
    dispatchEvent(new Event("beforeprint"));
    const covered = [...document.querySelectorAll(".plot")].filter((plot) => {
        const legend = plot.querySelector(".legend .bg");
        const places = Object.values(plot._fullLayout._plots).map((each) => each.yaxis._offset);
        const top = plot.getBoundingClientRect().top + Math.min(...places);
        return legend && legend.getBoundingClientRect().bottom > top + 2;
    }).map((plot) => plot.parentElement.id);
    dispatchEvent(new Event("afterprint"));
    return covered;
})()"""
"""JavaScript: charts whose legend lies on the plot when a page is printed, without a moment to wait."""
SMALL_LETTERS = """[...document.querySelectorAll(".main-svg text")]
    .filter((node) => node.textContent && parseFloat(getComputedStyle(node).fontSize) < 10.5)
    .map((node) => node.textContent)"""
EMPTY = """[...document.querySelectorAll("figure .plot")]
    .filter((node) => !node.querySelector(".trace, .points path, .scatterlayer .js-line, .heatmaplayer image"))
    .map((node) => node.parentElement.id)"""
"""JavaScript: charts without a mark."""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """A simulation and two logs in one file, and the names of its charts."""
    folder = tmp_path_factory.mktemp("page")
    write_simulation(simulation(stages=2, title=EVIL, strategies=("hdp", "static"), seeds=(0,)), folder / "sim.json")
    for name in ("<b>hdp.jsonl", "static.jsonl"):
        (folder / name).write_text("\n".join(log_lines()) + "\n")
    inputs = [folder / name for name in ("sim.json", "<b>hdp.jsonl", "static.jsonl")]
    report(inputs, folder / "report.html", setting=PlanSetting())
    return folder / "report.html", names(parts_of([read_input(path) for path in inputs], PlanSetting()))


@pytest.fixture(scope="module")
def wide(page):
    with opened(page[0], 1280) as browser:
        yield browser


def clean(browser):
    """Nothing was complained of, and nothing was loaded but the file and what is in it."""
    assert browser.console == []
    assert {address.partition(":")[0] for address in browser.requested} <= {"file", "data", "blob"}
    assert [address for address in browser.requested if address.startswith("file")] == browser.requested[:1]
    assert browser.evaluate("window.broken") is None


def drawn(browser, expected):
    assert browser.evaluate("[...document.querySelectorAll('figure')].map((node) => node.id)") == expected
    assert browser.evaluate("Number(document.documentElement.dataset.charts)") == len(expected)
    assert browser.evaluate(EMPTY) == []


def test_wide_page_is_drawn_without_a_word(wide, page):
    clean(wide)
    drawn(wide, page[1])
    assert wide.evaluate("document.documentElement.scrollWidth") == 1280
    assert wide.evaluate(OVERFLOW) == []


def test_phone_shows_all_without_scrolling_sideways(wide, page):
    """The same page, made narrow; tables are opened too. And what it is when it is printed from there."""
    wide.resize(390, 844)
    wide.evaluate("for (const node of document.querySelectorAll('details')) node.open = true")
    wide.wait("[...document.querySelectorAll('.main-svg')].every((node) => node.clientWidth <= 390)")
    assert wide.evaluate("document.documentElement.scrollWidth") == 390
    assert wide.evaluate(OVERFLOW) == []
    assert wide.evaluate(SMALL_LETTERS) == []
    assert wide.evaluate(COVERED) == []
    drawn(wide, page[1])
    wide.evaluate("for (const node of document.querySelectorAll('details')) node.open = false")
    wide.resize(1280)
    wide.wait("document.querySelector('.main-svg').clientWidth > 640")
    clean(wide)


def test_print_has_every_chart_and_none_is_cut(wide, page):
    wide.evaluate(
        "addEventListener('beforeprint', () => { window.widths = [...document.querySelectorAll('.main-svg')]"
        ".map((node) => node.clientWidth); }, {once: true})"
    )
    pdf = wide.pdf()
    assert pdf.startswith(b"%PDF-")
    pages = max(int(found) for found in re.findall(rb"/Count (\d+)", pdf))
    assert len(page[1]) / 3 <= pages <= len(page[1])
    printed = wide.evaluate("window.widths")
    assert set(printed) == {686}  # what A4 holds between its margins
    wide.wait("document.querySelector('.main-svg').clientWidth > 640")  # and back
    clean(wide)


def test_hovering_a_raster_says_what_a_rank_does(wide):
    text = wide.evaluate("document.querySelector('#p0-raster .plot').data[1].text[3][0]")
    assert re.fullmatch(r"rank 3, stage 0: (computing, \w+|waits .+)", text)


def moved(browser, panel, name, value):
    browser.evaluate(
        f"(() => {{ const input = document.querySelector('#{panel} [data-slider={name}]'); input.value = {value}; "
        "input.dispatchEvent(new Event('input')); })()"
    )
    browser.evaluate("new Promise((go) => requestAnimationFrame(() => requestAnimationFrame(go)))")
    return browser.evaluate(f"document.querySelector('#{panel} [data-answers]').textContent")


def test_sliders_move_answers_and_charts(wide):
    before = wide.evaluate("document.querySelector('#what-if-0 [data-answers]').textContent")
    assert "A full piece of 8K tokens hides them" in before
    slow = moved(wide, "what-if-0", "transfer", 3)
    assert "Even a full piece of 8K tokens does not" in slow
    heading = wide.evaluate("document.querySelector('#what-if-0 [data-heading=rings]').textContent")
    assert "every ring waits" in heading
    large = moved(wide, "what-if-0", "capacity", 17)
    assert "A full piece of 128K tokens hides them" in large
    rings = wide.evaluate("document.querySelector('#what-if-0-rings .plot').data[0].y")
    assert set(rings) == {1}  # all of the context of 64K on one rank
    wide.evaluate("document.querySelector('#what-if-0 [data-reset]').click()")
    wide.evaluate("new Promise((go) => requestAnimationFrame(() => requestAnimationFrame(go)))")
    assert wide.evaluate("document.querySelector('#what-if-0 [data-answers]').textContent") == before
    rows = wide.evaluate("document.querySelectorAll('#what-if-0 [data-table=rings] tbody tr').length")
    assert rows >= 4
    clean(wide)


LAYER = load_profile("bytescale").layer()
LINK = load_profile("bytescale").across_nodes
STATE = {
    "attention": LAYER.attention_forward,
    "backward": LAYER.attention_backward_factor,
    "latency": LINK.latency,
    "kv": LAYER.kv_per_token / LINK.bandwidth,
    "gradient": LAYER.kv_gradient_per_token / LINK.bandwidth,
    "capacity": 8192,
    "context": 1 << 20,
}
COST = CostModel(load_profile("bytescale"), layers_per_stage=1)


def formula(browser, call, **values):
    return browser.evaluate(f"((state, value) => hdpFormulas.{call})({json.dumps(STATE)}, {json.dumps(values)})")


@pytest.mark.parametrize(
    ("length", "ring"), [(4096, 1), (16384, 2), (24576, 3), (1 << 20, 128), (1 << 20, 256), (65536, 64)]
)
def test_panel_times_rings_as_the_cost_model_does(wide, length, ring):
    found = formula(wide, "own(state, value.length, value.ring)", length=length, ring=ring)
    assert found == pytest.approx(COST.attention_picoseconds(length, ring) / 1e12, rel=1e-5)


@pytest.mark.parametrize("ring", [1, 2, 16, 128])
def test_panel_times_packs_as_the_cost_model_does(wide, ring):
    lengths = [ring * 2 * n for n in (1, 7, 7, 64, 500)]
    sequences = [[length, lengths.count(length)] for length in sorted(set(lengths))]
    found = formula(wide, "pack(state, value.sequences, value.ring)", sequences=sequences, ring=ring)
    expected = COST.packed_attention_picoseconds(np.array(lengths), ring, Tier.ACROSS_NODES) / 1e12
    assert found == pytest.approx(expected, rel=1e-5)


def test_panel_knows_the_smallest_piece_and_the_widest_ring(wide):
    piece = formula(wide, "smallestPiece(state)")
    assert piece["forward"] <= piece["both"]
    assert piece["both"] == pytest.approx(COST.narrowest_hiding_piece(Tier.ACROSS_NODES), abs=2)
    for length in (100_000, 312 << 10, 1 << 20):
        widest = int(COST.widest_hiding_ring(length))
        assert abs(int(length / piece["both"]) - widest) <= 1
    for capacity in (1000, 8192):
        assert formula(wide, "smallestRing(value.n, value.c)", n=100_000, c=capacity) == COST.smallest_ring(
            100_000, capacity
        )


def test_panel_adds_up_the_step_like_a_walk_over_its_sequences(wide):
    rng = np.random.default_rng(5)
    lengths = np.sort((rng.lognormal(9, 1.5, 60).astype(np.int64) // 512 + 1) * 512)
    values, counts = np.unique(np.minimum(lengths, STATE["context"]), return_counts=True)
    static, hdp = formula(wide, "step(state, value.l, value.c)", l=values.tolist(), c=counts.tolist())
    one_by_one = 0.0
    for length in lengths.tolist():
        ring = -(-length // STATE["capacity"])
        one_by_one += ring * formula(wide, "own(state, value.s, value.d)", s=length, d=ring)
    assert hdp == pytest.approx(one_by_one)
    room = 128 * STATE["capacity"]
    packs = formula(
        wide, "packs(value.s, value.room)", s=[list(p) for p in zip(values.tolist(), counts.tolist())], room=room
    )
    held = sorted(length for pack in packs for length, count in pack for _ in range(count))
    assert held == lengths.tolist()
    assert all(sum(length * count for length, count in pack) <= room for pack in packs)
    times = [formula(wide, "pack(state, value.p, 128)", p=pack) for pack in packs]
    assert static == pytest.approx(128 * sum(times))


def test_without_decompression_there_is_a_plain_word(page):
    with Browser() as browser:
        browser.call("Page.addScriptToEvaluateOnNewDocument", source="delete window.DecompressionStream")
        browser.open(page[0])
        browser.wait("document.documentElement?.dataset.state === 'failed'")
        words = browser.evaluate("document.getElementById('trouble').innerText")
        assert "cannot unpack the charts" in words
        assert browser.evaluate("document.querySelectorAll('table').length") > 10
        assert browser.console == []


def test_damaged_page_says_so(page, tmp_path):
    text = page[0].read_text()
    place = text.index("H4sI", text.index('id="packed-data"'))
    (tmp_path / "bad.html").write_text(text[: place + 40] + "AAAA" + text[place + 44 :])
    with pytest.raises(ConfigError, match="charts cannot be drawn"), opened(tmp_path / "bad.html", 800):
        pass


@pytest.mark.slow
def test_all_kinds_of_inputs_together_on_a_phone(tmp_path):
    write_simulation(simulation(), tmp_path / "sim.json")
    (tmp_path / "plan.json").write_text(small_plan().to_json())
    (tmp_path / "run.jsonl").write_text("\n".join(log_lines()) + "\n")
    inputs = [tmp_path / name for name in ("sim.json", "plan.json", "run.jsonl")]
    report(inputs, tmp_path / "r.html", setting=PlanSetting())
    expected = names(parts_of([read_input(path) for path in inputs], PlanSetting()))
    with opened(tmp_path / "r.html", 390, 844) as browser:
        clean(browser)
        drawn(browser, expected)
        assert browser.evaluate("document.documentElement.scrollWidth") == 390
        assert browser.evaluate(OVERFLOW) == []


@pytest.mark.slow
def test_chart_as_a_picture(page, tmp_path):
    written = write_pngs(page[0], tmp_path / "png", ["p0-raster", "what-if-0-rings"])
    assert [path.name for path in written] == ["p0-raster.png", "what-if-0-rings.png"]
    for path in written:
        data = path.read_bytes()
        assert data.startswith(b"\x89PNG\r\n\x1a\n")
        width, height = struct.unpack(">II", data[16:24])
        assert width > 1500
        assert height > 500
        assert colours(data) > 2


def colours(png):
    """About how many different bytes a picture has: an empty one has few."""
    place, body = 8, b""
    while place < len(png):
        (size,) = struct.unpack(">I", png[place : place + 4])
        if png[place + 4 : place + 8] == b"IDAT":
            body += png[place + 8 : place + 8 + size]
        place += 12 + size
    return len(set(zlib.decompress(body)))


def test_a_browser_that_is_none(tmp_path):
    (tmp_path / "chromium").write_text("#!/bin/sh\nexit 3\n")
    (tmp_path / "chromium").chmod(0o755)
    with pytest.raises(ConfigError, match="the browser ended"):
        Browser(str(tmp_path / "chromium"))
