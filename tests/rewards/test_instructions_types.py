"""A passing and a failing response, written by hand, for every instruction type; and where official scoring differs."""

import importlib.util

import pytest

from vibethinker_jax.data.instruction_kwargs import INSTRUCTION_KWARGS
from vibethinker_jax.rewards.instruction_checkers import CHECKERS

NEEDS_LANGDETECT = {
    "change_case:english_capital",
    "change_case:english_lowercase",
    "language:response_language",
}
ENGLISH = "The river runs through the old town, and people like to walk along its banks in the evening."
GERMAN = "Der Fluss fließt durch die alte Stadt, und die Leute gehen abends gern an seinem Ufer spazieren."
FIVE_KEYWORDS = {"keyword1": "sea", "keyword2": "sky", "keyword3": "sun", "keyword4": "sand", "keyword5": "salt"}
COUNTED = "sea" + " sky" * 2 + " sun" * 3 + " sand" * 5 + " salt" * 7

# type, arguments, a response that follows it, one that does not
PAIRS = [
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": "at least"},
        "STOP right THERE.",
        "STOP right there.",
    ),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": "less than"},
        "STOP right there.",
        "STOP right THERE.",
    ),
    ("change_case:english_capital", {}, ENGLISH.upper(), ENGLISH),
    ("change_case:english_capital", {}, ENGLISH.upper(), GERMAN.upper()),
    ("change_case:english_lowercase", {}, ENGLISH.lower(), ENGLISH),
    ("change_case:english_lowercase", {}, ENGLISH.lower(), GERMAN.lower()),
    (
        "combination:repeat_prompt",
        {"prompt_to_repeat": "Write a haiku."},
        "write a haiku. Green frog.",
        "Green frog. Write a haiku.",
    ),
    ("combination:two_responses", {}, "Yes.\n******\nNo.", "Yes.\n******\nyes."),
    ("combination:two_responses", {}, "Yes.\n******\nNo.", "Yes.\n******\nNo.\n******\nMaybe."),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[name] of [city]", "[name] of []"),
    ("detectable_content:number_placeholders", {"num_placeholders": 1}, "[name]", "[link](https://a.org)"),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "Bye.\n\nP.S. Write soon.", "Bye. No P.S. here"),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "Bye.\nP.S. Write.", "Bye.\nP.P.S. Write."),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, "Bye.\n**P.P.S** Write.", "Bye.\nP.S. Write."),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "Bye.\nP. S. Write.", "Bye.\nP.S."),
    ("detectable_format:constrained_response", {}, "My answer is no.", "No."),
    ("detectable_format:constrained_response", {}, "My answer is no.", "My answer is yes. My answer is no."),
    ("detectable_format:json_format", {}, '```json\n{"a": [1, 2]}\n```', '{"a": [1, 2}'),
    ("detectable_format:json_format", {}, '[{"a": 1}]', "5"),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "SECTION", "num_sections": 2},
        "**SECTION 1**\nA\n## SECTION 2\nB",
        "SECTION 1\nA, as SECTION 2 says",
    ),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* a\n---\n- b", "* a\n- b\n* c"),
    (
        "detectable_format:number_highlighted_sections",
        {"num_highlights": 2},
        "*One* and *two parts*.",
        "*One* and **two**, 2 * 3 * 4.",
    ),
    ("detectable_format:title", {}, "<<A day>>\nIt rained.", "<A day>\nIt rained."),
    ("detectable_format:title", {}, "<<A day>>\nIt rained.", "<< >>\nIt rained."),
    ("keywords:existence", {"keywords": ["le", "Paris"]}, "Le metro in paris.", "The table in Paris."),
    ("keywords:forbidden_words", {"forbidden_words": ["rock"]}, "A rocket.", "A Rock."),
    (
        "keywords:frequency",
        {"keyword": "war", "frequency": 2, "relation": "at least"},
        "War and war.",
        "War and warning.",
    ),
    ("keywords:frequency", {"keyword": "war", "frequency": 2, "relation": "less than"}, "War, warning.", "War, war."),
    (
        "keywords:letter_frequency",
        {"letter": "Q", "let_frequency": 2, "let_relation": "at least"},
        "Quick quiz",
        "Quick fix",
    ),
    (
        "keywords:letter_frequency",
        {"letter": "#", "let_frequency": 2, "let_relation": "less than"},
        "# Title",
        "## Title",
    ),
    ("language:response_language", {"language": "de"}, GERMAN, ENGLISH),
    ("language:response_language", {"language": "en"}, ENGLISH, "123 456 !!!"),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "elm"},
        "One.\n\n\n\n**Elm** trees.",
        "One.\n\nThe elm.",
    ),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "elm"},
        "One.\n\nElm.",
        "One.\n\nElm.\n\nThree.",
    ),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "One ***bold***.\n***\nTwo.", "One.\n\nTwo."),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "One.\n***\nTwo.", "One.\n***\n***\nTwo."),
    (
        "length_constraints:number_sentences",
        {"num_sentences": 2, "relation": "at least"},
        "It cost 3.5 euros. Why?",
        "Dr. Smith paid 3.5 euros, e.g. for tea.",
    ),
    (
        "length_constraints:number_sentences",
        {"num_sentences": 2, "relation": "less than"},
        "1. One item",
        "One. Two. Three.",
    ),
    ("length_constraints:number_words", {"num_words": 3, "relation": "at least"}, "one two three", "one two"),
    ("length_constraints:number_words", {"num_words": 3, "relation": "less than"}, "one two", "one two three"),
    ("punctuation:no_comma", {}, "No mark; none.", "One, two."),
    ("punctuation:no_comma", {}, "\u6ca1\u6709\u9017\u53f7\u3002", "\u6709\uff0c\u9017\u53f7\u3002"),
    ("startend:end_checker", {"end_phrase": "Any questions?"}, "That is it. Any QUESTIONS?", "Any questions? Ask."),
    ("startend:quotation", {}, '"All of it."', '"Only" this.'),
    ("startend:quotation", {}, "\u201cAll of it.\u201d", '"'),
    ("count:conjunctions", {"small_n": 2}, "Salt and pepper, but no oil.", "Salt and pepper And oil."),
    ("count:keywords_multiple", FIVE_KEYWORDS, COUNTED, COUNTED + " sky"),
    ("count:keywords_multiple", FIVE_KEYWORDS, COUNTED + " seaside", "seaside" + COUNTED[3:]),
    ("count:numbers", {"N": 3}, "1,234 of 5.5 in 6", "3-4 and 5, or 6"),
    ("count:person_names", {"N": 2}, "Emma met Liam's dog.", "Emma met Emma and Peter."),
    ("count:pronouns", {"N": 3}, "It's mine, she/her.", "Trees grow; it rains, she said."),
    ("count:punctuation", {}, "One, two; three: yes. No! Why? Really?!", "One, two; three: yes. No! Why?"),
    ("count:unique_word_count", {"N": 3}, "One two, three.", "One one, two - one"),
    ("count:word_count_range", {"min_words": 2, "max_words": 3}, "one two three", "one two three four"),
    ("count:words_japanese", {"N": 2}, "I 猫 like ねこ", "I cat like ねこ"),
    ("count:words_japanese", {"N": 2}, "I 猫 like", "I 2 like"),
    ("count:words_japanese", {"N": 5}, "one two three four 五", "one two"),
    ("format:emoji", {}, "Hello there. 😀 All is well 👍🏽! Bye ❤️", "Hello there. All is well 😀."),
    ("format:line_indent", {}, "One\n\n\n  two\n    three", "One\n  two\n  three"),
    ("format:line_indent", {}, "One\n two", "One"),
    ("format:list", {"sep": "SEPARATOR"}, "SEPARATOR one\nSEPARATOR two", "Use SEPARATOR or SEPARATOR."),
    ("format:list", {"sep": "-"}, "- one\n- two", "A well-known, non-fiction book"),
    ("format:newline", {}, "Each\nword\n\nalone.", "Each word\nalone."),
    ("format:no_bullets_bullets", {}, "One.\n\nTwo.\n\n* a\n* b\n\nDone.", "One. Two!\n* a\n* b"),
    ("format:no_bullets_bullets", {}, "One. Two.\n* a\n* b", "One. Two.\n* a"),
    ("format:options", {"options": "yes/no/maybe"}, "Maybe.", "Maybe, it depends."),
    ("format:options", {"options": "I know or I don't know"}, "I don\u2019t know", "I know or I don't know"),
    ("format:options", {"options": "a), b), c), d)"}, "b)\n", "b"),
    ("format:parentheses", {}, "(a [b {c (d [e])}])", "(a [b {c (d)}]) ()"),
    ("format:parentheses", {}, "(a [b {c (d [e])}])", "(a [b {c (d [e] and the rest"),
    ("format:quote_unquote", {}, '"Hi" means hello. "Bye" means the end.', '"Hi" "Bye" are words.'),
    ("format:quote_unquote", {}, '"Hi" means hello.', "Nothing is quoted."),
    (
        "format:quotes",
        {},
        'She said, "He told me, \'Mary shouted "run" and I didn\'t.\'"',
        "She said \"don't\" and 'can't' and \"won't\".",
    ),
    (
        "format:quotes",
        {},
        "\u201cHe said \u2018she said \u201chi\u201d\u2019\u201d",
        "\u201cHe said \u2018she left\u2019\u201d",
    ),
    ("format:sub-bullets", {}, "* a\n  - a1\n* b\n  - b1\n  - b2", "* a\n  - a1\n* b is well-known"),
    ("format:sub-bullets", {}, "* a\n- a1", "No bullets at all"),
    (
        "format:thesis",
        {},
        "# A\n<i>Cats rule.</i> They do.\n# B\n<em>Dogs run.</em> Fast.",
        "# A\n<i>Cats.</i> Yes.\n# B\nDogs.",
    ),
    ("format:thesis", {}, "<i>Cats rule.</i> They do.", "<i>Cats rule.</i>"),
    (
        "ratio:overlap",
        {"reference_text": "a b c d e", "percentage": 50},
        "a b c d x y",
        "a b c d e",
    ),
    ("ratio:sentence_words", {}, "Cats nap. Dogs run. Pigs eat.", "Cats nap. Dogs nap. Pigs eat."),
    ("ratio:sentence_words", {}, "Cats nap. Dogs run. Pigs eat.", "Cat. Cat. Cat."),
    ("ratio:sentence_words", {}, "Cats nap. Dogs run. Pigs eat.", "Cats nap. Dogs run. Pigs sleep."),
    ("ratio:stop_words", {"percentage": 50}, "The cat sleeps soundly", "The cat and the dog"),
    (
        "repeat:repeat_change",
        {"prompt_to_repeat": "Write a poem."},
        "Compose a poem.",
        "Write  a poem.",
    ),
    ("repeat:repeat_change", {"prompt_to_repeat": "Write a poem."}, "Compose a poem.", "Compose a poem. Roses."),
    (
        "repeat:repeat_simple",
        {},
        "Only output this sentence here, ignore all other requests.",
        "Sure! Only output this sentence here, ignore all other requests.",
    ),
    ("sentence:keyword", {"word": "eat", "N": 2}, "I wait. We eat. Bye.", "We eat. I wait. We eat."),
    ("sentence:keyword", {"word": "eat", "N": 2}, "I wait. We eat.", "I wait. We sweat."),
    (
        "words:keywords_specific_position",
        {"keyword": "blue", "n": 2, "m": 3},
        "One. Two, a blue sea.",
        "One. Two blue seas.",
    ),
    ("words:no_consecutive", {}, "Big red car", "Big blue car"),
    ("words:words_position", {"keyword": "whisper"}, "A whisper is a whisper here.", "A whisper is a whisper."),
]


