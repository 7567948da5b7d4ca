"""Other forms of a reading: as text, as a difference, without its unit. For comparing what is written differently."""

import re
from fractions import Fraction

from vibethinker_jax.rewards.exact.answer import Answer, Expression, Region, Relation
from vibethinker_jax.rewards.exact.rational import TooLarge, rational
from vibethinker_jax.rewards.exact.units import Unit


def has_pi(text: str) -> bool:
    """Whether an angle is written with pi, and so in radians."""
    return r"\pi" in text


def converted(text: str, unit: Unit) -> str:
    r"""A percentage or an angle in degrees as a number without unit."""
    return rf"\frac{{{text}}}{{100}}" if unit.percent else rf"\frac{{({text})\pi}}{{180}}"


def scaled(text: str, factor: Fraction) -> str:
    """A value in another unit: exact where it is rational, so that no arithmetic seems left undone."""
    try:
        exact = rational(text)
    except TooLarge:
        exact = None
    if exact is None:
        return rf"\frac{{{factor.numerator}}}{{{factor.denominator}}} \cdot ({text})"
    value = exact.value * factor
    return str(value.numerator) if value.denominator == 1 else rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


def is_false(relation: Relation) -> bool:
    """Whether an equation states that two different numbers are equal, as `7 = 5` and `x = 7 = 5` do."""
    if not relation.is_equation:
        return False
    try:
        sides = [rational(side) for side in relation.sides]
    except TooLarge:
        return True
    return len({side.value for side in sides if side is not None}) > 1


def difference(left: str, right: str) -> str | None:
    """What an equation says to be zero; None where a side is a list."""
    return f"({left}) - ({right})" if not re.search(r"[,;]", left + right) else None


def surplus(relation: Relation) -> tuple[str, bool] | None:
    """What an inequality of two sides says to be positive, and whether zero is left out."""
    if len(relation.sides) != 2 or relation.signs[0] not in ("<", ">", r"\le", r"\ge"):
        return None
    left, right = relation.sides if relation.signs[0] in (">", r"\ge") else relation.sides[::-1]
    return f"({left}) - ({right})", relation.signs[0] in "<>"


def written(relation: Relation) -> str:
    """A relation as LaTeX."""
    signs = [*relation.signs, ""]
    return " ".join(f"{side} {sign}" for side, sign in zip(relation.sides, signs, strict=True)).strip()


def region_text(region: Region) -> str:
    """A union of intervals as LaTeX."""
    parts = (
        f"{'(' if part.low_open else '['}{part.low},{part.high}{')' if part.high_open else ']'}"
        for part in region.intervals
    )
    return r" \cup ".join(parts)


def text_of(answer: Answer) -> str | None:
    """An expression or a relation as LaTeX; None for everything else."""
    match answer:
        case Expression(text=text):
            return text
        case Relation():
            return written(answer)
    return None
