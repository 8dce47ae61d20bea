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
SYMBOLS = str.maketrans(TABLES["symbols"])
NAMES, FACTORS, BOXES = TABLES["names"], TABLES["factors"], TABLES["boxes"]
# The tags that open and close a thought: those of known models, then any whose name says so
THOUGHTS = []
for opening, closing in TABLES["thoughts"] + TABLES["thoughts by name"]:
    THOUGHTS.append((re.compile(opening, re.IGNORECASE), re.compile(closing, re.IGNORECASE)))
OPENING = "|".join(opening.pattern for opening, _ in THOUGHTS)
TAG = "|".join([OPENING, *[closing.pattern for _, closing in THOUGHTS], TABLES["other tags"]])
# A box and its brace, or the content of a box without braces
BOX = r"\\(?:boxed|fbox|framebox)(?![A-Za-z])\s*(\{|[-+(\[]?(?:[\d.\\]|[A-Za-z]\b)[^\s$]*|)"
# "Answer: " or "the final answer is " in one clause; "#### 7", but no heading ("#### 3. Total").
NAMED = r"(?<!to )(?:answer|option|答案)(?:[^\n.,;\d]{,40}?(?:\bis\b|[是为:：])|\W{,5}?[=\n])"
LABEL = rf"(?i:{NAMED}|####(?!\s*\**(?:[a-z]{{2}}|\d+[.)] )))[*_:：\s]*(?=[^*_:：\s])"
# Up to the end of the sentence; it does not end inside a displayed formula.
SENTENCE = re.compile(r"(?:\\\[.*?\\\]|\$\$.*?\$\$|[^\n])*?(?=\s*(?:\n|\Z)|\.\s|。)", re.DOTALL)
# Words separate the formulas of a sentence, except for words that belong to a number.
WORD = r"(?<![\\{A-Za-z])(?!(?:or|and|not|than|least|most)\b)(?:[^\W\d_]{2,}|I\b|A(?= [a-z]))"
CLAUSE_END = rf"(?:\(?{WORD}|[.:;!?](?:\s|$))+"
# An answer ends where a reason begins: ", since 5 + 7 = 12".
REASON = rf"[,;:!?]\s+(?={WORD})|\s\(?(?:because|since|as|so|which|where)\b"
CONTEXT = 150  # characters before and after a box, which show whether it is alone
BOX_PLACE = BOXES["here"]  # stands for the box, also in the patterns of symbols.json
DISPLAY = re.compile(r"\\\[.*?\\\]|\$\$.*?\$\$", re.DOTALL)
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
    said = after_thoughts(response)
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
    _, tag, text = text.rpartition("<answer>")
    answer = last_box(text)
    if answer is None and tag:
        answer = text.partition("</answer>")[0]
    text = text[-LONGEST:] if answer is None else in_one_spelling(answer[-LONGEST:])
    labels = list(re.finditer(LABEL, text))
    if labels:
        sentence = SENTENCE.match(text, labels[-1].end())[0]
        return re.split(REASON, in_one_spelling(sentence))[0]
    return answer


def last_box(text: str) -> str | None:
    """Return the content of the last box; "" if it is empty, never closes or is a part of a larger
    expression. Return None if there is no box, or only an empty one that a sentence mentions."""
    for box in reversed(list(re.finditer(BOX, text))):
        content, end = box[1], box.end()
        if content == "{":
            depth = 1
            for brace in re.compile(r"\\[\\{}]|[{}]").finditer(text, box.end()):
                depth += {"{": 1, "}": -1}.get(brace[0], 0)
                if depth == 0:
                    content, end = text[box.end() : brace.start()], brace.end()
                    break
            else:
                return ""
        before = text[max(0, box.start() - CONTEXT) : box.start()]
        if content.strip() and in_one_spelling(content[:LONGEST]) not in ("", "?", r"\ldots"):
            return content if is_alone(content, before, text[end : end + CONTEXT]) else ""
        if box[1] and not re.search(BOXES["mentioned"], before):
            return ""
    return None


def is_alone(content: str, before: str, after: str) -> bool:
    r"""Tell whether a box is an expression of its own, as in `x = \boxed{5}`, or a part of a larger
    one, as in `-\boxed{5}`, from the texts before and after it."""
    if re.search(r"(?<!\\)\\$", before):
        before = before[:-1]  # some write \\boxed
    around = DISPLAY.sub(lambda shown: shown[0].replace("\n", " "), before + BOX_PLACE + after)
    line = next(line for line in around.split("\n") if BOX_PLACE in line)
    if re.search(BOXES["of another value"], line):
        return False
    line = re.sub(BOXES["edges of formulas"], " ; ", re.sub(BOXES["dash or bullet"], r"\1", line))
    part = next(
        (part for part in re.split(BETWEEN, in_one_spelling(line)) if BOX_PLACE in part), ""
    )
    part = " ".join(part.split()).strip(" ,'\"*_`#").removesuffix(" -")
    same = re.escape(in_one_spelling(content[:LONGEST]))  # "2 + 3 = 5 \boxed{5}" repeats it
    return bool(re.fullmatch(rf"(?:\{{? ?(?:{same})? ?\}}?,? )*{BOXES['alone']}", part))


