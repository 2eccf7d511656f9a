"""The recorded pretraining script with ratios of offloading that the test chooses, whatever the plan says.

$RATIOS: one or more, taken in turn by the micro-batches of each rank; "" for those of the plan. $EVALUATE: once before
training. What the arena of each rank holds after every step goes to arena0.jsonl, ... in $RECORD.

$RESIDENT: ratios are taken in turn by the micro-batches of equal tokens, and resident0.jsonl, ... say of each what the
layers keep between forward and backward. $LIVE: arena0.jsonl also says how much of the arena is in one piece, and every
tenth time what the process holds.
"""

import collections
import gc
import inspect
import itertools
import json
import os
import runpy
from pathlib import Path


def choose_ratios(offload, note):
    """Instead of the plan's; ``note`` is told each."""
    ratios = [float(word) for word in os.environ["RATIOS"].split()]
    turns = collections.defaultdict(lambda: itertools.cycle(ratios))

    def micro_batch_ratio(micro_batch, layers):
        ratio = next(turns[micro_batch.tokens if os.environ.get("RESIDENT") else None])
        note["ratio"] = ratio
        return ratio

    offload.micro_batch_ratio = micro_batch_ratio


def measure_resident(offload, note):
    """Of every micro-batch: what is alive after forward of what its layers made, their input too and output not.

    Tensors of the arena are not among those: its memory is there from the start.
    """
    from live_bytes import LiveBytes

    bind = offload.ModelOffload.bind

    def measuring_bind(self, model):
        bind(self, model)
        block, whole = model.decoder, model.forward
        forward, seen = block.forward, {}

        def last_layer(module, args, output):
            seen["end"], seen["output"] = seen["live"].made, output[0].untyped_storage().nbytes()

        def measured_forward(*args, **kwargs):
            live, hidden = seen["live"], kwargs["hidden_states"].untyped_storage().nbytes()
            begin = live.made
            result = forward(*args, **kwargs)
            resident = hidden + live.bytes(begin, seen["end"]) - seen["output"]
            pieces = kwargs["packed_seq_params"].micro_batch.pieces
            pieces = [(piece.tokens, piece.ring.size) for piece in pieces]
            write("resident", {**note, "resident": resident, "pieces": pieces})
            return result

        def measured_model(*args, **kwargs):
            with LiveBytes() as seen["live"]:
                return whole(*args, **kwargs)

        block.layers[-1].register_forward_hook(last_layer)
        block.forward, model.forward = measured_forward, measured_model

    offload.ModelOffload.bind = measuring_bind


def held():
    """Bytes of all tensors of Python, each storage once; entries of the offload context; pages of the process."""
    import torch

    from megatron_hdp.offload.entry import Entry

    gc.collect()
    storages, entries = {}, 0
    for thing in gc.get_objects():
        if type(thing) is Entry:
            entries += 1
        elif isinstance(thing, torch.Tensor) and thing.layout is torch.strided:
            storages[thing.untyped_storage()._cdata] = thing.untyped_storage().nbytes()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {"live": sum(storages.values()), "entries": entries, "process": pages * os.sysconf("SC_PAGE_SIZE")}


def note_arena(offload):
    """After every step."""
    end_step, steps = offload.ModelOffload.end_step, itertools.count(1)

    def noted_end_step(self):
        end_step(self)
        line = {"in_use": self.arena.bytes_in_use, "out": self.moved.bytes_out, "in": self.moved.bytes_in}
        line |= {"kept": self.moved.bytes_kept, "most": self.moved.arena_high_water}
        if os.environ.get("LIVE"):
            line |= {"free": self.arena.largest_free, "arena": self.arena.bytes}
            line |= held() if next(steps) % 10 == 0 else {}
        write("arena", line)

    offload.ModelOffload.end_step = noted_end_step


def write(name, line):
    with (Path(os.environ["RECORD"]) / f"{name}{os.environ['RANK']}.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def evaluate_first(training):
    train, signature = training.train, inspect.signature(training.train)

    def evaluating_train(*args, **kwargs):
        given = signature.bind(*args, **kwargs).arguments
        data, model = given["valid_data_iterator"], given["model"]
        training.evaluate(given["forward_step_func"], data, model, None, given["config"])
        return train(*args, **kwargs)

    training.train = evaluating_train


def main():
    import megatron.training.training as training

    from megatron_hdp.seams import offload

    note = {}
    if os.environ.get("RATIOS"):
        choose_ratios(offload, note)
    if os.environ.get("RESIDENT"):
        measure_resident(offload, note)
    note_arena(offload)
    if os.environ.get("EVALUATE"):
        evaluate_first(training)
    runpy.run_path(str(Path(__file__).with_name("train.py")), run_name="__main__")


if __name__ == "__main__":
    main()
