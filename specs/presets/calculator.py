"""A calculator that the model may call, and the reward of its answers."""

import ast
import operator

_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def calculator(expression: str) -> int:
    """Return the value of an arithmetic expression.

    Args:
        expression: Sums, differences and products of whole numbers, such as 7*24.
    """
    return _value(ast.parse(expression, mode="eval").body)


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError("only whole numbers, +, - and *")


def last_line(completion: str, answer: str) -> float:
    """Return 1 where the last thing that the model wrote is the row's answer."""
    return float(completion.rpartition("\n")[2].strip() == answer)
