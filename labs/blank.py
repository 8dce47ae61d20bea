"""An exercise: a file of this repository with function bodies removed.

    python -m labs.blank                    lists the exercises, from * (easy) to ***
    python -m labs.blank grpo > mine/grpo.py
    python -m labs.grade mine/grpo.py

Of an algorithm's file, `advantages` and `policy_loss` keep only their signature and docstring. The
others are one function each. The first line says which exercise it is, so the file may have any
name.
"""

import ast
import sys
import textwrap
from pathlib import Path

from checks.files import algorithms
from common.cli import BadInput
from tools import arguments

EXERCISES = Path(__file__).parent / "exercises.py"
TAKEN = ("advantages", "policy_loss")
HEAD = "# Exercise: {name}"  # the first line
INDENT, TODO = "    # ", '    raise NotImplementedError("TODO: {name}")'
# What is asked for is small, has a catch, or needs the head of the file read closely
EASY = "grpo dr_grpo justrl dapo goldilocks laconic sampler_logprobs accumulate pass_at_k shift"
HARD = "maspo vcpo deep_grpo stapo icepop blockwise recipe rank_advantages"
TOKENS = "/ response tokens"
# What each statistic is, for a student who is to write it: what is added up / what it is divided by
STATISTICS = {
    "clip_share": f"tokens with M = 0: Â > 0 and r > 1+ε, or Â < 0 and r < 1-ε {TOKENS}",
    "clip_above": f"of these the ones with Â > 0 {TOKENS}",
    "clip_below": f"of these the ones with Â < 0 {TOKENS}",
    "ref_kl": f"k3, not times β, and only where β > 0 {TOKENS}",
    "teacher_kl": f"log(π_θ/π_T), not times β, and only where β > 0 {TOKENS}",
    "strayed": f"tokens behind a first one with log π_T < FOREIGN, likewise {TOKENS}",
    "masked_share": f"tokens with M = 0 {TOKENS}",
    "masked_above": f"of these the ones with Â > 0 {TOKENS}",
    "masked_below": f"of these the ones with Â < 0 {TOKENS}",
    "weight": f"the weight π_θ/μ, after its cap {TOKENS}",
    "weight_max": "the largest π_θ/μ of a response token, before its cap / None",
    "gate_closed": f"1 - the gate {TOKENS}",
    "gate_pos": "the gate, where Â > 0 / response tokens with Â > 0",
    "gate_neg": "the gate, where Â < 0 / response tokens with Â < 0",
    "silenced": "tokens silenced / None",
    "silenced_share": f"tokens silenced {TOKENS}",
    "silenced_prob": "π_θ of the tokens silenced / tokens silenced",
    "silenced_entropy": "H where they stand / tokens silenced",
    "grpo_cut_share": f"tokens with r beyond 1 ± token_clip in the direction of Â {TOKENS}",
    "kept_where_grpo_cuts": "F r |Â| of those tokens / r |Â| of them",
    "width_rare": "σ where π_old < 0.1 / response tokens with π_old < 0.1",
    "width_common": "σ where π_old > 0.9 / response tokens with π_old > 0.9",
    "clip_share_of_tokens": "tokens of the clipped responses / tokens of those with Â ≠ 0",
    "token_clip_share": "tokens with r beyond 1 ± token_clip in the direction of Â / tokens of "
    "responses with Â ≠ 0",
    "kept_beyond_clip": f"tokens that PPO's clip would drop: Â > 0 and r > 1+ε, or Â < 0 and "
    f"r < 1-ε {TOKENS}",
    "capped_share": f"tokens with r over the cap {TOKENS}",
    "reshaped": "|φ - 1| / responses",
    "second_moment": f"(log π_θ/μ)², masked or not {TOKENS}",
    "left_out": f"tokens that are not trained {TOKENS}",
    "held_share": f"tokens held near π_old {TOKENS}",
    "held_pull": "κ |log r| of the tokens held / tokens held",
    "fork_entropy": "H of the tokens that are / tokens that are",
    "corrected": f"|C - 1| {TOKENS}",
    "dropped_share": f"tokens with C = 0 {TOKENS}",
    "centred": f"half of the sum of |c| {TOKENS}",
    "tail": f"1 - the sum of μ over the K tokens {TOKENS}",
    "damped": "|Â| - |u Â| of responses / |Â| of responses",
    "advantages_apart": "|Â of the working - Â of the answer| / responses",
    "anchor_kl": "β log(π_old/π_θ) of whole responses / responses",
}
# ... where a file means something else by the name
OWN = {
    ("gspo", "clip_share"): "responses with M = 0 / responses with Â ≠ 0",
    ("gspo", "clip_above"): "of these the ones with Â > 0 / responses with Â ≠ 0",
    ("gspo", "clip_below"): "of these the ones with Â < 0 / responses with Â ≠ 0",
    ("vcpo", "weight"): "min(w, cap) of the whole response / responses",
    ("vcpo", "weight_max"): "the largest w of a response, before its cap / None",
    ("m2po", "weight_max"): "the largest π_θ/μ of a response token / None",
    ("cispo", "weight_max"): "the largest r of a response token, before its cap / None",
    ("centred", "weight_max"): "the largest π_θ/μ of a response token, before its bound / None",
    ("icepop", "weight"): f"C {TOKENS}",
    ("icepop", "weight_max"): "the largest π_old/μ of a response token / None",
    ("recipe", "weight"): "min(w, cap) of the whole response / responses; only with a lag",
    ("recipe", "weight_max"): "the largest w of a response, before its cap / None; only with a lag",
    ("recipe", "gate_closed"): f"1 - the gate {TOKENS}; with MASPO's gate, instead of clip_*",
}