def last_number(text: str) -> str:
    """Return the last part between words that has a number or an option, or "". Only the last 20
    lines that may have one are read."""
    lines = [line for line in text.split("\n") if HAS_NUMBER_OR_OPTION.search(line)]
    for line in reversed(lines[-20:]):
        line = in_one_spelling(line)
        parts = re.split(CLAUSE_END, line) if re.search(WORD, line) else [line]
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


SPELLINGS = [  # (pattern, replacement), applied in this order
    # 10⁻⁸, which the steps before this list have turned into 10^{-}^{8}
    (r"(?<=(\^|_)\{[-+\dnx])\}\1\{(?=[-+\dnx]\})", ""),
    # An array in brackets is a matrix. The rows of a system are a list, which & only aligns.
    (r"([(\[|] ?\\begin\{)array\} ?\{[^{}]*\}(.*?\\end\{)array\}", r"\1matrix}\2matrix}"),
    (r"[,;.\s]*\\\\(?=.*\\end\{(?:cases|array|aligned|gathered)\})", ", "),
    (r"\\(?:begin|end)\{(?:cases|array|aligned|gathered)\}(?:\{[lcr| ]*\})?", ""),
    (r"\s*,?\s*&?\s*=\s*&?", " = "),
    (r"\\left\\\{(?=.*\\right\.)|\\right\.|\\!|\\(?:(?:text)?color|hspace)\s*\{[^{}]*\}", ""),
    # A single $ before a number is a currency; others surround formulas.
    (r"^([^$]*)(?<!\\)\$(\s*[\d.][^$]*)$", r"\1\\$\2"),
    (r"(?<!\\)(?:\$|\\[\[\](),;: ])|~|\\q?quad(?![A-Za-z])", " "),
    (r"\\(?:text|mbox|math)(?:rm|bf|it|sf|cal)?\s*\{((?:[^{}]|\{[^{}]*\})*)\}", r" \1 "),
    # pi, as \pi; 5 million, as 5 \times 10^{6}
    (r"\\?[A-Za-z]+|&[lg]t;", lambda name: NAMES.get(name[0], name[0])),
    (r"(?<=[\d}])\s*[A-Za-z]+", lambda word: FACTORS.get(word[0].strip().lower(), word[0])),
    (r"^\{([^{}]*)\}$|\{([,:])\}", r"\1\2"),
    (r"(?:\bsq(?:uare)?\.?\s+(?!root)|平方)([^\W\d_]+)", r"\1^2"),
    (r"(?<![-\w])(?:minus|negative)\s+(?=[\d.\\(])", "-"),
    (r"(?<=\w)\*\*(?=\w)", "^"),
    # Markdown, quotes and punctuation at the edges
    (r"\*\*|^[\s*_`'\",;:=]+|(?:\"\s*\})?[\s*_`\".,;:\\]*$", ""),
    (r"(?:\\(?:l|c|v|d)?dots[a-z]?(?![A-Za-z])|\.\.\.+)\s*", r"\\ldots "),
    (r"\^\s*\{?\s*\\circ\s*\}?\s*", r"^\\circ "),
    (r"\\?%\s*", r"\\% "),
    (r"\\sqrt\s*(\[\d\])?\s*(?:\(([^()]*)\)|(\d+))", r"\\sqrt\1{\2\3}"),
    # 0.1\overline{6}, 0.1(6) and 0.1\dot6; ]0,1[ and [0,1[
    (TABLES["repeating decimal"], fraction),
    (r"^\]([^\[\]]+)[,;]([^\[\]]+)(?=[\[\]]$)", r"(\1,\2"),
    (r"^([(\[][^\[\]]+)[,;]([^\[\]]+)\[$", r"\1,\2)"),
    # 2e4, which would be Euler's e; 3 and 1/2; 3 1/2
    (r"(?<![\w.\\])(\d+\.?\d*|\.\d+)[eE]([-+]?\d+)(?![\d.])", r"\1 \\times 10^{\2}"),
    (r"(?<![\d/}])(\d+)\s+and\s+(?=\d+/|\\[dt]?frac)", r"\1 "),
    (r"(?<![\d/}])(\d+)\s+(\d+)/(\d+)(?![\d.])", r"\1\\frac{\2}{\3}"),
    # 3.14...; \sqrt{2} \approx 1.4; about 3, option **C
    (r"^(\d*\.\d+)\s*\\ldots\s*$|(?<=[\d}])\s*\\approx.*$", r"\1"),
    (rf"^\s*(?:(?:{TABLES['neutral']}|\\?approx\w*)[\s*:]*)+", ""),
    # $5 as 5 $
    (r"^\s*([-+]?)\s*(?:US\s*)?(\\\$|[¢-¥₠-₿]|USD|Rs\b)\.?\s*([-+]?[\d.\\].*)$", r"\1\3 \2"),
]


@lru_cache(16)  # one answer is asked for several times
def in_one_spelling(text: str) -> str:
    """Rewrite a text in one spelling, LaTeX in ASCII without marks at its edges, of equal value."""
    text = unicodedata.normalize("NFKC", text.translate(SYMBOLS)).translate(SYMBOLS)
    text = re.sub(r"\d", lambda digit: str(int(digit[0])), text)  # of any script
    text = " ".join(text.split())
    for pattern, new in SPELLINGS:
        text = re.sub(pattern, new, text, flags=re.DOTALL)
    return text.strip()
