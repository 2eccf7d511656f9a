"""The flags of `megatron-hdp plan`, and what they mean to the planner. Imports the planner only when it is asked."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from megatron_hdp.errors import ConfigError

if TYPE_CHECKING:
    from megatron_hdp.cost import CostModel
    from megatron_hdp.plan_step import PlanOptions

Size = Annotated[str, tyro.conf.arg(metavar="SIZE")]
"""Tokens: 8192, 8K or 2M."""
_Out = Annotated[Path | None, tyro.conf.arg(metavar="OUT")]

LAYERS = 32
"""Layers over all stages, where no flag says how many a stage has: LLaMA-7B's."""
_MOST_RANKS = 1 << 20
_MOST_TOKENS = (1 << 31) - 1
"""Megatron counts tokens in int32."""

_WORDS = (
    ("--hdp-", "--"),
    ("--seq-length", "--context"),
    ("--global-batch-size or ", ""),
    ("--expert-model-parallel-size", "--expert-group"),
)
_NAMES = re.compile(
    r"(?<![\w-])(stages|virtual_stages|layers_per_stage|pad_multiple|window|recompute|profile)(?= (?:is|\d|'))"
)


@dataclass(frozen=True, kw_only=True)
class PlanFlags:
    """Flags of `megatron-hdp plan`."""

    lengths: Annotated[str, tyro.conf.arg(metavar="FILE|NAME")]
    """A file or a mix, as for `megatron-hdp lengths`. Steps of a file hold the sequences that a run with the same
    context, batch tokens and seed trains on, all documents in the train split."""
    ranks: int
    """Ranks of the pool (data-parallel x context-parallel size)."""
    tokens_per_rank: Size
    """Capacity, tokens that one rank holds in one micro-batch (--hdp-tokens-per-rank)."""
    context: Size
    """Longest sequence (--seq-length); longer documents are cut."""
    batch_tokens: Size
    """Tokens of a step (--hdp-batch-tokens)."""
    stages: int = 1
    """Pipeline stages."""
    virtual_stages: int = 1
    """Model parts of a stage, for interleaved schedules."""
    layers_per_stage: int | None = None
    """Layers of one pipeline stage. Default: 32 over the stages."""
    expert_group: int = 1
    """Consecutive ranks that share experts and need equal numbers of micro-batches."""
    profile: Annotated[str, tyro.conf.arg(metavar="NAME|FILE")] = "bytescale"
    """What things cost: bytescale, h100, or a profile's JSON file."""
    layer: str | None = None
    """Layer of the profile, by name. Default: the profile's own default."""
    recompute: Literal["none", "full"] = "none"
    """Full: every stage runs forward again ahead of backward."""
    window: int | None = None
    """Sliding window: tokens that a query sees. Default: full causal attention."""
    offload: bool = False
    """Let activations of long sequences leave for host memory where the copy is free."""
    algorithm: str = "hdp"
    """hdp, or one to compare with: naive and bytescale (ByteScale's algorithms 1 and 2), static-smallest (context
    parallelism over the fewest ranks that hold the context), static (over the whole pool), pow2 (rings of powers of
    two), megatron (its own scheduler)."""
    balance: str | None = None
    """dp: counts of micro-batches may differ between ranks; pp: a ring has the same slot on all its ranks. Default: pp
    with pipeline stages or expert groups, else dp."""
    megatron_checkout: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """For megatron: a tree of Megatron-LM's dev branch, whose scheduler then plans. Default: the installed one."""
    pad_multiple: int = 2
    """Pieces are multiples of this: 2, or lcm(2, TP) with sequence parallelism."""
    compare: bool = False
    """Plan by every algorithm and print one table."""
    steps: int = 1
    """Steps to plan; with more than one, the distribution is shown."""
    seed: int = 1234
    """Seed of the data order (--seed), or of the draw from a mix."""
    field: str | None = None
    """Field or column of the file, as for `megatron-hdp lengths`."""
    json: _Out = None
    """Write the plan here as canonical JSON; with more than one step, a list of plans. See docs/plan-schema.md."""
    json_pieces: _Out = None
    """The same, written out rank by rank and piece by piece."""

    def sizes(self) -> tuple[int, int, int]:
        """Tokens per rank, context, tokens of a batch. Raises `ConfigError`."""
        from megatron_hdp.lengths import parse_size
        from megatron_hdp.planner.entry import MAX_BATCH_TOKENS

        capacity = parse_size(self.tokens_per_rank, "--tokens-per-rank", _MOST_TOKENS)
        context = parse_size(self.context, "--context", _MOST_TOKENS)
        budget = parse_size(self.batch_tokens, "--batch-tokens")
        if budget > MAX_BATCH_TOKENS:
            limit = f"{MAX_BATCH_TOKENS:,}"
            raise ConfigError(f"--batch-tokens is {budget:,}: Megatron counts them in int32, at most {limit}")
        return capacity, context, budget

    def check(self) -> None:
        """Refuse before lengths are read what would be refused after, or not in the words of this command."""
        from megatron_hdp.length_source import check_seed
        from megatron_hdp.plan_step import ALGORITHMS, MEGATRON

        if self.algorithm not in ALGORITHMS:
            raise ConfigError(f"--algorithm is {self.algorithm!r}: choose one of {', '.join(ALGORITHMS)}")
        if self.megatron_checkout is not None and self.algorithm != MEGATRON and not self.compare:
            raise ConfigError(
                f"--megatron-checkout does nothing with --algorithm {self.algorithm}: use --algorithm {MEGATRON} or "
                "--compare"
            )
        if self.steps < 1:
            raise ConfigError(f"--steps is {self.steps}: plan at least 1")
        if self.ranks > _MOST_RANKS:
            raise ConfigError(f"--ranks is {self.ranks:,}: plan for at most {_MOST_RANKS:,}")
        if self.window is not None and self.window < 1:
            raise ConfigError(
                f"--window is {self.window}: a query sees at least itself; leave --window out for full attention"
            )
        check_seed(self.seed)
        self._check_layers()
        self._check_outputs()

    @property
    def stage_layers(self) -> int:
        """Layers of one stage, given or assumed."""
        return max(1, LAYERS // self.stages) if self.layers_per_stage is None else self.layers_per_stage

    def _check_layers(self) -> None:
        """Refuse stages that cannot be, and virtual stages that the layers of a stage cannot be cut into."""
        if self.stages < 1:
            raise ConfigError(f"--stages is {self.stages}: a model has at least 1 pipeline stage")
        layers, parts = self.stage_layers, self.virtual_stages
        if layers < 1 or parts <= 1 or self.stages == 1:
            return  # refused elsewhere, or nothing is cut
        given = self.layers_per_stage is not None
        if parts > layers or (given and layers % parts):
            raise ConfigError(
                f"--virtual-stages is {parts}, and a stage has {layers} layers ({self.layers_source}): "
                + ("a model part has at least one" if parts > layers else "they must divide into equal parts")
                + "; change --virtual-stages or --layers-per-stage"
            )

    @property
    def layers_source(self) -> str:
        """Where the number of layers of a stage comes from."""
        if self.layers_per_stage is not None:
            return "--layers-per-stage"
        return f"assumed: {LAYERS} over {self.stages} stage{'s' * (self.stages > 1)}"

    def _check_outputs(self) -> None:
        """Refuse files that cannot be written, before minutes are spent on what goes into them."""
        for flag, out in (("--json", self.json), ("--json-pieces", self.json_pieces)):
            if out is None:
                continue
            if self.compare:
                raise ConfigError(f"{flag} with --compare: whose plan? Choose one with --algorithm instead")
            if out.is_dir():
                raise ConfigError(f"{flag} {out}: cannot be written (it is a folder)")
            if not out.parent.is_dir():
                raise ConfigError(f"{flag} {out}: no folder {out.parent}")
        if self.json is not None and self.json_pieces is not None and self.json.resolve() == self.json_pieces.resolve():
            raise ConfigError(f"--json and --json-pieces are both {self.json}: one would overwrite the other")

    def cost(self) -> "CostModel":
        """Cost of a stage. Raises `ConfigError`."""
        from megatron_hdp.cost import CostModel, load_profile

        settings = {"window": self.window, "recompute": self.recompute, "layer": self.layer}
        return CostModel(load_profile(self.profile), self.stage_layers, pad_multiple=self.pad_multiple, **settings)  # type: ignore[arg-type]

    def options(self) -> "PlanOptions":
        """What the planner takes. Raises `ConfigError`."""
        from megatron_hdp.plan_step import PlanOptions
        from megatron_hdp.planner.columns import Layout

        layout = Layout(self.stages, self.virtual_stages, self.expert_group)
        return PlanOptions(
            num_ranks=self.ranks,
            tokens_per_rank=self.sizes()[0],
            cost=self.cost(),
            algorithm=self.algorithm,
            balance=layout.balance(self.balance or "auto"),
            stages=self.stages,
            virtual_stages=self.virtual_stages,
            expert_group=self.expert_group,
            offload=self.offload,
        )


def own_words(message: str) -> str:
    """A message about a run's flags or a function's arguments in the words of this command's flags."""
    for theirs, ours in _WORDS:
        message = message.replace(theirs, ours)
    return _NAMES.sub(lambda name: "--" + name[1].replace("_", "-"), message)
