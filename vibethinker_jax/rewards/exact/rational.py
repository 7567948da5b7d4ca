r"""Exact values of rational arithmetic in LaTeX: integers, decimals, fractions, powers, factorials, percent.

A small recursive-descent reader over `fractions.Fraction`. Every operation pays for the size of its result from one
budget, so that no text can make it slow: it is safe in the training process.
"""

import math
import re
from dataclasses import dataclass
from fractions import Fraction

WORK_BITS = 200_000  # of all results together; 1/2004! costs 40,000
_TOKEN = re.compile(
    r"""\s*(?:
        (?P<number>(?:[0-9]{1,3}(?:[,\ ][0-9]{3})+(?![0-9])|[0-9]+|(?=\.[0-9]))(?:\.[0-9]*)?
                   (?:\\overline\{[0-9]+\})?(?:[eE][+-]?[0-9]{1,5}(?![0-9A-Za-z]))?)
      | (?P<fraction>\\frac) | (?P<binomial>\\binom) | (?P<root>\\sqrt(?!\s*\[))
      | (?P<times>\\cdot|\\times) | (?P<divide>/|\\div) | (?P<percent>\\%|%)
      | (?P<sign>[+\-]) | (?P<power>\^) | (?P<factorial>!!?(?!!)) | (?P<open>[({\[]) | (?P<close>[)}\]])
    )""",
    re.VERBOSE,
)
_CLOSES = {"(": ")", "{": "}", "[": "]"}


class TooLarge(Exception):
    """The value is rational, and too large to be worth computing."""


class _NotRational(Exception):
    """The text is something else than rational arithmetic."""


@dataclass(frozen=True)
class Rational:
    """A rational number as written.

    Attributes:
        value: exactly.
        finished: whether it is written as a value and not as arithmetic left to the reader: no sums, no differences,
            no products but those with a power of ten (scientific notation).
    """

    value: Fraction
    finished: bool


