r"""Decides whether two readings mean the same answer, by the rules of `policy.py`.

Three values: True, False, and None for "only algebra can tell", where no algebra was given. The rules are symmetric
but for the two that `policy.py` says: units that one side leaves out, and arithmetic that the response leaves undone.
"""

import itertools
import re
from collections.abc import Callable, Iterator
from typing import Protocol

from vibethinker_jax.rewards.exact.answer import (
    Answer,
    Expression,
    Family,
    Interval,
    Matrix,
    Quantity,
    Ratio,
    Readings,
    Region,
    Relation,
    Sequence,
    Words,
)  # fmt: skip
from vibethinker_jax.rewards.exact.forms import (
    converted,
    difference,
    has_pi,
    is_false,
    region_text,
    scaled,
    surplus,
    text_of,
    written,
)
from vibethinker_jax.rewards.exact.outcome import Outcome, all_of, any_of
from vibethinker_jax.rewards.exact.rational import Rational, TooLarge, rational
from vibethinker_jax.rewards.exact.read import MAX_DEPTH, read
from vibethinker_jax.rewards.exact.symbols import function, is_name, letters, parameters, renamed
from vibethinker_jax.rewards.exact.text import squeeze
from vibethinker_jax.rewards.exact.units import DEGREE, NO_UNIT, Unit

_PROSE = re.compile(r"(?<![A-Za-z\\])[A-Za-z]{3,}(?![A-Za-z])")
MAX_RENAMED = 3  # parameters that are tried in every order


class Algebra(Protocol):
    """What `algebra.py` offers; a parameter, so that string work needs no sympy."""

    def readable(self, text: str) -> bool: ...
    def equal(self, gold: str, answer: str) -> bool: ...
    def proportional(self, gold: str, answer: str, positive: bool = False) -> bool: ...
    def same_by_math_verify(self, gold: str, answer: str) -> bool: ...


