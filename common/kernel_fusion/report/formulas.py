"""The bytes formulas of the rungs' headers as numbers: "(2·rows·width + width)·sizeof(T)" for a shape and a dtype."""

import ast
import math
import operator
import re

ITEMSIZE = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
ID_BYTES = 8  # of a token's number, int64
OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
# What the headers call the sizes that the shapes of results abbreviate.
NAMES = {"B": ["batch"], "H": ["heads"], "S": ["length", "q_length", "k_length"], "D": ["head_dim"]}


def evaluate(formula: str, shape: dict[str, int], dtype: str) -> int | None:
    """What `formula` comes to, or None where it has a name that the shape does not give, or is none.

    Args:
        formula: of names, numbers, + − · / and brackets.
        shape: sizes by name.
        dtype: the type T of sizeof(T).
    """
    text = re.sub(r"sizeof\(T\)", str(ITEMSIZE[dtype]), formula)
    text = re.sub(r"sizeof\(id\)", str(ID_BYTES), text).replace("·", "*").replace("−", "-")
    try:
        return round(_value(ast.parse(text, mode="eval").body, sizes(shape)))
    except (SyntaxError, KeyError):
        return None


def sizes(shape: dict[str, int]) -> dict[str, int]:
    """`shape` with the names that the headers use for the same, and those that follow: n is rows·width."""
    found = dict(shape)
    for short, names in NAMES.items():
        found |= {name: shape[short] for name in names if short in shape}
    if "H" in shape and "D" in shape:
        found.setdefault("width", shape["H"] * shape["D"])
    if "rows" in shape and "width" in shape:
        found.setdefault("n", math.prod((shape["rows"], shape["width"])))
    return found


def _value(node: ast.expr, names: dict[str, int]) -> float:
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        return OPERATIONS[type(node.op)](_value(node.left, names), _value(node.right, names))
    if isinstance(node, ast.Name):
        return names[node.id]
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    raise KeyError(ast.dump(node))
