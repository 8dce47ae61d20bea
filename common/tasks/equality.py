"""Whether two final answers are equal: as texts, as numbers with units, else by math-verify."""

import re
from collections import Counter, namedtuple
from fractions import Fraction

import sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig, NormalizationConfig, latex2sympy
from math_verify.grader import is_equation, take_first_relation, take_last_relation, verify
from math_verify.parser import should_treat_as_complex

from common.tasks.answers import PATTERN, TABLES, UNIT_OF

PERCENT = Counter({"%": 1})
# A value, the place of its last decimal (0 without decimals), and how many digits were written.
Number = namedtuple("Number", "value place digits", defaults=(0, 0))
SPELLING = NormalizationConfig(malformed_operators=True, nits=True, boxed="none")
CASED = ConversionConfig(lowercase_symbols=False)


def answers_equal(gold: str, answer: str) -> bool:
    """Tell whether two written texts are equal as texts, numbers with units, or expressions."""
    # The left of S:T = 3:4 only names the ratio.
    gold, answer = (re.sub(r"^[^=]*=\s*(?=\d+:\d)", "", text) for text in (gold, answer))
    if as_text(gold) == as_text(answer):
        return True
    option, answer_option = PATTERN.OPTION.fullmatch(gold), PATTERN.OPTION.fullmatch(answer)
    if option and answer_option:  # their letters decide, and numbers behind them
        counts = re.search(r"\d", option[2]) and answer_option[2]
        return option[1] == answer_option[1] and (
            not counts or answers_equal(option[2], answer_option[2])
        )
    if option and option[2]:
        return answers_equal(option[2], answer)
    if answer_option and answer_option[2]:
        return answers_equal(gold, answer_option[2])
    if re.fullmatch(r"-?\d+\.\d+", gold) and re.fullmatch(PATTERN.DECIMAL_COMMA, answer):
        answer = answer.replace(",", ".")
    value, unit = value_and_unit(gold)
    answer_value, answer_unit = value_and_unit(answer)
    if answer_unit and isinstance(answer_unit, str) and not unit:
        answer_value = str(int(answer_value, int(answer_unit)))  # 101_2 is 5, and never 101
    if value != gold or answer_value != answer:
        differ = unit and answer_unit and unit != answer_unit
        # 50% equals 0.5 and also 50, but if the reference is small (0.5, \frac12) only 0.5.
        share = rf"\frac{{{value}}}{{100}}" if unit == PERCENT else value
        other_share = rf"\frac{{{answer_value}}}{{100}}" if answer_unit == PERCENT else answer_value
        small = answer_unit == PERCENT and not unit and not re.match(r"-?([2-9]|\d\d)", value)
        return not differ and (
            answers_equal(share, other_share) or (not small and answers_equal(value, answer_value))
        )
    capitals = re.fullmatch(PATTERN.CAPITALS, gold) and re.fullmatch(PATTERN.CAPITALS, answer)
    if capitals or re.fullmatch(PATTERN.TEXT_ONLY, gold) or re.fullmatch(PATTERN.TEXT_ONLY, answer):
        return False
    return values_equal(expression_of(gold), expression_of(answer))


def value_and_unit(text: str) -> tuple[str, Counter | str]:
    """Split a written text into its value and its unit: names with powers, or a numeral's base.
    Any noun is a unit (5 apples), but not a variable (5x, 5 n) or a word that changes the value."""
    match = PATTERN.UNIT.search(text)
    if not match or not re.search(r"\d|\\|^[A-Za-z]\s*$", text[: match.start()]):
        return text, ""
    value = text[: match.start()].strip()
    if match[1].startswith("_"):
        return value, match[1].strip("_{}")
    powers = Counter()
    for per, word, power in PATTERN.FACTOR.findall(text, match.start(1)):
        singular = re.sub(r"(?<=\w{3})s$", "", word.lower())
        unit = UNIT_OF.get(word, UNIT_OF.get(singular, singular))
        powers[unit] += int(power or 1) * (-1 if per else 1)
    del powers[""]
    return value, powers


def as_text(text: str) -> str:
    """Remove spaces, except between digits, put words in lower case, and write "no solution" in
    one way."""
    words = r"\b(?:N[oO]|YES|TRUE|FALSE|[A-Z][a-z]{2,})\b"
    text = re.sub(words, lambda word: word[0].lower(), text)
    text = re.sub(r"(?<![\d\s])\s+|\s+(?![\d\s])", "", text)
    return TABLES["same"].get(text.lower(), text)


def digits_agree(gold: Number, answer: Number) -> bool:
    """Tell whether two numbers agree in the digits of the less exact one, and to a relative 1e-6.

    Only the reference may be coarser, if it has five digits, or three when the answer is not a
    finite decimal.
    """
    gap = abs(gold.value - answer.value)
    below = answer.value.denominator
    # A decimal ends if its denominator divides a power of ten. `digits` is 0 if none were written,
    # as for irrational values.
    endless = pow(10, below.bit_length(), below) != 0 or (answer.place and not answer.digits)
    if gold.digits >= (3 if endless else 5) and answer.place < gold.place:
        return 2 * gap <= gold.place
    return gap == 0 or (gap < max(gold.place, answer.place) and gap * 10**6 <= abs(gold.value))


