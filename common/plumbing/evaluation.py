"""The two accuracies of a run: greedy and sampled, on problems that training never sees."""

from transformers import PreTrainedTokenizerBase as Tokenizer

from common.data import Task
from common.distributed import World, global_sum
from common.plumbing.metrics import refuse_broken


def evaluate(engine: object, task: Task, tokenizer: Tokenizer, args: object, world: World) -> dict:
    """Accuracy on the held-out problems, over all ranks.

    `greedy`: of one response at temperature 0; `sampled`: the mean of --eval_samples responses;
    `example`: the first problem with its greedy response, for samples.jsonl.
    """
    verifier = task.held_out_verifier or task.verifier
    problems, state, right = task.held_out[world.rank :: world.size], engine.state_dict(), {}
    example = {}  # rank 0 has the first problem
    prompts = [p.prompt_ids for p in problems]
    ways = (("greedy", 1, 0.0), ("sampled", args.eval_samples, args.temperature))
    for name, n, temperature in ways:
        rollout = engine.generate(prompts, n, args.max_new_tokens, temperature)
        texts = tokenizer.batch_decode(rollout.response_ids(), skip_special_tokens=True)
        scores = verifier(texts, [p.answer for p in problems for _ in range(n)])
        right[name] = sum(scores) / n
        if name == "greedy" and world.rank == 0:
            shown = {"prompt": problems[0].prompt, "answer": problems[0].answer}
            example = {"example": shown | {"response": texts[0], "reward": scores[0]}}
    refuse_broken(verifier)
    verifier.parts = {}  # logged of training alone
    engine.load_state_dict(state)  # training's samples do not depend on how often one looks
    found = {name: total / len(task.held_out) for name, total in global_sum(right, world).items()}
    return found | example
