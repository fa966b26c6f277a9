"""The calculator: arithmetic by a walk over the syntax tree of an expression, which is never evaluated as Python.

Integers are exact; their size and the length of the expression are bounded, so that a call ends at once.
"""

import ast
import math
import operator
import re
from collections.abc import Callable
from typing import Any

from regard.agents.tool import AgentTool, ToolFailure, text_arguments

MAX_LENGTH = 200  # characters of an expression
MAX_BITS = 4096  # of an integer, also between the steps
GROUPED = re.compile(r"(?<![0-9.])[1-9][0-9]{0,2}(?:,[0-9]{3})+(?![0-9])")  # 1,000 is one number, or two arguments
SIGNS = str.maketrans({"^": "**", "×": "*", "·": "*", "÷": "/", "−": "-", "–": "-"})
CONSTANTS = {"pi": math.pi, "e": math.e}


def rounded(value: Any, *digits: Any) -> Any:
    """`round`, with few digits: to round an integer to -k digits, Python computes 10**k."""
    if digits and abs(digits[0]) > MAX_LENGTH:
        raise ToolFailure(f"a number is rounded to at most {MAX_LENGTH} digits")
    return round(value, *digits)


def divided(a: Any, b: Any) -> Any:
    """Exact if the quotient of two integers is one."""
    if isinstance(a, int) and isinstance(b, int) and b and a % b == 0:
        return a // b
    try:
        return a / b
    except OverflowError:
        raise ToolFailure("the quotient is too large for a decimal number; divide integers with //") from None


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": abs, "round": rounded, "min": min, "max": max, "sqrt": math.sqrt, "exp": math.exp, "log": math.log,
    "log10": math.log10, "sin": math.sin, "cos": math.cos, "tan": math.tan, "floor": math.floor, "ceil": math.ceil,
}  # fmt: skip
BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: divided,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip
SIGN: dict[type[ast.unaryop], Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


def calculator() -> AgentTool:
    described = "Numbers with + - * / // % ** ( ), and " + ", ".join(FUNCTIONS)
    return AgentTool(
        "calculator",
        "Evaluates an arithmetic expression.",
        text_arguments(expression=described),
        lambda arguments: calculate(arguments["expression"]),
    )


def calculate(expression: str) -> str:
    if len(expression) > MAX_LENGTH:
        raise ToolFailure(f"the expression has {len(expression)} characters; at most {MAX_LENGTH} are evaluated")
    if found := GROUPED.search(expression):
        whole, parts = found[0].replace(",", ""), found[0].replace(",", ", ")
        raise ToolFailure(f"{found[0]!r} may be one number or several; write {whole}, or {parts} for arguments")
    try:
        tree = ast.parse(expression.strip().translate(SIGNS), mode="eval")
        return written(evaluate(tree.body))
    except (SyntaxError, Warning, MemoryError, RecursionError):
        raise ToolFailure(f"{expression!r} is no arithmetic expression; write one such as (3 + 4) * 5") from None
    except ToolFailure:
        raise
    except (ArithmeticError, ValueError, TypeError) as error:
        raise ToolFailure(f"{expression!r} has no value: {error}") from None


def evaluate(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=value) if type(value) in (int, float):
            return bounded(value)
        case ast.Name(id=name) if name in CONSTANTS:
            return CONSTANTS[name]
        case ast.UnaryOp(op=op, operand=operand) if type(op) in SIGN:
            return SIGN[type(op)](evaluate(operand))
        case ast.BinOp(op=ast.Pow(), left=left, right=right):
            return bounded(power(evaluate(left), evaluate(right)))
        case ast.BinOp(op=op, left=left, right=right) if type(op) in BINARY:
            return bounded(BINARY[type(op)](evaluate(left), evaluate(right)))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in FUNCTIONS:
            return bounded(FUNCTIONS[name](*map(evaluate, args)))
    raise ToolFailure(f"{ast.unparse(node)[:40]!r} is no arithmetic; use numbers, operators and {', '.join(FUNCTIONS)}")


def power(base: Any, exponent: Any) -> Any:
    """Checked before it is computed: 9**9**9 would not end. A base of b bits is at least 2**(b - 1)."""
    if isinstance(base, int) and isinstance(exponent, int) and (base.bit_length() - 1) * abs(exponent) >= MAX_BITS:
        raise ToolFailure(f"the power has too many digits; the largest number has {MAX_BITS} bits")
    return base**exponent


def bounded(value: Any) -> Any:
    if isinstance(value, complex):
        raise ToolFailure("the value is not a real number")
    if isinstance(value, int):
        if value.bit_length() > MAX_BITS:
            raise ToolFailure(f"the number has too many digits; the largest one has {MAX_BITS} bits")
    elif not math.isfinite(value):
        raise ToolFailure("the value is infinite or undefined")
    return value


def written(value: Any) -> str:
    """Integers in full. Floats with 15 digits, the most that every float holds: with 17, 0.1 + 0.2 is not 0.3."""
    if isinstance(value, int) or (value.is_integer() and abs(value) <= 2**53):
        return str(int(value))
    return f"{value:.15g}"
