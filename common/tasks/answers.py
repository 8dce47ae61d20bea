"""Which text of a response is its final answer, in one spelling. Whether it is right: equality.py.

No rule, here or in equality.py, may turn a wrong answer into a right one.
"""

import json
import re
import tomllib
import unicodedata
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace

LONGEST = 1000  # characters; longer answers are rejected, so that grading takes bounded time
TABLES = json.loads(Path(__file__).with_name("symbols.json").read_text("utf-8"))
GRAMMAR = tomllib.loads(Path(__file__).with_name("patterns.toml").read_text("utf-8"))
CATEGORY = {code: unicodedata.category(chr(code)) for code in range(2**16)}  # of Unicode
INVISIBLE = {code: None for code, kind in CATEGORY.items() if kind == "Cf"}
DASHES = {code: "-" for code, kind in CATEGORY.items() if kind == "Pd"}
SYMBOLS = str.maketrans(TABLES["symbols"]) | INVISIBLE | DASHES
NAMES, FACTORS = TABLES["names"], TABLES["factors"]
UNIT_OF = {word: unit for unit, words in TABLES["units"].items() for word in words.split()}
CONTEXT = 150  # characters before and after a box, which show whether it is alone
PATTERN = SimpleNamespace(UNITS=re.compile("|".join(map(re.escape, UNIT_OF))))  # patterns.toml


def filled(pattern: str) -> re.Pattern:
    """Compile a pattern, with the patterns that it names as <<NAME>>."""
    pattern = re.sub("<<([A-Z_]+)>>", lambda name: getattr(PATTERN, name[1]).pattern, pattern)
    return re.compile(pattern, re.DOTALL)


for name, pattern in GRAMMAR["patterns"].items():
    setattr(PATTERN, name, filled(pattern))
BOX_PLACE = PATTERN.BOX_PLACE.pattern
THOUGHTS = []  # the tags that open and close one
for opening, closing in GRAMMAR["thoughts"]["KNOWN"] + GRAMMAR["thoughts"]["BY_NAME"]:
    THOUGHTS.append((re.compile(opening, re.IGNORECASE), re.compile(closing, re.IGNORECASE)))
OPENING = "|".join(opening.pattern for opening, _ in THOUGHTS)
SPELLINGS = [(filled(pattern), new) for pattern, new in GRAMMAR["rules"]["SPELLINGS"]]
EDGES = [(filled(pattern), new) for pattern, new in GRAMMAR["rules"]["EDGES"]]
TAG = "|".join([OPENING, *[closing.pattern for _, closing in THOUGHTS], PATTERN.OTHER_TAGS.pattern])


@lru_cache(1)  # a worker calls it twice for each response
def final_answer(response: str) -> str:
    """Return, `in_one_spelling`, what a response gives last as its answer; "" if it gives none.

    It looks for the last box, an <answer> tag, text after "answer is", and the last number, in this
    order, in what follows the last thought. A thought that never closes leaves no answer.
    """
    text = after_thoughts(response.translate(INVISIBLE))
    text = re.sub(r"<\|begin_of_box\|>(.*?)<\|end_of_box\|>", r"\\boxed{\1}", text)
    answer = marked_answer(text)
    if answer is None:
        answer = last_number(text[-LONGEST:]) or text
    return in_one_spelling(answer) if len(answer) <= LONGEST else ""


def after_thoughts(text: str) -> str:
    """Return what follows the last thought; "" if a thought never closes."""
    end = 0
    for opening, closing in THOUGHTS:
        closed = max((tag.end() for tag in closing.finditer(text)), default=0)
        if opening.search(text, closed):
            return ""
        end = max(end, closed)
    return text[end:]


def marked_answer(text: str) -> str | None:
    """Return what the last box, <answer> tag or label of a text holds; None if it has no mark."""
    tags = list(PATTERN.ANSWER_TAG.finditer(text))
    text = text[tags[-1].end() :] if tags else text
    answer, rest = last_box(text)
    if answer is None and tags:
        answer = text.partition("</")[0]
    if answer is None:
        return labelled(text[-LONGEST:])
    later = labelled(rest[-LONGEST:]) if PATTERN.LATER_LABEL.search(rest) else ""
    later_answer = in_one_spelling(later or "")
    if PATTERN.HAS_NUMBER_OR_OPTION.search(later_answer) and not PATTERN.WORD.match(later_answer):
        return later_answer
    inside = labelled(in_one_spelling(answer[-LONGEST:]))
    return answer if inside is None else inside


def labelled(text: str) -> str | None:
    """Return the answer behind the last label of a text; None if it has no label."""
    labels = list(PATTERN.LABEL.finditer(text))
    if not labels:
        return None
    sentence = PATTERN.SENTENCE.match(text, labels[-1].end())[0]
    sentence = re.sub(r"(?<=[\w*])!+[\s*_]*$", "", sentence)  # outside of $...$ no factorial
    return PATTERN.REASON.split(spelled(sentence))[0]


def last_box(text: str) -> tuple[str | None, str]:
    """Return the content of the last box, or of several that are joined, and the text behind it.

    The content is "" if the box is empty, never closes or is a part of a larger expression. It is
    None if there is no box, or only an empty one that a sentence mentions.
    """
    boxes = list(PATTERN.BOX.finditer(text))
    while boxes:
        box = boxes.pop()
        content, end = content_of(box)
        if content is None:
            return "", ""
        if content.strip() and in_one_spelling(content[:LONGEST]) not in ("", "?", r"\ldots"):
            joined, start = with_earlier(content, box, boxes)
            before = text[max(0, start - CONTEXT) : start]
            if not is_alone(content, before, text[end : end + CONTEXT]):
                return "", ""
            return joined, text[end:]
        before = text[max(0, box.start() - CONTEXT) : box.start()]
        if box[1] and not PATTERN.BOX_MENTIONED.search(before):
            return "", ""
    return None, ""


