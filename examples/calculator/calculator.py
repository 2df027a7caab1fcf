"""A tool that computes: ``calculator:calculator`` in ``rollout.episode.tools`` (docs/environments.md)."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from typing import Any

from rpg_megatron.environments.tools import ToolError

_LONGEST = 1000
"""Characters of an expression."""
_LARGEST = 4096
"""Bits of an integer."""
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    name: getattr(math, name)
    for name in ("sqrt", "log", "log2", "log10", "exp", "sin", "cos", "tan", "floor", "ceil")
}
_FUNCTIONS |= {"abs": abs, "min": min, "max": max, "round": round}
_CONSTANTS = {"pi": math.pi, "e": math.e}
_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


async def calculator(expression: str) -> str:
    """Compute an arithmetic expression, such as (17 + 4) * 2 ** 3 / sqrt(2)."""
    if len(expression) > _LONGEST:
        raise ToolError(f"the expression has more than {_LONGEST} characters")
    try:
        tree = ast.parse(expression.strip().replace("^", "**"), mode="eval")
        value = _value(tree.body)
        return str(
            int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 1e15 else value
        )
    except (SyntaxError, RecursionError, MemoryError):
        raise ToolError("this is no arithmetic expression") from None
    except (ArithmeticError, ValueError, TypeError) as e:
        raise ToolError(str(e)) from None


def _value(node: ast.AST) -> Any:
    """The number that an expression stands for. Raises ValueError for anything but arithmetic."""
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return value
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value(operand))
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_value(left), _value(right))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _limited(_OPERATORS[type(op)](_value(left), _value(right)))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _FUNCTIONS:
            return _FUNCTIONS[name](*map(_value, arguments))
    raise ValueError("only numbers, + - * / // % **, parentheses and functions such as sqrt are possible")


def _power(base: Any, exponent: Any) -> Any:
    if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * abs(exponent) > _LARGEST:
        raise ValueError("the number is too large")
    result = base**exponent
    if isinstance(result, complex):
        raise ValueError("the result is no real number")
    return _limited(result)


def _limited(value: Any) -> Any:
    if isinstance(value, int) and value.bit_length() > _LARGEST:
        raise ValueError("the number is too large")
    return value