def expression_of(text: str) -> object:
    """Read a written text as a Number or a sympy object; raise if that is impossible."""
    match = PATTERN.PLAIN.fullmatch(text)
    if match:
        power = int(match[3] or match[4] or 0)
        whole, point, decimals = re.sub("[, ]", "", match[2] or "1").partition(".")
        value = Fraction(f"{match[1]}{whole}{point}{decimals}e{power}")
        place = Fraction(10) ** (power - len(decimals)) if decimals else 0
        # A power of ten says as much about rounding as two digits do.
        return Number(value, place, len((whole + decimals).lstrip("0")) + 2 * (power != 0))
    # Not math-verify's `parse`, which takes A for a. The worker's alarm bounds its time.
    return latex2sympy(text, None, not should_treat_as_complex(text), False, SPELLING, CASED)


def value_of(tree: object) -> Number | None:
    """Compute an expression's value: exact if it is rational, else 30 digits; None if not real."""
    if isinstance(tree, Number):
        return tree
    rough = tree.evalf(30) if isinstance(tree, sympy.Expr) else sympy.nan
    # Before computing exactly, refuse more than 10,000 digits before or after the point.
    if not rough.is_Number or not rough.is_finite or re.search(r"e[-+]\d{5}", str(rough)):
        return None
    exact = tree.doit()
    if exact.is_Rational:
        return Number(Fraction(int(exact.p), int(exact.q)))
    value = Fraction(str(rough))
    return Number(value, abs(value) / 10 ** (0 if tree.has(sympy.Float) else 25))


def values_equal(gold: object, answer: object) -> bool:
    """Tell whether two expressions are equal: by their values, if real, else by math-verify."""
    left, right = split_equation(gold, answer, is_gold=True)
    answer_left, answer_right = split_equation(answer, gold)
    if left == answer_left or "" in (left, answer_left):
        gold, answer = right, answer_right
    if gold is None or answer is None:
        return False
    forms = getattr(answer, "_unsorted_args", [])  # 15\frac{39}{40}, or \frac{639}{40}
    if len(forms) > 1 and not isinstance(gold, sympy.Set | sympy.Tuple):
        return all(values_equal(gold, form) for form in forms)
    number, answer_number = value_of(gold), value_of(answer)
    if number or answer_number:
        return bool(number and answer_number) and digits_agree(number, answer_number)
    gold, answer = as_other_kind(gold, answer), as_other_kind(answer, gold)
    # 12 decimals must agree, also in lists; the default is 6.
    return verify(gold, answer, 12, allow_set_relation_comp=True, timeout_seconds=None)


def split_equation(tree: object, other: object, is_gold: bool = False) -> tuple[object, object]:
    """Split an equation: x = 3 and x = 6/2 = 3 give x and 3. Any other tree gives "" and itself.

    2x = 6 and ln x = 3 name no value: their right side is None, unless `other` is an equation. Of a
    reference, 2x - 3y = 6 is the answer, too; only a left side that is a name can be left out.
    """
    if not is_equation(tree):
        return "", tree
    left = take_first_relation(tree).lhs
    unsolved = len(left.free_symbols) == 1 or (is_gold and tree.free_symbols)
    if unsolved and not is_name(left) and not is_equation(other):
        return left, None
    return left, take_last_relation(tree).rhs


def is_name(left: sympy.Basic) -> bool:
    r"""Tell whether a left side only names values: x, f(x), dy/dx, AB, |AB|, \angle ABC, (x, y)."""
    if isinstance(left, sympy.Tuple):
        return all(map(is_name, left))
    if isinstance(left, sympy.Symbol | sympy.core.function.AppliedUndef | sympy.Derivative):
        return True
    points = [str(symbol) for symbol in left.free_symbols]
    is_product = isinstance(left, sympy.Mul | sympy.Abs)
    return is_product and all(re.fullmatch(r"[A-Z]\w*'*|angle|m", name) for name in points)


def as_other_kind(tree: object, other: object) -> object:
    """Fit a tree to the other: a list or column as a pair, x before y; x < 2 or x > 3 a union."""
    if isinstance(tree, sympy.MatrixBase) and tree.cols == 1 and isinstance(other, sympy.Tuple):
        return sympy.Tuple(*tree)
    parts = getattr(tree, "_unsorted_args", []) if isinstance(tree, sympy.FiniteSet) else []
    if parts and isinstance(other, sympy.Interval | sympy.Tuple):
        pairs = [split_equation(part, other, is_gold=True) for part in parts]
        pairs.sort(key=lambda pair: str(pair[0]))
        tree = sympy.Tuple(*[right for _, right in pairs])
    if parts and isinstance(other, sympy.Union) and all(hasattr(part, "as_set") for part in parts):
        tree = sympy.Union(*[part.as_set() for part in parts])
    return tree.doit() if isinstance(tree, sympy.Set | sympy.Tuple) else tree
