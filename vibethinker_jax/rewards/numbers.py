"""Number literals read exactly, and the expressions that are refused before any parser sees them.

Nothing here evaluates with sympy or with unbounded integers: these functions are safe in the training process.
"""

import ast
import itertools
import math
import operator
import re
from fractions import Fraction

MAX_EXPONENT = 10_000  # 2^{2025} is an answer; 10^{10^{10}} is an attack on the parser
MAX_FACTORIAL = 1_000
MAX_NESTING = 50  # brackets inside brackets

_NUMBER = re.compile(
    r"""(?P<sign>[+-]?)
        (?P<whole>[0-9]{1,3}(?:,[0-9]{3})+ | [0-9]{1,3}(?:[ ][0-9]{3})+ | [0-9]+ | (?=\.[0-9]))
        (?:\.(?P<decimals>[0-9]*))?""",
    re.VERBOSE,
)
_SIGNED_DIGITS = re.compile(r"[+-]?[0-9.]*")
_POWER = re.compile(r"\s*(?:\^|\*\*)")
_DELIMITERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"))


def strip_delimiters(text: str) -> str:
    r"""`text` without surrounding space, one final full stop and enclosing `$...$`, `\(...\)` or `\[...\]`."""
    text = text.strip()
    if text.endswith(".") and not text.endswith(r"\right."):
        text = text[:-1].rstrip()
    for left, right in _DELIMITERS:
        inner = text[len(left) : len(text) - len(right)]
        if len(text) > len(left + right) and text.startswith(left) and text.endswith(right) and "$" not in inner:
            return strip_delimiters(inner)
    return text


def number(text: str) -> Fraction | None:
    r"""The exact value of a plain number literal, None for anything else.

    Read as numbers: `72`, `-72`, `+72`, `072` (AIME style), `72.`, `72.0`, `72.50`, `.5`, `1,234`, `1{,}234`, `1\,234`,
    `1 234`, `$72`, `\$72`, each also between math delimiters and before a full stop. Not read: units, percent,
    fractions, powers, decimal commas. Zeros after the decimal point do not matter: `72.0` is the integer 72.
    """
    if len(text) > 1000:  # Python refuses to convert integers beyond 4,300 digits
        return None
    text = strip_delimiters(text).replace(r"\!", "").replace("{,}", ",").replace("\u2212", "-")
    text = text.replace(r"\,", ",").replace(r"\ ", " ").replace("~", " ").replace(",,", ",")
    text = text.removeprefix("\\").removeprefix("$").strip() if text.startswith(("$", r"\$")) else text
    match = _NUMBER.fullmatch(text)
    if match is None:
        return None
    whole = re.sub("[, ]", "", match["whole"]) or "0"
    return Fraction(f"{match['sign']}{whole}.{match['decimals'] or '0'}")


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
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # not arithmetic after all, or nested too deeply
        return None
    return _fold(tree.body)


def contradiction(text: str) -> str | None:
    """`text` as an equation between unequal numbers, such as `7 = 5`: why it is false; None if it is not.

    Without this, a comparison that looks only at the right-hand side of `7 = 5` accepts it for 5. Sides that are no
    plain arithmetic are not judged. Decimals may be rounded (`1/3 = 0.333`), integers may not.
    """
    sides = [(side.strip(), approximate(side)) for side in re.split(r"(?<![\\<>!:])=", text)]
    values = [(side, value) for side, value in sides if value is not None]
    for (side, value), (other, other_value) in itertools.pairwise(values):
        exact = value.is_integer() and other_value.is_integer()
        if not math.isclose(value, other_value, rel_tol=1e-12 if exact else 5e-3):
            return f"{side} is not {other}"
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


def _exponent(text: str, start: int, partner: dict[int, int]) -> str:
    """The exponent whose first character is at `start`; `^` chains to the right, as in `9^9^9`."""
    begin = end = start
    while True:
        while text[end : end + 1] == " ":
            end += 1
        if text[end : end + 1] in ("(", "{") and end in partner:
            end = partner[end] + 1
        else:
            end = _SIGNED_DIGITS.match(text, end).end()
        chained = _POWER.match(text, end)
        if chained is None:
            return text[begin:end].strip()
        end = chained.end()


def hazard(text: str) -> str | None:
    """Why an expression is refused unparsed: it would exhaust a computer algebra system. None if it looks harmless.

    Only the plainest attacks are named here; the limits of the worker process catch the rest, at a higher price.
    """
    if len(text) > 1000:
        return f"longer than 1000 characters ({len(text)})"
    partner, deepest = _brackets(text)
    if deepest > MAX_NESTING:
        return f"brackets nested {deepest} deep (limit {MAX_NESTING})"
    for power in re.finditer(r"\^|\*\*", text):
        exponent = _exponent(text, power.end(), partner)
        value = approximate(exponent)
        if value is not None and not abs(value) <= MAX_EXPONENT:
            return f"exponent {exponent[:40]} (limit {MAX_EXPONENT})"
    for factorial in re.finditer(r"([0-9]+|[)}])\s*!", text):
        argument, end = factorial.group(1), factorial.start(1)
        if argument in ")}":
            argument = text[partner[end] + 1 : end] if end in partner else ""
        value = approximate(argument)
        if "!" in argument or (value is not None and not abs(value) <= MAX_FACTORIAL):
            return f"factorial of {argument[:40]} (limit {MAX_FACTORIAL})"
    return None
