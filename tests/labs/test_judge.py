"""The judge knows our losses in other words, names known mistakes, and calls nothing else one."""

from labs import judge

LOSS = """import torch
def loss(new_logps, old_logps, ref_logps, adv, response_mask, cliprange, kl_coef, config=None):
    r, A = (new_logps - old_logps).exp(), adv[:, None]
    objective = torch.min(r * A, r.clamp(1 - cliprange, 1 + cliprange) * A)
    kl = (ref_logps - new_logps).exp() - (ref_logps - new_logps) - 1
    each = (objective - kl_coef * kl) * response_mask
    return -(each.sum(1) / response_mask.sum(1)).mean()
"""


def test_a_loss_in_other_words(tmp_path, capsys):
    assert judge.judge(tmp_path / "mine.py", LOSS, "loss") == 0
    assert "RIGHT: the loss of grpo.py (response mean, clip 0.15/0.15)" in capsys.readouterr().out
