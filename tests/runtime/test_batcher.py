"""Several requests served by one engine: replies, turns, ends, failures."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from math import inf
from pathlib import Path

import numpy as np
import pytest
from faultyfs import FaultyFile
from hypothesis import given, settings
from hypothesis import strategies as st
from running import GREEDY
from serving import PATIENCE, Client, Said, alone

from colibri_mmap import Engine, RamSettings, Sampling
from colibri_mmap.errors import (
    ArgumentError,
    ColibriError,
    ContextLengthError,
    ModelReadError,
    QueueFull,
    ResourceError,
)
from colibri_mmap.format.experts import expert_layers
from colibri_mmap.format.gguf import open_gguf
from colibri_mmap.format.pack import pack
from colibri_mmap.runtime.batcher import Batcher
from colibri_mmap.runtime.events import Event, Failed, Finished, PromptProgress, Started, TokenEvent
from colibri_mmap.runtime.generation import Request
from colibri_mmap.runtime.grammar import Grammar
from colibri_mmap.runtime.kv import STEP_TOKENS

MODELS = [
    "mixtral/mixtral.Q4_0",
    "qwen3moe/qwen3moe.BF16",
    "gpt-oss/gpt-oss.MXFP4",
    "qwen3next/qwen3next.BF16",
    "kimi-linear/kimi-linear.BF16",
    "deepseek-v2-lite/deepseek-v2-lite.F16",
    "glm-dsa/glm-dsa.BF16",
]
LONG = 10**6  # tokens: until something else ends the reply
IDS = np.random.default_rng(5).integers(3, 300, 3000).tolist()
PROMPT = IDS[:6]


@contextmanager
def serving(engine: Engine, **settings: int) -> Iterator[Batcher]:
    """A batcher that keeps nothing of earlier requests."""
    store = engine.prefix_store(ram_bytes=0)
    with Batcher(engine, store, **settings) as batcher:
        yield batcher
    store.close()


@pytest.fixture
def engine(mixtral: Path) -> Iterator[Engine]:
    with Engine.open(mixtral) as engine:
        yield engine


def request(start: int, length: int, tokens: int, **settings: object) -> Request:
    sampling = Sampling(ignore_eos=True, **settings)  # type: ignore[arg-type]
    ids = IDS[start : start + length]
    return Request(ids=ids, max_tokens=tokens, sampling=sampling, logprobs=2)


REQUESTS = [
    request(0, 6, 30, temperature=0),
    request(7, 1, 12, temperature=0),
    request(20, 40, 25, temperature=0, repeat_penalty=1.3),
    request(70, 13, 20, temperature=1.0, seed=4),
    request(90, 150, 17, temperature=1.5, top_k=0, top_p=0.9, seed=5),
    request(300, 3, 1, temperature=0.7, seed=6),
    request(310, 9, 28, temperature=1.2, min_p=0, presence_penalty=0.4, seed=7),
    request(330, 60, 9, temperature=0),
]


# ------------------------------------------------------------------------------ replies
@pytest.mark.parametrize("name", MODELS)
def test_replies_are_those_of_lone_requests(mini: Path, name: str) -> None:
    with Engine.open(mini / f"{name}.gguf") as engine:
        long = []  # read in three parts
        if engine.context_length > 1300:
            long = [request(400, 1200, 10, temperature=0), request(1700, 1030, 6, temperature=0)]
        requests = [*REQUESTS, *long]
        expected = [alone(engine, each) for each in requests]
        with serving(engine, parallel=6) as batcher:
            clients = [Client(batcher, each) for each in requests]
            got = [client.said() for client in clients]
        assert got == expected
        assert [said.reason for said in got] == ["length"] * len(got)
        assert batcher.status().finished == {"length": len(got)}


@pytest.fixture(scope="module", params=["mixtral/mixtral.Q4_0", "qwen3next/qwen3next.BF16"])
def known(request: pytest.FixtureRequest, mini: Path) -> Iterator[tuple[Engine, list[Said]]]:
    """An engine, and what it says to each of the requests alone."""
    with Engine.open(mini / f"{request.param}.gguf") as engine:
        yield engine, [alone(engine, each) for each in REQUESTS]


@settings(deadline=None, max_examples=15)
@given(
    plan=st.lists(
        st.tuples(st.integers(0, len(REQUESTS) - 1), st.integers(0, 30), st.booleans()),
        min_size=1,
        max_size=14,
    ),
    parallel=st.integers(1, 5),
)
def test_others_that_come_and_go_change_nothing(
    known: tuple[Engine, list[Said]], plan: list[tuple[int, int, bool]], parallel: int
) -> None:
    """Each of the plan is a request, the token at which it is cancelled, if it has so many, and
    whether the next one waits a little."""
    engine, expected = known
    generated: dict[Client, int] = {}  # when it was cancelled

    def cancel_at(count: int) -> Callable[[Client, Event], None]:
        def then(client: Client, event: Event) -> None:
            if len(client.tokens) >= count and client not in generated:
                client.cancel()
                generated[client] = client.ticket.generation.stats.generated_tokens

        return then

    with serving(engine, parallel=parallel) as batcher:
        clients = []
        for number, count, waits in plan:
            clients.append(Client(batcher, REQUESTS[number], cancel_at(count)))
            if waits:
                clients[-1].ticket.wait(0.001)
        for client, (number, _, _) in zip(clients, plan, strict=True):
            said, whole = client.said(), expected[number]
            if said.reason == "length":
                assert said == whole
                continue
            assert said.reason == "cancelled"
            assert said.tokens[:-1] == whole.tokens[: len(said.tokens[:-1])]
            assert said.ids == whole.ids[: len(said.ids)]  # the text of the last may lack its end
            last = client.ticket.generation.stats.generated_tokens
            assert last == generated[client] or last == 1 + generated[client] == 1
        status = batcher.status()
        assert (status.queued, status.reading, status.decoding) == (0, 0, 0)
        assert sum(status.finished.values()) == len(plan)


def test_the_speed_is_that_of_the_time_in_which_there_are_replies(engine: Engine) -> None:
    with serving(engine) as batcher:
        assert batcher.status().tokens_per_second == 0
        started = time.monotonic()
        client = Client(batcher, request(0, 1200, 100, temperature=0))
        client.said()
        whole = 100 / (time.monotonic() - started)
        stats = client.ticket.generation.stats
        told = batcher.status().tokens_per_second
        assert whole < told < 2 * stats.decode_tokens_per_second


def test_stop_strings_and_ends_of_the_context(mini: Path) -> None:
    with Engine.open(mini / "llama-dense" / "llama-dense.F16.gguf", ctx=40) as engine:
        with serving(engine) as batcher:
            whole = Client(batcher, Request(ids=PROMPT, sampling=GREEDY)).said()
            assert (len(whole.tokens), whole.reason) == (34, "context")
            text = "".join(token.text for token in whole.tokens)
            stop = replace(GREEDY, stop=("never", text[9:12]))
            client = Client(batcher, Request(ids=PROMPT, sampling=stop))
            said, last = client.said(), client.end()
        assert "".join(token.text for token in said.tokens) == text[: text.index(text[9:12])]
        assert last.reason == "stop"
        assert last.stop_string == text[9:12]


def test_grammars(engine: Engine) -> None:
    """Each reply has a state of its own, and ends when nothing more may come."""
    pattern = "[ab]{6}c?(de)+f"
    random = Sampling(temperature=1.5, seed=1)
    asked = Request(ids=PROMPT, sampling=random, grammar=Grammar.regex(pattern), max_tokens=200)
    with serving(engine) as batcher:
        clients = [Client(batcher, replace(asked, ids=IDS[n : n + 5])) for n in range(6)]
        clients.append(Client(batcher, REQUESTS[0]))
        *said, free = [client.said() for client in clients]
    for one in said:
        assert re.fullmatch(pattern, "".join(token.text for token in one.tokens))
        assert one.reason == "stop"
    assert free == alone(engine, REQUESTS[0])


def test_a_conversation_goes_on(engine: Engine) -> None:
    """The ids of a reply are those of the next prompt, and all of them are known already."""
    store = engine.prefix_store(ram_bytes=1 << 30)
    with Batcher(engine, store) as batcher:
        text = engine.template.render([{"role": "user", "content": "Hi"}])
        first = Request(
            ids=engine.prompt_ids(text), chat_prompt=text, sampling=GREEDY, max_tokens=9
        )
        client = Client(batcher, first)
        said = client.said()
        shown = "".join(token.text for token in said.tokens)
        assert not shown.startswith(" ")
        longer = text + engine.tokenizer.decode(said.ids, at_start=False) + "[INST] More [/INST]"
        ids = engine.prompt_ids(longer)
        assert ids[: len(first.ids) + 9] == [*first.ids, *said.ids]
        assert len(ids) > len(first.ids) + 9
        second = Client(batcher, Request(ids=ids, sampling=GREEDY, max_tokens=4))
        second.said()
    assert second.events[0] == Started(len(ids), len(first.ids) + 8)
    store.close()


# ------------------------------------------------------------------------------ turns
def test_prompts_and_replies_take_turns(engine: Engine) -> None:
    """Between two parts of prompts there are tokens; prompts are read part by part in turns."""
    told: list[tuple[str, Event]] = []
    with serving(engine, parallel=3) as batcher:
        talking, started = threading.Event(), threading.Event()

        def note(name: str) -> Callable[[Client, Event], None]:
            def then(client: Client, event: Event) -> None:
                told.append((name, event))
                if name == "talker" and isinstance(event, TokenEvent):
                    talking.set()
                    assert started.wait(PATIENCE)

            return then

        ids = Request(ids=PROMPT, sampling=GREEDY, max_tokens=LONG)
        talker = Client(batcher, ids, note("talker"))
        assert talking.wait(PATIENCE)
        readers = [
            Client(batcher, request(start, 1400, 1, temperature=0), note(f"reader {start}"))
            for start in (0, 1500)
        ]
        started.set()
        for reader in readers:
            reader.said()
        talker.cancel()
        assert talker.said().reason == "cancelled"
    parts = [at for at, (_, event) in enumerate(told) if isinstance(event, PromptProgress)][1:]
    names = [told[at][0] for at in parts]
    assert names == ["reader 0", "reader 1500"] * 3
    assert [told[at][1] for at in parts[::2]] == [
        PromptProgress(STEP_TOKENS, 1400),
        PromptProgress(2 * STEP_TOKENS, 1400),
        PromptProgress(1400, 1400),
    ]
    for before, after in pairwise(parts):
        between = [name for name, _ in told[before:after]]
        assert "talker" in between


class Gate:
    """Holds the batcher's thread up at the first event of a request."""

    def __init__(self) -> None:
        self.reached, self.open = threading.Event(), threading.Event()

    def __call__(self, client: Client, event: Event) -> None:
        if isinstance(event, Started):
            self.reached.set()
            assert self.open.wait(PATIENCE)


