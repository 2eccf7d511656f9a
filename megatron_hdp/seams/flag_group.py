"""The --hdp-* flags and their help. No torch, no Megatron: the launcher's own --help shows them too."""

import argparse
import ast
import dataclasses
import functools
import inspect
from typing import Any

from megatron_hdp.config import HdpConfig, flag, option_parser


def add_group(parser: Any) -> Any:
    """The --hdp-* group. Options without a value on the command line leave no attribute, so YAML can fill them."""
    group = parser.add_argument_group(title="hybrid data parallelism")
    group.add_argument("--hdp", action="store_true", help="Turn on hybrid data parallelism.")
    group.add_argument("--hdp-config", metavar="FILE", default=None, help="YAML file with the options below.")
    for field in dataclasses.fields(HdpConfig):
        kind, choices = option_parser(field.name)
        value: dict[str, Any] = {"action": "store_true"} if kind is bool else {"type": kind, "choices": choices}
        group.add_argument(
            flag(field.name),
            dest=f"hdp_{field.name}",
            default=argparse.SUPPRESS,
            help=f"{_field_docs()[field.name]} Default: {field.default}.".replace("%", "%%"),
            **value,
        )
    return parser


@functools.cache
def _field_docs() -> dict[str, str]:
    """Docstrings under the fields of `HdpConfig`, by field name."""
    body = ast.parse(inspect.getsource(HdpConfig)).body[0]
    assert isinstance(body, ast.ClassDef)
    docs: dict[str, str] = {}
    for statement, following in zip(body.body, body.body[1:]):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            assert isinstance(following, ast.Expr), f"HdpConfig.{statement.target.id} has no docstring"
            docs[statement.target.id] = " ".join(ast.literal_eval(following.value).split())
    return docs


def group_help() -> str:
    """The group as --help shows it, alone."""
    parser = argparse.ArgumentParser(usage=argparse.SUPPRESS, add_help=False)
    return str(add_group(parser).format_help()).strip() + "\n"


def mend_help(parser: Any) -> None:
    """Take texts that argparse cannot print as they stand: one "10%" in Megatron's would make --help a stack trace."""
    for action in parser._actions:
        if action.help is None or action.help is argparse.SUPPRESS:
            continue
        try:
            action.help % {**vars(action), "prog": parser.prog}
        except (KeyError, TypeError, ValueError):
            action.help = action.help.replace("%", "%%")
