"""Measures what the planner needs to know of a model on a machine, and writes it as a profile."""
