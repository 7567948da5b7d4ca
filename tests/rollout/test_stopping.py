from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rollout.conftest import ByteTokenizer
from vibethinker_jax.rollout.stopping import StopMatch, StopStrings

decode = ByteTokenizer().decode
encode = ByteTokenizer().encode
C3, A9, THE, ABC, SPECIAL = 95, 96, 97, 98, 99


def first_match(tokens, stops):
    """The definition, by trying every prefix."""
    for length in range(len(tokens) + 1):
        text = decode(tokens[:length])
        hits = sorted((text.find(stop), stop) for stop in stops if stop in text)
        if hits:
            return StopMatch(length, text[: hits[0][0]], hits[0][1])
    return None


def search(tokens, stops, sizes):
    """Shows tokens a few at a time; stops at a match."""
    finder, shown, sizes = StopStrings(stops, decode), 0, iter(sizes)
    while shown < len(tokens):
        new = min(next(sizes, 1), len(tokens) - shown)
        shown += new
        if match := finder.find(tokens[:shown], new):
            return match
    return None


def test_a_match_may_span_tokens_and_end_inside_one():
    assert search([*encode("xx"), THE], ["xth"], [3]) == StopMatch(3, "x", "xth")
    assert search([*encode("say "), ABC, ABC], ["ca"], [2, 2, 2]) == StopMatch(6, "say ab", "ca")


def test_a_character_of_two_tokens_matches_when_it_is_complete():
    tokens = [*encode("caf"), C3, A9, *encode("!")]
    for sizes in ([1] * 6, [4, 2], [5, 1], [6]):
        assert search(tokens, ["fé"], sizes) == StopMatch(5, "ca", "fé")


def test_special_tokens_inside_a_match_do_not_hide_it():
    tokens = [*encode("one EN"), *[SPECIAL] * 40, *encode("D two")]
    assert search(tokens, ["END"], [1] * 60) == StopMatch(47, "one ", "END")


def test_the_earliest_of_several_strings_wins():
    assert search(encode("a.b\\c"), ["\\", "."], [5]) == StopMatch(2, "a", ".")
    assert search([ABC], ["c", "bc"], [1]) == StopMatch(1, "a", "bc")


@settings(max_examples=300, deadline=None)
@given(
    tokens=st.lists(st.sampled_from([*encode("abct "), C3, A9, THE, ABC, SPECIAL]), max_size=25),
    stops=st.lists(st.sampled_from(["a", "ca", "abc", "the t", "é", "éa", "bcab", "c\u00e9"]), min_size=1, max_size=3),
    sizes=st.lists(st.integers(1, 9), max_size=25),
)
def test_the_match_does_not_depend_on_how_many_tokens_are_shown_at_a_time(tokens, stops, sizes):
    assert search(tokens, stops, sizes) == first_match(tokens, stops)
