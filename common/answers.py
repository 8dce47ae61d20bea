"""Which text of a response is its answer, how it is written, and whether it equals the reference.

`correct(response, reference)` is what training, evaluation and the labs ask. Texts, numbers and
units are compared here; what remains is an expression, which math-verify reads. Three rules guard
against paying a wrong answer: only what is named last counts, different units differ, and no
tolerance is wider than the digits that were written.

The parts: 1. which text is the answer, 2. how it is written, 3. the comparison.
"""

import json
import re
import unicodedata
from collections import namedtuple
from fractions import Fraction
from pathlib import Path

import sympy
from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, parse
from math_verify.grader import is_equation, take_first_relation, take_last_relation, verify

LONGEST = 1000  # characters: a longer answer is none, which bounds all work on it

# 1. Which text is the answer

# A box and its brace, or what a box without braces holds
BOX = r"\\(?:boxed|fbox|framebox)(?![A-Za-z])\s*(\{|[-+(\[]?(?:[\d.\\]|[A-Za-z]\b)[^\s$]*|)"
# "Answer: ", "the final answer is ", "#### "
LABEL = r"(?i:(answer|option|答案)[^\n.\d]{,40}?(\bis\b|[是为:：=\n])|####)[*_:：\s]*(?=[^*_:：\s])"
# To its end, or to the end of a displayed formula
SENTENCE = re.compile(r"(?:\\\[.*?\\\]|\$\$.*?\$\$|[^\n])*?(?=\s*(?:\n|\Z)|\.\s|。)", re.DOTALL)
# Words are what separates the formulas of a sentence.
WORD = r"(?<![\\{A-Za-z])(?!(?:or|and)\b)(?:[^\W\d_]{2,}|I\b|A(?= [a-z]))"
PAUSE = rf"(?:\(?{WORD}|[.:;!?](?:\s|$))+"
NAMES_ONE = re.compile(r"\d|^\(?[A-J]\)?$")  # a number, or the letter of an option


def final_answer(response: str) -> str:
    """The text that a response names last as its answer, as `written`; "" if it names none.

    In this order: the last box, what stands in an <answer> tag, what follows "answer is", the last
    number. A thought, <think>...</think>, names nothing, and if it is never closed neither does the
    response.
    """
    said = response.rpartition("</think>")[2]
    answer = "" if "<think>" in said else marked(said)
    if answer is None:
        lines = [spoken(line, -1) for line in said[-LONGEST:].split("\n")]
        answer = ([line for line in lines if NAMES_ONE.search(line)] or [said])[-1]
    return written(answer) if len(answer) <= LONGEST else ""


def marked(text: str) -> str | None:
    """What the last box, <answer> tag or label of a text names; None without any."""
    _, tag, text = text.rpartition("<answer>")
    answer = last_box(text)
    if answer is None and tag:
        answer = spoken(text.partition("</answer>")[0], -1)
    text = text[-LONGEST:] if answer is None else written(answer[-LONGEST:])
    labels = list(re.finditer(LABEL, text))
    if labels:
        return spoken(SENTENCE.match(text, labels[-1].end())[0], 0)
    return answer


def last_box(text: str) -> str | None:
    """The content of the last box that has any; "" if it never closes, None without a box."""
    for box in reversed(list(re.finditer(BOX, text))):
        content = box[1]
        if content == "{":
            depth = 1
            for brace in re.compile(r"\\[\\{}]|[{}]").finditer(text, box.end()):
                depth += {"{": 1, "}": -1}.get(brace[0], 0)
                if depth == 0:
                    content = text[box.end() : brace.start()]
                    break
            else:
                return ""
        if content.strip() and written(content[:LONGEST]) not in ("", "?", r"\ldots"):
            return content
    return None


def spoken(text: str, place: int) -> str:
    """A text without words as it is; of another the first (0) or last (-1) part between words that
    has a number."""
    text = written(text)
    if not re.search(WORD, quantity(text)[0]):
        return text
    parts = [written(part) for part in re.split(PAUSE, text)]
    return ([part for part in parts if NAMES_ONE.search(part)] or [text])[place]


# 2. How it is written

