"""What is not published, varied one at a time: how much the speed-ups depend on it."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_hdp.cost import load_profile
from megatron_hdp.errors import HdpError
from megatron_hdp.lengths import format_size
from megatron_hdp.reproduce.case import Case
from megatron_hdp.reproduce.steps import Steps, speedup

_2M = 2 << 20


@dataclass(frozen=True)
class Varied:
    """Speed-ups with one thing changed."""

    setting: str
    """"llama-7b, 2M, byted"."""
    change: str
    static_s: float | None
    """A static step; None if it cannot run."""
    naive: float | None
    balanced: float | None
    failed: str = ""
    """Why it cannot run."""

    def to_json(self) -> dict[str, Any]:
        """All of it."""
        return dataclasses.asdict(self)


def variations() -> list[tuple[Case, dict[str, dict[str, Any]]]]:
    """Cases, and words -> fields of `Case` that are changed; "as assumed" is the first of each."""
    figure_21 = load_profile("bytescale").layer("figure-21").attention_backward_factor
    byted: dict[str, dict[str, Any]] = {
        "as assumed": {},
        "tensor parallel 1": {"tensor_parallel": 1},
        "tensor parallel 4": {"tensor_parallel": 4},
        "4K tokens a rank": {"tokens_per_rank": 4096},
        "16K tokens a rank": {"tokens_per_rank": 16384},
        "full recompute": {"recompute": "full"},
        "gradients of keys and values in bf16": {"gradient_bytes": 2},
        f"backward of attention {figure_21:.1f} times forward (Figure 21)": {"backward_factor": figure_21},
        "a transfer takes 1.4 ms": {"transfer_ms": 1.4},
        "a transfer takes 1.9 ms": {"transfer_ms": 1.9},
        "labels of Figure 4 are in the middle of its bars": {"bars": "middle"},
        "labels of Figure 4 begin its bars": {"bars": "begin"},
        "2 s more for every 8K tokens of a rank": {"extra_s": 2.0},
    }
    github = {name: change for name, change in byted.items() if not change or {"bars", "extra_s"} & set(change)}
    github |= {
        f"the last bars of Figure 4 hold {', '.join(map(str, shares))} %": {"last_bars": shares}
        for shares in ((1.77, 1.77, 1.77), (1.3, 1.6, 2.4), (0.3, 0.5, 4.5))
    }
    piped: dict[str, dict[str, Any]] = {
        "as assumed": {},
        "pipeline 8, 16K tokens a rank": {"stages": 8, "tokens_per_rank": 16384},
        "tensor parallel 4": {"tensor_parallel": 4},
        "16K tokens a rank": {"tokens_per_rank": 16384},
        "full recompute": {"recompute": "full"},
    }
    return [
        (Case(model="llama-7b", data="byted", context=_2M), byted),
        (Case(model="llama-7b", data="github", context=_2M), github),
        (Case(model="llama-70b", data="github", context=_2M), piped | {"pipeline 4": {"stages": 4}}),
        (Case(model="mixtral-8x22b", data="byted", context=_2M), piped | {"pipeline 2": {"stages": 2}}),
    ]


def sensitivity(steps: Steps, count: int) -> tuple[Varied, ...]:
    """All variations, each over the same ``count`` steps, static over the first of them."""
    found = []
    for case, changes in variations():
        name = f"{case.model}, {format_size(case.context)}, {case.data}"
        for words, change in changes.items():
            found.append(_varied(steps, name, words, dataclasses.replace(case, **change), count))
    return tuple(found)


def _varied(steps: Steps, name: str, words: str, case: Case, count: int) -> Varied:
    try:
        static = steps.run(case, "static", range(1))
        naive, balanced = (speedup(static, steps.run(case, key, range(count))) for key in ("naive", "balanced"))
    except HdpError as error:
        return Varied(name, words, None, None, None, str(error))
    seconds = float(np.mean([step.seconds for step in static]))
    return Varied(name, words, seconds, naive.value, balanced.value)
