"""Which text of a response is its final answer, in one spelling. Whether it is right: equality.py.

No rule, here or in equality.py, may turn a wrong answer into a right one.
"""

import json
import re
import unicodedata
from functools import lru_cache
from pathlib import Path

LONGEST = 1000  # characters; longer answers are rejected, so that grading takes bounded time
TABLES = json.loads(Path(__file__).with_name("symbols.json").read_text("utf-8"))
CATEGORY = {code: unicodedata.category(chr(code)) for code in range(2**16)}  # of Unicode
INVISIBLE = {code: None for code, kind in CATEGORY.items() if kind == "Cf"}
DASHES = {code: "-" for code, kind in CATEGORY.items() if kind == "Pd"}
SYMBOLS = str.maketrans(TABLES["symbols"]) | INVISIBLE | DASHES
NAMES, FACTORS, BOXES = TABLES["names"], TABLES["factors"], TABLES["boxes"]
# The tags that open and close a thought: those of known models, then any whose name says so
THOUGHTS = []
for opening, closing in TABLES["thoughts"] + TABLES["thoughts by name"]:
    THOUGHTS.append((re.compile(opening, re.IGNORECASE), re.compile(closing, re.IGNORECASE)))
OPENING = "|".join(opening.pattern for opening, _ in THOUGHTS)
TAG = "|".join([OPENING, *[closing.pattern for _, closing in THOUGHTS], TABLES["other tags"]])
# A box and its brace, or the content of a box without braces
BOX = r"\\(?:boxed|fbox|framebox)(?![A-Za-z])\s*(\{|[-+(\[]?(?:[\d.\\]|[A-Za-z]\b)[^\s$]*|)"
# <answer>, or a tag of any name around the end of a response
ANSWER_TAG = re.compile(r"<answer>|<([a-z]\w*)>(?=[^<>]*</\1>\s*$)", re.IGNORECASE)
# "Answer: " or "the final answer is " in one clause; "#### 7", but no heading ("#### 3. Total").
NAMED = r"(?<!to )(?:answer|option|答案)(?:[^\n.,;\d]{,40}?(?:\bis\b|[是为:：])|\W{,5}?[=\n])"
LABEL = rf"(?i:{NAMED}|####(?!\s*\**(?:[a-z]{{2}}|\d+[.)] )))[*_:：\s]*(?=[^*_:：\s])"
# Up to the end of the sentence; it does not end inside a displayed formula.
SENTENCE = re.compile(r"(?:\\\[.*?\\\]|\$\$.*?\$\$|[^\n])*?(?=\s*(?:\n|\Z)|\.\s|。)", re.DOTALL)
# After a box, only a label with a colon
LATER_LABEL = re.compile(
    r"(?:[.!?]\s|\n)\W*(?:the\s|final\s)*(?:answer|答案)[*_\s]*[:：]", re.IGNORECASE
)
# Words separate the formulas of a sentence, except for words that belong to a number.
LETTERS = r"(?:[^\x00-\x7f\W\d_](?=[A-J](?![A-Za-z]))"  # 选C
LETTERS += r"|[^\W\d_]+'[^\W\d_]+|[^\W\d_]{2,}|I\b|A(?= [a-z]))"
WORD = rf"(?<![\\{{A-Za-z'])(?!(?:or|and|not|than|least|most)\b){LETTERS}"
# "not A", "can't be 5 or 6", "over B"
OPTION_OR_NUMBER = r"(?:[\d.]+|[A-J]\b)"
NEGATED = r"(?:n't|\b(?:cannot|not|never|nor))(?:\s+[a-z]+){0,2}\s+"
NEGATED = rf"(?:{NEGATED}{OPTION_OR_NUMBER}|\b(?:over|rather than|instead of)\s+[A-J]\b)"
NEGATED += rf"(?:(?:,|\s+or|\s+nor)+\s+{OPTION_OR_NUMBER})*"
CLAUSE_END = rf"(?:\(?{WORD}|#|[.:;!?](?:\s|$))+"
# An answer ends where a reason begins: ", since 5 + 7 = 12".
REASON = (
    rf"[,;:!?]\s+(?={WORD})|(?<!\b(?:in|of|by|at|on))\s\(?(?:because|since|as|so|which|where)\b"
)
CONTEXT = 150  # characters before and after a box, which show whether it is alone
BOX_PLACE = BOXES["here"]  # stands for the box, also in the patterns of symbols.json
DISPLAY = re.compile(r"\\\[.*?\\\]|\$\$.*?\$\$", re.DOTALL)
TEXT_MACROS = r"text\w*|[mh]box|operatorname\*?|math(?:rm|bf|it|sf|tt|cal|up|normal)?"
# Between two boxes that are one list: x = \boxed{6} or x = \boxed{7}
JOINT = r"(?:\\\\|\\?[,;]|[、，]|\\q?quad\b|\b(?:and|or)\b|[和或])"
AROUND_JOINT = r"(?:[\s$~&{}]|\\[()\[\]: ]|\\text|\*\*)"
NAMED_AS = r"[A-Za-z](?:_\{?\w+\}?)?\s*&?=\s*"
JOINED = rf"(?:{AROUND_JOINT}*{JOINT}(?:{AROUND_JOINT}|{JOINT})*|\$?[^\S\n]+\$?)"
JOINED = re.compile(rf"{JOINED}(?:{NAMED_AS})?[$\s]*")
# Words, relations, ends of clauses and what is not ASCII stand between expressions.
BETWEEN = rf"(?:(?!(?:{BOXES['operations']})\b){WORD}|{BOXES['between expressions']})+"
# A number, or the letter of an option.
HAS_NUMBER_OR_OPTION = re.compile(r"[\d²³¹¼-¾⁰-₉⅐-⅞]|(?<![\\A-Za-z])[A-JＡ-Ｊ](?![A-Za-z])")


