"""Each Chinese page says what its English one says: the same code, tables, formulas, links, images
and numbers, piece by piece. Words are free."""

import re
from collections import Counter
from pathlib import Path

import pytest

from tests.helpers import ROOT

NUMBER = re.compile(r"\d+(?:[.,]\d+)*(?:e[+-]?\d+)?|[⁰¹²³⁴-⁹]+|[½¼¾]")
HAN, WORD = re.compile(r"[\u4e00-\u9fff]"), re.compile(r"[A-Za-z]{3}")
COMMENT = re.compile(r"(?:^|\s+)# ")  # where one begins in a line of code
POINTERS = ("Where:", "出处：")  # how a line that points into the code begins


def pairs(root: Path) -> dict[Path, Path]:
    """Chinese page -> English page; a new file in docs/zh is held to its namesake in docs."""
    translated = {page: root / "docs" / page.name for page in sorted(root.glob("docs/zh/*.md"))}
    return {root / "README.zh.md": root / "README.md", **translated}


def sections(page: Path) -> list[tuple[str, list[str]]]:
    """Heading and pieces of every section: paragraphs, items of lists, tables, blocks of code."""
    found, fenced, fresh = [], False, True
    for line in page.read_text().splitlines():
        if re.fullmatch(r"<!--[^>]*-->", line):  # a mark between which a program writes
            continue
        if not fenced and line.startswith("#"):
            found.append((line, []))
            fresh = True
        elif not fenced and not line.strip():
            fresh = True
        else:
            pieces = found[-1][1]
            if fresh or not fenced and line.startswith("- "):
                pieces.append(line)
            else:
                pieces[-1] += "\n" + line
            fresh, fenced = False, fenced ^ line.startswith("```")
    # The line that leads to the other language is each page's own
    return [
        (h, [p for p in ps if not re.fullmatch(r"\[(中文|English)\]\(.*\)", p)]) for h, ps in found
    ]


def headings(page: Path) -> list[str]:
    """The anchors that GitHub gives a page's headings."""
    titles = [re.sub(r"^#+ ", "", heading) for heading, _ in sections(page)]
    return [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles]


def target(link: str, page: Path, root: Path) -> str:
    """Where a link leads, said alike in both languages: the English page, a heading's place."""
    path, _, heading = link.partition("#")
    if "://" in link:
        return link
    to, known = (page.parent / path).resolve() if path else page, pairs(root)
    name = known.get(to, to).relative_to(root).as_posix()
    if heading:
        there = headings(to) if to.exists() else []
        place = there.index(heading) + 1 if heading in there else f"UNKNOWN {heading}"
        name += f", section {place}"
    # A Chinese page leads to Chinese pages, where there are any
    return name + " (the English page)" * (page in known and to in known.values())


def facts(text: str, page: Path, root: Path) -> dict[str, Counter]:
    """What no translation changes."""
    if text.startswith("```"):
        lines = [COMMENT.split(line, maxsplit=1) for line in text.splitlines()]
        said = " ".join(comment for _, *comments in lines for comment in comments)
        return {
            "code": Counter(f"{n}: {line}" for n, (line, *_) in enumerate(lines, 1)),
            "comments": Counter(n for n, (_, *comments) in enumerate(lines, 1) if comments),
            "comments: numbers, addresses": Counter(
                re.findall(rf"https://\S+|{NUMBER.pattern}", said)
            ),
        }
    if "\n|---" in text:
        rows = [re.split(r"(?<!\\)\|", row)[1:-1] for row in text.splitlines()]
        held = [[facts(cell, page, root) for cell in row] for row in rows]
        # A row goes by what its first cell holds
        first = [" ".join(sorted(part for of in row[0].values() for part in of)) for row in held]
        cells = {
            f"row {r}, cell {c}: {what}": found
            for r, row in enumerate(held[2:], 1)
            for c, cell in enumerate(row, 1)
            for what, found in cell.items()
        }
        return {"rows": Counter(first), "row: columns": Counter(enumerate(map(len, rows)))} | cells
    formulas, text = re.findall(r"`([^`]+)`", text), re.sub(r"`[^`]+`", "", text)
    links, text = re.findall(r"(!?)\[[^]]*\]\(([^)]+)\)", text), re.sub(r"\]\([^)]+\)", "]", text)
    return {
        "links": Counter(target(link, page, root) for image, link in links if not image),
        "images": Counter(target(link, page, root) for image, link in links if image),
        "formulas": Counter(" ".join(formula.split()) for formula in formulas),
        "numbers": Counter(NUMBER.findall(text)),
        "points into the code": Counter(["yes"] * text.startswith(POINTERS)),
    }


