"""Clusters: files, profiles, links that are shared."""

import dataclasses
import sys

import numpy as np
import pytest

from megatron_hdp.cost import CostModel, LinkProfile, Tier, load_profile
from megatron_hdp.errors import ConfigError
from megatron_hdp.simulator import Cluster, Job, cluster_names, cluster_of_profile, load_cluster, profile_on
from megatron_hdp.simulator.cluster_files import cluster_from_yaml
from megatron_hdp.simulator.links import all_to_all_link, hops_link

TEXT = """
name: mine
gpus_per_node: 8
inside_node: {gigabyte_per_second: 100, latency_microseconds: 1}
nics: {per_node: 4, gigabyte_per_second: 10, latency_microseconds: 20}
leaf: {nodes: 2, oversubscription: 4}
pcie: {gigabyte_per_second: 20, shared_with_nic: true}
host_gigabyte: 500
"""


def refused(text: str) -> str:
    with pytest.raises(ConfigError) as error:
        cluster_from_yaml(text, "mine.yaml")
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_file_has_units_in_its_names():
    found = cluster_from_yaml(TEXT)
    assert found == Cluster(
        name="mine",
        gpus_per_node=8,
        inside_bandwidth=100e9,
        inside_latency=1e-6,
        nics_per_node=4,
        nic_bandwidth=10e9,
        nic_latency=20e-6,
        nodes_per_leaf=2,
        oversubscription=4.0,
        pcie_bandwidth=20e9,
        pcie_shared_with_nic=True,
        host_memory=500e9,
    )
    assert found.nic_share == 5e9
    assert found.leaf_uplink == 2 * 4 * 10e9 / 4


@pytest.mark.parametrize("name", cluster_names())
def test_clusters_that_ship(name):
    assert load_cluster(name).name == name


@pytest.mark.parametrize("name", ["h100", "bytescale"])
def test_shipped_profiles_and_clusters_say_the_same(name):
    profile, cluster = load_profile(name), load_cluster(name)
    known = dataclasses.replace(cluster, device_memory=profile.device_memory, peak_flops=None, memory_bandwidth=None)
    assert known == cluster_of_profile(profile)
    back = profile_on(cluster, profile)
    assert dataclasses.replace(back, assumed=profile.assumed) == profile


def test_a_profile_on_a_cluster_has_the_clusters_links():
    found = profile_on(cluster_from_yaml(TEXT), load_profile("h100"))
    assert found.across_nodes == LinkProfile(20e-6, 5e9)  # two GPUs share a NIC
    assert found.inside_node == LinkProfile(1e-6, 100e9)
    assert (found.d2h_bandwidth, found.d2h_bandwidth_shared) == (20e9, 15e9)
    assert found.host_memory == 500e9
    assert found.device_memory == 80e9  # the cluster does not say
    assert found.layers == load_profile("h100").layers


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("name: mine", "", "field name is missing"),
        ("latency_microseconds: 1}", "}", "field inside_node.latency_microseconds is missing"),
        ("name: mine", "name: mine\nracks: 3", "field racks is unknown"),
        ("per_node: 4", "per_node: 4, ports: 2", "field nics.ports is unknown"),
        ("gigabyte_per_second: 10,", "gigabyte_per_second: -10,", "field nics.gigabyte_per_second is -10"),
        ("gigabyte_per_second: 20", "gigabyte_per_second: .inf", "field pcie.gigabyte_per_second is inf"),
        ("gigabyte_per_second: 20", "gigabyte_per_second: fast", "field pcie.gigabyte_per_second is 'fast'"),
        ("gpus_per_node: 8", "gpus_per_node: 8.5", "field gpus_per_node is 8.5"),
        ("gpus_per_node: 8", "gpus_per_node: yes", "field gpus_per_node is True"),
        ("gpus_per_node: 8", "gpus_per_node: 0", "field gpus_per_node is 0"),
        ("oversubscription: 4", "oversubscription: 0.5", "field leaf.oversubscription is 0.5"),
        ("per_node: 4", "per_node: 3", "8 GPUs and 3 NICs of a node"),
        ("shared_with_nic: true", "shared_with_nic: 1", "field pcie.shared_with_nic is 1"),
        ("leaf: {", "leaf: {{", "not YAML"),
        (TEXT, "- a\n- list", "must hold the fields of a cluster"),
        (TEXT, "", "must hold the fields of a cluster"),
        ("gpus_per_node: 8", "gpus_per_node: 8\ngpus_per_node: 4", "field gpus_per_node comes twice"),
        ("per_node: 4", "per_node: 4, per_node: 8", "field per_node comes twice"),
        ("gigabyte_per_second: 10,", "gigabyte_per_second: 1.0e-9,", "field nics.gigabyte_per_second is 1e-09"),
        ("gigabyte_per_second: 20", "gigabyte_per_second: 1.0e+300", "field pcie.gigabyte_per_second is 1e+300"),
        (
            "latency_microseconds: 1}",
            "latency_microseconds: 1.0e+12}",
            "inside_node.latency_microseconds is 1000000000",
        ),
        ("oversubscription: 4", "oversubscription: 1.0e+300", "field leaf.oversubscription is 1e+300"),
        ("name: mine", "name: mine\ndevice_gigabyte_per_second: 1.0e-300", "device_gigabyte_per_second is 1e-300"),
        ("name: mine", "name: mine\npeak_teraflop_per_second: 1.0e-300", "peak_teraflop_per_second is 1e-300"),
        ("name: mine", 'name: "a\\nb\\u202e"', "must have only characters that can be printed"),
        ("name: mine", "name: " + 61 * "x", "at most 60 characters"),
        ("name: mine", "name: mine\nleaf: [1]", "comes twice"),
        ("leaf: {nodes: 2, oversubscription: 4}", "leaf: [1]", "field leaf is [1]: it must hold fields of its own"),
        ("name: mine", "name: 2020-13-45", "not YAML: month must be in 1..12"),
        ("name: mine", "name: mine\nnodes: " + 5000 * "9", "not YAML: Exceeds the limit"),
    ],
)
def test_files_that_are_wrong(old, new, words):
    assert old in TEXT
    message = refused(TEXT.replace(old, new, 1))
    assert message.startswith("mine.yaml")
    assert words in message


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match=r"neither a shipped one .*h100.* nor a readable file"):
        load_cluster(tmp_path / "none.yaml")
    damaged = tmp_path / "damaged.yaml"
    damaged.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="nor a readable file"):
        load_cluster(damaged)
    with pytest.raises(ConfigError, match=r"nor a readable file: Is a directory$"):
        load_cluster(tmp_path)
    good = tmp_path / "good.yaml"
    good.write_text(TEXT)
    assert load_cluster(good).name == "mine"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"nic_bandwidth": 0.0}, "nic_bandwidth is 0.0"),
        ({"nic_latency": -1.0}, "nic_latency is -1.0"),
        ({"nodes": 0}, "nodes is 0"),
        ({"peak_flops": float("nan")}, "peak_flops is nan"),
        ({"gpus_per_node": True}, "gpus_per_node is True"),
        ({"oversubscription": 0.9}, "oversubscription is 0.9"),
    ],
)
def test_clusters_that_cannot_be(changes, words):
    with pytest.raises(ConfigError, match=words):
        dataclasses.replace(load_cluster("h100"), **changes)


