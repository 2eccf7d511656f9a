"""Small inputs for reports, and a page read back from its HTML."""

import base64
import functools
import gzip
import json
from dataclasses import dataclass, field
from html.parser import HTMLParser

import numpy as np

from megatron_hdp.mixes import draw, parse_mix
from megatron_hdp.planner import plan
from megatron_hdp.simulator.files import Simulation, StrategyRun, layer_numbers, step_numbers
from megatron_hdp.simulator.strategies import Setting, run_strategy

EVIL = "<script>window.broken = 1</script>&\"'<img src=x onerror=alert(1)>"
"""What a title could hold."""
VOID = {"meta", "link", "input", "img", "br", "rect", "path", "hr"}
"""Elements without an end, and those of SVG that end themselves."""
CONTEXT = 64 << 10


def batch(seed, tokens=512 << 10, context=CONTEXT):
    return draw(parse_mix("byted"), tokens, context, (1234, seed))


def setting(stages=1, gpus=16):
    return Setting(model="llama-7b", gpus=gpus, tensor_parallel=1, stages=stages, virtual_stages=1, context=CONTEXT)


@functools.cache
def simulation(stages=1, title="A run", strategies=("hdp", "naive", "static"), sweeps=True, seeds=(0, 1)):
    """Of 16 GPUs; the last way to run could not."""
    used = setting(stages)
    batches = [batch(seed) for seed in seeds]
    runs = []
    for name in strategies:
        found = [run_strategy(name, lengths, used, timeline=i == 0) for i, lengths in enumerate(batches)]
        steps = tuple(step_numbers(one.plan, one.result, 0.004) for one in found)
        runs.append(StrategyRun(name=name, words=found[0].words, steps=steps, timeline=found[0].result.timeline))
    runs.append(StrategyRun(name="ulysses", words="Ulysses", steps=(), failed="too few heads"))
    rows = (
        {"value": 4096, "hdp": 2.0, "static": None, "note": "rings of 64"},
        {"value": 8192, "hdp": 1.5, "static": 4.0},
    )
    return Simulation(
        title=title,
        setting={
            "model": "llama-7b",
            "ranks": used.ranks,
            "stages": stages,
            "tokens_per_rank": used.tokens_per_rank,
            "context": CONTEXT,
            "profile": "bytescale",
            "offload": False,
            "odd": EVIL,
        },
        lengths=batches[0],
        runs=tuple(runs),
        layer=layer_numbers(used.cost),
        sweeps={"tokens_per_rank": rows} if sweeps else {},
        verdict=("HDP is worth it.",),
    )


def small_plan(ranks=8, seed=3):
    return plan(batch(seed), ranks, 8192)


def log_lines(steps=6, shift=0.0, **more):
    """Lines of --hdp-log, as `metrics.StepLog` writes them."""
    return [
        json.dumps(
            {
                "iteration": i,
                "loss": 5.0 - 0.1 * i + (shift if i == 3 else 0.0),
                "grad_norm": 1.0 + i,
                "seconds": 2.0 if i == 1 else 0.5,
                "tokens": 1000,
                "ring_sizes": {"1": 9, "2": 1},
                "micro_batches_min": 2,
                "micro_batches_max": 5,
                "efficiency": 0.9,
                "plan_seconds": 0.001 * i,
                "read_seconds": 0.002,
                "bytes_sent": 10**6 * i,
            }
            | more
        )
        for i in range(1, steps + 1)
    ]


@dataclass
class Node:
    """An element of a page."""

    tag: str
    attributes: dict
    children: list = field(default_factory=list)

    def all(self, tag=None, **wanted):
        """Every element below, in order."""
        for child in self.children:
            if isinstance(child, Node):
                named = {key.rstrip("_"): value for key, value in wanted.items()}
                if (tag is None or child.tag == tag) and named.items() <= child.attributes.items():
                    yield child
                yield from child.all(tag, **wanted)

    def text(self):
        """All words below, outside of scripts."""
        if self.tag in ("script", "style"):
            return ""
        return "".join(child if isinstance(child, str) else child.text() for child in self.children)


class _Reader(HTMLParser):
    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.root = Node("root", {})
        self.open = [self.root]

    def handle_starttag(self, tag, attrs):
        assert len({name for name, _ in attrs}) == len(attrs), f"{tag}: an attribute twice"
        node = Node(tag, dict(attrs))
        self.open[-1].children.append(node)
        if tag not in VOID:
            self.open.append(node)

    def handle_startendtag(self, tag, attrs):
        self.open[-1].children.append(Node(tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open[-1].tag == tag, f"</{tag}> ends <{self.open[-1].tag}>, line {self.getpos()[0]}"
        self.open.pop()

    def handle_data(self, data):
        self.open[-1].children.append(data)


def parsed(text):
    """The page's elements; every one that begins must end, inside of what it began in."""
    reader = _Reader()
    reader.feed(text)
    reader.close()
    assert reader.open == [reader.root], f"never ended: {[node.tag for node in reader.open[1:]]}"
    return reader.root


def unpacked(page, name):
    """What is packed in a page."""
    letters = next(page.all("script", id=name)).children[0]
    return gzip.decompress(base64.b64decode(letters)).decode()


def columns(timeline):
    """For comparing."""
    return {name: np.asarray(getattr(timeline, name)) for name in ("lane", "kind", "start", "end")}
