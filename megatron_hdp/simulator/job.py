"""What a simulated step depends on besides its plan."""

import dataclasses
from dataclasses import dataclass, field

from megatron_hdp.cost import CostModel
from megatron_hdp.errors import ConfigError
from megatron_hdp.memory import ModelShape
from megatron_hdp.simulator.cluster import Cluster
from megatron_hdp.types import Plan


@dataclass(frozen=True, kw_only=True)
class Sync:
    """How gradients and parameters travel between pool ranks (Megatron's distributed optimizer)."""

    overlap_grad_reduce: bool = True
    """Gradients of a layer leave while the last micro-batch's backward of the layers before is computed."""
    overlap_param_gather: bool = True
    """Parameters come back while the first micro-batch's forward of the layers before is computed."""
    gradient_bytes: int = 4
    parameter_bytes: int = 2
    optimizer_bytes_per_parameter: int = 28
    """Read and written by the update of a parameter: gradient, fp32 weight and two moments in, these three out, bf16
    weight out."""


@dataclass(frozen=True, kw_only=True)
class Control:
    """Planning and loading."""

    plan_seconds: float = 0.0
    """Time that making and checking the plan takes; measure it."""
    ahead: bool = True
    """Plans and tokens of the next step are made and read while this one runs."""
    broadcast: bool = False
    """One process plans and sends the plan; else each process makes its own, which takes no traffic."""
    load_seconds_per_token: float = 0.0
    """Reading and preparing a token on the rank that trains on it."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A model on a cluster.

    Raises:
        ConfigError: sizes that cannot be.
    """

    cost: CostModel
    """Of one pipeline stage; its profile has the compute and memory coefficients, `cluster` the links."""
    cluster: Cluster
    model: ModelShape | None = None
    """For FLOPs, parameters and messages between stages; without it they are not counted."""
    experts: int = 1
    """Experts of a layer, all with the model's ffn; 1 for a dense model."""
    experts_per_token: int = 1
    stages: int = 1
    virtual_stages: int = 1
    expert_group: int = 1
    one_slice: bool = False
    """All keys and values of a pack travel in one slice per ring step, as systems with static meshes do."""
    sync: Sync = field(default_factory=Sync)
    control: Control = field(default_factory=Control)

    def __post_init__(self) -> None:
        for name in ("experts", "experts_per_token", "stages", "virtual_stages", "expert_group"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}: it must be at least 1")
        if self.virtual_stages > 1 and self.stages == 1:
            raise ConfigError(f"virtual_stages is {self.virtual_stages} with one stage: interleaving needs two or more")
        if self.cost.layers_per_stage % self.virtual_stages:
            raise ConfigError(
                f"{self.cost.layers_per_stage} layers of a stage do not divide into {self.virtual_stages} model parts"
            )
        if self.model is not None and -(-self.model.layers // self.stages) != self.cost.layers_per_stage:
            raise ConfigError(
                f"the cost model has {self.cost.layers_per_stage} layers per stage, the model {self.model.layers} "
                f"layers on {self.stages} stages"
            )
        if self.experts_per_token > self.experts:
            raise ConfigError(f"experts_per_token is {self.experts_per_token} of {self.experts} experts")
        if self.experts > 1 and self.experts % self.expert_group:
            raise ConfigError(f"{self.experts} experts do not divide over expert groups of {self.expert_group} ranks")
        self.cluster.ranks_per_node(self.tensor_parallel)

    @property
    def tensor_parallel(self) -> int:
        """GPUs that share a layer."""
        return self.cost.layer_profile.tensor_parallel

    def gpus(self, num_ranks: int) -> int:
        """Of a pool of so many ranks."""
        return num_ranks * self.stages * self.tensor_parallel

    def require(self, plan: Plan) -> None:
        """Raise ConfigError if the plan cannot run: too many GPUs, or a pool that experts do not divide."""
        self.cluster.require(self.gpus(plan.num_ranks))
        if plan.num_ranks % self.expert_group:
            raise ConfigError(
                f"a pool of {plan.num_ranks} ranks does not divide into expert groups of {self.expert_group}"
            )

    def stage_cost(self, plan: Plan) -> CostModel:
        """The cost model of a stage, with the plan's padding."""
        cost = self.cost
        if cost.pad_multiple != plan.pad_multiple:
            cost = dataclasses.replace(cost, pad_multiple=plan.pad_multiple)
        return cost.with_stages(self.stages)
