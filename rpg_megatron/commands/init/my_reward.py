"""The reward function of run.yaml.

It is called for each response, in a separate process. The names of its parameters select what it gets:
response, answer, prompt, messages, row (all fields of the problem), token_ids, finish_reason, or responses
(all of a prompt at once). Other parameters are settings in run.yaml.
"""

import re


def digits(response: str, answer: str, partial: float = 0.5) -> float:
    """1 if the last number is the answer; else -1, plus up to ``partial`` for correct digits."""
    numbers: list[str] = re.findall(r"-?\d+", response)
    if not numbers:
        return -1.0
    if numbers[-1] == answer:
        return 1.0
    ends = zip(reversed(numbers[-1]), reversed(answer), strict=False)
    return partial * sum(a == b for a, b in ends) / len(answer) - 1.0


if __name__ == "__main__":  # try it: python my_reward.py
    for text in ("1888", "so 1880", "no idea"):
        print(f"{digits(text, '1888'):+.2f}  {text}")
