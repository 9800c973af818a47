"""What a reply may be: a JSON schema, a regular expression or a grammar, imposed on the sampler.

llguidance computes which tokens may come next; its grammars are documented in its docs/syntax.md,
the part of JSON Schema that it knows in docs/json_schema.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colibri_mmap.errors import ArgumentError
from colibri_mmap.runtime.tokenizer import Tokenizer

JSON_OPTIONS = {
    # Bounded: a model that may write any amount of white space sometimes never ends.
    "whitespace_pattern": r"[ \t]{1,20}|\r?\n[ \t]{0,40}",
    "json_allow_general_unicode_escapes": True,  # or "\u00e9" could only become another character
}
_MARKER = re.compile(r"<\|.+\|>")
_LONGEST_REASON = 200  # characters


@dataclass(frozen=True, slots=True)
class Grammar:
    """The texts a reply may be; made, and checked, by one of the class methods."""

    kind: str  # for messages
    definition: str  # llguidance's JSON of one grammar
    lead: str | None = None  # Lark rules: `lead` is what comes before the grammar

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool) -> Grammar:
        """JSON that `schema` describes, with the properties in its order.

        `ArgumentError` names what the schema asks for and cannot be imposed.
        """
        if not isinstance(schema, Mapping | bool):
            raise ArgumentError("a JSON schema must be an object, true or false")
        try:
            definition = json.dumps({"json_schema": _with_options(schema)})
        except (TypeError, ValueError, RecursionError):
            raise ArgumentError("the JSON schema is not JSON, or is nested too deeply") from None
        grammar = cls("JSON schema", definition)
        reason = grammar.problem()
        if reason is not None:
            raise ArgumentError(f"the JSON schema cannot be imposed: {_with_place(reason, schema)}")
        return grammar

    @classmethod
    def json_object(cls) -> Grammar:
        """Any JSON object."""
        return cls.json_schema({"type": "object"})

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """A text that `pattern` matches as a whole."""
        from llguidance import LLMatcher

        (definition,) = json.loads(LLMatcher.grammar_from_regex(pattern))["grammars"]
        return cls("regular expression", json.dumps(definition)).checked()

    @classmethod
    def lark(cls, text: str) -> Grammar:
        """A text of the rule `start`; special tokens it names are checked by the `Matcher`."""
        return cls("grammar", json.dumps({"lark_grammar": text})).checked()

    def matcher(self, tokenizer: Tokenizer) -> Matcher:
        """The state of one reply that follows this grammar."""
        return Matcher(self, tokenizer.grammar_vocabulary)

    def after(self, lead: str) -> Grammar:
        """This grammar behind a lead-in: Lark rules, of which `lead` is the first."""
        return replace(self, lead=lead)

    def checked(self) -> Grammar:
        """The grammar itself; `ArgumentError` says what is wrong with it."""
        reason = self.problem()
        if reason is not None:
            raise ArgumentError(f"the {self.kind} is not usable: {reason}")
        return self

    def problem(self) -> str | None:
        """What is wrong with the grammar, in one line."""
        from llguidance import LLMatcher

        failed, reasons = LLMatcher.validate_grammar_with_warnings(self.compiled())
        return _one_line(reasons[0]) if failed else None

    def compiled(self) -> str:
        """What llguidance reads."""
        body = json.loads(self.definition)
        if self.lead is None:
            return json.dumps({"grammars": [body]})
        whole = {"lark_grammar": f"start: lead @body\n{self.lead}"}
        return json.dumps({"grammars": [whole, {**body, "name": "body"}]})


class GrammarVocabulary:
    """A tokenizer as llguidance knows it; kept by the tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        from llguidance import LLTokenizer

        ids = range(tokenizer.vocab_size)
        self.size = tokenizer.vocab_size
        self.tokens = [
            b"" if tokenizer.is_unused(token) else tokenizer.token_bytes(token) for token in ids
        ]
        self.special_token_ids = [token for token in ids if stands_alone(tokenizer, token)]
        ends = sorted(tokenizer.end_ids)
        if not ends:  # llguidance needs one: a token that no model has
            ends = [self.size]
            self.tokens.append(b"<|end|>")
            self.special_token_ids.append(self.size)
        self.ends = frozenset(ends)
        self.eos_token_id, self.bos_token_id = ends[0], tokenizer.bos_id
        self.is_tokenizer_wrapper = True  # how llguidance recognises one
        self._tokenizer = tokenizer
        self.library = LLTokenizer(
            self,  # type: ignore[arg-type]  # it wants a class of its own, and asks for these names
            n_vocab=len(self.tokens),
            eos_token=ends,
            slices=LLTokenizer.json_slices(),
        )

    def __call__(self, text: str) -> list[int]:
        """How the model would write a text that the grammar leaves no choice about."""
        return self._tokenizer.encode(text, add_special=False, at_start=False)


