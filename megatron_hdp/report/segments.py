"""Timelines as stretches of one state each, and as rasters of lane x time."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_hdp.report.palette import COMPUTING, STATES
from megatron_hdp.simulator.result import KINDS, Timeline
from megatron_hdp.types import IntArray

WAITS = ("partner", "expert", "copy", "ring")
"""Columns of a timeline that say how long a bar waited. Where in the bar is not recorded; drawn ahead of computing."""
OVER = len(STATES)
"""State of a lane whose step is over."""
_PASSES = (KINDS.index("forward"), KINDS.index("backward"))
_SHORTEST = 2e-6
"""Seconds; what is shorter is rounding, files of simulations have microseconds."""


@dataclass(frozen=True, eq=False)
class Segments:
    """Stretches of time in which a lane is in one state, sorted by lane and start; all columns [num_segments]."""

    lane: IntArray
    state: npt.NDArray[np.int8]
    """Index into `palette.STATES`."""
    start: npt.NDArray[np.float64]
    end: npt.NDArray[np.float64]

    @property
    def seconds(self) -> float:
        """End of the last lane."""
        return float(self.end.max())

    def of(self, lanes: Sequence[int]) -> "Segments":
        """Only those of some lanes."""
        keep = np.isin(self.lane, lanes)
        return Segments(self.lane[keep], self.state[keep], self.start[keep], self.end[keep])


def segments(timeline: Timeline, stages: int) -> Segments:
    """Every lane's states without gaps from 0 to the end of the last lane.

    Between micro-batches a lane waits for another stage, or without stages for another rank; after its last one it
    waits for the slowest.
    """
    bars = _cut_bars(timeline)
    gaps = _gaps(timeline, stages)
    parts = [np.concatenate(pair) for pair in zip(bars, gaps)]
    keep = parts[3] - parts[2] > _SHORTEST
    lane, state, start, end = (part[keep] for part in parts)
    order = np.lexsort((end, start, lane))
    return _joined(lane[order], state[order].astype(np.int8), start[order], end[order])


type _Columns = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.float64], npt.NDArray[np.float64]]


def _cut_bars(timeline: Timeline) -> _Columns:
    """Each bar's waits, in the order of `WAITS`, what nothing explains, and what it computes."""
    is_pass = np.isin(timeline.kind, _PASSES)
    length = timeline.end - timeline.start
    waits = np.stack([getattr(timeline, name) for name in WAITS], axis=1) * is_pass[:, None]
    waits = np.minimum(np.cumsum(np.maximum(waits, 0), axis=1), length[:, None])
    rest = np.where(is_pass, np.maximum(length - timeline.compute, waits[:, -1]), waits[:, -1])
    edges = [np.zeros((length.size, 1)), waits, rest[:, None], length[:, None]]
    times = np.concatenate(edges, axis=1) + timeline.start[:, None]
    own = np.array([STATES.index(kind) for kind in KINDS])[timeline.kind]
    always = [STATES.index(name) for name in (*WAITS, "other")]
    states = np.concatenate([np.tile(always, (length.size, 1)), own[:, None]], axis=1)
    lanes = np.repeat(timeline.lane, len(always) + 1)
    return lanes, states.ravel(), times[:, :-1].ravel(), times[:, 1:].ravel()


def _gaps(timeline: Timeline, stages: int) -> _Columns:
    """What lies between bars, ahead of the first and after the last: waiting for stages of the own rank as long as one
    of them still runs, then for the slowest rank.
    """
    lanes = np.unique(timeline.lane)
    over = np.full(lanes.size, timeline.end.max())
    lane = np.concatenate([timeline.lane, lanes])
    start, end = np.concatenate([timeline.start, over]), np.concatenate([timeline.end, over])
    order = np.lexsort((end, start, lane))
    lane, start, end = lane[order], start[order], end[order]
    before = np.concatenate([np.zeros(1), end[:-1]])
    before[np.flatnonzero(np.diff(lane, prepend=-1))] = 0
    last = np.zeros(int(lane.max()) // stages + 1)
    passes = np.isin(timeline.kind, _PASSES)
    np.maximum.at(last, timeline.lane[passes] // stages, timeline.end[passes])
    turn = np.clip(last[lane // stages], before, np.maximum(start, before))
    wait, sync = STATES.index("bubble" if stages > 1 else "partner"), STATES.index("sync")
    return (
        np.concatenate([lane, lane]),
        np.repeat([wait, sync], lane.size),
        np.concatenate([before, turn]),
        np.concatenate([turn, start]),
    )


def _joined(
    lane: IntArray, state: npt.NDArray[np.int8], start: npt.NDArray[np.float64], end: npt.NDArray[np.float64]
) -> Segments:
    """Neighbours of one lane and state as one."""
    new = np.ones(lane.size, bool)
    new[1:] = (lane[1:] != lane[:-1]) | (state[1:] != state[:-1])
    first = np.flatnonzero(new)
    last = np.concatenate([first[1:], [lane.size]]) - 1
    return Segments(lane[first], state[first], start[first], end[last])


def raster(found: Segments, lanes: IntArray, seconds: float, columns: int) -> npt.NDArray[np.int8]:
    """State of each lane in the middle of ``columns`` equal stretches of 0 .. ``seconds``, int8 [lanes, columns].

    `OVER` after the end of the last lane.
    """
    middle = (np.arange(columns) + 0.5) * (seconds / columns)
    width = max(seconds, found.seconds) + 1.0
    keys = found.lane * width + found.start
    place = np.searchsorted(keys, lanes[:, None] * width + middle[None, :], side="right") - 1
    cells: npt.NDArray[np.int8] = np.where(middle[None, :] <= found.seconds, found.state[place], OVER).astype(np.int8)
    return cells


def shown_lanes(lanes: int, stages: int, most: int) -> IntArray:
    """At most about ``most`` lanes, all stages of evenly chosen ranks, stage by stage; int64."""
    ranks = lanes // stages
    step = -(-ranks // max(1, most // stages))
    chosen = np.arange(0, ranks, step)
    return np.asarray((np.arange(stages)[:, None] + chosen[None, :] * stages).ravel(), dtype=np.int64)


def state_seconds(found: Segments, lanes: int) -> npt.NDArray[np.float64]:
    """Seconds that each lane is in each state, [lanes, states]."""
    cells = np.bincount(
        found.lane * len(STATES) + found.state, weights=found.end - found.start, minlength=lanes * len(STATES)
    )
    return cells.reshape(lanes, len(STATES))


def computing_share(found: Segments, lanes: int) -> npt.NDArray[np.float64]:
    """Share of the step in which each lane computes, [lanes]."""
    share: npt.NDArray[np.float64] = state_seconds(found, lanes)[:, :COMPUTING].sum(axis=1) / found.seconds
    return share
