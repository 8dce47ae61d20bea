"""SmolLM2 after a short warm start.

    python -m labs.real.start runs/smollm2 runs/smollm2-sums

Without it the model solves too few chains of sums (`sums.py:worked`) to learn from them. As before
real training runs, it first imitates worked responses: 48 steps, six minutes on one core.
"""

from pathlib import Path

from common.batch import Rollout
from common.distributed import ALONE
from common.logprobs import Policy, response_logprobs
from common.model import load_model
import torch
from tools import arguments, empty_folder
from tqdm import trange

from labs.real.sums import chain

STEPS, BATCH, LR = 48, 8, 3e-5


def main(source: str, folder: Path) -> None:
    """Imitate worked responses, and write the model with its tokenizer."""
    torch.manual_seed(0)
    lm, tokenizer = load_model(source, ALONE)
    policy, eos = Policy(lm.train()), tokenizer.eos_token_id
    optimizer = torch.optim.AdamW(policy.parameters(), lr=LR)
    for step in trange(STEPS, disable=None):
        prompts, responses = [], []
        for i in range(step * BATCH, (step + 1) * BATCH):
            prompt, response, _ = chain(10_000_000 + i)  # none that a run will train on
            prompts.append(tokenizer(prompt).input_ids)
            responses.append([*tokenizer(response).input_ids, eos])
        blank = [[0.0] * len(response) for response in responses]
        columns = {"tokens": responses, "logps": blank, "eos": [eos], "device": "cpu"}
        batch = Rollout.pack(prompts=prompts, **columns)
        logp, _ = response_logprobs(policy, batch, 1.0, readout=None)  # [B, T]
        loss = -(logp * batch.mask).sum() / batch.mask.sum()  # cross-entropy of the responses
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = LR * min(1.0, (step + 1) / 4)
        optimizer.step()
        optimizer.zero_grad()
    lm.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    print(f"{folder}: the loss is {loss.item():.3f}")


if __name__ == "__main__":
    parser = arguments(__doc__)
    parser.add_argument("source", metavar="MODEL")
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    words = parser.parse_args()
    try:
        empty_folder(words.folder)
    except OSError as error:
        parser.error(str(error))
    main(words.source, words.folder)
