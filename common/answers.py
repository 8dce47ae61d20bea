"""Which text of a response is its answer, how it is written, and whether it equals the reference.

`correct(response, reference)` is what training, evaluation and the labs ask. Texts, numbers and
units are compared here; what remains is an expression, which math-verify reads. Three rules guard
against paying a wrong answer: only what is named last counts, different units differ, and no
tolerance is wider than the digits that were written.

The parts: 1. which text is the answer, 2. how it is written, 3. the comparison.
"""

import re
import unicodedata
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

LONGEST = 2000  # characters: a longer answer is none, which bounds all work on it

# 1. Which text is the answer

BOX = re.compile(r"\\+(?:boxed|fbox|framebox)(?![A-Za-z])\s*")
BARE = re.compile(r"[-+(\[]?(?:[\d.\\]|[A-Za-z]\b)[^\s$]*|")  # of a box without braces
TAG = re.compile(r"<answer>((?:(?!<answer>).)*?)(?:</answer>|\Z)", re.DOTALL)
LABEL = re.compile(
    r"(?:(?:answer|option|choice)[^\n.\d]{0,40}?(?:\bis\b|[:=：]|\n)|答案[^\n\d]{0,9}?[是为:：]|####)"
    r"[*_:：\s]*",
    re.IGNORECASE,
)
SENTENCE = re.compile(r"(?:\\\[.*?\\\]|\$\$.*?\$\$|[^\n])*?(?=\s*(?:\n|\Z)|\.\s|。)", re.DOTALL)
WORD = re.compile(r"(?<![\\{A-Za-z])(?!(?:or|and)\b)(?:[^\W\d_]{2,}|I\b)")
PAUSE = re.compile(rf"(?:{WORD.pattern}|[.:;!?](?:\s|$))+")


def final_answer(response: str) -> str:
    """The text that a response names last as its answer, as `written`; "" if it names none.

    In this order: the last box, what stands between <answer> tags, what follows "answer is", the
    last number. A thought, <think>...</think>, names nothing, and if it is never closed neither
    does the response.
    """
    said = re.split(r"</think(?:ing)?>", response)[-1]
    if re.search(r"<think(?:ing)?>", said):
        return ""
    answer = marked(said)
    if answer is None:
        answer = last_number(said[-LONGEST:])
    return written(answer) if len(answer) <= LONGEST else ""


def marked(text: str) -> str | None:
    """What the last box, <answer> tag or label of a text names; None without any."""
    tags = [tag for tag in TAG.finditer(text) if tag[1].strip()]
    if tags:
        text = text[tags[-1].start(1) :]
    answer = last_box(text)
    if answer is None and tags:
        answer = tags[-1][1]
    inside = (text if answer is None else answer)[-LONGEST:]
    for label in reversed(list(LABEL.finditer(inside))):
        sentence = written(SENTENCE.match(inside, label.end())[0])
        if sentence:
            return plain_parts(sentence, r"\d|^\(?[A-J]\)?$")[0]
    return answer


def last_box(text: str) -> str | None:
    """The content of the last box that has any; "" if it never closes, None without a box."""
    for box in reversed(list(BOX.finditer(text))):
        content = BARE.match(text, box.end())[0]
        if text.startswith("{", box.end()):
            end = closing_brace(text, box.end())
            if end < 0:
                return ""
            content = text[box.end() + 1 : end]
        if written(content[:LONGEST]):
            return content
    return None


def closing_brace(text: str, start: int) -> int:
    """The place of the brace that closes the one at `start`, or -1."""
    depth = 0
    for brace in re.compile(r"\\\\|\\[{}]|[{}]").finditer(text, start):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return brace.start()
    return -1


def last_number(text: str) -> str:
    """The last part of a text between its words that has a number; without any, the text."""
    for line in reversed(text.split("\n")):
        line = written(line)
        parts = plain_parts(line, r"\d|^\([A-J]\)$")
        if line and (parts != [line] or not WORD.search(line)):
            return parts[-1]
    return text


def plain_parts(text: str, needs: str) -> list[str]:
    """A text without words as it is; of another the parts between its words that match `needs`."""
    if not WORD.search(quantity(text)[0]):
        return [text]
    parts = map(written, PAUSE.split(text))
    return [part for part in parts if re.search(needs, part)] or [text]


# 2. How it is written