def test_the_queue_is_bounded(engine: Engine) -> None:
    gate = Gate()
    with serving(engine, parallel=1, queue_limit=2) as batcher:
        short = Request(ids=PROMPT, sampling=GREEDY, max_tokens=3)
        first = Client(batcher, short, gate)
        assert gate.reached.wait(PATIENCE)
        others = [Client(batcher, short) for _ in range(2)]
        with pytest.raises(QueueFull, match="1 requests are being worked on and 2 wait"):
            Client(batcher, short)
        assert (batcher.status().queued, batcher.status().decoding) == (2, 0)
        others[0].cancel()
        gate.open.set()
        assert [client.said().reason for client in (first, *others)] == [
            "length",
            "cancelled",
            "length",
        ]
        assert [type(event) for event in others[0].events] == [Finished]
        assert Client(batcher, short).said() == first.said()


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"ids": []}, ArgumentError),
        ({"ids": [320]}, ArgumentError),
        ({"ids": IDS * 2}, ContextLengthError),
        ({"sampling": Sampling(logit_bias={320: 1.0})}, ArgumentError),
    ],
)
def test_mistakes_are_told_at_once(
    engine: Engine, wrong: dict[str, object], error: type[ColibriError]
) -> None:
    with serving(engine) as batcher, pytest.raises(error):
        batcher.submit(Request(**{"ids": PROMPT, **wrong}), lambda event: None)


