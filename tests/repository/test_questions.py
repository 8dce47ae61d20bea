"""docs/questions.md and docs/errors.md: pointers name what exists, numbers and identities hold.
(Their links: tests/repository/test_docs.py.)"""

import ast
import importlib.util
import math
import re
from collections import Counter

import grpo
import gspo
import maspo
import minirl
import pytest
import sapo
import torch
import vcpo
from labs import blank, bug
from tools import walk
from torch import Tensor
from variants import cispo, dapo, dr_grpo, opd, ppo

from checks import no_kl, terms, weight
from tests.helpers import ROOT, run_here
from tests.repository.test_docs import PAGES

QUESTIONS, ERRORS = PAGES["questions"], PAGES["errors"]
POINTER = re.compile(r"`([\w/]+\.py): ([\w.-]+)`")
# GitHub reads Markdown inside of <details> only behind an empty line
FOLD = re.compile(r"<details><summary>Answer</summary>\n\n(.+)\n\n</details>", re.DOTALL)


def definitions(source: str) -> set[str]:
    """Functions, classes, `Class.method`, and the flags among the fields of Args or Flags."""
    found = set()
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        for part in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(part, ast.FunctionDef):
                found.add(f"{node.name}.{part.name}")
            elif isinstance(part, ast.AnnAssign) and node.name in ("Args", "Flags"):
                found.add(f"--{part.target.id}")
    return found


@pytest.mark.parametrize("page", [QUESTIONS, ERRORS], ids=["questions", "errors"])
def test_every_pointer_names_a_definition_that_exists(page):
    pointers = POINTER.findall(page)
    assert len(pointers) == len(re.findall(r"`[^`\n]*\.py:", page)) > 30  # none is misspelt
    for file, name in pointers:
        assert (ROOT / file).is_file(), file
        assert name in definitions((ROOT / file).read_text()), (file, name)


def test_what_counts_as_a_definition():
    """A name that is used, an attribute, or a field of another class is none."""
    source = "def f(): g()\nclass Args:\n  lr: float\n  def m(self): ...\nclass B:\n  x: int\n"
    assert definitions(source) == {"f", "Args", "B", "--lr", "Args.m"}


def test_every_question_has_an_answer_and_a_place():
    """Numbered without gaps, each once; folded, a paragraph or more and then a line of places."""
    sections = re.split(r"^### (\d+)\. (.+)$", QUESTIONS, flags=re.MULTILINE)[1:]
    numbers, questions, bodies = sections[::3], sections[1::3], sections[2::3]
    assert numbers == [str(i + 1) for i in range(len(numbers))] and len(numbers) >= 55
    assert len(set(questions)) == len(questions)
    for question, body in zip(questions, bodies):
        folded = FOLD.fullmatch(body.split("\n## ")[0].strip())
        assert folded, f"{question}: its answer is not between <details> and </details>"
        answer, *places = folded[1].split("\n\nWhere: ")
        assert question[-1] in "?.:" and len(answer.split()) > 30 and len(places) == 1, question
        assert POINTER.search(places[0]) and "\n\n" not in places[0], question
    assert max(map(int, re.findall(r"\(question (\d+)\)", QUESTIONS))) <= len(numbers)


def test_the_evening_has_the_stars_and_the_week_has_all():
    """In both languages: twenty-five stars, those of the evening; each question has one day."""
    for page in (QUESTIONS, (ROOT / "docs/zh/questions.md").read_text()):
        asked = re.findall(r"^### (\d+)\. (★ )?", page, re.MULTILINE)
        starred = [int(number) for number, star in asked if star]
        evening, week = page.split("\n**")[1:3]
        lists = re.findall(r"^- .+?[:：](.+)", evening, re.MULTILINE)
        told = [int(number) for part in lists for number in re.findall(r"\d+", part)]
        assert sorted(told) == starred and len(starred) == 25
        days = re.findall(r"^- \D*\d \S*?[:：](.+?)[;；]|^- day \d: (.+?);", week, re.MULTILINE)
        found = re.findall(r"(\d+)(?: (?:to|到) (\d+))?", " ".join(a or b for a, b in days))
        numbers = [n for a, b in found for n in range(int(a), int(b or a) + 1)]
        assert len(days) == 7 and sorted(numbers) == [int(number) for number, _ in asked]