def untranslated(text: str) -> bool:
    """Words, and no Chinese character among them; of code only what its comments say counts."""
    if text.startswith("```"):
        split = [COMMENT.split(line, maxsplit=1)[1:] for line in text.splitlines()]
        return any(not HAN.search(comment) for comments in split for comment in comments)
    words = re.sub(r"`[^`]+`|\]\([^)]+\)|</?\w+>", "", text)  # tags are no words
    return bool(WORD.search(words)) and not HAN.search(words)


def differences(chinese: Path, english: Path, root: Path) -> list[str]:
    """A line for each thing that differs: page, section, piece, what."""
    ours, theirs = sections(chinese), sections(english)
    name = chinese.relative_to(root).as_posix()
    levels = [[heading.split()[0] for heading, _ in page] for page in (ours, theirs)]
    if levels[0] != levels[1]:
        last = min((n for n, (a, b) in enumerate(zip(*levels)) if a != b), default=len(theirs))
        last = min(last, len(ours), len(theirs)) - 1
        said = f"{len(ours)} headings, {len(theirs)} in English, or of other levels"
        return [f"{name}: {said}; alike up to {ours[last][0]} ({theirs[last][0]})"]
    found = []
    for (heading, pieces), (original, written) in zip(ours, theirs):
        where = f"{name}, {heading} ({original})"
        if len(pieces) != len(written):
            found.append(f"{where}: {len(pieces)} pieces, {len(written)} in English")
            continue
        for n, (piece, other) in enumerate(zip([heading, *pieces], [original, *written])):
            here = where + (f", piece {n}" if n else "")
            found += [f"{here}: not translated"] * (n > 0 and untranslated(piece))
            mine, held = facts(piece, chinese, root), facts(other, english, root)
            whats = sorted(mine.keys() | held.keys())
            if mine.get("rows") != held.get("rows"):
                whats = ["rows"]  # no cell of theirs stands beside ours
            for what in whats:
                a, b = mine.get(what, Counter()), held.get(what, Counter())
                if a != b:
                    only = [", ".join(map(str, more.elements())) for more in (a - b, b - a)]
                    found.append(f"{here}: {what}: here [{only[0]}], in English [{only[1]}]")
    return found


def unmarked(page: Path, root: Path) -> list[str]:
    """Links to pages that are English only, in lines that do not say so. A page whose introduction
    says it (只有英文) need not repeat it."""
    if "只有英文" in "".join(sections(page)[0][1]):
        return []
    chinese = {path.resolve() for path in pairs(root)}
    return [
        link
        for _, pieces in sections(page)
        for line in "\n".join(pieces).splitlines()
        for link in re.findall(r"\]\(((?!http)[^)#]+\.md)", line)
        if (page.parent / link).resolve() not in chinese and "英文" not in line
    ]


