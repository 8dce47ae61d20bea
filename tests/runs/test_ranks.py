"""How weights get to the ranks and back: one of them loads, all receive; replicas, checkpoints."""

import copy
import shutil
from pathlib import Path

import common.plumbing.model
import grpo
import pytest
import torch
import torch.distributed as dist
import vcpo
from common.plumbing.checkpoint import load_checkpoint
from common.distributed import clip_gradients, full_parameters, divide_gradients, setup, shard
from common.distributed import whole_tensor
from common.logprobs import Policy, frozen_reference
from common.plumbing.model import load_model
from common.rollout import HFEngine
from torch.distributed.tensor import DTensor

from tests.helpers import MORE, ROOT, SMALL, command, forked, run_here, tensors


def moved_head(folder: Path) -> str:
    """The embedded model with a head of its own, and weights that are no round numbers."""
    lm, tokenizer = load_model("tiny")
    lm.config.tie_word_embeddings = False
    lm.lm_head.weight = torch.nn.Parameter(lm.lm_head.weight.detach().clone() * 1.1)
    lm.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def logprobs_of(policy: Policy) -> torch.Tensor:
    sequences = torch.arange(2, 14)[None]  # [1, 12]
    return policy(sequences, torch.arange(12)[None] < 11, 1.0)[0]


def receives(folder: Path) -> None:
    """One of two ranks: what it ends up with is what it would have loaded itself."""
    world, seen = setup(), []
    read = common.plumbing.model.AutoModelForCausalLM.from_pretrained
    common.plumbing.model.AutoModelForCausalLM.from_pretrained = lambda *a, **k: (
        seen.append(a) or read(*a, **k)
    )
    for name in ("tiny", "tiny-moe", str(folder / "untied")):
        whole, _ = load_model(name)
        weights, buffers = dict(whole.named_parameters()), dict(whole.named_buffers())
        with torch.no_grad():
            expected = logprobs_of(Policy(copy.deepcopy(whole)))
        for shard_ranks in (1, 2):
            args = grpo.Args(dtype="float32", shard_ranks=shard_ranks)
            seen.clear()
            lm, _ = load_model(name, world)
            assert len(seen) == (world.rank == 0)
            assert all(p.is_meta == (world.rank == 1) for p in lm.parameters())
            assert lm.generation_config.eos_token_id == whole.generation_config.eos_token_id
            assert not any(module.training for module in lm.modules())
            engine = HFEngine(lm, world, 0, "float32", 8)
            reference = frozen_reference(args, lm, world)
            policy = shard(Policy(lm), args, world)
            sharded = {isinstance(p, DTensor) for p in policy.parameters()}
            assert sharded == {shard_ranks == 2}
            for one in (policy, reference, engine):
                for held, tensor in full_parameters(one):
                    assert torch.equal(tensor, weights[held]), held
                assert {held for held, _ in full_parameters(one)} == weights.keys()
                found = dict(one.lm.named_buffers())
                assert all(torch.equal(found[held], buffers[held]) for held in buffers)
                embedding = one.lm.get_input_embeddings()
                assert (one.lm.lm_head.weight is embedding.weight) == (
                    "lm_head.weight" not in weights
                )
            with torch.no_grad():
                assert torch.equal(logprobs_of(policy), expected)
                assert torch.equal(logprobs_of(reference), expected)
            assert not any(p.requires_grad for p in reference.parameters())
            assert all(p.requires_grad for p in policy.parameters())
    dist.barrier()
    dist.destroy_process_group()


def test_rank_0_loads_for_all(tmp_path):
    """Parameters, buffers, ties, log-probs: to the bit what a rank would have loaded itself."""
    moved_head(tmp_path / "untied")
    ended = forked(receives, tmp_path, ranks=2)
    assert ended.codes == [0, 0], ended.stderr


def test_what_rank_0_refuses_ends_all(tmp_path):
    """Cut weights, of which the rank that does not read them knows nothing: one line, no hang."""
    folder = shutil.copytree(ROOT / "common/tiny/model", tmp_path / "model")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:100_000])
    ended = command("grpo", "--model", folder, "--run_dir", tmp_path / "run", ranks=2)
    assert ended.codes[0] == 2 and ended.codes[1], ended.stderr
    (line,) = (line for line in ended.stderr.splitlines() if "error: " in line)
    assert f"--model {folder}: cannot be loaded" in line and not (tmp_path / "run").exists()


# Replicas


