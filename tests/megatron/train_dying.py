"""The recorded pretraining script on a rank that kills itself in mid-step: $DIE is where, $DIE_RANK, $DIE_STEP."""

import os
import runpy
import signal
from pathlib import Path

if __name__ == "__main__" and os.environ["DIE_RANK"] == os.environ["RANK"]:
    from megatron.training import get_args

    from megatron_hdp.attention.attend import _HdpAttention

    name = os.environ["DIE"]
    original = getattr(_HdpAttention, name)

    def dying(*args, **kwargs):
        if get_args().curr_iteration == int(os.environ["DIE_STEP"]):
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    setattr(_HdpAttention, name, staticmethod(dying))

if __name__ == "__main__":
    runpy.run_path(str(Path(__file__).with_name("train.py")), run_name="__main__")
