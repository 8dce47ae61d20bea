"""Stage two of the panels: what each method says about its tokens, measured on stored responses.

Losses and advantages are the files' own. A number is [estimate, low, high] with a 95% interval: a
bootstrap over prompts, since the responses to one prompt are alike.
"""

import copy
import importlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from common.batch import Rollout
from common.distributed import ALONE, clip_gradients, divide_gradients
from common.logprobs import Logprobs, Policy, all_logprobs, entropies, micro_batches
from common.logprobs import response_logprobs
from common.model import load_model
from common.norms import gradient_norms
import torch
from torch import Tensor

import deep_grpo
import grpo
import stapo
import vcpo
from labs.real.responses import CUT, PRECISIONS, UPDATES, G, K, Subject, advantages, stored

RESAMPLES = 1000
COORDINATES = 1_000_000  # of a gradient that are kept, evenly spaced: enough for angles and norms
GROUPS, HOPELESS = 8, 4  # groups with right and wrong responses, and without a right one, whose
# gradients are compared
LOOKED_AT = (1, 4, 16)  # updates after which more than the ESS is measured
BINS = {"rare": (0, 0.1), "between": (0.1, 0.9), "common": (0.9, 1.1)}  # π_old of a token
FREE = {"clip_low": 1e9, "clip_high": 1e9}  # nothing is clipped
Objective = Callable[[Tensor, Rollout], Tensor]
Estimate = Callable[[Tensor], Tensor]  # from how often each prompt counts `[P]`


class Bootstrap:
    """Estimates over n prompts, and how they vary if the prompts are drawn again."""

    def __init__(self, n: int):
        self.n = n
        drawn = np.random.default_rng(0).multinomial(n, [1 / n] * n, RESAMPLES)
        self.counts = torch.tensor(np.vstack([np.ones((1, n)), drawn]))  # [1 + RESAMPLES, n]

    def of(self, estimate: Estimate) -> list[float]:
        values = np.array([float(estimate(count)) for count in self.counts])
        found = values[np.isfinite(values)]  # there may be nothing to divide by
        return [values[0], *np.quantile(found, (0.025, 0.975))] if len(found) else [np.nan] * 3

    def ratio(self, over: Tensor, under: Tensor, prompt: Tensor | None = None) -> list[float]:
        """Σ over / Σ under of rows `[N, ...]`; `prompt [N]` is each row's, or rows are prompts."""
        prompt = torch.arange(self.n) if prompt is None else prompt
        sums = torch.zeros(2, self.n, dtype=torch.float64)
        for total, part in zip(sums, (over, under)):
            each = part.double().flatten(1).sum(1) if part.dim() > 1 else part.double()  # [N]
            total.index_add_(0, prompt, each)
        return self.of(lambda count: (count @ sums[0]) / (count @ sums[1]))


def objective(name: str, column: str = "advantages", **flags: object) -> Objective:
    """The loss of a file, a sum, with the advantages of a column and without a KL term."""
    module = importlib.import_module(name)
    args = module.Args(**({"beta": 0.0} if hasattr(module.Args, "beta") else {}), **flags)

    def loss(logp: Tensor, batch: Rollout) -> Tensor:
        batch = Rollout(**vars(batch) | {"advantages": getattr(batch, column)})
        return module.policy_loss(args, logp, batch)[0]

    return loss


# The two levels of minirl's paper: π_θ/μ of each token, and of the whole response
LEVELS = {
    "token": objective("minirl", length_norm=True, is_cap=1e9, **FREE),
    "response": objective("vcpo", is_cap=1e9),
}
RULES = {"free": objective("grpo", **FREE)} | {
    n.upper(): objective(n) for n in ("grpo", "gspo", "sapo")
}


def weights(loss: Objective, logp: Tensor, batch: Rollout) -> Tensor:
    """The weight on ∇ log π of each token `[N, T]`."""
    logp = logp.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(logp, batch), logp)
    return -gradient


