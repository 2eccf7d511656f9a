"""Flags of benchmarks/attention.py: what cannot run is refused before anything runs."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

import torch

from megatron_hdp.attention.heads_layout import head_parts
from megatron_hdp.attention.kernels import chosen_kernel
from megatron_hdp.errors import ConfigError, HdpError
from megatron_hdp.lengths import parse_size
from megatron_hdp.types import EXCHANGES

CASES = ("long", "mix")
MOST_RANKS = 64
"""Each is a process with torch in it."""
LEAST_SHORT_TOKENS = 16
"""The shortest of the short sequences has 1/16 of the longest's tokens, at least one."""
_OF_RANKS = (
    *("ranks", "cases", "exchanges", "tokens", "mix_tokens", "short_tokens", "window"),
    *("patience", "contended", "rivals", "trace"),
)
"""What --blocks has no use for."""


def arguments(words: str | None) -> argparse.Namespace:
    """The command line, understood; ``words`` describe the program. Ends the process for what cannot run."""
    parser = _parser(words)
    args = parser.parse_args()
    given = {name for name, value in vars(args).items() if value != parser.get_default(name)}
    try:
        _understand(args, given)
    except HdpError as error:
        parser.error(str(error))
    return args


def head_groups(ranks: int, heads: int, kv_heads: int) -> list[int]:
    """Numbers of ranks, most first, that can swap rows for heads on a ring of ``ranks``; empty if none can."""
    return [a for a in range(ranks, 1, -1) if ranks % a == 0 and _can_swap(heads, kv_heads, a)]


def _can_swap(heads: int, kv_heads: int, head_ranks: int) -> bool:
    try:
        head_parts(heads, kv_heads, head_ranks)
    except ConfigError:
        return False
    return True


def _parser(words: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=words, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="1,2,4")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--exchanges", default=",".join(EXCHANGES))
    parser.add_argument("--tokens", default="32K")
    parser.add_argument("--mix-tokens", default="16K")
    parser.add_argument(
        "--short-tokens", default="1K", help="longest of the short sequences; the shortest is 1/16 of it"
    )
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, help="must divide --heads; as many if not given")
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--window", help="tokens that a query sees; full attention if not given")
    parser.add_argument("--kernel", default="auto", help="as --hdp-kernel")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--patience", type=float, default=0, help="seconds in which measurements disturbed by others are made again"
    )
    parser.add_argument("--contended", action="store_true", help="also run the whole case on every rank at once")
    parser.add_argument("--no-rivals", dest="rivals", action="store_false")
    parser.add_argument("--blocks", help="lengths: time kernels alone instead of ranks")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="of --blocks: CUDA if there is, else CPU; ranks are on CPU"
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--trace", type=Path)
    return parser


def _understand(args: argparse.Namespace, given: set[str]) -> None:
    """Words to numbers. ``given``: the flags that are not at their defaults. Raises ConfigError."""
    for name in ("tokens", "mix_tokens", "short_tokens", "window"):
        text = getattr(args, name)
        setattr(args, name, None if text is None else parse_size(text, _flag(name)))
    if args.short_tokens < LEAST_SHORT_TOKENS:
        raise ConfigError(f"--short-tokens is {args.short_tokens}: give at least {LEAST_SHORT_TOKENS}")
    args.kv_heads = args.heads if args.kv_heads is None else args.kv_heads
    sizes = args.tokens, args.mix_tokens, args.short_tokens, args.window
    args.defaults = (*sizes, args.heads, args.kv_heads, args.head_dim) == (32768, 16384, 1024, None, 8, 8, 64)
    args.defaults &= args.dtype == "float32"
    args.ranks = _ranks(args.ranks)
    args.blocks = [parse_size(size, "--blocks") for size in args.blocks.split(",")] if args.blocks else []
    args.cases = _names("--cases", args.cases, CASES)
    args.exchanges = _names("--exchanges", args.exchanges, EXCHANGES)
    _check_shape(args)
    _check_device(args, given)
    if not args.blocks:
        _check_tokens(args)
        _check_heads(args, given)
        if args.trace is not None and max(args.ranks) == 1:
            raise ConfigError(f"--trace {args.trace}: there is no exchange to show; give --ranks above 1")
    for flag in ("json", "trace"):
        _check_file(f"--{flag}", getattr(args, flag))


def _flag(name: str) -> str:
    """As the command line spells it."""
    return "--no-rivals" if name == "rivals" else f"--{name.replace('_', '-')}"