def job_of(tensor_parallel: int, **changes) -> Job:
    profile = load_profile("h100")
    layer = dataclasses.replace(profile.layer("llama-7b"), tensor_parallel=tensor_parallel)
    profile = dataclasses.replace(profile, layers={"llama-7b": layer})
    return Job(cost=CostModel(profile, 4), cluster=dataclasses.replace(cluster_from_yaml(TEXT), **changes))


def link(job: Job, *hops: tuple[int, int]) -> tuple[float, float, int]:
    pairs = np.array(hops).T
    found, _, flows = hops_link(job, pairs[0], pairs[1])
    return found.latency, found.bandwidth, flows


def test_hops_share_nics_only_where_their_gpus_do():
    job = job_of(1, nodes_per_leaf=None)
    assert link(job, (0, 1), (1, 0)) == (1e-6, 100e9, 0)
    assert link(job, (0, 8)) == (20e-6, 10e9, 1)
    assert link(job, (0, 8), (2, 10)) == (20e-6, 10e9, 1)  # NICs of GPUs 0 and 1, 2 and 3
    assert link(job, (0, 8), (1, 10)) == (20e-6, 5e9, 2)
    assert link(job, (0, 8), (2, 9)) == (20e-6, 5e9, 1)  # they share the one that gets
    assert link(job, (0, 8), (1, 2)) == (20e-6, 10e9, 1)  # only one leaves the node
    assert link(job_of(2, nodes_per_leaf=None), (0, 4)) == (20e-6, 5e9, 2)  # both GPUs of a rank have one NIC
    assert link(job_of(1, nics_per_node=16, nodes_per_leaf=None), (0, 8)) == (20e-6, 20e9, 1)  # two NICs for a GPU


def test_hops_share_the_uplinks_of_a_leaf_switch():
    """2 nodes of 4 x 10 GB/s, 4 to 1: 20 GB/s."""
    job = job_of(2)
    assert link(job, (0, 4)) == (20e-6, 5e9, 2)  # inside the leaf
    assert link(job, (4, 8)) == (20e-6, 5e9, 2)
    hops = [(4 + i, 8 + i) for i in range(4)]
    assert link(job, *hops) == (20e-6, 2.5e9, 2)  # 8 GPUs on 20 GB/s


def test_everybody_to_everybody():
    job = job_of(2)  # 4 ranks a node
    alone, leaves = all_to_all_link(job, np.arange(4)[None])
    assert (alone, leaves) == (LinkProfile(1e-6, 100e9), False)
    pair, leaves = all_to_all_link(job, np.array([[0, 4]]))
    assert (pair, leaves) == (LinkProfile(20e-6, 5e9), True)
    whole, _ = all_to_all_link(job, np.arange(16)[None])  # 12 of 15 parts leave the node, 8 the leaf
    times = [3 / 100e9, 2 * 12 / 10e9, 2 * 8 * 8 / 20e9]
    assert whole.bandwidth == pytest.approx(15 / max(times))
    free = job_of(2, inside_bandwidth=sys.float_info.max, nic_bandwidth=sys.float_info.max, nodes_per_leaf=None)
    assert all(
        1e307 < all_to_all_link(free, np.arange(n)[None])[0].bandwidth <= sys.float_info.max for n in (2, 3, 4, 16)
    )
    several, _ = all_to_all_link(job, np.arange(8).reshape(2, 4))  # swaps inside nodes, both at a time
    assert several == LinkProfile(1e-6, 100e9)


def test_tiers_of_the_cost_model_are_those_of_the_links():
    job = job_of(2)
    for start in range(6):
        for size in range(2, 6):
            ranks = np.arange(start, start + size)
            _, leaves, _ = hops_link(job, ranks, np.roll(ranks, -1))
            assert leaves == (int(job.cost.tier(start, size)) == Tier.ACROSS_NODES)
