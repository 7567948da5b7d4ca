"""Keywords and letters: which must occur, how often, and where."""

import itertools
import re
from collections.abc import Mapping
from typing import Any

from vibethinker_jax.rewards.instruction_checkers.registry import checker
from vibethinker_jax.rewards.instruction_checkers.resources import PUNKT
from vibethinker_jax.rewards.instruction_checkers.text import holds, occurrences, plain_words, sentences, words


def _pattern_count(pattern: str, text: str) -> int:
    """How often upstream finds a keyword: as a regular expression, inside words too."""
    try:
        return len(re.findall(pattern, text, re.IGNORECASE))
    except re.error:
        return 0


@checker("keywords:existence")
def existence(text: str, arguments: Mapping[str, Any], official: bool) -> bool:
    """All keywords occur. Official also finds "le" in "table"; fixed wants whole words."""
    count = _pattern_count if official else occurrences
    return all(count(keyword, text) > 0 for keyword in arguments["keywords"])


@checker("keywords:frequency")
def frequency(text: str, arguments: Mapping[str, Any], official: bool) -> bool:
    """The keyword occurs at least / less than so often. Official counts it inside words too."""
    count = _pattern_count if official else occurrences
    return holds(count(arguments["keyword"].strip(), text), arguments["relation"], arguments["frequency"])


@checker("keywords:forbidden_words")
def forbidden_words(text: str, arguments: Mapping[str, Any], official: bool) -> bool:
    r"""None of the words occurs as a whole word. Official reads them as regular expressions between `\b`."""
    if official:
        return not any(_pattern_count(rf"\b{word}\b", text) for word in arguments["forbidden_words"])
    return not any(occurrences(word, text) for word in arguments["forbidden_words"])


@checker("keywords:letter_frequency")
def letter_frequency(text: str, arguments: Mapping[str, Any], official: bool) -> bool:
    """The character, whatever its case, occurs at least / less than so often.

    Upstream replaces a character that is no letter, such as "#", by a random letter; both behaviours count it.
    """
    count = text.lower().count(arguments["letter"].lower())
    return holds(count, arguments["let_relation"], arguments["let_frequency"])


@checker("count:keywords_multiple")
def keywords_multiple(text: str, arguments: Mapping[str, Any], official: bool) -> bool:
    """Five keywords occur exactly 1, 2, 3, 5 and 7 times, as whole words."""
    return all(occurrences(arguments[f"keyword{i}"], text) == n for i, n in enumerate((1, 2, 3, 5, 7), start=1))


@checker("sentence:keyword", needs_official=(PUNKT,))
def keyword_in_sentence(text: str, arguments: Mapping[str, Any], official: bool) -> bool:
    """The N-th sentence has the word."""
    found = sentences(text, official)
    index = int(arguments["N"]) - 1
    return index < len(found) and occurrences(arguments["word"], found[index]) > 0


@checker("words:keywords_specific_position", needs_official=(PUNKT,))
def keyword_at_position(text: str, arguments: Mapping[str, Any], official: bool) -> bool:
    """The m-th word of the n-th sentence is the keyword."""
    found = sentences(text, official)
    sentence, word = int(arguments["n"]) - 1, int(arguments["m"]) - 1
    if sentence >= len(found):
        return False
    in_sentence = words(found[sentence], official)
    return word < len(in_sentence) and in_sentence[word].lower() == arguments["keyword"].strip().lower()


@checker("words:words_position", needs_official=(PUNKT,))
def keyword_second_and_second_to_last(text: str, arguments: Mapping[str, Any], official: bool) -> bool:
    """The second word and the second to last word are the keyword."""
    found = words(text, official)
    keyword = arguments["keyword"].strip().lower()
    return len(found) >= 2 and found[1].lower() == keyword and found[-2].lower() == keyword


@checker("words:no_consecutive")
def no_consecutive_first_letters(text: str, arguments: Mapping[str, Any], official: bool) -> bool:
    """No two neighbouring words start with the same letter."""
    found = plain_words(text)
    return all(left[0] != right[0] for left, right in itertools.pairwise(found))