def _ranks(text: str) -> list[int]:
    """Numbers of ranks, each once."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() and 1 <= int(word) <= MOST_RANKS for word in words):
        raise ConfigError(f"--ranks is {text!r}: give numbers of processes from 1 to {MOST_RANKS}, such as 1,2,4")
    return list(dict.fromkeys(map(int, words)))


def _names(flag: str, text: str, known: Sequence[str]) -> list[str]:
    names = list(dict.fromkeys(text.split(",")))
    if not set(names) <= set(known):
        raise ConfigError(f"{flag} is {text!r}: give some of {','.join(known)}")
    return names


def _check_shape(args: argparse.Namespace) -> None:
    for name in ("heads", "kv_heads", "head_dim", "repeats"):
        if getattr(args, name) < 1:
            raise ConfigError(f"{_flag(name)} is {getattr(args, name)}: give at least 1")
    if args.heads % args.kv_heads:
        raise ConfigError(
            f"--heads is {args.heads} and --kv-heads is {args.kv_heads}: every key/value head serves equally many "
            "query heads, so the second must divide the first"
        )


def _check_tokens(args: argparse.Namespace) -> None:
    """A rank without a single token has nothing to compare."""
    least = 2 * max(args.ranks)
    for case, name in (("long", "tokens"), ("mix", "mix_tokens")):
        if case in args.cases and getattr(args, name) < least:
            raise ConfigError(
                f"{_flag(name)} is {getattr(args, name)}, and --ranks goes up to {max(args.ranks)}: give two tokens "
                f"for each, {least} or more"
            )


def _check_device(args: argparse.Namespace, given: set[str]) -> None:
    """Where kernels run, whether the one that was asked for can, and flags that say nothing there."""
    has_cuda = torch.cuda.is_available()
    if args.blocks:
        idle = [_flag(name) for name in _OF_RANKS if name in given]
        if idle:
            raise ConfigError(
                f"--blocks times kernels alone, on one device, and has no use for {', '.join(idle)}: leave that out"
            )
        args.device = args.device or ("cuda" if has_cuda else "cpu")
    elif args.device == "cuda":
        raise ConfigError("--device is cuda, but ranks are processes on CPU: give --blocks with it")
    else:
        args.device = "cpu"
    if args.device == "cuda" and not has_cuda:
        raise ConfigError(f"--device is cuda, but torch {torch.__version__} finds no CUDA device here: give cpu")
    dtype: torch.dtype = getattr(torch, args.dtype)
    try:
        chosen_kernel(args.kernel, torch.device(args.device), dtype, args.head_dim)
    except ConfigError as error:
        raise ConfigError(str(error).replace("--hdp-kernel", "--kernel")) from error


def _check_heads(args: argparse.Namespace, given: set[str]) -> None:
    """Refuse heads where they were asked for and no number of ranks can swap; else the notes say where they cannot."""
    if "heads" not in args.exchanges or "exchanges" not in given:
        return
    shared = [size for size in args.ranks if size > 1]
    if not any(head_groups(size, args.heads, args.kv_heads) for size in shared):
        rings = f"a ring of {' or '.join(map(str, shared))}" if shared else "one rank"
        raise ConfigError(
            f"--exchanges is {','.join(args.exchanges)!r}: {_heads_words(args)} cannot be swapped on {rings}. The "
            "number of ranks that swap must divide the ring and --heads, and divide --kv-heads or be a multiple of it: "
            "change those, or leave heads out"
        )


def unswappable(args: argparse.Namespace) -> str:
    """Which of the rings cannot swap heads although that is wanted; "" if all can."""
    sizes = [size for size in args.ranks if size > 1 and not head_groups(size, args.heads, args.kv_heads)]
    if "heads" not in args.exchanges or not sizes:
        return ""
    return f"no rows for heads on {' and '.join(map(str, sizes))} ranks: {_heads_words(args)} cannot be swapped there"


def _heads_words(args: argparse.Namespace) -> str:
    return f"{args.heads} query and {args.kv_heads} key/value heads"


def _check_file(flag: str, path: Path | None) -> None:
    """Refuse what cannot be written when all is done."""
    if path is None:
        return
    if path.is_dir():
        raise ConfigError(f"{flag} {path}: that is a folder; give a file")
    if not path.parent.is_dir():
        raise ConfigError(f"{flag} {path}: there is no folder {path.parent}; make it first")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"{flag} {path}: it may not be written here; give another file")
