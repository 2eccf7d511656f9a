"""Exact integer arithmetic for coefficients: the same bits on every platform, whatever its compiler does to floats."""

from decimal import Decimal
from fractions import Fraction
from typing import Any

from megatron_hdp.errors import ConfigError

FRACTION_BITS = 12
"""Coefficients are whole multiples of 2^-12 picoseconds."""
_ONE = 1 << FRACTION_BITS
PICOSECONDS = 10**12
OFFLOAD_STEPS = 1024
"""Offload fractions are rounded down to multiples of 1/1024, so that memory is never underestimated."""


def fixed(value: Fraction, name: str) -> int:
    """``value`` seconds (per something) in 2^-12 picoseconds, rounded once, half to even.

    Raises ConfigError if products with it would not fit int64 (half a second per token, say).
    """
    result = round(value * PICOSECONDS * _ONE)
    if result >= 1 << (62 - FRACTION_BITS):
        shown = Decimal(value.numerator) / Decimal(value.denominator)  # a float may not hold it
        raise ConfigError(f"{name} is {shown:.6g} s for all layers of a stage, which no integer cost can hold")
    return result


def scaled(count: Any, coefficient: int | Any) -> Any:
    """floor(count x coefficient / 2^12) exactly, without a product that leaves int64; picoseconds."""
    return (count >> FRACTION_BITS) * coefficient + (((count & (_ONE - 1)) * coefficient) >> FRACTION_BITS)
