r"""What an answer can be: the structures that `read.py` finds in text and `compare.py` compares.

A text may have several readings: `12,345` is a number and a list of two, `(1,2)` a pair and an interval. `Readings`
holds all of them. Leaves are normalised text: only `rational.py` and `algebra.py` look inside.
"""

from dataclasses import dataclass

from vibethinker_jax.rewards.exact.units import Unit


@dataclass(frozen=True)
class Expression:
    """Anything without outer structure: a number, a term, a letter."""

    text: str


@dataclass(frozen=True)
class Words:
    """Words of a language, such as `Yes` or `no solutions`; `text` is in one case and single-spaced."""

    text: str


@dataclass(frozen=True)
class Quantity:
    """A value with a unit.

    Attributes:
        text: the value.
        unit: the unit, or the words after the value.
        tentative: the unit is one letter outside `\\text`, more likely a variable; it counts only against a unit.
    """

    text: str
    unit: Unit
    tentative: bool = False


@dataclass(frozen=True)
class Sequence:
    """Several answers. `kind` is "list" (bare, order free), "set" (order free) or "tuple" (ordered, also vectors)."""

    kind: str
    items: tuple["Readings", ...]


@dataclass(frozen=True)
class Matrix:
    """A matrix of at least two rows and two columns."""

    rows: tuple[tuple["Readings", ...], ...]


@dataclass(frozen=True)
class Ratio:
    """`a:b` or `a:b:c`; a clock time reads so too, with `clock` set."""

    terms: tuple[str, ...]
    clock: bool = False


@dataclass(frozen=True)
class Interval:
    r"""Endpoints as text, `\infty` among them, and whether each is left out."""

    low: str
    high: str
    low_open: bool
    high_open: bool


@dataclass(frozen=True)
class Region:
    """A union of intervals; `variable` is the letter of an inequality, None for a set."""

    intervals: tuple[Interval, ...]
    variable: str | None = None


@dataclass(frozen=True)
class Relation:
    r"""Sides and the relation signs between them: `=`, `<`, `>`, `\le`, `\ge`, `\ne`."""

    sides: tuple[str, ...]
    signs: tuple[str, ...]

    @property
    def is_equation(self) -> bool:
        return set(self.signs) == {"="}


@dataclass(frozen=True)
class Family:
    r"""An answer with parameters of its own: `\frac{\pi}{2} + k\pi, k \in \mathbb{Z}`. The letters are free.

    Attributes:
        body: the answer without the declaration.
        letters: the parameters.
        domain: the declared domains, in the order of the letters.
    """

    body: str
    letters: tuple[str, ...]
    domain: tuple[str, ...] = ()


Answer = Expression | Words | Quantity | Sequence | Matrix | Ratio | Region | Relation | Family
Readings = tuple[Answer, ...]