@lru_cache(1)  # a worker calls it twice for each response
def final_answer(response: str) -> str:
    """Return, `in_one_spelling`, what a response gives last as its answer; "" if it gives none.

    It looks for the last box, an <answer> tag, text after "answer is", and the last number, in this
    order, in what follows the last thought. A thought that never closes leaves no answer.
    """
    said = after_thoughts(response.translate(INVISIBLE))
    said = re.sub(r"<\|begin_of_box\|>(.*?)<\|end_of_box\|>", r"\\boxed{\1}", said)
    answer = marked_answer(said)
    if answer is None:
        answer = last_number(said[-LONGEST:]) or said
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
    tags = list(ANSWER_TAG.finditer(text))
    text = text[tags[-1].end() :] if tags else text
    answer, rest = last_box(text)
    if answer is None and tags:
        answer = text.partition("</")[0]
    if answer is None:
        return labelled(text[-LONGEST:])
    later = LATER_LABEL.search(rest)
    said = labelled(rest[-LONGEST:]) if later else None
    said = in_one_spelling(said or "")
    if HAS_NUMBER_OR_OPTION.search(said) and not re.match(WORD, said):
        return said
    inside = labelled(in_one_spelling(answer[-LONGEST:]))
    return answer if inside is None else inside


def labelled(text: str) -> str | None:
    """Return the answer behind the last label of a text; None if it has no label."""
    labels = list(re.finditer(LABEL, text))
    if not labels:
        return None
    sentence = SENTENCE.match(text, labels[-1].end())[0]
    sentence = re.sub(r"(?<=[\w*])!+[\s*_]*$", "", sentence)  # outside of $...$ no factorial
    return re.split(REASON, spelled(sentence))[0]


def last_box(text: str) -> tuple[str | None, str]:
    """Return the content of the last box, or of several that are joined, and the text behind it.

    The content is "" if the box is empty, never closes or is a part of a larger expression. It is
    None if there is no box, or only an empty one that a sentence mentions.
    """
    boxes = list(re.finditer(BOX, text))
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
        if box[1] and not re.search(BOXES["mentioned"], before):
            return "", ""
    return None, ""


