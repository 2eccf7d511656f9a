"""What a run with --hdp-timeline was: enough to simulate its steps again. No torch."""

import dataclasses
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from megatron_hdp.cost import CostModel, Profile
from megatron_hdp.errors import DataError, HdpError
from megatron_hdp.memory import ModelShape
from megatron_hdp.simulator import Job, Sync, cluster_of_profile

TIMELINE_SCHEMA = 1
RUN_FILE = "run.json"


@dataclass(frozen=True, kw_only=True)
class RunSetting:
    """What a run was: enough to simulate its steps again."""

    pool: int
    """Ranks, each a column."""
    stages: int
    virtual_stages: int
    expert_group: int
    tensor_parallel: int
    capacity: int
    """--hdp-tokens-per-rank"""
    context: int
    algorithm: str
    device: Literal["cpu", "cuda"]
    """Whose clock the compute is measured with: CPU time of the thread that computes, or CUDA events."""
    hardware: str
    profile: Profile
    """That of --hdp-profile, whole, with which the run planned."""
    layer: str | None
    layers_per_stage: int
    window: int | None
    recompute: Literal["none", "full"]
    pad_multiple: int
    heads: int | None
    kv_heads: int | None
    model: ModelShape | None
    """None where the model is of a kind that is not counted."""
    experts: int = 1
    experts_per_token: int = 1
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False

    @cached_property
    def cost(self) -> CostModel:
        """What the run's planner took pieces to cost, of one pipeline stage."""
        names = ("layers_per_stage", "window", "recompute", "layer", "pad_multiple", "heads", "kv_heads", "stages")
        return CostModel(self.profile, **{name: getattr(self, name) for name in names})

    @property
    def lanes(self) -> int:
        """Pipeline stages of all ranks; lane = rank x stages + stage."""
        return self.pool * self.stages

    def job(self, profile: Profile | None = None) -> Job:
        """The run, for the simulator; with another ``profile`` of the same model and machine if given."""
        profile = self.profile if profile is None else profile
        layer = self.layer if self.layer in profile.layers else None
        return Job(
            cost=dataclasses.replace(self.cost, profile=profile, layer=layer),
            cluster=cluster_of_profile(profile),
            model=self.model,
            experts=self.experts,
            experts_per_token=self.experts_per_token,
            stages=self.stages,
            virtual_stages=self.virtual_stages,
            expert_group=self.expert_group,
            sync=Sync(overlap_grad_reduce=self.overlap_grad_reduce, overlap_param_gather=self.overlap_param_gather),
        )

    def to_json(self) -> str:
        """JSON that `from_json` reads back."""
        data = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        data["profile"] = json.loads(self.profile.to_json())
        data["model"] = None if self.model is None else dataclasses.asdict(self.model)
        return json.dumps({"schema": TIMELINE_SCHEMA} | data, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str, source: str) -> "RunSetting":
        """Inverse of `to_json`; ``source`` is what errors call the text. Raises `DataError`."""
        try:
            data = json.loads(text)
            if data.pop("schema") != TIMELINE_SCHEMA:
                raise DataError(f"{source}: not a run of schema {TIMELINE_SCHEMA}")
            data["profile"] = Profile.from_json(json.dumps(data["profile"]), f"{source}, profile")
            data["model"] = None if data["model"] is None else ModelShape(**data["model"])
            return cls(**data)
        except HdpError as error:
            raise DataError(str(error)) from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{source}: not what --hdp-timeline writes: {error!r}") from error


def read_setting(folder: Path) -> RunSetting:
    """What the run in a folder was. Raises `DataError`."""
    file = folder / RUN_FILE
    try:
        return RunSetting.from_json(file.read_text(encoding="utf-8"), str(file))
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{folder} holds no timeline of a run (--hdp-timeline): {RUN_FILE}: {error}") from error
