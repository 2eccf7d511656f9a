"""Clusters as strict YAML, from profiles, and put into profiles."""

import dataclasses
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from megatron_hdp.cost import LinkProfile, Profile
from megatron_hdp.errors import ConfigError
from megatron_hdp.simulator.cluster import Cluster

GB = 1e9


_Bandwidth = Annotated[float, Field(ge=1e-3, le=1e6)]
"""GB/s. Links of a megabyte or a petabyte per second are slips of a unit, and times of them are none to count with."""
_Latency = Annotated[float, Field(ge=0, le=1e6)]
"""Microseconds."""
_Gigabytes = Annotated[float, Field(ge=1e-3, le=1e9)]


class _Part(BaseModel):
    """Of a file: no unknown fields, no numbers in quotes, nothing infinite."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class _Inside(_Part):
    gigabyte_per_second: _Bandwidth
    latency_microseconds: _Latency


class _Nics(_Part):
    per_node: int = Field(ge=1)
    gigabyte_per_second: _Bandwidth
    latency_microseconds: _Latency


class _Leaf(_Part):
    nodes: int = Field(ge=1)
    oversubscription: float = Field(default=1.0, ge=1, le=1e3)


class _Pcie(_Part):
    gigabyte_per_second: _Bandwidth
    shared_with_nic: bool


class _File(_Part):
    """The cluster file; docs/simulator.md describes its fields."""

    name: str = Field(min_length=1, max_length=60)
    nodes: int | None = Field(default=None, ge=1)
    gpus_per_node: int = Field(ge=1)
    inside_node: _Inside
    nics: _Nics
    leaf: _Leaf | None = None
    pcie: _Pcie
    host_gigabyte: _Gigabytes | None = None
    device_gigabyte: _Gigabytes | None = None
    device_gigabyte_per_second: _Bandwidth | None = None
    peak_teraflop_per_second: float | None = Field(default=None, ge=1e-3, le=1e9)

    @field_validator("name")
    @classmethod
    def _one_line(cls, name: str) -> str:
        """Names are printed: nothing that moves the cursor or turns the direction of writing."""
        if not name.isprintable():
            raise ValueError("must have only characters that can be printed")
        return name


class _Loader(yaml.SafeLoader):
    """YAML in which no field comes twice; YAML itself forbids that, PyYAML takes the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """As PyYAML's, after a look at the fields as they are written, which merges (<<) may still be overridden by."""
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"field {key.value} comes twice", key.start_mark)
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


def cluster_names() -> tuple[str, ...]:
    """Names of the clusters that ship with the package."""
    folder = resources.files("megatron_hdp") / "clusters"
    return tuple(sorted(f.name.removesuffix(".yaml") for f in folder.iterdir() if f.name.endswith(".yaml")))


def load_cluster(name_or_path: str | Path) -> Cluster:
    """A shipped cluster by its name, or any cluster by the path of its YAML file.

    Raises:
        ConfigError: neither a shipped name nor a readable file; no YAML; a field is missing, unknown or cannot be (file
            and field are named).
    """
    text = str(name_or_path)
    if text in cluster_names():
        shipped = resources.files("megatron_hdp") / "clusters" / f"{text}.yaml"
        return cluster_from_yaml(shipped.read_text(encoding="utf-8"), f"{text}.yaml")
    try:
        found = Path(text).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: no text in UTF-8, or no name of a file
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"cluster {text!r:.200} is neither a shipped one ({', '.join(cluster_names())}) nor a readable file: {why}"
        ) from error
    return cluster_from_yaml(found, text)


def cluster_from_yaml(text: str, source: str = "cluster") -> Cluster:
    """The cluster that a YAML text describes; ``source`` is what errors call it. Raises as `load_cluster`."""
    try:
        data = yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a date or a number that is none
        raise ConfigError(f"{source}: not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{source}: must hold the fields of a cluster: {', '.join(_File.model_fields)}")
    try:
        file = _File.model_validate(data)
    except ValidationError as error:
        raise ConfigError(f"{source}: {'; '.join(map(_words, error.errors(include_url=False)))}") from error
    try:
        return _cluster(file)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error


