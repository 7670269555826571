"""Formulas of headers come to numbers, and what is no formula of the shape to None."""

import pytest

from kernel_fusion.report import formulas


@pytest.mark.parametrize(
    ("formula", "shape", "dtype", "value"),
    [
        ("2·n·sizeof(T)", {"n": 1000}, "float32", 8000),
        ("2·n·sizeof(T)", {"rows": 10, "width": 7}, "bfloat16", 280),
        ("(4·rows·width + 2·width)·sizeof(T)", {"rows": 10, "width": 7}, "float64", 8 * (280 + 14)),
        ("9·batch·q_length·width·sizeof(T)", {"B": 2, "H": 3, "S": 5, "D": 4}, "float16", 2 * 9 * 2 * 5 * 12),
        ("batch·length·sizeof(id)", {"batch": 3, "length": 5}, "float32", 120),
        ("B·H·((2·Sq + 2·Sk)·D·sizeof(T) + 6·Sq·Sk·4)", {"B": 1, "H": 1, "Sq": 2, "Sk": 3, "D": 4}, "float32", 304),
        ("2·parts·width·4", {"rows": 10, "width": 7}, "float32", None),
        ("2·Sk·⌈Sq/(128/G)⌉", {"Sq": 2, "Sk": 3}, "float32", None),
        ("about as much as v1", {}, "float32", None),
        ("", {}, "float32", None),
        ("__import__('os').getpid()", {}, "float32", None),
    ],
)
def test_a_formula_comes_to_a_number(formula, shape, dtype, value):
    assert formulas.evaluate(formula, shape, dtype) == value