class _Reader:
    def __init__(self, text: str) -> None:
        self.tokens: list[tuple[str, str]] = []
        self.spaced: list[bool] = []
        self.position, self.work, self.depth = 0, 0, 0
        end = 0
        while text[end:].strip():
            match = _TOKEN.match(text, end)
            if match is None or match.end() == end:
                raise _NotRational
            self.tokens.append((match.lastgroup or "", match[0].strip()))
            end = match.end()

    def peek(self) -> str:
        return self.tokens[self.position][0] if self.position < len(self.tokens) else "end"

    def take(self) -> str:
        if self.position >= len(self.tokens):
            raise _NotRational
        self.position += 1
        return self.tokens[self.position - 1][1]

    def paid(self, value: Fraction) -> Fraction:
        self.pay(value.numerator.bit_length() + value.denominator.bit_length())
        return value

    def pay(self, bits: float) -> None:
        self.work += bits
        if self.work > WORK_BITS:
            raise TooLarge

    def sum(self) -> Rational:
        total = self.product()
        while self.peek() == "sign":
            sign = self.take()
            term = self.product()
            value = total.value + term.value if sign == "+" else total.value - term.value
            total = Rational(self.paid(value), False)
        return total

    def product(self) -> Rational:
        result = self.signed()
        while (kind := self.peek()) in ("times", "divide", "open", "fraction", "binomial", "root", "number"):
            if kind in ("times", "divide"):
                self.take()
                ten = self.position
                factor = self.signed()
                scientific = (
                    kind == "times" and self.tokens[ten][1] == "10" and self.tokens[ten + 1 :][:1] == [("power", "^")]
                )
            elif kind == "number":
                raise _NotRational  # `2 3` is no product
            else:
                factor, scientific = self.power(), False
            if kind == "divide":
                if factor.value == 0:
                    raise _NotRational
                value, finished = result.value / factor.value, True
            else:
                value, finished = result.value * factor.value, scientific
            result = Rational(self.paid(value), finished and result.finished and factor.finished)
        return result

    def signed(self) -> Rational:
        self.depth += 1
        if self.depth > 60:
            raise TooLarge
        if self.peek() == "sign":
            sign, operand = self.take(), self.signed()
            result = operand if sign == "+" else Rational(-operand.value, operand.finished)
        else:
            result = self.power()
        self.depth -= 1
        return result

    def power(self) -> Rational:
        base = self.postfix(self.atom())
        if self.peek() != "power":
            return base
        self.take()
        token = self.tokens[self.position : self.position + 1]
        if token and token[0][0] == "number" and len(token[0][1]) > 1 and "." not in token[0][1]:
            exponent = Rational(Fraction(self.take().replace(",", "").replace(" ", "")), True)  # plain text: 2^10
            if self.peek() == "power":
                self.position -= 1
                exponent = self.power()
        else:
            exponent = self.signed()
        if exponent.value.denominator != 1:
            raise _NotRational
        return Rational(self.raised(base.value, int(exponent.value)), base.finished and exponent.finished)

    def raised(self, base: Fraction, exponent: int) -> Fraction:
        bits = base.numerator.bit_length() + base.denominator.bit_length()
        if base == 0 and exponent <= 0:
            raise _NotRational
        if abs(base) != 1 and base != 0:
            if abs(exponent) > WORK_BITS:
                raise TooLarge
            self.pay(bits * abs(exponent))
        else:
            exponent %= 2
            exponent += 2 if base == 0 else 0
        return base**exponent

    def postfix(self, operand: Rational) -> Rational:
        while self.peek() in ("factorial", "percent"):
            if (mark := self.take()) in ("!", "!!"):
                value = operand.value
                if value.denominator != 1 or value < 0:
                    raise _NotRational
                if value > WORK_BITS:
                    raise TooLarge
                self.pay(float(value) * max(1, math.log2(max(int(value), 1))))
                factors = range(int(value), 0, -2)
                product = math.factorial(int(value)) if mark == "!" else math.prod(factors)
                operand = Rational(Fraction(product), operand.finished)
            else:
                operand = Rational(self.paid(operand.value / 100), operand.finished)
        return operand

    def argument(self) -> Rational:
        r"""One argument of `\frac` and the like: a group, or one digit, as in `\frac12`."""
        if self.peek() == "number":
            digits = self.tokens[self.position][1]
            if not digits.isdigit():
                raise _NotRational
            if len(digits) > 1:
                self.tokens[self.position] = ("number", digits[1:])
            else:
                self.take()
            return Rational(Fraction(int(digits[0])), True)
        if self.tokens[self.position : self.position + 1] != [("open", "{")]:
            raise _NotRational
        return self.atom()

    def atom(self) -> Rational:
        self.depth += 1
        if self.depth > 60:
            raise TooLarge
        kind = self.peek()
        text = self.take()
        if kind == "open":
            result = self.sum()
            if self.take() != _CLOSES[text]:
                raise _NotRational
        elif kind == "number":
            result = Rational(self.paid(_literal(text)), True)
            if self.peek() == "fraction" and text.isdigit():  # a mixed number
                part = self.atom()
                if not 0 <= part.value < 1:
                    raise _NotRational
                result = Rational(result.value + part.value, part.finished)
        elif kind in ("fraction", "binomial"):
            upper, lower = self.argument(), self.argument()
            finished = upper.finished and lower.finished
            if kind == "fraction":
                if lower.value == 0:
                    raise _NotRational
                result = Rational(self.paid(upper.value / lower.value), finished)
            else:
                result = Rational(self.binomial(upper.value, lower.value), finished)
        elif kind == "root":
            radicand = self.argument()
            result = Rational(_square_root(radicand.value), radicand.finished)
        else:
            raise _NotRational
        self.depth -= 1
        return result

    def binomial(self, upper: Fraction, lower: Fraction) -> Fraction:
        if upper.denominator != 1 or lower.denominator != 1 or upper < 0 or lower < 0:
            raise _NotRational
        if upper > WORK_BITS:
            raise TooLarge
        self.pay(float(min(lower, abs(upper - lower))) * upper.numerator.bit_length())
        return Fraction(math.comb(int(upper), int(lower)))


def _literal(text: str) -> Fraction:
    r"""The value of a number token: digits in groups, decimals, a repeating part, an exponent."""
    text = text.replace(",", "").replace(" ", "")
    mantissa, _, exponent = text.replace("E", "e").partition("e") if "overline" not in text else (text, "", "")
    if len(mantissa) > 1000 or abs(int(exponent or 0)) > 10_000:
        raise TooLarge
    plain, _, repeated = mantissa.partition(r"\overline{")
    whole, _, decimals = plain.partition(".")
    value = Fraction(int((whole + decimals) or "0"), 10 ** len(decimals))
    if repeated:
        if "." not in plain:
            raise _NotRational
        digits = repeated.rstrip("}")
        value += Fraction(int(digits), (10 ** len(digits) - 1) * 10 ** len(decimals))
    return value * Fraction(10) ** int(exponent or 0)


def _square_root(value: Fraction) -> Fraction:
    """The root, where it is rational."""
    if value < 0:
        raise _NotRational
    upper, lower = math.isqrt(value.numerator), math.isqrt(value.denominator)
    if upper * upper != value.numerator or lower * lower != value.denominator:
        raise _NotRational
    return Fraction(upper, lower)


def rational(text: str) -> Rational | None:
    """The value of normalised `text` if it is rational arithmetic, else None.

    Raises:
        TooLarge: it is, and exceeds `WORK_BITS` or 60 nested brackets.
    """
    if not any(character.isdigit() for character in text) or len(text) > 2000:
        return None
    try:
        reader = _Reader(text)
        result = reader.sum()
    except (_NotRational, RecursionError):
        return None
    return result if reader.peek() == "end" else None
