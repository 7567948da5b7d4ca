r"""Equality of expressions that are no rational arithmetic, on math-verify's LaTeX parser. Worker processes only.

Two expressions are equal if they agree to 40 digits at fixed points: exact for what fits no accident, and, unlike
symbolic simplification, of predictable cost. Decimals are read as exact fractions, so that nothing is rounded.
Parsed expressions are never printed: converting one to text can take forever.
"""

import functools
import re
from collections.abc import Iterator
from typing import Any

DIGITS = 60  # evaluated with
AGREEMENT = 10**40  # |a - b| * AGREEMENT <= |a| + |b| is equality
_DECIMAL = re.compile(r"(?<![0-9.])([0-9]*)\.([0-9]+)(?![0-9.])")
_POWER_OF_FACTORIAL = re.compile(r"([A-Za-z0-9]+)!\s*\^")
_DEGREES = re.compile(r"\^\\circ(?![A-Za-z])")
_PLAIN_LOG = re.compile(r"\\log(?![A-Za-z])(?!\s*_)")
# Values of the letters, by position in alphabetical order: three points of positive integers (factorials, sums and
# roots are defined there), two of fractions, two of other sign.
INTEGER_POINTS = 3
_POINTS = (
    ((7, 1), (4, 1), (9, 1), (5, 1), (11, 1), (3, 1), (13, 1), (6, 1)),
    ((3, 1), (10, 1), (2, 1), (8, 1), (5, 1), (12, 1), (7, 1), (4, 1)),
    ((12, 1), (5, 1), (6, 1), (3, 1), (10, 1), (8, 1), (2, 1), (9, 1)),
    ((3, 7), (11, 5), (5, 13), (17, 7), (2, 9), (19, 11), (7, 3), (1, 6)),
    ((9, 4), (2, 11), (13, 6), (3, 5), (23, 7), (5, 3), (1, 8), (7, 5)),
    ((-3, 2), (7, 5), (-11, 4), (5, 7), (-2, 3), (9, 8), (-4, 9), (3, 10)),
    ((5, 3), (-8, 5), (3, 11), (-13, 9), (7, 4), (-5, 6), (11, 2), (-2, 7)),
)


def _source(text: str) -> str:
    """`text` as math-verify's parser reads it without loss."""
    text = _POWER_OF_FACTORIAL.sub(r"(\1!)^", text)
    text = _DECIMAL.sub(lambda match: rf"\frac{{{int(match[1] + match[2])}}}{{{10 ** len(match[2])}}}", text)
    return _DEGREES.sub(r" \\cdot \\frac{\\pi}{180} ", text).replace(r"\exp", "e^")


@functools.lru_cache(maxsize=512)
def _parsed(text: str) -> Any:
    """The sympy expression of `text`, None if it cannot be read. Letters keep their case; `i` is the imaginary unit."""
    import sympy
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy

    if "!!" in text:  # a double factorial, which the parser takes for the factorial of a factorial
        return None
    try:
        # math-verify's own entry point to this parser searches for a box and makes all letters small
        expression = latex2sympy(_source(text), conversion_config=ConversionConfig(lowercase_symbols=False))
    except (MemoryError, RecursionError):
        raise
    except Exception:  # the parser raises bare Exception for whatever is no formula
        return None
    if isinstance(expression, sympy.Basic):
        return expression.subs({symbol: sympy.I for symbol in expression.free_symbols if symbol.name == "i"})
    return expression if isinstance(expression, sympy.MatrixBase) else None


def readable(text: str) -> bool:
    """Whether the parser finds an expression in `text`."""
    return _parsed(text) is not None


def _logarithms(text: str) -> tuple[str, ...]:
    r"""`\log` without a base may be the natural or the decimal logarithm."""
    if not _PLAIN_LOG.search(text):
        return (text,)
    return _PLAIN_LOG.sub(r"\\ln ", text), _PLAIN_LOG.sub(r"\\log_{10} ", text)


def equal(gold: str, answer: str) -> bool:
    """Whether two expressions have the same value, for every value of their letters."""
    return any(_equal(one, other) for one in _logarithms(gold) for other in _logarithms(answer))


