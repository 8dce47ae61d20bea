"""Kinds of numbers that a flag can be. A value that breaks its kind's rule ends the run before it
begins.

An algorithm file declares a flag by its kind (`lr: Positive = 3e-4`); `broken_rule` holds the
values to it.
"""

from collections.abc import Callable
from typing import Annotated, NamedTuple, get_type_hints


LARGEST_INT, LARGEST_FLOAT = 2**31 - 1, 3e38  # of a tensor's sizes, and of float32


class Rule(NamedTuple):
    """What finite numbers of a kind obey, in words for the message and as a test."""

    words: str
    holds: Callable[[float], bool]


Count = Annotated[int, Rule("1 or more", lambda x: x >= 1)]
Whole = Annotated[int, Rule("0 or more", lambda x: x >= 0)]
Seed = Whole
Positive = Annotated[float, Rule("a number above 0", lambda x: x > 0)]
NonNegative = Annotated[float, Rule("0 or more", lambda x: x >= 0)]
Share = Annotated[float, Rule("from 0 to 1", lambda x: 0 <= x <= 1)]
# a share that must not be nothing
Part = Annotated[float, Rule("above 0 and at most 1", lambda x: 0 < x <= 1)]
# Beyond these a softmax is all one token, or all tokens alike.
Temperature = Annotated[float, Rule("from 0.01 to 100", lambda x: 0.01 <= x <= 100)]
Exponent = Annotated[float, Rule("from 0 to 100", lambda x: 0 <= x <= 100)]
Betas = Annotated[tuple[float, float], Rule("from 0 to below 1", lambda x: 0 <= x < 1)]


def broken_rule(args: object) -> str:
    """What is wrong with the first flag whose value breaks the rule of its kind; "" if none
    does."""
    for name, kind in get_type_hints(type(args), include_extras=True).items():
        value = getattr(args, name)
        for rule in (
            extra for extra in getattr(kind, "__metadata__", ()) if isinstance(extra, Rule)
        ):
            for number in value if isinstance(value, tuple) else (value,):
                if abs(number) > (LARGEST_INT if isinstance(number, int) else LARGEST_FLOAT):
                    return f"--{name} {str(number)[:40]}: is too large"
                if not rule.holds(number):  # false for NaN
                    return f"--{name} {number}: must be {rule.words}"
    return ""
