"""Puzzles of the package reasoning-gym. The answer is the number of the problem.

Some of its sets run what the model wrote as Python. Do not use these: binary_matrix, spiral_matrix,
string_insertion, n_queens, simple_integration, intermediate_integration, polynomial_multiplication,
countdown, puzzle24.
"""

import reasoning_gym
from reasoning_gym.utils import extract_answer

SIZE = 100_000
puzzles = reasoning_gym.create_dataset("chain_sum", size=SIZE, seed=0)


def train(i):
    return problem(i % (SIZE - 256))


def problem(i):
    return puzzles[i]["question"] + "\nWrite the answer between <answer> and </answer>.", i


held_out = [problem(i) for i in range(SIZE - 256, SIZE)]


def reward(response, i):
    return puzzles.score_answer(extract_answer(response), puzzles[i])