@pytest.mark.parametrize("page", pairs(ROOT), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_chinese_page_holds_what_the_english_one_holds(page):
    english = pairs(ROOT)[page]
    assert english.exists(), f"{page.name} translates no page: {english} is missing"
    back = f"[English]({'../' * (page.parent != ROOT)}{english.name})"
    assert page.read_text().split("\n\n")[1] == back, f"{page.name}: no {back} under the title"
    found = differences(page, english, ROOT)
    assert not found, "\n".join(found)
    assert not unmarked(page, ROOT)


def test_the_readme_leads_to_the_chinese_one():
    assert (ROOT / "README.md").read_text().split("\n\n")[1] == "[中文](README.zh.md)"


ENGLISH = """# Title

[中文](README.zh.md)

At 0.5 and lr 1e-6 `x = 1` holds: [page](docs/page.md#two), [more](docs/more.md).

![Curves](docs/a.png)

| file | formula |
|---|---|
| [grpo](grpo.py) | `r Â`, 3 times |

## Code

```bash
# no heading, 3 lines
python grpo.py
```

- One thing.
- Another.

Where: `grpo.py: main`
"""
CHINESE = """# 标题

[English](README.md)

取 0.5，lr 为 1e-6，则 `x = 1` 成立：[页](docs/zh/page.md#二)，[其他](docs/more.md)（英文）。

![曲线](docs/a.png)

| 文件 | 公式 |
|---|---|
| [grpo](grpo.py) | 3 次 `r Â` |

## 代码

```bash
# 不是标题，3 行
python grpo.py
```

- 一件事。
- 另一件。

出处：`grpo.py: main`
"""
DAMAGE = [
    ("取 0.5", "取 0.6", ["# 标题 (# Title), piece 1: numbers", "[0.6]", "[0.5]"]),
    ("1e-6", "1e-5", ["piece 1: numbers", "[1e-5]", "[1e-6]"]),
    ("`x = 1`", "`x = 2`", ["piece 1: formulas", "[x = 2]", "[x = 1]"]),
    ("more.md", "less.md", ["piece 1: links", "[docs/less.md]", "[docs/more.md]"]),
    ("#二", "#一", ["piece 1: links", "section 1", "section 2"]),
    ("#二", "#三", ["piece 1: links", "UNKNOWN 三"]),
    ("docs/zh/page.md#二", "docs/page.md#two", ["piece 1: links", "(the English page)"]),
    ("a.png", "b.png", ["piece 2: images", "docs/b.png"]),
    ("(grpo.py)", "(gspo.py)", ["piece 3: rows: here [gspo.py], in English [grpo.py]"]),
    ("3 次", "三次", ["piece 3: row 1, cell 2: numbers: here [], in English [3]"]),
    (
        "| 3 次 `r Â` |",
        "| 3 次 `r Â` | |",
        ["piece 3: row: columns: here [(2, 3)], in English [(2, 2)]"],
    ),
    ("| [grpo](grpo.py) | 3 次 `r Â` |\n", "", ["piece 3: rows: here [], in English [grpo.py]"]),
    ("python grpo.py", "python gspo.py", ["# 代码 (## Code), piece 1: code", "gspo.py"]),
    ("# 不是标题，3 行", "# 不是标题，4 行", ["piece 1: comments: numbers", "[4]", "[3]"]),
    ("# 不是标题，3 行", "# no heading, 3 lines", ["# 代码 (## Code), piece 1: not translated"]),
    ("# 不是标题，3 行", "", ["piece 1: comments: here [], in English [2]"]),
    ("- 另一件。\n", "", ["## 代码 (## Code): 3 pieces, 4 in English"]),
    ("一件事", "One thing", ["## 代码 (## Code), piece 2: not translated"]),
    ("grpo.py: main", "grpo.py: Args", ["piece 4: formulas", "[grpo.py: Args]"]),
    ("出处：", "其中 ", ["piece 4: points into the code: here [], in English [yes]"]),
    ("## 代码", "### 代码", ["2 headings", "alike up to # 标题 (# Title)"]),
    ("## 代码\n", "", ["1 headings, 2 in English", "alike up to # 标题 (# Title)"]),
]


@pytest.mark.parametrize("old, new, said", DAMAGE)
def test_a_difference_is_found_and_said(old, new, said, tmp_path):
    (tmp_path / "docs/zh").mkdir(parents=True)
    (tmp_path / "docs/page.md").write_text("# One\n\n## Two\n")
    (tmp_path / "docs/zh/page.md").write_text("# 一\n\n## 二\n")
    english, chinese = tmp_path / "README.md", tmp_path / "README.zh.md"
    english.write_text(ENGLISH)
    chinese.write_text(CHINESE)
    assert differences(chinese, english, tmp_path) == []
    assert old in CHINESE
    chinese.write_text(CHINESE.replace(old, new, 1))
    found = "\n".join(differences(chinese, english, tmp_path))
    assert all(part in found for part in said), found


def test_a_link_to_an_english_page_says_so(tmp_path):
    (tmp_path / "docs/zh").mkdir(parents=True)
    (tmp_path / "docs/zh/page.md").write_text("# 一\n\n## 二\n")
    page = tmp_path / "README.zh.md"
    page.write_text(CHINESE)
    assert unmarked(page, tmp_path) == []
    page.write_text(CHINESE.replace("（英文）", ""))
    assert unmarked(page, tmp_path) == ["docs/more.md"]
    page.write_text(CHINESE.replace("（英文）。", "。其他页只有英文。"))
    assert unmarked(page, tmp_path) == []
