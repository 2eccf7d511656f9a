"""Documents on disk, sequences, batches. numpy only: no torch, no Megatron.

indexed        .bin/.idx files: checked at open, read by range, written
stream         one dataset as an endless stream of sequences, each epoch in its own frozen random order
blend          how much of each dataset goes into batch k: a token budget, or a number of sequences
corpus         several datasets as batches, a pure function of (data, seed, step)
batches        from a rank's micro-batch to tokens, labels, loss mask and positions
flags          --split and --data-path as Megatron reads them
stdlib_corpus  a corpus of real documents that every machine with Python has
"""