def test_the_tables_constants_are_the_files():
    """Row by row: the defaults of the file that the first cell leads to."""
    rows = dict(
        re.findall(r"^\| \[([\w+. ]+)\]\(\.\./[\w/]+\.py\) \| (.+)", QUESTIONS, re.MULTILINE)
    )
    assert len(rows) == 13
    for name, file in {"PPO": ppo, "GRPO": grpo, "Dr. GRPO": dr_grpo}.items():
        args = file.Args()
        assert args.clip_low == args.clip_high and f"`1 ± {args.clip_low}`" in rows[name]
    for name, file in {"DAPO": dapo, "MiniRL": minirl}.items():
        args = file.Args()
        assert f"`1 - {args.clip_low}`, `1 + {args.clip_high}`" in rows[name]
    assert (
        f"`1 - {gspo.Args().clip_low * 1e4:.0f}e-4`, `1 + {gspo.Args().clip_high * 1e4:.0f}e-4`"
        in rows["GSPO"]
    )
    for name, file in {"CISPO": cispo, "MiniRL": minirl, "VCPO": vcpo, "OPD": opd}.items():
        cap = f"{file.Args().is_cap:g}"
        assert f", {cap})]`" in rows[name] and f"cap {cap}" in rows[name]
    assert f"τ {sapo.Args().tau_pos:g} up, {sapo.Args().tau_neg} down" in rows["SAPO"]
    assert f"`γ = {ppo.Args().gamma:g}`, `λ = {ppo.Args().lam}`" in rows["PPO"]
    # A KL term is a flag of the file, with a value above 0
    terms = {name: rows[name].split(" | ")[4] for name in rows}
    files = {"PPO": ppo, "GRPO": grpo, "Dr. GRPO": dr_grpo, "DAPO": dapo, "GSPO": gspo}
    files |= {"CISPO": cispo, "SAPO": sapo, "MiniRL": minirl, "VCPO": vcpo, "OPD": opd}
    for name, file in files.items():
        assert (terms[name] == "none") == (not getattr(file.Args(), "beta", 0)), name


def test_every_error_has_a_source():
    """A paper, a place here, or a page, in its row."""
    rows = [line for line in ERRORS.splitlines() if line.startswith("| ") and "---" not in line]
    rows = [row for row in rows if "one reads" not in row and "| error |" not in row]
    assert len(rows) > 40
    for row in rows:
        cells = re.split(r"(?<!\\)\|", row)[1:-1]
        assert len(cells) in (3, 4) and all(cell.strip() for cell in cells), row
        sources = " ".join(cells[2:])
        assert re.search(r"\b\d{4}\.\d{5}\b|\]\(", sources) or POINTER.search(sources), row


@pytest.mark.parametrize("page", [QUESTIONS, ERRORS], ids=["questions", "errors"])
def test_the_pages_commands_exist(page):
    found = re.findall(r"`python -m ([\w.]+)(?: (\w+))?`", page)
    assert found
    for program, word in found:
        assert importlib.util.find_spec(program), program
        assert program != "labs.bug" or int(word or 1) <= len(bug.BUGS)
        assert program != "labs.blank" or blank.blank(word)


def test_the_bugs_are_those_that_can_be_played():
    """A row that names a number names a place that `labs.bug --reveal` names."""
    rows = re.findall(r"^\| .*\(bug (\d+)\) \|.*?\|(.*?)\|", ERRORS, re.MULTILINE)
    assert len(rows) > 6
    for number, places in rows:
        real = bug.BUGS[int(number) - 1].real
        words = set(re.findall(r"[\w-]{5,}", places)) - {"issue", "first", "version", "request"}
        assert any(word in real for word in words), (number, real)


def test_the_walk_is_grpo_as_it_is_and_one_real_step():
    """All of its code, in the page's own order, and each number up to its last digit; to write both
    anew: python -m tools.walk."""
    page, number = PAGES["walk"], r"-?\d+\.\d+"
    source = (ROOT / "grpo.py").read_text()
    with walk.watched() as (words, calls):
        assert run_here(grpo.main, *words) == 0
        again = walk.filled(page, source, walk.found(calls))
    assert re.sub(number, "#", again) == re.sub(number, "#", page)
    for here, there in zip(re.findall(number, again), re.findall(number, page)):
        assert abs(float(here) - float(there)) < 1.5 * 0.1 ** len(there.split(".")[1]), there
    written = [line.strip() for block in walk.CODE.findall(page) for line in block.splitlines()]
    loop = source[source.index("def advantages") : source.index("if __name__")]
    assert Counter(filter(None, written)) == Counter(
        filter(None, map(str.strip, loop.splitlines()))
    )


