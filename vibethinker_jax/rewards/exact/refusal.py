r"""Expressions that are refused unread: they would exhaust a computer algebra system.

Plain text scans in linear time, the same verdict on every machine. Only the plainest attacks are named here; the limits
of the worker process catch the rest, at a higher price.
"""

import ast
import math
import operator
import re

MAX_CHARS = 1000
MAX_EXPONENT = 10_000  # 2^{2025} is an answer; 10^{10^{10}} is an attack on the parser
MAX_FACTORIAL = 5_000
MAX_CHOSEN_FROM = 100_000  # upper argument of a binomial coefficient
MAX_NESTING = 50  # brackets inside brackets
MAX_TOWER = 3  # exponents of exponents

_SIGNED_DIGITS = re.compile(r"[+-]?[0-9.]*")
_POWER = re.compile(r"\s*(?:\^|\*\*)")
_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def _fold(node: ast.expr) -> float | None:
    """Value of an arithmetic syntax tree in floating point, whose cost no exponent can raise; inf on overflow."""
    match node:
        case ast.Constant(value=int() | float() as value):
            return float(value)
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=operand):
            value = _fold(operand)
            return value if value is None or isinstance(sign, ast.UAdd) else -value
        case ast.BinOp(left=left, op=op, right=right):
            a, b = _fold(left), _fold(right)
            if a is None or b is None:
                return None
            try:
                value = a**b if isinstance(op, ast.Pow) else _OPERATORS[type(op)](a, b)
            except OverflowError:
                return math.inf
            except (KeyError, ZeroDivisionError):
                return None
            return None if isinstance(value, complex) else value
    return None


def approximate(text: str) -> float | None:
    """Floating-point value of plain arithmetic (digits, + - * / ^ and brackets; inf on overflow), else None."""
    for latex, plain in (
        (r"\left", ""), (r"\right", ""), (r"\cdot", "*"), (r"\times", "*"), ("^", "**"), ("{", "("), ("}", ")"),
    ):  # fmt: skip
        text = text.replace(latex, plain)
    if len(text) > 200 or not re.fullmatch(r"[0-9+\-*/(). ]+", text):
        return None
    try:
        tree = ast.parse(text.strip(), mode="eval")
        return _fold(tree.body)
    except (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError):  # no arithmetic, or nested too deeply
        return None


def _brackets(text: str) -> tuple[dict[int, int], int]:
    """Partner of every matched round bracket or brace by position, and the deepest nesting."""
    partner: dict[int, int] = {}
    open_at: dict[str, list[int]] = {"(": [], "{": []}
    deepest = 0
    for i, char in enumerate(text):
        if char in "({":
            open_at[char].append(i)
            deepest = max(deepest, len(open_at["("]) + len(open_at["{"]))
        elif char in ")}" and open_at["(" if char == ")" else "{"]:
            start = open_at["(" if char == ")" else "{"].pop()
            partner[start], partner[i] = i, start
    return partner, deepest


def _exponent(text: str, start: int, partner: dict[int, int]) -> tuple[int, int]:
    """Where the exponent that begins at `start` begins and ends; `^` chains to the right, as in `9^9^9`."""
    begin = end = start
    while True:
        while text[end : end + 1] == " ":
            end += 1
        if text[end : end + 1] in ("(", "{") and end in partner:
            end = partner[end] + 1
        else:
            end = max(_SIGNED_DIGITS.match(text, end).end(), end + text[end : end + 1].isalpha())
        chained = _POWER.match(text, end)
        if chained is None:
            return begin, end
        end = chained.end()


def refusal(text: str) -> str | None:
    """Why an expression is refused unread; None if it looks harmless."""
    if len(text) > MAX_CHARS:
        return f"longer than {MAX_CHARS} characters ({len(text)})"
    partner, deepest = _brackets(text)
    if deepest > MAX_NESTING:
        return f"brackets nested {deepest} deep (limit {MAX_NESTING})"
    return _power(text, partner) or _factorial(text, partner) or _range(text, partner)


def _too_large(text: str, limit: float) -> bool:
    value = approximate(text)
    return value is not None and not abs(value) <= limit


def _power(text: str, partner: dict[int, int]) -> str | None:
    ends: list[int] = []  # of the exponents around the current position
    for power in _POWER.finditer(text):
        begin, end = _exponent(text, power.end(), partner)
        exponent = text[begin:end].strip()
        if _too_large(exponent, MAX_EXPONENT):
            return f"exponent {exponent[:40]} (limit {MAX_EXPONENT})"
        ends = [outer for outer in ends if outer > power.start()] + [end]
        if len(ends) > MAX_TOWER:
            return f"a tower of more than {MAX_TOWER} exponents"
    return None


def _factorial(text: str, partner: dict[int, int]) -> str | None:
    for factorial in re.finditer(r"([0-9]+|[)}])\s*!", text):
        argument, end = factorial.group(1), factorial.start(1)
        if argument in ")}":
            argument = text[partner[end] + 1 : end] if end in partner else ""
        if "!" in argument or _too_large(argument, MAX_FACTORIAL):
            return f"factorial of {argument[:40]} (limit {MAX_FACTORIAL})"
    for choice in re.finditer(r"\\[dt]?binom\s*\{", text):
        close = partner.get(choice.end() - 1)
        argument = text[choice.end() : close]
        if _too_large(argument, MAX_CHOSEN_FROM):
            return f"binomial coefficient of {argument[:40]} (limit {MAX_CHOSEN_FROM})"
    return None


def _range(text: str, partner: dict[int, int]) -> str | None:
    """Lower ends of sums and products; upper ends look like exponents."""
    for start in re.finditer(r"_\s*\{[^={}]*=", text):
        brace = text.index("{", start.start())
        bound = text[start.end() : partner.get(brace, start.end())]
        if _too_large(bound, MAX_EXPONENT):
            return f"a sum or product from {bound[:40]} (limit {MAX_EXPONENT})"
    return None
