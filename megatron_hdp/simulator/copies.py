"""Copies of offloaded activations, which share PCIe with what the NIC sends: what sticks out of a piece's passes."""

from fractions import Fraction

import numpy as np

from megatron_hdp.simulator.job import Job
from megatron_hdp.simulator.messages import sum_by_microbatch
from megatron_hdp.simulator.sent import sent_by_sequences
from megatron_hdp.types import IntArray, Plan

_PS = 10**12


def copy_waits(plan: Plan, job: Job, lasting: IntArray) -> IntArray:
    """Picoseconds that copies add to every micro-batch's forward and backward, int64 [num_microbatches, 2].

    A GPU's lanes carry its copies out and, where it shares them, what its NIC sends, during forward; copies in and what
    the NIC gets during backward. What they cannot carry while all layers but the first and the last run is waited for.
    A piece of which something leaves is alone in its micro-batch, so the time is that of the micro-batch.

    Args:
        plan: what is run.
        job: on what.
        lasting: of each micro-batch without copies, int64 [num_microbatches, 2].
    """
    waits = np.zeros_like(lasting)
    leaving = np.flatnonzero(plan.offload > 0)
    if not leaving.size:
        return waits
    cost, layers = job.stage_cost(plan), job.cost.layers_per_stage
    of_sequence = np.zeros((plan.num_sequences, 2), dtype=np.int64)
    of_sequence[leaving] = np.asarray(
        cost.host_bytes(plan.lengths[leaving], plan.ring_size[leaving], plan.offload[leaving])
    )[:, None]
    if job.cluster.pcie_shared_with_nic:
        through = sent_by_sequences(plan, job)
        own = plan.offload[through.sequence] > 0
        beside = np.round(through.of_sender[own]).astype(np.int64) * max(layers - 2, 0)
        of_sequence[through.sequence[own]] += beside
    each = round(Fraction(_PS << 20) / Fraction(job.cluster.pcie_bandwidth))  # picoseconds of a MiB
    for phase in (0, 1):
        moved = sum_by_microbatch(plan, of_sequence[:, phase])
        lanes = (moved >> 20) * each + ((moved & 0xFFFFF) * each >> 20)
        waits[:, phase] = np.where(
            moved > 0, np.maximum(lanes - lasting[:, phase] * max(layers - 2, 0) // layers, 0), 0
        )
    return waits
