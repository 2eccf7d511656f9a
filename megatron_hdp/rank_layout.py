"""Which process sits where: tensor rank, pool rank, stage, expert group, node. Pure arithmetic, no torch.

Megatron numbers processes by tensor rank first, then by pool rank, then by stage (its order "tp-cp-ep-dp-pp"), or with
--use-tp-pp-dp-mapping by stage before pool rank.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise


@dataclass(frozen=True, slots=True)
class Place:
    """Where one process sits."""

    tensor: int
    pool: int
    """Pool rank: the number of its column."""
    stage: int
    node: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RankLayout:
    """All processes of a run."""

    tensor_parallel: int
    stages: int
    pool: int
    """Columns."""
    expert_group: int = 1
    """Consecutive pool ranks that share experts."""
    per_node: int
    """Processes of a node; the last node may have fewer."""
    stages_first: bool = False
    """Stages of a column are numbered before the next column."""

    @property
    def processes(self) -> int:
        """Of the run."""
        return self.tensor_parallel * self.stages * self.pool

    def place(self, process: int) -> Place:
        """Where a process sits. Raises `IndexError` for one that there is not."""
        if not 0 <= process < self.processes:
            raise IndexError(f"process {process} of {self.processes}")
        outer, tensor = divmod(process, self.tensor_parallel)
        if self.stages_first:
            pool, stage = divmod(outer, self.stages)
        else:
            stage, pool = divmod(outer, self.pool)
        return Place(tensor, pool, stage, process // self.per_node)

    def process(self, pool: int, stage: int, tensor: int) -> int:
        """The process at a place."""
        outer = pool * self.stages + stage if self.stages_first else stage * self.pool + pool
        return outer * self.tensor_parallel + tensor

    def column(self, pool: int) -> list[list[int]]:
        """Processes of a column, stage by stage."""
        return [[self.process(pool, stage, t) for t in range(self.tensor_parallel)] for stage in range(self.stages)]

    def members(self, stage: int, tensor: int) -> list[int]:
        """The pool: processes that exchange pieces of sequences and add up gradients, by pool rank."""
        return [self.process(pool, stage, tensor) for pool in range(self.pool)]

    def rows(self, most: int = 8) -> list[tuple[str, str]]:
        """(name, finding) pairs for people; of columns, expert groups and nodes the first ``most``."""
        rows = self._columns()
        others = self.tensor_parallel * self.stages - 1
        rest = f"; {others:,} other{'s' * (others > 1)}, one for each tensor rank and stage" if others else ""
        rows.append(("a pool", _named("process", self.members(0, 0)) + rest))
        if self.expert_group > 1:
            groups = [range(begin, begin + self.expert_group) for begin in range(0, self.pool, self.expert_group)]
            rows.append(("expert groups", "pool ranks " + _some([ranges(group) for group in groups], most)))
        nodes = -(-self.processes // self.per_node)
        rows += [(f"node {node}", self._node(node)) for node in range(min(nodes, most))]
        if nodes > most:
            rows.append(("...", f"{nodes - most:,} further node{'s' * (nodes - most > 1)}"))
        return rows

    def _columns(self) -> list[tuple[str, str]]:
        """Up to three columns; of more the first two and the last, and how many are left out."""
        shown = sorted({0, min(1, self.pool - 1), self.pool - 1})
        rows = [(f"column {pool}", _stages(self.column(pool))) for pool in shown]
        left = self.pool - len(shown)
        if left == 0:
            return rows
        return [*rows[:-1], ("...", f"{left:,} further column{'s' * (left > 1)}"), rows[-1]]

    def _node(self, node: int) -> str:
        """Who sits on a node: stage by stage its pool ranks."""
        begin = node * self.per_node
        places = [self.place(process) for process in range(begin, min(begin + self.per_node, self.processes))]
        by_stage = {place.stage: sorted({p.pool for p in places if p.stage == place.stage}) for place in places}
        if self.stages == 1:
            return _named("pool rank", by_stage[0])
        return "; ".join(f"stage {stage}: {_named('pool rank', pools)}" for stage, pools in sorted(by_stage.items()))


def ranges(numbers: Iterable[int]) -> str:
    """0-3, 8 for 0, 1, 2, 3, 8; 0-12 step 4 for evenly spaced ones. ``numbers`` ascend."""
    found = list(numbers)
    steps = {b - a for a, b in pairwise(found)}
    if len(found) > 2 and len(steps) == 1 and steps != {1}:
        return f"{found[0]}-{found[-1]} step {steps.pop()}"
    runs = [[number for _, number in run] for _, run in groupby(enumerate(found), lambda pair: pair[1] - pair[0])]
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _named(what: str, numbers: Sequence[int]) -> str:
    """process 3, processes 3-5."""
    several = "es" if what.endswith("s") else "s"
    return f"{what}{several * (len(numbers) > 1)} {ranges(numbers)}"


def _stages(column: Sequence[Sequence[int]]) -> str:
    if len(column) == 1:
        return _named("process", column[0])
    return "; ".join(f"stage {stage}: {_named('process', members)}" for stage, members in enumerate(column))


def _some(parts: Sequence[str], most: int) -> str:
    more = f" and {len(parts) - most:,} more" if len(parts) > most else ""
    return "; ".join(parts[:most]) + more
