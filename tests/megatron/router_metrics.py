"""Runs the script of $SCRIPT and writes what Megatron reports of router losses, a line per step, to $RECORD."""

import json
import os
import runpy
from pathlib import Path

if __name__ == "__main__":
    from megatron.core.transformer.moe.moe_logging import MoEMetricsTracker

    file = Path(os.environ["RECORD"]) / "router_losses.jsonl"
    aggregate = MoEMetricsTracker._aggregate

    def recorded(tracker, loss_scale, num_moe_layers, metric_names, percentiles=None):
        if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
            layers = {name: (tracker.metrics[name].values * loss_scale).tolist() for name in metric_names}
            with file.open("a") as lines:
                lines.write(json.dumps(layers) + "\n")
        return aggregate(tracker, loss_scale, num_moe_layers, metric_names, percentiles)

    MoEMetricsTracker._aggregate = recorded
    runpy.run_path(str(Path(__file__).parent / os.environ["SCRIPT"]), run_name="__main__")
