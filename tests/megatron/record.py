"""Records what a Megatron run computed: losses and gradient norms at full precision, final weights, process groups.

With $RECORD_SHARDS set, every process writes its part of the final model as well, for `read_whole_model`.
"""

import json
import os
from pathlib import Path

import torch


def record(folder: str | Path) -> None:
    """From now on, write ``steps.json`` (last rank), ``weights.pt`` and ``groups.json`` (rank 0) into ``folder``."""
    import megatron.training.training as training
    from megatron.core.utils import unwrap_model

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    steps: list[dict] = []
    log, loop, evaluate = training.training_log, training.train, training.evaluate

    def training_log(
        loss_dict, total_loss_dict, learning_rate, iteration, loss_scale, flag, skipped, grad_norm, *a, **k
    ):
        if loss_dict:
            lr = None if learning_rate is None else float(learning_rate)
            line = {"iteration": iteration, "lr": lr, "grad_norm": float(grad_norm)}
            line.update({key: float(value) for key, value in loss_dict.items()})
            line["tokens_for_flops"] = k.get("total_real_tokens_in_batch")
            line["squares_for_flops"] = k.get("seqlen_squared_sum_in_batch")
            steps.append(line)
            (folder / "steps.json").write_text(json.dumps(steps))
        return log(loss_dict, total_loss_dict, learning_rate, iteration, loss_scale, flag, skipped, grad_norm, *a, **k)

    def recorded_evaluate(*args, **kwargs):
        result = evaluate(*args, **kwargs)
        if result[0] and os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1):
            with (folder / "evaluations.jsonl").open("a") as file:
                file.write(json.dumps({key: float(value) for key, value in result[0].items()}) + "\n")
        return result

    def recorded_train(forward_step_func, model, *args, **kwargs):
        try:
            return loop(forward_step_func, model, *args, **kwargs)
        finally:
            if os.environ.get("RECORD_SHARDS"):
                torch.save(shards(unwrap_model(model)), folder / f"shards{os.environ['RANK']}.pt")
            if int(os.environ.get("RANK", 0)) == 0:
                parts = unwrap_model(model)
                weights = {k: v for m in parts for k, v in m.state_dict().items() if isinstance(v, torch.Tensor)}
                torch.save(weights, folder / "weights.pt")
                # every process group that this process is a member of, whoever made it and how
                groups = torch.distributed.distributed_c10d._world.pg_names
                (folder / "groups.json").write_text(json.dumps(len(groups)))

    training.training_log = training_log
    training.evaluate = recorded_evaluate
    training.train = recorded_train


def shards(model_parts) -> list[tuple[str, tuple, tuple, torch.Tensor]]:
    """Name, shape of the whole, place in it and values of each tensor of this process, as Megatron's distributed
    checkpoint would have them; much faster than one."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
    from megatron.training import get_args
    from megatron.training.checkpointing import _build_sharded_state_dict_metadata

    found = []
    for part in model_parts:
        state = part.sharded_state_dict(metadata=_build_sharded_state_dict_metadata(get_args()))
        apply_factories(state)
        for each in nested_values(state):
            if isinstance(each, ShardedTensor):
                values = each.data.detach().view(*[1] * each.prepend_axis_num, *each.local_shape).clone()
                found.append((each.key, tuple(each.global_shape), tuple(each.global_offset), values))
    return found


def read_whole_model(folder: str | Path) -> dict[str, torch.Tensor]:
    """Final weights recorded with $RECORD_SHARDS, put together from all processes; copies must have equal bits."""
    whole: dict[str, torch.Tensor] = {}
    for path in sorted(Path(folder).glob("shards*.pt")):
        for name, shape, begin, values in torch.load(path, weights_only=True):
            tensor = whole.setdefault(name, torch.full(shape, torch.nan, dtype=values.dtype))
            place = tensor[tuple(slice(b, b + n) for b, n in zip(begin, values.shape, strict=True))]
            assert place.isnan().all() or torch.equal(place, values), f"copies of {name} differ"
            place.copy_(values)
    assert whole
    assert not [name for name, tensor in whole.items() if tensor.isnan().any()]
    return whole


def read_steps(folder: str | Path) -> list[dict]:
    """Steps recorded in ``folder``."""
    return json.loads((Path(folder) / "steps.json").read_text())


def read_weights(folder: str | Path) -> dict[str, torch.Tensor]:
    """Final weights recorded in ``folder``."""
    return torch.load(Path(folder) / "weights.pt", weights_only=True)


def count_groups(folder: str | Path) -> int:
    """Process groups that rank 0 was a member of at the end of training."""
    return json.loads((Path(folder) / "groups.json").read_text())
