"""How many answers of tests/common/answers.json four verifiers get wrong.

    python -m tools.maintain.answers [--all] [--list NAME]

The rows whose source begins with "ours" were written beside the rules of common/answers.py. They
flatter it, so the table is of the others, unless you ask for `--all`. `--list` prints the wrong
verdicts of one verifier. TRL and verl are not dependencies of the project (.ci/run installs them).
"""

import argparse
import json
from collections.abc import Callable
from datetime import date
from importlib.metadata import version

from checks.files import ROOT
from common.reward import Verifier


def verifiers() -> dict[str, Callable[[str, str], float | None]]:
    """A function of response and reference for each."""
    import math_verify
    from trl.rewards import accuracy_reward
    from verl.utils.reward_score import math_reward

    ours = Verifier(workers=1)

    # Both read references best between dollar signs.
    def math_verify_alone(response: str, reference: str) -> float:
        return math_verify.verify(math_verify.parse(f"${reference}$"), math_verify.parse(response))

    def trl(response: str, reference: str) -> float | None:
        return accuracy_reward([[{"content": response}]], [f"${reference}$"])[0]

    return {
        "this project": lambda response, reference: ours([response], [reference])[0],
        f"math-verify {version('math-verify')} alone": math_verify_alone,
        f"TRL {version('trl')}, `accuracy_reward`": trl,
        f"verl {version('verl')}, `math_reward`": math_reward.compute_score,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Wrong verdicts of four verifiers, as a table.")
    parser.add_argument("--all", action="store_true", help="our own rows, too")
    parser.add_argument("--list", default="", help="a verifier, by the start of its name")
    given = parser.parse_args()
    rows = json.loads((ROOT / "tests/common/answers.json").read_text())
    rows = [row for row in rows if given.all or not row["source"].startswith("ours")]
    right = sum(row["right"] for row in rows)
    wrong = len(rows) - right
    print(f"{date.today()}: {len(rows)} answers\n")
    print(f"| verifier | wrong answers paid (of {wrong}) | right answers unpaid (of {right}) |")
    print("|---|---|---|")
    for name, score in verifiers().items():
        verdicts = [bool(score(row["response"], row["reference"])) for row in rows]
        errors = [row for row, paid in zip(rows, verdicts) if paid != row["right"]]
        unpaid = sum(row["right"] for row in errors)
        print(f"| {name} | {len(errors) - unpaid} | {unpaid} |", flush=True)
        if given.list and name.startswith(given.list):
            print(*errors, sep="\n")


if __name__ == "__main__":
    main()
