"""The ByteScale paper's figures beside what the simulator says: `megatron-hdp reproduce`. No torch.

`paper` has the published values, `steps` runs a setting, one module for each figure compares, `render` prints.
"""