def with_earlier(content: str, box: re.Match, boxes: list[re.Match]) -> tuple[str, int]:
    r"""Return a box's content, and before it those of earlier boxes that are joined to it, with the
    name before the first, as in x = \boxed{6} or x = \boxed{7}; and where the first box begins."""
    text, start, parts, joined = box.string, box.start(), {content}, content
    for earlier in reversed(boxes):
        part, end = content_of(earlier)
        between = text[end:start]
        if not in_one_spelling(part or "") or not PATTERN.JOINED.fullmatch(between):
            break
        parts.add(part)
        start, joined = earlier.start(), part + between + joined
    if len(parts) == 1:
        return content, start
    name = PATTERN.NAMED_AT_END.search(text[max(0, start - CONTEXT) : start])
    return (name[0] if name else "") + joined, start


def content_of(box: re.Match) -> tuple[str | None, int]:
    """Return what is in a box, None if it never closes, and where the box ends."""
    if box[1] != "{":
        return box[1], box.end()
    depth = 1
    for brace in re.compile(r"\\[\\{}]|[{}]").finditer(box.string, box.end()):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return box.string[box.end() : brace.start()], brace.end()
    return None, box.end()


def is_alone(content: str, before: str, after: str) -> bool:
    r"""Tell whether a box is an expression of its own, as in `x = \boxed{5}`, or a part of a larger
    one, as in `-\boxed{5}`, from the texts before and after it."""
    if re.search(r"(?<!\\)\\$", before):
        before = before[:-1]  # some write \\boxed
    if re.fullmatch(r"\([A-J]\)", in_one_spelling(content[:LONGEST])):
        after = ""  # what an option says
    around = before + BOX_PLACE + after
    around = PATTERN.DISPLAY.sub(lambda shown: shown[0].replace("\n", " "), around)
    line = next(line for line in around.split("\n") if BOX_PLACE in line)
    if PATTERN.BOX_OF_ANOTHER_VALUE.search(line):
        return False
    line = PATTERN.BOX_EDGES_OF_FORMULAS.sub(" ; ", PATTERN.BOX_DASH_OR_BULLET.sub(r"\1", line))
    part = next(part for part in PATTERN.BETWEEN.split(f" {spelled(line)} ") if BOX_PLACE in part)
    part = " ".join(part.split()).strip(" ,'\"*_`#").rstrip(".:;").removesuffix(" -")
    same = in_one_spelling(content[:LONGEST])  # "2 + 3 = 5 \boxed{5}" repeats it
    head, _, tail = part.partition(BOX_PLACE)
    head = "" if head.strip("{}, ") in ("", same) else head
    return bool(PATTERN.BOX_ALONE.fullmatch(head + BOX_PLACE + tail))


def last_number(text: str) -> str:
    """Return the last part between words that has a number or an option, or "". Only the last 20
    lines that may have one are read."""
    lines = [line for line in text.split("\n") if PATTERN.HAS_NUMBER_OR_OPTION.search(line)]
    for line in reversed(lines[-20:]):
        line = PATTERN.NEGATED.sub("", spelled(line))
        parts = PATTERN.CLAUSE_END.split(line) if PATTERN.WORD_OR_HASH.search(line) else [line]
        named = [part for part in parts if PATTERN.HAS_NUMBER_OR_OPTION.search(part)]
        if named:
            return named[-1]
    return ""


def fraction(number: re.Match) -> str:
    """Write a repeating decimal as a fraction: 0.1(6) is 15/90."""
    whole, decimals, *cycle = [digits or "" for digits in number.groups()]
    cycle = "".join(cycle)
    above = int(whole + decimals + cycle) - int(whole + decimals)
    return rf"\frac{{{above}}}{{{10 ** len(decimals) * (10 ** len(cycle) - 1)}}}"


REWRITERS = {
    "NAMES": lambda name: NAMES.get(name[0], name[0]),  # pi, as \pi
    "FACTORS": lambda word: FACTORS.get(word[0].strip().lower(), word[0]),  # 5 million
    "FRACTION": fraction,
}


def rewritten(text: str, rules: list) -> str:
    """Apply rules, each a pattern and its replacement, in their order."""
    for pattern, new in rules:
        text = pattern.sub(REWRITERS.get(new, new), text)
    return text


def spelled(text: str) -> str:
    """Rewrite a text in one spelling, LaTeX in ASCII, of equal value."""
    if re.search(r"\\\\[A-Za-z]{2}", text) and not re.search(r"(?<!\\)(?:\\\\)*\\(?!\\)", text):
        text = text.replace("\\\\", "\\")  # each backslash was written twice
    text = unicodedata.normalize("NFKC", text.translate(SYMBOLS)).translate(SYMBOLS)
    text = re.sub(r"\d", lambda digit: str(int(digit[0])), text)  # of any script
    return rewritten(" ".join(text.split()), SPELLINGS)


@lru_cache(16)  # one answer is asked for several times
def in_one_spelling(text: str) -> str:
    """Rewrite an answer in one spelling, without what stands at its edges."""
    return rewritten(spelled(text), EDGES).strip()