def clips(folder: Path) -> None:
    """One of four ranks: gradient norm and gathered weights under every division of the ranks, and
    what the ranks add up over replicas, pass by pass."""
    world, found, sums, add_up = setup(), [], [], dist.all_reduce
    dist.all_reduce = lambda tensor, **how: sums.append(tensor.numel()) or add_up(tensor, **how)
    for shard_ranks in (4, 2, 1):
        for dtype in ("float32", "bfloat16"):
            lm, _ = load_model("tiny", world)
            policy = shard(Policy(lm), grpo.Args(dtype=dtype, shard_ranks=shard_ranks), world)
            sums.clear()
            for _ in range(2):  # micro-batches
                (logprobs_of(policy).sum() * (world.rank + 1)).backward()  # the ranks' mean: 2.5
            assert not sums, "replicas exchange gradients once a step, not in every pass"
            divide_gradients(policy, 1.0, world)  # over 4, the ranks' count: 5 of one
            owned = sum(whole_tensor(p).numel() for p in policy.parameters()) // shard_ranks
            assert sums == [1] or owned <= sum(sums) - 1 <= 1.01 * owned and shard_ranks < 4
            norm = clip_gradients(policy, 0.5)
            assert clip_gradients(policy, 1.0) == pytest.approx(0.5, rel=1e-4)
            found.append((dtype, norm, [full for _, full in full_parameters(policy)]))
    lm, _ = load_model("tiny")
    policy = Policy(lm)
    logprobs_of(policy).sum().backward()
    alone = 5 * clip_gradients(policy, 1.0)
    for dtype, norm, weights in found:
        assert norm == pytest.approx(alone, rel=1e-5 if dtype == "float32" else 0.02)
        assert all(map(torch.equal, weights, policy.lm.parameters()))
    dist.barrier()
    dist.destroy_process_group()


def test_norms_and_weights_are_the_same_however_ranks_share(tmp_path):
    ended = forked(clips, tmp_path, ranks=4)
    assert ended.codes == [0] * 4, ended.stderr


def test_shard_ranks_divide_the_ranks(tmp_path, capsys):
    assert run_here(grpo.main, "--shard_ranks", 2, "--run_dir", tmp_path / "run") == 2
    wrong = "--shard_ranks 2: does not divide the 1 rank(s)"
    assert wrong in capsys.readouterr().err and not (tmp_path / "run").exists()


# Other ranks


def test_resume_on_other_ranks(tmp_path, capsys, world):
    """Saved by four ranks that share in pairs, read by two, then by one: the weights and moments
    are the saved ones, and the run says that it goes on in another way."""
    folder = tmp_path / "run"
    flags = [*SMALL, "--minibatches", 1, "--run_dir", folder]
    ended = command("grpo", *flags, "--steps", 2, "--shard_ranks", 2, ranks=4)
    assert ended.codes == [0] * 4, ended.stderr
    lm, _ = load_model("tiny")
    policy = Policy(lm)
    optimizer = torch.optim.AdamW(policy.parameters(), fused=True)
    done, state = load_checkpoint(folder, policy, optimizer, world)
    assert (done, state["other_ranks"]) == (2, 4)
    dist.destroy_process_group()
    saved = tensors(folder / "checkpoints/step_000002", tmp_path / "t.pt")
    for name, parameter in policy.named_parameters():
        assert torch.equal(parameter, saved[f"/policy/{name}"])
        for moment in ("exp_avg", "exp_avg_sq"):
            kept = saved[f"/optimizer/state/{name}/{moment}"]
            assert torch.equal(optimizer.state[parameter][moment], kept)
    ended = command("grpo", *flags, "--steps", 4, "--resume", ranks=2)
    assert ended.codes == [0, 0], ended.stderr
    assert ended.stdout.count("saved by 4 rank(s), now 2: not to the bit") == 1
    capsys.readouterr()
    assert run_here(grpo.main, *flags, "--steps", 6, "--resume") == 0
    assert "saved by 2 rank(s), now 1: not to the bit" in capsys.readouterr().out


def test_a_new_rank_samples_on_its_own(tiny, world):
    """With the state of a rank that it takes over it goes on, with another's it does not."""
    engines = [HFEngine(tiny[0], world, 0, "float32", 8) for _ in range(3)]
    engines[2].rank = 1
    torch.rand(3, generator=engines[0].generator)
    for engine in engines[1:]:
        engine.load_state_dict(engines[0].state_dict())
    first, taken, new = (engine.generator.get_state() for engine in engines)
    assert torch.equal(first, taken) and not torch.equal(first, new)


def test_batches_in_flight_belong_to_their_ranks(tmp_path, capsys):
    """vcpo's queue: one line that says how many ranks go on with it. An empty one is no reason."""
    for lag, code in ((1, 2), (0, 0)):
        flags = [
            *SMALL,
            *MORE["vcpo"],
            "--minibatches",
            1,
            "--lag",
            lag,
            "--run_dir",
            tmp_path / f"{lag}",
        ]
        assert command("vcpo", *flags, "--steps", 2, ranks=2).codes == [0, 0]
        capsys.readouterr()
        assert run_here(vcpo.main, *flags, "--steps", 4, "--resume") == code
        refused = "--resume: batches in flight: use 2 rank(s)"
        assert (refused in capsys.readouterr().err) == bool(code)