SIGNS = {
    "√": r"\sqrt ", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": "/", "⁄": "/", "−": "-",
    "–": "-", "—": "-", "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "≈": r"\approx ",
    "±": r"\pm ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ", "°": r"^\circ ",
    "º": r"^\circ ", "…": r"\ldots ", "、": ",", "。": ".", "٫": ".",
}  # fmt: skip
FORMS = {"<super>": "^{%s}", "<sub>": "_{%s}", "<fraction>": r"\frac{%s}"}
ROWS = re.compile(
    r"\\begin\{(cases|array|aligned|align\*?|gathered)\}(?:\{[lcr| ]*\})?(.*?)\\end\{\1\}",
    re.DOTALL,
)
SPELLINGS = [
    (r"\\left\\\{(.*)\\right\.", r"\1"),
    (r"\\(?:left|right|displaystyle)(?![A-Za-z])|\\!", ""),
    (r"(?<!\\)\\[,;: ]|~|\\q?quad(?![A-Za-z])|\s", " "),
    (r"(?<!\\)(?:\$|\\[()\[\]])", " "),  # marks around formulas
    (r"\\(?:text|mbox|math|operatorname)(?:rm|bf|it|sf)?\s*\{([^{}]*)\}", r" \1 "),
    (r"\\[dtc]frac", r"\\frac"),
    (r"\\varnothing", r"\\emptyset"),
    (r"\\(?:l|c|v|d)?dots[a-z]?(?![A-Za-z])|\.\.\.+", r"\\ldots "),
    (r"\{\s*([,:])\s*\}", r"\1"),
    (r"\^\s*\{?\s*\\circ\s*\}?|\\degree(?![A-Za-z])", r"^\\circ "),
    (r"\\?%|\b(?:percent(?:age)?|pct)\b", r"\\% "),
    (r"(?<![\\A-Za-z])(sqrt|pi|ln|log|sin|cos|tan)(?![A-Za-z])", r"\\\1"),
    (r"\\sqrt\s*(?:\(([^()]*)\)|(\d+))", r"\\sqrt{\1\2}"),
    (r"(?<=[\w)}])\*\*(?=[\w({])", "^"),
    (r"(?<![\w.\\])(\d+\.?\d*|\.\d+)[eE]([-+]?\d+)(?![\d.])", r"\1 \\times 10^{\2}"),
    (r"(\d)\s*(?:x|\*|\\cdot)\s*10\s*\^", r"\1 \\times 10^"),
    (r"(?<![\d/}])(\d+)\s+(?:and\s+)?(\d+)/(\d+)$", r"\1\\frac{\2}{\3}"),  # 3 1/2
    (r"(?<![\d/}])(\d+)\s+and\s+\\frac", r"\1\\frac"),
    (r"^(\d*\.\d+)\s*\\ldots\s*$", r"\1"),
    (r",?\s*(?:\\forall|\bfor (?:all|any|every))\b.*$|^\\forall\s*\w+\s*,", ""),
    (r"^\s*(?:about|approximately|roughly|约|\\approx)|(?<=\d|\})\s*\\approx.*$", ""),
]
SPELLINGS = [(re.compile(pattern, re.DOTALL), new) for pattern, new in SPELLINGS]


@lru_cache(1000)
def written(text: str) -> str:
    """A text in one spelling: LaTeX in ASCII, without marks at its edges, its value unchanged."""
    text = "".join(map(in_latex, text)).replace("}^{", "").replace("}_{", "")
    if len(re.findall(r"(?<!\\)\$", text)) % 2:  # no pair of marks: a currency
        text = re.sub(r"(?<!\\)\$", r"\\$", text)
    text = ROWS.sub(equations, text)
    for pattern, new in SPELLINGS:
        text = pattern.sub(new, text)
    before = None
    while text != before:
        before = text
        text = re.sub(r"^[\s*_`,;:=]+|(?:[\s*_`.,;:]|\\\\)+$", "", text)
        text = re.sub(r"""^(["'])(.*)\1$|^\{([^{}]*)\}$""", r"\2\3", text)
    return re.sub(r" +", " ", text)


def in_latex(sign: str) -> str:
    """A Unicode sign, power, index, fraction, Greek letter or digit in LaTeX."""
    if sign.isascii():
        return sign
    form = FORMS.get(unicodedata.decomposition(sign).partition(" ")[0], "%s")
    letter = re.fullmatch("GREEK (SMALL|CAPITAL) LETTER ([A-Z]+)", unicodedata.name(sign, ""))
    if letter:
        name = letter[2].lower() if letter[1] == "SMALL" else letter[2].capitalize()
        return f"\\{name} "
    if sign.isdecimal():
        return str(unicodedata.decimal(sign))
    plain = sign if sign in SIGNS else unicodedata.normalize("NFKC", sign)
    plain = "".join(SIGNS.get(part, part) for part in plain)
    return form % (plain.replace("/", "}{") if "frac" in form else plain)


