"""Downloads from a hub of our own, over real connections, into a cache that others read."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hubserver import TOKEN, HubServer, Repo, blob, git_id
from huggingface_hub import constants, hf_hub_download, scan_cache_dir, try_to_load_from_cache
from huggingface_hub.utils import close_session

from colibri_mmap.errors import ArgumentError, ColibriError, ResourceError
from colibri_mmap.runtime.download import WAITS, bytes_to_fetch, fetch
from colibri_mmap.runtime.hub import look_up
from colibri_mmap.runtime.modelstore import INCOMPLETE, download_lock, find_models

ROOT = Path(__file__).parents[2]
NAME = "owner/name"
CONTENT = bytes(range(256)) * 4000  # 1 MB
REPORTS = list[tuple[str, int, int]]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    server = HubServer()
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    server.repos[NAME] = Repo({"a.gguf": CONTENT})
    yield server
    server.close()
    close_session()


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def pull(cache: Path, *paths: str, waits: list[float] | None = None) -> tuple[list[Path], REPORTS]:
    """Fetch files of the repository (a.gguf); their paths, and the progress that was reported."""
    reports: REPORTS = []
    repository = look_up(NAME, "main")
    files = [repository.files[path] for path in paths or ["a.gguf"]]
    pauses = [] if waits is None else waits
    found = fetch(repository, files, cache, lambda *r: reports.append(r), pauses.append)
    return found, reports


def partial(cache: Path, content: bytes = CONTENT) -> Path:
    return cache / "models--owner--name" / "blobs" / f"{blob(content)}{INCOMPLETE}"


def leave_partial(cache: Path, content: bytes) -> None:
    path = partial(cache)
    path.parent.mkdir(parents=True)
    path.write_bytes(content)


def test_a_file_arrives_where_other_programs_look(hub: HubServer, cache: Path) -> None:
    (path,), reports = pull(cache)
    assert path.read_bytes() == CONTENT
    assert try_to_load_from_cache(NAME, "a.gguf", cache_dir=cache) == str(path)
    found = scan_cache_dir(cache)
    assert found.warnings == []
    assert [(repo.repo_id, repo.size_on_disk) for repo in found.repos] == [(NAME, len(CONTENT))]
    assert found.incomplete_files == frozenset()
    assert {stage for stage, _, _ in reports} == {"a.gguf", "checking a.gguf"}
    assert reports[-1] == ("checking a.gguf", len(CONTENT), len(CONTENT))


def test_huggingface_hub_takes_what_we_fetched(hub: HubServer, cache: Path) -> None:
    (path,), _ = pull(cache)
    before = len(hub.contents())
    assert hf_hub_download(NAME, "a.gguf", cache_dir=cache, endpoint=hub.url) == str(path)
    assert len(hub.contents()) == before


def test_what_huggingface_hub_fetched_is_taken(hub: HubServer, cache: Path) -> None:
    path = Path(hf_hub_download(NAME, "a.gguf", cache_dir=cache, endpoint=hub.url))
    before = len(hub.contents())
    assert [model.path for model in find_models(cache)] == [path]
    assert pull(cache)[0] == [path]
    assert len(hub.contents()) == before


def test_what_is_here_is_not_fetched_again(hub: HubServer, cache: Path) -> None:
    pull(cache)
    before = len(hub.contents())
    hub.repos[NAME].files = {"a.gguf": CONTENT, "README.md": b"a new commit"}
    (path,), _ = pull(cache)
    assert path.parent.name == hub.repos[NAME].commit
    assert path.read_bytes() == CONTENT
    assert len(hub.contents()) == before
    blobs = list((cache / "models--owner--name" / "blobs").iterdir())
    assert [path.name for path in blobs] == [blob(CONTENT)]


def test_all_shards_in_directories(hub: HubServer, cache: Path) -> None:
    names = [f"Q8_0/m-{number:05d}-of-00003.gguf" for number in (1, 2, 3)]
    hub.repos[NAME] = Repo({name: name.encode() * 999 for name in names})
    paths, reports = pull(cache, *names)
    assert [path.read_bytes() for path in paths] == [name.encode() * 999 for name in names]
    assert len({path.parent for path in paths}) == 1
    assert "2/3 m-00002-of-00003.gguf" in {stage for stage, _, _ in reports}


def test_a_small_file_that_git_keeps(hub: HubServer, cache: Path) -> None:
    hub.repos[NAME].in_git = True
    (path,), _ = pull(cache)
    assert path.resolve().name == git_id(CONTENT)
    assert path.read_bytes() == CONTENT


def test_a_killed_download_goes_on_where_it_was(hub: HubServer, cache: Path) -> None:
    hub.stop_after = 700_000
    code = (
        "import sys\nfrom pathlib import Path\n"
        "from colibri_mmap.runtime.hub import look_up\n"
        "from colibri_mmap.runtime.download import fetch\n"
        f"repository = look_up({NAME!r}, 'main')\n"
        "fetch(repository, list(repository.files.values()), Path(sys.argv[1]), print)"
    )
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, str(cache)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 60
        while not (partial(cache).is_file() and partial(cache).stat().st_size == 700_000):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    hub.stop_after = None
    hub.requests.clear()
    (path,), reports = pull(cache)
    assert path.read_bytes() == CONTENT
    assert [request.range for request in hub.contents()] == [f"bytes=700000-{len(CONTENT) - 1}"]
    assert reports[0] == ("a.gguf", 700_000, len(CONTENT))


def test_connections_that_break_are_continued(hub: HubServer, cache: Path) -> None:
    hub.stop_after = 300_000
    hub.go_on.set()
    waits: list[float] = []
    (path,), _ = pull(cache, waits=waits)
    assert path.read_bytes() == CONTENT
    starts = [str(request.range).split("-")[0] for request in hub.contents()]
    assert starts == ["bytes=0", "bytes=300000", "bytes=600000", "bytes=900000"]
    assert waits == []


def test_a_busy_hub_is_asked_again(hub: HubServer, cache: Path) -> None:
    hub.failures = [503, 429, 500]
    waits: list[float] = []
    (path,), reports = pull(cache, waits=waits)
    assert path.read_bytes() == CONTENT
    assert waits == list(WAITS[:3])
    assert ("a.gguf: the hub answered 429, trying again", 0, len(CONTENT)) in reports


def test_a_hub_that_stays_busy_is_given_up(hub: HubServer, cache: Path) -> None:
    leave_partial(cache, CONTENT[:500_000])
    hub.failures = [503] * 20
    waits: list[float] = []
    with pytest.raises(ResourceError, match=r"at 49% \(the hub answered 503\)"):
        pull(cache, waits=waits)
    assert waits == list(WAITS)
    assert partial(cache).read_bytes() == CONTENT[:500_000]


def test_a_server_without_ranges_sends_all_again(hub: HubServer, cache: Path) -> None:
    leave_partial(cache, b"\1" * 5000)
    hub.ignore_ranges = True
    (path,), _ = pull(cache)
    assert path.read_bytes() == CONTENT


def test_more_than_the_file_holds_is_thrown_away(hub: HubServer, cache: Path) -> None:
    leave_partial(cache, CONTENT + b"more")
    (path,), _ = pull(cache)
    assert path.read_bytes() == CONTENT


@pytest.mark.parametrize("arrived", [b"", b"\1" * 1000, b"\1" * len(CONTENT)])
def test_a_wrong_checksum_deletes_the_file(hub: HubServer, cache: Path, arrived: bytes) -> None:
    leave_partial(cache, arrived)
    hub.damage = not arrived
    with pytest.raises(ResourceError, match=f"a.gguf: its checksum is .*{blob(CONTENT)}.*deleted"):
        pull(cache)
    assert not partial(cache).exists()
    assert [path for path in cache.rglob("*.gguf") if path.exists()] == []
    hub.damage = False
    (path,), _ = pull(cache)
    assert path.read_bytes() == CONTENT


def test_a_disk_that_is_too_small_is_told_before(hub: HubServer, cache: Path) -> None:
    hub.repos[NAME].sizes = {"a.gguf": 10**17}
    with pytest.raises(ResourceError, match=r"100000000.00 GB are to be downloaded.*HF_HOME"):
        pull(cache)
    assert hub.contents() == []


def test_what_is_left_to_fetch(hub: HubServer, cache: Path) -> None:
    leave_partial(cache, CONTENT[:1000])
    repository = look_up(NAME, "main")
    files = list(repository.files.values())
    assert bytes_to_fetch(repository, files, cache) == len(CONTENT) - 1000
    pull(cache)
    assert bytes_to_fetch(repository, files, cache) == 0


def test_two_programs_do_not_fetch_the_same(hub: HubServer, cache: Path) -> None:
    with (
        download_lock(cache, NAME, blob(CONTENT)),
        pytest.raises(ResourceError, match="another program is downloading"),
    ):
        pull(cache)
    assert hub.contents() == []
    assert pull(cache)[0][0].read_bytes() == CONTENT


def test_the_token_goes_to_the_hub_only(
    hub: HubServer, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repos[NAME].private = hub.repos[NAME].gated = True
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert pull(cache)[0][0].read_bytes() == CONTENT
    asked = [request for request in hub.requests if NAME in request.path]
    assert {request.token for request in asked} == {f"Bearer {TOKEN}"}
    assert [request.token for request in hub.contents()] == [None]


@pytest.mark.parametrize(
    ("repo", "token", "error", "says"),
    [
        (Repo({"a.gguf": b"x"}, private=True), None, ArgumentError, "no such repository.*HF_TOKEN"),
        (Repo({"a.gguf": b"x"}, gated=True), None, ArgumentError, "conditions.*owner/name.*HF_TOK"),
        (Repo({"a.gguf": b"x"}, gated=True), "hf_other", ArgumentError, "conditions.*hf auth"),
        (Repo({"a.gguf": b"x"}, missing={"a.gguf"}), None, ArgumentError, "no file 'a.gguf'"),
        (None, None, ArgumentError, "no such repository"),
    ],
)
def test_refusals_say_what_to_do(
    hub: HubServer,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    repo: Repo | None,
    token: str | None,
    error: type[ColibriError],
    says: str,
) -> None:
    hub.repos = {} if repo is None else {NAME: repo}
    if token is not None:
        monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(error, match=f"owner/name: .*{says}"):
        pull(cache)


def test_an_unknown_revision(hub: HubServer) -> None:
    with pytest.raises(ArgumentError, match="owner/name: has no revision 'v9'"):
        look_up(NAME, "v9")


def test_without_network(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ResourceError, match=r"127\.0\.0\.1:9 cannot be reached.*check the network"):
        look_up(NAME, "main")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ResourceError, match="HF_HUB_OFFLINE"):
        look_up(NAME, "main")


def test_paths_that_leave_the_cache_are_not_taken(hub: HubServer) -> None:
    hub.repos[NAME].files = {"../../a.gguf": CONTENT, "b.gguf": CONTENT}
    assert list(look_up(NAME, "main").files) == ["b.gguf"]


def test_the_listing_is_kept_as_the_hub_keeps_it(hub: HubServer, cache: Path) -> None:
    from huggingface_hub._tree_cache import read_tree_cache

    (path,), _ = pull(cache)
    entries = read_tree_cache(str(cache / "models--owner--name"), path.parent.name)
    assert entries is not None
    assert entries["a.gguf"].lfs_sha256 == blob(CONTENT)
    assert entries["a.gguf"].lfs_size == len(CONTENT)
    tree = cache / "models--owner--name" / "trees" / f"{path.parent.name}.json"
    assert json.loads(tree.read_bytes())["format_version"] == 1