# The numbers


def short(number: float, digits: int = 0) -> str:
    """As 6e-8."""
    return f"{number:.{digits}e}".replace("e-0", "e-")


def said(page: str, *phrases: str) -> None:
    text = " ".join(page.split())
    assert not [phrase for phrase in phrases if phrase not in text]


def test_numbers_of_groups_and_weights():
    def mixed(p: float, G: int) -> float:
        return 1 - p**G - (1 - p) ** G

    def by_std(p: float) -> float:
        return math.sqrt(0.25 / (p * (1 - p)))

    def counts(p: float, G: int) -> list[float]:
        return [math.comb(G, c) * p**c * (1 - p) ** (G - c) for c in range(G + 1)]

    def in_group(p: float, G: int) -> float:
        """What the z-score of a group makes of p (1-p), the weight of a prompt without it."""
        shares = [(q, c, math.sqrt(c * (1 - c / G) / (G - 1))) for c, q in enumerate(counts(p, G))]
        return sum(q * c * (1 - c / G) / std for q, c, std in shares if std) / G

    def against_half(p: float, G: int) -> float:
        return in_group(p, G) / (p * (1 - p)) / (in_group(0.5, G) / 0.25)

    assert against_half(1 / 8, 1000) == pytest.approx(by_std(1 / 8), rel=0.01)
    assert in_group(0.01, 8) / math.sqrt(0.01 * 0.99) == pytest.approx(0.25, abs=0.01)
    equal = torch.full((8,), 0.7)
    error = equal - equal.mean()
    said(
        QUESTIONS,
        f"at p = 1/8 by {by_std(1 / 8):.1f} times as much as at 1/2, at p = 1/100 by "
        f"{by_std(0.01):.0f} times; at G = 8 by {against_half(1 / 8, 8):.1f} and "
        f"{against_half(0.01, 8):.1f} times, as a mixed group's std is never below "
        f"{math.sqrt(1 / 8):.2f}",
        f"moves {0.99 - 0.83:.2f} at ratio {0.99 / 0.83:.2f}",
        f"at p = 0.01, though, {100 * 0.05 * 0.99 / (0.01 + 0.05 * 0.99):.0f}% of what is rewarded",
        f"√(G/(G-1)), {math.sqrt(8 / 7):.2f} at G = 8",
        f"differ from their mean by {short(error.abs().max())}",
        f"an advantage of {(error / (equal.std() + 1e-6)).abs().max():.2f} out of nothing",
        f"At p = 0.1 that is {100 * (1 - mixed(0.1, 8)):.0f}% of the groups of 8",
        f"in {100 * mixed(0.1, 2):.0f}% of pairs, in {100 * mixed(0.1, 8):.0f}% of groups of 8",
        f"mixed in {100 * mixed(0.01, 8):.0f}% of cases, one of 64 in {100 * mixed(0.01, 64):.0f}%",
        f"Â = ±{0.5 / torch.tensor([0.0, 1.0]).std():.2f}",
        f"(0, 2) is ∓{2 * 0.5 / torch.tensor([0.0, 1.0]).std():.2f}",
        f"ln 500 / ln 1.2 = {math.log(500) / math.log(1.2):.0f} rollouts, at 1.28 it takes "
        f"{math.log(500) / math.log(1.28):.0f}",
        f"p = 1/1.2 = {1 / 1.2:.2f}",
        f"{weight(grpo, 50, -1.0):.0f} at r = 50",
        f"SAPO's is {weight(sapo, 3, -1.0):.2f} at r = 3",
        f"MiniRL's stops at {weight(minirl, 50, -1.0):.0f}",
        f"{0.01**-0.3:.1f} at 0.01 and {0.9**-0.3:.2f} at 0.9",
    )
    assert weight(maspo, 50, -1.0) == pytest.approx(-50)
    assert weight(sapo, 10, -1.0) > -0.01
    G, p = 8, 0.5
    chances = [math.comb(G, c) * p**G for c in range(G + 1)]
    seen = sum(q * math.sqrt(c / G * (1 - c / G)) for c, q in enumerate(chances))
    said(
        QUESTIONS, f"a deviation of {math.sqrt(p * (1 - p) / G):.2f} at p = 1/2, the target a mean"
    )
    said(QUESTIONS, f"a mean of {seen:.2f} for 0.5")