TABLES = json.loads(Path(__file__).with_name("symbols.json").read_text())
SYMBOLS, UNIT_OF = str.maketrans(TABLES["symbols"]), TABLES["units"]
SPELLINGS = [  # (what is replaced, by what), in this order
    # 10⁻⁸, which is 10^{-}^{8} by now
    (r"(?<=(\^|_)\{[-+\dnx])\}\1\{(?=[-+\dnx]\})", ""),
    # The rows of a system are a list; & only aligns them.
    (r"[,;.\s]*\\\\(?=.*\\end\{(?:cases|array|aligned|gathered)\})", ", "),
    (r"\\(?:begin|end)\{(?:cases|array|aligned|gathered)\}(?:\{[lcr| ]*\})?", ""),
    (r"\s*,?\s*&?\s*=\s*&?", " = "),
    (r"\\left\\\{(?=.*\\right\.)|\\right\.|\\!|\\(?:bf|rm|it)(?![A-Za-z])", ""),
    (r"(?<!\\)\\[,;: ]|~|\\q?quad(?![A-Za-z])", " "),
    # One $ before a number is a currency; the others stand around formulas.
    (r"^([^$]*)(?<!\\)\$(\s*[\d.][^$]*)$", r"\1\\$\2"),
    (r"(?<!\\)(?:\$|\\[()\[\]])", " "),
    (r"\\(?:text|mbox|math)(?:rm|bf|it|sf)?\s*\{([^{}]*)\}", r" \1 "),
    (r"\\varnothing", r"\\emptyset"),
    # Markdown, quotes and punctuation at the edges
    (r"^[\s*_`'\",;:=]+|[\s*_`\".,;:\\]+$", ""),
    (r"(?:\\(?:l|c|v|d)?dots[a-z]?(?![A-Za-z])|\.\.\.+)\s*", r"\\ldots "),
    (r"\^\s*\{?\s*\\circ\s*\}?\s*|(?<=\d)\s*\b(?:deg|degrees?)\b\s*", r"^\\circ "),
    (r"(?:\\?%|\b(?:percent(?:age)?|pct)\b)\s*", r"\\% "),
    (r"(?<![\\A-Za-z])(sqrt|log|ln|sin|cos|tan)(?![A-Za-z])", r"\\\1 "),
    (r"\\sqrt\s*(\[\d\])?\s*(?:\(([^()]*)\)|(\d+))", r"\\sqrt\1{\2\3}"),
    # 2e4, which would be Euler's e; 3 and 1/2; 3 1/2
    (r"(?<![\w.\\])(\d+\.?\d*|\.\d+)[eE]([-+]?\d+)(?![\d.])", r"\1 \\times 10^{\2}"),
    (r"(?<![\d/}])(\d+)\s+and\s+(?=\d+/|\\[dt]?frac)", r"\1 "),
    (r"(?<![\d/}])(\d+)\s+(\d+)/(\d+)(?![\d.])", r"\1\\frac{\2}{\3}"),
    # 3.14...; about 3; \sqrt{2} \approx 1.4
    (r"^(\d*\.\d+)\s*\\ldots\s*$|^\s*(?:about|约|\\?approx\w*)|(?<=[\d}])\s*\\approx.*$", r"\1"),
    # $5 as 5 $
    (r"^\s*([-+]?)\s*(?:US\s*)?(\\\$|[¢-¥₠-₿]|USD|Rs\b)\.?\s*([-+]?[\d.\\].*)$", r"\1\3 \2"),
]


def written(text: str) -> str:
    """A text in one spelling: LaTeX in ASCII, without marks at its edges, its value unchanged."""
    text = unicodedata.normalize("NFKC", text.translate(SYMBOLS)).translate(SYMBOLS)
    text = " ".join(text.split())
    for pattern, new in SPELLINGS:
        text = re.sub(pattern, new, text, flags=re.DOTALL)
    return text.strip()


# Known names, with or without a space; after a space a letter (5 m) or a word with a vowel
KNOWN = "|".join(name for name in UNIT_OF if name.isascii() and len(name) > 1)
A_NOUN = rf"(?!(?:{TABLES['no units']})\b)(?=[a-z]*[aeiou])[a-z]{{3,}}"
A_WORD = rf"(?i:(?:{KNOWN})s?|(?<=[\s/])(?:(?-i:[mgshLNJWVAKC])|{A_NOUN}))(?![A-Za-z])"
A_SIGN = r"\^\\circ\s*[CF]?|\\[%$]|(?![百万亿]|千(?![米克瓦]))[^\x00-\x7f]+"
A_UNIT = rf"(?:{A_SIGN}|{A_WORD})(?:\s*\^\s*\{{?-?\d\}}?)?"
UNIT = re.compile(rf"(?<=[\d}})\s.])\s*({A_UNIT}(?:\s*(?:/|\\cdot|\s)\s*{A_UNIT})*|_\{{?\d+\}}?)$")


