"""The recipe: five layers that work together, each with a flag.

Parts of six papers (their files say which), on the base of He et al., "JustRL: Scaling a 1.5B LLM
with a Simple RL Recipe", 2025, arXiv 2512.16649.

Objective, token-means over main responses and over branches, with r = π_θ(y_t) / π_old(y_t):

    J = 1/T_main Σ_main sg[min(w, 8)] I l + λ 1/T_branch Σ_branch sg[min(w, 8)] I l
    l = min(r Â, clip(r, 1-ε_low, 1+ε_high) Â)    or, with MASPO's gate,    sg[F] r Â
    Â = (R - b) / std R in a prompt's group, (R - mean R) / std R among a branch's siblings
    w = Π_t π_old(y_t)/μ(y_t) of a response,     I = 0 for STAPO's spurious tokens, else 1

Gradient weight on ∇ log π_θ(y_t), before each stream's average (a branch's times λ):

    min(w, 8) I M r Â    or    min(w, 8) F r Â
    M = 0 if (Â > 0 and r > 1+ε_high) or (Â < 0 and r < 1-ε_low), else 1

π_old are the weights when the batch is due, μ those that sampled it. b is vcpo.py's baseline, or
the mean; F maspo.py's gate. T_main and T_branch count the tokens left, I = 1.
Each layer takes hold at its own place of a step, which is why they can be combined:

    layer                        where              its file        off
    1 clip-higher, token mean    loss, average      justrl.py       --clip_high 0.2 --no_token_mean
    2 mask or gate of tokens     loss               stapo, maspo    --tokens none
    3 curriculum                 choice of prompts  goldilocks.py   --no_curriculum
    4 branches                   after the rewards  deep_grpo.py    --branches 0
    5 stale batches              queue, Â, lr       vcpo.py         --lag 0

With none this is grpo.py without its KL term, with 1 justrl.py, with 1 and 2 stapo.py or maspo.py,
with 3 goldilocks.py (no KL term): to the bit. 4 and 5 are their files' but for what stands below.
What a file has as an object or a function stands here letter for letter, and tests hold both.

Where layers meet: the teacher of 3 and the pivots of 4 learn from rewards when they are sampled,
the policy of 5 when they are due. STAPO's quantile is over main rows and branches. A branch's w is
of its own tokens, not of its prefix. b is for groups of main rows; a branch is compared with its
siblings' plain mean.

Base file: goldilocks.py. Differs from it in:
1. Layers 1, 2, 4 and 5; no KL term, no reference model.
2. The teacher can be left out.

Differs from the papers in:
1. One kind of advantage for all, grpo.py's z-score. (Branches: mean-centred there. vcpo.py: the
   population's std, a constant factor.)
2. vcpo.py has one optimiser step per batch, with w = π_θ/μ and no ratio. Here π_old is evaluated
   anew when a stale batch is due: w says how far the policy had gone by then, r how far this batch
   takes it, and the clip bounds r alone. With one step per batch it is the same gradient.
3. `--async` only without the curriculum.

Confidence: the combination is ours and in no paper; each part as in its file.

Run it:
    torchrun -m variants.recipe                             # laptop, some minutes, no download
    torchrun -m variants.recipe --tokens none --no_curriculum --branches 0 --lag 0     # justrl.py
    # a node of eight; sizes are ours
    torchrun --nproc_per_node=8 -m variants.recipe --model Qwen/Qwen2.5-Math-1.5B --task math \\
        --boundary . --prompts_per_step 64 --group_size 8 --max_new_tokens 3072 --lr 1e-6 \\
        --teacher_lr 1e-5 --micro_tokens 8192
"""

from collections import deque  # <own>
from concurrent.futures import Future, ThreadPoolExecutor  # <own>
from dataclasses import dataclass
from functools import partial  # <own>
from pathlib import Path
from random import Random  # <own>
from typing import Annotated, Literal  # <own>

from common.batch import Rollout  # <own>
from common.data import Problem, Task, encode, load_task  # <own>
from common.distributed import World, clip_gradients, divide_gradients, shard
from common.distributed import CLOSING, gather, global_sum  # <own>
from common.logprobs import Policy, all_logprobs, frozen_reference, micro_batches
from common.logprobs import response_logprobs, sampler_gap
from common.plumbing.balance import balance_tokens
from common.plumbing.checkpoint import load_checkpoint, save_checkpoint, save_model
from common.plumbing.errors import BadInput  # <own>
from common.plumbing.evaluation import evaluate
from common.plumbing.flags import Betas, Count, Flags, NonNegative, Positive, Temperature, Whole
from common.plumbing.flags import Exponent, Share  # <own>
from common.plumbing.launch import launch
from common.plumbing.metrics import Means, by_sign, of_rollout
from common.plumbing.model import load_model
from common.plumbing.norms import gradient_norms, strange_part  # <own>
from common.plumbing.tracking import Run
from common.rollout import make_engine
import numpy  # <own>
import torch
import tyro  # <own>
from torch import Tensor, nn  # <own>