def equations(match: re.Match) -> str:
    """The rows of an environment as a list, if each is an equation or an inequality."""
    body = re.sub(r"&\s*=|=\s*&", "=", match[2])
    rows = [row.strip(" \n&,") for row in body.split("\\\\") if row.strip()]
    if any("&" in row or not re.search(r"[=<>]|\\[lg]e", row) for row in rows):
        return match[0]
    return ", ".join(rows).replace(", =", " =")


UNITS = r"""m meter metre 米|cm centimeter centimetre 厘米|mm millimeter millimetre 毫米
|km kilometer kilometre 千米 公里|ft foot feet|in inch inche|yd yard|mi mile|g gram 克
|kg kilogram 千克 公斤|lb lbs pound|oz ounce|L l liter litre 升|mL ml milliliter 毫升
|s sec second 秒|min minute 分钟|h hr hour 小时|^\circ deg degree 度|\$ usd dollar 美元|¢ cent 美分
|€ eur euro 欧元|¥ cny rmb yuan 元|unit 单位|am|pm|st|nd|rd|th|N|J|W|V|A|K|Hz|kJ|kW|mol|mph|kph"""
UNIT_OF = {name: row.split()[0] for row in UNITS.split("|") for name in row.split()}
PERCENT = r"\%"
NO_UNITS = "or and to than more less mod not if when base hundred thousand million billion dozen"
ONE_UNIT = r"(?:\^\\circ\s*[CF]?\b|\\[%$]|[¢-¥₠-₿]|[^\W\d_]+)(?:\s*\^\s*\{?-?\d\}?)?"
UNIT = re.compile(
    rf"(?<=[\d}})\s.])\s*({ONE_UNIT}(?:(?:\s*(?:/|\\cdot)\s*|\s+){ONE_UNIT})*|_\{{?\d+\}}?)$"
)
CURRENCY = re.compile(r"([-+]?)\s*(?:US)?\s*(\\\$|[¢-¥₠-₿])\s*([-+]?[\d.\\].*)")


@lru_cache(1000)
def quantity(text: str) -> tuple[str, str]:
    """Value and unit of a written text, the unit in one spelling; ("...", "") without a unit.

    A unit is a currency, a percent or degree sign, the base of a numeral, or words behind a value:
    known names, any word of three letters after a space, any word that is not in ASCII. A variable
    (5x, 5 n) is none.
    """
    found = CURRENCY.fullmatch(text)
    if found:
        return found[1] + found[3], UNIT_OF.get(found[2], found[2])
    found = UNIT.search(text)
    if not found or not re.search(r"\d|\\|^[A-Za-z]$", text[: found.start()]):
        return text, ""
    spaced = text[: found.start(1)].endswith(" ")
    for word in re.findall(r"(?<![\\A-Za-z])[A-Za-z]+", found[1]):
        known = word in UNIT_OF and (spaced or len(word) > 1)
        named = spaced and re.search("[aeiou]", word) and len(word) > 2 and word not in NO_UNITS
        if not known and not named and r"\circ" not in found[1]:
            return text, ""
    unit = re.sub(r"(?:\bsq(?:uare)?\s+|平方)([^\W\d_]+)", r"\1^2", found[1])
    unit = re.sub(r"(?:\bcu(?:bic)?\s+|立方)([^\W\d_]+)", r"\1^3", unit)
    unit = re.sub(r"[^\W\d_]+", lambda word: unit_name(word[0]), unit)
    return text[: found.start()].strip(), re.sub(r"[{}\s]|\\cdot", "", unit)


def unit_name(word: str) -> str:
    """cm for cm, centimeter and centimetres."""
    singular = word.lower().removesuffix("s") if len(word) > 3 else word
    return UNIT_OF.get(word) or UNIT_OF.get(singular, singular)


# 3. The comparison


class Number(NamedTuple):
    """A value; `place` is that of its last digit, 0 of an exact one; `digits` are a decimal's."""

    value: Fraction
    place: Fraction = Fraction(0)
    digits: int = 0
    scientific: bool = False


