"""The project's pretraining script with every step's exact numbers written to $RECORD (JSON lines, last rank)."""

import functools
import inspect
import json
import os
import sys
from pathlib import Path

if __name__ == "__main__":
    import megatron.training.training as training

    original = training.training_log
    signature = inspect.signature(original)

    @functools.wraps(original)
    def training_log(*args, **kwargs):
        values = signature.bind(*args, **kwargs).arguments
        if values["loss_dict"]:  # filled on the last pipeline stage
            step = {"iteration": values["iteration"], "grad_norm": float(values["grad_norm"])}
            step["loss"] = float(values["loss_dict"]["lm loss"])
            if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
                with Path(os.environ["RECORD"]).open("a") as file:
                    file.write(json.dumps(step) + "\n")
        return original(*args, **kwargs)

    training.training_log = training_log
    sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
    import pretrain_gpt

    pretrain_gpt.main()