# ------------------------------------------------------------------------------ ends
def test_deadlines(engine: Engine) -> None:
    forever = Request(ids=PROMPT, sampling=GREEDY, max_tokens=LONG)
    with serving(engine) as batcher:
        soon = replace(forever, deadline=time.monotonic() + 0.3)
        late = replace(forever, deadline=time.monotonic() - 1)
        clients = [Client(batcher, each) for each in (soon, late)]
        said = [client.said() for client in clients]
        assert [each.reason for each in said] == ["timeout", "timeout"]
        assert [type(event) for event in clients[1].events] == [Finished]
        assert len(said[0].tokens) > 3


def test_cancelled_while_the_prompt_is_read(engine: Engine) -> None:
    def then(client: Client, event: Event) -> None:
        if isinstance(event, PromptProgress):
            client.cancel()

    with serving(engine) as batcher:
        client = Client(batcher, request(0, 2000, 5, temperature=0), then)
        assert client.said().reason == "cancelled"
        assert client.events[1:-1] == [PromptProgress(STEP_TOKENS, 2000)]


def test_close_ends_all_requests(engine: Engine) -> None:
    forever = Request(ids=PROMPT, sampling=GREEDY, max_tokens=LONG)
    with serving(engine, parallel=2) as batcher:
        clients = [Client(batcher, forever) for _ in range(5)]
    assert [client.said().reason for client in clients] == ["cancelled"] * 5
    with pytest.raises(ColibriError, match="the program is ending"):
        Client(batcher, forever)
    batcher.close()


