"""Packing: the same bytes in a new place, whatever interrupts it."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import subprocess
import sys
from pathlib import Path

import gguf
import pytest
import rawgguf as raw
from moe_files import LAYOUTS, write_model

from colibri_mmap.errors import ArgumentError, ModelReadError, ResourceError
from colibri_mmap.format.container import PADDING_TENSOR, SLAB_TENSOR
from colibri_mmap.format.experts import expert_layers, is_expert_tensor
from colibri_mmap.format.gguf import GGUF, open_gguf
from colibri_mmap.format.pack import pack
from colibri_mmap.format.verify import verify


def content(model: GGUF) -> dict[object, tuple[object, ...]]:
    """Every trunk tensor by name and every expert part by layer, expert and name."""
    files = [shard.path.read_bytes() for shard in model.shards]
    found: dict[object, tuple[object, ...]] = {
        name: (info.type, info.shape, files[info.shard][info.offset :][: info.nbytes])
        for name, info in model.tensors.items()
        if not is_expert_tensor(name) and name != PADDING_TENSOR
    }
    for layer in expert_layers(model).values():
        for name, part in layer.parts.items():
            for expert in range(layer.n_experts):
                data = files[part.shards[expert]][part.offsets[expert] :][: part.nbytes]
                found[layer.layer, expert, name] = (part.type, part.shape, data)
    return found


def left_over(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir() if path.name.startswith(".")]


def assert_packed(source: Path, target: Path, align: int) -> None:
    """Same content, same metadata, laid out as docs/format.md says, readable by gguf-py."""
    packed, original = open_gguf(target), open_gguf(source)
    assert content(packed) == content(original)
    result = verify(target)
    assert (result.has_checksums, result.damaged) == (True, ())
    assert result.checked_bytes == target.stat().st_size - packed.shards[0].data_offset

    theirs, before = gguf.GGUFReader(target).fields, gguf.GGUFReader(original.path).fields
    dropped = ("GGUF.", "general.alignment", "split.", "colibri.")
    kept = [key for key in before if not key.startswith(dropped)]
    assert [key for key in theirs if not key.startswith(dropped)] == kept
    for key in kept:
        assert theirs[key].types == before[key].types
        assert theirs[key].contents() == before[key].contents()
    assert theirs["general.alignment"].contents() == 4096
    assert not [key for key in theirs if key.startswith("split.")]

    end = packed.shards[0].data_offset  # ggml wants tensors in file order, without gaps
    for info in packed.tensors.values():
        assert info.offset == end
        end += -(-info.nbytes // 4096) * 4096
        if SLAB_TENSOR.fullmatch(info.name):
            assert info.offset % align == info.shape[0] % align == 0
    assert end == target.stat().st_size
    is_slab = [bool(SLAB_TENSOR.fullmatch(name)) for name in packed.tensors]
    assert is_slab == sorted(is_slab)


@pytest.mark.parametrize("align", [4096, 16384, 2 << 20])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_and_alignment(tmp_path: Path, layout: str, align: int) -> None:
    source = write_model(tmp_path / "source.gguf", layout)
    target = pack(source, tmp_path / "target.gguf", align=align)
    assert_packed(source, target, align)
    assert left_over(tmp_path) == []


def test_mini_models(mini: Path, tmp_path: Path) -> None:
    for source in mini.glob("*/*.gguf"):
        target = pack(source, tmp_path / "target.gguf", force=True)
        assert_packed(source, target, 4096)


@pytest.mark.fixtures
def test_reference_models_of_every_family(shared_fixtures: Path, tmp_path: Path) -> None:
    for source in shared_fixtures.glob("mini/*/*.gguf"):
        assert_packed(source, pack(source, tmp_path / "target.gguf", force=True), 4096)


@pytest.mark.fixtures
def test_a_split_model_packs_like_the_whole_one(shared_fixtures: Path, tmp_path: Path) -> None:
    target = pack(shared_fixtures / "split", tmp_path / "split.gguf")
    assert_packed(shared_fixtures / "split", target, 4096)
    whole = shared_fixtures / "mixtral-kq" / "mixtral-kq.Q4_K_M.gguf"
    assert content(open_gguf(target)) == content(open_gguf(whole))


def test_packing_a_container_again(tmp_path: Path) -> None:
    source = write_model(tmp_path / "source.gguf", "stacked")
    first = pack(source, tmp_path / "first.gguf", align=16384)
    second = pack(first, tmp_path / "second.gguf")
    assert_packed(source, second, 4096)
    assert open_gguf(second).strs("colibri.source.names") == ("first.gguf",)


def test_the_trunk_follows_a_forward_pass(tmp_path: Path) -> None:
    source = write_model(tmp_path / "source.gguf", "stacked")
    names = list(open_gguf(pack(source, tmp_path / "target.gguf")).tensors)
    assert [name.removesuffix(".weight") for name in names] == [
        "token_embd", "blk.0.attn_norm", "blk.0.attn_q", "blk.0.attn_output", "blk.0.ffn_norm",
        "blk.1.attn_norm", "blk.1.ffn_gate_inp", "output_norm", "output",
        "blk.0.ffn_exps.0", "blk.1.ffn_exps.0",
    ]  # fmt: skip


def test_experts_can_be_stored_in_another_order(tmp_path: Path) -> None:
    source = write_model(tmp_path / "source.gguf", "stacked")
    plain = open_gguf(pack(source, tmp_path / "plain.gguf"))
    hot = open_gguf(pack(source, tmp_path / "hot.gguf", order={1: [2, 0, 3, 1]}))
    assert content(hot) == content(plain)
    assert verify(hot.path).damaged == ()
    gate = expert_layers(hot)[1].parts["gate"].offsets
    assert gate.argsort().tolist() == [2, 0, 3, 1]
    assert expert_layers(hot)[0].parts["gate"].offsets.argsort().tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"align": 2048}, "align must be a power of two"),
        ({"align": 12288}, "align must be a power of two"),
        ({"align": 4 << 20}, "align must be a power of two"),
        ({"order": {1: [0, 1, 2]}}, "order of layer 1 must name each of its 4 experts once"),
        ({"order": {7: [0]}}, "order names layer 7, which has no routed experts"),
    ],
)
def test_bad_options(tmp_path: Path, options, message: str) -> None:
    source = write_model(tmp_path / "source.gguf", "stacked")
    with pytest.raises(ArgumentError, match=message):
        pack(source, tmp_path / "target.gguf", **options)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source.gguf"]


def test_targets_that_cannot_be(tmp_path: Path) -> None:
    source = write_model(tmp_path / "source.gguf", "stacked")
    (tmp_path / "link.gguf").symlink_to(source)
    (tmp_path / "there.gguf").write_bytes(b"precious")
    with pytest.raises(ArgumentError, match="is the model itself"):
        pack(source, tmp_path / "link.gguf", force=True)
    with pytest.raises(ArgumentError, match="exists; use --force"):
        pack(source, tmp_path / "there.gguf")
    with pytest.raises(ArgumentError, match="is not a file"):
        pack(source, tmp_path, force=True)
    with pytest.raises(ArgumentError, match="no such directory"):
        pack(source, tmp_path / "lost" / "target.gguf")
    assert (tmp_path / "there.gguf").read_bytes() == b"precious"
    pack(source, tmp_path / "there.gguf", force=True)
    assert verify(tmp_path / "there.gguf").damaged == ()


@pytest.mark.parametrize("name", ["with space.gguf", "模型.gguf", "🐦‍⬛ 'quoted\".gguf", "-o.gguf"])
def test_any_file_name(tmp_path: Path, name: str) -> None:
    directory = tmp_path / f"dir {name}"
    directory.mkdir()
    source = write_model(tmp_path / name, "stacked")
    target = pack(source, directory / name)
    assert target == directory / name
    assert_packed(source, target, 4096)
    assert open_gguf(directory).path == target


def test_progress_counts_every_byte(tmp_path: Path) -> None:
    source = write_model(tmp_path / "source.gguf", "stacked")
    calls: list[tuple[int, int]] = []
    target = pack(source, tmp_path / "target.gguf", progress=lambda *call: calls.append(call))
    total = target.stat().st_size - open_gguf(target).shards[0].data_offset
    done = [call[0] for call in calls]
    assert done == sorted(set(done))
    assert calls[-1] == (total, total)
    calls.clear()
    verify(target, progress=lambda *call: calls.append(call))
    assert calls[-1] == (total, total)


# --- interruptions

STEPPED_PACK = """
import sys
from colibri_mmap.format.pack import pack
def step(done, total):
    print(done, total, flush=True)
    sys.stdin.readline()
