"""Whatever the sampler draws, what comes out follows the grammar."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from colibri_mmap.errors import ArgumentError
from colibri_mmap.format.gguf import open_gguf
from colibri_mmap.runtime.grammar import Grammar
from colibri_mmap.runtime.tokenizer import Tokenizer

MINI = Path(__file__).parents[1] / "data" / "mini"
TOKENIZERS = {
    key: Tokenizer.from_gguf(open_gguf(next((MINI / key).glob("*.gguf"))))
    for key in ("qwen3moe", "mixtral", "gpt-oss", "kimi-linear")
}
SCHEMAS: dict[str, dict[str, Any]] = {
    "flat": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 1, "maxLength": 12},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "weight": {"type": "number"},
            "member": {"type": "boolean"},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    "choices": {"enum": ["red", "grün", 'a "quote"', 7, None, [1, 2]]},
    "nested": {
        "type": "object",
        "properties": {
            "points": {
                "type": "array",
                "minItems": 2,
                "maxItems": 3,
                "items": {
                    "type": "object",
                    "properties": {"x": {"type": "number"}, "kind": {"const": "point"}},
                    "required": ["x", "kind"],
                    "additionalProperties": False,
                },
            }
        },
        "required": ["points"],
        "additionalProperties": False,
    },
    "references": {
        "$ref": "#/$defs/tree",
        "$defs": {
            "tree": {
                "type": "object",
                "properties": {
                    "value": {"type": "integer"},
                    "children": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 1},
                },
                "required": ["value"],
                "additionalProperties": False,
            }
        },
    },
    "alternatives": {
        "anyOf": [
            {"type": "string", "pattern": "^[a-c]{2,5}$"},
            {"type": "string", "format": "date"},
            {"type": "null"},
        ]
    },
}


def draw(grammar: Grammar, tokenizer: Tokenizer, seed: int, limit: int = 700) -> tuple[str, bool]:
    """A text of random tokens under the grammar, and whether it is complete."""
    random = np.random.default_rng(seed)
    matcher = grammar.matcher(tokenizer)
    closing = [token for text in '"}]' for token in tokenizer.encode(text, add_special=False)]
    ids: list[int] = []
    while not matcher.stopped and len(ids) < limit:
        logits = random.standard_normal(tokenizer.vocab_size + 3).astype(np.float32)
        logits[closing] += len(ids) / 60  # so that it ends
        matcher.mask(logits)
        assert np.isneginf(logits[tokenizer.vocab_size :]).all()
        token = int(logits.argmax())
        assert np.isfinite(logits[token])
        assert matcher.accept(token)
        if token in tokenizer.end_ids:
            break
        ids.append(token)
    # What it followed is what a reader of the reply sees.
    return tokenizer.decode(ids, skip_special=True, at_start=False), matcher.complete


@pytest.mark.parametrize("key", TOKENIZERS)
@pytest.mark.parametrize("name", SCHEMAS)
def test_random_tokens_make_valid_json(name: str, key: str) -> None:
    grammar = Grammar.json_schema(SCHEMAS[name])
    for seed in range(6):
        text, complete = draw(grammar, TOKENIZERS[key], seed)
        assert complete, text
        jsonschema.validate(json.loads(text), SCHEMAS[name])


@pytest.mark.parametrize("key", TOKENIZERS)
def test_any_json_object(key: str) -> None:
    for seed in range(4):
        text, complete = draw(Grammar.json_object(), TOKENIZERS[key], seed)
        assert complete, text
        assert isinstance(json.loads(text), dict)


@pytest.mark.parametrize("key", TOKENIZERS)
def test_regular_expressions_and_lark(key: str) -> None:
    for seed in range(4):
        text, complete = draw(Grammar.regex(r"[a-e]{3,6}(é|/[0-9]+)"), TOKENIZERS[key], seed)
        assert complete
        assert re.fullmatch(r"[a-e]{3,6}(é|/[0-9]+)", text)
        text, _ = draw(
            Grammar.lark('start: "<" inner ">"\ninner: /[xy]/ | "ab"'), TOKENIZERS[key], 0
        )
        assert text in ("<x>", "<y>", "<ab>")


@pytest.mark.parametrize("key", TOKENIZERS)
def test_what_the_grammar_describes_is_accepted_token_by_token(key: str) -> None:
    tokenizer = TOKENIZERS[key]
    value = {"age": 7, "name": 'Zoë "Z" \\ 你好 🙂', "weight": -1.5e3, "member": None}
    schema = {"type": "object", "properties": {"age": {"type": "integer"}}}
    for indent in (None, 2, 4):
        for ascii_only in (False, True):
            text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
            matcher = Grammar.json_schema(schema).matcher(tokenizer)
            for token in tokenizer.encode(text, add_special=False, at_start=False):
                assert not matcher.complete
                logits = np.zeros(tokenizer.vocab_size, np.float32)
                matcher.mask(logits)
                assert logits[token] == 0
                assert np.isneginf(logits[sorted(tokenizer.end_ids)]).all()
                assert matcher.accept(token)
            assert matcher.complete


def test_the_end_may_come_only_at_the_end() -> None:
    tokenizer = TOKENIZERS["qwen3moe"]
    ends = sorted(tokenizer.end_ids)
    matcher = Grammar.regex("ab*").matcher(tokenizer)
    a, b = (tokenizer.encode(text, add_special=False)[0] for text in "ab")
    logits = np.zeros(tokenizer.vocab_size, np.float32)
    matcher.mask(logits)
    assert np.flatnonzero(np.isfinite(logits)).tolist() == [a]
    assert not matcher.accept(ends[0])
    assert not matcher.accept(b)
    assert matcher.accept(a)  # what was refused has changed nothing
    assert matcher.complete
    assert not matcher.stopped
    logits[:] = 0
    matcher.mask(logits)
    assert np.flatnonzero(np.isfinite(logits)).tolist() == sorted([b, *ends])
    assert matcher.accept(ends[-1])


def test_a_grammar_that_allows_nothing_more_has_stopped() -> None:
    tokenizer = TOKENIZERS["mixtral"]
    matcher = Grammar.regex("yes").matcher(tokenizer)
    for token in tokenizer.encode("yes", add_special=False, at_start=False):
        assert not matcher.stopped
        assert matcher.accept(token)
    assert matcher.stopped
    assert matcher.complete


def test_behind_a_lead_in() -> None:
    """Reasoning is free, the rest is not."""
    tokenizer = TOKENIZERS["qwen3moe"]
    grammar = Grammar.json_schema(SCHEMAS["flat"])
    grammar = grammar.after('lead: thought /\\n{0,2}/\nthought[suffix="</think>"]: /(?s:.*)/')
    for reply, holds in (
        ('so {"x": </think>\n\n{"name": "a", "age": 1}', True),
        ('</think>{"name": "a", "age": 1}', True),
        ('so</think>\n\n{"name": 1}', False),
        ('{"name": "a", "age": 1}', False),
    ):
        matcher = grammar.matcher(tokenizer)
        ids = tokenizer.encode(reply, add_special=False)
        assert (all(map(matcher.accept, ids)) and matcher.complete) == holds, reply


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        (
            {"properties": {"tags": {"type": "array", "uniqueItems": True}}},
            "the schema.properties.tags has 'uniqueItems', which is not supported",
        ),
        ({"type": "object", "if": {}}, "the schema has 'if', which is not supported"),
        (
            {"properties": {"a": {"anyOf": [{"type": "string", "format": "colour"}]}}},
            r"the schema.properties.a.anyOf\[0\] has the format 'colour', which is not known",
        ),
        ({"type": "text"}, "the schema has the type 'text', which is not known"),
        ({"$ref": "#/$defs/missing"}, "'/\\$defs/missing' does not exist"),
        ({"type": "string", "pattern": "(?=a)"}, "look-ahead"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "minLength"),
        (False, "Unsatisfiable"),
        ({"enum": {1, 2}}, "is not JSON"),
        ("text", "must be an object, true or false"),
    ],
)
def test_schemas_that_cannot_be_imposed(schema: Any, reason: str) -> None:
    with pytest.raises(ArgumentError, match=reason) as caught:
        Grammar.json_schema(schema)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 260


def test_a_schema_nested_without_end_is_refused() -> None:
    for depth in (300, 100_000):
        schema: dict[str, Any] = {}
        for _ in range(depth):
            schema = {"items": schema}
        with pytest.raises(ArgumentError):
            Grammar.json_schema(schema)


def test_malformed_grammars() -> None:
    for make, text, reason in (
        (Grammar.regex, "a(b", "unclosed group"),
        (Grammar.lark, "start: missing", 'unknown name: "missing"'),
        (Grammar.lark, 'start "a"', "Expected token ':'"),
    ):
        with pytest.raises(ArgumentError, match=re.escape(reason)) as caught:
            make(text)
        assert "\n" not in str(caught.value)
    grammar = Grammar.lark('start: <|missing|> "a"')  # known once there is a vocabulary
    with pytest.raises(ArgumentError, match=r"unknown special token.*<\|missing\|>") as caught:
        grammar.matcher(TOKENIZERS["qwen3moe"])
    assert "\n" not in str(caught.value)


def test_true_allows_any_json() -> None:
    tokenizer = TOKENIZERS["mixtral"]
    matcher = Grammar.json_schema(True).matcher(tokenizer)
    ids = tokenizer.encode('[1, {"a": null}]', add_special=False, at_start=False)
    assert all(map(matcher.accept, ids))
    assert matcher.complete