def quantity(text: str) -> tuple[str, str]:
    """Value and unit of a written text; ("...", "") without a unit.

    A unit is a currency, a percent or degree sign, the base of a numeral, or words behind a value:
    known names, any word of three letters after a space, any word that is not in ASCII. A variable
    (5x, 5 n) is none.
    """
    found = UNIT.search(text)
    if not found or not re.search(r"\d|\\|^[A-Za-z]\s*$", text[: found.start()]):
        return text, ""
    unit = re.sub(r"(?:\bsq(?:uare)?\s+|平方)([^\W\d_]+)", r"\1^2", found[1].lower())
    unit = re.sub(r"(?<=[a-z]{2})s\b", "", unit)
    unit = re.sub(r"[^\W\d_]+", lambda word: UNIT_OF.get(word[0], word[0]), unit)
    return text[: found.start()].strip(), re.sub(r"[{}\s]|\\cdot", "", unit)


# 3. The comparison

# A value, the place of its last decimal (0 without decimals), and how many digits were written
Number = namedtuple("Number", "value place digits", defaults=(0, 0))
# 1,234.5 and 1.6 \times 10^{-19}
DECIMAL = r"[1-9]\d{0,2}(?:[, ]\d{3})+(?:\.\d*)?|\d+\.?\d*|\.\d+"
POWER = r"10\s*\^\s*\{?([-+]?\d{1,4})\}?"
PLAIN = re.compile(rf"([-+]?)\s*(?:({DECIMAL})(?:\s*(?:\\times|\\cdot|[*x])\s*{POWER})?|{POWER})")
OPTION = re.compile(r"(?i:option )?\(?([A-J])(?:\)|[.:]\s|$)(?!.*\b[A-J]\b).*")  # (C), C. five
# Compared as texts only: words, times, ratios of three, derivatives, what dots stand for
TEXT_ONLY = r"[^\W\d_]{3,}([ '-]+[^\W\d_]+)*|\d+:\d\d|.*:.*:.*|.*'|.*([^\x00-\x7f]|\\ldots).*"
SPELLING = NormalizationConfig(malformed_operators=True, nits=True, boxed="none")
LATEX = LatexExtractionConfig(normalization_config=SPELLING)
POINTS = [Fraction(n, 7) for n in (2, 9, -5, 11, 16, -3, -8, 19, 25, -12, 6, 30, -20)]


def correct(response: str, reference: str) -> bool:
    """Whether a response's final answer equals the reference, which may be marked like one."""
    answer = final_answer(response)
    gold = marked(reference)
    return bool(answer) and equal(written(reference if gold is None else gold), answer)


def equal(gold: str, answer: str) -> bool:
    """Whether two written texts are equal: as texts, numbers with units, or expressions."""
    if as_text(gold) == as_text(answer):
        return True
    value, unit = quantity(gold)
    answer_value, answer_unit = quantity(answer)
    if unit or answer_unit:
        share = rf"\frac{{{value}}}{{100}}" if unit == r"\%" else value  # 50% is 50, and 0.5
        answer_share = rf"\frac{{{answer_value}}}{{100}}" if answer_unit == r"\%" else answer_value
        differ = unit and answer_unit and unit != answer_unit
        return not differ and (equal(value, answer_value) or equal(share, answer_share))
    if re.fullmatch(TEXT_ONLY, gold) or re.fullmatch(TEXT_ONLY, answer):
        return False
    number, answer_number = number_of(gold), number_of(answer)
    if number and answer_number:
        return close(number, answer_number)
    return same(expression_of(gold), expression_of(answer))


def as_text(text: str) -> str:
    """The letter of an option; of another text all but its spaces and the case of its letters."""
    option = OPTION.fullmatch(text)
    return option[1] if option else re.sub(r"(?<!\d) | (?!\d)", "", text.lower())


def number_of(text: str) -> Number | None:
    """The number that a written text is; None of anything else."""
    found = PLAIN.fullmatch(text)
    if not found:
        return value_of(expression_of(text))
    power = int(found[3] or found[4] or 0)
    whole, point, decimals = re.sub("[, ]", "", found[2] or "1").partition(".")
    value = Fraction(f"{found[1]}{whole}{point}{decimals}e{power}")
    place = Fraction(10) ** (power - len(decimals)) if decimals else 0
    # A power of ten tells as much of rounding as two digits do.
    return Number(value, place, len((whole + decimals).lstrip("0")) + 2 * (power != 0))


