"""When does asynchrony pay? Accuracy by step at lags 0 to 4, with GRPO's clip and with VCPO.

The steps of a run do not depend on who is faster. So accuracy at equal time is accuracy by step,
read at the step that is reached: seconds a step are measured apart.

    python -m labs.stale.pays FILE.json        # 24 runs, goes on where the file ends
"""

import json
import sys
from pathlib import Path

from labs import lab

RUN = "vcpo.py --steps 64 --eval_every 8 --eval_samples 1 --save_every 1000 --sample_every 0"
BARE = "--no_ess_scaling --no_optimal_baseline"
# PPO's clip around the sampler's log-probs: grpo.py's loss without KL
CLIP = """    ratio = (logp - batch.rollout_logp).exp()  # [n, T]
    A = batch.advantages[:, None]  # [n, 1]
    term = torch.minimum(ratio * A, ratio.clamp(0.8, 1.2) * A) * mask  # [n, T]
    objective = term.sum(dim=1) / mask.sum(dim=1).clamp(min=1)  # [n]
"""
LOSS = "    objective = weight * batch.advantages * per_response  # [n]\n"

if __name__ == "__main__":
    path = Path(sys.argv[1])
    found = json.loads(path.read_text("utf-8")) if path.exists() else {}
    for seed in (1, 2, 3):
        for lag in (0, 1, 2, 4):
            for who, flags, damage in (("grpo", BARE, (LOSS, CLIP)), ("vcpo", "", None)):
                key = f"{who} lag {lag} seed {seed}"
                if key not in found:
                    columns = ("greedy", "reward")
                    run = lab.trained(f"{RUN} --lag {lag} {flags}", seed, columns, damage)
                    found[key] = {name: lab.plain(value) for name, value in run.items()}
                    path.write_text(json.dumps(found, indent=1), "utf-8")