@dataclass
class Args(Flags):
    model: str = "tiny"
    """Hub name, local folder, or `tiny`, the embedded model."""
    steps: Count = 150
    """Rollouts, each followed by `minibatches` optimiser steps (ours)."""
    prompts_per_step: Count = 16
    """Prompts in a rollout, over all ranks (ours)."""
    group_size: Count = 8
    """G: responses to each prompt (DeepSeekMath: 64)."""
    minibatches: Count = 4
    """Optimiser steps per rollout; from the second on π_θ has left π_old and the ratios are alive
    (DeepSeekMath: 1)."""
    max_new_tokens: Count = 64
    """Length limit of a response (DeepSeekMath: 1024)."""
    temperature: Temperature = 1.0
    """Sampling temperature, also applied in every log-probability (papers: 1)."""
    lr: Positive = 3e-4
    """AdamW's learning rate, constant after warm-up; right for the embedded model (DeepSeekMath:
    1e-6 at 7B)."""
    eval_every: Count = 25
    """Steps between two measurements on the held-out problems (ours)."""
    save_every: Count = 50
    """Steps between two checkpoints (ours)."""
    save_hf: bool = False
    """Write the final model in the Hugging Face format, to `model` in the run folder."""
    resume: bool | Literal["auto"] = False
    """Go on from the newest checkpoint in the run folder; auto: if there is one."""
    micro_tokens: Count = 16384
    """Padded tokens in one forward and backward pass: changes memory, never the gradient (ours)."""
    warmup: Whole = 5
    """Steps over which lr rises linearly (ours; verl's default: none)."""
    betas: Betas = (0.9, 0.95)
    """AdamW's decay rates (OpenRLHF's; verl, on which most of the papers' code runs, has 0.9
    0.999)."""
    weight_decay: NonNegative = 0.0
    """AdamW's decoupled weight decay (ours; verl's default: 0.01)."""
    grad_clip: Positive = 1.0
    """Largest gradient norm (verl's default)."""
    clip_low: NonNegative = 0.2
    """ε below 1 (papers)."""
    clip_high: NonNegative = 0.28  # <own>
    """ε above 1, layer 1 (DAPO and STAPO papers; off: 0.2)."""
    token_mean: bool = True  # <own>
    """Layer 1: the mean over all tokens; False: the mean of the responses' means."""
    tokens: Literal["none", "stapo", "maspo"] = "stapo"  # <own>
    """Layer 2: STAPO's mask of spurious tokens, or MASPO's soft gate in place of the clip."""
    tau_p: Share = 0.002  # <own>
    """stapo: a token below this probability may be spurious (paper)."""
    entropy_quantile: Share = 0.8  # <own>
    """stapo, τ_h: so may tokens below this quantile of the entropies (paper, versions 1 to 3)."""
    entropy_over: Literal["all", "rare"] = "all"  # <own>
    """stapo: the quantile's tokens, all of the mini-batch or (version 4) the rare good ones."""
    sigma_base: Positive = 1.0  # <own>
    """maspo: width of the gate for a token of probability 1 (authors' code)."""
    sigma_high: Positive = 10.0  # <own>
    """maspo: largest width, however rare the token (authors' code)."""
    alpha: NonNegative = 0.3  # <own>
    """maspo: how fast the width grows as a token gets rarer (authors' code)."""
    beta_pos: NonNegative = 0.03  # <own>
    """maspo: how much a positive advantage widens the gate (authors' code)."""
    beta_neg: NonNegative = 0.03  # <own>
    """maspo: how much a negative advantage narrows it (authors' code)."""
    curriculum: bool = True  # <own>
    """Layer 3: a teacher chooses the prompts; False: they come in their order."""
    teacher: str = ""  # <own>
    """Model whose backbone the teacher starts from: hub name or folder (default: the student's)."""
    candidates: Count = 16  # <own>
    """K: prompts that compete for each slot of the batch (ours)."""
    explore: Share = 0.1  # <own>
    """η: share of slots given to a random candidate, to keep the teacher's sample honest (ours)."""
    window: Count = 2048  # <own>
    """Latest prompts the teacher learns from; older ones tell of an older student (ours)."""
    teacher_batch: Count = 64  # <own>
    """Prompts in one of its updates; selection begins when the window holds as many (ours)."""
    teacher_updates: Whole = 2  # <own>
    """Updates of the teacher per step (ours)."""
    teacher_lr: Positive = 1e-3  # <own>
    """AdamW's rate for the teacher, ten times that for its head (ours; real models: 1e-5)."""
    branches: Whole = 8  # <own>
    """Layer 4, K: new endings from a pivot of each failed response; 0: none (DEEP-GRPO's paper)."""
    boundary: str = ";"  # <own>
    """Text that ends a segment: a token that ends in it is a place to branch (paper: `.`)."""
    branch_weight: NonNegative = 1.0  # <own>
    """λ: weight of the branches' stream (paper)."""
    depth_power: Exponent = 2.0  # <own>
    """γ: preference for deep pivots (paper)."""
    min_branches: Whole = 0  # <own>
    """With fewer branches of non-zero advantage a step uses none (released code: 128)."""
    lag: Whole = 2  # <own>
    """Layer 5, k: batches trained on between a batch's sampling and its own training; 0: none
    (ours: by four mini-batches eight updates, as in vcpo.py)."""
    is_cap: Positive = 8.0  # <own>
    """Largest weight of a response in the loss (paper); ESS sees the weights uncut."""
    ess_scaling: bool = True  # <own>
    """With a lag: shorten the step by the square root of the batch's effective sample size."""
    rho_on: Positive = 1.0  # <own>
    """ESS ratio at which the step has its full length (paper: 1)."""
    optimal_baseline: bool = True  # <own>
    """With a lag: centre advantages on b, see vcpo.py; False: on the group's mean."""
    asynchronous: Annotated[bool, tyro.conf.arg(name="async")] = False  # <own>
    """Sample the next batch beside the update, as one of the `lag`."""


def advantages(rewards: Tensor) -> Tensor:
    """Group z-score: `[P, G]` -> `[P, G]`. Rewards [1, 0, 0, 0] give [1.5, -0.5, -0.5, -0.5]."""
    if len(rewards) == 0:  # of no branches, since no response failed  # <own>
        return rewards  # <own>
    # Equal rewards become exactly 0 first: the mean of eight 0.3 is not quite 0.3.
    rewards = rewards - rewards[:, :1]  # [P, G]
    centred = rewards - rewards.mean(dim=1, keepdim=True)  # [P, G]: the baseline is the mean
    # A group all right or all wrong gives exactly 0: a prompt too easy or too hard teaches nothing
    # about the reward. The 1e-6 only keeps 0/0 away.
    return centred / (rewards.std(dim=1, keepdim=True) + 1e-6)  # [P, G]


# <own>
def threshold_population(
    args: Args, logp: Tensor, entropy: Tensor, advantages: Tensor, mask: Tensor
) -> Tensor:
    """The entropies `[M]` of which τ_h is a quantile."""
    chosen = mask.bool()  # [n, T]
    if args.entropy_over == "rare":
        chosen = chosen & (advantages[:, None] > 0) & (logp.exp() < args.tau_p)
    return entropy[chosen]


def entropy_threshold(args: Args, population: Tensor) -> Tensor:
    """τ_h; below every entropy where there is no candidate."""
    if len(population) == 0:
        return population.new_tensor(-1.0)
    values = population.cpu().numpy()  # torch.quantile takes at most 2^24 numbers
    return population.new_tensor(numpy.quantile(values, args.entropy_quantile))


def spurious_tokens(
    args: Args, logp: Tensor, entropy: Tensor, advantages: Tensor, mask: Tensor, threshold: Tensor
) -> Tensor:
    """True `[n, T]` on the tokens to silence: rewarded (Â > 0), improbable, the policy was sure."""
    sure = (
        entropy < threshold - 1e-5
    )  # [n, T]: siblings begin alike, and rounding must not part them
    return (advantages[:, None] > 0) & (logp.detach().exp() < args.tau_p) & sure & mask.bool()


