"""What was said keeps the ids it was generated with."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from colibri_mmap.runtime.transcripts import Transcripts

TEXTS = st.text("ab", max_size=6)


def test_the_longest_beginning_counts() -> None:
    known = Transcripts()
    for number, text in enumerate(["one", "one two", "one two three", "two"]):
        known.keep(text, [number])
    assert known.longest("one two thr") == ("one two", [1])
    assert known.longest("one two three, four") == ("one two three", [2])
    assert known.longest("no") == ("", [])
    known.keep("one two", [7, 8])
    assert known.longest("one two") == ("one two", [7, 8])


@given(
    st.lists(st.tuples(st.booleans(), TEXTS.filter(bool)), max_size=40),
    st.integers(1, 30),
)
def test_what_was_not_used_for_long_is_forgotten(steps: list[tuple[bool, str]], most: int) -> None:
    """Against a list of texts, the latest last."""
    known, expected = Transcripts(most), dict[str, list[int]]()
    for number, (keep, text) in enumerate(steps):
        if keep:
            expected.pop(text, None)
            expected[text] = [number]
            known.keep(text, [number])
            while sum(map(len, expected)) > most:
                del expected[next(iter(expected))]
        else:
            found = max(filter(text.startswith, expected), key=len, default="")
            assert known.longest(text) == (found, expected.get(found, []))
            if found:
                expected[found] = expected.pop(found)