def _words(error: Any) -> str:
    """One thing that pydantic found wrong, for people."""
    field = ".".join(str(part) for part in error["loc"])
    if error["type"] == "missing":
        return f"field {field} is missing"
    if error["type"] == "extra_forbidden":
        return f"field {field} is unknown"
    if error["type"] == "model_type":
        return f"field {field} is {error['input']!r:.60}: it must hold fields of its own"
    return f"field {field} is {error['input']!r:.60}: {error['msg'].lower().removeprefix('value error, ')}"


def _cluster(file: _File) -> Cluster:
    leaf, host = file.leaf, file.host_gigabyte
    return Cluster(
        name=file.name,
        gpus_per_node=file.gpus_per_node,
        nodes=file.nodes,
        inside_bandwidth=file.inside_node.gigabyte_per_second * GB,
        inside_latency=file.inside_node.latency_microseconds / 1e6,
        nics_per_node=file.nics.per_node,
        nic_bandwidth=file.nics.gigabyte_per_second * GB,
        nic_latency=file.nics.latency_microseconds / 1e6,
        nodes_per_leaf=None if leaf is None else leaf.nodes,
        oversubscription=1.0 if leaf is None else leaf.oversubscription,
        pcie_bandwidth=file.pcie.gigabyte_per_second * GB,
        pcie_shared_with_nic=file.pcie.shared_with_nic,
        host_memory=None if host is None else host * GB,
        device_memory=None if file.device_gigabyte is None else file.device_gigabyte * GB,
        peak_flops=None if file.peak_teraflop_per_second is None else file.peak_teraflop_per_second * 1e12,
        memory_bandwidth=None if file.device_gigabyte_per_second is None else file.device_gigabyte_per_second * GB,
    )


def cluster_of_profile(profile: Profile, *, name: str | None = None) -> Cluster:
    """The cluster that a profile describes: one NIC for each GPU, one switch for all, as many nodes as are needed.

    Of the profile's two copy bandwidths the smaller one is taken. Copies share lanes with the NIC if the profile says
    that they are slower beside it. Peak FLOP/s and memory bandwidth are not in a profile.
    """
    copies = min(profile.d2h_bandwidth, profile.h2d_bandwidth)
    beside = [b for b in (profile.d2h_bandwidth_shared, profile.h2d_bandwidth_shared) if b is not None]
    return Cluster(
        name=profile.name if name is None else name,
        gpus_per_node=profile.gpus_per_node,
        inside_bandwidth=profile.inside_node.bandwidth,
        inside_latency=profile.inside_node.latency,
        nics_per_node=profile.gpus_per_node,
        nic_bandwidth=profile.across_nodes.bandwidth,
        nic_latency=profile.across_nodes.latency,
        pcie_bandwidth=copies,
        pcie_shared_with_nic=bool(beside) and min(beside) < copies,
        host_memory=profile.host_memory,
        device_memory=profile.device_memory,
    )


def profile_on(cluster: Cluster, profile: Profile) -> Profile:
    """The profile with links, copies and (where known) memories of the cluster, for a planner that knows two tiers.

    Across nodes each GPU gets its fair share of the node's NICs. Beside the NIC a copy gets what the NIC leaves of the
    lanes, and at least half of them. Uplinks of leaf switches are in no profile.
    """
    copies, beside = cluster.pcie_bandwidth, None
    if cluster.pcie_shared_with_nic:
        beside = max(copies - cluster.nic_share, copies / 2)
    assumed = {**profile.assumed, "links, copies and memories": f"those of cluster {cluster.name}"}
    return dataclasses.replace(
        profile,
        assumed=assumed,
        gpus_per_node=cluster.gpus_per_node,
        inside_node=LinkProfile(cluster.inside_latency, cluster.inside_bandwidth),
        across_nodes=LinkProfile(cluster.nic_latency, cluster.nic_share),
        d2h_bandwidth=copies,
        h2d_bandwidth=copies,
        d2h_bandwidth_shared=beside,
        h2d_bandwidth_shared=beside,
        device_memory=profile.device_memory if cluster.device_memory is None else cluster.device_memory,
        host_memory=profile.host_memory if cluster.host_memory is None else cluster.host_memory,
    )