def test_numbers_of_curves_and_sequences():
    r = torch.linspace(0.5, 4, 350_001, dtype=torch.float64)
    weights = r / torch.cosh((r - 1) / 2) ** 2
    down = r / torch.cosh(sapo.Args().tau_neg * (r - 1) / 2) ** 2
    q = torch.linspace(1e-4, 1 - 1e-6, 400_000, dtype=torch.float64)
    best = {}  # k equal steps, each with the chance q: ∇p = p (1-q) for each of them
    for k in (2, 30):
        p = q**k
        best[k] = float(p[(p * (1 - q) / (p * (1 - p)).sqrt()).argmax()])
    said(
        QUESTIONS,
        f"rises to {weights.max():.2f} at r = {r[weights.argmax()]:.2f} (with τ_neg to "
        f"{down.max():.2f} at r = {r[down.argmax()]:.2f})",
        f"at p = {best[2]:.2f} for k = 2 and at {best[30]:.2f} for k = 30",
        f"leaves {short(0.01 / math.sqrt(1000))} over 1,000 tokens",
        f"{short(0.01 / math.sqrt(100))} over 100",
        f"s = e^0.1 = {math.exp(3 / 30):.3f}, far above {1 + gspo.Args().clip_high}",
        f"(r = {math.exp(3):.0f})",
        f"float32 ends at e^{math.log(torch.finfo(torch.float32).max):.1f}",
        f"it says {1 - 0.75**4:.2f} where the unbiased value is "
        f"{1 - math.comb(12, 4) / math.comb(16, 4):.2f}",
        f"a standard error of {math.sqrt(0.25 / 30):.2f}: the 95% interval is ± "
        f"{1.96 * math.sqrt(0.25 / 30):.2f}, that of a difference of two such scores, unpaired, ± "
        f"{1.96 * math.sqrt(0.25 / 15):.2f}",
    )
    assert 1.01**1000 == pytest.approx(2e4, rel=0.05) and "T = 1,000 that is 2·10⁴" in QUESTIONS
    assert math.isnan(min(float("nan"), 1.0)) and min(1.0, float("nan")) == 1.0


def test_numbers_of_precision_and_memory():
    def spacing(x: float, dtype: torch.dtype) -> float:
        one = torch.tensor(x, dtype=dtype)
        return float(torch.nextafter(one, torch.tensor(math.inf, dtype=dtype)) - one)

    finer = torch.finfo(torch.bfloat16).eps / torch.finfo(torch.float16).eps
    said(
        QUESTIONS,
        f"between 16 and 32 lie {spacing(16.0, torch.bfloat16)} apart",
        f"its grid is {finer:.0f} times finer",
        f"range ({torch.finfo(torch.float16).max:,.0f} at most)",
        f"lie {short(spacing(0.02, torch.bfloat16), 1)} apart",
        f"over 8 ranks, {16 * 7.6 / 8:.1f} GB. A reference adds {4 * 7.6 / 8:.1f}",
        f"They are {16384 * 152e3 * 4 / 1e9:.0f} GB in float32",
    )
    assert "from 0.81 to 0.49" in " ".join(PAGES["results"].split())
    said(QUESTIONS, "from 0.81 to 0.49")
    costs = dict(re.findall(r"^\| (\w+)\.py \| ([\d.]+) \|", PAGES["cost"], re.MULTILINE))
    for name in ("stapo", "vcpo", "deep_grpo", "goldilocks"):
        assert f"{costs[name]} of GRPO's step here" in ERRORS, name


# The identities


