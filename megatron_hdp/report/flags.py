"""The flags of `megatron-hdp report`. Imports nothing heavy."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from megatron_hdp.errors import ConfigError
from megatron_hdp.plan_flags import LAYERS

if TYPE_CHECKING:
    from megatron_hdp.cost import CostModel


def _unset(metavar: str, default: str) -> Any:
    """For flags that are None when nobody gives them: what that means, which "None" does not say."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint=f"(default: {default})")


@dataclass(frozen=True, kw_only=True)
class PlanSetting:
    """What a plan's file does not say. Only plans need it; give what the plan was made with."""

    profile: Annotated[str, tyro.conf.arg(metavar="NAME|FILE")] = "bytescale"
    """What things cost: bytescale, h100, or a profile's JSON file."""
    layer: Annotated[str | None, _unset("NAME", "the profile's own default")] = None
    """Layer of the profile, by name."""
    layers_per_stage: Annotated[int | None, _unset("INT", "32 over the stages")] = None
    """Layers of one pipeline stage."""
    stages: int = 1
    """Pipeline stages."""
    virtual_stages: int = 1
    """Model parts of a stage."""
    expert_group: int = 1
    """Consecutive ranks that share experts."""
    recompute: Literal["none", "full"] = "none"
    """Full: every stage runs forward again ahead of backward."""

    @property
    def cost(self) -> "CostModel":
        """Of a stage. Raises ConfigError for what cannot be."""
        from megatron_hdp.cost import CostModel, load_profile

        if self.stages < 1:
            raise ConfigError(f"--stages is {self.stages}: a model has at least 1 pipeline stage")
        layers = max(1, LAYERS // self.stages) if self.layers_per_stage is None else self.layers_per_stage
        return CostModel(
            load_profile(self.profile), layers, layer=self.layer, recompute=self.recompute, stages=self.stages
        )


@dataclass(frozen=True, kw_only=True)
class ReportFlags:
    """Flags of `megatron-hdp report`."""

    inputs: Annotated[
        tuple[Path, ...],
        tyro.conf.Positional,
        tyro.conf.arg(metavar="FILE|FOLDER ...", help_behavior_hint="(required)"),
    ] = ()
    """Plans (plan --json), simulations (simulate --json), logs of training runs (--hdp-log), folders of --hdp-timeline;
    any number and mix of them."""
    out: Annotated[Path, tyro.conf.arg(metavar="OUT")] = Path("report.html")
    """The page."""
    title: Annotated[str | None, _unset("TEXT", "that of the input")] = None
    """Its title."""
    png: Annotated[Path | None, _unset("FOLDER", "none")] = None
    """Also write every chart as a PNG file; needs Chromium or Chrome."""
    trace: Annotated[Path | None, _unset("OUT", "not written")] = None
    """Also write the timelines of the first simulation or plan as a trace, for ui.perfetto.dev or chrome://tracing."""
    setting: Annotated[PlanSetting, tyro.conf.arg(name="")] = field(default_factory=PlanSetting)
