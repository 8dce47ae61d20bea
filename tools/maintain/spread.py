"""Copy a change of grpo.py into the other eight files.

    python -m tools.maintain.spread [COMMIT]        the changes since COMMIT (default: HEAD)
    python -m tools.maintain.spread --dry [COMMIT]  only say what would be done

Edit grpo.py, run this, and read the output. A hunk is applied if the file still has the lines that
it replaces. An insertion is applied if the two lines around it still follow each other. All other
hunks are printed for you to apply by hand, and so are new lines that grpo.py marks as its own.
Headers (the first docstring) are not changed. The exit code is 1 if hunks are left to you.
"""

import difflib
import re
import subprocess
import sys
from dataclasses import dataclass, field

from tools import arguments
from checks.files import FIRST, NINE, PATHS, ROOT

MARK = r"# </?\w+>$"


@dataclass
class Spread:
    """A file after grpo.py's change: its new lines, the number of applied hunks, and the hunks that
    were not applied."""

    lines: list[str]
    placed: int = 0
    left: list[str] = field(default_factory=list)


def body(source: str) -> tuple[list[str], list[str]]:
    """Split a source into the lines of the module's docstring, and all lines after it."""
    lines = source.splitlines()
    end = lines.index('"""', 1) + 1
    return lines[:end], lines[end:]


def unmarked(lines: list[str]) -> list[str]:
    """Remove the marks from lines, and drop lines that are only a mark."""
    bare = [re.sub(rf"(^\s*|  ){MARK}", "", line.rstrip()) for line in lines]
    return [line for line in bare if line]


def same(one: list[str], other: list[str]) -> dict[int, int]:
    """Map each line of one to the same line of the other. The ends, -1 and the lengths, count as
    the same line."""
    found = {-1: -1, len(one): len(other)}
    matcher = difflib.SequenceMatcher(None, one, other, autojunk=False)
    for a, b, size in matcher.get_matching_blocks():
        for i in range(size):
            found[a + i] = b + i
    return found


def stand_together(places: list[int | None]) -> bool:
    """Tell whether lines follow each other and the neighbour before them (the first place), or the
    neighbour after them (the last). Without lines, the two neighbours must follow each other.
    """
    links = [x is not None and y == x + 1 for x, y in zip(places, places[1:])]
    return all(links[1:-1]) and (links[0] or links[-1])


def spread(base: list[str], theirs: list[str], ours: list[str]) -> Spread:
    """Apply the line edits base -> theirs to ours, if the lines that they touch are the same in
    base and ours. New lines that grpo.py marks as its own are not inserted.
    """
    at, there = same(base, ours), same(theirs, ours)
    result = Spread(list(ours))
    edits = difflib.SequenceMatcher(None, base, theirs, autojunk=False).get_opcodes()
    for kind, a, b, c, d in reversed(edits):  # from the last, so that earlier places stay valid
        old, new = base[a:b], theirs[c:d]
        if kind == "equal" or unmarked(old) == unmarked(new):
            continue
        if stand_together([there.get(i) for i in range(c - 1, d + 1)]):
            continue  # an earlier run has carried it over
        places = [at.get(i) for i in range(a - 1, b + 1)]
        own = not old and any(re.search(MARK, line.rstrip()) for line in new)
        if not own and stand_together(places):
            start = places[1]  # the first old line, or the line after an insertion
            result.lines[start : start + len(old)] = new
            result.placed += 1
            continue
        told = [f"  after: {base[a - 1].strip() if a else '(top)'}"]
        told += [f"    - {line}" for line in old]
        told += [f"    + {line}" for line in new]
        result.left.insert(0, "\n".join(told))
    return result


def git(*words: str) -> subprocess.CompletedProcess:
    """Run `git WORDS` in the repository."""
    how = {"cwd": ROOT, "capture_output": True, "encoding": "utf-8"}
    return subprocess.run(["git", *words], **how)


def main(commit: str, dry: bool) -> int:
    """Copy grpo.py's changes since a commit; return the number of hunks that are left to you."""
    left = 0
    before, now = git("show", f"{commit}:grpo.py").stdout, PATHS[FIRST].read_text("utf-8")
    if before == now:
        return left
    for path in map(PATHS.get, NINE[1:]):
        header, ours = body(path.read_text("utf-8"))
        result = spread(body(before)[1], body(now)[1], ours)
        if not dry:
            path.write_text("\n".join([*header, *result.lines]) + "\n", encoding="utf-8")
        print(f"{path.stem}: {result.placed} placed, {len(result.left)} left to you")
        for hunk in result.left:
            print(hunk)
        left += len(result.left)
    return left


if __name__ == "__main__":
    parser = arguments(__doc__)
    parser.add_argument("--dry", action="store_true", help="write nothing")
    parser.add_argument("commit", nargs="?", default="HEAD", metavar="COMMIT")
    words = parser.parse_args()
    if git("rev-parse", "--verify", "--quiet", f"{words.commit}:grpo.py").returncode:
        parser.error(f"COMMIT {words.commit}: this repository has no grpo.py of it")
    sys.exit(1 if main(words.commit, words.dry) else 0)
