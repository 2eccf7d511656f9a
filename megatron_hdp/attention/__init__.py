"""Exact causal attention over micro-batches of local and ring pieces.

layout     which block is computed when, which rows it reads, what travels (no torch)
kernels    attention of one block: torch's flash ops, and a plain reference
comm       the one communicator of all rings
ring       `hdp_attention`: the schedule of layout, run with kernels over comm
reference  float64 attention of a whole sequence, the dull twin
"""
