"""Hybrid Data Parallelism for Megatron-LM. Importing this package has no effect; see `install`."""

from megatron_hdp.errors import ConfigError, DataError, HdpError, PlanError, RankLostError, SeamError
from megatron_hdp.types import MicroBatch, Piece, Plan, Ring

__version__ = "0.1.0"

__all__ = [
    "ConfigError",
    "DataError",
    "HdpError",
    "MicroBatch",
    "Piece",
    "Plan",
    "PlanError",
    "RankLostError",
    "Ring",
    "SeamError",
    "__version__",
]