class Comparison:
    """Compares a gold answer with a response's answer.

    Args:
        algebra: decides what exact arithmetic cannot; None leaves it open.

    Attributes:
        reason: why the last comparison said no, where there is more to say than that the values differ.
        unreadable_gold: the part of the gold answer that the parser could not read, if there was one.
    """

    def __init__(self, algebra: Algebra | None = None) -> None:
        self.algebra = algebra
        self.reason = ""
        self.unreadable_gold: str | None = None

    def texts(self, gold: str, answer: str, depth: int = 0) -> Outcome:
        """Compares two normalised texts."""
        if squeeze(gold) == squeeze(answer):
            return True
        return self.readings(read(gold, depth), read(answer, depth), depth)

    def readings(self, gold: Readings, answer: Readings, depth: int = 0) -> Outcome:
        """Whether some reading of one is some reading of the other."""
        return any_of(self.answers(one, other, depth) for one in gold for other in answer)

    def answers(self, gold: Answer, answer: Answer, depth: int) -> Outcome:
        if depth > MAX_DEPTH:
            return False
        if any(isinstance(side, Relation) and is_false(side) for side in (gold, answer)):
            self.reason = "a false equation"
            return False
        match gold, answer:
            case Words(), Words():
                return gold.text == answer.text
            case Words(), _:
                return False
            case _, Words():
                return False
            case Family(), _:
                return self._families(gold, answer, depth)
            case _, Family():
                return self._families(answer, gold, depth)
            case Relation(), Relation():
                return self._relations(gold, answer, depth)
            case Relation(), _:
                return self._value_of_relation(gold, answer, depth, swapped=True)
            case _, Relation():
                return self._value_of_relation(answer, gold, depth, swapped=False)
            case Region(), Region():
                return self._regions(gold, answer)
            case Region(), Sequence(kind="set") | Sequence(kind="list"):
                return self._points(gold, answer, depth)
            case Sequence(kind="set") | Sequence(kind="list"), Region():
                return self._points(answer, gold, depth)
            case Sequence(), Sequence():
                return self._sequences(gold, answer, depth)
            case Matrix(), Matrix():
                shapes = [[len(row) for row in matrix.rows] for matrix in (gold, answer)]
                cells = zip(itertools.chain(*gold.rows), itertools.chain(*answer.rows), strict=False)
                return shapes[0] == shapes[1] and all_of(self.readings(a, b, depth + 1) for a, b in cells)
            case Ratio(), Ratio():
                return self._ratios(gold, answer)
            case Ratio(terms=(a, b), clock=False), Expression():
                return self.leaf(rf"\frac{{{a}}}{{{b}}}", answer.text)
            case Expression(), Ratio(terms=(a, b), clock=False):
                return self.leaf(gold.text, rf"\frac{{{a}}}{{{b}}}")
            case Quantity() | Expression(), Quantity() | Expression():
                return self._quantities(gold, answer)
            case Sequence(kind="set", items=(one,)), Expression() | Quantity():
                return self.readings(one, (answer,), depth + 1)
            case Expression() | Quantity(), Sequence(kind="set", items=(one,)):
                return self.readings((gold,), one, depth + 1)
            case _:
                return False

    # Leaves

    def leaf(self, gold: str, answer: str) -> Outcome:
        """Compares two texts without outer structure."""
        if squeeze(gold) == squeeze(answer):
            return True
        if _is_letter(gold) and _is_letter(answer):
            return False
        if _is_prose(gold) or _is_prose(answer):
            return squeeze(gold).casefold() == squeeze(answer).casefold()
        try:
            one, other = rational(gold), rational(answer)
        except TooLarge:
            self.reason = "a number too large to compare"
            return False
        if one is not None and other is not None:
            return self._rationals(one, other)
        if set(letters(gold)) == set() and _is_letter(answer) and answer not in "ei":
            return False
        if self.algebra is None:
            return None
        if not self.algebra.readable(gold):
            self.unreadable_gold = gold
        return self.algebra.equal(gold, answer)

    def _rationals(self, gold: Rational, answer: Rational) -> bool:
        if gold.value != answer.value:
            return False
        if gold.finished and not answer.finished:
            self.reason = "arithmetic left to the reader"
            return False
        return True

    # Quantities

    def _quantities(self, gold: Quantity | Expression, answer: Quantity | Expression) -> Outcome:
        gold_unit = gold.unit if isinstance(gold, Quantity) else NO_UNIT
        unit = answer.unit if isinstance(answer, Quantity) else NO_UNIT
        if NO_UNIT in (gold_unit, unit):
            if any(isinstance(side, Quantity) and side.tentative for side in (gold, answer)):
                return False
            return self._one_without_unit(gold.text, gold_unit, answer.text, unit)
        if gold_unit.dimension != unit.dimension or gold_unit.percent != unit.percent:
            self.reason = "another unit"
            return False
        if not (gold_unit.words <= unit.words or unit.words <= gold_unit.words):
            self.reason = "other words after the number"
            return False
        factor = unit.factor / gold_unit.factor
        return self.leaf(gold.text, answer.text if factor == 1 else scaled(answer.text, factor))

    def _one_without_unit(self, gold: str, gold_unit: Unit, answer: str, unit: Unit) -> Outcome:
        """A unit that one side leaves out does not matter, with percent and degrees as the exceptions."""
        if unit.percent or (unit == DEGREE and has_pi(gold)):
            return self.leaf(gold, converted(answer, unit))
        outcomes = [self.leaf(gold, answer)]
        if gold_unit.percent or gold_unit == DEGREE:
            outcomes.append(self.leaf(converted(gold, gold_unit), answer))
        return any_of(outcomes)

    # Several values

    def _sequences(self, gold: Sequence, answer: Sequence, depth: int) -> Outcome:
        kinds = {gold.kind, answer.kind}
        if kinds == {"set", "tuple"}:
            self.reason = "a set is no tuple"
            return False
        if len(gold.items) != len(answer.items):
            self.reason = f"{len(answer.items)} values instead of {len(gold.items)}"
            return False
        in_order = "tuple" in kinds or _names_differ(gold) or _names_differ(answer)
        pairs = zip(gold.items, answer.items, strict=True)
        if in_order and not (_names_differ(gold) and _names_differ(answer)):
            return all_of(self.readings(a, b, depth + 1) for a, b in pairs)
        return self._matched(list(gold.items), list(answer.items), lambda a, b: self.readings(a, b, depth + 1))

    def _matched(self, gold: list, answer: list, compare: Callable[..., Outcome]) -> Outcome:
        """Whether each entry has a partner of its own; quadratic at worst, so equal texts are paired off first."""
        spare = list(answer)
        left = []
        for entry in gold:
            if entry in spare:
                spare.remove(entry)
            else:
                left.append(entry)
        if len(left) > 40:
            return False
        outcome: Outcome = True
        for entry in left:
            verdicts = [(compare(entry, other), i) for i, other in enumerate(spare)]
            certain = [i for verdict, i in verdicts if verdict]
            if certain:
                spare.pop(certain[0])
            elif any(verdict is None for verdict, _ in verdicts):
                outcome = None
            else:
                return False
        return outcome

    def _ratios(self, gold: Ratio, answer: Ratio) -> Outcome:
        if len(gold.terms) != len(answer.terms):
            return False
        if gold.clock and answer.clock:
            return [int(term) for term in gold.terms] == [int(term) for term in answer.terms]
        first, *others = zip(gold.terms, answer.terms, strict=True)
        return all_of(self.leaf(rf"\frac{{{a}}}{{{first[0]}}}", rf"\frac{{{b}}}{{{first[1]}}}") for a, b in others)

    # Regions

    def _regions(self, gold: Region, answer: Region) -> Outcome:
        if None not in (gold.variable, answer.variable) and gold.variable != answer.variable:
            self.reason = "another variable"
            return False
        if len(gold.intervals) != len(answer.intervals):
            return False
        return self._matched(list(gold.intervals), list(answer.intervals), self._intervals)

    def _intervals(self, gold: Interval, answer: Interval) -> Outcome:
        if (gold.low_open, gold.high_open) != (answer.low_open, answer.high_open):
            return False
        return all_of([self._ends(gold.low, answer.low), self._ends(gold.high, answer.high)])

    def _ends(self, gold: str, answer: str) -> Outcome:
        if r"\infty" in gold or r"\infty" in answer:
            return squeeze(gold) == squeeze(answer)
        return self.leaf(gold, answer)

    def _points(self, region: Region, points: Sequence, depth: int) -> Outcome:
        if any(interval.low != interval.high for interval in region.intervals):
            return False
        singles = tuple(read(interval.low, depth + 1) for interval in region.intervals)
        return self._sequences(Sequence("set", singles), points, depth)

    # Relations

    def _relations(self, gold: Relation, answer: Relation, depth: int) -> Outcome:
        if not (gold.is_equation and answer.is_equation):
            if self.algebra is None:
                return None
            one, other = surplus(gold), surplus(answer)
            if one and other and one[1] == other[1] and self.algebra.proportional(one[0], other[0], positive=True):
                return True
            return self.algebra.same_by_math_verify(written(gold), written(answer))
        left, right = gold.sides[0], gold.sides[-1]
        named, value = answer.sides[0], answer.sides[-1]
        gold_function, answer_function = function(left), function(named)
        if gold_function and answer_function:  # definitions: arguments and parameters may be renamed
            if gold_function[0] != answer_function[0] or len(gold_function[1]) != len(answer_function[1]):
                return False
            value = renamed(value, dict(zip(answer_function[1], gold_function[1], strict=True)))
            return self._renaming(right, value, gold_function[1], depth)
        if is_name(left) and is_name(named):
            if squeeze(left) == squeeze(named) and not set(letters(left)) & set(letters(right + value)):
                return self.texts(right, value, depth + 1)
            if not letters(right) and not letters(value):
                self.reason = "another name"
                return False
        if self.algebra is None:
            return None
        both = difference(left, right), difference(named, value)
        if None in both:
            return self.algebra.same_by_math_verify(written(gold), written(answer))
        return self.algebra.proportional(*both)

    def _renaming(self, gold: str, answer: str, bound: tuple[str, ...], depth: int) -> Outcome:
        """Compares bodies with their free parameters renamed in every possible way."""
        own, other = parameters(gold, bound), parameters(answer, bound)
        if len(own) != len(other) or len(own) > MAX_RENAMED:
            return self.texts(gold, answer, depth + 1)
        return any_of(
            self.texts(gold, renamed(answer, dict(zip(other, order, strict=True))), depth + 1)
            for order in itertools.permutations(own)
        )

    def _value_of_relation(self, relation: Relation, other: Answer, depth: int, swapped: bool) -> Outcome:
        """A named value against a bare one: `x = 5` against `5`."""
        if not relation.is_equation:
            if self.algebra is None or not isinstance(other, Region):
                return None if isinstance(other, Region) else False
            text = written(relation), region_text(other)
            return self.algebra.same_by_math_verify(*(text if swapped else text[::-1]))
        left, value = relation.sides[0], relation.sides[-1]
        bare_zero = squeeze(value) == "0"
        if not (is_name(left) or (not swapped and not bare_zero and letters(left) and not letters(value))):
            return self._chain(relation, other, depth, swapped)
        if left.strip() in letters(value):
            return False
        defined = function(left)
        if defined and isinstance(other, Expression):
            pair = (value, other.text) if swapped else (other.text, value)
            return self._renaming(*pair, defined[1], depth)
        values = read(value, depth + 1)
        return self.readings(values, (other,), depth + 1) if swapped else self.readings((other,), values, depth + 1)

    def _chain(self, relation: Relation, other: Answer, depth: int, swapped: bool) -> Outcome:
        """`12 + 5 = 17`: a true chain of numbers has their value, whichever side states it."""
        try:
            sides = [rational(side) for side in relation.sides]
        except TooLarge:
            return False
        if any(side is None for side in sides):
            return False
        stated = next((text for text, side in zip(relation.sides, sides, strict=True) if side and side.finished), "")
        values = read(stated or relation.sides[-1], depth + 1)
        return self.readings(values, (other,), depth + 1) if swapped else self.readings((other,), values, depth + 1)

    # Parameters

    def _families(self, family: Family, other: Answer, depth: int) -> Outcome:
        """Declared parameters are renamed; their domains must agree where both are declared."""
        if not isinstance(other, Family):
            other = Family(text_of(other), ()) if text_of(other) else None
            if other is None:
                return False
        domains = [sorted(map(squeeze, side.domain)) for side in (family, other)]
        if all(domains) and domains[0] != domains[1]:
            return False
        own, others = (
            family.letters,
            other.letters
            or tuple(
                letter for letter in parameters(other.body, ()) if letter not in parameters(family.body, family.letters)
            ),
        )
        if not others and len(family.letters) > 0:
            others = tuple(letter for letter in family.letters if letter in letters(other.body))
        if len(own) != len(others) or len(own) > MAX_RENAMED:
            return False
        return any_of(
            self.texts(family.body, renamed(other.body, dict(zip(others, order, strict=True))), depth + 1)
            for order in itertools.permutations(own)
        )


def _is_letter(text: str) -> bool:
    return len(text.strip()) == 1 and text.strip().isalpha()


def _names(sequence: Sequence) -> Iterator[str]:
    for item in sequence.items:
        if isinstance(item[0], Relation) and item[0].is_equation:
            yield squeeze(item[0].sides[0])


def _names_differ(sequence: Sequence) -> bool:
    """Whether all items are equations that name different things, as in `a = 1, b = 2`."""
    names = list(_names(sequence))
    return len(names) == len(sequence.items) > 1 and len(set(names)) == len(names)


def _is_prose(text: str) -> bool:
    """Whether a text is language with some mathematics in it: two words of three letters outside commands."""
    return len(_PROSE.findall(re.sub(r"\\text\s*\{([^{}]*)\}", r" \1 ", text))) > 1