pack(sys.argv[1], sys.argv[2], progress=step)
"""


def start_pack(source: Path, target: Path) -> subprocess.Popen[str]:
    """A pack in a process of its own that waits for a line before each step."""
    command = [sys.executable, "-c", STEPPED_PACK, str(source), str(target)]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def step(process: subprocess.Popen[str]) -> tuple[int, int]:
    assert process.stdout is not None
    done, total = process.stdout.readline().split()
    return int(done), int(total)


def go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def pack_and_kill(source: Path, target: Path, done_at_least: int) -> int:
    """Kill a pack as soon as it has reported so many bytes; the number it reported first."""
    with start_pack(source, target) as process:
        first = done = step(process)[0]
        while done < done_at_least:
            go(process)
            done = step(process)[0]
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert process.returncode == -signal.SIGKILL
    return first


@pytest.fixture
def undisturbed(tmp_path: Path) -> tuple[Path, bytes]:
    """A source and the container that an undisturbed pack makes of it."""
    source = write_model(tmp_path / "source.gguf", "fused")
    return source, pack(source, tmp_path / "undisturbed.gguf").read_bytes()


def test_killed_again_and_again(tmp_path: Path, undisturbed: tuple[Path, bytes]) -> None:
    source, expected = undisturbed
    target = tmp_path / "target.gguf"
    total = len(expected) - open_gguf(tmp_path / "undisturbed.gguf").shards[0].data_offset
    starts = [pack_and_kill(source, target, int(total * share)) for share in (0, 0.3, 0.6, 0.9, 1)]
    assert starts == sorted(starts)
    assert starts[-1] > starts[0]  # finished units were not written again
    assert not target.exists()
    assert sorted(left_over(tmp_path)) == [".target.gguf.journal", ".target.gguf.partial"]
    pack(source, target)
    assert target.read_bytes() == expected
    assert left_over(tmp_path) == []


@pytest.mark.parametrize(
    "torn",
    [b'{"unit": "blk.1.ff', b'{"unit": "blk.1.ffn_exps.0", "checksums": []}', bytes(20)],
    ids=["cut", "without its end", "zeros"],
)
def test_a_torn_journal_line_is_dropped(
    tmp_path: Path, undisturbed: tuple[Path, bytes], torn: bytes
) -> None:
    source, expected = undisturbed
    target = tmp_path / "target.gguf"
    pack_and_kill(source, target, len(expected) * 2 // 3)
    with (tmp_path / ".target.gguf.journal").open("ab") as journal:
        journal.write(torn)
    steps: list[int] = []
    pack(source, target, progress=lambda done, total: steps.append(done))
    assert steps[0] > len(expected) // 4  # the units before the torn line were not written again
    assert target.read_bytes() == expected


@pytest.mark.parametrize("what", ["source", "options", "partial lost", "partial cut"])
def test_a_journal_of_another_job_is_not_used(
    tmp_path: Path, undisturbed: tuple[Path, bytes], what: str
) -> None:
    source, expected = undisturbed
    target = tmp_path / "target.gguf"
    pack_and_kill(source, target, len(expected) * 2 // 3)
    order = None
    if what == "source":
        data = bytearray(source.read_bytes())
        data[-1] ^= 1
        source.write_bytes(data)
    elif what == "options":
        order = {0: [3, 2, 1, 0]}
    elif what == "partial lost":
        (tmp_path / ".target.gguf.partial").unlink()
    else:
        os.truncate(tmp_path / ".target.gguf.partial", 5000)
    pack(source, target, order=order)
    assert verify(target).damaged == ()
    assert content(open_gguf(target)) == content(open_gguf(source))
    assert left_over(tmp_path) == []


def test_two_packs_of_one_target(tmp_path: Path, undisturbed: tuple[Path, bytes]) -> None:
    source, expected = undisturbed
    target = tmp_path / "target.gguf"
    with start_pack(source, target) as process:
        step(process)
        with pytest.raises(ResourceError, match="another pack is writing"):
            pack(source, target)
        process.communicate("\n" * 1000)
    assert process.returncode == 0
    assert target.read_bytes() == expected


# --- what the machine lacks


@pytest.fixture
def small_disk(tmp_path: Path):
    """A file system of 256 KiB."""
    directory = tmp_path / "disk"
    directory.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", directory])
    if mounted.returncode:
        pytest.skip("mounting a tmpfs needs root")
    yield directory
    subprocess.run(["umount", directory], check=True)


def test_a_small_disk_is_noticed_before_writing(tmp_path: Path, small_disk: Path) -> None:
    source = write_model(tmp_path / "source.gguf", "stacked")
    with pytest.raises(ResourceError, match=r"the container needs \d+ bytes, \d+ are free"):
        pack(source, small_disk / "target.gguf", align=1 << 20)
    assert list(small_disk.iterdir()) == []


def test_a_disk_that_fills_up_meanwhile(tmp_path: Path, small_disk: Path) -> None:
    source = write_model(tmp_path / "source.gguf", "stacked")
    target = small_disk / "target.gguf"

    def fill(done: int, total: int) -> None:
        with (small_disk / "other").open("ab") as file:
            file.write(bytes(os.statvfs(small_disk).f_bavail * 4096))

    with pytest.raises(ResourceError, match="the disk is full; free some space and run again"):
        pack(source, target, progress=fill)
    (small_disk / "other").unlink()
    pack(source, target)
    assert_packed(source, target, 4096)


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    source = write_model(tmp_path / "source.gguf", "stacked")
    with pytest.raises(ResourceError, match="cannot be written: File name too long"):
        pack(source, tmp_path / ("x" * 250))


def test_a_source_that_shrinks_meanwhile(tmp_path: Path) -> None:
    source = write_model(tmp_path / "source.gguf", "stacked")
    with pytest.raises(ModelReadError, match=r"source\.gguf: ends at byte \d+: it shrank"):
        pack(
            source,
            tmp_path / "target.gguf",
            progress=lambda *_: os.truncate(source, 4096),
        )


@pytest.mark.fixtures
def test_a_source_that_loses_a_shard_meanwhile(shared_fixtures: Path, tmp_path: Path) -> None:
    for shard in (shared_fixtures / "split").glob("*.gguf"):
        (tmp_path / shard.name).write_bytes(shard.read_bytes())
    third = tmp_path / "mixtral-kq.Q4_K_M-00003-of-00003.gguf"
    with pytest.raises(ModelReadError, match=r"00003-of-00003\.gguf: reading at byte \d+ failed"):
        pack(tmp_path, tmp_path / "target", progress=lambda *_: third.unlink(missing_ok=True))


def resident_share(path: Path) -> float:
    """The share of a file's pages that are in the page cache."""
    size = path.stat().st_size
    pages = -(-size // mmap.PAGESIZE)
    seen = (ctypes.c_ubyte * pages)()
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as view:
        address = ctypes.addressof(ctypes.c_char.from_buffer(view))
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), seen) == 0
    return sum(page & 1 for page in seen) / pages