@pytest.mark.parametrize("count", [1, 3])
def test_an_engine_that_is_closed_meanwhile(mixtral: Path, count: int) -> None:
    talking = threading.Event()

    def then(client: Client, event: Event) -> None:
        if len(client.tokens) > 5:
            talking.set()

    engine = Engine.open(mixtral)
    with serving(engine) as batcher:
        forever = Request(ids=PROMPT, sampling=GREEDY, max_tokens=LONG)
        clients = [Client(batcher, forever, then) for _ in range(count)]
        assert talking.wait(PATIENCE)
        engine.close()
        for client in clients:
            last = client.end()
            assert isinstance(last, Failed)
            assert "the engine is closed" in str(last.error)
        with pytest.raises(ArgumentError, match="the engine is closed"):
            Client(batcher, forever)


# ------------------------------------------------------------------------------ failures
def test_a_request_that_fails_does_not_disturb_others(engine: Engine) -> None:
    expected = alone(engine, REQUESTS[0])
    nothing = Sampling(logit_bias=dict.fromkeys(range(320), -inf))
    with serving(engine) as batcher:
        good = Client(batcher, REQUESTS[0])
        bad = Client(batcher, Request(ids=PROMPT, sampling=nothing))
        last = bad.end()
        assert isinstance(last, Failed)
        assert isinstance(last.error, ArgumentError)
        assert good.said() == expected
        assert batcher.status().failed == 1


def test_an_owner_who_fails_does_not_disturb_others(engine: Engine) -> None:
    expected = alone(engine, REQUESTS[0])

    def then(client: Client, event: Event) -> None:
        if isinstance(event, TokenEvent):
            raise ValueError("a bug in whoever asked")

    with serving(engine) as batcher:
        good, bad = Client(batcher, REQUESTS[0]), Client(batcher, REQUESTS[1], then)
        assert bad.said().reason == "cancelled"
        assert good.said() == expected


