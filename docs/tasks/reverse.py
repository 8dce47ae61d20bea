"""Digits are written backwards. It runs on a laptop, with the letters of the embedded model."""

NUMBERS = [f"{n:02}" for n in range(100)]
TRAINED = [number for number in NUMBERS if int(number) % 3]
held_out = [(f"{number}=", number[::-1]) for number in NUMBERS if int(number) % 3 == 0]


def train(i):
    number = TRAINED[i * 7919 % len(TRAINED)]
    return f"{number}=", number[::-1]


def reward(response, answer):
    written = response.rpartition("#")[2]
    if len(written) != len(answer):
        return 0.0
    return sum(character == other for character, other in zip(written, answer)) / len(answer)
