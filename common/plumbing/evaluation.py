"""The two accuracies of a run: greedy and sampled, on problems that training never sees."""

from common.data import Task
from common.distributed import World, global_sum
from common.plumbing.clock import timed
from common.plumbing.errors import BadInput


@timed("evaluate")
def evaluate(engine: object, task: Task, args: object, world: World) -> dict:
    """Accuracy on the held-out problems, over all ranks.

    `greedy`: of one response at temperature 0; `sampled`: the mean of --eval_samples responses;
    `example`: the first problem with its greedy response, for samples.jsonl.
    """
    verifier = task.held_out_verifier or task.verifier
    problems = task.held_out[world.rank :: world.size]  # of this rank
    prompts = [problem.prompt_ids for problem in problems]
    right, example = {}, {}
    state = engine.state_dict()
    ways = (("greedy", 1, 0.0), ("sampled", args.eval_samples, args.temperature))
    for name, n, temperature in ways:
        rollout = engine.generate(prompts, n, args.max_new_tokens, temperature)
        texts = task.tokenizer.batch_decode(rollout.response_ids(), skip_special_tokens=True)
        answers = [problem.answer for problem in problems for _ in range(n)]
        scores = verifier(texts, answers)
        right[name] = sum(scores) / n
        if name == "greedy" and world.rank == 0:
            shown = {"prompt": problems[0].prompt, "answer": problems[0].answer}
            example["example"] = shown | {"response": texts[0], "reward": scores[0]}
    engine.load_state_dict(state)  # how often a run evaluates does not change what it samples
    totals = global_sum(right, world)
    working = global_sum({"working": float(getattr(verifier, "works", True))}, world)["working"]
    if working == 0:  # all rewards would be 0, and nothing could be learned
        why = getattr(verifier, "failure", "") or "the error is printed above"
        raise BadInput(f"{verifier.spec or 'math-verify'}: no answer could be scored ({why})")
    return {name: total / len(task.held_out) for name, total in totals.items()} | example
