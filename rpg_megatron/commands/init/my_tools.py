"""The tool and the reward of run.yaml.

A tool is a function: the names and types of its parameters and the first paragraph of its docstring are what
the model is told. What it returns is the model's next input; an exception is told to the model as an error.
"""


def calculator(expression: str) -> str:
    """Compute the product of two numbers, such as 37*48."""
    a, b = expression.split("*")
    return str(int(a) * int(b))


def exact(response: str, answer: str) -> float:
    """1 if the last message is the answer, else 0."""
    return float(response.strip() == answer)


if __name__ == "__main__":  # try it: python my_tools.py
    print(calculator("37*48"), exact("1776", "1776"))
