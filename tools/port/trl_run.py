"""TRL's trainer with stapo's loss on the embedded model, with the prompts and settings of stapo.py.

Writes port-s1.jsonl: TRL's metrics of every rollout, then the held-out accuracies.
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


def config_of(args: Args) -> GRPOConfig:
    """TRL's names for the flags of stapo.py."""
    return GRPOConfig(
        output_dir="port",
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
        seed=args.seed,
        shuffle_dataset=False,
        num_generations=args.group_size,
        per_device_train_batch_size=args.prompts_per_step * args.group_size // args.minibatches,
        steps_per_generation=args.minibatches,
        max_steps=args.steps * args.minibatches,
        logging_steps=args.minibatches,
        max_completion_length=args.max_new_tokens,
        learning_rate=args.lr,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=args.warmup * args.minibatches,
        adam_beta1=args.betas[0],
        adam_beta2=args.betas[1],
    )


def main(args: Args) -> None:
    model, tokenizer = load_model("tiny")
    task = load_task(args, tokenizer)
    problems = [task.train(i) for i in range(args.steps * args.prompts_per_step)]
    rows = [{"prompt": problem.prompt, "answer": problem.answer} for problem in problems]
    trainer = PortTrainer(
        token_loss=stapo,
        model=model,
        reward_funcs=lambda completions, answer, **rest: task.verifier(completions, answer),
        args=config_of(args),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    trainer.train()
    trained, _ = load_model("tiny")
    trained.load_state_dict(trainer.model.state_dict())
    engine = make_engine(args, trained, ALONE)
    engine.sync(Policy(trained))
    with open(f"port-s{args.seed}.jsonl", "w", encoding="utf-8") as file:
        for line in [*trainer.state.log_history, evaluate(engine, task, args, ALONE)]:
            print(json.dumps(line), file=file)


if __name__ == "__main__":
    parser = arguments(__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=150)
    main(Args(**vars(parser.parse_args())))
