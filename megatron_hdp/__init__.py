"""Hybrid Data Parallelism for Megatron-LM. Importing this package has no effect; see `install`."""

from megatron_hdp.config import HdpConfig
from megatron_hdp.errors import ConfigError, DataError, HdpError, PlanError, RankLostError, SeamError
from megatron_hdp.planner import plan
from megatron_hdp.types import MicroBatch, Piece, Plan, Ring

__version__ = "0.1.0"


def install(allow_drift: bool = False) -> None:
    """Wrap Megatron's functions so that `--hdp` works. Call it before anything is imported from `megatron`.

    The launcher (`python -m megatron_hdp SCRIPT`) does this itself. Nothing changes for a run without `--hdp`, and a
    second call does nothing. Imports Megatron and torch.

    Args:
        allow_drift: accept a Megatron in which the body of a wrapped function changed but not its signature.

    Raises:
        SeamError: Megatron is absent, of an unknown version, or changed, or a module already holds one of the functions
            by name. Nothing is wrapped then.
    """
    from megatron_hdp.seams.install import install_for_run

    install_for_run(allow_drift)


__all__ = [
    "ConfigError",
    "DataError",
    "HdpConfig",
    "HdpError",
    "MicroBatch",
    "Piece",
    "Plan",
    "PlanError",
    "RankLostError",
    "Ring",
    "SeamError",
    "__version__",
    "install",
    "plan",
]