def with_earlier(content: str, box: re.Match, boxes: list[re.Match]) -> tuple[str, int]:
    r"""Return a box's content, and before it those of earlier boxes that are joined to it, with the
    name before the first, as in x = \boxed{6} or x = \boxed{7}; and where the first box begins."""
    text, start, parts, joined = box.string, box.start(), {content}, content
    for earlier in reversed(boxes):
        part, end = content_of(earlier)
        between = text[end:start]
        if not in_one_spelling(part or "") or not JOINED.fullmatch(between):
            break
        parts.add(part)
        start, joined = earlier.start(), part + between + joined
    if len(parts) == 1:
        return content, start
    name = re.search(rf"(?<![A-Za-z\\]){NAMED_AS}[$\s]*$", text[max(0, start - CONTEXT) : start])
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
    around = DISPLAY.sub(lambda shown: shown[0].replace("\n", " "), before + BOX_PLACE + after)
    line = next(line for line in around.split("\n") if BOX_PLACE in line)
    if re.search(BOXES["of another value"], line):
        return False
    if re.fullmatch(r"\([A-J]\)", in_one_spelling(content[:LONGEST])):
        line = line.partition(BOX_PLACE)[0] + BOX_PLACE  # an option, and behind it what it says
    line = re.sub(BOXES["edges of formulas"], " ; ", re.sub(BOXES["dash or bullet"], r"\1", line))
    part = next(part for part in re.split(BETWEEN, f" {spelled(line)} ") if BOX_PLACE in part)
    part = " ".join(part.split()).strip(" ,'\"*_`#").rstrip(".:;").removesuffix(" -")
    same = re.escape(in_one_spelling(content[:LONGEST]))  # "2 + 3 = 5 \boxed{5}" repeats it
    return bool(re.fullmatch(rf"(?:\{{? ?(?:{same})? ?\}}?,? )*{BOXES['alone']}", part))


def last_number(text: str) -> str:
    """Return the last part between words that has a number or an option, or "". Only the last 20
    lines that may have one are read."""
    lines = [line for line in text.split("\n") if HAS_NUMBER_OR_OPTION.search(line)]
    for line in reversed(lines[-20:]):
        line = re.sub(NEGATED, "", spelled(line))
        parts = re.split(CLAUSE_END, line) if re.search(f"{WORD}|#", line) else [line]
        named = [part for part in parts if HAS_NUMBER_OR_OPTION.search(part)]
        if named:
            return named[-1]
    return ""


def fraction(number: re.Match) -> str:
    """Write a repeating decimal as a fraction: 0.1(6) is 15/90."""
    whole, decimals, *cycle = [digits or "" for digits in number.groups()]
    cycle = "".join(cycle)
    above = int(whole + decimals + cycle) - int(whole + decimals)
    return rf"\frac{{{above}}}{{{10 ** len(decimals) * (10 ** len(cycle) - 1)}}}"


