"""The recorded pretraining script with other data on each rank: $DATA_OF_RANK_<r> is the prefix."""

import os
import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.argv += ["--data-path", os.environ["DATA_OF_RANK_" + os.environ["RANK"]]]
    runpy.run_path(str(Path(__file__).with_name("train.py")), run_name="__main__")
