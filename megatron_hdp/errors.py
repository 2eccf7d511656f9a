"""Errors for the person who made the mistake: what was asked, the numbers, what to change."""


class HdpError(Exception):
    """Base of every error that this package raises on purpose."""


class ConfigError(HdpError, ValueError):
    """A flag, a YAML key or a combination of them cannot work."""


class DataError(HdpError, ValueError):
    """A data file is missing, damaged, empty, or holds what the run cannot train on."""


class EmptySplitError(DataError):
    """A split of the data has no documents."""


class PlanError(HdpError, ValueError):
    """A batch cannot be planned, or a plan breaks an invariant."""


class SeamError(HdpError, RuntimeError):
    """A place where Megatron is touched is missing, changed, or was not reached."""


class RankLostError(HdpError, RuntimeError):
    """Another rank of the run stopped."""
