"""The project's pretraining script with a recorder around it; $RECORD names the folder."""

import os
import runpy
from pathlib import Path

if __name__ == "__main__":  # Megatron's checkpoint writer imports the main module again
    from record import record

    record(os.environ["RECORD"])
    runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "pretrain_gpt.py"), run_name="__main__")