DECIMAL = r"[1-9]\d{0,2}(?:[, ]\d{3})+(?:\.\d*)?|\d+\.?\d*|\.\d+"
POWER = r"10\s*\^\s*\{?([-+]?\d{1,4})\}?"
PLAIN = re.compile(rf"([-+]?)\s*(?:({DECIMAL})(?:\s*\\times\s*{POWER})?|{POWER})")
NO_EXPRESSION = re.compile(  # words, times, anything not in ASCII
    r"[^\W\d_]{3,}(?:[ '-]+[^\W\d_]+)*|.*[^\x00-\x7f].*|\d+:\d\d(?::\d\d)?"
)


def correct(response: str, reference: str) -> bool:
    """Whether a response's final answer equals the reference, which may be marked like one."""
    answer = final_answer(response)
    gold = marked(reference)
    gold = written(reference if gold is None else gold)
    return bool(answer) and equal(gold, answer)


def equal(gold: str, answer: str) -> bool:
    """Whether two written texts are equal: as texts, numbers with units, or expressions."""
    if same_text(gold) == same_text(answer):
        return True
    if r"\ldots" in gold + answer:  # what the dots stand for is a guess
        return False
    if re.fullmatch(r"\(?[A-J]\)?", gold) or re.fullmatch(r"\(?[A-J]\)?", answer):
        return choice(gold) == choice(answer)
    gold_value, gold_unit = quantity(gold)
    value, unit = quantity(answer)
    if gold_unit and unit and gold_unit != unit:
        return False
    if gold_unit or unit:
        if equal(gold_value, value) or PERCENT not in (gold_unit, unit) or gold_unit == unit:
            return equal(gold_value, value)
        return equal(share(gold_value, gold_unit), share(value, unit))  # 50% is 50, and 0.5
    gold_number, answer_number = number(gold), number(answer)
    if gold_number and answer_number:
        return close(gold_number, answer_number)
    if NO_EXPRESSION.fullmatch(gold) or NO_EXPRESSION.fullmatch(answer):
        return False
    return same(gold_number or parsed(gold), answer_number or parsed(answer))


def same_text(text: str) -> str:
    """A written text without spaces, but those between digits, and its words in small letters."""
    text = re.sub(r"(?<![\\A-Za-z])[A-Za-z]{3,}", lambda word: word[0].lower(), text)
    return re.sub(r"(?<!\d) | (?!\d)", "", text)


def choice(text: str) -> str:
    """C for "C", "(C)", "(C) 5" and "C. five"; else "", also if another letter follows."""
    found = re.fullmatch(r"\(?([A-J])(?:\)|[.:]\s|$)(?!.*\b[A-J]\b).*", text)
    return found[1] if found else ""


def share(value: str, unit: str) -> str:
    """A value in percent as a fraction."""
    return rf"\frac{{{value}}}{{100}}" if unit == PERCENT else value


def number(text: str) -> Number | None:
    """The number that a written text is, such as -1,234.5 or 1.6 \\times 10^{-19}; or None."""
    found = PLAIN.fullmatch(text)
    if not found:
        return None
    digits = re.sub("[, ]", "", found[2] or "1")
    power = int(found[3] or found[4] or 0)
    decimals = len(digits.partition(".")[2])
    value = Fraction(found[1] + digits.rstrip(".")) * Fraction(10) ** power
    if not decimals:
        return Number(value)
    place = Fraction(10) ** (power - decimals)
    return Number(value, place, len(digits.replace(".", "").lstrip("0")), power != 0)


def close(gold: Number, answer: Number) -> bool:
    """Equal, or equal in the digits of the less exact one, with a relative error of at most 1e-6.

    Only the reference may be coarser: with three digits or more, and if it is known to be rounded,
    because it has a power of ten or five digits, or because the answer is no finite decimal.
    """
    gap = abs(gold.value - answer.value)
    below = answer.value.denominator
    endless = pow(10, below.bit_length(), below) != 0
    if gold.digits >= 3 and answer.place < gold.place:
        if gold.scientific or gold.digits >= 5 or endless:
            return 2 * gap <= gold.place
    return gap == 0 or (gap < max(gold.place, answer.place) and gap * 10**6 <= abs(gold.value))


@lru_cache(100)
def parsed(text: str) -> object:
    """math-verify's reading of a written text, a sympy object; None if it cannot read it."""
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse

    spelling = NormalizationConfig(units=False, malformed_operators=True, nits=True, boxed="none")
    config = LatexExtractionConfig(normalization_config=spelling)
    # No time-out of its own: the worker's alarm bounds it.
    found = parse(f"${text}$", [config], fallback_mode="no_fallback", parsing_timeout=None)
    if not found:
        return None
    _, parts = members(found[0])
    if " or " in text and parts and all(part.is_Relational for part in parts):
        return sympy.Union(*[part.as_set() for part in parts])
    return found[0]


