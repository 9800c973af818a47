"""A reply taken apart while it is being written."""

from __future__ import annotations

from collections.abc import Sequence

from colibri_mmap.runtime.replies.calls import Calls, Tool
from colibri_mmap.runtime.replies.dialects import Dialect, Thinking
from colibri_mmap.runtime.replies.harmony import parse_harmony
from colibri_mmap.runtime.replies.pieces import Content, Piece, Reasoning, joined
from colibri_mmap.runtime.replies.reader import Markers, Parsing, Reader


class ReplyParser:
    """Text of one reply goes in, pieces come out as soon as they are certain.

    White space next to markup belongs to it; all other text comes out, once. What begins like a
    call and is none comes out as text. `shown`: control tokens whose text must reach the parser.
    """

    def __init__(
        self,
        *,
        thinking: Thinking | None,
        thinks_already: bool,
        dialects: Sequence[Dialect],
        harmony_prompt: str | None,
        tools: Sequence[Tool],
        shown: frozenset[int],
    ) -> None:
        """Made by `ReplyFormat.parser`."""
        self.shown = shown
        self._thinking = thinking
        self._thinks_already = thinks_already
        dialects = dialects if tools else ()
        self._openings = tuple(dict.fromkeys(text for d in dialects for text in d.openings))
        self._dialects = dialects
        self._calls = Calls(tools)
        self._reader = Reader()
        if harmony_prompt is None:
            self._parsing = self._reply()
        else:
            self._parsing = parse_harmony(self._reader, self._calls, harmony_prompt)

    @property
    def calls(self) -> int:
        """How many tool calls have begun so far: with one, the reply's end is a call for tools."""
        return self._calls.count

    def push(self, text: str) -> list[Piece]:
        """The pieces that are certain now that `text` has come."""
        self._reader.text += text
        return self._pieces()

    def finish(self) -> list[Piece]:
        """The rest, once no more text will come."""
        self._reader.ended = True
        return self._pieces()

    def _pieces(self) -> list[Piece]:
        pieces = []
        for piece in self._parsing:
            if piece is None:
                break
            pieces.append(piece)
        return joined(pieces)

    def _reply(self) -> Parsing[None]:
        """Reasoning if there is any, then content and calls."""
        thinking = self._thinking
        thought = False
        if thinking is not None:
            thought = self._thinks_already or (yield from self._reader.skip(thinking.opening))
            if thought:
                yield from self._reasoning(thinking)
        yield from self._content(after_markup=thought)

    def _reasoning(self, thinking: Thinking) -> Parsing[None]:
        """Up to its end, or to a call that shows that the end was forgotten."""
        yield from self._reader.skip_space()
        markers = Markers((thinking.closing, *self._openings))
        while (space := (yield from self._reader.until(markers, Reasoning))) is not None:
            if (yield from self._reader.skip(thinking.closing)):
                return
            if (yield from self._call(known=True)):
                return
            yield Reasoning(space + self._reader.take(len(self._opening())))

    def _content(self, after_markup: bool) -> Parsing[None]:
        """Text for the reader and calls, to the end."""
        for dialect in self._dialects:
            if dialect.bare and (
                yield from dialect.parse(self._reader, "", self._calls, known=True)
            ):
                after_markup = True
        markers = Markers(self._openings)
        while True:
            if after_markup:
                yield from self._reader.skip_space()
            space = yield from self._reader.until(markers, Content)
            if space is None:
                return
            after_markup = yield from self._call(known=False)
            if not after_markup:
                yield Content(space + self._reader.take(len(self._opening())))

    def _opening(self) -> str:
        """The opening of calls that comes next."""
        return next(text for text in self._openings if self._reader.text.startswith(text))

    def _call(self, known: bool) -> Parsing[bool]:
        """The calls that come next; False, and nothing taken, if it only looks like some."""
        opening = self._opening()
        for dialect in self._dialects:
            if opening in dialect.openings and (
                yield from dialect.parse(self._reader, opening, self._calls, known)
            ):
                return True
        return False
