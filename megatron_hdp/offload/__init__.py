"""Selective activation offloading: a fraction of what a micro-batch saves for backward waits in host memory.

host_memory  how much host memory is there (no torch)
allocator    offsets in one block of memory; twin of csrc/arena.cpp (no torch)
quota        which bytes leave (no torch)
arena        `HostArena`: the memory itself
streams      streams, events and copies of a device: CUDA, CPU
lanes        the copies in order with compute
entry        one stretch of a storage: out, and back
micro_batch  `MicroBatch`: the hooks of one forward pass
context      `ActivationOffload`: makes those, counts

Of the l layers of a stage the first and the last keep what they saved; of the others ``ratio`` of the bytes leave, so
that (2 + (1 - ratio)(l - 2)) / l of the activations stay. Around a stage:

    from megatron_hdp.offload.arena import HostArena
    from megatron_hdp.offload.context import ActivationOffload
    from megatron_hdp.offload.host_memory import require_host_memory

    require_host_memory(bytes, ranks_of_the_node)            # on all ranks, then a barrier
    arena = HostArena(bytes, device)                         # once
    offload = ActivationOffload(arena)

    with offload.micro_batch(ratio, len(layers)) as batch:   # every forward pass, with the ratio of the plan
        for index, layer in enumerate(layers):
            batch.layer(index, hidden)
            hidden = layer(hidden)

    metrics = offload.take_metrics()                         # every step
    offload.close(), arena.close()                           # at the end

A layer that is wrapped by itself calls ``offload.layer(index, hidden)`` instead, which does nothing where no context is
open: in evaluation without a context, and when a layer is recomputed in the backward pass. A context in which no layer
tells that it begins ends with SeamError. Any number of micro-batches may be between forward and backward.

Memory on the device beyond the formula: until the end of forward, what the last two layers sent may still be there; in
backward, one layer's share is fetched ahead.

Saved-tensor hooks have one side effect in torch: a parameter that an autograd function saved comes back as another
Python object. Its data and gradient are right; attributes are not those of the parameter. A backward that sets such an
attribute (Megatron's ``grad_added_to_main_grad`` with fused gradient accumulation) has to keep the parameter itself.
"""
