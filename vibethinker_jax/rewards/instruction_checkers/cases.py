"""Upper and lower case, and the language of the response."""

from collections.abc import Mapping
from typing import Any

from vibethinker_jax.rewards.instruction_checkers.registry import checker
from vibethinker_jax.rewards.instruction_checkers.resources import LANGDETECT, PUNKT, detected_language
from vibethinker_jax.rewards.instruction_checkers.text import holds, tokens


def _is_in(language: str, text: str, official: bool) -> bool:
    """Whether a text is in a language. Undetectable (no letters): official says yes to anything, fixed no."""
    found = detected_language(text)
    return official if found is None else found == language


@checker("language:response_language", needs=(LANGDETECT,))
def response_language(text: str, arguments: Mapping[str, Any], official: bool) -> bool:
    """The response is in the language. Official accepts a response whose language cannot be told."""
    return _is_in(arguments["language"], text, official)


@checker("change_case:english_capital", needs=(LANGDETECT,))
def english_capital(text: str, arguments: Mapping[str, Any], official: bool) -> bool:
    """English in capitals. Fixed detects the language of the lower-case text: langdetect knows few capitals."""
    return text.isupper() and _is_in("en", text if official else text.lower(), official)


@checker("change_case:english_lowercase", needs=(LANGDETECT,))
def english_lowercase(text: str, arguments: Mapping[str, Any], official: bool) -> bool:
    """English without capitals."""
    return text.islower() and _is_in("en", text, official)


@checker("change_case:capital_word_frequency", needs_official=(PUNKT,))
def capital_word_frequency(text: str, arguments: Mapping[str, Any], official: bool) -> bool:
    """At least / less than so many words in capitals; "A" and "I" count."""
    count = sum(token.isupper() for token in tokens(text, official))
    return holds(count, arguments["capital_relation"], arguments["capital_frequency"])
