"""Which text of a response is its answer, how it is written, and whether it equals the reference.

`correct(response, reference)` is what training, evaluation and the labs ask. Exact texts, numbers,
units and collections are compared here; what then remains is an expression, which math-verify
reads. Three rules guard against paying a wrong answer: only what is named last counts, different
units differ, and no tolerance is wider than the digits that were written.

1. Which text is the answer. 2. How it is written. 3. The comparison.
"""

import re
import unicodedata
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

LONGEST = 2000  # characters: a longer answer is none, which bounds all work on it

# 1. Which text is the answer

TAG = re.compile(r"<answer>((?:(?!<answer>).)*?)(?:</answer>|\Z)", re.DOTALL)
BOX = re.compile(r"\\+(?:boxed|fbox|framebox)(?![A-Za-z])\s*")
BARE = re.compile(r"[(\[]?[-+]?(?:[\d.\\]|[A-Za-z]\b)[^\s$]*")  # a box without braces
BETWEEN = re.compile(r"[\s$\\()\[\]]*(?:,|;|\bor\b|\band\b|或|和|、)[\s$\\()\[\]]*")
LABEL = re.compile(
    r"(?:(?:answer|option|choice)[^\n.\d]{0,40}?(?:\bis\b|[:=：]|\n)"
    r"|答案[^\n\d]{0,9}?[是为:：]|####)[*_:：\s]*",
    re.IGNORECASE,
)
SENTENCE = re.compile(r"(?:\\\[.*?\\\]|\$\$.*?\$\$|[^\n])*?(?=\s*(?:\n|\Z)|\.\s|。)", re.DOTALL)
WORD = re.compile(r"(?<![\\{A-Za-z])(?!(?:or|and)\b)(?:[^\W\d_]{2,}|I\b)")
PAUSE = re.compile(rf"(?:{WORD.pattern}|[.:;!?](?:\s|$))+")


