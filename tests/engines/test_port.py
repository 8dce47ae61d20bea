"""docs/port.md against TRL and verl themselves: every row of its sheet, its flags read by their own
configuration, on one batch of uneven lengths whose samples are stale and off the sampler."""

import functools
import re
from types import SimpleNamespace

import pytest
import torch
import tyro
from common.model import load_model
from torch import Tensor

from tests.adapters import advantages, policy_loss
from tests.helpers import ROOT, module_of

pytest.importorskip("trl")
pytest.importorskip("verl")

LENGTHS = [8, 3, 5, 1, 7, 2, 6, 4]  # of two groups of four responses
REWARDS = [1.0, 0.0, 0.0, 1.0, 0.2, 0.0, 1.0, 0.0]
PROMPT = {"prompt": "1+2="}
HALVES = [slice(0, 4), slice(4, 8)]
tiny = functools.cache(load_model)
# What the page says once, above the sheet
TRL = {"vllm_importance_sampling_correction": False, "num_generations": 4}
SHORT = {"$A": "actor_rollout_ref.actor", "$C": "algorithm.rollout_correction"}


def sheet() -> list:
    """(file, its flags, framework, flags there, constant) of each row of the page's last table."""
    page = (ROOT / "docs/port.md").read_text("utf-8")
    found = []
    for line in page.partition("## The sheet")[2].splitlines():
        cells = [cell.strip().strip("`") for cell in line.split("|")[1:-1]]
        if len(cells) == 4 and cells[1] in ("TRL", "verl"):
            name, *flags = cells[0].split()
            row = (name, flags, *cells[1:4])
            found.append(pytest.param(*row, id=f"{cells[1]}-{cells[0].replace(' ', '_')}"))
    return found


def batch() -> dict[str, Tensor]:
    """π_θ is far from π_old and μ, so that clips, caps and bands act; some tokens are improbable
    where the entropy is low."""
    random = torch.Generator().manual_seed(1)

    def normal(scale: float) -> Tensor:
        return torch.randn(8, 8, generator=random).double() * scale

    mask = (torch.arange(8) < torch.tensor(LENGTHS)[:, None]).double()  # [8, 8]
    old_logp = -normal(1.5).abs() - 0.1
    logp, ref_logp = old_logp + normal(0.4), old_logp + normal(0.3)
    rollout_logp = (old_logp + normal(0.5)).float().double()  # TRL keeps μ in float32
    entropy = torch.rand(8, 8, generator=random).double() * 3
    for row, column in (0, 3), (1, 0), (6, 2):  # of right, wrong and right responses
        logp[row, column], old_logp[row, column] = -7.0, -7.2
        ref_logp[row, column], entropy[row, column] = -6.5, 0.01
    logp[0, 0] = old_logp[0, 0] + 0.243  # a ratio of 1.275, between two clips
    logp[1, 1] = old_logp[1, 1] + 2.5  # a wrong response, and a ratio of 12
    columns = {"logp": logp, "old_logp": old_logp, "rollout_logp": rollout_logp}
    return columns | {"ref_logp": ref_logp, "entropy": entropy, "mask": mask}


def ours(name: str, flags: list[str], rows: slice, A: Tensor) -> SimpleNamespace:
    """Value and gradient of our file on these rows, the number of tokens, and of those it keeps."""
    columns = {column: values[rows] for column, values in batch().items()}
    if name != "grpo":
        del columns["ref_logp"]
    columns["logp"].requires_grad_()
    args = tyro.cli(module_of(name).Args, args=flags)
    loss, stats = policy_loss(name, advantages=A.double(), **columns, **vars(args))
    loss.backward()
    n = columns["mask"].sum()
    kept = n * (1 - stats.get("silenced_share", 0) - stats.get("left_out", 0))
    return SimpleNamespace(loss=loss.detach(), grad=columns["logp"].grad, n=n, kept=kept)


# TRL


def trl_trainer(flags: dict, plug_in: str, folder: object) -> object:
    """A trainer whose model and sampler are the batch."""
    from datasets import Dataset
    from tools.port import losses, trl_plugin
    from trl import GRPOConfig, GRPOTrainer

    flags |= {"output_dir": str(folder), "report_to": "none", "bf16": False, "use_cpu": True}
    flags |= {"per_device_train_batch_size": 4, "steps_per_generation": 2}
    model, tokenizer = tiny("tiny")
    given = {"model": model, "processing_class": tokenizer, "args": GRPOConfig(**TRL | flags)}
    given |= {"reward_funcs": lambda **rest: REWARDS, "train_dataset": Dataset.from_list([PROMPT])}
    if plug_in:
        trainer = trl_plugin.PortTrainer(token_loss=getattr(losses, plug_in), **given)
    else:
        trainer = GRPOTrainer(**given)
    trainer.use_vllm = True  # which is only imitated
    ids = [[5] * length for length in LENGTHS]
    sampled = [row[:n] for row, n in zip(batch()["rollout_logp"].tolist(), LENGTHS)]
    generated = [[4, 4]] * 8, ids, None, ["1"] * 8, sampled, {}, None, []
    trainer._generate = lambda prompts: generated
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    return trainer


def theirs_trl(text: str, folder: object) -> list[tuple]:
    """Value and gradient of each half, one optimiser step of two, and TRL's advantages."""
    plug_in = re.search(r"token_loss=(\w+)", text)
    others = re.sub(r"token_loss=\w+,? ?", "", text)
    flags = eval(f"dict({others})")
    trainer = trl_trainer(flags, plug_in[1] if plug_in else "", folder)
    columns = batch()

    def forward(model: object, *given: object, compute_entropy: bool = False, **named) -> tuple:
        if compute_entropy:  # in the loss
            return logp, columns["entropy"][rows], None
        return columns["ref_logp" if model is trainer.ref_model else "old_logp"], None, None

    trainer._get_per_token_logps_and_entropies = forward
    inputs = trainer._generate_and_score_completions([PROMPT] * 8)
    steps = []
    for rows in HALVES:
        half = {name: x[rows] if x.dim() else x for name, x in inputs.items()}
        logp = columns["logp"][rows].clone().requires_grad_()
        loss = trainer.compute_loss(trainer.model, half)
        steps.append((loss.detach(), torch.autograd.grad(loss, logp)[0], half["advantages"]))
    return steps


