"""One HTML file that shows a plan, a simulation or a training run; `megatron_hdp.report.command.run` writes it."""
