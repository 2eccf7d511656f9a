"""The recorded pretraining script; what model and optimizer of each rank hold after training goes to $RECORD.

Bytes, with what the memory estimate says beside them, in memory0.json, ...
"""

import inspect
import json
import os
import runpy
from pathlib import Path


def held(models, optimizer):
    """Bytes of weights, gradients and the optimizer's state."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    state = [
        tensor
        for part in parts
        for values in part.optimizer.state.values()
        for tensor in values.values()
        if getattr(tensor, "ndim", 0) > 0
    ]
    groups = [g for part in parts for g in getattr(part, "shard_fp32_from_float16_groups", [])]
    state += [shard for group in groups for shard in group if shard is not None]
    return {
        "weights": sum(p.numel() * p.element_size() for model in models for p in model.parameters()),
        "parameters": sum(p.numel() for model in models for p in model.parameters()),
        "tensors": sum(1 for model in models for p in model.parameters()),
        "gradients": sum(b.grad_data.nbytes for model in models for b in model.buffers),
        "optimizer": sum(tensor.nbytes for tensor in state),
    }


def estimated(args):
    """Parameters of this rank's stage, and all parts of the stage that needs most, or why there are none."""
    from megatron.core import mpu

    from megatron_hdp.memory import estimate, parameters
    from megatron_hdp.seams.flags import config_from_args
    from megatron_hdp.seams.memory import memory_of_run
    from megatron_hdp.seams.model_shape import parallel_from_args, shape_from_args

    shape, parallel = shape_from_args(args), parallel_from_args(args, config_from_args(args), on_gpu=False)
    stage = "only" if parallel.stages == 1 else "first" if mpu.is_pipeline_first_stage() else "last"
    found, run = estimate(shape, parallel, args.hdp_tokens_per_rank), memory_of_run(args)
    return {
        "stage": stage,
        "parameters": parameters(shape, parallel, stage),
        "weights": found.weights,
        "gradients": found.gradients,
        "optimizer": found.optimizer,
        "reason": run if isinstance(run, str) else None,
    }


if __name__ == "__main__":
    import megatron.training.training as training

    train, signature = training.train, inspect.signature(training.train)

    def noted_train(*args, **kwargs):
        given = signature.bind(*args, **kwargs).arguments
        result = train(*args, **kwargs)
        line = {"held": held(given["model"], given["optimizer"]), "estimated": estimated(training.get_args())}
        (Path(os.environ["RECORD"]) / f"memory{os.environ['RANK']}.json").write_text(json.dumps(line))
        return result

    training.train = noted_train
    runpy.run_path(str(Path(__file__).with_name("train.py")), run_name="__main__")
