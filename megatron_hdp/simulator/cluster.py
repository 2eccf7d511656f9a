"""The machines of a simulated run: nodes, GPUs, links, NICs, PCIe, memories."""

import math
from dataclasses import dataclass

from megatron_hdp.errors import ConfigError

_COUNTS = ("gpus_per_node", "nics_per_node")
_POSITIVE = ("inside_bandwidth", "nic_bandwidth", "pcie_bandwidth")
_LATENCIES = ("inside_latency", "nic_latency")
_OPTIONAL = ("host_memory", "device_memory", "peak_flops", "memory_bandwidth")
_MOST_GPUS = 1 << 24


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A cluster of equal nodes. Bandwidths are of one direction.

    GPUs of a node are spread evenly over its NICs, as PCIe switches do it: GPU g sends and receives through NIC
    g nics // gpus, or through as many as it has where there are more NICs than GPUs.

    Raises:
        ConfigError: a field that cannot be.
    """

    name: str
    gpus_per_node: int
    nodes: int | None = None
    """None: as many as a run needs."""
    inside_bandwidth: float
    """byte/s that one GPU sends to another of its node."""
    inside_latency: float
    """s"""
    nics_per_node: int
    nic_bandwidth: float
    """byte/s of one NIC."""
    nic_latency: float
    """s"""
    nodes_per_leaf: int | None = None
    """Nodes below one leaf switch; None: one switch for all."""
    oversubscription: float = 1.0
    """Bandwidth of a leaf switch's nodes over that of its uplinks."""
    pcie_bandwidth: float
    """byte/s that one GPU copies to or from host memory."""
    pcie_shared_with_nic: bool = True
    """Copies and what the GPU's NIC sends pass the same lanes."""
    host_memory: float | None = None
    """byte of a node for activations; None: not known."""
    device_memory: float | None = None
    """byte of a GPU; None: not known."""
    peak_flops: float | None = None
    """FLOP/s of a GPU in the training type; None: no MFU."""
    memory_bandwidth: float | None = None
    """byte/s of a GPU's memory, for the optimizer; None: the optimizer takes no time."""

    def __post_init__(self) -> None:
        for name in (*_COUNTS, "nodes", "nodes_per_leaf"):
            value = getattr(self, name)
            if value is None and name not in _COUNTS:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MOST_GPUS:
                raise ConfigError(
                    f"cluster {self.name}: {name} is {value!r}: it must be a whole number from 1 to {_MOST_GPUS:,}"
                )
        for name in (*_POSITIVE, *_LATENCIES, *_OPTIONAL, "oversubscription"):
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            good = not isinstance(value, bool) and isinstance(value, int | float) and math.isfinite(value)
            if not good or value < 0 or (value == 0 and name not in _LATENCIES):
                kind = "finite and at least 0" if name in _LATENCIES else "finite and greater than 0"
                raise ConfigError(f"cluster {self.name}: {name} is {value!r}: it must be {kind}")
        if self.oversubscription < 1:
            raise ConfigError(
                f"cluster {self.name}: oversubscription is {self.oversubscription}: it is the bandwidth of a leaf "
                "switch's nodes over that of its uplinks, at least 1"
            )
        gpus, nics = self.gpus_per_node, self.nics_per_node
        if gpus % nics and nics % gpus:
            raise ConfigError(
                f"cluster {self.name}: {gpus} GPUs and {nics} NICs of a node: one must divide the other, because GPUs "
                "are spread evenly over NICs"
            )

    @property
    def nic_share(self) -> float:
        """byte/s that each GPU of a node sends through its NIC while all GPUs of the node do."""
        return self.nic_bandwidth * self.nics_per_node / self.gpus_per_node

    @property
    def leaf_uplink(self) -> float | None:
        """byte/s from a leaf switch to all others; None if there is one switch for all."""
        if self.nodes_per_leaf is None:
            return None
        return self.nodes_per_leaf * self.nics_per_node * self.nic_bandwidth / self.oversubscription

    def ranks_per_node(self, tensor_parallel: int) -> int:
        """Pool ranks of one pipeline stage that a node holds; each is a tensor-parallel group.

        Raises:
            ConfigError: such groups do not fill a node evenly.
        """
        if tensor_parallel < 1 or self.gpus_per_node % tensor_parallel:
            raise ConfigError(
                f"tensor_parallel is {tensor_parallel} on nodes of {self.gpus_per_node} GPUs (cluster {self.name}): a "
                "tensor-parallel group lies inside a node, so it must divide the node's GPUs"
            )
        return self.gpus_per_node // tensor_parallel

    def require(self, gpus: int) -> None:
        """Raise ConfigError if the cluster has fewer GPUs than that."""
        if self.nodes is not None and gpus > self.nodes * self.gpus_per_node:
            raise ConfigError(
                f"{gpus:,} GPUs are asked for, cluster {self.name} has {self.nodes:,} nodes of {self.gpus_per_node} "
                f"GPUs, {self.nodes * self.gpus_per_node:,} in all: use fewer GPUs, or raise nodes to "
                f"{-(-gpus // self.gpus_per_node):,}"
            )
