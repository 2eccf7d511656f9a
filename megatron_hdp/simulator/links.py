"""Over which links the ranks of a ring send to each other, and what of them each one gets.

Ranks of a ring send in step. At each border between two nodes one rank of a ring sends up and one down, so a ring has
few flows across nodes, and their GPUs share NICs only where a node has fewer NICs than GPUs. A gather, or a swap of
rows for heads, sends from all GPUs to all others at once, and NICs and uplinks are shared by all of that.

What different rings send at the same time is not added up. There are at most two at a node's borders, because rings
are intervals of ranks.
"""

import sys
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_hdp.cost import LinkProfile
from megatron_hdp.cost.over_links import FREE
from megatron_hdp.simulator.cluster import Cluster
from megatron_hdp.simulator.job import Job
from megatron_hdp.types import EXCHANGES, IntArray, Plan, Ring

_RING, _HEADS = EXCHANGES.index("ring"), EXCHANGES.index("heads")


@dataclass(frozen=True)
class RingLinks:
    """What every sequence's ring sends over."""

    links: tuple[LinkProfile, ...]
    """All that there are; the first takes no time."""
    link: IntArray
    """Of each sequence's hops, or of what gathers: index into ``links``, int64 [num_sequences]; 0 for local ones."""
    swap_link: IntArray
    """Of its swap of rows for heads; 0 if it has none."""
    leaves: npt.NDArray[np.bool_]
    """Does it send across nodes? [num_sequences]"""
    nic_flows: IntArray
    """Most GPUs of the ring whose hops one NIC sends, int64 [num_sequences]; 0 if it does not leave its node."""


@dataclass(frozen=True)
class _Sent:
    """What one ring sends over."""

    link: LinkProfile
    swap: LinkProfile
    leaves: bool
    nic_flows: int


def ring_links(plan: Plan, job: Job) -> RingLinks:
    """Links of all rings of a plan; equal rings at equal places of their nodes are looked at once."""
    period = job.cluster.ranks_per_node(job.tensor_parallel) * (job.cluster.nodes_per_leaf or 1)
    shared = np.flatnonzero(plan.ring_size > 1)
    columns = [
        plan.ring_start[shared] % period,
        plan.ring_size[shared],
        plan.exchange[shared],
        plan.head_ranks[shared],
    ]
    cases, of_case = np.unique(np.stack(columns), axis=1, return_inverse=True)
    offsets = sorted({stage * plan.num_ranks % period for stage in range(job.stages)})
    found = [_slowest([_sent(job, start + offset, *rest) for offset in offsets]) for start, *rest in cases.T.tolist()]
    known = {FREE: 0}
    numbers = [[known.setdefault(link, len(known)) for link in (sent.link, sent.swap)] for sent in found]
    link, swap_link, leaves, flows = (np.zeros(plan.num_sequences, dtype=np.int64) for _ in range(4))
    if shared.size:
        of_case = of_case.reshape(-1)
        link[shared], swap_link[shared] = np.array(numbers, dtype=np.int64)[of_case].T
        leaves[shared] = np.array([sent.leaves for sent in found])[of_case]
        flows[shared] = np.array([sent.nic_flows for sent in found])[of_case]
    return RingLinks(tuple(known), link, swap_link, leaves > 0, flows)


def _slowest(sent: list[_Sent]) -> _Sent:
    """Of the same ring on stages that lie differently on their nodes."""
    return _Sent(
        _worst([one.link for one in sent]),
        _worst([one.swap for one in sent]),
        any(one.leaves for one in sent),
        max(one.nic_flows for one in sent),
    )


def _worst(links: list[LinkProfile]) -> LinkProfile:
    """The largest latency and the least bandwidth."""
    return LinkProfile(max(link.latency for link in links), min(link.bandwidth for link in links))


def _sent(job: Job, start: int, size: int, exchange: int, head_ranks: int) -> _Sent:
    """What a ring from pool rank ``start`` sends over. A static mesh has its ranks in the order of their numbers."""
    order = np.arange(start, start + size) if job.one_slice else np.array(Ring(start, size).ranks)
    if exchange == _RING:
        pairs = _hops(order, 1)
        both_ways = job.cost.window is not None
        hop, leaves, flows = hops_link(job, *(np.concatenate([pairs, pairs[::-1]], axis=1) if both_ways else pairs))
        return _Sent(hop, FREE, leaves, flows)
    group = head_ranks if exchange == _HEADS else size
    swap, leaves = all_to_all_link(job, order.reshape(-1, group))
    if exchange != _HEADS:
        return _Sent(swap, FREE, leaves, 0)
    if group == size:
        return _Sent(FREE, swap, leaves, 0)
    hop, hop_leaves, flows = hops_link(job, *_hops(order, group))
    return _Sent(hop, swap, leaves or hop_leaves, flows)


