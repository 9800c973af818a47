"""pull, list, rm and the names of models, against a hub of our own."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pexpect
import pytest
from hubserver import HubServer, Repo, blob
from program import COMMAND, ROOT, Colibri, environment

# pexpect forks; the child executes the command at once, whatever threads other tests left here.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")

NAME = "bird/Mix-GGUF"
MODEL_COMMANDS = ("bench", "chat", "doctor", "inspect", "plan", "tune", "verify", "warmup")
Terminal = Callable[..., "pexpect.spawn[str]"]


@pytest.fixture
def hub(mini: Path) -> Iterator[HubServer]:
    """A hub with one repository of two models, 121 kB and 189 kB."""
    server = HubServer()
    files = {
        f"Mix-{name}.gguf": (mini / "mixtral" / f"mixtral.{name}.gguf").read_bytes()
        for name in ("Q4_0", "Q8_0")
    }
    server.repos[NAME] = Repo({**files, "mmproj-F16.gguf": b"?", "README.md": b"?"})
    yield server
    server.close()


@pytest.fixture
def variables(hub: HubServer, tmp_path: Path) -> dict[str, str]:
    home = tmp_path / "hf"
    return {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(home),
        "HF_HUB_CACHE": str(home / "hub"),
        "HF_TOKEN": "",
    }


@pytest.fixture
def program(colibri: Colibri, variables: dict[str, str]) -> Colibri:
    """The command with the hub and a cache of its own."""

    def run(*arguments: str | Path) -> subprocess.CompletedProcess[bytes]:
        return colibri(*arguments, **variables)

    return run


@pytest.fixture
def terminal(variables: dict[str, str], tmp_path: Path) -> Terminal:
    """The command at a terminal."""

    def start(*arguments: str) -> pexpect.spawn[str]:
        return pexpect.spawn(
            COMMAND[0],
            [*COMMAND[1:], *arguments],
            env={**environment(tmp_path / "state"), **variables},
            cwd=tmp_path,
            encoding="utf-8",
            timeout=60,
            dimensions=(40, 200),
        )

    return start


def cached(tmp_path: Path) -> Path:
    return tmp_path / "hf" / "hub" / "models--bird--Mix-GGUF"


def wait_for_size(path: Path, size: int) -> None:
    deadline = time.monotonic() + 60
    while not (path.is_file() and path.stat().st_size == size):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_from_pull_to_rm(program: Colibri, hub: HubServer, mini: Path, tmp_path: Path) -> None:
    hub.repos[NAME].architecture = "llama"
    pulled = program("pull", f"hf.co/{NAME}")
    assert (pulled.returncode, pulled.stderr) == (0, b"")
    first, path, last = pulled.stdout.decode().splitlines()
    assert first == f"{NAME}:Q4_0: 121 kB, architecture llama, checksums agree"
    assert Path(path).read_bytes() == (mini / "mixtral" / "mixtral.Q4_0.gguf").read_bytes()
    *_, command, option, name = last.split()
    by_name = program(command, option, name, "-p", "Hi", "-n", "4", "--temp", "0")
    by_path = program(command, option, path, "-p", "Hi", "-n", "4", "--temp", "0")
    assert (by_name.returncode, by_name.stdout) == (0, by_path.stdout)
    assert json.loads(program("inspect", "--json", name).stdout)["files"][0]["path"] == path

    (listed,) = json.loads(program("list", "--json").stdout)["models"]
    assert (listed["name"], listed["path"], listed["complete"]) == (name, path, True)
    assert (listed["architecture"], listed["quantisation"]) == ("llama", "Q4_0")
    header, row = program("list").stdout.decode().splitlines()
    assert header.split() == ["name", "size", "architecture", "quantisation", "modified"]
    assert row.split()[:5] == [name, "121", "kB", "llama", "Q4_0"]

    refused = program("rm", name)
    assert refused.returncode == 1
    assert b"--yes" in refused.stderr
    assert Path(path).exists()
    removed = program("rm", "--yes", name)
    assert removed.stdout.decode() == f"{name}: deleted, 121 kB are free again\n"
    assert not cached(tmp_path).exists()
    assert b"colibri-mmap pull" in program("list").stderr


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (f"{NAME}:Q5_K_M", "has no Q5_K_M; there is Q4_0 (121 kB), Q8_0 (189 kB)"),
        (f"{NAME}/absent.gguf", "has no absent.gguf; there is"),
        ("bird/plain", "bird/plain: holds no GGUF files"),
        (
            "bird/many",
            "name one of its models, as in bird/many:BF16; there is BF16 (2 bytes)",
        ),
        ("bird/bert", "architecture 'bert' is not supported; --force"),
    ],
)
def test_what_cannot_be_pulled(
    program: Colibri, hub: HubServer, tmp_path: Path, name: str, says: str
) -> None:
    hub.repos["bird/plain"] = Repo({"model.safetensors": b"?"})
    hub.repos["bird/many"] = Repo({"a-Q2_K.gguf": b"???", "a-BF16.gguf": b"??"})
    hub.repos["bird/bert"] = Repo({"a-Q8_0.gguf": b"?"}, architecture="bert")
    done = program("pull", name)
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr.startswith(b"error: ")
    assert says in done.stderr.decode()
    assert done.stderr.count(b"\n") == 1
    assert hub.contents() == []
    assert not list(tmp_path.glob("hf/hub/models--*"))


def test_a_pulled_file_that_is_no_model(program: Colibri, hub: HubServer) -> None:
    hub.repos["bird/noise"] = Repo({"a-Q8_0.gguf": b"no GGUF" * 99})
    done = program("pull", "bird/noise")
    assert done.returncode == 1
    assert b"a-Q8_0.gguf: " in done.stderr
    assert done.stderr.count(b"\n") == 1
    (listed,) = json.loads(program("list", "--json").stdout)["models"]
    assert listed["architecture"] is None
    assert "a-Q8_0.gguf" in listed["problem"]
    assert "damaged" in program("list").stdout.decode()


def test_ctrl_c_leaves_what_the_next_pull_goes_on_with(
    program: Colibri, terminal: Terminal, hub: HubServer, tmp_path: Path
) -> None:
    hub.stop_after = 100_000
    content = hub.repos[NAME].files["Mix-Q8_0.gguf"]
    partial = cached(tmp_path) / "blobs" / f"{blob(content)}.incomplete"
    process = terminal("pull", f"{NAME}:q8_0")
    process.expect_exact(f"{NAME}:Q8_0: 189 kB")
    process.expect(r"Mix-Q8_0\.gguf .*100\.0/189\.0 kB")
    wait_for_size(partial, 100_000)
    process.sendintr()
    process.expect_exact("stopped: the same command goes on from here")
    process.expect(pexpect.EOF)
    process.close()
    assert process.exitstatus == 130

    (listed,) = json.loads(program("list", "--json").stdout)["models"]
    assert (listed["name"], listed["complete"]) == (f"{NAME}:Q8_0", False)
    assert (listed["bytes"], listed["total_bytes"]) == (100_000, len(content))
    assert "incomplete, of 189 kB" in program("list").stdout.decode()
    assert partial.read_bytes() == content[:100_000]


def test_a_full_disk_keeps_what_has_arrived(
    program: Colibri, hub: HubServer, variables: dict[str, str], tmp_path: Path
) -> None:
    done = subprocess.run(
        [*COMMAND, "pull", f"{NAME}:Q8_0"],
        env={**environment(tmp_path / "state"), **variables},
        capture_output=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (90_000, -1)),
        timeout=60,
    )
    assert done.returncode == 1
    assert b"File too large; what has arrived is kept" in done.stderr
    assert done.stderr.count(b"\n") == 1
    content = hub.repos[NAME].files["Mix-Q8_0.gguf"]
    partial = cached(tmp_path) / "blobs" / f"{blob(content)}.incomplete"
    assert partial.read_bytes() == content[:90_000]


@pytest.fixture
def stored(mini: Path, tmp_path: Path) -> Path:
    """A model in the cache, as every program lays it out: its path in the snapshot."""
    content = (mini / "mixtral" / "mixtral.Q8_0.gguf").read_bytes()
    blobs, snapshot = cached(tmp_path) / "blobs", cached(tmp_path) / "snapshots" / ("0" * 40)
    for directory in (blobs, snapshot):
        directory.mkdir(parents=True)
    (blobs / blob(content)).write_bytes(content)
    link = snapshot / "Mix-Q8_0.gguf"
    link.symlink_to(f"../../blobs/{blob(content)}")
    return link


def test_verify_compares_a_pulled_model(program: Colibri, stored: Path) -> None:
    sound = program("verify", NAME)
    assert sound.stdout.decode() == f"{NAME}: sound, 189 kB match their checksums\n"
    assert program("verify", stored).stdout.endswith(b": sound, 189 kB match their checksums\n")
    with stored.open("r+b") as file:
        file.seek(-5000, 2)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))
    damaged = program("verify", NAME)
    assert (damaged.returncode, damaged.stdout) == (1, b"")
    assert b"Mix-Q8_0.gguf: the checksum does not match" in damaged.stderr
    assert f"`colibri-mmap rm {NAME}` and `colibri-mmap pull {NAME}`" in damaged.stderr.decode()
    assert damaged.stderr.count(b"\n") == 1


def test_verify_of_a_copy_among_links(program: Colibri, stored: Path) -> None:
    """Nothing tells what the content of a file in place of a link should be."""
    content = stored.read_bytes()
    stored.unlink()
    stored.write_bytes(content)
    done = program("verify", NAME)
    assert done.returncode == 0
    assert b"its structure is sound; only packed files and pulled ones have" in done.stdout


def test_a_pulled_model_that_was_packed(program: Colibri, stored: Path, tmp_path: Path) -> None:
    by_name = program("pack", "-m", NAME, "a.gguf")
    assert f"`colibri-mmap rm {NAME}` frees" in by_name.stderr.decode()
    by_path = program("pack", stored, "b.gguf")
    assert (by_path.returncode, by_path.stderr) == (0, b"")
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()


def test_commands_show_the_name_that_was_typed(program: Colibri, stored: Path) -> None:
    for command in ("inspect", "plan"):
        assert f"{NAME} (Hf)" in program(command, NAME).stdout.decode()
        assert "Mix-Q8_0.gguf (Hf)" in program(command, stored).stdout.decode()
    planned = json.loads(program("plan", NAME, "--json").stdout)
    assert (planned["name"], planned["general_name"]) == (NAME, "Hf")


def test_the_cache_is_no_model(program: Colibri, stored: Path, tmp_path: Path) -> None:
    assert json.loads(program("inspect", "--json", stored.parent).stdout)["experts"] == 8
    for place in (tmp_path / "hf" / "hub", cached(tmp_path), stored.parents[1]):
        done = program("inspect", place)
        assert (done.returncode, done.stdout) == (1, b"")
        assert b"`colibri-mmap list` shows the names" in done.stderr


def test_rm_asks_at_a_terminal(terminal: Terminal, mini: Path, tmp_path: Path) -> None:
    snapshot = cached(tmp_path) / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    shutil.copy(mini / "mixtral" / "mixtral.Q4_0.gguf", snapshot)
    for answer, exists in (("n", True), ("y", False)):
        process = terminal("rm", NAME)
        process.expect_exact(f"delete {NAME}:Q4_0, 121 kB?")
        process.sendline(answer)
        process.expect(pexpect.EOF)
        process.close()
        assert process.exitstatus == (1 if exists else 0)
        assert cached(tmp_path).exists() == exists


def test_every_command_takes_names(variables: dict[str, str]) -> None:
    name = "bird/absent:Q8_0"
    commands = [
        *([command, "-m", name] for command in MODEL_COMMANDS),
        *([command, name] for command in MODEL_COMMANDS),
        *(["serve", "-m", name], ["pack", name, "x.gguf"], ["pack", "-m", name, "x.gguf"]),
    ]
    code = (
        "from colibri_mmap.cli import app\n"
        "from colibri_mmap.errors import ColibriError\n"
        f"for command in {commands}:\n"
        "    try: app(command)\n"
        "    except ColibriError as error: print(error)"
    )
    done = subprocess.run(
        [*COMMAND[:1], "-c", code],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        cwd=ROOT,
    )
    lines = done.stdout.splitlines()
    assert len(lines) == len(commands)
    advice = f"`colibri-mmap pull {name}` fetches it"
    assert [line for line in lines if advice not in line] == []
    assert done.stderr == ""
