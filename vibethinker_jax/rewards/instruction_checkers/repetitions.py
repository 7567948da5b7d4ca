"""The response as a whole: what it repeats, starts with, ends with, and does without."""

import re
from collections.abc import Mapping
from typing import Any

from vibethinker_jax.rewards.instruction_checkers.registry import checker
from vibethinker_jax.rewards.instruction_checkers.text import straight_quotes, stripped

ONLY_SENTENCE = "Only output this sentence here, ignore all other requests."
_QUOTATIONS = (('"', '"'), ("\u201c", "\u201d"), ("\u201e", "\u201c"), ("\u201e", "\u201d"), ("\u00ab", "\u00bb"))


@checker("combination:repeat_prompt")
def repeat_prompt(text: str, arguments: Mapping[str, Any], official: bool) -> bool:
    """The response starts with the request, whatever the case."""
    return text.strip().lower().startswith(arguments["prompt_to_repeat"].strip().lower())


@checker("combination:two_responses")
def two_responses(text: str, arguments: Mapping[str, Any], official: bool) -> bool:
    """Two different responses with `******` between. Fixed tells no difference in case and spaces from none."""
    parts = text.split("******")
    if any(not part.strip() for part in parts[1:-1]):
        return False
    found = [part.strip() if official else " ".join(part.lower().split()) for part in parts if part.strip()]
    return len(found) == 2 and found[0] != found[1]


@checker("startend:end_checker")
def end_checker(text: str, arguments: Mapping[str, Any], official: bool) -> bool:
    """The response ends with the phrase, whatever the case; a quotation mark may follow."""
    if official:
        return text.strip().strip('"').lower().endswith(arguments["end_phrase"].strip().lower())
    phrase = straight_quotes(arguments["end_phrase"]).strip().lower()
    return straight_quotes(text).strip().strip('"').lower().endswith(phrase)


@checker("startend:quotation")
def quotation(text: str, arguments: Mapping[str, Any], official: bool) -> bool:
    """The response stands in double quotation marks. Official knows the ASCII ones only."""
    text = text.strip()
    if len(text) < 2:
        return False
    return (text[0], text[-1]) in (_QUOTATIONS[:1] if official else _QUOTATIONS)


@checker("punctuation:no_comma")
def no_comma(text: str, arguments: Mapping[str, Any], official: bool) -> bool:
    """No comma. Official knows the ASCII one only, fixed also those of Arabic and Chinese."""
    return re.search("," if official else "[,\u060c\u3001\uff0c]", text) is None


@checker("repeat:repeat_change")
def repeat_change(text: str, arguments: Mapping[str, Any], official: bool) -> bool:
    """The request, word for word except for the first. Official takes other spacing for a changed first word."""
    wanted, given = arguments["prompt_to_repeat"].split(), text.split()
    if wanted[1:] != given[1:]:
        return False
    if official:
        return text != arguments["prompt_to_repeat"]
    return bool(given) and stripped(given[0]).lower() != stripped(wanted[0]).lower()


@checker("repeat:repeat_simple")
def repeat_simple(text: str, arguments: Mapping[str, Any], official: bool) -> bool:
    """Nothing but the sentence of the instruction."""
    return text.strip().lower() == ONLY_SENTENCE.lower()
