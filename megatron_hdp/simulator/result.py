"""What a simulated step was: bars of every lane, time, idle by cause, bytes by tier.

A *lane* is one pipeline stage of one pool rank: all GPUs of its tensor-parallel group, which do the same at the same
time. Lane ``rank * stages + stage``.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_hdp.types import IntArray

type Seconds = npt.NDArray[np.float64]

KINDS = ("load", "gather", "forward", "backward", "reduce", "optimizer")
"""What a bar of a timeline can be; a timeline holds the index.

load       waiting for the step's tokens and plan
gather     parameters come back from the ranks that updated them, as far as nothing hides it
forward    one micro-batch through one model part
backward   the same, with recompute
reduce     gradients are summed over the pool, as far as nothing hides it
optimizer  each rank updates its part of the parameters
"""

CAUSES = ("load", "gather", "ring", "partner", "expert", "copy", "bubble", "sync", "reduce")
"""Why a lane does not compute. With its computing and `optimizer` they add up to the step for every lane.

load     the step's tokens or its plan are late
gather   parameters that nothing hides
ring     transfers of the micro-batch's own rings (or gathers, or swapped heads) that stick out of compute
partner  another rank of a ring comes later to the shared micro-batch, or takes longer in it
expert   the same, for ranks that share experts
copy     activations are not yet gone to host memory, or not yet back
bubble   the pipeline stage before or after is not done, or its message is under way
sync     micro-batches are done, the slowest rank's are not
reduce   the sum of gradients that nothing hides
"""


@dataclass(frozen=True, eq=False)
class Timeline:
    """One bar for each thing a lane did, sorted by lane and start; all columns have the shape [num_bars]."""

    lane: IntArray
    kind: npt.NDArray[np.int8]
    """Index into `KINDS`."""
    slot: IntArray
    """Micro-batch of the rank, 0 is its first; -1 for bars that are none."""
    part: npt.NDArray[np.int8]
    """Model part of the stage, as in `planner.schedule.Op`."""
    start: Seconds
    end: Seconds
    compute: Seconds
    """Seconds of the bar in which the lane computes; in the rest it waits, for `ring`, `partner`, `expert`, `copy`."""
    ring: Seconds
    partner: Seconds
    expert: Seconds
    copy: Seconds


@dataclass(frozen=True)
class ControlCost:
    """What happens beside training: the plan and the data of the step."""

    plan_seconds: float
    """Making and checking the plan."""
    plan_bytes: int
    """Of the plan that everybody gets, if one process plans; 0 if each makes its own."""
    broadcast_seconds: float
    load_seconds: float
    """Reading a rank's tokens, of the rank that has most to read."""
    exposed_seconds: float
    """What of all that the step before does not hide."""


@dataclass(frozen=True, eq=False)
class StepResult:
    """One simulated step."""

    seconds: float
    """From one step to the next."""
    span_seconds: float
    """From the start of the first micro-batch to the end of the last; what the planner minimises."""
    ranks: int
    stages: int
    gpus: int
    tokens: int
    """Real tokens."""
    mfu: float | None
    """FLOPs that the model needs, recompute not counted, over those that the GPUs could do; None without a model."""
    compute: Seconds
    """Seconds of the step in which each lane computes, [num_lanes]."""
    idle: dict[str, Seconds]
    """Cause -> seconds of each lane, [num_lanes]; keys are `CAUSES`."""
    optimizer_seconds: float
    bytes_by_link: dict[str, int]
    """Link -> bytes of the whole step: inside_node and across_nodes (each byte once, where it is sent), to_host,
    from_host."""
    nic_peak: float
    """Most bytes per second that one NIC sends, over any 10 ms of micro-batches."""
    nic_mean: float
    """Mean over the step and over all NICs."""
    control: ControlCost
    timeline: Timeline | None

    @property
    def tokens_per_second(self) -> float:
        """Of all GPUs."""
        return self.tokens / self.seconds

    @property
    def computing(self) -> float:
        """Share of the step in which a lane computes, mean over lanes."""
        return float(self.compute.mean()) / self.seconds

    def idle_seconds(self) -> dict[str, float]:
        """Cause -> seconds, mean over lanes."""
        return {cause: float(seconds.mean()) for cause, seconds in self.idle.items()}
