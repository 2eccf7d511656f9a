"""Stretches and rasters of a timeline against the simulator's own sums, and against a walk over the bars."""

import numpy as np
import pytest
from report_cases import batch, setting

from megatron_hdp.report.palette import COMPUTING, KEYS, STATES
from megatron_hdp.report.segments import OVER, raster, segments, shown_lanes, state_seconds
from megatron_hdp.report.timeline_charts import overlay_section, timeline_section
from megatron_hdp.simulator.result import CAUSES, KINDS, Timeline
from megatron_hdp.simulator.strategies import run_strategy


def timeline(*bars):
    """From (lane, kind, start, end, {column: seconds}) in order."""
    rows = [(lane, KINDS.index(kind), start, end, spent) for lane, kind, start, end, spent in bars]
    column = {name: np.array([row[4].get(name, 0.0) for row in rows]) for name in ("ring", "partner", "expert", "copy")}
    length = np.array([row[3] - row[2] for row in rows])
    return Timeline(
        lane=np.array([row[0] for row in rows]),
        kind=np.array([row[1] for row in rows], np.int8),
        slot=np.zeros(len(rows), np.int64),
        part=np.zeros(len(rows), np.int8),
        start=np.array([row[2] for row in rows], float),
        end=np.array([row[3] for row in rows], float),
        compute=np.array([row[4].get("compute", n - sum(row[4].values())) for row, n in zip(rows, length)]),
        **column,
    )


def shown(found):
    return [
        (int(a), STATES[b], float(c), float(d)) for a, b, c, d in zip(found.lane, found.state, found.start, found.end)
    ]


def test_waits_come_first_and_gaps_are_named():
    found = segments(
        timeline((0, "forward", 0, 10, {"partner": 2, "ring": 3}), (1, "forward", 0, 4, {}), (1, "backward", 6, 8, {})),
        1,
    )
    assert shown(found) == [
        (0, "partner", 0, 2),
        (0, "ring", 2, 5),
        (0, "forward", 5, 10),
        (1, "forward", 0, 4),
        (1, "partner", 4, 6),
        (1, "backward", 6, 8),
        (1, "sync", 8, 10),
    ]


def test_what_nothing_explains_is_not_computing():
    found = segments(timeline((0, "forward", 0, 10, {"ring": 2, "compute": 3})), 1)
    assert shown(found) == [(0, "ring", 0, 2), (0, "other", 2, 7), (0, "forward", 7, 10)]


def test_bubbles_last_until_the_ranks_last_stage_is_done():
    bars = [(0, "forward", 0, 4, {}), (1, "forward", 4, 6, {}), (2, "forward", 0, 10, {}), (3, "forward", 10, 12, {})]
    found = segments(timeline(*bars), 2)
    assert [row for row in shown(found) if row[0] == 0] == [
        (0, "forward", 0, 4),
        (0, "bubble", 4, 6),
        (0, "sync", 6, 12),
    ]
    assert [row for row in shown(found) if row[0] == 1] == [
        (1, "bubble", 0, 4),
        (1, "forward", 4, 6),
        (1, "sync", 6, 12),
    ]


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("name", ["hdp", "static"])
def test_sums_are_those_of_the_simulator(name, stages):
    result = run_strategy(name, batch(stages), setting(stages, 32), timeline=True).result
    found = segments(result.timeline, stages)
    lanes = result.compute.size
    spent = state_seconds(found, lanes)
    assert found.seconds == pytest.approx(result.seconds)
    computed = spent[:, : COMPUTING - 1].sum(axis=1)
    close = {"rel": 1e-4, "abs": 1e-3}
    assert computed == pytest.approx(result.compute, **close)
    assert spent[:, STATES.index("optimizer")] == pytest.approx(np.full(lanes, result.optimizer_seconds), **close)
    for cause in CAUSES:
        assert spent[:, STATES.index(cause)] == pytest.approx(result.idle[cause], **close), cause
    assert spent[:, STATES.index("other")] == pytest.approx(np.zeros(lanes), abs=1e-3)
    assert spent.sum(axis=1) == pytest.approx(np.full(lanes, found.seconds))


