"""Tokenizers against ids from Hugging Face tokenizers, sentencepiece and llama.cpp."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers

from colibri_mmap.errors import ArgumentError, FormatError
from colibri_mmap.format.gguf import open_gguf
from colibri_mmap.runtime.bytelevel import BYTE_OF
from colibri_mmap.runtime.pretokenizers import PRETOKENIZERS
from colibri_mmap.runtime.tokenizer import Tokenizer

DATA = Path(__file__).parents[1] / "data"
CASES = json.loads((DATA / "mini" / "tok_cases.json").read_text())
COMMITTED = [name for name, family in CASES.items() if (DATA / "mini" / family["gguf"]).exists()]
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

Case = dict[str, Any]


def load(path: Path) -> Tokenizer:
    return Tokenizer.from_gguf(open_gguf(path))


def check_case(tokenizer: Tokenizer, case: Case, plain: str, with_ends: str) -> None:
    """`plain` and `with_ends` name the columns without parsed specials and with BOS."""
    text, ids = case["text"], case["ids"]
    assert tokenizer.encode(text, add_special=False, parse_special=True) == ids
    if "llamacpp" in case and case["llamacpp"] != ids:
        return  # here llama.cpp departs from the published tokenizer, which holds
    assert tokenizer.encode(text, add_special=False) == case[plain]
    expected = case[with_ends]
    if expected[:2] == [tokenizer.bos_id] * 2:
        expected = expected[1:]  # llama.cpp doubles a BOS that the text spells out
    assert tokenizer.encode(text, parse_special=True) == expected


@pytest.mark.parametrize("family", COMMITTED)
def test_ids_of_small_models(family: str) -> None:
    tokenizer = load(DATA / "mini" / CASES[family]["gguf"])
    assert tokenizer.notices == []
    for case in CASES[family]["cases"]:
        check_case(tokenizer, case, "ids_no_special", "ids_add_special")


@pytest.mark.fixtures
def test_ids_of_all_families(shared_fixtures: Path) -> None:
    families = json.loads((shared_fixtures / "mini" / "tok_cases.json").read_text())
    for family in families.values():
        tokenizer = load(shared_fixtures / "mini" / family["gguf"])
        for case in family["cases"]:
            check_case(tokenizer, case, "ids_no_special", "ids_add_special")
    folders = [path.parent for path in shared_fixtures.glob("*/tok_cases.json")]
    folders.remove(shared_fixtures / "mini")
    assert len(folders) >= 20
    for folder in folders:
        tokenizer = load(min(folder.glob("*.gguf")))
        for case in json.loads((folder / "tok_cases.json").read_text()):
            check_case(tokenizer, case, "llamacpp_no_special", "llamacpp_add_special")


@pytest.fixture(
    scope="module", params=["llama-dense/llama-dense.F16.gguf", "mixtral/mixtral.F16.gguf"]
)
def model(request: pytest.FixtureRequest) -> Tokenizer:
    """One tokenizer of each kind."""
    return load(DATA / "mini" / request.param)


@given(text=st.text())
def test_decode_undoes_encode(model: Tokenizer, text: str) -> None:
    text = text.replace("\u2581", " ")  # SentencePiece cannot tell the two apart
    assert model.decode(model.encode(text), skip_special=True) == text


@given(data=st.data(), skip=st.booleans(), at_start=st.booleans())
def test_stream_equals_decode(
    model: Tokenizer, data: st.DataObject, skip: bool, at_start: bool
) -> None:
    ids = data.draw(st.lists(st.integers(0, model.vocab_size - 1)))
    stream = model.stream(skip, at_start=at_start)
    pieces = [stream.push(token) for token in ids]
    whole = model.decode(ids, skip, at_start=at_start)
    assert "".join(pieces) + stream.flush() == whole
    assert stream.flush() == ""


def test_a_character_comes_with_its_last_byte(model: Tokenizer) -> None:
    stream = model.stream()
    *first, last = model.encode("a\U0001f999", add_special=False)
    assert len(first) >= 3
    assert "".join([stream.push(token) for token in first]) == "a"
    assert stream.pending
    assert stream.push(last) == "\U0001f999"
    assert not stream.pending


def test_an_unfinished_character_is_flushed_as_a_replacement(model: Tokenizer) -> None:
    stream = model.stream()
    *first, _ = model.encode("a\U0001f999", add_special=False)
    assert "".join([stream.push(token) for token in first]) == "a"
    assert stream.flush() == "\ufffd"


def test_continuation_keeps_its_leading_space() -> None:
    tokenizer = load(DATA / "mini" / "mixtral/mixtral.F16.gguf")
    ids = tokenizer.encode("the", add_special=False)
    assert tokenizer.decode(ids) == "the"
    assert tokenizer.decode(ids, at_start=False) == " the"
    assert tokenizer.encode(" the", add_special=False, at_start=False) == ids


def test_bos_is_not_doubled(model: Tokenizer) -> None:
    assert model.bos_id is not None
    bos = model.token_text(model.bos_id)
    ids = model.encode(bos + "a", parse_special=True)
    assert ids == model.encode("a")
    assert ids.count(model.bos_id) == 1


def test_control_tokens_in_plain_text_stay_text(model: Tokenizer) -> None:
    assert model.bos_id is not None
    bos = model.token_text(model.bos_id)
    assert not any(model.is_control(i) for i in model.encode(bos, add_special=False))
    ids = model.encode(bos, add_special=False, parse_special=True)
    assert ids == [model.bos_id]
    assert model.decode(ids) == bos
    assert model.decode(ids, skip_special=True) == ""


def test_lone_surrogates_are_replaced(model: Tokenizer) -> None:
    assert model.encode("a\ud800b") == model.encode("a?b")


def test_ids_outside_the_vocabulary_are_refused(model: Tokenizer) -> None:
    for token in (-1, model.vocab_size):
        with pytest.raises(ArgumentError, match=f"{token} is not a token id"):
            model.decode([token])
        with pytest.raises(ArgumentError, match="is not a token id"):
            model.token_text(token)


@pytest.mark.parametrize(
    ("file", "error", "reason"),
    [
        ("tok_types_short", FormatError, "token_type.*has 3 entries for 24 tokens"),
        ("tok_scores_short", FormatError, "scores.*has 3 entries for 24 tokens"),
        ("tok_model_unknown", FormatError, "'nosuch'; supported are 'gpt2' .* and 'llama'"),
        ("tok_duplicate", FormatError, "tokens.*'a' is both token 0 and token 1"),
        ("tok_merges_bad", FormatError, "merges.*'ab' does not join two tokens"),
        ("tok_non_utf8", FormatError, "tokens.*element 23.*not valid UTF-8"),
    ],
)
def test_broken_vocabularies_are_refused(file: str, error: type, reason: str) -> None:
    with pytest.raises(error, match=reason):
        load(DATA / "hostile" / f"{file}.gguf")


def test_an_empty_token_is_harmless() -> None:
    tokenizer = load(DATA / "hostile" / "tok_empty_token.gguf")
    assert tokenizer.decode(range(tokenizer.vocab_size)) != ""


Write = Callable[..., Tokenizer]


@pytest.fixture
def bytelevel(tmp_path: Path) -> Write:
    """Writes a byte-level vocabulary: the 256 bytes, then merged and special tokens."""

    def write(
        merges: tuple[str, ...] = ("a b",),
        specials: tuple[tuple[str, int], ...] = (),
        pre: str | None = "gpt-2",
        retyped: dict[str, int] | None = None,
        **keys: Any,
    ) -> Tokenizer:
        texts = [*BYTE_OF, *(merge.replace(" ", "") for merge in merges)]
        types = [(retyped or {}).get(text, NORMAL) for text in texts]
        writer = GGUFWriter(tmp_path / "model.gguf", "llama")
        writer.add_tokenizer_model("gpt2")
        if pre is not None:
            writer.add_tokenizer_pre(pre)
        writer.add_token_list([*texts, *(text for text, _ in specials)])
        writer.add_token_types(types + [kind for _, kind in specials])
        writer.add_token_merges(list(merges))
        return finish(writer, tmp_path, keys)

    return write


@pytest.fixture
def spm(tmp_path: Path) -> Write:
    """Writes a SentencePiece vocabulary of (text, score, type) triples."""

    def write(pieces: list[tuple[str, float, int]], **keys: Any) -> Tokenizer:
        writer = GGUFWriter(tmp_path / "model.gguf", "llama")
        writer.add_tokenizer_model("llama")
        writer.add_token_list([text for text, _, _ in pieces])
        writer.add_token_scores([score for _, score, _ in pieces])
        writer.add_token_types([kind for _, _, kind in pieces])
        return finish(writer, tmp_path, keys)

    return write


def finish(writer: GGUFWriter, folder: Path, keys: dict[str, Any]) -> Tokenizer:
    """Write the file with further `tokenizer.ggml.*` keys and load its tokenizer."""
    adders = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string}
    for name, value in keys.items():
        adders.get(type(value), writer.add_array)(f"tokenizer.ggml.{name}", value)
    writer.add_tensor("token_embd.weight", np.zeros(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return load(folder / "model.gguf")


@pytest.mark.parametrize(("pre", "said"), [(None, "is missing"), ("newest", "'newest' is unknown")])
def test_a_missing_or_unknown_pre_is_noticed(bytelevel: Write, pre: str | None, said: str) -> None:
    tokenizer = bytelevel(("a b", "b c", "1 2"), pre=pre)
    assert len(tokenizer.notices) == 1
    assert said in tokenizer.notices[0]
    assert [tokenizer.token_text(i) for i in tokenizer.encode("abc 12")][:2] == ["ab", "c"]


def test_special_tokens_match_longest_first(bytelevel: Write) -> None:
    tokenizer = bytelevel(
        ("a b",),
        (("<x>", CONTROL), ("<x><y>", CONTROL), ("  ", USER_DEFINED), ("   ", USER_DEFINED)),
    )

    def texts(text: str, **flags: bool) -> list[str]:
        return [tokenizer.token_text(i) for i in tokenizer.encode(text, **flags)]

    assert texts("<x><y><x>", parse_special=True) == ["<x><y>", "<x>"]
    assert texts("<x>") == ["<", "x", ">"]
    assert texts("a     b") == ["a", "   ", "  ", "b"]
    assert tokenizer.find("<x>") == tokenizer.vocab_size - 4


def test_ignore_merges_takes_whole_words_but_never_control_tokens(bytelevel: Write) -> None:
    specials = (("word", NORMAL), ("stop", CONTROL))
    whole = bytelevel(specials=specials, pre="llama-bpe", add_bos_token=False)
    assert [whole.token_text(i) for i in whole.encode("word")] == ["word"]
    assert [whole.token_text(i) for i in whole.encode("stop")] == list("stop")
    merged = bytelevel(specials=specials, pre="qwen2")
    assert [merged.token_text(i) for i in merged.encode("word")] == list("word")


def test_begin_and_end_tokens_follow_the_keys(bytelevel: Write) -> None:
    specials = (("<s>", CONTROL), ("</s>", CONTROL))
    ids = {"bos_token_id": 257, "eos_token_id": 258}
    merges = ("a b",)
    assert bytelevel(merges, specials, **ids).encode("ab") == [256]
    assert bytelevel(merges, specials, pre="llama3", **ids).encode("ab") == [257, 256]
    both = bytelevel(merges, specials, add_bos_token=True, add_eos_token=True, **ids)
    assert both.encode("ab") == [257, 256, 258]
    assert both.encode("<s>ab</s>", parse_special=True) == [257, 256, 258]
    assert both.encode("ab", add_special=False) == [256]
    without = bytelevel(merges, specials, add_bos_token=True)
    assert without.bos_id is None
    assert without.encode("ab") == [256]
    assert "names no such token" in without.notices[0]


def test_end_ids_come_from_keys_and_names(bytelevel: Write) -> None:
    specials = (("<e>", CONTROL), ("<|im_end|>", CONTROL), ("<|end|>", CONTROL), ("<t>", CONTROL))
    tokenizer = bytelevel(specials=specials, eos_token_id=257, eot_token_id=260)
    assert tokenizer.end_ids == {257, 258, 259, 260}
    plain = bytelevel(specials=(("<e>", CONTROL), ("<|im_end|>", NORMAL)), eos_token_id=257)
    assert plain.end_ids == {257}


def test_harmony_structure_is_visible_and_ends_no_turn(bytelevel: Write) -> None:
    names = ("<|return|>", "<|call|>", "<|end|>", "<|channel|>")
    tokenizer = bytelevel(specials=tuple((name, CONTROL) for name in names))
    assert tokenizer.end_ids == {257, 258}
    assert tokenizer.decode([257, 259, 260], skip_special=True) == "<|end|><|channel|>"


@pytest.mark.parametrize(
    "key", ["bos_token_id", "eos_token_id", "eot_token_id", "unknown_token_id"]
)
def test_special_ids_outside_the_vocabulary_are_refused(bytelevel: Write, key: str) -> None:
    with pytest.raises(FormatError, match=f"tokenizer.ggml.{key}.*at most 256, is 999"):
        bytelevel(("a b",), **{key: 999})


def test_a_merge_may_form_a_control_token(bytelevel: Write) -> None:
    """The file wants it so; the token counts as control all the same."""
    tokenizer = bytelevel(("a b", "ab c"), retyped={"abc": CONTROL})
    assert tokenizer.encode("abc") == [257]
    assert tokenizer.decode([257], skip_special=True) == ""


def test_text_outside_the_byte_alphabet_stands_for_itself(bytelevel: Write) -> None:
    tokenizer = bytelevel(specials=(("\u4f60\u597d", NORMAL),))
    assert tokenizer.decode([257]) == "\u4f60\u597d"


def test_missing_bytes_are_noticed(bytelevel: Write) -> None:
    """Not those that no text has, such as NUL, which stands as U+0100 in the vocabulary."""
    tokenizer = bytelevel(retyped={"\u0100": CONTROL, "x": CONTROL, "\u010a": CONTROL})
    assert tokenizer.notices == [
        "the vocabulary lacks 2 of 256 bytes; text with them is lost",
    ]


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"model": "llama"}, "tokens'.*is missing"),
        ({"model": "llama", "tokens": "a"}, "tokens'.*array with at least one string"),
        ({"model": "llama", "tokens": [1, 2]}, "tokens'.*array with at least one string"),
        ({"model": "llama", "tokens": ["a"]}, "scores'.*is missing"),
        ({"model": "llama", "tokens": ["a"], "scores": "b"}, "scores'.*array of numbers"),
        ({"model": "llama", "tokens": ["a"], "scores": ["b"]}, "scores'.*expected numbers"),
        ({"model": "llama", "tokens": ["a"], "scores": [math.nan]}, "scores'.*NaN"),
        ({"model": "gpt2", "tokens": ["a"]}, "merges'.*is missing"),
        ({"model": "gpt2", "tokens": ["a"], "merges": ["ab"]}, "merges'.*does not join"),
        ({"model": "gpt2", "tokens": ["a"], "pre": 7}, "pre'.*must be a string"),
    ],
)
def test_incomplete_or_wrong_keys_are_named(
    tmp_path: Path, keys: dict[str, Any], reason: str
) -> None:
    writer = GGUFWriter(tmp_path / "model.gguf", "llama")
    with pytest.raises(FormatError, match="tokenizer.ggml." + reason):
        finish(writer, tmp_path, keys)


def test_a_model_without_tokenizer_is_refused(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "model.gguf", "llama")
    with pytest.raises(FormatError, match=r"tokenizer.ggml.model.*names none; supported are"):
        finish(writer, tmp_path, {})


def test_tokens_without_types_are_normal(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "model.gguf", "llama")
    keys = {"model": "gpt2", "pre": "gpt-2", "tokens": [*BYTE_OF, "ab"], "merges": ["a b"]}
    tokenizer = finish(writer, tmp_path, keys)
    assert tokenizer.encode("ab") == [256]
    assert not any(tokenizer.is_control(i) for i in range(257))


def test_more_words_than_are_remembered(spm: Write) -> None:
    tokenizer = spm([*LETTERS, ("ab", -1.0, NORMAL)])
    words = ["".join(letters) for letters in product("abc", repeat=9)]
    for part in (words, words[:10]):
        texts = [tokenizer.token_text(i) for i in tokenizer.encode(" ".join(part), False)]
        assert "".join(texts) == "\u2581" + "\u2581".join(part)


def piece_texts(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.token_text(i) for i in tokenizer.encode(text, add_special=False)]


LETTERS = [("<unk>", 0.0, UNKNOWN), *((c, -9.0, NORMAL) for c in "abc\u2581")]


def test_unused_pieces_split_again(spm: Write) -> None:
    tokenizer = spm([*LETTERS, ("ab", -1.0, UNUSED), ("abc", -2.0, UNUSED)], add_space_prefix=False)
    assert piece_texts(tokenizer, "abc") == ["a", "b", "c"]


def test_unknown_characters_become_the_unknown_token(spm: Write) -> None:
    tokenizer = spm(LETTERS, add_space_prefix=False)
    assert piece_texts(tokenizer, "a?b") == ["a", "<unk>", "b"]


def test_a_vocabulary_without_bytes_and_unknown_is_refused(spm: Write) -> None:
    with pytest.raises(FormatError, match="neither all byte pieces nor an unknown token"):
        spm(LETTERS[1:])


def merge_slowly(text: str, scores: dict[str, float]) -> list[str]:
    """The definition: again and again, join the best pair, of equals the leftmost."""
    pieces = list(text)
    while True:
        pairs = [
            (-scores[a + b], i) for i, (a, b) in enumerate(pairwise(pieces)) if a + b in scores
        ]
        if not pairs:
            return pieces
        at = min(pairs)[1]
        pieces[at : at + 2] = ["".join(pieces[at : at + 2])]


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_merging_follows_the_definition(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    words = data.draw(st.lists(st.text("abc\u2581", min_size=2, max_size=5), unique=True))
    grades = st.integers(-6, 0)
    pieces = [*LETTERS, *((word, float(data.draw(grades)), NORMAL) for word in words)]
    folder = tmp_path_factory.mktemp("spm")
    writer = GGUFWriter(folder / "model.gguf", "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list([text for text, _, _ in pieces])
    writer.add_token_scores([score for _, score, _ in pieces])
    writer.add_token_types([kind for _, _, kind in pieces])
    tokenizer = finish(writer, folder, {"add_space_prefix": False})
    scores = {text: score for text, score, kind in pieces if kind == NORMAL}
    for text in data.draw(st.lists(st.text("abc ", max_size=20), min_size=1, max_size=10)):
        assert piece_texts(tokenizer, text) == merge_slowly(text.replace(" ", "\u2581"), scores)


@settings(max_examples=30, deadline=None)
@given(text=st.text(st.characters(codec="utf-8")))
@pytest.mark.parametrize("name", PRETOKENIZERS)
def test_pretokenizers_lose_nothing(name: str, text: str) -> None:
    pieces = [text]
    for pattern in PRETOKENIZERS[name].patterns:
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        pieces = [word for piece in pieces for word, _ in split.pre_tokenize_str(piece)]
    assert "".join(pieces) == text


def words(name: str, text: str) -> list[str]:
    cuts = [pre_tokenizers.Split(Regex(p), "isolated") for p in PRETOKENIZERS[name].patterns]
    return [word for word, _ in pre_tokenizers.Sequence(cuts).pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("gpt-2", "it's 1234  x", ["it", "'s", " 1234", " ", " x"]),
        ("llama-bpe", "it'S 1234\n\n x", ["it", "'S", " ", "123", "4", "\n\n", " x"]),
        ("qwen2", "a12", ["a", "1", "2"]),
        ("smollm", "a 12", ["a", " ", "1", "2"]),
        ("gpt-4o", "oneTwo THREEFour's", ["one", "Two", " THREEFour's"]),
        ("tekken", "oneTwo it's", ["one", "Two", " it", "'s"]),
        ("deepseek-v3", "1234 #define x", ["123", "4", " #", "define", " x"]),
        ("deepseek-llm", "ab\ncd", ["ab", "\n", "cd"]),
        ("kimi-k2", "call\u4f60\u597dNow", ["call", "\u4f60\u597d", "Now"]),
        ("afmoe", "1234567 89", ["1", "234", "567", " ", "89"]),
        ("seed-coder", "a;\n", ["a", ";", "\n"]),
        ("laguna", "a \n b", ["a", " ", "\n", " b"]),
        ("viking", "a12 b", ["a", "1", "2", " b"]),
    ],
)
def test_words_of_a_family(name: str, text: str, expected: list[str]) -> None:
    assert words(name, text) == expected
