"""The taskset of the example, as verifiers has them: products of two numbers, and a calculator.

It knows nothing of rpg_megatron; the calculator is that of the file beside this one.
"""

import random
from collections.abc import Iterator

import verifiers.v1 as vf
from calculator import calculator


class Calculator(vf.Toolset[vf.SharedToolsetConfig, vf.State]):
    """A server of tools, in a process of its own, for all episodes."""

    TOOL_PREFIX = None

    @vf.tool
    async def calculator(self, expression: str) -> str:
        """Compute an arithmetic expression."""
        return await calculator(expression)


class ProductsConfig(vf.TasksetConfig):
    """Settings of the taskset."""

    count: int = 1000
    seed: int = 1
    tools: bool = True
    """False: the model has to multiply by itself."""


class ProductData(vf.TaskData):
    """One product."""

    answer: str


class Product(vf.Task[ProductData]):
    """1 if the last message is the product, else 0."""

    @vf.reward
    async def correct(self, trace: vf.Trace) -> float:
        """The reward."""
        last = trace.branches[-1].messages[-1] if trace.branches else None
        return float(last is not None and str(last.content).strip() == self.data.answer)


class Products(vf.Taskset[Product, ProductsConfig]):
    """Products of two numbers from 11 to 99."""

    def load(self) -> Iterator[Product]:
        """Make them."""
        draw = random.Random(self.config.seed)
        for _ in range(self.config.count):
            a, b = draw.randint(11, 99), draw.randint(11, 99)
            yield Product(ProductData(prompt=f"What is {a}*{b}?", answer=str(a * b)), self.config.task)

    @classmethod
    def toolsets(cls, config: ProductsConfig) -> list[vf.Toolset]:
        """The calculator."""
        return [Calculator(vf.SharedToolsetConfig())] if config.tools else []


__all__ = ["Products"]

if __name__ == "__main__":  # in the tools' process
    Calculator.run()
