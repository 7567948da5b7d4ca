r"""Intervals and inequalities as one thing: unions of intervals with textual endpoints."""

import re
from fractions import Fraction

from vibethinker_jax.rewards.exact.answer import Interval, Region
from vibethinker_jax.rewards.exact.rational import TooLarge, rational
from vibethinker_jax.rewards.exact.split import cut
from vibethinker_jax.rewards.exact.symbols import letters

INFINITE = {r"\infty", r"-\infty"}
_VARIABLE = re.compile(r"[A-Za-z]|\\[a-z]+")
_LESS, _GREATER = {"<", r"\le"}, {">", r"\ge"}


def _endpoint(text: str) -> str:
    squeezed = "".join(text.split())
    return {r"+\infty": r"\infty"}.get(squeezed, squeezed if squeezed in INFINITE else text.strip())


def bracketed_interval(text: str) -> Region | None:
    """`(1, 2]` as a region; None for anything else. An interval whose ends are known to be reversed is none."""
    if len(text) < 5 or text[0] not in "([" or text[-1] not in ")]":
        return None
    ends, _ = cut(text[1:-1], re.compile(","))
    if len(ends) != 2 or not all(ends):
        return None
    low, high = map(_endpoint, ends)
    interval = Interval(low, high, text[0] == "(" or low in INFINITE, text[-1] == ")" or high in INFINITE)
    low_value, high_value = value(low), value(high)
    if low_value is not None and high_value is not None and low_value > high_value:
        return None
    return Region((interval,))


def region_of_relation(sides: list[str], signs: list[str]) -> Region | None:
    """`x > 2`, `1 < x \\le 2`, `2 < x`, `x \\ne 2` as a region; None where no side is just the variable."""
    kinds = set(signs)
    if not (kinds <= _LESS or kinds <= _GREATER or signs == [r"\ne"]):
        return None
    if kinds <= _GREATER:  # 3 > x > 1 is 1 < x < 3
        sides, signs = sides[::-1], [{">": "<", r"\ge": r"\le"}[sign] for sign in signs[::-1]]
    at = [i for i, side in enumerate(sides) if _VARIABLE.fullmatch(side) and side in letters(side)]
    if len(sides) == 3:
        at = [1] if 1 in at else []
    if len(at) > 1 or not at or len(sides) > 3:
        return None
    variable = sides[at[0]]
    bounds = [_endpoint(side) for i, side in enumerate(sides) if i != at[0]]
    if any(variable in letters(bound) for bound in bounds):
        return None
    if signs == [r"\ne"]:
        below, above = Interval(r"-\infty", bounds[0], True, True), Interval(bounds[0], r"\infty", True, True)
        return Region((below, above), variable)
    if len(sides) == 3:
        return Region((Interval(*bounds, signs[0] == "<", signs[1] == "<"),), variable)
    is_open = signs[0] == "<"
    if at[0] == 0:
        return Region((Interval(r"-\infty", bounds[0], True, is_open or bounds[0] in INFINITE),), variable)
    return Region((Interval(bounds[0], r"\infty", is_open or bounds[0] in INFINITE, True),), variable)


def value(endpoint: str) -> Fraction | float | None:
    """Endpoints that can be ordered: rational numbers and the infinities."""
    if endpoint in INFINITE:
        return float("-inf") if endpoint.startswith("-") else float("inf")
    try:
        exact = rational(endpoint)
    except TooLarge:
        return None
    return exact.value if exact is not None else None


def union(regions: list[Region]) -> Region | None:
    """All parts together, touching ones merged; None if the regions are of different variables."""
    if len({region.variable for region in regions}) != 1:
        return None
    parts = [interval for region in regions for interval in region.intervals]
    ordered = [(value(part.low), value(part.high), part) for part in parts]
    if all(low is not None and high is not None for low, high, _ in ordered):
        ordered.sort(key=lambda entry: (entry[0], entry[2].low_open))
        merged = [ordered[0]]
        for low, high, part in ordered[1:]:
            last_low, last_high, last = merged[-1]
            touches = low < last_high or (low == last_high and not (part.low_open and last.high_open))
            if not touches:
                merged.append((low, high, part))
                continue
            far = max(
                ((last_high, not last.high_open), last), ((high, not part.high_open), part), key=lambda end: end[0]
            )
            joined = Interval(last.low, far[1].high, last.low_open, far[1].high_open)
            merged[-1] = (last_low, far[0][0], joined)
        parts = [part for _, _, part in merged]
    return Region(tuple(parts), regions[0].variable)


def intersection(regions: list[Region | None]) -> Region | None:
    """What all regions share, where their endpoints can be ordered; None where they cannot, or nothing is shared."""
    if None in regions or len({region.variable for region in regions}) != 1:
        return None
    if len(regions) == 1:
        return regions[0]
    parts = list(regions[0].intervals)
    for region in regions[1:]:
        met = [_meet(one, other) for one in parts for other in region.intervals]
        if "unordered" in met or len(met) > 200:
            return None
        parts = [part for part in met if isinstance(part, Interval)]
    return Region(tuple(parts), regions[0].variable) if parts else None


def _meet(one: Interval, other: Interval) -> Interval | str | None:
    lows = [(value(part.low), part.low_open, part.low) for part in (one, other)]
    highs = [(value(part.high), part.high_open, part.high) for part in (one, other)]
    infinite = {float("-inf"), float("inf")}
    # an infinite end yields to any other, whether or not that one can be ordered
    lows = [end for end in lows if end[0] not in infinite] or lows[:1]
    highs = [end for end in highs if end[0] not in infinite] or highs[:1]
    if any(end[0] is None for ends in (lows, highs) if len(ends) > 1 for end in ends):
        return "unordered"
    low = max(lows, key=lambda end: (end[0], end[1])) if len(lows) > 1 else lows[0]
    high = min(highs, key=lambda end: (end[0], not end[1])) if len(highs) > 1 else highs[0]
    ordered = low[0] is not None and high[0] is not None
    if ordered and (low[0] > high[0] or (low[0] == high[0] and (low[1] or high[1]))):
        return None
    return Interval(low[2], high[2], low[1], high[1])
