"""How weights get to the ranks and back; and checkpoints of other ranks."""

import contextlib
import copy
from datetime import timedelta
from pathlib import Path

import grpo
import pytest
import torch
import torch.distributed as dist
import vcpo
from common import distributed
from common.distributed import full_parameters, global_sum, setup, shard
from common.logprobs import Policy, frozen_reference
from common.model import load_model
from common.records.checkpoint import load_checkpoint
from common.rollout import HFEngine

from tests.helpers import SMALL, command, forked, run_here, saved_state, small

pytestmark = pytest.mark.slow


def untied(folder: Path) -> str:
    """Save the embedded model with a head of its own, which its config.json denies."""
    lm, tokenizer = load_model("tiny")
    lm.config.tie_word_embeddings = False
    lm.lm_head.weight = torch.nn.Parameter(lm.lm_head.weight.detach().clone() * 1.1)
    lm.save_pretrained(folder)
    lm.config.tie_word_embeddings = True
    lm.config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def logprobs_of(policy: Policy) -> torch.Tensor:
    with torch.no_grad():
        return policy(torch.arange(2, 14)[None], torch.arange(12)[None] < 11, 1.0)[0]


def receives(names: list[str]) -> None:
    """On one of two ranks, check that it ends up with what it would have loaded itself."""
    world = setup()
    for name in names:
        whole, _ = load_model(name)
        held = dict(whole.named_parameters()) | dict(whole.named_buffers())
        expected = logprobs_of(Policy(copy.deepcopy(whole)))
        for shard_ranks in (1, 2):
            args = grpo.Args(dtype="float32", shard_ranks=shard_ranks)
            lm, _ = load_model(name, world)
            assert all(p.is_meta == (world.rank == 1) for p in lm.parameters())
            engine = HFEngine(lm, world, 0, "float32", 8)
            reference = frozen_reference(args, lm, world)
            policy = shard(Policy(lm), args, world)
            for model in (policy, reference, engine):
                tensors = dict(full_parameters(model)) | dict(model.lm.named_buffers())
                assert tensors.keys() == held.keys()
                assert all(torch.equal(tensors[key], held[key]) for key in held)
            assert torch.equal(logprobs_of(policy), expected)
            assert torch.equal(logprobs_of(reference), expected)
            assert not any(p.requires_grad for p in reference.parameters())
            assert all(p.requires_grad for p in policy.parameters())
    dist.barrier()
    dist.destroy_process_group()


def test_rank_0_loads_for_all(tmp_path):
    """Parameters, buffers, ties and log-probs are those of a whole model, to the bit."""
    ended = forked(receives, ["tiny", "tiny-moe", untied(tmp_path / "untied")], ranks=2)
    assert ended.codes == [0, 0], ended.stderr


def misses_an_update() -> None:
    """Run one of two ranks. The second comes late to a sum, and not at all to the forward pass."""
    distributed.UPDATE_TIMEOUT = timedelta(seconds=1)
    world = setup()
    lm, _ = load_model("tiny", world)
    policy = shard(Policy(lm), grpo.Args(dtype="float32", shard_ranks=2), world)
    if world.rank == 1:
        with contextlib.suppress(dist.DistStoreError):
            world.store.wait(["a verifier's scores"], timedelta(seconds=2))
    assert global_sum({"tokens": 1.0}, world) == {"tokens": 2.0}
    if world.rank == 1:
        world.store.wait(["rank 0 has ended"], timedelta(seconds=20))
    else:
        with pytest.raises(RuntimeError, match="[Tt]imed out"):
            logprobs_of(policy)
        world.store.set("rank 0 has ended", "")


def test_an_update_waits_for_minutes_and_a_step_for_hours():
    """Sampling and scoring may be slow, but a rank that is lost in an update must be noticed."""
    ended = forked(misses_an_update, ranks=2)
    assert ended.codes == [0, 0], ended.stderr


def test_resume_on_other_ranks(tmp_path, world):
    """Four ranks that share in pairs save, then one reads, then two go on, then one."""
    folder = tmp_path / "run"
    flags = [*SMALL, "--minibatches", 1, "--run_dir", folder]
    ended = command("grpo", *flags, "--steps", 2, "--shard_ranks", 2, ranks=4)
    assert ended.codes == [0] * 4, ended.stderr
    policy = Policy(load_model("tiny")[0])
    optimizer = torch.optim.AdamW(policy.parameters(), fused=True)
    newest = folder / "checkpoints/step_000002"
    assert load_checkpoint(newest, policy, optimizer, {}, world) == 2
    dist.destroy_process_group()
    weights, moments = saved_state(folder, 2, tmp_path)
    for name, parameter in policy.named_parameters():
        assert torch.equal(parameter, weights[name])
        for moment in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(optimizer.state[parameter][moment], moments[name][moment])
    ended = command("grpo", *flags, "--steps", 4, "--resume", ranks=2)
    assert ended.codes == [0, 0], ended.stderr
    assert run_here(grpo.main, *flags, "--steps", 6, "--resume") == 0


def test_batches_in_flight_belong_to_their_ranks(tmp_path, capsys):
    """For vcpo's queue, one line says how many ranks can continue it."""
    flags = [*small("vcpo"), "--minibatches", 1, "--run_dir", tmp_path / "run"]
    assert command("vcpo", *flags, "--steps", 2, ranks=2).codes == [0, 0]
    assert run_here(vcpo.main, *flags, "--steps", 4, "--resume") == 2
    assert "--resume: batches in flight: use 2 rank(s)" in capsys.readouterr().err