def update(policy: Policy, optimizer: torch.optim.Optimizer, part: Rollout, args: object) -> None:
    """One optimiser step of grpo.py."""
    count = 0.0
    for rows in micro_batches(policy, part, args.micro_tokens, ALONE):
        micro = part.rows(rows)
        logp, _ = response_logprobs(policy, micro, args.temperature)  # [n, T]
        loss, number, _ = grpo.policy_loss(args, logp, micro)
        loss.backward()
        count = count + number
    divide_gradients(policy, count, ALONE)
    clip_gradients(policy, args.grad_clip)
    optimizer.step()
    optimizer.zero_grad()


def gradients(policy: Policy, groups: list[Rollout], losses: dict[str, Objective]) -> dict:
    """About `COORDINATES` coordinates of each group's gradient: name -> `[len(groups), D]`."""
    parameters = list(policy.parameters())
    # Odd, so that it does not walk in step with the rows of a matrix
    stride = max(1, sum(p.numel() for p in parameters) // COORDINATES) | 1
    found = {name: [] for name in losses}
    for group in groups:
        logp, _ = response_logprobs(policy, group, 1.0)  # [n, T]
        for name, loss in losses.items():
            parts = torch.autograd.grad(loss(logp, group), parameters, retain_graph=True)
            found[name].append(torch.cat([part.flatten()[::stride] for part in parts]))
    return {name: torch.stack(rows) * stride**0.5 for name, rows in found.items()}


def cosine(one: Tensor, other: Tensor) -> Estimate:
    """Of the angle between two sums of group gradients `[n, D]`."""
    both = torch.cat([one, other])  # [2n, D]
    gram = (both @ both.T).double()  # [2n, 2n]
    n = len(one)

    def estimate(count: Tensor) -> Tensor:
        dot = count @ gram[:n, n:] @ count
        return dot / ((count @ gram[:n, :n] @ count) * (count @ gram[n:, n:] @ count)).sqrt()

    return estimate


def variance(gradient: Tensor) -> Estimate:
    """Of the variance over groups, summed over coordinates, of gradients `[n, D]`."""
    gram = (gradient @ gradient.T).double()  # [n, n]
    return lambda count: count @ gram.diag() / count.sum() - count @ gram @ count / count.sum() ** 2


def correlation(one: Tensor, other: Tensor) -> Estimate:
    pairs = torch.stack([one.double(), other.double()])  # [2, n]
    return lambda count: torch.corrcoef(pairs.repeat_interleave(count.long(), 1))[0, 1]


def after(steps: int) -> str:
    return "1 update" if steps == 1 else f"{steps} updates"


class Panels:
    """The measurements of one subject. `numbers` has what they found, `series` what is drawn."""

    def __init__(self, subject: Subject, seed: int, responses: dict[str, Rollout]):
        self.args, self.responses = subject.args(seed), responses
        self.policy = Policy(load_model(subject.model, ALONE)[0])
        self.start = copy.deepcopy(self.policy.state_dict())
        self.batch, self.parts = responses["measure"], responses["train"].split(max(UPDATES))
        for rollout in (self.batch, *self.parts, *(responses[name] for name in PRECISIONS)):
            rollout.old_logp = rollout.rollout_logp  # the sampler is exact, or the gap is the point
            rollout.advantages = advantages(rollout)
        self.P, self.mask = len(self.batch) // G, self.batch.mask
        self.prompt = torch.arange(self.P).repeat_interleave(G)  # [N]
        self.right = self.batch.rewards.view(-1, G).mean(1).double()  # [P]
        self.over = Bootstrap(self.P)
        self.numbers = {"share of right responses": self.over.of(lambda c: c @ self.right / self.P)}
        self.series = {}

    def share(self, over: Tensor, under: Tensor) -> list[float]:
        return self.over.ratio(over, under, self.prompt)

    def mixed(self, batch: Rollout) -> list[Rollout]:
        """The first groups with right and wrong responses."""
        groups = batch.split(len(batch) // G)
        return [group for group in groups if group.advantages.any()][:GROUPS]

    def look(self, readout: Callable | None = None) -> Logprobs:
        """log π of the responses now, and a statistic."""
        return all_logprobs(self.policy, self.batch, self.args, ALONE, readout)

    def squared(self) -> tuple[Tensor, Tensor]:
        """log π, and |∂ log π / ∂ logits|² = 1 - 2π + Σπ²: two `[N, T]`."""
        now = self.look(lambda logprobs, _: logprobs.exp().square().sum(-1))
        return now.logp, (1 - 2 * now.logp.exp() + now.statistic).clamp(min=0) * self.mask

    def measure(self) -> None:
        self.stapo()
        self.goldilocks()
        self.precision()
        self.deep_grpo()
        self.mass()
        for steps in self.updated():
            logp, size = self.squared()
            log_ratio = (logp - self.batch.old_logp) * self.mask  # [N, T]
            self.ess(steps, log_ratio)
            if steps in LOOKED_AT:
                self.clips(after(steps), logp, size)
                self.gspo(after(steps), log_ratio)
                self.angles(steps, logp, log_ratio)

    def updated(self) -> Iterator[int]:
        """The policy after 0, 1, 2, 4, 8, 16 updates of grpo.py on the other responses."""
        optimizer = self.restart()
        for steps in range(max(UPDATES) + 1):
            if steps in UPDATES:
                yield steps
            if steps < max(UPDATES):
                update(self.policy, optimizer, self.parts[steps], self.args)

    def restart(self) -> torch.optim.Optimizer:
        """Go back to the start; a fresh optimiser, as grpo.py's."""
        self.policy.load_state_dict(self.start)
        return torch.optim.AdamW(
            self.policy.parameters(), self.args.lr, self.args.betas, weight_decay=0
        )

    def clips(self, at: str, logp: Tensor, size: Tensor) -> None:
        """grpo: what the clip cuts, as a share of tokens and of |gradient|. maspo: how far tokens
        move, and what each rule keeps of the gradient of those that move on outwards."""
        free, kept = (weights(RULES[name], logp, self.batch) for name in ("free", "GRPO"))  # [N, T]
        live, cut = free != 0, (free != 0) & (kept == 0)  # [N, T]
        pull = free.abs() * size.sqrt()  # [N, T]
        up = self.batch.advantages[:, None] > 0  # [N, 1]
        for words, where in (("", live), (", Â > 0", live & up), (", Â < 0", live & ~up)):
            self.numbers[f"grpo: tokens cut{words}, {at}"] = self.share(cut & where, where)
            self.numbers[f"grpo: gradient cut{words}, {at}"] = self.share(
                pull * (cut & where), pull * where
            )
        log_ratio, old = logp - self.batch.old_logp, self.batch.old_logp.exp()  # [N, T]
        gated = weights(objective("maspo"), logp, self.batch)  # [N, T]
        rules = {"GRPO": kept, "MASPO": gated / self.mask.sum(1, keepdim=True)}
        for name, (low, high) in BINS.items():
            where = (old >= low) & (old < high) & (self.mask > 0)  # [N, T]
            moved = self.share(log_ratio.abs() * where, where)
            self.numbers[f"maspo: mean |log r|, {name}, {at}"] = moved
            where = where & (free * log_ratio > 0)  # [N, T]: away from π_old, as Â demands
            self.numbers[f"grpo: gradient cut, {name}, {at}"] = self.share(
                pull * (cut & where), pull * where
            )
            for rule, rest in rules.items():
                part = self.share(rest.abs() * where, free.abs() * where)
                self.numbers[f"maspo: kept by {rule}, {name}, {at}"] = part

    def gspo(self, at: str, log_ratio: Tensor) -> None:
        """Spread over responses of Σ log r over the first t tokens, and its growth with t."""
        sums, length = log_ratio.double().cumsum(1), self.mask.sum(1)  # [N, T], [N]
        # The same responses for every t: those that reach the longest t that half of all reach
        some = [t for t in (1, 2, 4, 8, 16, 32) if (length >= t).double().mean() >= 0.5]
        reached = length >= some[-1]  # [N]
        sums = sums[reached][:, [t - 1 for t in some]]  # [n, len(some)]

        def spread(count: Tensor) -> Tensor:
            row = count[self.prompt[reached], None]  # [n, 1]
            mean = (row * sums).sum(0) / row.sum()  # [len(some)]
            return ((row * (sums - mean) ** 2).sum(0) / row.sum()).sqrt()

        def growth(count: Tensor) -> float:
            return np.polyfit(np.log(some), spread(count).log().numpy(), 1)[0]

        self.numbers[f"gspo: power of t, {at}"] = self.over.of(growth)
        self.series[f"spread, {at}"] = [some, spread(self.over.counts[0]).tolist()]

    def ess(self, steps: int, log_ratio: Tensor) -> None:
        """ESS/B of all responses as one batch."""
        log_w = log_ratio.sum(1)  # [N]
        self.numbers[f"vcpo: ESS/B, {after(steps)}"] = self.over.of(
            lambda count: vcpo.ess_ratio(log_w.repeat_interleave(count.long()[self.prompt]))
        )

    def angles(self, steps: int, logp: Tensor, log_ratio: Tensor) -> None:
        """Gradients of rules beside each other, on groups with right and wrong responses."""
        at, groups = after(steps), self.mixed(self.batch)
        if not groups:
            return  # of eight prompts, perhaps
        over = Bootstrap(len(groups))
        last = steps == LOOKED_AT[-1]
        losses = LEVELS | (RULES if last else {})
        if steps == 4:
            for group in groups:
                group.none, group.mean = group.rewards, group.rewards - group.rewards.mean()  # [G]
                centred = Rollout(**vars(group) | {"advantages": group.mean})
                args = vcpo.Args(group_size=G)
                group.b = group.mean - vcpo.baseline_shifts(args, self.policy, centred, ALONE)
            losses = losses | {name: objective("vcpo", name) for name in ("none", "mean", "b")}
        found = gradients(self.policy, groups, losses)
        kl = self.share(log_ratio.expm1() - log_ratio, self.mask[:, :1])
        self.numbers[f"minirl: KL of a response, {at}"] = kl
        self.numbers[f"minirl: cosine, {at}"] = over.of(cosine(found["token"], found["response"]))
        for rule in ("GRPO", "GSPO", "SAPO") if last else ():
            self.numbers[f"sapo: cosine, {rule}, {at}"] = over.of(
                cosine(found[rule], found["free"])
            )
            applied = weights(RULES[rule], logp, self.batch) * self.mask.sum(
                1, keepdim=True
            )  # [N, T]
            largest = (applied / self.batch.advantages[:, None]).nan_to_num().abs().max()
            self.numbers[f"sapo: largest weight, {rule}, {at}"] = [float(largest)] * 3
        if steps == 4:
            for one, other in (("mean", "none"), ("b", "mean")):
                ours, theirs = variance(found[one]), variance(found[other])
                ratio = over.of(lambda count, a=ours, b=theirs: a(count) / b(count))
                self.numbers[f"vcpo: variance, {one} / {other}, {at}"] = ratio

    def precision(self) -> None:
        """KL(μ ‖ π) of samplers in bfloat16 and float8, and the angle between the two levels."""
        for name in PRECISIONS:
            batch = self.responses[name]
            logp = all_logprobs(self.policy, batch, self.args, ALONE).logp
            gap = (logp - batch.rollout_logp) * batch.mask  # [N, T]: log π/μ
            n, groups = len(batch) // G, self.mixed(batch)
            prompt = torch.arange(n).repeat_interleave(G)  # [N]
            kl = Bootstrap(n).ratio(gap.expm1() - gap, batch.mask[:, :1], prompt)
            self.numbers[f"minirl: KL of a response, {name}"] = kl
            if not groups:
                continue  # of four prompts, perhaps
            found = gradients(self.policy, groups, LEVELS)
            angle = Bootstrap(len(groups)).of(cosine(found["token"], found["response"]))
            self.numbers[f"minirl: cosine, {name}"] = angle

    def stapo(self) -> None:
        """Spurious tokens' share of tokens and of |gradient|²; the norm beside its exact form."""
        batch, args = self.batch, stapo.Args()
        batch.entropy = self.look(entropies).statistic
        logp, size = self.squared()
        batch.logp = logp
        energy = size * batch.advantages[:, None] ** 2  # [N, T]
        live = self.mask * (batch.advantages != 0)[:, None]  # [N, T]
        for tau_p in (0.002, 0.05):
            args.tau_p = tau_p
            stapo.choose_tokens(args, batch, ALONE)
            low = (logp.exp() < tau_p) & (batch.advantages[:, None] > 0) & (live > 0)  # [N, T]
            for name, where in (("spurious", batch.spurious), ("improbable", low)):
                at = f"τ_p = {tau_p}"
                self.numbers[f"stapo: {name}, tokens, {at}"] = self.share(where, live)
                self.numbers[f"stapo: {name}, gradient², {at}"] = self.share(energy * where, energy)
        # Norms over all parameters, of single tokens: the 40 rarest, and 80 drawn by chance
        places = self.mask.nonzero()  # [M, 2]
        order = logp[places[:, 0], places[:, 1]].argsort()  # [M]
        chance = torch.randperm(len(places), generator=torch.Generator().manual_seed(0))[:80]
        rows, at = torch.cat([places[order[:40]], places[chance]]).T  # [120], [120]
        ends = (batch.prompt_len[rows] + at).tolist()
        contexts = [batch.sequences[row, :end].tolist() for row, end in zip(rows, ends)]
        how = {"logps": [[0.0]] * len(rows), "eos": [], "device": "cpu"}
        single = Rollout.pack(prompts=contexts, tokens=batch.tokens[rows, at, None].tolist(), **how)
        _, norms = gradient_norms(self.policy, single, self.args, ALONE)  # [120]
        exact, measured = size[rows, at].clamp(min=1e-12), norms.square()  # [120]
        self.series["norms"] = [exact.tolist(), measured.tolist()]
        found = Bootstrap(len(rows)).of(correlation(exact.log(), measured.log()))
        self.numbers["stapo: correlation of log |∇|² with the exact form"] = found

    def goldilocks(self) -> None:
        """|gradient| of each group against its share of right responses p."""
        groups, p = self.batch.split(self.P), self.right  # [P]
        norms = gradients(self.policy, groups, {"all": objective("goldilocks")})["all"].norm(dim=1)
        self.series["norms by p"] = [p.tolist(), norms.tolist()]
        law = (p * (1 - p)).sqrt()  # [P]
        found = self.over.of(correlation(norms, law))
        self.numbers["goldilocks: correlation of |gradient| with √(p(1-p))"] = found
        edge = (law > 0) & ((p < 0.2) | (p > 0.8))  # [P]
        for words, where in (("p of 3/8 to 5/8", (p - 0.5).abs() < 0.2), ("p of 1/8 or 7/8", edge)):
            self.numbers[f"goldilocks: |gradient|, {words}"] = self.over.ratio(norms * where, where)
        self.numbers["goldilocks: p is 0 or 1"] = self.over.ratio(law == 0, law >= 0)

    def deep_grpo(self) -> None:
        """How often a new ending is right, by the depth of the cut. What endings, or as many new
        responses, add to groups without a right response."""
        cuts, roots = self.responses["cuts"], self.responses["roots"]
        prompt, every = cuts.origin // G, torch.ones(len(cuts))
        found = {"right, new responses": self.over.ratio(roots.rewards, every, prompt)}
        for third in (1, 2, 3):
            where = (cuts.depth > (third - 1) / 3) & (cuts.depth <= third / 3)
            found[f"right, cut in third {third}"] = self.over.ratio(
                cuts.rewards * where, where, prompt
            )
        hopeless = (self.right == 0).nonzero()[:, 0].tolist()
        for name, batch, n in (("cuts", cuts, K), ("new responses", roots, K * CUT)):
            groups = [batch.rows((prompt == p).nonzero()[:, 0]) for p in hopeless]
            for group in groups:
                group.advantages = deep_grpo.advantages(group.rewards.view(-1, n)).flatten()
                group.advantages /= group.mask.sum()  # the token mean
                group.old_logp, group.branch = group.rollout_logp, torch.zeros(len(group))
            if groups:
                live = torch.tensor([float(group.advantages.any()) for group in groups])
                told = f"hopeless groups with a gradient, {name}"
                found[told] = Bootstrap(len(live)).ratio(live, torch.ones(len(live)))
                loss = {"all": objective("deep_grpo")}
                norms = gradients(self.policy, groups[:HOPELESS], loss)["all"].norm(dim=1)
                told = f"|gradient| of hopeless groups, {name}"
                found[told] = Bootstrap(len(norms)).ratio(norms, torch.ones(len(norms)))
        self.numbers |= {f"deep_grpo: {words}": value for words, value in found.items()}

    def mass(self) -> None:
        """Where probability goes in one step on wrong responses alone, and on right ones alone: to
        the sampled token, to the other likely ones (of 10; of 18 tokens, of 3), or to the rest."""
        k = 10 if self.policy.lm.config.vocab_size > 100 else 3
        likely: list[Tensor] = []

        def others(logprobs: Tensor, tokens: Tensor, ids: Tensor) -> Tensor:
            return (logprobs.gather(-1, ids).exp() * (ids != tokens[:, None])).sum(-1)

        def first(logprobs: Tensor, tokens: Tensor) -> Tensor:
            likely.append(logprobs.topk(k).indices)  # [b, k]
            return others(logprobs, tokens, likely[-1])

        before = self.look(first)
        for words, sign in (("wrong", -1), ("right", 1)):
            optimizer, again = self.restart(), iter(likely)  # the same places in the same order
            part = Rollout.join(*self.parts[:4])
            part.advantages = part.advantages * (part.advantages * sign > 0)  # [n]
            update(self.policy, optimizer, part, self.args)
            now = self.look(lambda logprobs, tokens, ids=again: others(logprobs, tokens, next(ids)))
            sampled, other = now[0].exp() - before[0].exp(), now[1] - before[1]  # [N, T]
            changes = {"sampled": sampled, "likely": other, "rest": -sampled - other}
            for which, rows in (
                ("wrong", self.batch.rewards == 0),
                ("right", self.batch.rewards > 0),
            ):
                where = self.mask * rows[:, None]  # [N, T]
                for place, change in changes.items():
                    told = f"mass: step on {words}, seen in {which}, {place}"
                    self.numbers[told] = self.share(change * where, where)
        self.restart()


def measured(subject: Subject, seed: int, kept: Path) -> dict:
    """The numbers and series of one subject with one seed of prompts. Its responses are in the file
    `kept`, or will be."""
    torch.set_num_threads(1)
    panels = Panels(subject, seed, stored(kept, subject, seed))
    if subject.only_stapo:
        panels.stapo()
    else:
        panels.measure()
    numbers = {key: [float(f"{x:.3g}") for x in found] for key, found in panels.numbers.items()}
    return {"seed": seed, "numbers": numbers, "series": panels.series}
