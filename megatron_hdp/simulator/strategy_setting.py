"""A training run that strategies are compared in: model, machines, and how the model is spread over them."""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from megatron_hdp.cost import CostModel, Profile
from megatron_hdp.errors import ConfigError
from megatron_hdp.plan_step import Planner, PlanOptions
from megatron_hdp.planner.columns import Layout
from megatron_hdp.simulator.cluster import Cluster
from megatron_hdp.simulator.cluster_files import cluster_of_profile, profile_on
from megatron_hdp.simulator.job import Control, Job, Sync
from megatron_hdp.simulator.models import Model, model_of, model_profile
from megatron_hdp.simulator.sync import with_frame
from megatron_hdp.types import IntArray

MegatronPlanner = Callable[[PlanOptions, Path | None], Planner]
"""Makes the planner of "megatron" from options and a checkout: only seams know Megatron, so who calls brings it."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A training run: everything but its data and how it is planned.

    Raises:
        ConfigError: (construction, or where a property is first used) sizes that do not divide.
    """

    model: str | Model
    gpus: int = None  # type: ignore[assignment]
    """None here and below: as the model is assumed to be spread, see `megatron_hdp.simulator.models`."""
    tensor_parallel: int = None  # type: ignore[assignment]
    stages: int = None  # type: ignore[assignment]
    virtual_stages: int = None  # type: ignore[assignment]
    expert_group: int = None  # type: ignore[assignment]
    tokens_per_rank: int = 8192
    context: int
    hardware: str | Profile = "bytescale"
    """What a layer costs: name, path or profile, see `megatron_hdp.simulator.models.model_profile`."""
    cluster: Cluster | None = None
    """None: the one that the profile describes."""
    recompute: Literal["none", "full"] = "none"
    offload: bool = False
    host_bytes: int | None = None
    sync: Sync = dataclasses.field(default_factory=Sync)
    control: Control = dataclasses.field(default_factory=Control)

    def __post_init__(self) -> None:
        model = model_of(self.model)
        for name in ("gpus", "tensor_parallel", "stages", "virtual_stages", "expert_group"):
            if getattr(self, name) is None:
                object.__setattr__(self, name, getattr(model, name))
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}: it must be at least 1")
        layers, parts = model.shape.layers, self.stages * self.virtual_stages
        if layers % parts:
            raise ConfigError(
                f"{layers} layers of {model.name} do not divide into {self.stages} stages of {self.virtual_stages} "
                "parts: use other sizes"
            )
        column = self.tensor_parallel * self.stages
        if self.gpus % column:
            raise ConfigError(
                f"{self.gpus} GPUs do not divide into ranks of {self.tensor_parallel} x {self.stages} GPUs "
                f"(tensor-parallel x stages): use a multiple of {column}"
            )

    @property
    def spec(self) -> Model:
        """The model."""
        return model_of(self.model)

    @property
    def ranks(self) -> int:
        """Of the pool."""
        return self.gpus // (self.tensor_parallel * self.stages)

    @property
    def layout(self) -> Layout:
        """What the model is cut into."""
        return Layout(self.stages, self.virtual_stages, self.expert_group)

    @cached_property
    def machines(self) -> Cluster:
        """The cluster, given or that of the profile."""
        return cluster_of_profile(self._profile) if self.cluster is None else self.cluster

    @cached_property
    def _profile(self) -> Profile:
        return model_profile(self.model, self.hardware, self.tensor_parallel)

    @cached_property
    def cost(self) -> CostModel:
        """Of a pipeline stage; links and copies are the cluster's, and so is what a step has around micro-batches."""
        return with_frame(self._cost_alone, self._job(self._cost_alone), self.ranks)

    @cached_property
    def _cost_alone(self) -> CostModel:
        shape = self.spec.shape
        profile = self._profile if self.cluster is None else profile_on(self.cluster, self._profile)
        return CostModel(
            profile,
            shape.layers // self.stages,
            recompute=self.recompute,
            pad_multiple=math.lcm(2, self.tensor_parallel),
            heads=shape.heads // self.tensor_parallel,
            kv_heads=max(1, shape.kv_heads // self.tensor_parallel),
            stages=self.stages,
        )

    def job(self, *, one_slice: bool = False) -> Job:
        """What `simulate_step` takes."""
        return self._job(self.cost, one_slice)

    def _job(self, cost: CostModel, one_slice: bool = False) -> Job:
        return Job(
            cost=cost,
            cluster=self.machines,
            model=self.spec.shape,
            experts=self.spec.experts,
            experts_per_token=self.spec.experts_per_token,
            stages=self.stages,
            virtual_stages=self.virtual_stages,
            expert_group=self.expert_group,
            one_slice=one_slice,
            sync=self.sync,
            control=self.control,
        )


@dataclass(frozen=True)
class Asked:
    """What a strategy plans."""

    lengths: IntArray
    setting: Setting
    longest: int
    """Tokens of the longest sequence that may come in the run: static meshes must hold it."""
    megatron: MegatronPlanner | None = None