def single() -> dict[str, ast.FunctionDef]:
    """The exercises that are one function each."""
    tree = ast.parse(EXERCISES.read_text(encoding="utf-8"))
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


def statistics(function: ast.FunctionDef) -> list[str]:
    """The names that a `policy_loss` gives its statistics."""
    names = []
    for node in ast.walk(function):
        if isinstance(node, ast.Assign | ast.AugAssign):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if ast.unparse(target).startswith("stats"):
                keys = [target.slice] if isinstance(target, ast.Subscript) else node.value.keys
                names += [key.value for key in keys]
    return list(dict.fromkeys(names))


def flags(function: ast.FunctionDef) -> list[str]:
    """Comment lines: the flags that a function reads, of `Args`."""
    names = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "args":
            names.add(f"args.{node.attr}")
    if not names:
        return []
    sentence = f"It reads {', '.join(sorted(names))}: Args says what each does."
    return [INDENT + line for line in textwrap.wrap(sentence, 94)]


def explained(file: str, names: list[str]) -> list[str]:
    """Comment lines: what each of these statistics of a file is."""
    if not names:
        return []
    lines = ["The statistics: pairs (total, count) of sums, here written total / count:"]
    for name in names:
        words = OWN.get((file, name)) or STATISTICS.get(name, "see the head of the file")
        lines += textwrap.wrap(
            f"{name}: {words}", 94, initial_indent="  ", subsequent_indent=" " * 6
        )
    return [INDENT + line for line in lines]


def emptied(source: str, taken: tuple[str, ...], file: str = "") -> str:
    """The source, of these functions only signature and docstring; and what the statistics are."""
    lines = source.splitlines()
    functions = [n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef)]
    for node in reversed([n for n in functions if n.name in taken]):
        start, end = node.body[0].end_lineno, node.end_lineno
        marks = [line.strip() for line in lines[start:end]]
        opened = marks.count("# <own>") > marks.count("# </own>")
        closed = opened and lines[end : end + 1] == ["    # </own>"]
        if closed:
            end += 1
        todo = [*flags(node), *explained(file, statistics(node)), TODO.format(name=node.name)]
        if opened and not closed:  # its end stands further down
            todo.insert(0, "    # <own>")
        lines[start:end] = todo
    return "\n".join(lines) + "\n"


def files_of_exercises() -> dict[str, Path]:
    """The algorithm files with a function to write: some variants have their base file's."""
    texts = {path: path.read_text(encoding="utf-8") for path in algorithms()}
    return {p.stem: p for p, text in texts.items() if any(f"\ndef {x}(" in text for x in TAKEN)}


def blank(name: str) -> str:
    """The text of an exercise. BadInput for another name."""
    files = files_of_exercises()
    if name in files:
        text = emptied(files[name].read_text(encoding="utf-8"), TAKEN, name)
        return f"{HEAD.format(name=name)}\n{text}"
    if name not in single():
        raise BadInput(f"{name}: not an exercise; there are {', '.join([*files, *single()])}")
    source, node = EXERCISES.read_text(encoding="utf-8"), single()[name]
    used = ast.unparse(node)
    imports = [n for n in ast.parse(source).body if isinstance(n, ast.Import | ast.ImportFrom)]
    needed = [n for n in imports if any(alias.name in used for alias in n.names)]
    body = "\n".join(source.splitlines()[node.lineno - 1 : node.end_lineno])
    head = "\n\n".join([HEAD.format(name=name), "\n".join(map(ast.unparse, needed))]).rstrip()
    return f"{head}\n\n{emptied(body, (name,))}"


def listed() -> str:
    """Every exercise with its difficulty and its title."""
    files = {n: ast.parse(p.read_text(encoding="utf-8")) for n, p in files_of_exercises().items()}
    rows = []
    for name, node in (files | single()).items():
        stars = "*" if name in EASY.split() else "***" if name in HARD.split() else "**"
        first = " ".join(ast.get_docstring(node).split("\n\n")[0].split())
        rows.append(f"{name:17}{stars:4} {textwrap.shorten(first, 78, placeholder=' ...')}")
    return "\n".join(rows) + "\n"


def main() -> None:
    parser = arguments(__doc__, "labs.blank")
    parser.add_argument("name", nargs="?", metavar="NAME")
    name = parser.parse_args().name
    sys.stdout.reconfigure(encoding="utf-8")  # a file of exercises is UTF-8, as Python reads it
    try:
        sys.stdout.write(blank(name) if name else listed())
        if name and sys.stdout.isatty():
            print(f"python -m labs.blank {name} > mine/{name}.py  writes it to a file")
    except (BadInput, OSError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
