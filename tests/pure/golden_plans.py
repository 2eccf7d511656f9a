"""Plans of one fixed batch and their digests; also a script: `python golden_plans.py [no-core]` prints them as JSON."""

import json
import sys

RANKS, CAPACITY = 32, 8192
SETTINGS = {
    "hdp": {},
    "static": {"algorithm": "static"},
    "pipeline": {"balance": "pp", "stages": 4},
    "interleaved": {"balance": "pp", "stages": 4, "virtual_stages": 2},
    "experts": {"balance": "pp", "expert_group": 8, "pad_multiple": 4},
}


def batch():
    """1,500 lengths of 1 to 262,144 tokens by integer arithmetic, so that no library or platform can change them."""
    state, lengths = 2026, []
    for _ in range(1500):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        bits = 5 + (state >> 33) % 10 + 4 * ((state >> 43) % 32 == 0)
        lengths.append(1 + (state >> 13) % (1 << bits))
    return lengths


def digests():
    from megatron_hdp.planner import plan

    return {name: plan(batch(), RANKS, CAPACITY, **options).digest().hex() for name, options in SETTINGS.items()}


if __name__ == "__main__":
    if "no-core" in sys.argv[1:]:
        sys.modules["megatron_hdp._core"] = None  # every `from megatron_hdp import _core` fails, as without a compiler
    from megatron_hdp.planner import core_backend

    print(json.dumps({"core": core_backend(), **digests()}))
