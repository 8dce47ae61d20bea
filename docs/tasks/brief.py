"""GSM8K, with a reward that prefers brief answers."""

from common.tasks.rows import rows_of

ASK = " Think step by step. Then write # and the final number."
rows = [(question + ASK, answer) for question, answer in rows_of("gsm8k", "train")]
held_out = [(question + ASK, answer) for question, answer in rows_of("gsm8k", "test")]


def train(i):
    return rows[i * 7919 % len(rows)]  # times a prime: all rows, in a mixed order


def reward(response, answer):
    right = response.rpartition("#")[2].strip() == answer
    return right - 0.0001 * len(response)