def _equal(gold: str, answer: str) -> bool:
    import sympy

    one, other = _parsed(gold), _parsed(answer)
    if one is None or other is None:
        return False
    if not isinstance(one, sympy.Expr) or not isinstance(other, sympy.Expr):
        return same_by_math_verify(gold, answer)
    defined = False
    real_only = not one.has(sympy.I) and not other.has(sympy.I)
    for a, b in _values(one, other):
        if real_only and None not in (a, b) and a.is_real is False and b.is_real is False:
            continue  # outside the domain of both: the branches of a root mean nothing there
        if (a is None) != (b is None):
            return False
        if a is not None:
            defined = True
            if not _close(a, b):
                return False
    return defined or same_by_math_verify(gold, answer)


def proportional(gold: str, answer: str, positive: bool = False) -> bool:
    """Whether one expression is a constant nonzero (or positive) multiple of the other, as in equal equations."""
    import sympy

    one, other = _parsed(gold), _parsed(answer)
    if not isinstance(one, sympy.Expr) or not isinstance(other, sympy.Expr) or one.free_symbols != other.free_symbols:
        return False
    ratio, compared = None, 0
    for a, b in _values(one, other):
        if a is None or b is None:
            if (a is None) != (b is None):
                return False
            continue
        if _zero(a) or _zero(b):
            if _zero(a) != _zero(b):
                return False
            continue
        quotient = (a / b).evalf(DIGITS)
        if positive and not quotient.is_positive:
            return False
        if ratio is not None and not _close(ratio, quotient):
            return False
        ratio, compared = quotient, compared + 1
    return compared >= (2 if one.free_symbols else 1)


def _values(one: Any, other: Any) -> Iterator[tuple[Any, Any]]:
    """The values of both expressions at the points, None where undefined."""
    import sympy

    names = sorted(one.free_symbols | other.free_symbols, key=lambda symbol: symbol.name)
    # What is defined on integers is compared on integers: a sum has no value at 3/7, its closed form has one.
    discrete = (sympy.Sum, sympy.Product, sympy.factorial, sympy.factorial2, sympy.binomial, sympy.Mod)
    points = _POINTS[:INTEGER_POINTS] if one.has(*discrete) or other.has(*discrete) else _POINTS
    for point in points if names else _POINTS[:1]:
        values = {name: sympy.Rational(*point[i % len(point)]) for i, name in enumerate(names)}
        yield _value(one, values), _value(other, values)


def _value(expression: Any, values: dict[Any, Any]) -> Any:
    """The expression at a point to `DIGITS` digits, None if it has no finite value there."""
    try:
        at_point = expression.subs(values, simultaneous=True).doit()
        number = at_point.evalf(DIGITS)
        real, imaginary = number.as_real_imag()
        if real.is_Number and imaginary.is_Number and real.is_finite and imaginary.is_finite:
            return number
    except (ArithmeticError, AttributeError, NotImplementedError, RecursionError, TypeError, ValueError):
        pass  # sympy has no value for it: nothing to compare here
    return None


def _magnitude(number: Any) -> Any:
    real, imaginary = number.as_real_imag()
    return abs(real) + abs(imaginary)


def _zero(number: Any) -> bool:
    return bool(_magnitude(number) == 0)


def _close(a: Any, b: Any) -> bool:
    return bool(_magnitude((a - b).evalf(DIGITS)) * AGREEMENT <= _magnitude(a) + _magnitude(b))


def same_by_math_verify(gold: str, answer: str) -> bool:
    """math-verify's own comparison, gold first: for structures that are no expressions, such as solved inequalities."""
    from math_verify import verify

    one, other = _parsed(gold), _parsed(answer)
    if one is None or other is None:
        return False
    if verify([one], [other], timeout_seconds=None, allow_set_relation_comp=True):
        return True
    return _as_set(one) is not None and _as_set(one) == _as_set(other)


def _as_set(expression: Any) -> Any:
    """The solutions of an inequality in one letter; None for anything else, or where sympy finds none."""
    import sympy

    if not isinstance(expression, sympy.core.relational.Relational) or len(expression.free_symbols) != 1:
        return None
    letter = next(iter(expression.free_symbols))
    real = sympy.Symbol(letter.name, real=True)
    try:
        return expression.subs(letter, real).as_set()
    except (AttributeError, NotImplementedError, TypeError, ValueError):
        return None