# verl


@functools.cache
def verl_config(*flags: str) -> object:
    from hydra import compose, initialize_config_module

    written = ["algorithm.adv_estimator=grpo", "$A.ppo_micro_batch_size_per_gpu=4", *flags]
    for short, full in SHORT.items():
        written = [flag.replace(short, full) for flag in written]
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", written)


def theirs_verl(text: str, micro_batches: list[slice]) -> tuple:
    """Value and gradient of one optimiser step, added up over micro-batches, and the advantages."""
    import tools.port.verl_plugin  # noqa: F401
    from verl import DataProto
    from verl.trainer.ppo import core_algos
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch
    from verl.utils.config import omega_conf_to_dataclass
    from verl.utils.tensordict_utils import get_tensordict
    from verl.workers.utils.losses import ppo_loss

    config, columns = verl_config(*text.split()), batch()
    correction = config.algorithm.rollout_correction
    data = {"response_mask": columns["mask"], "ref_log_prob": columns["ref_logp"]}
    data["rollout_log_probs"] = columns["rollout_logp"]
    # As verl/trainer/ppo/v1/trainer_base.py does it
    data["old_log_probs"] = columns["rollout_logp" if correction.bypass_mode else "old_logp"]
    data = DataProto.from_dict(data)
    if not correction.bypass_mode:
        data, _ = compute_rollout_correction_and_add_to_batch(data, correction)
    rewards = columns["mask"] * 0
    rewards[:, 0] = torch.tensor(REWARDS)
    data.batch["advantages"], _ = core_algos.get_adv_estimator_fn(config.algorithm.adv_estimator)(
        rewards,
        columns["mask"],
        [0] * 4 + [1] * 4,
        norm_adv_by_std_in_grpo=config.algorithm.norm_adv_by_std_in_grpo,
    )
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    counts = {"dp_size": 1, "batch_num_tokens": sum(LENGTHS), "global_batch_size": 8}
    logp, total = columns["logp"].clone().requires_grad_(), 0.0
    for rows in micro_batches:
        given = {name: values[rows] for name, values in data.batch.items()}
        given["responses"] = columns["mask"][rows].long()
        given["prompts"] = torch.ones(len(given["responses"]), 1).long()  # of one token
        given["attention_mask"] = torch.cat([given["prompts"], given["responses"]], dim=1)

        def packed(values: Tensor, present: Tensor = given["attention_mask"]) -> Tensor:
            """As a model's output: what is found at t belongs to the token t + 1."""
            return torch.cat([values, values[:, :1]], dim=1)[present.bool()]

        output = {"log_probs": packed(logp[rows])}
        if actor.calculate_entropy:
            output["entropy"] = packed(columns["entropy"][rows])
        loss, _ = ppo_loss(actor, output, get_tensordict(given, counts))
        total = total + loss
    return total.detach(), torch.autograd.grad(total, logp)[0], data.batch["advantages"][:, 0]


# The tests


def compare_advantages(name: str, theirs: Tensor, epsilon: float) -> None:
    """`epsilon` is what they add to the std: TRL 1e-4, our files and verl 1e-6."""
    rewards = torch.tensor(REWARDS).double().view(2, 4)
    std = rewards.std(dim=1, keepdim=True)
    mine = advantages(name, rewards) * (std + 1e-6) / (std + epsilon)
    if name == "vcpo":  # it divides by the population's std
        mine = mine * (3 / 4) ** 0.5
    torch.testing.assert_close(theirs.double(), mine.flatten(), rtol=1e-5, atol=1e-6)


def compare(theirs: tuple, name: str, flags: list[str], rows: slice, constant: str) -> None:
    """Equal to 1e-6: the values, and the gradients as shares of their largest number."""
    mine = ours(name, flags, rows, theirs[2])
    mean = sum(LENGTHS) / len(HALVES)  # n̄
    constants = {"1": 1, "k/n": mine.kept / mine.n}
    constants |= {"n/n̄": mine.n / mean, "k/n̄": mine.kept / mean}
    c = constants[constant]
    value = (theirs[0] / c - mine.loss).abs()
    gradient = (theirs[1] / c - mine.grad).abs().max() / mine.grad.abs().max()
    print(f"{name} {flags}: value {value:.0e}, gradient {gradient:.0e}")
    assert value < 1e-6 and gradient < 1e-6
    assert mine.kept < mine.n or "k" not in constant  # or the mask was not tried


@pytest.mark.parametrize("name, flags, framework, there, constant", sheet())
def test_the_sheet(name, flags, framework, there, constant, tmp_path):
    if framework == "TRL":
        steps = theirs_trl(there, tmp_path)
        epsilon = 1e-6 if "none" in there else 1e-4
        compare_advantages(name, torch.cat([step[2] for step in steps]), epsilon)
        for rows, theirs in zip(HALVES, steps):
            compare(theirs, name, flags, rows, constant)
    else:
        whole = slice(0, 8)
        quantile = name in ("stapo", "entropy20")  # over the mini-batch: one micro-batch
        theirs = theirs_verl(there, [whole] if quantile else HALVES)
        compare_advantages(name, theirs[2], 1e-6)
        compare(theirs, name, flags, whole, constant)