def distributions(count: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    """Logits θ with gradient, log π_ref, and log π_old near π_θ, all `[V]`."""
    generator = torch.Generator().manual_seed(0)
    draw = [torch.randn(count, generator=generator, dtype=torch.float64) for _ in range(3)]
    theta = draw[0].requires_grad_()
    return theta, draw[1].log_softmax(0), (draw[0].detach() + 0.3 * draw[2]).log_softmax(0)


def same(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-9, atol=1e-12)


def test_kl_estimators():
    """Values and gradients of k1, k2, k3 and their like, all words enumerated."""
    theta, ref, old = distributions()
    logp = theta.log_softmax(0)  # [V]
    p, x = logp.exp().detach(), ref - logp  # [V], [V]

    def gradient(value: Tensor) -> Tensor:
        return torch.autograd.grad(value, theta, retain_graph=True)[0]

    k1, k2, k3, reversed_k3 = -x, x**2 / 2, x.exp() - 1 - x, (-x).exp() - 1 + x
    to_ref, from_ref = (logp.exp() * -x).sum(), (ref.exp() * x).sum()
    chi2 = (logp.exp() ** 2 / ref.exp()).sum() - 1
    assert same((p * k1).sum(), to_ref) and same((p * k3).sum(), to_ref)
    assert not same((p * k2).sum(), to_ref) and same((p * reversed_k3).sum(), chi2 - to_ref)
    assert same(gradient((p * k1).sum()), torch.zeros_like(theta))
    assert same(gradient((p * k2).sum()), gradient(to_ref))
    assert same(gradient((p * k3).sum()), gradient(from_ref))
    assert same(gradient((p * k1.detach() * logp).sum()), gradient(to_ref))  # in the reward
    weighted = (old.exp() * (logp - old).exp() * k3).sum()  # r k3 on π_old's samples
    assert same(weighted, to_ref) and same(gradient(weighted), gradient(to_ref))
    assert not same(gradient((old.exp() * k3).sum()), gradient(to_ref))


def test_entropy_falls_with_the_covariance():
    """dH = -η Cov(log π, Â) where every logit moves by η Â, and with π Â in its place where they
    move by η times the gradient of E[Â]."""
    theta, A, _ = distributions()
    logp, step = theta.detach().log_softmax(0), 1e-6
    p = logp.exp()
    A = A - (p * A).sum()

    def entropy(logits: Tensor) -> Tensor:
        return torch.distributions.Categorical(logits=logits).entropy()

    for move in (A, p * A):
        change = (entropy(logp + step * move) - entropy(logp)) / step
        covariance = (p * logp * move).sum() - (p * logp).sum() * (p * move).sum()
        assert torch.isclose(change, -covariance, rtol=1e-4)


def test_what_a_negative_update_does():
    """Δ log π_v = η (π_v + π_y - Σπ²): where the policy is sure only its favourite gains; where it
    is flat all do."""
    step, rare = 1e-6, 4
    for p, gain in (([0.7, 0.1, 0.1, 0.07, 0.03], 1), ([0.2] * 5, 4)):
        logp = torch.tensor(p, dtype=torch.float64).log().requires_grad_()
        slope = torch.autograd.grad(logp.log_softmax(0)[rare], logp)[0]
        moved = ((logp - step * slope).log_softmax(0) - logp).detach() / step
        p = logp.exp().detach()
        others = torch.arange(5) != rare
        law = p + p[rare] - (p**2).sum()
        assert torch.allclose(moved[others], law[others], atol=1e-5)
        assert (moved[others] > 1e-4).sum() == gain and moved[rare] < 0


def test_random_errors_of_a_verifier():
    """Wrong answers passed at random scale ∇p by what is left, and right samples alone give
    ∇ log p."""
    theta, _, _ = distributions()
    logp, right = theta.log_softmax(0), torch.tensor([1.0, 0, 0, 1, 0, 0], dtype=torch.float64)
    mu = logp.exp().detach()

    def gradient(value: Tensor) -> Tensor:
        return torch.autograd.grad(value, theta, retain_graph=True)[0]

    p = (logp.exp() * right).sum()
    noisy = gradient((mu * (right + 0.05 * (1 - right)) * logp).sum())
    assert same(noisy, 0.95 * gradient(p))
    assert same(gradient((mu * right * logp).sum() / p.detach()), gradient(p.log()))


def test_a_root_is_no_weight():
    """E[w] = 1 and E[w^(1/T)] < 1; leave-one-out is the group's mean times (G-1)/G; on a nucleus
    π/μ is the mass kept."""
    theta, _, old = distributions()
    w = (theta.detach().log_softmax(0) - old).exp()
    assert torch.isclose((old.exp() * w).sum(), w.new_tensor(1.0))
    assert (old.exp() * w ** (1 / 3)).sum() < 1 - 1e-3
    R = torch.arange(8.0, dtype=torch.float64) ** 2
    assert same(R - R.mean(), 7 / 8 * (R - (R.sum() - R) / 7))
    p = old.exp().sort(descending=True).values[:4]
    assert same(p / (p / p.sum()), p.sum().expand(4))


def test_ppo_from_memory():
    """Question 75's code is variants/ppo.py's."""
    written: dict = {"torch": torch}
    exec(re.search(r"```python\n(def gae.+?)```", QUESTIONS, re.DOTALL)[1], written)
    draw = iter(torch.randn(8, 3, 5, generator=torch.Generator().manual_seed(0)).double())
    mask = (torch.arange(5) < torch.tensor([[5], [3], [1]])).double()
    values, rewards = next(draw) * mask, next(draw) * mask
    A, target = written["gae"](rewards, values, mask, 0.9, 0.8)
    for found, real in zip((A, target), ppo.advantages(rewards, values, mask, 0.9, 0.8)):
        assert same(found, real)
    old_logp, V = next(draw), values + next(draw)
    logp = old_logp + 0.3 * next(draw)
    policy, value = written["ppo"](logp, old_logp, A, V, values, target, mask)
    rest = {"logp": logp, "old_logp": old_logp, "advantages": A, "mask": mask}
    loss, count, _ = terms(ppo, no_kl(ppo), **rest)
    assert same(policy, loss / count)
    assert same(value, ppo.value_loss(V, values, target, mask, 0.2)[0] / mask.sum())


def test_dpo():
    """Loss and gradient at π = π_ref and elsewhere; Z cancels. The same for a reward model's."""
    theta, ref, _ = distributions()
    beta, better, worse = 0.1, 1, 4
    for logits in (ref, theta.detach()):
        logits = logits.clone().requires_grad_()
        logp = logits.log_softmax(0)
        margin = beta * ((logp - ref)[better] - (logp - ref)[worse])
        loss = -torch.nn.functional.logsigmoid(margin)
        gradient = torch.autograd.grad(loss, logits, retain_graph=True)[0]
        apart = torch.autograd.grad(logp[better] - logp[worse], logits)[0]
        assert same(gradient, -beta * torch.sigmoid(-margin).detach() * apart)
        if logits.detach().equal(ref):
            said(QUESTIONS, f"the loss is ln 2 = {loss:.2f} and the weight 1/2")
    R = torch.linspace(-1, 1, 6, dtype=torch.float64)
    best = (ref + R / beta).log_softmax(0)  # π* ∝ π_ref e^(R/β)
    implied = beta * (best - ref)
    assert same(implied - implied[0], R - R[0])
    said(
        QUESTIONS,
        f"{2 / 1:.2f} at G = 2, {8 / 7:.2f} at G = 8",
        f"p(1-p) + (p-b)² = {0.09 + 0.4**2:.2f}, where its own mean as b leaves {0.9 * 0.1:.2f}: "
        f"{(0.09 + 0.4**2) / 0.09:.1f} times",
    )


def test_one_outlier_in_thirty():
    """Weights on ∇ log π where one token of 30 has log r = 3, before the average over tokens."""
    log_ratio = torch.zeros(1, 30, dtype=torch.float64)
    log_ratio[0, 0] = 3.0

    def weights(module: object, sign: float, moved: Tensor, **flags: float) -> Tensor:
        logp, mask = moved.clone().requires_grad_(), torch.ones_like(moved)
        rest = {"old_logp": torch.zeros_like(mask), "mask": mask}
        rest["advantages"] = torch.tensor([sign], dtype=torch.float64)
        terms(module, no_kl(module, **flags), logp=logp, **rest)[0].backward()
        return -30 * logp.grad[0]

    up, down = (weights(grpo, sign, log_ratio) for sign in (1.0, -1.0))
    assert up[0] == 0 and (up[1:] == 1).all() and round(float(down[0])) == -20
    assert all(abs(weights(sapo, sign, log_ratio)[0]) < 1e-5 for sign in (1.0, -1.0))
    assert (weights(gspo, 1.0, log_ratio) == 0).all()
    assert torch.allclose(weights(gspo, -1.0, log_ratio), -torch.tensor(math.exp(0.1)).double())
    small = torch.full((1, 30), 0.01, dtype=torch.float64)
    assert (weights(grpo, 1.0, small) > 1).all() and (weights(gspo, 1.0, small) == 0).all()