def test_bugs_end_running_requests_only(engine: Engine) -> None:
    """Here one that a step meets."""

    class Bug(RuntimeError):
        pass

    class Broken(list[int]):
        def __getitem__(self, index: object) -> object:
            if isinstance(index, slice) and len(self) > 20:
                raise Bug
            return super().__getitem__(index)  # type: ignore[index]

    def then(client: Client, event: Event) -> None:
        if isinstance(event, Started):
            assert client.has_ticket.wait(PATIENCE)
            client.ticket.generation.ids = Broken(client.ticket.generation.ids)

    expected = alone(engine, REQUESTS[0])
    with serving(engine) as batcher:
        doomed = Client(batcher, Request(ids=PROMPT, sampling=GREEDY, max_tokens=LONG), then)
        last = doomed.end()
        assert isinstance(last, Failed)
        assert isinstance(last.error, Bug)
        assert Client(batcher, REQUESTS[0]).said() == expected


@pytest.fixture(scope="module")
def packed(mini: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose experts begin at pages of their own, so that one alone can fail."""
    path = tmp_path_factory.mktemp("packed") / "packed.gguf"
    pack(mini / "mixtral" / "mixtral.F16.gguf", path)
    return path


def test_a_disk_that_fails_ends_running_requests_only(packed: Path, tmp_path: Path) -> None:
    forever = replace(REQUESTS[0], max_tokens=LONG)
    extents = [
        extent for e in range(8) for extent in expert_layers(open_gguf(packed))[1].extents(e)
    ]
    start = min(extent.offset for extent in extents)
    nbytes = max(extent.offset + extent.nbytes for extent in extents) - start
    with FaultyFile(packed, tmp_path) as faulty:
        memory = RamSettings(io="pread", learn=False)
        with Engine.open(faulty.path, memory=memory) as engine:
            assert engine._pager is not None
            engine._pager.policy.budget = 0
            expected = alone(engine, REQUESTS[0])
            with serving(engine) as batcher:
                clients = [Client(batcher, forever) for _ in range(3)]
                faulty.fail(start, nbytes)
                for file in engine._weights.files:
                    file.evict(0, file.size)
                for client in clients:
                    last = client.end()
                    assert isinstance(last, Failed)
                    assert isinstance(last.error, ModelReadError)
                    assert tuple(client.tokens[:30]) == expected.tokens[: len(client.tokens)]
                faulty.heal()
                assert Client(batcher, REQUESTS[0]).said() == expected


# ------------------------------------------------------------------------------ memory
def test_requests_wait_for_memory(mini: Path) -> None:
    """Two of these sequences fit, three do not."""
    path = mini / "qwen3moe" / "qwen3moe.BF16.gguf"
    with Engine.open(path, ctx=256, parallel=2) as engine:
        engine.sequence_room = 0
        most = 0

        def then(client: Client, event: Event) -> None:
            nonlocal most
            status = batcher.status()
            most = max(most, status.reading + status.decoding)

        with serving(engine, parallel=4) as batcher:
            each = request(0, 10, 200, temperature=0)
            clients = [Client(batcher, each, then) for _ in range(4)]
            said = [client.said() for client in clients]
            assert [one.reason for one in said] == ["length"] * 4
            assert said == said[:1] * 4
        assert most == 2


def test_requests_that_memory_cannot_hold(engine: Engine) -> None:
    engine.sequence_room = 0
    engine.memory_plan = replace(engine.memory_plan, kv_bytes=engine.sequence_bytes(1500))
    with serving(engine) as batcher:
        small = Client(batcher, request(0, 10, 20, temperature=0))
        large = Client(batcher, request(0, 2000, 20, temperature=0))
        last = large.end()
        assert isinstance(last, Failed)
        assert isinstance(last.error, ResourceError)
        assert "2020 tokens of context take" in str(last.error)
        assert small.said().reason == "length"


def test_replies_that_outgrow_memory(engine: Engine) -> None:
    """The latest gives way."""
    engine.sequence_room = 0
    engine.memory_plan = replace(engine.memory_plan, kv_bytes=engine.sequence_bytes(2176))
    with serving(engine) as batcher:
        gate = Gate()
        clients = [
            Client(batcher, request(start, 6, 1100, temperature=0), gate) for start in (0, 10)
        ]
        gate.open.set()
        last = clients[1].end()
        assert isinstance(last, Failed)
        assert isinstance(last.error, ResourceError)
        assert len(clients[1].tokens) > 900
        assert clients[0].said().reason == "length"
