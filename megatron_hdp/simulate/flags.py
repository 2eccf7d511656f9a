"""The flags of `megatron-hdp simulate`, and what they mean to the simulator. Imports the simulator only when asked."""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from megatron_hdp.errors import ConfigError
from megatron_hdp.plan_flags import Size, check_output, parse_sizes
from megatron_hdp.simulate.model import ModelFlags, unset

SWEEPS = ("tokens-per-rank", "ranks", "context", "bandwidth", "offload")
"""What --sweep knows."""
_Out = Annotated[Path | None, unset("OUT", "not written")]
_Layout = Annotated[int | None, unset("INT", "what is assumed for the model in the ByteScale paper")]
_MOST_GPUS = 1 << 20
_MOST_STEPS = 1000
_MOST_GIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class SimulateFlags:
    """Flags of `megatron-hdp simulate`."""

    lengths: Annotated[str, tyro.conf.arg(metavar="FILE|NAME")]
    """A file or a mix, as for `megatron-hdp lengths`. Steps of a file hold the sequences that a run with the same
    context, batch tokens and seed trains on, all documents in the train split."""
    gpus: int
    """GPUs of the run."""
    context: Size
    """Longest sequence (--seq-length); longer documents are cut."""
    model: Annotated[ModelFlags, tyro.conf.arg(name="")]
    tokens_per_rank: Size = "8K"
    """Capacity, tokens that one rank holds in one micro-batch (--hdp-tokens-per-rank)."""
    batch_tokens: Size = "32M"
    """Tokens of a step (--hdp-batch-tokens)."""
    tp: _Layout = None
    """Tensor-parallel size."""
    stages: _Layout = None
    """Pipeline stages."""
    virtual_stages: _Layout = None
    """Model parts of a stage, for interleaved schedules."""
    expert_group: _Layout = None
    """Consecutive ranks that share experts and need equal numbers of micro-batches."""
    profile: Annotated[str, tyro.conf.arg(metavar="NAME|FILE", aliases=["--hardware"])] = "bytescale"
    """What things cost: bytescale, h100, or a profile's JSON file. What a layer of the model costs is derived from it
    where it has none of that name."""
    cluster: Annotated[
        str | None, unset("NAME|FILE", "the one that is called like the profile, else what the profile says of them")
    ] = None
    """Machines and links: a cluster that ships with the package (bytescale, h100, h100-4-nics), or its YAML file."""
    recompute: Literal["none", "full"] = "none"
    """Full: every stage runs forward again ahead of backward."""
    offload: bool = False
    """Let activations of long sequences leave for host memory where the copy is free."""
    host_gib: Annotated[float | None, unset("FLOAT", "the profile's share of its node, or no limit")] = None
    """Host memory for that, of one GPU, all micro-batches in flight."""
    device_gib: Annotated[
        float | None, unset("FLOAT", "the cluster's or the profile's, or else 74.5, which are 80 GB")
    ] = None
    """Memory of a GPU, which bounds the capacity that is looked for."""
    strategies: Annotated[str | None, unset("NAME,NAME,...", "all")] = None
    """Ways to train that are compared, besides hdp."""
    sweep: Annotated[str | None, unset("NAME,NAME,...", "none")] = None
    """Also simulate one step at other values of: tokens-per-rank, ranks, context, bandwidth (across nodes), offload
    (host memory)."""
    search: bool = True
    """Look for the capacity and the offload setting with the shortest step that fit a GPU's memory."""
    steps: int = 3
    """Steps to simulate, from the first of the run."""
    seed: int = 1234
    """Seed of the data order (--seed), or of the draw from a mix."""
    field: Annotated[str | None, unset("NAME", "length, then tokens, then the only column")] = None
    """Field or column of the file, as for `megatron-hdp lengths`."""
    megatron_checkout: Annotated[Path | None, unset("FOLDER", "the installed scheduler")] = None
    """For the strategy megatron: a tree of Megatron-LM's dev branch, whose scheduler then plans."""
    json: _Out = None
    """Write everything here, with timelines of the first step, for `megatron-hdp report`."""
    trace: _Out = None
    """Write the timelines of hdp and static here, for chrome://tracing or ui.perfetto.dev."""

    def sizes(self) -> tuple[int, int, int]:
        """Tokens per rank, context, tokens of a batch. Raises `ConfigError`."""
        return parse_sizes(self.tokens_per_rank, self.context, self.batch_tokens)

    def check(self) -> None:
        """Refuse before anything is read what would be refused after, or not in the words of this command."""
        from megatron_hdp.length_source import check_seed

        for name, most in (("gpus", _MOST_GPUS), ("steps", _MOST_STEPS)):
            value = getattr(self, name)
            if not 1 <= value <= most:
                raise ConfigError(f"--{name} is {value:,}: it must be from 1 to {most:,}")
        check_seed(self.seed)
        self.names()
        self.sweeps()
        if self.megatron_checkout is not None and "megatron" not in self.names():
            raise ConfigError("--megatron-checkout does nothing here: --strategies does not have megatron")
        if self.device_gib is not None and not 0 < self.device_gib < _MOST_GIB:
            raise ConfigError(f"--device-gib is {self.device_gib:g}: it must be positive, in GiB")
        for flag, out in (("--json", self.json), ("--trace", self.trace)):
            check_output(flag, out)
        if self.json is not None and self.trace is not None and self.json.resolve() == self.trace.resolve():
            raise ConfigError(f"--json and --trace are both {self.json}: one would overwrite the other")
        self._check_overwritten()

    def _check_overwritten(self) -> None:
        """Refuse outputs that are inputs."""
        read = {"--lengths": self.lengths, "--profile": self.profile, "--cluster": self.cluster}
        for flag, out in (("--json", self.json), ("--trace", self.trace)):
            for name, given in read.items():
                if out is not None and given is not None and out.resolve() == _place(given):
                    raise ConfigError(f"{flag} is the file of {name}, which it would overwrite: give another name")

    def names(self) -> tuple[str, ...]:
        """Strategies to run, each once, in the order in which people read them; hdp is first. Raises `ConfigError`."""
        from megatron_hdp.simulator.strategies import STRATEGIES

        asked = tuple(STRATEGIES) if self.strategies is None else _listed("--strategies", self.strategies, STRATEGIES)
        return tuple(name for name in STRATEGIES if name == "hdp" or name in asked)

    def sweeps(self) -> tuple[str, ...]:
        """What to sweep, each once. Raises `ConfigError`."""
        return () if self.sweep is None else _listed("--sweep", self.sweep, SWEEPS)


def _place(name: str) -> Path | None:
    """Where a file of that name is; None if it can be none."""
    try:
        return Path(name).resolve()
    except (OSError, ValueError):
        return None


def _listed(flag: str, text: str, known: Collection[str]) -> tuple[str, ...]:
    """The names of "a,b,c". Raises `ConfigError` for one that is not known, and for none."""
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    for name in names or ("",):
        if name not in known:
            raise ConfigError(f"{flag} has {name!r}: choose of {', '.join(known)}, with commas between")
    return tuple(dict.fromkeys(names))
