r"""Units of measurement: `5\text{ km}` is 5 and a unit, a unit is a dimension and an exact factor.

Words that are no known unit (`72\text{ clips}`) are kept as words: the policy for them is in `policy.py`.
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction

# dimension -> {names: factor}. Metric prefixes are added to the names in _PREFIXED_NAMES.
_TABLE: dict[str, dict[str, str]] = {
    "length": {
        "m meter metre": "1", "in inch inches": "0.0254", "ft foot feet": "0.3048", "yd yard": "0.9144",
        "mi mile": "1609.344",
    },
    "mass": {
        "g gram": "0.001", "t ton tonne": "1000", "lb lbs pound": "0.45359237", "oz ounce": "0.028349523125",
    },
    "time": {
        "s sec second": "1", "min mins minute": "60", "h hr hrs hour": "3600", "day": "86400", "week": "604800",
    },
    "month": {"month": "1", "year yr yrs": "12"},
    "volume": {"L l liter litre": "0.001", "gallon gal": "0.003785411784"},
    "money $": {"dollar USD": "1", "cent": "0.01"},
    "money euro": {"euro EUR": "1"},
    "money pound": {"sterling GBP": "1"},
    "angle": {"degree deg": "1"},
    "celsius": {"celsius": "1"},
    "fahrenheit": {"fahrenheit": "1"},
    "temperature": {"K kelvin": "1"},
    "current": {"A ampere amp": "1"},
    "force": {"N newton": "1"},
    "energy": {"J joule": "1", "cal calorie": "4.184", "eV": "1.602176634e-19"},
    "power": {"W watt": "1"},
    "pressure": {"Pa pascal": "1", "bar": "100000", "atm": "101325"},
    "voltage": {"V volt": "1"},
    "resistance": {"ohm \\Omega": "1"},
    "frequency": {"Hz hertz": "1"},
    "amount": {"mol mole": "1"},
    "charge": {"C coulomb": "1"},
    "capacity": {"F farad": "1"},
}  # fmt: skip
_PREFIXES = {
    "n nano": "1e-9", "\u00b5 \u03bc \\mu micro": "1e-6", "m milli": "1e-3", "c centi": "1e-2", "d deci": "1e-1",
    "k kilo": "1e3", "M mega": "1e6", "G giga": "1e9", "T tera": "1e12",
}  # fmt: skip
_PREFIXED_NAMES = (
    "m meter metre g gram s sec second L l liter litre N newton J joule W watt Pa pascal V volt Hz hertz eV cal "
    "A ampere mol mole F C"
)
# A derived dimension is a product of others, so that m/s, km/h and mph, or cm^3 and mL, are comparable.
_DERIVED = {"volume": {"length": 3}, "frequency": {"time": -1}}
_COMPOUND = {"mph": "mile/hour", "kph": "km/h", "rpm": "1/min", "kWh": "kW h", "sq": "square", "cu": "cubic"}
_CURRENCY_SIGN = re.compile(r"^\s*(-?)\s*\\?\$\s*(?=[-0-9.\\])")

_FILLERS = {"of", "an", "the", "in"}
_WORD = re.compile(r"\\(?:Omega|mu)|[A-Za-z\u00b5\u03bc]+|\^\s*\{?\s*-?\d+\s*\}?|[/*\u00b7]|\\cdot|\S")


@dataclass(frozen=True)
class Unit:
    """A unit of measurement, or words.

    Attributes:
        dimension: sorted (base dimension, power) pairs; empty for words and for percent.
        factor: in base units.
        words: the words that are no unit, lower case and singular.
        percent: whether it is the percent sign.
    """

    dimension: tuple[tuple[str, int], ...] = ()
    factor: Fraction = Fraction(1)
    words: frozenset[str] = field(default_factory=frozenset)
    percent: bool = False


PERCENT = Unit(factor=Fraction(1, 100), percent=True)
DEGREE = Unit(dimension=(("angle", 1),))
NO_UNIT = Unit()


def _known() -> dict[str, tuple[str, Fraction]]:
    known = {}
    for dimension, entries in _TABLE.items():
        for names, factor in entries.items():
            for name in names.split():
                variants = {name} | ({name + "s"} if len(name) > 2 and name[-1] not in "szxV" else set())
                for variant in variants:
                    known[variant] = (dimension, Fraction(factor))
    for prefixes, factor in _PREFIXES.items():
        short, long = prefixes.split()[:-1], prefixes.split()[-1]
        for name in _PREFIXED_NAMES.split():
            dimension, base = known[name]
            for prefix in [long] if len(name) > 3 else short:
                for variant in (name, name + "s") if len(name) > 3 else (name,):
                    known.setdefault(prefix + variant, (dimension, base * Fraction(factor)))
    return known


_KNOWN = _known()
# Two letters, and single ones only where a wrapper says that they are words: in `5 m`, m may be a variable.
LETTER_UNITS = frozenset(name for name in _KNOWN if len(name) == 1)


def _singular(word: str) -> str:
    word = word.lower()
    return word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith("ss") else word


def _lookup(word: str) -> tuple[str, Fraction] | None:
    """A unit by its name; symbols are case-sensitive, words are not."""
    return _KNOWN.get(word) or (_KNOWN.get(word.lower()) if len(word) > 2 else None)


def _factors(text: str) -> Iterator[tuple[str, int]]:
    r"""The words of a unit with their powers: `kg m/s^2` is kg 1, m 1, s -2; `square feet` is feet 2."""
    sign, power_of_next = 1, 1
    words = _WORD.findall(text)
    for i, word in enumerate(words):
        lowered = word.lower()
        if word in "/" or lowered == "per":
            sign = -1
        elif lowered in ("square", "sq"):
            power_of_next = 2
        elif lowered in ("cubic", "cu"):
            power_of_next = 3
        elif word in ("*", "\u00b7", r"\cdot") or word[0] == "^" or (lowered in _FILLERS and len(words) > 1):
            continue
        else:
            following = words[i + 1] if i + 1 < len(words) else ""
            power = int(re.sub(r"[^0-9-]", "", following) or 1) if following.startswith("^") else power_of_next
            if lowered in ("squared", "cubed"):
                continue
            if following.lower() in ("squared", "cubed"):
                power = {"squared": 2, "cubed": 3}[following.lower()]
            yield word, sign * power
            power_of_next = 1


def unit(text: str) -> Unit | None:
    r"""The unit that `text`, such as `km/h`, `square feet` or `clips`, names; None if it is no words at all."""
    text = re.sub(r"\\text\s*\{([^{}]*)\}", r" \1 ", text).replace(".", "")
    if text.strip().lower() in ("%", r"\%", "percent", "per cent"):
        return PERCENT
    text = re.sub(r"\^\\circ\s*C\b", " celsius ", re.sub(r"\^\\circ\s*F\b", " fahrenheit ", text))
    if text.strip() == r"^\circ":
        return DEGREE
    for short, long in _COMPOUND.items():
        text = re.sub(rf"(?<![A-Za-z]){short}(?![A-Za-z])", long, text)
    dimension: Counter[str] = Counter()
    factor, words = Fraction(1), set()
    for word, power in _factors(text):
        known = _lookup(word)
        if known is None and not word.isalpha():
            return None
        if known is None or abs(power) > 9:
            words.add(_singular(word))
            continue
        factor *= known[1] ** power
        for base, exponent in _DERIVED.get(known[0], {known[0]: 1}).items():
            dimension[base] += exponent * power
    pairs = tuple(sorted((base, power) for base, power in dimension.items() if power))
    if not pairs and not words:
        return None
    return Unit(pairs, factor, frozenset(words))


def without_currency(text: str) -> tuple[str, Unit | None]:
    r"""`\$5` as 5 and the unit dollar; any other text unchanged."""
    match = _CURRENCY_SIGN.match(text)
    if match is None:
        return text, None
    return match[1] + text[match.end() :], Unit(dimension=(("money $", 1),))