def write_large_model(path: Path, side: int) -> Path:
    """One layer of 3 experts of side x side bytes, all zero and on disk a hole."""
    stack = 3 * side * side
    tensors = [
        raw.tensor(f"blk.0.ffn_{name}_exps.weight", [side, side, 3], 24, number * stack)
        for number, name in enumerate(("gate", "up", "down"))
    ]
    path.write_bytes(raw.gguf((), tensors))
    os.truncate(path, path.stat().st_size + 3 * stack)
    return path


def test_pages_are_dropped_behind(tmp_path: Path) -> None:
    source = write_large_model(tmp_path / "source.gguf", 3072)
    target = pack(source, tmp_path / "target.gguf")
    if subprocess.check_output(["stat", "-f", "-c", "%T", tmp_path]).strip() == b"tmpfs":
        pytest.skip("a tmpfs has no disk to drop pages to")
    assert resident_share(source) < 0.1
    assert resident_share(target) < 0.1


def test_memory_stays_small(tmp_path: Path) -> None:
    """Some 600 MB of experts pass through a process that never holds 200 MiB of its own."""
    source = write_large_model(tmp_path / "source.gguf", 8192)
    script = """
import re, sys
from pathlib import Path
from colibri_mmap.format.pack import pack
peak = 0
def measure(done, total):
    global peak
    status = Path("/proc/self/status").read_text()
    peak = max(peak, int(re.search(r"RssAnon:\\s+(\\d+)", status)[1]))
pack(sys.argv[1], sys.argv[2], progress=measure)
print(peak)
"""
    target = tmp_path / "target.gguf"
    command = [sys.executable, "-c", script, str(source), str(target)]
    peak = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert target.stat().st_size > 600_000_000
    assert int(peak) < 200 * 1024