def same(gold: object, answer: object) -> bool:
    """Whether two readings (or numbers) are equal: collections item by item, expressions by their
    values, and anything else as math-verify finds."""
    import sympy
    from math_verify import verify

    if gold is None or answer is None:
        return False
    if isinstance(gold, sympy.Eq) and isinstance(answer, sympy.Eq) and gold.lhs == answer.lhs:
        return same(gold.rhs, answer.rhs)
    if isinstance(gold, sympy.Eq) != isinstance(answer, sympy.Eq):
        return same(named(gold), named(answer))
    if isinstance(gold, (Number, sympy.Expr)) and isinstance(answer, (Number, sympy.Expr)):
        agreed = agree(gold, answer)
        if agreed is not None:
            return agreed
    kind, golds = members(gold)
    answer_kind, answers = members(answer)
    if kind and answer_kind:
        return len(golds) == len(answers) and same_members(kind, golds, answer_kind, answers)
    if isinstance(gold, Number) or isinstance(answer, Number):
        return False
    return verify(gold, answer, allow_set_relation_comp=True, timeout_seconds=None)


def named(tree: object) -> object:
    """3 for x = 3, f(2) = 3, m + n = 3 and 1 + 2 = 3; None for 2x = 6 and x^2 = 9."""
    import sympy

    if not isinstance(tree, sympy.Eq):
        return tree
    unsolved = tree.lhs.free_symbols and tree.lhs.atoms(sympy.Integer) and not tree.lhs.is_Function
    return None if unsolved else tree.rhs


OPEN = (True, True)  # (1, 2) is a pair and an open interval


def members(tree: object) -> tuple[object, list]:
    """The kind of a collection and its members; ("", []) of anything else."""
    import sympy

    if isinstance(tree, sympy.Interval):
        return (bool(tree.left_open), bool(tree.right_open)), [tree.start, tree.end]
    if isinstance(tree, sympy.Tuple):
        return OPEN, list(tree.args)
    if isinstance(tree, sympy.FiniteSet):
        return "set", list(getattr(tree, "_unsorted_args", tree.args))
    if isinstance(tree, sympy.MatrixBase):
        return tree.shape, list(tree)
    return "", []


def same_members(kind: object, golds: list, answer_kind: object, answers: list) -> bool:
    """In any order in two sets; x before y where a set names the members of a pair."""
    if kind == answer_kind == "set":
        left = list(answers)
        for gold in golds:
            found = [answer for answer in left if same(gold, answer)]
            if not found:
                return False
            left.remove(found[0])
        return True
    if {kind, answer_kind} == {"set", OPEN}:
        golds = sorted(golds, key=name_of)
        answers = sorted(answers, key=name_of)
    return {kind, answer_kind} in ({kind}, {"set", OPEN}) and all(map(same, golds, answers))


def name_of(tree: object) -> str:
    """x for x = 3, "" for what has no name."""
    return str(getattr(tree, "lhs", ""))


def agree(gold: object, answer: object) -> bool | None:
    """Whether two expressions have equal values at some points; None if they have too few."""
    symbols = getattr(gold, "free_symbols", set()) | getattr(answer, "free_symbols", set())
    symbols = sorted(symbols, key=str)
    agreed = 0
    for k in range(5 if symbols else 1):
        point = {}
        for i, symbol in enumerate(symbols):
            point[symbol] = Fraction((-1) ** (k >> i) * (97 * k + 31 * i + 11), 29 + i)
        value, other = value_at(gold, point), value_at(answer, point)
        if (value is None) != (other is None) or (value and not close(value, other)):
            return False
        agreed += value is not None
    return True if agreed > len(symbols[:2]) else None


def value_at(tree: object, point: dict) -> Number | None:
    """The value of an expression: exact if it is rational, else 30 digits; None if not real."""
    import sympy

    if isinstance(tree, Number):
        return tree
    decimals = {one: sympy.Rational(str(one)) for one in tree.atoms(sympy.Float)}
    exact = tree.xreplace(decimals).subs(point)
    rough = exact.evalf(30)
    if not rough.is_Float and not rough.is_Rational or not rough.is_finite:
        return None
    bits = rough._mpf_[2] + rough._mpf_[3] if rough.is_Float else 0
    if abs(bits) > 10**5:
        return None
    exact = exact.doit()
    if exact.is_Rational:
        return Number(Fraction(int(exact.p), int(exact.q)))
    return Number(Fraction(str(rough)), abs(Fraction(str(rough))) / 10**25)