def tokens_left(
    args: Args, now: tuple, advantages: Tensor, mask: Tensor, world: World | None = None
) -> Tensor:
    """I `[n, T]`: the mask, without STAPO's spurious tokens. `now`: log π_θ and entropy `[n, T]` of
    a whole mini-batch; with `world`, of this rank's part."""
    if args.tokens != "stapo":
        return mask
    pool = threshold_population(args, *now, advantages, mask)  # [M]
    threshold = entropy_threshold(args, gather(pool, world) if world else pool)  # []
    return mask * ~spurious_tokens(args, *now, advantages, mask, threshold)


def soft_gate(args: Args, ratio: Tensor, old_logp: Tensor, A: Tensor) -> Tensor:
    """MASPO's F `[n, T]` in (0, 1]; A `[n, 1]`."""
    with torch.no_grad():
        old_p = old_logp.exp()  # [n, T]: the mass a token had
        width = args.sigma_base / old_p**args.alpha  # [n, T]
        width = width.clamp(args.sigma_base, args.sigma_high)  # [n, T]: m
        risk = torch.where(A > 0, 1 + args.beta_pos * A, 1 / (1 - args.beta_neg * A))  # [n, 1]
        sigma = width * risk.clamp(0.1, 10)  # [n, T]
        outward = A * (ratio - 1) > 0  # [n, T]: away from π_old; the way back is never gated
        gate = torch.where(outward, (-((ratio - 1) ** 2) / (2 * sigma**2)).exp(), 1.0)  # [n, T]: F
    return gate


class Teacher(nn.Module):
    """f(q) = 1/2 σ(u · mean_t h_t(q) + v): what a prompt can teach the student, from its text."""

    def __init__(self, backbone: nn.Module):
        super().__init__()
        self.lm, self.head = backbone, nn.Linear(backbone.config.hidden_size, 1)
        nn.init.zeros_(self.head.weight), nn.init.zeros_(self.head.bias)  # at first all f are 1/4

    def forward(self, sequences: Tensor, lengths: Tensor) -> Tensor:
        """`sequences [n, S]` right-padded, `lengths [n]` -> `[n]` in (0, 1/2)."""
        hidden = self.lm(input_ids=sequences, use_cache=False).last_hidden_state  # [n, S, H]
        real = torch.arange(hidden.shape[1], device=lengths.device) < lengths[:, None]  # [n, S]
        mean = (hidden * real[..., None]).sum(dim=1) / lengths[:, None]  # [n, H]
        return 0.5 * self.head(mean)[:, 0].float().sigmoid()  # the range of sqrt(p (1-p))


def learning_value(rewards: Tensor) -> Tensor:
    """sqrt(p̂ (1-p̂)) of each group `[P, G]` -> `[P]`: the population standard deviation of rewards
    0 and 1, and of part marks. All wrong or all right is 0, a verdict too."""
    return (rewards - rewards[:, :1]).std(dim=1, correction=0)


def select(values: Tensor, candidates: list[list], explore: float, rng: Random) -> list[tuple]:
    """For each slot (which candidate, whether by chance): the best of `values [B, K]`, or with
    probability `explore` any. No prompt is taken twice while its slot has another left."""
    chosen, taken = [], set()
    for scores, prompts in zip(values.tolist(), candidates):
        order = sorted(range(len(prompts)), key=lambda k: -scores[k])
        chance = rng.random() < explore
        if chance:
            rng.shuffle(order)
        k = next((k for k in order if prompts[k] not in taken), order[0])
        taken.add(prompts[k])
        chosen.append((k, chance))
    return chosen


def rank_correlation(a: Tensor, b: Tensor) -> float:
    """Spearman's: that of the ranks, equal values sharing theirs; 0 where a side is constant."""
    if len(a) < 2:
        return 0.0
    # Values below each less values above it: twice its rank, but for a constant
    ranks = [(x[:, None] - x).sign().double().sum(dim=1) for x in (a, b)]  # [n], [n]
    return torch.corrcoef(torch.stack(ranks))[0, 1].nan_to_num().item()