def close(gold: Number, answer: Number) -> bool:
    """Equal, or equal in the digits of the less exact one, with a relative error of at most 1e-6.

    Only the reference may be coarser: with five digits, or with three if the answer is no finite
    decimal.
    """
    gap = abs(gold.value - answer.value)
    below = answer.value.denominator
    # A decimal ends if its denominator divides a power of ten. Of an irrational value no digits
    # were written.
    endless = pow(10, below.bit_length(), below) != 0 or (answer.place and not answer.digits)
    if gold.digits >= (3 if endless else 5) and answer.place < gold.place:
        return 2 * gap <= gold.place
    return gap == 0 or (gap < max(gold.place, answer.place) and gap * 10**6 <= abs(gold.value))


def expression_of(text: str) -> object:
    """math-verify's reading of a written text, a sympy object; None if it cannot read it."""
    # No time-out of its own: the worker's alarm bounds it.
    found = parse(f"${text}$", [LATEX], fallback_mode="no_fallback", parsing_timeout=None)
    if not found:
        return None
    # Small numbers as fractions, for math-verify compares six decimals.
    small = [number for number in found[0].atoms(sympy.Float) if abs(number) < 0.01]
    return found[0].xreplace({number: sympy.Rational(str(number)) for number in small})


def value_of(tree: object) -> Number | None:
    """The value of an expression: exact if it is rational, else 30 digits; None if not real."""
    rough = tree.evalf(30) if isinstance(tree, sympy.Expr) else sympy.nan
    # Before anything is computed exactly: at most 10,000 digits before or behind the point
    if not rough.is_Number or not rough.is_finite or re.search(r"e[-+]\d{5}", str(rough)):
        return None
    exact = tree.doit()
    if exact.is_Rational:
        return Number(Fraction(int(exact.p), int(exact.q)))
    value = Fraction(str(rough))
    return Number(value, abs(value) / 10 ** (0 if tree.has(sympy.Float) else 25))


def same(gold: object, answer: object) -> bool:
    """Whether two expressions are equal: by their values at some points, else by math-verify."""
    (left, right), (answer_left, answer_right) = sides(gold, answer), sides(answer, gold)
    if left == answer_left or "" in (left, answer_left):
        gold, answer = right, answer_right
    if gold is None or answer is None:
        return False
    pairs = values(gold, answer)
    if len(pairs) > 1:
        return all(None not in pair and close(*pair) for pair in pairs)
    gold, answer = fitted(gold, answer), fitted(answer, gold)
    return verify(gold, answer, allow_set_relation_comp=True, timeout_seconds=None)


def sides(tree: object, other: object) -> tuple[object, object]:
    """x and 3 of x = 3 and of x = 6/2 = 3; "" and the tree if it is no equation; 2x and None of
    2x = 6, which names no value, if the other is no equation."""
    if not is_equation(tree):
        return "", tree
    left = take_first_relation(tree).lhs
    unsolved = len(left.free_symbols) == 1 and left.atoms(sympy.Integer)
    return left, None if unsolved and not is_equation(other) else take_last_relation(tree).rhs


def values(gold: object, answer: object) -> list[list[Number | None]]:
    """The values of two expressions at points where one is real, and no root is of a negative."""
    if not isinstance(gold, sympy.Expr) or not isinstance(answer, sympy.Expr):
        return []
    symbols = sorted(gold.free_symbols | answer.free_symbols, key=str)
    powers = gold.atoms(sympy.Pow) | answer.atoms(sympy.Pow)
    radicands = [power.base for power in powers if not power.exp.is_integer]
    pairs = []
    for k in range(6):
        point = dict(zip(symbols, POINTS[k:]))
        if not any(radicand.subs(point).is_negative for radicand in radicands):
            pairs.append([value_of(tree.subs(point)) for tree in (gold, answer)])
    return [pair for pair in pairs if pair != [None, None]]


def fitted(tree: object, other: object) -> object:
    """A list as a pair if the other is one, x before y; x < 2 or x > 3 as a union if it is one."""
    parts = getattr(tree, "_unsorted_args", []) if isinstance(tree, sympy.FiniteSet) else []
    if parts and isinstance(other, sympy.Interval | sympy.Tuple):
        pairs = sorted([sides(part, other) for part in parts], key=lambda pair: str(pair[0]))
        tree = sympy.Tuple(*[right for _, right in pairs])
    if parts and isinstance(other, sympy.Union) and all(hasattr(part, "as_set") for part in parts):
        tree = sympy.Union(*[part.as_set() for part in parts])
    return tree.doit() if isinstance(tree, sympy.Set | sympy.Tuple) else tree
