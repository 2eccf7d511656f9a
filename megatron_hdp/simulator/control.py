"""Planning and loading: what they take, and what of it the step before does not hide."""

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from megatron_hdp.simulator.job import Job
from megatron_hdp.simulator.messages import piece_tokens, sum_by_microbatch
from megatron_hdp.simulator.result import ControlCost
from megatron_hdp.types import IntArray, Plan

_PS = 10**12


@dataclass(frozen=True)
class ControlTimes:
    """Picoseconds."""

    plan: int
    broadcast: int
    bytes: int
    """Of the plan, where it is sent; not a time."""
    load: IntArray
    """Of each rank, int64 [num_ranks]."""

    @property
    def ready(self) -> IntArray:
        """When each rank has plan and tokens, counted from where planning starts; int64 [num_ranks]."""
        return self.plan + self.broadcast + self.load

    def cost(self, exposed: int) -> ControlCost:
        """For people; ``exposed`` picoseconds of it all are hidden by nothing."""
        times = (self.broadcast / _PS, int(self.load.max()) / _PS, exposed / _PS)
        return ControlCost(self.plan / _PS, self.bytes, *times)


def control_times(plan: Plan, job: Job) -> ControlTimes:
    """What planning, sending the plan and reading a rank's tokens takes.

    A plan that one process makes goes to all nodes along a tree, in pieces, so that its bytes pass a NIC once:
    ceil(log2 nodes) latencies and its size over the bandwidth of a NIC.
    """
    control, cluster = job.control, job.cluster
    num_bytes, broadcast = 0, 0
    if control.broadcast:
        num_bytes = plan_bytes(plan)
        nodes = -(-job.gpus(plan.num_ranks) // cluster.gpus_per_node)
        hops = Fraction(cluster.nic_latency) * math.ceil(math.log2(max(nodes, 1)))
        broadcast = round((hops + num_bytes / Fraction(cluster.nic_bandwidth) * (nodes > 1)) * _PS)
    each = round(Fraction(control.load_seconds_per_token) * _PS)
    tokens = sum_by_microbatch(plan, piece_tokens(plan))
    ahead = np.concatenate([np.zeros(1, np.int64), np.cumsum(tokens)])
    of_rank = ahead[plan.rank_offsets[1:]] - ahead[plan.rank_offsets[:-1]]
    return ControlTimes(round(Fraction(control.plan_seconds) * _PS), broadcast, num_bytes, of_rank * each)


def plan_bytes(plan: Plan) -> int:
    """Bytes of a plan's columns, as they are sent and hashed."""
    return sum(int(getattr(plan, name).nbytes) for name in plan._columns())


def exposed_ahead(times: ControlTimes, work: int) -> int:
    """Where the next step's plan and tokens are prepared during a step of ``work`` picoseconds: what is left then."""
    return max(0, int(times.ready.max()) - work)
