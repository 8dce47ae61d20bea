"""A judge model, which `vllm serve` offers, verifies answers to the problems of brief.py."""

import http.client
import json
import os

import brief  # the file beside this one

held_out, train = brief.held_out, brief.train  # the same problems
bounds = {"seconds": 30, "workers": 16}
ASK = "Reference answer: {}\nAnswer: {}\nDoes the answer end like the reference? Say yes or no."


def reward(response, reference):
    turn = {"role": "user", "content": ASK.format(reference, response)}
    body = {"model": "judge", "messages": [turn], "temperature": 0, "max_tokens": 4}
    server = http.client.HTTPConnection(os.environ.get("JUDGE", "127.0.0.1:8000"), timeout=10)
    server.request("POST", "/v1/chat/completions", json.dumps(body).encode())
    answer = server.getresponse()
    if answer.status != 200:
        raise RuntimeError(f"the server answers {answer.status}")
    verdict = json.load(answer)["choices"][0]["message"]["content"]
    return float(verdict.strip().lower().startswith("yes"))