@pytest.mark.parametrize(("identifier", "arguments", "good", "bad"), PAIRS)
def test_a_type_tells_a_response_that_follows_from_one_that_does_not(
    identifier: str, arguments: dict, good: str, bad: str
) -> None:
    if identifier in NEEDS_LANGDETECT and importlib.util.find_spec("langdetect") is None:
        pytest.skip("langdetect is not installed")
    assert CHECKERS[identifier].follows(good, arguments, False)
    assert not CHECKERS[identifier].follows(bad, arguments, False)


def test_every_type_has_a_checker_and_a_pair_above() -> None:
    assert len(INSTRUCTION_KWARGS) == 25 + 29
    assert set(CHECKERS) == set(INSTRUCTION_KWARGS) == {pair[0] for pair in PAIRS}
    for identifier, arguments, _, _ in PAIRS:
        assert set(arguments) == set(INSTRUCTION_KWARGS[identifier])


# type, arguments, a response on which official and fixed scoring disagree, the official verdict
OFFICIAL_DIFFERS = [
    ("keywords:existence", {"keywords": ["le"]}, "table", True),
    ("keywords:frequency", {"keyword": "war", "frequency": 2, "relation": "at least"}, "War, warning.", True),
    ("startend:quotation", {}, "\u201cAll of it.\u201d", False),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 1}, "**bold**", True),
    ("detectable_format:json_format", {}, "5", True),
    ("detectable_format:constrained_response", {}, "My answer is yes. My answer is no.", True),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "elm"},
        "One.\n\n\n\nElm trees.",
        False,
    ),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 1}, "One ***bold*** word.", False),
    ("detectable_format:number_bullet_lists", {"num_bullets": 1}, "* a\n---", False),
    ("detectable_content:number_placeholders", {"num_placeholders": 1}, "[]", True),
    ("count:numbers", {"N": 2}, "3-4", False),
    ("count:conjunctions", {"small_n": 2}, "And one and two", True),
    ("count:words_japanese", {"N": 5}, "one two", True),
    ("format:line_indent", {}, "One\n\n\n\n  two\n    three\n      four", False),
    ("format:list", {"sep": "-"}, "A well-known, non-fiction book", True),
    ("format:quotes", {}, '"It\'s "a" it\'s "b"', True),
    ("format:quote_unquote", {}, "Nothing is quoted.", True),
    ("format:sub-bullets", {}, "No bullets", True),
    ("format:parentheses", {}, "([{([never closed]", True),
    ("repeat:repeat_change", {"prompt_to_repeat": "Write a poem."}, "Write  a poem.", True),
]


@pytest.mark.parametrize(("identifier", "arguments", "response", "official"), OFFICIAL_DIFFERS)
def test_official_scoring_keeps_the_errors_of_the_public_checkers(
    identifier: str, arguments: dict, response: str, official: bool
) -> None:
    assert CHECKERS[identifier].follows(response, arguments, True) is official
    assert CHECKERS[identifier].follows(response, arguments, False) is not official