def final_answer(response: str) -> str:
    """The text that a response names last as its answer, as `written`; "" if it names none.

    In this order: the last box, what stands between <answer> tags, what follows "answer is", the
    last number. A thought, <think>...</think>, names nothing; nor does a response that never
    closes it.
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
    tags = [tag for tag in TAG.finditer(text) if written(tag[1][:LONGEST])]
    if tags:
        text = text[tags[-1].start(1) :]
    box = last_box(text)
    if box is not None:
        return LABEL.sub("", box, count=1) if LABEL.match(written(box)) else box
    if tags:
        text = tags[-1][1]
    text = text[-LONGEST:]
    for label in reversed(list(LABEL.finditer(text))):
        sentence = written(SENTENCE.match(text, label.end())[0])
        if sentence:
            return plain_parts(sentence, r"\d|^\(?[A-J]\)?$")[0]
    return last_number(text) if tags else None


def last_box(text: str) -> str | None:
    """The content of the last box that has any; "" if it never closes, None without a box.

    Boxes joined by a comma, "or", "and" are one list, which does not earn for one of its members.
    """
    content, start_of_later = None, len(text)
    for box in reversed(list(BOX.finditer(text))):
        start = box.end()
        if text.startswith("{", start):
            end = closing_brace(text, start)
            if end < 0:
                return content or ""
            inside = text[start + 1 : end - 1]
        else:
            bare_text = BARE.match(text, start)
            end = bare_text.end() if bare_text else start
            inside = text[start:end]
        if content and not BETWEEN.fullmatch(text, end, start_of_later):
            break
        if written(inside[:LONGEST]):
            content = f"{inside}, {content}" if content else inside
            start_of_later = box.start()
    return content


def closing_brace(text: str, start: int) -> int:
    """The place behind the brace that closes the one at `start`, or -1."""
    depth = 0
    for brace in re.compile(r"\\\\|\\[{}]|[{}]").finditer(text, start):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return brace.end()
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
    value, _ = quantity(text)
    if not WORD.search(value):
        return [text]
    parts = map(written, PAUSE.split(text))
    return [part for part in parts if re.search(needs, part)] or [text]


# 2. How it is written

SIGNS = {
    "√": r"\sqrt ", "∛": r"\sqrt[3] ", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": "/",
    "−": "-", "–": "-", "—": "-", "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ",
    "≈": r"\approx ", "±": r"\pm ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ",
    "°": r"^\circ ", "º": r"^\circ ", "…": r"\ldots ", "⁄": "/", "、": ",", "。": ".", "٫": ".",
}  # fmt: skip
FUNCTIONS = "sqrt|sin|cos|tan|cot|sec|csc|log|ln|arcsin|arccos|arctan|pi"
SPELLINGS = [
    # marks around formulas, and what only moves ink
    (r"\\left\\\{(.*)\\right\.", r"\1"),
    (r"\\(?:left|right|[bB]igg?[lr]?|displaystyle|limits)(?![A-Za-z])|\\!", ""),
    (r"(?<!\\)\\[,;: ]|~|\\q?quad(?![A-Za-z])|\s", " "),
    (r"(?<!\\)(?:\$|\\[()\[\]])", " "),
    (r"\\(?:text|mbox|math|operatorname)(?:rm|bf|it|sf)?\s*\{([^{}]*)\}", r" \1 "),
    # one spelling of each sign
    (r"\\[dtc]frac", r"\\frac"),
    (r"\\leq(?:slant)?(?![A-Za-z])|<=", r"\\le "),
    (r"\\geq(?:slant)?(?![A-Za-z])|>=", r"\\ge "),
    (r"\\neq(?![A-Za-z])|!=", r"\\ne "),
    (r"\\lt(?![A-Za-z])", "<"),
    (r"\\gt(?![A-Za-z])", ">"),
    (r"\\varnothing", r"\\emptyset"),
    (r"\\(?:l|c|v|d)?dots[a-z]?(?![A-Za-z])|\.\.\.+", r"\\ldots "),
    (r"\{\s*([,:])\s*\}", r"\1"),
    (r"\^\s*\{?\s*\\circ\s*\}?|\\degree(?![A-Za-z])", r"^\\circ "),
    (r"\\?%|\b(?:percent(?:age)?|pct)\b", r"\\% "),
    (rf"(?<![\\A-Za-z])({FUNCTIONS})(?![A-Za-z])", r"\\\1"),
    (r"\\sqrt\s*(\[\d+\])?\s*(?:\(([^()]*)\)|(\d+))", r"\\sqrt\1{\2\3}"),
    (r"(?<=[\w)}])\*\*(?=[\w({])", "^"),
    # numbers
    (r"(?<![\w.\\])(\d+\.?\d*|\.\d+)[eE]([-+]?\d+)(?![\d.])", r"\1 \\times 10^{\2}"),
    (r"(\d)\s*(?:x|\*|\\times|\\cdot)\s*10\s*\^", r"\1 \\times 10^"),
    (r"\^\s*([-+]?\d+)", r"^{\1}"),
    (r"^(\d*\.\d+)\s*\\ldots\s*$", r"\1"),
    (r",?\s*(?:\\forall|\bfor (?:all|any|every))\b.*$|^\\forall\s*\w+\s*,", ""),
]
SPELLINGS = [(re.compile(pattern), as_written) for pattern, as_written in SPELLINGS]
ROWS = re.compile(
    r"\\begin\{(cases|array|aligned|align\*?|gathered|split)\}(?:\{[lcr| ]*\})?(.*?)\\end\{\1\}",
    re.DOTALL,
)
@lru_cache(1000)
def written(text: str) -> str:
    """A text in one spelling: LaTeX in ASCII, without marks at its edges, its value unchanged."""
    if not text.isascii():
        text = in_latex(text)
    if len(re.findall(r"(?<!\\)\$", text)) % 2:  # no pair of marks: a currency
        text = re.sub(r"(?<!\\)\$", r"\\$", text)
    text = ROWS.sub(equations, text)
    for pattern, as_written in SPELLINGS:
        text = pattern.sub(as_written, text)
    before = None
    while text != before:
        before = text
        text = re.sub(r"^[\s*_`,;:=]+|(?:[\s*_`.,;:]|\\\\)+$", "", text)
        text = re.sub(r"""^(["'])(.*)\1$|^\{([^{}]*)\}$""", r"\2\3", text)
    return re.sub(r" +", " ", text)


def in_latex(text: str) -> str:
    """Unicode's signs, powers, indices, fractions, Greek letters and digits in LaTeX."""
    out = ""
    for sign in text:
        form = unicodedata.decomposition(sign).partition(" ")[0]
        plain = "".join(SIGNS.get(part, part) for part in unicodedata.normalize("NFKC", sign))
        name = unicodedata.name(sign, "").split()
        if sign in SIGNS:
            plain = SIGNS[sign]
        elif form in ("<super>", "<sub>"):
            mark = "^{" if form == "<super>" else "_{"
            plain = mark + plain + "}"
        elif form == "<fraction>":
            plain = r"\frac{" + plain.replace("/", "}{") + "}"
        elif name[:1] == ["GREEK"] and name[2:3] == ["LETTER"] and len(name) == 4:
            letter = name[3].lower()
            plain = "\\" + (letter.capitalize() if name[1] == "CAPITAL" else letter) + " "
        elif sign.isdigit():
            plain = str(unicodedata.digit(sign))
        out += plain
    return out.replace("}^{", "").replace("}_{", "")


def equations(match: re.Match) -> str:
    """The rows of an environment as a list, if each is an equation or an inequality."""
    body = re.sub(r"&\s*=|=\s*&", "=", match[2])
    rows = [row.strip(" \n&,") for row in body.split("\\\\") if row.strip()]
    if any("&" in row or not re.search(r"[=<>]|\\[lg]e", row) for row in rows):
        return match[0]
    return ", ".join(rows).replace(", =", " =")


UNITS = r"""m meter metre 米|cm centimeter centimetre 厘米|mm millimeter millimetre 毫米
|km kilometer kilometre 千米 公里|ft foot feet 英尺|in inch inche 英寸|yd yard|mi mile 英里
|g gram 克|kg kilogram 千克 公斤|lb lbs pound 磅|oz ounce|L l liter litre 升|mL ml milliliter 毫升
|s sec second 秒|min minute 分钟|h hr hour 小时|^\circ deg degree 度|\$ usd dollar 美元|¢ cent 美分
|€ eur euro 欧元|¥ cny rmb yuan 元|unit 单位|am|pm|st|nd|rd|th|N|J|W|V|A|K|Hz|kJ|kW|mol|mph|kph"""
UNIT_OF = {name: row.split()[0] for row in UNITS.split("|") for name in row.split()}
NO_UNITS = "or and to than more less mod not if when base hundred thousand million billion dozen"
ONE_UNIT = r"(?:\^\\circ\s*[CF]?\b|\\[%$]|[¢-¥₠-₿]|[^\W\d_]+)(?:\s*\^\s*\{?-?\d\}?)?"
UNIT = re.compile(
    rf"(?<=[\d}})\s.])\s*({ONE_UNIT}(?:(?:\s*(?:/|\\cdot)\s*|\s+){ONE_UNIT})*|_\{{?\d+\}}?)$"
)
CURRENCY = re.compile(r"([-+]?)\s*(?:US|USD)?\s*(\\\$|[¢-¥₠-₿])\s*([-+]?[\d.\\].*)")


@lru_cache(1000)
def quantity(text: str) -> tuple[str, str]:
    """Value and unit of a written text, the unit in one spelling; ("...", "") without a unit.

    A unit is a currency, a percent or degree sign, the base of a numeral, or words behind a value:
    known names, any word of three letters after a space, or any word that is not in ASCII. A
    variable (5x, 5 n) is none.
    """
    found = CURRENCY.fullmatch(text)
    if found:
        return found[1] + found[3], UNIT_OF[found[2]] if found[2] in UNIT_OF else found[2]
    found = UNIT.search(text)
    if not found or not re.search(r"\d|\\|^[A-Za-z]$", text[: found.start()]):
        return text, ""
    spaced = text[: found.start(1)].endswith(" ")
    words = re.findall(r"(?<![\\A-Za-z])[A-Za-z]+", found[1].replace(r"\circ", ""))
    for word in words:
        known = word in UNIT_OF and (spaced or len(word) > 1)
        named = spaced and re.search("[aeiou]", word) and len(word) > 2 and word not in NO_UNITS
        if not known and not named and "^\\circ" not in found[1]:
            return text, ""
    unit = re.sub(r"(?:\bsq(?:uare)?\s+|平方)([^\W\d_]+)", r"\1^2", found[1])
    unit = re.sub(r"(?:\bcu(?:bic)?\s+|立方)([^\W\d_]+)", r"\1^3", unit)
    unit = re.sub(r"[^\W\d_]+", unit_name, unit).replace("per", "/").replace(r"\cdot", "")
    return text[: found.start()].strip(), re.sub(r"[{}\s]", "", unit)


def unit_name(word: re.Match) -> str:
    """cm for cm, centimeter and centimetres."""
    singular = word[0].lower().removesuffix("s") if len(word[0]) > 3 else word[0]
    return UNIT_OF.get(word[0]) or UNIT_OF.get(singular, singular)


# 3. The comparison


def correct(response: str, reference: str) -> bool:
    """Whether a response's final answer equals the reference, which may be marked like one."""
    answer = final_answer(response)
    gold = marked(reference)
    gold = written(reference if gold is None else gold)
    return bool(answer) and equal(gold, answer)


NAME = r"(?:[A-Za-z][A-Za-z ]*|\\[A-Za-z]+)\s*(?:_\s*(?:\w|\{\w+\}))?\s*'*(?:\([\w, ]*\))?"
RELATION = re.compile(r"\s*(<|>|\\le(?![a-z])|\\ge(?![a-z]))\s*")


def equal(gold: str, answer: str) -> bool:
    """Whether two written texts are equal: as texts, numbers, collections or expressions."""
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
        if gold_unit != unit and r"\%" in (gold_unit, unit):
            share = rf"\frac{{{gold_value}}}{{100}}" if gold_unit else gold_value
            shared = rf"\frac{{{value}}}{{100}}" if unit else value
            return equal(gold_value, value) or equal(share, shared)
        return equal(gold_value, value)
    numbers = number(gold), number(answer)
    if None not in numbers:
        return close(*numbers)
    return equal_items(gold, answer)


def same_text(text: str) -> str:
    """A written text without spaces, but those between digits, and its words in small letters."""
    text = re.sub(r"(?<![\\A-Za-z])[A-Za-z]{3,}", lambda word: word[0].lower(), text)
    return re.sub(r"(?<!\d) | (?!\d)", "", text)


def choice(text: str) -> str:
    """C for "C", "(C)", "(C) 5" and "C. five"; else "", also if another letter follows."""
    found = re.fullmatch(r"\(?([A-J])\)?|(?:\(([A-J])\)|([A-J])[.):](?=\s))(?!.*\b[A-J]\b).*", text)
    return found[1] or found[2] or found[3] if found else ""


# Numbers


class Number(NamedTuple):
    """An exact value; `place` is that of its last decimal (0: none was cut off)."""

    value: Fraction
    place: Fraction = Fraction(0)
    digits: int = 0  # as written, of a decimal
    scientific: bool = False


DECIMAL = r"(?:[1-9]\d{0,2}(?:[, ]\d{3})+|\d+)(?:\.\d*)?|\.\d+"
POWER = r"10\^\{([-+]?\d{1,4})\}"
PLAIN = re.compile(rf"([-+]?)\s*(?:({DECIMAL})(?:\s*\\times\s*{POWER})?|{POWER})")
PART = rf"\s*(?:(\d)|\{{\s*([-+]?(?:{DECIMAL}))\s*\}})"
MIXED = re.compile(rf"([-+]?)\s*(?:(\d+)\s*(?:and\s*)?)?\\frac{PART}{PART}")


def number(text: str) -> Number | None:
    """The number that a written text is: a decimal, 1.6 \\times 10^{-19}, a fraction, 3 1/2."""
    found = PLAIN.fullmatch(text)
    if found:
        digits = re.sub("[, ]", "", found[2] or "1")
        power = int(found[3] or found[4] or 0)
        decimals = len(digits.partition(".")[2])
        place = Fraction(10) ** (power - decimals) if decimals else Fraction(0)
        value = Fraction(digits.rstrip(".")) * Fraction(10) ** power
        count = len(digits.replace(".", "").lstrip("0")) if decimals else 0
        return Number(-value if found[1] == "-" else value, place, count, power != 0)
    found = MIXED.fullmatch(re.sub(r"(\d+)\s*/\s*(-?\d+)$", r"\\frac{\1}{\2}", text))
    if not found:
        return None
    above = Fraction(re.sub("[, ]", "", found[3] or found[4]))
    below = Fraction(re.sub("[, ]", "", found[5] or found[6]))
    if below == 0 or (found[2] and not 0 < above < below):
        return None
    value = int(found[2] or 0) + above / below
    return Number(-value if found[1] == "-" else value)


def close(gold: Number, answer: Number) -> bool:
    """Equal, or one is the other's rounding to its last decimal, and differs by at most 1e-6.

    A coarser rounding is right only in the reference, of three digits or more, and only if it is
    known to be one: it has a power of ten or five digits, or the answer is no finite decimal.
    """
    gap = abs(gold.value - answer.value)
    endless = pow(10, answer.value.denominator.bit_length(), answer.value.denominator) != 0
    rounded = gold.scientific or gold.digits >= 5 or endless
    if rounded and gold.digits >= 3 and answer.place < gold.place:
        return 2 * gap <= gold.place
    return gap == 0 or (gap < max(gold.place, answer.place) and 10**6 * gap <= abs(gold.value))


# Collections


def equal_items(gold: str, answer: str) -> bool:
    """Compares lists, sets, tuples, intervals, matrices and unions item by item."""
    if bool(RELATION.search(gold)) != bool(RELATION.search(answer)):
        gold, answer = interval(gold), interval(answer)
    gold = re.sub(rf"^{NAME}\s*\\in(?![a-z])\s*", "", gold)
    answer = re.sub(rf"^{NAME}\s*\\in(?![a-z])\s*", "", answer)
    gold_kind, golds = items(gold)
    kind, answers = items(answer)
    if len(golds) != len(answers):
        return False
    if len(golds) == 1:
        changed = [golds[0], answers[0]] != [gold, answer]
        return equal(golds[0], answers[0]) if changed else equal_sides(gold, answer)
    if {gold_kind, kind} == {"()", ""}:  # (3, 4) and x=3, y=4
        return all(map(equal, in_order(golds), in_order(answers)))
    if gold_kind == kind and kind[:1] in ("(", "[", "m"):
        return all(map(equal, golds, answers))
    unordered = ("or",) if gold_kind == "or" else ("", "{}")
    return gold_kind in unordered and kind in unordered and equal_sets(golds, answers)


def items(text: str) -> tuple[str, list[str]]:
    """The kind of a collection, which is its brackets, and its items; one item if it is none."""
    matrix = re.fullmatch(r"\\begin\{[pbB]?matrix\}(.*)\\end\{[pbB]?matrix\}", text)
    if matrix:
        return f"m{matrix[1].count('&')}", re.split(r"&|\\\\", matrix[1])
    separator = r"\\cup(?![a-z])|[;；]|\b(?:or|and)\b|,(?!\d{3}(?!\d))|(?<!\d),"
    parts = split(text, separator)
    if len(parts) > 1:
        union = r"\cup" in text or ("or" in text and RELATION.search(text))
        return "or" if union else "", parts
    if text.count(r"\pm") == 1:
        return "", [text.replace(r"\pm", "+"), text.replace(r"\pm", "-")]
    opening = re.match(r"[(\[]|\\\{", text)
    closing = re.search(r"[)\]]$|\\\}$", text)
    if opening and closing and len(split(text + ",", "(?<=[)}\\]]),")) == 1 and closes_last(text):
        inside = split(text[opening.end() : closing.start()], "[,;]")
        kind = (opening[0] + closing[0]).replace("\\", "")
        return (kind, inside) if len(inside) > 1 else ("", inside)
    return "", [text]


def closes_last(text: str) -> bool:
    """Whether the first bracket closes at the end."""
    depth = 0
    for token in re.finditer(r"[()\[\]{}]", text):
        depth += 1 if token[0] in "([{" else -1
        if depth == 0:
            return token.end() == len(text)
    return False


def split(text: str, separator: str) -> list[str]:
    """The parts of a text between separators that stand outside all brackets."""
    parts, depth, begin = [], 0, 0
    for token in re.finditer(rf"[()\[\]{{}}]|{separator}", text):
        if token[0] in "([{":
            depth += 1
        elif token[0] in ")]}":
            depth -= 1
        elif depth == 0:
            parts.append(text[begin : token.start()])
            begin = token.end()
    parts.append(text[begin:])
    return [part for part in map(written, parts) if part]


def in_order(parts: list[str]) -> list[str]:
    """Equations by the names on their left, x before y; anything else as it stands."""
    return sorted(parts) if all("=" in part for part in parts) else parts


def equal_sets(golds: list[str], answers: list[str]) -> bool:
    """Whether each item of one list equals another one of the other."""
    left = list(answers)
    for gold in golds:
        found = next((answer for answer in left if equal(gold, answer)), None)
        if found is None:
            return False
        left.remove(found)
    return True


def interval(text: str) -> str:
    """0 < x \\le 2 as (0, 2], and x > 3 as (3, \\infty)."""
    parts = RELATION.split(text)
    if {">", r"\ge"} & set(parts):
        turned = {">": "<", r"\ge": r"\le"}
        parts = [turned.get(part, part) for part in reversed(parts)]
    if len(parts) == 3 and re.fullmatch(NAME, parts[0]):
        parts = [r"-\infty", "<"] + parts
    elif len(parts) == 3:
        parts = parts + ["<", r"\infty"]
    if len(parts) != 5 or not re.fullmatch(NAME, parts[2]):
        return text
    left = "(" if parts[1] == "<" else "["
    right = ")" if parts[3] == "<" else "]"
    return f"{left}{parts[0]}, {parts[4]}{right}"


# Equations and expressions


def equal_sides(gold: str, answer: str) -> bool:
    """x = 3 for 3, and 1+2 = 3 for 1+2; between equations and expressions math-verify decides."""
    gold_name, gold_side = gold.split("=")[0], gold.split("=")[-1]
    name, side = answer.split("=")[0], answer.split("=")[-1]
    if "=" in gold and "=" in answer:
        if same_text(gold_name) == same_text(name):
            return equal(written(gold_side), written(side))
    elif "=" in gold:
        return bool(re.fullmatch(NAME, gold_name.strip())) and equal(written(gold_side), answer)
    elif "=" in answer:
        letters = set(re.findall(r"\\[A-Za-z]+|[A-Za-z]", name))
        solved = re.fullmatch(NAME, name.strip()) or (len(letters) != 1 and side.strip() != "0")
        return bool(solved) and equal(gold, written(side))
    words = r"[^\W\d_]{3,}(?:[ '-]+[^\W\d_]+)*|.*[^\x00-\x7f].*|\d+:\d\d(?::\d\d)?"
    if re.fullmatch(words, gold) or re.fullmatch(words, answer):
        return False
    return equal_expressions(gold, answer)


@lru_cache(100)
def parsed(text: str) -> object:
    """math-verify's reading of a written text as a sympy object, or None."""
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse

    spelling = NormalizationConfig(units=False, malformed_operators=True, nits=True, boxed="none")
    config = LatexExtractionConfig(normalization_config=spelling)
    # No time-out of its own: the worker's alarm bounds it.
    found = parse(f"${text}$", [config], fallback_mode="no_fallback", parsing_timeout=None)
    return found[0] if found else None


def equal_expressions(gold_text: str, answer_text: str) -> bool:
    """By value at some points, where that decides; else by math-verify."""
    from math_verify import verify
    from sympy import Expr, Rational

    gold, answer = parsed(gold_text), parsed(answer_text)
    if gold is None or answer is None:
        return False
    if isinstance(gold, Expr) and isinstance(answer, Expr):
        symbols = sorted(gold.free_symbols | answer.free_symbols, key=str)
        agreed = 0
        for k in range(8 if symbols else 1):
            point = {}
            for place, symbol in enumerate(symbols):
                point[symbol] = Rational((-1) ** k * (97 * k + 31 * place + 11), 29 + place)
            numbers = value(gold.subs(point)), value(answer.subs(point))
            if numbers == (None, None):
                continue
            if None in numbers or not close(*numbers):
                return False
            agreed += 1
        if agreed >= (3 if symbols else 1):
            return True
    return verify(gold, answer, timeout_seconds=None)


def value(expression: object) -> Number | None:
    """A sympy expression's value: exact if it is rational, else 30 digits; None if it has none."""
    from sympy import Float, Rational

    exact = expression.xreplace({one: Rational(str(one)) for one in expression.atoms(Float)})
    rough = exact.evalf(30)
    if not rough.is_Number or not rough.is_finite:
        return None
    if rough != 0 and abs(rough._mpf_[2] + rough._mpf_[3]) > 10**5:
        return None
    exact = exact.doit()
    if exact.is_Rational:
        return Number(Fraction(int(exact.p), int(exact.q)))
    return Number(Fraction(str(rough)), abs(Fraction(str(rough))) / 10**25)
