"""The compiled planner core, or None in a source tree without a compiler: then the twins make the same plans, slower.

Every module that has a twin takes ``_core`` from here under its own name.
"""

try:
    from megatron_hdp import _core
except ImportError:
    _core = None  # type: ignore[assignment]

__all__ = ["_core"]
