"""What every rank does when: as a raster of rank x time, and as bars of some ranks."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from megatron_hdp.report.chart import Chart, Section, Table, axis, percent, plain
from megatron_hdp.report.chart import seconds as in_words
from megatron_hdp.report.palette import COMPUTING, KEYS, OFF, STATES, fill
from megatron_hdp.report.segments import (
    OVER,
    Segments,
    computing_share,
    raster,
    segments,
    shown_lanes,
    state_seconds,
)
from megatron_hdp.simulator.result import KINDS, Timeline
from megatron_hdp.types import IntArray

_COLUMNS = 640
"""Cells of a raster along time."""
_ROWS = 512
"""Cells of a raster along ranks, at most about."""
_ZOOMED = 6
"""Ranks whose bars are shown."""
_MOST_BARS = 90
"""Stretches of a lane that can be told apart in the zoom."""
_OVERLAID = 8
"""Lanes that are shown measured and simulated."""
_SHARED = (
    " The ranks of this run shared CPU cores: while one computes others may have to wait for a core, which no "
    "simulation of GPUs knows, so the measured rows are longer. What each rank computed was measured by its own "
    "processor time."
)
_GROUPS = 16
"""Rows of a raster's table."""


def timeline_section(
    name: str, timelines: Mapping[str, Timeline], stages: int, words: str = "", step: str = "the step"
) -> Section:
    """Rasters of all timelines on one time axis, and a zoom; name of the way to run -> its timeline.

    The last one is the one whose ranks are chosen for the zoom. ``step`` says which of several it is: other steps have
    other shares.
    """
    found = {words: segments(timeline, stages) for words, timeline in timelines.items()}
    lanes = max(int(one.lane.max()) + 1 for one in found.values())
    most = max(one.seconds for one in found.values())
    chosen = _telling_ranks(timelines[list(timelines)[-1]], lanes // stages, stages)
    return Section(
        name=f"{name}-timeline",
        title="What every rank does when",
        words=f"{words}All rows share one time axis, so that equal distances are equal times.",
        charts=(
            _raster_chart(f"{name}-raster", found, lanes, stages, most, step),
            _zoom_chart(f"{name}-zoom", _counts_heading(timelines, stages), found, chosen, stages),
        ),
    )


def overlay_section(
    measured: Timeline,
    simulated: Timeline,
    name: str,
    stages: int = 1,
    *,
    replayed: Timeline | None = None,
    shared_cores: bool = False,
) -> Section:
    """A run's measured timeline with its simulated ones, lane by lane.

    ``replayed`` has the measured compute in the simulator's order, ``simulated`` the cost model's. With
    ``shared_cores`` the measured one's wall clock holds time in which other processes computed.
    """
    timelines = {"measured": measured} | ({"replayed": replayed} if replayed is not None else {})
    timelines |= {"simulated": simulated}
    found = {way: segments(timeline, stages) for way, timeline in timelines.items()}
    lanes = np.unique(measured.lane)
    shown = [int(lane) for lane in lanes[:_OVERLAID]]
    ends = {way: _ends(timeline, lanes) for way, timeline in timelines.items()}
    last = {way: float(of_lanes.max()) for way, of_lanes in ends.items()}
    words = {
        "measured": "Measured",
        "replayed": "replayed from what it computed",
        "simulated": "simulated by the profile",
    }
    heading = ", ".join(f"{words[way]} {in_words(last[way])}" for way in timelines)
    base = "measured" if replayed is None else "replayed"
    heading += f": the simulation is {percent(abs(last['simulated'] / last[base] - 1))} off what was {base}"
    rows = tuple(
        (
            _lane_words(int(lane), stages),
            *(in_words(float(ends[way][i])) for way in timelines),
            percent(abs(float(ends["simulated"][i] / ends[base][i]) - 1)),
        )
        for i, lane in enumerate(lanes)
    )
    chart = _bar_chart(
        f"{name}-bars",
        heading=heading,
        caption=(
            "For each rank what it did in the real run (measured), what the simulator says when every micro-batch "
            "computes as long as it did (replayed), and what it says from the profile alone (simulated). Time in "
            "seconds runs to the right, each row from the begin of the step. A good simulation has bars of the same "
            "lengths in the same places." + (_SHARED if shared_cores else "")
        ),
        rows=[(f"{_lane_words(lane, stages)}, {way}", found[way].of([lane])) for lane in shown for way in timelines],
        window=max(one.seconds for one in found.values()),
        table=Table(("rank", *(f"{way}, end" for way in timelines), f"simulated off {base}"), rows),
    )
    return Section(name=name, title="Is the simulator right?", charts=(chart,))


def _ends(timeline: Timeline, lanes: IntArray) -> Any:
    """End of each lane's last micro-batch, counted from the first begin of any; [lanes]."""
    passes = np.isin(timeline.kind, [KINDS.index("forward"), KINDS.index("backward")])
    ends = np.zeros(int(max(lanes.max(), timeline.lane.max())) + 1)
    np.maximum.at(ends, timeline.lane[passes], timeline.end[passes])
    return ends[lanes] - timeline.start[passes].min()


def _lane_words(lane: int, stages: int) -> str:
    """A lane for people."""
    rank, stage = divmod(lane, stages)
    return f"rank {rank:,}, stage {stage}" if stages > 1 else f"rank {rank:,}"


def _raster_chart(name: str, found: Mapping[str, Segments], lanes: int, stages: int, most: float, step: str) -> Chart:
    shown = shown_lanes(lanes, stages, _ROWS)
    planes = {words: raster(one, shown, most, _COLUMNS) for words, one in found.items()}
    used = sorted({int(state) for cells in planes.values() for state in np.unique(cells)})
    what = "ranks" if stages == 1 else "stages of ranks"
    number = f"all {lanes:,} {what}" if shown.size == lanes else f"{shown.size:,} of {lanes:,} {what}, evenly chosen"
    shares = {words: float(computing_share(one, lanes).mean()) for words, one in found.items()}
    last, *others = reversed(shares)
    heading = f"With {_short(last)} ranks compute {percent(shares[last])} of {step}"
    heading += "".join(f", with {_short(words)} {percent(shares[words])}" for words in others)
    rows_at, ticks = _rows(shown, stages)
    gap = 0.09
    height = (1 - gap * (len(planes) - 1)) / len(planes)
    layout: dict[str, Any] = {"xaxis": axis("time, s", range=[0, most], anchor="y" if len(planes) == 1 else None)}
    cells: dict[str, Any] = {
        "states": [KEYS[STATES[state]].words if state < OVER else OFF.words for state in used],
        "colours": [KEYS[STATES[state]].colour if state < OVER else OFF.colour for state in used],
        "labels": [_lane_words(int(lane), stages) for lane in shown],
        "seconds": most,
        "planes": [],
    }
    annotations = []
    for index, (words, plane) in enumerate(planes.items()):
        top = 1 - index * (height + gap)
        suffix = "" if index == 0 else str(index + 1)
        layout[f"yaxis{suffix}"] = axis(
            "rank" if stages == 1 else "", domain=[top - height, top], anchor="x", autorange="reversed", **ticks
        )
        letters = np.array([chr(97 + used.index(state)) if state in used else "?" for state in range(OVER + 1)])
        rows = ["".join(row) for row in letters[plane].tolist()]
        cells["planes"].append({"axis": f"y{suffix}", "rows": rows, "y": rows_at})
        annotations.append(_headline(f"{words}: {in_words(found[words].seconds)} a step", top))
    del layout["xaxis"]["anchor"]
    layout["xaxis"]["anchor"] = f"y{'' if len(planes) == 1 else len(planes)}"
    layout["annotations"] = annotations
    return Chart(
        name=name,
        heading=heading,
        caption=(
            f"Each row of dots is one {'rank' if stages == 1 else 'stage of a rank'} ({number}), time in seconds runs "
            "to the right; colours say what the rank does. Dark is computing, all other colours are waiting, white is "
            "after the end. Where in a micro-batch a rank waits is not recorded: waiting is drawn ahead of computing."
        ),
        traces=[],
        layout=layout,
        table=_raster_table(found, lanes, stages),
        height=120 + 250 * len(planes),
        narrow_height=120 + 200 * len(planes),
        keys=tuple(replace(KEYS[STATES[state]], pattern="") for state in used if state < OVER),  # dots have none
        cells=cells,
    )


def _rows(shown: IntArray, stages: int) -> tuple[list[int], dict[str, Any]]:
    """Where rows are on their axis, and its ticks: ranks, or bands of stages with all shown ranks in each."""
    ticks: dict[str, Any] = {"showgrid": False, "zeroline": False}
    if stages == 1:
        return shown.tolist(), ticks
    band = shown.size // stages
    ticks |= {"tickvals": [band * stage + (band - 1) / 2 for stage in range(stages)]}
    ticks |= {"ticktext": [f"stage {stage}" for stage in range(stages)]}
    return list(range(shown.size)), ticks


def _headline(words: str, top: float) -> dict[str, Any]:
    """A title above a part of a chart."""
    return {
        "text": f"<b>{plain(words)}</b>",
        "x": 0,
        "y": top,
        "xref": "paper",
        "yref": "paper",
        "xanchor": "left",
        "yanchor": "bottom",
        "showarrow": False,
    }


def _raster_table(found: Mapping[str, Segments], lanes: int, stages: int) -> Table:
    """Shares of states for groups of ranks."""
    ranks = lanes // stages
    size = -(-ranks // _GROUPS)
    rows = []
    for words, one in found.items():
        per_rank = state_seconds(one, lanes).reshape(ranks, stages, len(STATES)).mean(axis=1) / one.seconds
        for first in range(0, ranks, size):
            shares = per_rank[first : first + size].mean(axis=0)
            waits = sorted(range(COMPUTING, len(STATES)), key=lambda state: -shares[state])[:2]
            causes = [f"{KEYS[STATES[s]].words} {percent(float(shares[s]))}" for s in waits if shares[s] >= 0.0005]
            last = min(first + size, ranks) - 1
            label = f"{first:,}" if first == last else f"{first:,}–{last:,}"
            rows.append((words, label, percent(float(shares[:COMPUTING].sum())), "; ".join(causes) or "nothing"))
    return Table(("way to run", "ranks", "computing", "waits most"), tuple(rows))


def _telling_ranks(timeline: Timeline, ranks: int, stages: int) -> list[int]:
    """Ranks with the most and the fewest micro-batches, and some between; ascending."""
    forward = timeline.kind == KINDS.index("forward")
    bars = np.bincount(timeline.lane[forward] // stages, minlength=ranks)
    order = np.argsort(bars, kind="stable")
    places = np.unique(np.linspace(0, ranks - 1, min(_ZOOMED, ranks)).round().astype(int))
    return sorted(int(order[place]) for place in places)


def _counts_heading(timelines: Mapping[str, Timeline], stages: int) -> str:
    """How many micro-batches ranks run."""
    words = []
    for way, timeline in reversed(list(timelines.items())):
        forward = (timeline.kind == KINDS.index("forward")) & (timeline.lane % stages == 0) & (timeline.part == 0)
        counts = np.bincount(timeline.lane[forward] // stages, minlength=int(timeline.lane.max()) // stages + 1)
        low, high = int(counts.min()), int(counts.max())
        words.append(f"with {_short(way)} {low:,}" + (f" to {high:,}" if high > low else ""))
    return "Micro-batches of a rank: " + ", ".join(words)


def _zoom_chart(name: str, heading: str, found: Mapping[str, Segments], chosen: Sequence[int], stages: int) -> Chart:
    """Bars of the chosen ranks' first stages, way by way; up to where the busiest gets too fine to see."""
    lanes = [rank * stages for rank in chosen]
    rows = [(f"{_lane_words(lane, stages)}, ", words, one.of([lane])) for words, one in found.items() for lane in lanes]
    most = max(one.seconds for one in found.values())
    window = min([most, *(_readable(one) for _, _, one in rows)])
    whole = "the whole step" if window >= most else f"the first {in_words(window)} of the step"
    return _bar_chart(
        name,
        heading=heading,
        caption=(
            f"The same as above for {len(chosen)} ranks, chosen from the fewest to the most micro-batches, and for "
            f"{whole}; time in seconds runs to the right. Ranks that share a long sequence have the same long bars at "
            "the same time."
        ),
        rows=[(f"{lane}{_short(words)}", one) for lane, words, one in rows],
        window=window,
        table=_zoom_table(rows),
    )


def _short(words: str) -> str:
    """Of the words for a way to run, those ahead of a comma."""
    short = words.partition(",")[0]
    return short if len(short) <= 24 else f"{short[:22]}…"


def _readable(one: Segments) -> float:
    """Up to when a lane's stretches can be told apart."""
    return float(one.end[_MOST_BARS - 1]) if one.end.size > _MOST_BARS else one.seconds


def _zoom_table(rows: Sequence[tuple[str, str, Segments]]) -> Table:
    found = []
    for lane, words, one in rows:
        shares = [float((one.end - one.start)[one.state == s].sum()) for s in range(len(STATES))]
        waits = sum(shares[COMPUTING:])
        found.append((lane.strip(), words, in_words(sum(shares[:COMPUTING])), in_words(waits)))
    return Table(("rank", "way to run", "computes", "waits"), tuple(found))


def _bar_chart(
    name: str, *, heading: str, caption: str, rows: Sequence[tuple[str, Segments]], window: float, table: Table
) -> Chart:
    """Horizontal bars: one row of each label, one trace of each state."""
    used = sorted({int(state) for _, one in rows for state in np.unique(one.state[one.start < window])})
    traces = []
    for state in used:
        y, base, length = [], [], []
        for words, one in rows:
            keep = (one.state == state) & (one.start < window)
            y += [plain(words)] * int(keep.sum())
            base += one.start[keep].round(6).tolist()
            length += (np.minimum(one.end[keep], window) - one.start[keep]).round(6).tolist()
        traces.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": KEYS[STATES[state]].words,
                "y": y,
                "base": base,
                "x": length,
                "marker": fill(STATES[state]) | {"line": {"width": 0}},
                "hovertemplate": "%{y}: %{x:.4g} s, from %{base:.4g} s<extra>" + KEYS[STATES[state]].words + "</extra>",
            }
        )
    labels = [plain(words) for words, _ in rows]
    return Chart(
        name=name,
        heading=heading,
        caption=caption,
        traces=traces,
        layout={
            "barmode": "overlay",
            "bargap": 0.25,
            "showlegend": False,
            "xaxis": axis("time, s", range=[0, window]),
            "yaxis": {
                "type": "category",
                "categoryorder": "array",
                "categoryarray": labels,
                "autorange": "reversed",
                "automargin": True,
            },
        },
        table=table,
        height=110 + 30 * len(rows),
        keys=tuple(KEYS[STATES[state]] for state in used),
    )
