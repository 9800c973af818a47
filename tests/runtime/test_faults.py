"""Files cut short, replaced or unreadable while a model runs: an error, never a wrong token."""

from __future__ import annotations

import os
import queue
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from faultyfs import FaultyFile
from running import GREEDY

from colibri_mmap import Engine
from colibri_mmap.errors import ModelReadError
from colibri_mmap.format.experts import expert_layers
from colibri_mmap.format.gguf import open_gguf
from colibri_mmap.format.pack import pack
from colibri_mmap.runtime.pages import PAGE
from colibri_mmap.runtime.ram import RamSettings
from colibri_mmap.runtime.sources import IoMode

IO: tuple[IoMode, ...] = ("mmap", "pread", "direct")
PROMPT = [1, 17, 300, 45, 45, 212, 9, 130]
TOKENS = 40
PATIENCE = 300.0  # seconds: other programs may stop this one for a while
CHANGED = r"{}: the file was changed after it was opened; open the model again"


@pytest.fixture(scope="module")
def packed(mini: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose experts begin at pages of their own, so that one alone can fail."""
    path = tmp_path_factory.mktemp("packed") / "packed.gguf"
    pack(mini / "mixtral" / "mixtral.F16.gguf", path)
    return path


@pytest.fixture(scope="module")
def expected(packed: Path) -> list[int]:
    """What the healthy model says."""
    with Engine.open(packed) as engine:
        return reply(engine)


@pytest.fixture
def model(packed: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(packed, tmp_path / "model.gguf"))


def opened(path: Path, io: IoMode = "mmap") -> Engine:
    return Engine.open(path, memory=RamSettings(io=io, learn=False))


def reply(engine: Engine, tokens: int = TOKENS) -> list[int]:
    engine.reset()
    return [token.id for token in engine.generate(PROMPT, tokens, GREEDY)]


def layer_range(path: Path, layer: int) -> tuple[int, int]:
    """Where the experts of a layer are: offset and bytes."""
    found = expert_layers(open_gguf(path))[layer]
    extents = [found.extents(expert)[0] for expert in range(found.n_experts)]
    start = min(e.offset for e in extents)
    return start, max(e.offset + e.nbytes for e in extents) - start


def tensor_range(path: Path, name: str) -> tuple[int, int]:
    info = open_gguf(path).tensors[name]
    return info.offset, info.nbytes


def evict_all(engine: Engine) -> None:
    """Let the page cache forget the mapped files, as a system short of memory would."""
    for file in engine._weights.files:
        whole = file.size // PAGE * PAGE
        for _ in range(10_000):  # pages that are just being read are passed over
            file.evict(0, file.size)
            if file.resident_bytes(0, whole) == 0:
                break


# ------------------------------------------------------------------------------ cut short
@pytest.mark.parametrize("io", IO)
def test_file_cut_short_before_the_prompt(model: Path, expected: list[int], io: IoMode) -> None:
    content = model.read_bytes()
    with opened(model, io) as engine:
        os.truncate(model, layer_range(model, 1)[0] + 4096)
        named = rf"{re.escape(str(model))}: layer 1, expert \d"
        with pytest.raises(ModelReadError, match=f"^{named} [^\n]*verify$"):
            reply(engine)
        model.write_bytes(content)
        # the right bytes, but who knows what was read meanwhile
        with pytest.raises(ModelReadError, match=CHANGED.format(re.escape(str(model)))):
            reply(engine)
    with opened(model, io) as engine:
        assert reply(engine) == expected


@pytest.mark.parametrize("io", IO)
@pytest.mark.parametrize("size", [0, 4096, 95_000, 300_000])
def test_file_cut_short_between_tokens(
    model: Path, expected: list[int], io: IoMode, size: int
) -> None:
    with opened(model, io) as engine:
        tokens = engine.generate(PROMPT, TOKENS, GREEDY)
        said = [next(tokens).id for _ in range(5)]
        os.truncate(model, size)
        with pytest.raises(ModelReadError, match=f"^{re.escape(str(model))}: [^\n]*$"):
            said += [token.id for token in tokens]
        assert said == expected[:5]
        with pytest.raises(ModelReadError):
            reply(engine)


@pytest.mark.parametrize("after", [1, 3, 10])
def test_file_cut_short_at_any_moment(model: Path, expected: list[int], after: int) -> None:
    said: queue.Queue[int | BaseException] = queue.Queue()

    def generate() -> None:
        try:
            while True:
                for number in reply(engine):
                    said.put(number)
        except BaseException as error:
            said.put(error)

    with opened(model) as engine:
        thread = threading.Thread(target=generate)
        thread.start()
        got = [said.get(timeout=PATIENCE) for _ in range(after * TOKENS)]
        os.truncate(model, 95_000)
        thread.join(PATIENCE)
        assert not thread.is_alive()
    while not said.empty():
        got.append(said.get())
    error = got.pop()
    assert isinstance(error, ModelReadError), error
    assert got == (expected * len(got))[: len(got)]


# ------------------------------------------------------------------------------ replaced
@pytest.mark.parametrize("io", IO)
def test_another_file_under_the_same_name(
    model: Path, mini: Path, expected: list[int], io: IoMode
) -> None:
    """The open file is the one that was opened, and lives on without a name."""
    with opened(model, io) as engine:
        other = model.with_name("other")
        shutil.copy(mini / "mixtral" / "mixtral.Q4_0.gguf", other)
        other.replace(model)
        assert reply(engine) == expected
        model.unlink()
        assert reply(engine) == expected


@pytest.mark.parametrize("io", IO)
def test_other_bytes_in_the_same_file(model: Path, expected: list[int], io: IoMode) -> None:
    with opened(model, io) as engine:
        tokens = engine.generate(PROMPT, TOKENS, GREEDY)
        said = [next(tokens).id for _ in range(5)]
        with model.open("r+b") as file:
            file.seek(layer_range(model, 0)[0])
            file.write(os.urandom(50_000))
        with pytest.raises(ModelReadError, match=CHANGED.format(re.escape(str(model)))):
            said += [token.id for token in tokens]
        assert said == expected[:5]


# ------------------------------------------------------------------------------ disk errors
@pytest.fixture
def faulty(packed: Path, tmp_path: Path) -> Iterator[FaultyFile]:
    with FaultyFile(packed, tmp_path) as file:
        yield file


def test_disk_error_at_open(faulty: FaultyFile, packed: Path, expected: list[int]) -> None:
    """Of the trunk, which is read before anything is computed."""
    faulty.fail(*tensor_range(packed, "blk.1.attn_q.weight"))
    place = re.escape(str(faulty.path))
    with pytest.raises(ModelReadError, match=f"^{place}: tensor '[^\n]+' [^\n]*verify$"):
        opened(faulty.path)
    faulty.heal()
    with opened(faulty.path) as engine:
        assert reply(engine) == expected


@pytest.mark.parametrize("io", IO)
def test_disk_error_in_experts(
    faulty: FaultyFile, packed: Path, expected: list[int], io: IoMode
) -> None:
    with opened(faulty.path, io) as engine:
        faulty.fail(*layer_range(packed, 1))
        evict_all(engine)  # reading the trunk may have brought in some of its neighbours
        place = re.escape(str(faulty.path))
        for _ in range(2):
            with pytest.raises(
                ModelReadError, match=f"^{place}: layer 1, expert \\d cannot be read [^\n]*verify$"
            ):
                reply(engine)
        faulty.heal()
        assert reply(engine) == expected


@pytest.mark.parametrize(
    ("where", "named"),
    [
        (lambda path: layer_range(path, 1), r"layer 1, expert \d"),
        (lambda path: tensor_range(path, "blk.1.attn_q.weight"), "tensor 'blk.1.attn_q.weight'"),
        (lambda path: tensor_range(path, "output.weight"), "tensor 'output.weight'"),
    ],
)
def test_disk_error_under_the_computation(
    faulty: FaultyFile,
    packed: Path,
    expected: list[int],
    where: Callable[[Path], tuple[int, int]],
    named: str,
) -> None:
    """Pages that were there, were taken by the system and then cannot be read again."""
    with opened(faulty.path) as engine:
        tokens = engine.generate(PROMPT, TOKENS, GREEDY)
        said = [next(tokens).id for _ in range(12)]
        for _ in range(2):
            faulty.fail(*where(packed))
            evict_all(engine)
            with pytest.raises(ModelReadError, match=f"^[^\n]+: {named} vanished [^\n]*verify$"):
                said += [token.id for token in tokens]
            assert said == expected[:12]
            with pytest.raises(ModelReadError):
                reply(engine)
            faulty.heal()
            assert reply(engine) == expected
            tokens = engine.generate(PROMPT, TOKENS, GREEDY)
            said = [next(tokens).id for _ in range(12)]


def test_disk_errors_in_two_places_at_once(
    faulty: FaultyFile, packed: Path, expected: list[int]
) -> None:
    """The one that ends a step must not hide that the other put zeros in place of weights."""
    with opened(faulty.path, "pread") as engine:
        start = tensor_range(packed, "blk.0.attn_q.weight")[0]
        faulty.fail(start, sum(layer_range(packed, 1)) - start)
        evict_all(engine)
        with pytest.raises(ModelReadError, match=r"layer [01], expert"):
            reply(engine)
        faulty.heal()
        assert reply(engine) == expected


def test_disk_error_in_one_of_two_engines(
    faulty: FaultyFile, packed: Path, expected: list[int]
) -> None:
    with opened(packed) as healthy, opened(faulty.path) as broken:
        assert reply(broken) == expected
        faulty.fail(*layer_range(packed, 0))
        evict_all(broken)
        tokens = healthy.generate(PROMPT, TOKENS, GREEDY)
        said = [next(tokens).id]
        with pytest.raises(ModelReadError):
            reply(broken)
        said += [token.id for token in tokens]
        assert said == expected
        faulty.heal()
        assert reply(broken) == expected


# ------------------------------------------------------------------------------ less memory
def test_pages_that_the_system_took(model: Path, expected: list[int]) -> None:
    with opened(model) as engine:
        said = []
        for token in engine.generate(PROMPT, TOKENS, GREEDY):
            said.append(token.id)
            evict_all(engine)
        assert said == expected


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="dropping caches needs root")
def test_cache_dropped_by_another_process(model: Path, expected: list[int]) -> None:
    with opened(model) as engine:
        said = []
        for token in engine.generate(PROMPT, TOKENS, GREEDY):
            said.append(token.id)
            if len(said) % 10 == 1:
                subprocess.run(["sh", "-c", "echo 1 > /proc/sys/vm/drop_caches"], check=True)
        assert said == expected


def test_more_memory_than_there_is(model: Path, expected: list[int]) -> None:
    with Engine.open(model, memory=RamSettings(ram="900T")) as engine:
        (notice,) = [notice for notice in engine.notices if "--ram" in notice]
        assert re.fullmatch(
            r"--ram [^\n]+ GB is more than the [^\n]+; going on with [^\n]+", notice
        )
        assert reply(engine) == expected


# ------------------------------------------------------------------------------ the handler
HANDLERS = """
import ctypes, faulthandler, mmap, os, signal, sys
import numpy as np
from colibri_mmap.runtime.buserrors import Protection

class Action(ctypes.Structure):
    _fields_ = [("handler", ctypes.c_void_p), ("rest", ctypes.c_ubyte * 248)]

def installed():
    action = Action()
    ctypes.CDLL(None).sigaction(int(signal.SIGBUS), None, ctypes.byref(action))
    return action.handler

class Cut:
    '''A mapped file that was cut short.'''

    def __init__(self):
        self.fd = os.open(sys.argv[1], os.O_RDWR)
        os.ftruncate(self.fd, 65536)
        self.map = mmap.mmap(self.fd, 65536, prot=mmap.PROT_READ)
        self.bytes = np.frombuffer(self.map, np.uint8)
        self.address = self.bytes.ctypes.data
        os.ftruncate(self.fd, 0)

"""


def run_handlers(tmp_path: Path, code: str) -> subprocess.CompletedProcess[str]:
    path = tmp_path / "file"
    path.touch()
    return subprocess.run(
        [sys.executable, "-c", HANDLERS + code, path], capture_output=True, text=True
    )


def test_faults_read_as_zeros_and_are_noted_per_range(tmp_path: Path) -> None:
    ran = run_handlers(
        tmp_path,
        """
before = installed()
a, b = Cut(), Cut()
first, second = (Protection(cut.address, 65536) for cut in (a, b))
assert installed() != before
assert a.bytes[10_000] == 0
assert first.take_fault() == a.address + 10_000 and second.take_fault() == 0
assert a.bytes.sum() == 0 and first.take_fault() == 0  # all of it is zeros by now
first.release()
assert b.bytes[5] == 0 and second.take_fault() == b.address + 5
third = Protection(a.address, 65536)
second.release()
assert installed() != before
third.release()
assert installed() == before
Protection(a.address, 65536).release()
assert installed() == before
""",
    )
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("enabled", ["before", "after", "after, and the range released"])
def test_other_faults_go_to_the_handler_that_was_there(tmp_path: Path, enabled: str) -> None:
    ran = run_handlers(
        tmp_path,
        f"""
a, b = Cut(), Cut()
if {enabled!r} == "before":
    faulthandler.enable()
protection = Protection(a.address, 65536)
if {enabled!r} != "before":
    faulthandler.enable()
if {enabled!r} == "after, and the range released":
    protection.release()
b.bytes.sum()
""",
    )
    assert ran.returncode == -7
    assert "Fatal Python error: Bus error" in ran.stderr


@pytest.mark.parametrize("way", ["b.bytes.sum()", "os.kill(os.getpid(), signal.SIGBUS)"])
def test_other_faults_end_the_process_as_ever(tmp_path: Path, way: str) -> None:
    ran = run_handlers(
        tmp_path, f"a, b = Cut(), Cut()\nProtection(a.address, 65536)\n{way}\n{way}\nprint('alive')"
    )
    assert ran.returncode == -7
    assert ran.stdout == ""


def test_vanished_pages_of_many_threads(tmp_path: Path) -> None:
    """All threads of a launch may fault at once, each in any page."""
    path = tmp_path / "file"
    path.touch()
    code = """
import threading
a = Cut()
protection = Protection(a.address, 65536)
def touch(first):
    for page in range(first, first + 4):
        assert a.bytes[page * 4096] == 0
threads = [threading.Thread(target=touch, args=(4 * n,)) for n in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert protection.take_fault()
"""
    ran = run_handlers(tmp_path, code)
    assert ran.returncode == 0, ran.stderr


def test_remapped_files_have_their_bytes_again(model: Path) -> None:
    content = np.frombuffer(model.read_bytes(), np.uint8)
    with opened(model) as engine:
        (file,) = engine._weights.files
        assert np.array_equal(file.bytes, content)
        os.truncate(model, 0)
        assert not file.bytes.any()
        model.write_bytes(content.tobytes())
        assert not file.bytes.any(), "the zeros stay until someone notices"
        with pytest.raises(ModelReadError):
            engine.logits(PROMPT)
        assert np.array_equal(file.bytes, content)


# ------------------------------------------------------------------------------ Ctrl-C
INTERRUPTED = """
import os, random, signal, sys, threading
from colibri_mmap import Engine, Sampling
from colibri_mmap.runtime.ram import RamSettings
greedy, prompt = Sampling(temperature=0.0, ignore_eos=True), [5, 9, 33, 120] * 4

def reply():
    engine.reset()
    return [token.id for token in engine.generate(prompt, 12, greedy)]

memory = RamSettings(io=sys.argv[2], prefetch=2, learn=False)
with Engine.open(sys.argv[1], memory=memory) as engine:
    expected = reply()
    pager = engine._tier.pager
    pager.policy.budget = 3 * int(pager.source.sizes[0])

    def disturb(seconds):
        threading.Event().wait(seconds)
        os.kill(os.getpid(), signal.SIGINT)

    for _ in range(int(sys.argv[3])):
        thread = threading.Thread(target=disturb, args=(random.uniform(0, 0.03),))
        try:
            thread.start()
            while True:
                assert reply() == expected
        except KeyboardInterrupt:
            pass
        thread.join()
        assert reply() == expected
print("usable")
"""


@pytest.mark.parametrize(
    "times", [40, pytest.param(1000, marks=pytest.mark.slow)], ids=["some", "many"]
)
@pytest.mark.parametrize("io", IO)
def test_interrupted_reads(model: Path, io: IoMode, times: int) -> None:
    """Ctrl-C at any moment of a pager with little memory leaves nothing waiting for ever."""
    ran = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, model, io, str(times)],
        capture_output=True,
        text=True,
        timeout=PATIENCE + times,
    )
    assert ran.stdout == "usable\n", ran.stderr
