"""The ten panels of the lab real, on eight prompts of the embedded model."""

import json

import pytest
import torch
from labs.real import panels
from labs.real.__main__ import SUBJECTS, draw, rows
from labs.real.responses import G, sample, small, stored

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Measured panels, and what a run stores of them."""
    kept = tmp_path_factory.mktemp("real") / "tiny.pt"
    subject = small(SUBJECTS["tiny"])
    run = panels.measured(subject, 1, kept)
    return panels.Panels(subject, 1, stored(kept, subject, 1)), json.loads(json.dumps(run))


def test_what_is_known_beforehand(found):
    """Without an update nothing is stale; probability that leaves a token goes to others; a norm of
    a token's gradient is never far from its exact form at the logits."""
    numbers = found[1]["numbers"]
    assert numbers["vcpo: ESS/B, 0 updates"][0] == pytest.approx(1, abs=1e-4)
    assert numbers["minirl: KL of a response, bfloat16"][0] < 0.01
    for step in ("wrong", "right"):
        places = [
            f"mass: step on {step}, seen in right, {p}" for p in ("sampled", "likely", "rest")
        ]
        assert sum(numbers[place][0] for place in places) == pytest.approx(0, abs=1e-4)
    assert numbers["stapo: correlation of log |∇|² with the exact form"][0] > 0.8
    assert not any(low > high for _, low, high in numbers.values())


def test_a_groups_gradient_is_the_backward_pass_of_its_loss(found):
    policy, group = found[0].policy, found[0].mixed(found[0].batch)[0]
    ours = panels.gradients(policy, [group], panels.RULES)["free"][0]  # [D]
    logp, _ = panels.response_logprobs(policy, group, 1.0)
    panels.RULES["free"](logp, group).backward()
    theirs = torch.cat([p.grad.flatten() for p in policy.parameters()])  # [D]
    policy.zero_grad()
    assert torch.allclose(ours, theirs, atol=1e-6)


def test_a_cut_keeps_the_beginning_of_its_failed_response():
    responses = sample(small(SUBJECTS["tiny"]), 2)
    cuts, measured = responses["cuts"].response_ids(), responses["measure"].response_ids()
    prefixes = responses["cuts"].prefix_len.tolist()
    assert sum(prefixes) > 0
    for cut, row, kept in zip(cuts, responses["cuts"].origin.tolist(), prefixes):
        assert responses["measure"].rewards[row] == 0
        assert cut[:kept] == measured[row][:kept]


def test_an_interval_is_over_prompts():
    """Eight equal responses to a prompt are no more certain than one."""
    rewards = torch.tensor([1.0, 0.0] * 10)  # of 20 prompts
    one = panels.Bootstrap(20).ratio(rewards, torch.ones(20))
    prompt = torch.arange(20).repeat_interleave(G)
    eight = panels.Bootstrap(20).ratio(rewards.repeat_interleave(G), torch.ones(20 * G), prompt)
    assert one == pytest.approx(eight)
    assert one[0] == 0.5 and 0.25 < one[1] < 0.35 and 0.65 < one[2] < 0.75


def test_the_figure_and_the_table_have_every_panel(found):
    results = {"tiny": [found[1]]}
    figure = draw(results)
    assert all(axis.has_data() for axis in figure.axes) and len(figure.axes) == 10
    assert len(rows(results)) == 1 + len(found[1]["numbers"])
