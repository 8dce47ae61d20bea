"""TRL's trainer with stapo.py's loss on the embedded model, and stapo.py's settings.

Writes one line a rollout to port-s1.jsonl (its mean reward), and the held-out accuracies at the end.
"""

import json

from common.data import load_task
from common.distributed import ALONE
from common.logprobs import Policy
from common.metrics import evaluate
from common.model import load_model
from common.rollout import make_engine
from datasets import Dataset
from stapo import Args
from trl import GRPOConfig

from tools import arguments
from tools.port.losses import stapo
from tools.port.trl_plugin import PortTrainer


def main(seed: int, steps: int) -> list[dict]:
    """Train, and return the lines of the file."""
    args = Args(seed=seed, steps=steps)
    model, tokenizer = load_model("tiny")
    task = load_task(args, tokenizer)
    problems = [task.train(i) for i in range(steps * args.prompts_per_step)]
    rows = [{"prompt": problem.prompt, "answer": problem.answer} for problem in problems]
    config = GRPOConfig(
        output_dir="port",
        seed=seed,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        shuffle_dataset=False,
        num_generations=args.group_size,
        per_device_train_batch_size=args.prompts_per_step * args.group_size // args.minibatches,
        steps_per_generation=args.minibatches,
        max_steps=steps * args.minibatches,
        logging_steps=args.minibatches,
        max_completion_length=args.max_new_tokens,
        temperature=args.temperature,
        learning_rate=args.lr,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=args.warmup * args.minibatches,
        adam_beta1=args.betas[0],
        adam_beta2=args.betas[1],
        max_grad_norm=args.grad_clip,
    )
    trainer = PortTrainer(
        token_loss=stapo,
        model=model,
        reward_funcs=lambda completions, answer, **rest: task.verifier(completions, answer),
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    trainer.train()
    trained, _ = load_model("tiny")
    trained.load_state_dict(trainer.model.state_dict())
    engine = make_engine(args, trained, ALONE)
    engine.sync(Policy(trained))
    lines = [line for line in trainer.state.log_history if "reward" in line]
    final = evaluate(engine, task, args, ALONE)
    return [*lines, {name: final[name] for name in ("greedy", "sampled")}]


if __name__ == "__main__":
    parser = arguments(__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=150)
    words = parser.parse_args()
    with open(f"port-s{words.seed}.jsonl", "w", encoding="utf-8") as file:
        for line in main(words.seed, words.steps):
            print(json.dumps(line), file=file)
