"""Exact causal attention over micro-batches of local and shared pieces.

layout     which rows are computed on when and with whom, with `view` and the layout of every exchange (no torch)
attend     `hdp_attention`: the layout, run with kernels over the pool's communicator
steps      how exchanges and compute of pieces are woven together
walk, fetch, heads   the exchanges
comm       the one communicator
kernels    attention of packed blocks
traffic    bytes that every rank sends, from the plan alone (no torch)
trace      what a rank did when
reference  float64 attention of a whole sequence, the dull twin
"""
