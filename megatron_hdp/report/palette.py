"""Colours that colour-blind people can tell apart, and that differ in lightness, so that grey print shows them too.

Computing is dark, waiting is light or warm. Where areas touch, patterns come on top of the colours.
"""

from megatron_hdp.report.chart import Key

STATES = (
    "forward",
    "backward",
    "optimizer",
    "ring",
    "partner",
    "expert",
    "copy",
    "bubble",
    "sync",
    "load",
    "gather",
    "reduce",
    "other",
)
"""What a lane can be doing at a time: computing (the first three), or waiting, by `simulator.result.CAUSES`; "other" is
what a measured run could not tell apart."""

COMPUTING = 3
"""So many of `STATES` are computing."""

KEYS = {
    "forward": Key("computing, forward", "#0b3c6f"),
    "backward": Key("computing, backward", "#2f6ea6"),
    "optimizer": Key("optimizer", "#202020"),
    "ring": Key("waits for transfers of a ring", "#e8761a", "/"),
    "partner": Key("waits for another rank of a ring", "#ffcc80", "\\"),
    "expert": Key("waits for a rank that shares experts", "#e0a3cf", "x"),
    "copy": Key("waits for copies to or from host memory", "#5fc9a8", "-"),
    "bubble": Key("waits in a pipeline bubble", "#f5e663", "."),
    "sync": Key("waits for the slowest rank", "#dcdcdc"),
    "load": Key("waits for data or the plan", "#c9a66b", "|"),
    "gather": Key("waits for parameters", "#b0b0b0", "+"),
    "reduce": Key("waits for the sum of gradients", "#cfc0ea", "|"),
    "other": Key("not told apart: other waiting, or the core was taken", "#f3eadb", "x"),
}
"""State -> how it looks. In grey print forward is darkest, then backward, then waiting for rings, then all other
waiting, whose causes patterns tell apart."""

OFF = Key("step is over", "#ffffff")

LINES = ("#0b3c6f", "#d55e00", "#009e73", "#c77cab", "#7a6a00", "#56b4e9", "#202020", "#8a6d3b", "#e69f00", "#7f7f7f")
"""Colours of lines, for series without a meaning of their own; dashes and markers change with them."""
DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
MARKS = ("circle", "square", "diamond", "triangle-up", "x", "cross", "triangle-down", "star", "pentagon", "hexagon")


def line(index: int) -> dict[str, object]:
    """Line style of the index-th series."""
    return {"color": LINES[index % len(LINES)], "dash": DASHES[index % len(DASHES)], "width": 2}


def mark(index: int) -> dict[str, object]:
    """Marker style of the index-th series."""
    return {"color": LINES[index % len(LINES)], "symbol": MARKS[index % len(MARKS)], "size": 8}


def fill(state: str) -> dict[str, object]:
    """Bar style of a state."""
    key = KEYS[state]
    return {"color": key.colour, "line": {"color": "#ffffff", "width": 0.5}} | hatch(key.colour, key.pattern)


def hatch(colour: str, pattern: str, lines: str = "#202020") -> dict[str, object]:
    """What a bar's style gets for a pattern on its colour; nothing without one."""
    style = {"shape": pattern, "bgcolor": colour, "fgcolor": lines, "fgopacity": 0.5, "size": 6, "solidity": 0.18}
    return {"pattern": style} if pattern else {}
