"""What a plan would do on a cluster: one step, simulated. numpy only; no torch, no Megatron."""

from megatron_hdp.simulator.chrome import chrome_trace
from megatron_hdp.simulator.cluster import Cluster
from megatron_hdp.simulator.cluster_files import cluster_names, cluster_of_profile, load_cluster, profile_on
from megatron_hdp.simulator.job import Control, Job, Sync
from megatron_hdp.simulator.result import CAUSES, KINDS, ControlCost, StepResult, Timeline
from megatron_hdp.simulator.simulate import simulate_step

__all__ = [
    "CAUSES",
    "KINDS",
    "Cluster",
    "Control",
    "ControlCost",
    "Job",
    "StepResult",
    "Sync",
    "Timeline",
    "chrome_trace",
    "cluster_names",
    "cluster_of_profile",
    "load_cluster",
    "profile_on",
    "simulate_step",
]
