"""What the PyPI wheel lacks without a source tree, a compiler, Transformer Engine or Apex. For GPU and CPU runs.

* The wheel carries the dataset helpers compiled and no Makefile, but the set-up step runs make.
* With torch's own AdamW, `DistributedOptimizer` cannot load a checkpoint: it asks a fresh optimizer for its step, and
  then gives all parameters one and the same step tensor (which torch increments once per parameter), and that of the
  fresh optimizer. With fp32 parameters it loads in place without switching gradients off. Checkpoints of one file
  (--ckpt-format torch) have no step per parameter, but it is asked for.
"""

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.datasets import utils as dataset_utils
from megatron.core.optimizer import distrib_optimizer

_MARK = "__megatron_hdp_wheel__"


def apply() -> None:
    """Put the replacements in place; a second call does nothing."""
    if hasattr(dataset_utils.compile_helpers, _MARK):
        return
    dataset_utils.compile_helpers = _compile_helpers(dataset_utils.compile_helpers)
    setattr(dataset_utils.compile_helpers, _MARK, True)
    optimizer = distrib_optimizer.DistributedOptimizer
    if not getattr(distrib_optimizer, "HAVE_APEX_OR_TE", True):
        optimizer.state_dict = _state_dict(optimizer.state_dict)
        optimizer.load_state_dict = _load_state_dict(optimizer.load_state_dict)
        optimizer._set_main_param_and_optimizer_states = _set_states(optimizer._set_main_param_and_optimizer_states)
    # with fp32 parameters the shards to load into are views of leaves that require gradients
    for name in ("load_parameter_state_from_dp_reshardable", "load_parameter_state_from_dp_zero"):
        setattr(optimizer, name, torch.no_grad()(getattr(optimizer, name)))


def _compile_helpers(original: Callable[[], None]) -> Callable[[], None]:
    @functools.wraps(original)
    def compile_helpers() -> None:
        if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is None:
            original()

    return compile_helpers


class _Inner:
    """The wrapped torch optimizer, answering for its state although it has none yet.

    Only 'step' is read from the state by `DistributedOptimizer.state_dict`; the rest of it is dropped there.
    """

    def __init__(self, optimizer: Any, step: float) -> None:
        self._optimizer = optimizer
        self._step = step

    def state_dict(self) -> dict[str, Any]:
        """The state dict with the one entry that is asked for."""
        state: dict[str, Any] = dict(self._optimizer.state_dict())
        state["state"] = {0: {"step": torch.tensor(self._step)}}
        return state


def _state_dict(original: Callable[..., Any]) -> Callable[..., Any]:
    """An optimizer that has not stepped (a resume asks it), or that owns no parameters, is at its groups' step."""

    @functools.wraps(original)
    def state_dict(self: Any) -> Any:
        inner = self.optimizer
        if any("step" in state for state in inner.state.values()):
            return original(self)
        step = max((float(group.get("step") or 0.0) for group in inner.param_groups), default=0.0)
        self.optimizer = _Inner(inner, step)
        try:
            return original(self)
        finally:
            self.optimizer = inner

    return state_dict


def _load_state_dict(original: Callable[..., Any]) -> Callable[..., Any]:
    """After loading, every parameter counts its own steps, from the checkpoint's number."""

    @functools.wraps(original)
    def load_state_dict(self: Any, state_dict: Any) -> Any:
        result = original(self, state_dict)
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                state = self.optimizer.state.get(parameter, {})
                if "step" in state and "step" in group:
                    state["step"] = torch.tensor(float(group["step"]))
        return result

    return load_state_dict


def _set_states(original: Callable[..., Any]) -> Callable[..., Any]:
    """Without a saved step the parameter keeps the one that `_load_state_dict` gave it; Megatron skips what is None."""

    @functools.wraps(original)
    def set_main_param_and_optimizer_states(self: Any, model_param: Any, tensors: dict[str, Any]) -> Any:
        return original(self, model_param, {"step": None, **tensors})

    return set_main_param_and_optimizer_states