def _hops(order: IntArray, by: int) -> IntArray:
    """Who sends to whom where each sends ``by`` places on, [2, num_hops]."""
    return np.stack([order, np.roll(order, -by)])


def hops_link(job: Job, source: IntArray, target: IntArray) -> tuple[LinkProfile, bool, int]:
    """The slowest of some hops that are made at the same time, between pool ranks; does one leave its node, and GPUs
    whose hops one NIC sends.

    The slowest has the largest latency of all and the least bandwidth of all. A GPU that sends to two others sends both
    over its own link: the cost model adds their bytes up.
    """
    cluster = job.cluster
    ranks = cluster.ranks_per_node(job.tensor_parallel)
    crossing = source // ranks != target // ranks
    latencies, bandwidths, flows = [], [], 0
    if not crossing.all():
        latencies, bandwidths = [cluster.inside_latency], [cluster.inside_bandwidth]
    if crossing.any():
        ends = [_gpus(job, side[crossing]) for side in (source, target)]
        per_nic = [int(np.bincount(_nic(cluster, np.unique(gpus))).max()) for gpus in ends]
        latencies.append(cluster.nic_latency)
        bandwidths.append(_nics_of_gpu(cluster) * cluster.nic_bandwidth / max(per_nic))
        flows = per_nic[0]
        bandwidths += [
            cluster.leaf_uplink / most for most in [_uplink_flows(cluster, *ends)] if most and cluster.leaf_uplink
        ]
    return LinkProfile(max(latencies), min(bandwidths)), bool(crossing.any()), flows


def all_to_all_link(job: Job, groups: IntArray) -> tuple[LinkProfile, bool]:
    """A link over which one rank's share of all that its group sends takes as long as the slowest of all ranks.

    Every rank of a group sends the same amount to each other one, all groups at the same time, [num_groups, ranks].
    """
    cluster = job.cluster
    ranks = cluster.ranks_per_node(job.tensor_parallel)
    node = groups // ranks
    inside = (node[:, :, None] == node[:, None, :]).sum(axis=2) - 1
    outside = groups.shape[1] - 1 - inside
    times = [inside.max() / cluster.inside_bandwidth]
    if outside.any():
        gpus = _gpus(job, groups.reshape(-1))
        sent = np.repeat(outside.reshape(-1), job.tensor_parallel)
        per_nic = np.bincount(_nic(cluster, gpus), weights=sent).max()
        times.append(per_nic / (_nics_of_gpu(cluster) * cluster.nic_bandwidth))
        if cluster.leaf_uplink is not None and cluster.nodes_per_leaf is not None:
            leaf = node // cluster.nodes_per_leaf
            apart = (leaf[:, :, None] != leaf[:, None, :]).sum(axis=2)
            per_leaf = np.bincount((leaf - leaf.min()).reshape(-1), weights=apart.reshape(-1)).max()
            times.append(per_leaf * job.tensor_parallel / cluster.leaf_uplink)
    latency = cluster.nic_latency if outside.any() else cluster.inside_latency
    shares, slowest = groups.shape[1] - 1, float(max(times))
    # links that take no time have the largest bandwidth that there is
    bandwidth = shares / slowest if slowest * sys.float_info.max > shares else sys.float_info.max
    return LinkProfile(latency, bandwidth), bool(outside.any())


def _gpus(job: Job, ranks: IntArray) -> IntArray:
    """GPUs of pool ranks of one stage, numbered through the cluster."""
    return (ranks[:, None] * job.tensor_parallel + np.arange(job.tensor_parallel)).reshape(-1)


def _nic(cluster: Cluster, gpus: IntArray) -> IntArray:
    """NIC of each GPU, or its bundle of NICs where there are more NICs than GPUs; numbered from 0."""
    nic = gpus // max(1, cluster.gpus_per_node // cluster.nics_per_node)
    return np.asarray(nic - nic.min(), dtype=np.int64)


def _nics_of_gpu(cluster: Cluster) -> int:
    return max(1, cluster.nics_per_node // cluster.gpus_per_node)


def _uplink_flows(cluster: Cluster, source: IntArray, target: IntArray) -> int:
    """Most GPUs that send to other leaf switches from one, or get something there; 0 if there is one switch for all."""
    if cluster.nodes_per_leaf is None:
        return 0
    leaves = [gpus // (cluster.gpus_per_node * cluster.nodes_per_leaf) for gpus in (source, target)]
    apart = leaves[0] != leaves[1]
    if not apart.any():
        return 0
    numbers = [np.unique(gpus[apart]) // (cluster.gpus_per_node * cluster.nodes_per_leaf) for gpus in (source, target)]
    return max(int(np.bincount(leaf - leaf.min()).max()) for leaf in numbers)
