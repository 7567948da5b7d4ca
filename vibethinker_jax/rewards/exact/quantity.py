r"""Where the value of a quantity ends and its unit begins: `6\pi\text{ cm}^2`, `28\%`, `90^\circ`, `\$5`."""

import re

from vibethinker_jax.rewards.exact.answer import Quantity
from vibethinker_jax.rewards.exact.split import is_balanced
from vibethinker_jax.rewards.exact.units import LETTER_UNITS, PERCENT, unit, without_currency

_SCANNED = re.compile(
    r"[0-9.]+[eE][+-]?[0-9]+|(?P<unit>\\text|\\?%|\^\\circ|\\Omega|\\mu)|"
    r"(?P<command>\\[A-Za-z]+)|(?P<word>[A-Za-z\u00b5]+)"
)
_VALUE_COMMANDS = {r"\frac", r"\sqrt", r"\pi", r"\cdot", r"\times", r"\binom", r"\div", r"\overline"}
_UNIT_TEXT = re.compile(
    r"(?:\\text\s*\{[^{}]*\}|\\?%|\^\\circ|\\(?:Omega|mu|cdot)|\^\s*\{?\s*-?[0-9]\s*\}?|[A-Za-z\u00b5 /*.'\-])+"
)


def quantity(text: str) -> Quantity | None:
    """The value and the unit of a normalised text; None if it has no unit or its value is not a closed number."""
    value, currency = without_currency(text)
    start = _unit_start(value)
    if start is None:
        return Quantity(value, currency) if currency is not None and value else None
    value, written = value[:start].strip(), value[start:].strip()
    if (
        not re.search(r"[0-9]|\\pi", value)
        or not is_balanced(value)
        or value.endswith(("+", "-", "/", "^", "_", r"\cdot"))
    ):
        return None
    if not _UNIT_TEXT.fullmatch(written):
        return None
    measured = unit(written)
    if measured is None:
        return None
    if currency is not None and measured.dimension == () and measured != PERCENT:
        measured = currency
    tentative = False
    if not written.startswith(("\\", "%", "^")):
        words = re.findall("[A-Za-z\u00b5]+", written)
        tentative = words[0] in LETTER_UNITS
        if not tentative and len(words[0]) < 3 and measured.words:
            return None  # `2ab` is a product
    return Quantity(value, measured, tentative)


def _unit_start(text: str) -> int | None:
    """Position of the first thing that cannot belong to a closed number."""
    for match in _SCANNED.finditer(text):
        if match["unit"] or match["word"]:
            return match.start()
        if match["command"] and match["command"] not in _VALUE_COMMANDS:
            return None
    return None