def test_stretches_of_a_lane_touch():
    result = run_strategy("hdp", batch(1), setting(2, 16), timeline=True).result
    found = segments(result.timeline, 2)
    same = found.lane[1:] == found.lane[:-1]
    assert np.all(np.abs(found.start[1:] - found.end[:-1])[same] < 1e-5)
    assert np.all(found.state[1:][same] != found.state[:-1][same])
    assert found.start[np.flatnonzero(np.diff(found.lane, prepend=-1))] == pytest.approx(0, abs=1e-5)


def test_raster_is_what_stands_in_the_middle_of_each_cell():
    result = run_strategy("naive", batch(2), setting(1, 16), timeline=True).result
    found = segments(result.timeline, 1)
    seconds, columns = 1.3 * found.seconds, 97
    lanes = np.array([0, 5, 15])
    cells = raster(found, lanes, seconds, columns)
    for row, lane in enumerate(lanes):
        for column in range(columns):
            middle = (column + 0.5) * seconds / columns
            inside = (found.lane == lane) & (found.start <= middle) & (middle <= found.end)
            states = set(found.state[inside].tolist()) or {OVER}
            assert cells[row, column] in states


def test_shown_lanes_hold_all_stages_of_evenly_chosen_ranks():
    assert shown_lanes(6, 1, 512).tolist() == [0, 1, 2, 3, 4, 5]
    assert shown_lanes(12, 4, 8).tolist() == [0, 8, 1, 9, 2, 10, 3, 11]
    many = shown_lanes(8192 * 4, 4, 512)
    assert many.size == 512
    assert set((many // 4).tolist()) == set(range(0, 8192, 64))


def test_rasters_share_one_time_axis():
    lines = {name: run_strategy(name, batch(1), setting(), timeline=True).result.timeline for name in ("static", "hdp")}
    section = timeline_section("x", lines, 1)
    cells = section.charts[0].cells
    assert cells["seconds"] == pytest.approx(max(line.end.max() for line in lines.values()))
    over = chr(97 + cells["states"].index("step is over"))
    shares = [np.mean([row.count(over) for row in plane["rows"]]) / len(plane["rows"][0]) for plane in cells["planes"]]
    assert shares[0] == 0
    faster = lines["hdp"].end.max() / lines["static"].end.max()
    assert shares[1] == pytest.approx(1 - faster, abs=0.01)
    rows = [len(plane["rows"]) for plane in cells["planes"]]
    assert rows == [16, 16]


def test_bars_of_the_zoom_are_those_of_the_stretches():
    lines = {"hdp": run_strategy("hdp", batch(1), setting(), timeline=True).result.timeline}
    found = segments(lines["hdp"], 1)
    zoom = timeline_section("x", lines, 1).charts[1]
    window = zoom.layout["xaxis"]["range"][1]
    for trace in zoom.traces:
        assert min(trace["x"]) > 0
        assert max(b + n for b, n in zip(trace["base"], trace["x"])) <= window + 1e-5
    rank = int(zoom.traces[0]["y"][0].split()[1].rstrip(","))
    state = next(place for place, name in enumerate(STATES) if KEYS[name].words == zoom.traces[0]["name"])
    mine = [
        (b, n) for y, b, n in zip(*(zoom.traces[0][k] for k in ("y", "base", "x"))) if y.startswith(f"rank {rank},")
    ]
    keep = (found.lane == rank) & (found.state == state) & (found.start < window)
    assert len(mine) == keep.sum()
    assert [b for b, _ in mine] == pytest.approx(found.start[keep].tolist(), abs=1e-5)


def test_overlay_compares_measured_and_simulated():
    measured = timeline((0, "forward", 1, 11, {}), (1, "forward", 1, 6, {}))
    simulated = timeline((0, "forward", 0, 8, {}), (1, "forward", 0, 6, {}))
    section = overlay_section(measured, simulated, "o")
    assert section.charts[0].heading == (
        "Measured 10.0 s, simulated by the profile 8.00 s: the simulation is 20 % off what was measured"
    )
    assert section.charts[0].table.rows == (
        ("rank 0", "10.0 s", "8.00 s", "20 %"),
        ("rank 1", "5.00 s", "6.00 s", "20 %"),
    )
    three = overlay_section(measured, simulated, "o", replayed=measured, shared_cores=True)
    assert "replayed from what it computed 10.0 s" in three.charts[0].heading
    assert "shared CPU cores" in three.charts[0].caption