SPELLINGS = [  # (pattern, replacement), applied in this order, wherever they match
    # 10⁻⁸, which the steps before this list have turned into 10^{-}^{8}
    (r"(?<=(\^|_)\{[-+\dnx])\}\1\{(?=[-+\dnx]\})", ""),
    # An array in brackets is a matrix. The rows of a system are a list, which & only aligns.
    (r"([(\[|] ?\\begin\{)array\} ?\{[^{}]*\}(.*?\\end\{)array\}", r"\1matrix}\2matrix}"),
    (r"[,;.\s]*\\\\(?=.*\\end\{(?:cases|array|aligned|gathered)\})", ", "),
    (r"\\(?:begin|end)\{(?:cases|array|aligned|gathered)\}(?:\{[lcr| ]*\})?", ""),
    # <= and >= of programs, and != unless it is a factorial and =
    (r"<=(?!>)", r"\\le "),
    (r"(?<!=)>=", r"\\ge "),
    (r"\s!=|(?<![\d)}!])!=", r" \\ne "),
    (r"\s*,?\s*&?\s*={1,2}\s*&?", " = "),
    # 1,\! 000 is one number
    (r",\s*\\!\s*|(?<=\d),?\\_(?=\d{3})", ","),
    (r"\\left\\\{(?=.*\\right\.)|\\right\.|\\!|\\(?:(?:text)?color|hspace)\s*\{[^{}]*\}", ""),
    # A single $ before a number is a currency; others surround formulas.
    (r"^([^$]*)(?<!\\)\$(\s*[\d.][^$]*)$", r"\1\\$\2"),
    (r"(?<!\\)(?:\$|\\[\[\](),;: ])|~|\\q?quad(?![A-Za-z])", " "),
    (r"\\operatorname\*?\s*\{(\w+)\}(?=\s*[({\\\w])", r"\\\1"),
    (rf"\\(?:{TEXT_MACROS})\s*\{{((?:[^{{}}]|\{{[^{{}}]*\}})*)\}}", r" \1 "),
    # pi, as \pi; 5 million, as 5 \times 10^{6}
    (r"\\?[A-Za-z]+|&[lg]t;", lambda name: NAMES.get(name[0], name[0])),
    (r"(?<=[\d}])\s*[A-Za-z]+", lambda word: FACTORS.get(word[0].strip().lower(), word[0])),
    (r"\{([,:])\}", r"\1"),
    (r"(?:\bsq(?:uare)?\.?\s+(?!root)|平方)([^\W\d_]+)", r"\1^2"),
    (r"(?<![-\w])(?:minus|negative)\s+(?=[\d.\\(])", "-"),
    (r"(?a:(?<=[\w)}\]])\*\*(?=[\w({\\-]))", "^"),
    (r"\*\*", ""),
    (r"(?:\\(?:l|c|v|d)?dots[a-z]?(?![A-Za-z])|\.\.\.+)\s*", r"\\ldots "),
    (r"\^\s*\{?\s*\\circ\s*\}?\s*", r"^\\circ "),
    (r"\\?%\s*", r"\\% "),
    (r"\\sqrt\s*(\[\d\])?\s*(?:\(([^()]*)\)|(\d+))", r"\\sqrt\1{\2\3}"),
    # 0.1\overline{6}, 0.1(6) and 0.1\dot6
    (TABLES["repeating decimal"], fraction),
    # 2e4, which would be Euler's e; 3 and 1/2; 3 1/2
    (r"(?<![\w.\\])(\d+\.?\d*|\.\d+)[eE]([-+]?\d+)(?!\.?\d)", r"\1 \\times 10^{\2}"),
    (r"(?<![\d/}])(\d+)\s+and\s+(?=\d+/|\\[dt]?frac)", r"\1 "),
    (r"(?<![\d/}])(\d+)\s+(\d+)/(\d+)(?!\.?\d)", r"\1\\frac{\2}{\3}"),
]
EDGES = [  # of an answer: what may stand before and after it
    # A brace that nothing opens, Markdown, quotes and punctuation, tags of any name
    (r"^([^{}]*)\}[\s.]*$", r"\1"),
    (r"^[\s*_`'\",;:=]+|[\s*_`\".,;:\\]*$", ""),
    (r"^(?:<\|?/?[A-Za-z][\w ]*\|?>\s*)+|(?:\s*<\|?/?[A-Za-z][\w ]*\|?>)+$", ""),
    (r"^\{([^{}]*)\}$", r"\1"),
    # ]0,1[ and [0,1[
    (r"^\]([^\[\]]+)[,;]([^\[\]]+)(?=[\[\]]$)", r"(\1,\2"),
    (r"^([(\[][^\[\]]+)[,;]([^\[\]]+)\[$", r"\1,\2)"),
    # 3.14...; \sqrt{2} \approx 1.4; about 3, option **C
    (r"^(\d*\.\d+)\s*\\ldots\s*$|(?<=[\d}])\s*\\approx.*$", r"\1"),
    (rf"^\s*(?:(?:{TABLES['neutral']}|\\?approx\w*)[\s*:]*)+", ""),
    # $5 as 5 $
    (r"^\s*([-+]?)\s*(?:US\s*)?(\\\$|[¢-¥₠-₿]|USD|Rs\b)\.?\s*([-+]?[\d.\\].*)$", r"\1\3 \2"),
]


def spelled(text: str) -> str:
    """Rewrite a text in one spelling, LaTeX in ASCII, of equal value."""
    if re.search(r"\\\\[A-Za-z]{2}", text) and not re.search(r"(?<!\\)(?:\\\\)*\\(?!\\)", text):
        text = text.replace("\\\\", "\\")  # each backslash was written twice
    text = unicodedata.normalize("NFKC", text.translate(SYMBOLS)).translate(SYMBOLS)
    text = re.sub(r"\d", lambda digit: str(int(digit[0])), text)  # of any script
    text = " ".join(text.split())
    for pattern, new in SPELLINGS:
        text = re.sub(pattern, new, text, flags=re.DOTALL)
    return text


@lru_cache(16)  # one answer is asked for several times
def in_one_spelling(text: str) -> str:
    """Rewrite an answer in one spelling, without what stands at its edges."""
    text = spelled(text)
    for pattern, new in EDGES:
        text = re.sub(pattern, new, text, flags=re.DOTALL)
    return text.strip()