def stands_alone(tokenizer: Tokenizer, token: int) -> bool:
    """Whether grammars name `token` by its id (`<[id]>`) and never write it as part of a text."""
    return (
        tokenizer.is_control(token)
        or token in tokenizer.end_ids
        or _MARKER.fullmatch(tokenizer.token_text(token)) is not None
    )


class Matcher:
    """Follows one reply through a grammar, token by token; made by `Grammar.matcher`."""

    def __init__(self, grammar: Grammar, vocabulary: GrammarVocabulary) -> None:
        """`ArgumentError` if the grammar names tokens that the vocabulary lacks."""
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(verbose_errors=False)
        self._library = LLMatcher(
            vocabulary.library, grammar.compiled(), log_level=0, limits=limits
        )
        self._size, self._ends = vocabulary.size, vocabulary.ends
        self._kind = grammar.kind
        self._check()

    def mask(self, logits: NDArray[np.float32]) -> None:
        """Set the logits [at least vocab_size] of all tokens that may not come next to -inf.

        When the text is `complete`, end tokens may come next, else they may not.
        """
        bits = np.frombuffer(self._library.compute_bitmask(), np.uint8)
        self._check()
        allowed = np.unpackbits(bits, bitorder="little", count=self._size).view(np.bool_)
        logits[: self._size][~allowed] = -np.inf
        logits[self._size :] = -np.inf

    def accept(self, token: int) -> bool:
        """Go on with `token`; False, and nothing changed, if it may not come next.

        An end token is accepted when the text is `complete`, and changes nothing.
        """
        if token in self._ends:
            return self.complete
        accepted = self._library.try_consume_tokens([token]) == 1
        self._check()
        return accepted

    @property
    def complete(self) -> bool:
        """Whether the text so far may be the whole reply."""
        return self._library.is_accepting()

    @property
    def stopped(self) -> bool:
        """Whether the text is complete and nothing can follow but an end token."""
        return self._library.is_stopped()

    def _check(self) -> None:
        if self._library.is_error():
            reason = _one_line(self._library.get_error())
            raise ArgumentError(f"the {self._kind} is not usable: {reason}")


def _with_options(schema: Mapping[str, Any] | bool) -> dict[str, Any]:
    """The schema with our ways to write JSON."""
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}
    return {**schema, "x-guidance": JSON_OPTIONS}


def _one_line(message: str) -> str:
    """The first line of a message of llguidance, and the reason below it if there is one."""
    first, *others = message.strip().splitlines()
    first = re.sub(r"; following special tokens.*", "", first)
    below = [line.removeprefix("error: ") for line in others if line.startswith("error: ")]
    return ": ".join([first.rstrip(": "), *below[:1]])[:_LONGEST_REASON]


def _with_place(reason: str, schema: Mapping[str, Any] | bool) -> str:
    """The reason, and where in the schema the keyword or value that it speaks of stands."""
    unknown_key = re.match(r'Unimplemented keys: \["([^"]+)"', reason)
    bad_value = re.match(r"(?:Unknown|Invalid) (format|type): (.+)", reason)
    for place, node in _objects(schema, "the schema"):
        if unknown_key and unknown_key[1] in node:
            return f"{place} has {unknown_key[1]!r}, which is not supported"
        if bad_value and node.get(bad_value[1]) == bad_value[2]:
            return f"{place} has the {bad_value[1]} {bad_value[2]!r}, which is not known"
    return reason


def _objects(value: Any, place: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """All JSON objects within `value`, each with its place."""
    if isinstance(value, Mapping):
        yield place, value
        for key, inner in value.items():
            yield from _objects(inner, f"{place}.{key}")
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _objects(inner, f"{place}[{index}]")