class Curriculum:
    """Which prompts the student gets. In each step `choose`, before the rollout, asks the teacher
    for f(q) of all candidates; `learn`, after the rewards, shows it what the chosen ones taught.

    The ranks divide the teacher's work and share what comes of it: all see the same values, make
    the same choice and keep the same window.
    """

    def __init__(self, args: Args, task: Task, world: World):
        if args.teacher_batch % world.size or args.teacher_batch > args.window:
            limits = f"a multiple of the {world.size} ranks, and at most --window {args.window}"
            raise BadInput(f"--teacher_batch {args.teacher_batch}: must be {limits}")
        self.args, self.task, self.world = args, task, world
        backbone, self.tokenizer = load_model(args.teacher or args.model, world, "--teacher")
        self.encode(task.held_out[:1])  # refuses now, not after the run has begun
        self.teacher = shard(Teacher(backbone.base_model), args, world)
        head = {"params": self.teacher.head.parameters(), "lr": 10 * args.teacher_lr}
        groups = [{"params": self.teacher.lm.parameters()}, head]
        self.optimizer = torch.optim.AdamW(groups, lr=args.teacher_lr, weight_decay=0.0, fused=True)
        # The latest choices: (prompt ids, value observed, value predicted, whether by chance)
        self.window = deque(maxlen=args.window)

    def choose(self, step: int) -> list[Problem]:
        """The problems of a step, all ranks', one for each of its B slots: of K candidates the one
        with the largest f(q), or by chance any."""
        args, B, K = self.args, self.args.prompts_per_step, self.args.candidates
        P, rank = B // self.world.size, self.world.rank
        slots = range((step - 1) * B, step * B)
        pool = [[self.task.train(slot * K + k) for k in range(K)] for slot in slots]  # [B, K]
        # Each rank asks about its own slots; then all choose for all slots alike, so that none
        # takes a prompt that another has taken.
        asked = [problem for slot in pool[rank * P : (rank + 1) * P] for problem in slot]
        values = self.predict(self.encode(asked))  # [P·K]
        self.values = gather(values, self.world).view(B, K).cpu()  # [B, K]
        prompts = [[problem.prompt for problem in slot] for slot in pool]
        explore = args.explore if len(self.window) >= args.teacher_batch else 1.0  # no teacher yet
        self.rng = Random(f"{args.seed}/{step}")  # each step's own: nothing to save
        choice = select(self.values, prompts, explore, self.rng)
        self.predicted = self.values[range(B), [k for k, _ in choice]]  # [B]
        self.by_chance = torch.tensor([chance for _, chance in choice])  # [B]
        self.chosen = [slot[k] for slot, (k, _) in zip(pool, choice)]
        return self.chosen

    def learn(self, rewards: Tensor) -> dict[str, tuple]:
        """From this rank's rewards `[P, G]`: what every rank's choices have taught goes into the
        window, and the teacher is updated. Returns the step's metrics."""
        observed = gather(learning_value(rewards), self.world).cpu()  # [B]
        ids, columns = self.encode(self.chosen), (observed, self.predicted, self.by_chance)
        self.window.extend(zip(ids, *(column.tolist() for column in columns)))
        if len(self.window) >= self.args.teacher_batch:
            for _ in range(self.args.teacher_updates):
                self.teach()
        return self.statistics(observed)

    def encode(self, problems: list[Problem]) -> list[list[int]]:
        """The bare prompts as the teacher's tokens."""
        return [encode(problem.prompt, None, self.tokenizer, "--teacher") for problem in problems]

    def predict(self, prompts: list[list[int]], targets: Tensor | None = None) -> Tensor:
        """f(q) of these prompts `[n]`; with `targets [n]` also the gradient of Σ (f - target)²."""
        # A batch of prompts without responses
        none, values = [[]] * len(prompts), torch.zeros(len(prompts), device=self.world.device)
        batch = Rollout.pack(prompts=prompts, tokens=none, logps=none, eos=[], device=values.device)
        for rows in micro_batches(self.teacher, batch, self.args.micro_tokens, self.world):
            micro, learning = batch.rows(rows), targets is not None
            sequences = micro.sequences[:, : micro.prompt_len.max()]  # [b, S]
            with torch.set_grad_enabled(learning):
                f = self.teacher(sequences, micro.prompt_len)  # [b]
            if learning:
                (f - targets[rows]).square().sum().backward()
            values[rows] = f.detach()
        return values

    def teach(self) -> None:
        """One update: squared error on `--teacher_batch` random rows, each rank its share."""
        n, world = self.args.teacher_batch, self.world
        share = self.rng.sample(self.window, n)[world.rank :: world.size]
        targets = torch.tensor([observed for _, observed, *_ in share], device=world.device)
        self.predict([ids for ids, *_ in share], targets)
        divide_gradients(self.teacher, n / world.size, world)
        if clip_gradients(self.teacher, self.args.grad_clip) < float("inf"):  # nor NaN
            self.optimizer.step()
        self.optimizer.zero_grad()

    def statistics(self, observed: Tensor) -> dict[str, tuple]:
        """Metrics as (sum, count) pairs, from the values `[B]` that the choices proved to have."""
        chance, best, idle = self.by_chance, ~self.by_chance, observed == 0  # [B], [B], [B]
        above = self.predicted - self.values.mean(dim=1)  # [B]
        # The teacher is judged on random prompts, by what it said before they were tried. (What it
        # chose itself is all alike: there the correlation is near 0 even for a good teacher.)
        tried = [(f, y) for _, y, f, random in self.window if random][-self.args.teacher_batch :]
        f, y = torch.tensor(tried).view(-1, 2).T  # [b], [b]
        terms = sum(len(problem.prompt) // 2 for problem in self.chosen)  # drawn evenly: 4.5 each
        return {
            "chosen_over_mean": ((above * best).sum(), best.sum()),
            "teacher_mean": (self.values.sum(), self.values.numel()),
            "teacher_mse": ((f - y).square().sum(), len(f)),
            "teacher_rank_corr": (rank_correlation(f, y), len(f) > 1),
            "zero_groups_chosen": ((idle & best).sum(), best.sum()),
            "zero_groups_uniform": ((idle & chance).sum(), chance.sum()),
            "terms": (terms, len(self.chosen) * self.task.name.startswith("arithmetic")),
        }


def pivots(response: list[int], boundaries: set[int]) -> list[int]:
    """Prefix lengths to cut a response at: 0, the root, and each segment's end but the last's."""
    return [0] + [i for i, t in enumerate(response, 1) if t in boundaries and i < len(response)]


def pivot_distribution(count: int, u: float, v: float, depth_power: float) -> tuple[Tensor, Tensor]:
    """Depths d `[count]` of a response's pivots, and Q `[count]` ∝ σ(u d + v) d^γ."""
    depth = torch.arange(1, count + 1).double() / (count + 1)  # [count]: the root's is not 0
    weight = torch.sigmoid(u * depth + v) * depth**depth_power  # [count]
    return depth, weight / weight.sum()


def choose_pivot(
    response: list[int], boundaries: set[int], u: float, v: float, depth_power: float, rng: Random
) -> tuple[int, float]:
    """How many tokens of a failed response are kept, drawn from Q, and how deep that is."""
    cuts = pivots(response, boundaries)
    depth, chances = pivot_distribution(len(cuts), u, v, depth_power)
    i = rng.choices(range(len(cuts)), chances.tolist())[0]
    return cuts[i], depth[i].item()


def fit_success(feedback: list[tuple[float, float]]) -> tuple[float, float]:
    """(u, v) of P(some branch succeeds | depth) = σ(u depth + v), from (depth, 0 or 1) pairs: least
    Σ log-loss + u²/2.

    Up to 10 pairs, or while all had the same outcome, it is P = 1 everywhere: u = 0, v = ∞.
    Restarts count like any other pivot: the root competes with the others in Q, so its chance of
    success has to be estimated too.
    """
    if len(feedback) <= 10 or len({success for _, success in feedback}) < 2:
        return 0.0, float("inf")
    depth, success = torch.tensor(feedback, dtype=torch.float64).T  # [n], [n]
    features = torch.stack([depth, torch.ones_like(depth)], dim=1)  # [n, 2]
    parameters = torch.zeros(2, dtype=torch.float64)  # u, v
    penalty = torch.tensor([1.0, 0.0], dtype=torch.float64)  # on u alone
    for _ in range(30):  # Newton's method
        p = torch.sigmoid(features @ parameters)  # [n]
        gradient = features.T @ (p - success) + penalty * parameters  # [2]
        hessian = features.T @ (features * (p * (1 - p))[:, None]) + penalty.diag()  # [2, 2]
        parameters = parameters - torch.linalg.solve(hessian, gradient)
    return tuple(parameters.tolist())


class Branches:
    """New endings for failed responses. In each step `grow`, after the rewards, cuts the failed
    ones, samples and judges; `split` keeps every branch in its parent's mini-batch.

    Each rank branches from its own responses; what succeeds at which depth all learn together.
    """

    def __init__(self, args: Args, engine: object, task: Task, tokenizer: object, world: World):
        texts = tokenizer.batch_decode([[token] for token in range(len(tokenizer))])
        ends = {i for i, text in enumerate(texts) if text.rstrip(" ").endswith(args.boundary)}
        if not args.boundary or not ends:
            raise BadInput(f"--boundary {args.boundary!r}: no token ends in it")
        self.args, self.engine, self.task, self.world = args, engine, task, world
        self.tokenizer, self.boundaries = tokenizer, ends
        # Of the latest pivots, all ranks': (depth, whether some branch succeeded)
        self.feedback: deque[tuple[float, float]] = deque(maxlen=10_000)

    def grow(self, rollout: Rollout, rewards: Tensor, problems: list, cursor: int) -> Rollout:
        """The rollout with the branches that teach something behind its rows. `rewards [P, G]`;
        `cursor` is the number of the first of the P problems."""
        args, world, K, G = self.args, self.world, self.args.branches, self.args.group_size
        # Each failed response is cut at one of its pivots, drawn from Q
        failed = (rewards.flatten() <= 0).nonzero()[:, 0]  # [F]: rows
        fit, responses, cuts = fit_success(list(self.feedback)), rollout.response_ids(), []
        for row in failed.tolist():
            rng = Random(f"{args.seed}/{cursor * G + row}")  # each response's own: nothing to save
            cuts.append(choose_pivot(responses[row], self.boundaries, *fit, args.depth_power, rng))
        prefixes = [responses[row][:kept] for row, (kept, _) in zip(failed.tolist(), cuts)]
        # From each pivot K new endings, all sampled in one batch
        parents = [problems[row // G] for row in failed.tolist()]
        starts = [parent.prompt_ids for parent in parents]
        grown = self.engine.generate(starts, K, args.max_new_tokens, args.temperature, prefixes)
        texts = self.tokenizer.batch_decode(grown.response_ids(), skip_special_tokens=True)
        scores = self.task.verifier(texts, [parent.answer for parent in parents for _ in range(K)])
        outcome = torch.tensor(scores, device=world.device).view(len(failed), K)  # [F, K]
        grown.record_rewards(parents, outcome)
        grown.advantages = advantages(outcome).flatten()  # [F·K]: over siblings, without the parent
        # Which main row a row is or grew from, and its stream
        rollout.origin = torch.arange(len(rollout), device=world.device)  # [N]
        grown.origin = failed.repeat_interleave(K)  # [F·K]
        rollout.branch = torch.zeros_like(rollout.advantages)  # [N]
        grown.branch = torch.ones_like(grown.advantages)  # [F·K]
        # What the regression learns from
        kept, depth = torch.tensor(cuts).view(-1, 2).T  # [F], [F]
        saved = (outcome > 0).any(dim=1)  # [F]
        self.feedback.extend(zip(*(gather(x, world).tolist() for x in (depth, saved.float()))))
        self.latest = fit, failed, kept > 0, depth, saved, outcome, grown.mask.sum()
        # Siblings all right or all wrong teach nothing
        grown = grown.rows(grown.advantages.abs() > 1e-8)
        enough = global_sum({"rows": len(grown)}, world)["rows"] >= args.min_branches
        return Rollout.join(rollout, grown) if enough else rollout

    def split(self, rollout: Rollout, N: int) -> list[Rollout]:
        """The mini-batches: equal shares of the N main rows, and beside each what grew from it."""
        of = rollout.origin // (N // self.args.minibatches)  # [N + branches]
        return [rollout.rows(of == i) for i in range(self.args.minibatches)]

    def balance(self, minibatch: Rollout) -> float:
        """T_main / T_branch of a mini-batch, over all ranks."""
        lengths, branch = minibatch.mask.sum(dim=1), minibatch.branch  # [n], [n]
        streams = {"main": lengths @ (1 - branch), "branch": lengths @ branch}
        streams = global_sum(streams, self.world)
        return streams["main"] / max(1.0, streams["branch"])

    def statistics(self, rollout: Rollout, rewards: Tensor) -> dict[str, tuple]:
        """Metrics of the latest growth as (sum, count) pairs; `rollout` has the branches in it."""
        fit, failed, deep, depth, saved, outcome, tokens = self.latest  # deep: not at the root
        (u, v), N = torch.tensor(fit, dtype=torch.float64), rewards.numel()
        wrong = (rewards <= 0).all(dim=1)  # [P]
        rescued = wrong[(failed[saved] // self.args.group_size).unique()]
        found = {
            "failed": (len(failed), N),
            "pivots_root": ((~deep).sum(), len(deep)),
            "groups_rescued": (rescued.sum(), wrong.sum()),
            "extra_tokens": (tokens, rollout.mask[:N].sum()),
            "tokens": (tokens, None),  # added to the main stream's
            "branches_used": (len(rollout) - N, None),
            "fit_u": (u, v.isfinite()),
            "fit_v": (v, v.isfinite()),
        }
        # Histogram of the depths at which branches start, the root left out
        for quarter in (1, 2, 3, 4):
            hit = deep & ((depth * 4).ceil() == quarter)  # [F]
            found[f"pivots_quarter_{quarter}"] = (hit.sum(), deep.sum())
        for ending, at in (("", deep), ("_root", ~deep)):
            found[f"branch_reward{ending}"] = (outcome[at].sum(), outcome[at].numel())
            found[f"pivots_saved{ending}"] = (saved[at].sum(), at.sum())
        return found


def log_weight(logp: Tensor, rollout_logp: Tensor, mask: Tensor) -> Tensor:
    """log w of whole responses `[n]`: the sum over their tokens `[n, T]`, not the mean."""
    return ((logp.detach() - rollout_logp) * mask).sum(dim=1)


def truncated(args: Args, log_w: Tensor) -> Tensor:
    """min(w, 8), finite for any log w."""
    return log_w.clamp(-20, 20).exp().clamp(max=args.is_cap)


def ess_ratio(log_w: Tensor) -> Tensor:
    """ρ = ESS/B = (Σ w)² / (B Σ w²) of the weights' logarithms `[B]`, finite for any of them."""
    return (2 * log_w.logsumexp(0) - (2 * log_w).logsumexp(0)).exp() / len(log_w)


def baseline_shift(log_w: Tensor, norms: Tensor, advantages: Tensor) -> Tensor:
    """b of a group, in units of its advantages: Σ w²|g|² Â / Σ w²|g|²; `[..., G]` -> `[...]`.

    (R - b)/std = Â - this, since Â is (R - mean)/std. In log space: w² alone overflows after a
    hundred tokens.
    """
    share = torch.softmax(2 * log_w + 2 * norms.clamp(min=1e-30).log(), dim=-1)  # [..., G]
    return (share * advantages).sum(dim=-1)


def baseline_shifts(args: Args, policy: Policy, batch: Rollout, world: World) -> Tensor:
    """`baseline_shift` of every response's group `[n]`; all ranks call it together."""
    A = batch.advantages.view(-1, args.group_size)  # [P, G]
    shifts, unequal = torch.zeros_like(A), (A != 0).any(dim=1)  # [P, G], [P]
    if args.optimal_baseline:
        # Where all rewards are equal b is their mean, whatever the norms: no pass for those.
        part = batch.rows(unequal.repeat_interleave(args.group_size))
        logp, norms = gradient_norms(policy, part, args, world)  # [n, T], [n]
        log_w = log_weight(logp, part.rollout_logp, part.mask)  # [n]
        log_w, norms = log_w.view(-1, A.shape[1]), norms.view(-1, A.shape[1])  # [p, G]
        shifts[unequal] = baseline_shift(log_w, norms, A[unequal])[:, None]
    return shifts.flatten()


CHECK_EVERY = 25  # steps between two rollouts that are not sampled ahead


class Stale:
    """Batches that wait until they are `lag` batches old, as in an asynchronous system.

    With `--async` one of them is not in the queue but being sampled, beside the update.
    """

    def __init__(self, engine: object, run: Run):
        self.args, self.device = args, device = run.args, run.world.device
        how = {"n": args.group_size, "limit": args.max_new_tokens, "temperature": args.temperature}
        self.generate = partial(engine.generate, **how)
        # (batches trained on when it was sampled, its mini-batches) of each
        self.queue: deque[tuple[int, list[Rollout]]] = deque()
        self.held = args.lag - args.asynchronous  # batches in it, once it is full
        self.ahead: Future | None = None  # the rollout that is sampled beside the update
        if not 0 <= self.held <= args.lag < args.steps:
            bounds = f"{int(args.asynchronous)} or more, and below --steps {args.steps}"
            raise BadInput(f"--lag {args.lag}: must be {bounds}")
        if args.asynchronous and (args.tensor_parallel > 1 or args.vllm_sleep):
            # Two users of NCCL, or of memory, at once
            raise BadInput("--async: not together with --tensor_parallel or --vllm_sleep")
        self.thread = ThreadPoolExecutor(1)
        CLOSING.append(self.thread.shutdown)
        if args.asynchronous and device.type == "cuda":
            self.thread.submit(torch.cuda.set_device, device).result()  # it starts on GPU 0
            torch.cuda.synchronize()  # what is under way belongs to the old stream
            # The trainer's own: kernels of one stream would take turns
            torch.cuda.set_stream(torch.cuda.Stream())
        elif args.asynchronous:
            run.say("--async on a CPU: it shows the staleness, not the speed-up")

    def sample(self, prompts: list[list[int]]) -> Rollout:
        """This step's rollout: the one sampled ahead, if there is one."""
        self.was_ahead = self.ahead is not None
        rollout, self.ahead = self.ahead.result() if self.ahead else self.generate(prompts), None
        return rollout

    def next(self, batch: list[Rollout], step: int) -> list[Rollout]:
        """The batch that is due in this step, its `number` from 1 on and `age` in updates; none
        while the queue fills. `batch` takes its place at the end."""
        self.number = max(1, step - self.held)
        self.queue.append((self.number - 1 - self.was_ahead, batch))
        if len(self.queue) <= self.held:
            return []
        version, due = self.queue.popleft()
        self.age = (self.number - 1 - version) * self.args.minibatches
        return due

    def sample_ahead(self, prompts: list[list[int]], step: int) -> None:
        """With `--async`: start on the next step's rollout; now and then leave it to its own step,
        where the sampler can be checked against the weights that it had."""
        if self.args.asynchronous and step % CHECK_EVERY:
            self.ahead = self.thread.submit(self.generate, prompts)

    def wait(self) -> None:
        """Return when nothing is being sampled: the engine may be given new weights."""
        if self.ahead:
            self.ahead.result()

    def state_dict(self) -> dict:
        ahead = vars(self.ahead.result()) if self.ahead else {}
        queue = [(version, [vars(part) for part in batch]) for version, batch in self.queue]
        return {"queue": queue, "ahead": ahead}

    def load_state_dict(self, state: dict) -> None:
        if state["other_ranks"] and (state["queue"] or state["ahead"]):
            raise BadInput(f"--resume: batches in flight: use {state['other_ranks']} rank(s)")
        for version, batch in state["queue"]:
            self.queue.append((version, [Rollout(**part).to(self.device) for part in batch]))
        if state["ahead"]:
            self.ahead = self.thread.submit(Rollout(**state["ahead"]).to, self.device)


def dealt(part: Rollout, world: World, G: int) -> Rollout:
    """`deal` for main rows in whole groups, as b needs them, and for branches row by row."""
    main = part.branch == 0  # [n]
    return Rollout.join(
        balance_tokens(part.rows(main), world, G), balance_tokens(part.rows(~main), world)
    )


def prepare(
    args: Args, policy: Policy, batch: Rollout, branches: Branches | None, world: World
) -> tuple[float, dict]:
    """What the first gradient needs to know of a whole mini-batch; all ranks call it together.

    b leaves the advantages, the tokens that count become a column `kept`. Returned are what main
    rows are divided by over what branches are, and statistics.
    """
    main, found, balance = batch.branch == 0, {}, 1.0  # [n]
    if args.lag:
        shift = torch.zeros_like(batch.advantages)  # [n]: a branch keeps its siblings' mean
        shift[main] = baseline_shifts(args, policy, batch.rows(main), world)
        batch.advantages = batch.advantages - shift
        found["baseline_shift"] = shift.abs().sum(), main.sum()
    # p and H of the whole mini-batch under π_θ
    now = all_logprobs(policy, batch, args, world) if args.tokens == "stapo" else ()  # [n, T] each
    batch.kept = tokens_left(args, now, batch.advantages, batch.mask, world)  # [n, T]
    if branches:  # that of what the streams are divided by: tokens left, or responses
        size = counted(args, batch.kept)[:, None]  # [n, 1]
        balance = branches.balance(Rollout(mask=size, branch=batch.branch))
    return balance, found


def counted(args: Args, kept: Tensor) -> Tensor:
    """What a row adds to its stream's denominator `[n]`: its tokens left, or 1."""
    return kept.sum(dim=1) if args.token_mean else torch.ones_like(kept[:, 0])


# </own>
# The metrics that show the mechanism at work; the first stays 0 while it does nothing.
# <own>
ACTED = {
    "layers_acted": "how many layers acted in the step",
    "branches_used": "branches in the batch",
    "ess_ratio": "effective sample size (share of the batch)",
}
# What tells of each layer that it acted
LAYERS = "clip_share gate_closed silenced chosen_over_mean branches_used lr_damping".split()
# </own>


def policy_loss(
    args: Args,
    *,
    logp: Tensor,
    old_logp: Tensor,
    rollout_logp: Tensor,
    ref_logp: Tensor | None,
    entropy: Tensor,
    advantages: Tensor,
    mask: Tensor,
    kept: Tensor | None = None,  # <own>
    branch: Tensor | None = None,  # <own>
    balance: float | None = None,  # <own>
) -> tuple[Tensor, Tensor, dict]:
    """-J summed over the n rows given, what to divide it by, and statistics as (sum, count) pairs.

    All `[n, T]` but advantages `[n]`, branch `[n]`, 1 on branches and 0 on main rows, and balance,
    what main rows are divided by over what branches are. `kept` and `balance` are the whole
    mini-batch's (default: of these rows). The caller adds sums and counts up over micro-batches and
    ranks and divides once: a mean of micro-batch means would be another objective. Every file is
    handed the same tensors, needed or not.
    """
    A = advantages[:, None]  # [n, 1]: one advantage for all tokens of a response
    # <own>
    ratio = (logp - old_logp).exp()  # [n, T]: r, 1 until the first optimiser step of a rollout
    clipped = ratio.clamp(1 - args.clip_low, 1 + args.clip_high)  # [n, T]
    # min, not just clip: it keeps the gradient of tokens that moved the wrong way, so that they can
    # be brought back.
    objective = torch.minimum(ratio * A, clipped * A)  # [n, T]
    out_above, out_below = ratio > 1 + args.clip_high, ratio < 1 - args.clip_low  # [n, T]
    cut = ((A > 0) & out_above) | ((A < 0) & out_below)  # [n, T]: M = 0
    stats = {"clip_share": ((cut * mask).sum(), mask.sum())}
    stats["clip_above"] = ((cut & out_above) * mask).sum(), mask.sum()
    stats["clip_below"] = ((cut & out_below) * mask).sum(), mask.sum()
    if args.tokens == "maspo":  # in place of min and clip
        gate = soft_gate(args, ratio, old_logp, A)  # [n, T]: F
        objective = gate * ratio * A  # [n, T]
        stats = {"gate_closed": (((1 - gate) * mask).sum(), mask.sum())}
    if args.lag:
        log_w = log_weight(old_logp, rollout_logp, mask)  # [n]: π_θ/π_old is in r
        weight = truncated(args, log_w)  # [n]
        objective = objective * weight[:, None]  # [n, T]
        stats["weight"] = weight.sum(), len(weight)
        stats["weight_max"] = torch.cat([mask.new_zeros(1), log_w.clamp(max=20).exp()]).max(), None
    if kept is None:
        kept = tokens_left(args, (logp.detach(), entropy), advantages, mask)  # [n, T]
    silenced = (mask - kept).sum()  # []
    stats |= {"silenced": (silenced, None), "silenced_share": (silenced, mask.sum())}
    size = counted(args, kept)  # [n]
    if not args.token_mean:
        objective = objective / kept.sum(dim=1, keepdim=True).clamp(min=1)  # [n, T]: 1/|y_i|
    branch = torch.zeros_like(advantages) if branch is None else branch  # [n]
    if balance is None:
        balance = (size @ (1 - branch)) / (size @ branch).clamp(min=1)
    # The caller divides by the main rows' size; times the balance first, the branches are averaged
    # over their own. λ weighs them.
    stream = 1 + (args.branch_weight * balance - 1) * branch  # [n]
    return -(objective * kept * stream[:, None]).sum(), size @ (1 - branch), stats
    # </own>


def main(args: Args, world: World) -> None:
    """The whole training loop."""
    lm, tokenizer = load_model(args.model, world)
    task = load_task(args, tokenizer)
    engine = make_engine(args, lm, world)
    # <own>
    if args.branches == 1:
        raise BadInput("--branches 1: must be 0, or 2 or more: a branch is judged by its siblings")
    if args.curriculum and args.asynchronous:
        raise BadInput("--async: only with --no_curriculum: it waits for this step's rewards")
    branches = Branches(args, engine, task, tokenizer, world) if args.branches else None
    curriculum = Curriculum(args, task, world) if args.curriculum else None
    # </own>
    reference = frozen_reference(args, lm, world)  # π_ref; None without a KL term
    policy = shard(Policy(lm), args, world)
    decay = {"betas": args.betas, "weight_decay": args.weight_decay}
    optimizer = torch.optim.AdamW(policy.parameters(), args.lr, fused=True, **decay)
    # <own>
    both, optimizers = policy, optimizer
    if curriculum:
        both = nn.ModuleList([policy, curriculum.teacher])
        optimizers = [optimizer, curriculum.optimizer]
    # </own>
    run = Run(args, task, world, Path(__file__).stem, ACTED)
    done = 0  # steps
    stale = Stale(engine, run)  # <own>
    if args.resume:
        done, state = load_checkpoint(run.folder, both, optimizers, world)  # <own>
        engine.load_state_dict(state["engine"])
        # <own>
        stale.load_state_dict(state)
        if curriculum:
            curriculum.window.extend(state["window"])
        if branches:
            branches.feedback.extend(state["feedback"])
        # </own>
    engine.sync(policy)
    if args.lag and args.optimal_baseline and (part := strange_part(policy)):  # <own>
        raise BadInput(f"{part}: no gradient norms, use --no_optimal_baseline")  # <own>
    run.start(done)
    if done == 0:
        run.clock("evaluate")
        run.log(0, evaluate(engine, task, tokenizer, args, world))
    P, G = args.prompts_per_step // world.size, args.group_size  # P: this rank's prompts

    for step in run.steps(done, args.steps):
        means = Means()

        # <own>
        # Choice: for each slot of the batch the candidate from which most can be learned, or the
        # problems in their order: the cursor is a function of the step.
        cursor = (step - 1) * args.prompts_per_step + world.rank * P
        if curriculum:
            run.clock("teacher")
            problems = curriculum.choose(step)[world.rank * P : (world.rank + 1) * P]
        else:
            problems = [task.train(cursor + i) for i in range(P)]
        # </own>

        # Rollout: this rank's P prompts, G responses each.
        run.clock("rollout")
        prompts = [problem.prompt_ids for problem in problems]
        rollout = stale.sample(prompts)  # <own>

        # Reward and advantages. Groups never span ranks, so their statistics need no communication.
        run.clock("reward")
        texts = tokenizer.batch_decode(rollout.response_ids(), skip_special_tokens=True)
        scores = task.verifier(texts, [p.answer for p in problems for _ in range(G)])
        rewards = torch.tensor(scores, device=world.device).view(P, G)  # [P, G]
        rollout.record_rewards(problems, rewards)  # samples.jsonl: which row answers what
        rollout.advantages = advantages(rewards).flatten()  # [N]
        means.add(distinct=(task.distinct(texts, G), P))  # falls to 1: nothing left to compare

        # <own>
        if curriculum:
            run.clock("teacher")
            means.add(**curriculum.learn(rewards))
        sampled = rollout.mask.sum()  # tokens
        rollout.branch = torch.zeros_like(rollout.advantages)  # [N]
        if branches:
            # K new endings of every failed response, behind the main rows.
            run.clock("branch")
            rollout = branches.grow(rollout, rewards, problems, cursor)
            means.add(**branches.statistics(rollout, rewards))
        # </own>

        # π_old: the weights that sampled, evaluated by the trainer. The sampler's own numbers come
        # from other kernels, and a ratio against them would mix two things: how far the policy
        # moved, and how the engines differ (minirl.py is about that).
        run.clock("old_logp")
        # <own>
        # Mini-batches. The ranks exchange whole groups, as b needs them, until their token
        # counts are about equal.
        parts = branches.split(rollout, P * G) if branches else rollout.split(args.minibatches)
        minibatches = [dealt(part, world, G) for part in parts]
        # </own>
        # Divided into micro-batches as the update will be: its first ratios are then exactly 1.
        for minibatch in minibatches:
            minibatch.old_logp, _ = all_logprobs(policy, minibatch, args, world)  # [n, T]
            if reference:
                minibatch.ref_logp, _ = all_logprobs(reference, minibatch, args, world)
        # Stops the run where μ, the sampler's numbers, is far from π_old: ratios would be wrong.
        # <own>
        sampler = {}
        if not stale.was_ahead:
            sampler = run.check_sampler(sampler_gap(minibatches, world))
        # </own>

        # From here on the batch is the one that is due, sampled `lag` batches ago. While the queue
        # fills there is none: the step trains on nothing and logs what it sampled.
        # <own>
        minibatches = stale.next(minibatches, step)
        if minibatches:
            rollout = Rollout.join(*minibatches)
            means.add(lag=(stale.age, 1))
            following = [task.train(cursor + args.prompts_per_step + i) for i in range(P)]
            stale.sample_ahead([problem.prompt_ids for problem in following], step)
        rollout = rollout.rows(rollout.branch == 0)  # the main stream again
        rewards = rollout.rewards.view(-1, G)  # [P, G]
        # </own>

        # Update: a mini-batch is one optimiser step, in as many micro-batches as memory asks for.
        run.clock("update")
        # <own>
        # π_old of a stale batch is what the update starts from: the clip bounds how far one
        # batch moves the policy, its age is the weights' affair.
        for minibatch in minibatches if args.lag else ():
            minibatch.old_logp, _ = all_logprobs(policy, minibatch, args, world)  # [n, T]
        # </own>
        warm_lr = args.lr * min(1.0, stale.number / max(1, args.warmup))  # <own>
        for group in optimizer.param_groups:
            group["lr"] = warm_lr  # <own>
        for minibatch in minibatches:
            # <own>
            balance, found = prepare(args, policy, minibatch, branches, world)
            means.add(**found)
            log_w = torch.zeros_like(minibatch.advantages)  # [n]
            # </own>
            denominator = 0.0
            for rows in micro_batches(policy, minibatch, args.micro_tokens, world):
                micro = minibatch.rows(rows)
                logp, entropy = response_logprobs(policy, micro, args.temperature)  # [n, T]
                log_w[rows] = log_weight(logp, micro.rollout_logp, micro.mask)  # <own>
                loss, count, stats = policy_loss(
                    args,
                    logp=logp,
                    old_logp=micro.old_logp,
                    rollout_logp=micro.rollout_logp,
                    ref_logp=micro.ref_logp,
                    entropy=entropy,
                    advantages=micro.advantages,
                    mask=micro.mask,
                    kept=micro.kept,  # <own>
                    branch=micro.branch,  # <own>
                    balance=balance,  # <own>
                )
                loss.backward()  # sums: gradients add up over micro-batches
                denominator = denominator + count
                run.watch(minibatch, rows, logp, entropy, count)  # samples.jsonl: logp.grad
                means.add(loss=(loss, count), **stats, **by_sign(entropy, micro))
            divide_gradients(policy, denominator, world)  # by what all ranks have counted: the mean
            # <own>
            if args.lag:
                rho = ess_ratio(gather(log_w, world)).item()
                scale = min(1.0, rho / args.rho_on) ** 0.5 if args.ess_scaling else 1.0
                optimizer.param_groups[0]["lr"] = warm_lr * scale
                means.add(ess_ratio=(rho, 1), lr_scale=(scale, 1))
                means.add(lr_damping=(1 - scale, args.ess_scaling))  # nothing where it is off
            # </own>
            norm = clip_gradients(policy, args.grad_clip)
            if run.gradient_is_finite(norm, minibatch, means):  # NaN would ruin the weights
                optimizer.step()
            optimizer.zero_grad()

        run.clock("sync")
        stale.wait()  # <own>
        engine.sync(policy)

        found = of_rollout(rollout, rewards, task) | {"tokens": (sampled, None)}  # <own>
        metrics = means.add(**found).reduce(world) | sampler  # <own>
        metrics["lr"] = optimizer.param_groups[0]["lr"]
        metrics["layers_acted"] = sum(bool(metrics.get(name)) for name in LAYERS)  # <own>
        if run.due(step, args.eval_every):
            run.clock("evaluate")
            metrics |= evaluate(engine, task, tokenizer, args, world)
        run.log(step, metrics)  # before the checkpoint: a kill in between would lose it for good
        if run.due(step, args.save_every):
            run.clock("save")
            state = {"engine": engine.state_dict()}
            # <own>
            state |= stale.state_dict()
            state["window"] = list(curriculum.window) if curriculum else []
            state["feedback"] = list(branches.feedback) if branches else []
            # </own>
            save_checkpoint(run.folder, step, both, optimizers, state, world)  # <own>
    if args.save_hf:
        save_model(policy, tokenizer, run.folder / "model", world)
    run.finish()


if __name__ == "__main__":
    launch(main, Args)
