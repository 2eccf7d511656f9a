"""GPU-only packages are hidden, so that Megatron takes the same plain torch paths whether or not they are installed."""

import sys
import warnings
from typing import Any, cast

_GPU_ONLY = ("transformer_engine", "transformer_engine_torch", "apex", "amp_C", "flash_attn", "flash_attn_3", "deep_ep")


def hide() -> None:
    """Make `import transformer_engine` and the like raise ModuleNotFoundError from now on.

    A package that is already imported stays visible to whoever holds it; new imports fail.
    """
    modules = cast(dict[str, Any], sys.modules)
    for name in _GPU_ONLY:
        modules[name] = None  # documented: an entry of None makes the import fail
    # Megatron warns of their absence in a dozen places; here it is no news
    warnings.filterwarnings("ignore", message=r".*(Transformer Engine|Apex).*not installed")
    warnings.filterwarnings("ignore", message=r"Only transformer-engine>=.* supports MoE experts")
