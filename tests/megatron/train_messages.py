"""The project's pretraining script with a recorder of what passes between stages; $MESSAGES names the folder.

Each process writes rank<r>.jsonl, a line for every call of Megatron's schedule: the tokens of its micro-batches,
whether it ran forward only, the messages that it handed to torch, and how often it waited for the device or exchanged
shapes meanwhile.
"""

import contextlib
import json
import os
import runpy
from pathlib import Path


def record(folder: Path) -> None:
    import torch
    from megatron.core.pipeline_parallel import p2p_communication

    from megatron_hdp.seams.p2p import PlannedCommunicator

    line: dict = {}
    step = PlannedCommunicator.step

    def posting(original):
        def post(**tensors):
            for name in ("tensor_send_next", "tensor_recv_prev", "tensor_send_prev", "tensor_recv_next"):
                if tensors[name] is not None:
                    line["messages"].append((name.removeprefix("tensor_"), list(tensors[name].shape)))
            return original(**tensors)

        return post

    def counting(name, original):
        def count(*args, **kwargs):
            if line:
                line[name] += 1
            return original(*args, **kwargs)

        return count

    @contextlib.contextmanager
    def recorded_step(self, tokens, *, forward_only):
        line.update(tokens=list(tokens), forward_only=forward_only, messages=[], device_waits=0, shape_exchanges=0)
        with step(self, tokens, forward_only=forward_only):
            yield
        with (folder / f"rank{os.environ['RANK']}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        line.clear()

    folder.mkdir(parents=True, exist_ok=True)
    theirs = p2p_communication.P2PCommunicator
    theirs._communicate_shapes = counting("shape_exchanges", theirs._communicate_shapes)
    p2p_communication._batched_p2p_ops = posting(p2p_communication._batched_p2p_ops)
    p2p_communication._p2p_ops = posting(p2p_communication._p2p_ops)
    torch.cuda.synchronize = counting("device_waits", torch.cuda.synchronize)
    PlannedCommunicator.step = recorded_step


if __name__ == "__main__":  # Megatron's checkpoint writer imports the main module again
    from record import record as record_steps

    record_steps(os.environ["RECORD"])
    record(Path(os.environ["MESSAGES"]))
    runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "pretrain_gpt.py"), run_name="__main__")
