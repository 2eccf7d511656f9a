"""Records what a Megatron run computed: per-step loss and gradient norm at full precision, and the final weights."""

import json
import os
from pathlib import Path

import torch


def record(folder: str | Path) -> None:
    """From now on, write ``steps.json`` (last rank) and ``weights.pt`` (rank 0) of the run into ``folder``."""
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
            if int(os.environ.get("RANK", 0)) == 0:
                parts = unwrap_model(model)
                weights = {k: v for m in parts for k, v in m.state_dict().items() if isinstance(v, torch.Tensor)}
                torch.save(weights, folder / "weights.pt")

    training.training_log = training_log
    training.evaluate = recorded_evaluate
    training.train = recorded_train


def read_steps(folder: str | Path) -> list[dict]:
    """Steps recorded in ``folder``."""
    return json.loads((Path(folder) / "steps.json").read_text())


def read_weights(folder: str | Path) -> dict[str, torch.Tensor]:
    """Final weights recorded in ``folder``."""
    return torch.load(Path(folder) / "weights.pt", weights_only=True)
