"""Models in the cache of the hub: found, named, resolved, deleted; the cache as others write it."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
from huggingface_hub import scan_cache_dir

from colibri_mmap.errors import ArgumentError, ResourceError
from colibri_mmap.runtime.modelstore import (
    StoredModel,
    download_lock,
    find_model,
    find_models,
    remove_model,
    resolve_model,
)

OLD, NEW = "0" * 40, "1" * 40


class Cache:
    """A cache written by hand, as huggingface_hub lays it out."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def repo(self, name: str) -> Path:
        return self.path / f"models--{name.replace('/', '--')}"

    def add(self, name: str, file: str, content: bytes, commit: str = NEW) -> Path:
        """Put a file into a snapshot; the path of the link."""
        repo = self.repo(name)
        blob = repo / "blobs" / hashlib.sha256(content).hexdigest()
        link = repo / "snapshots" / commit / file
        for directory in (blob.parent, link.parent, repo / "refs"):
            directory.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(content)
        up = "../" * len(link.relative_to(repo).parent.parts)
        link.symlink_to(f"{up}blobs/{blob.name}")
        (repo / "refs" / "main").write_text(commit)
        return link

    def add_partial(self, name: str, file: str | None, size: int, mark: str = "") -> Path:
        """Put 10 bytes of an unfinished file; `file` None: nothing tells which one it is."""
        repo = self.repo(name)
        digest = hashlib.sha256(str(file).encode()).hexdigest()
        path = repo / "blobs" / f"{digest}{mark}.incomplete"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(10))
        if file is not None:
            tree = repo / "trees" / f"{NEW}.json"
            tree.parent.mkdir(exist_ok=True)
            known = json.loads(tree.read_bytes())["files"] if tree.exists() else {}
            known[file] = {"size": size, "blob_id": "0", "lfs_sha256": digest, "lfs_size": size}
            tree.write_text(json.dumps({"format_version": 1, "files": known}))
        return path

    def names(self) -> list[str]:
        return [model.name for model in find_models(self.path)]

    def model(self, name: str) -> StoredModel:
        found = find_model(name, self.path)
        assert found is not None
        return found

    def resolve(self, name: str) -> Path:
        return resolve_model(name, self.path)


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "hub")


def test_an_empty_cache(cache: Cache) -> None:
    assert cache.names() == []
    assert find_model("a/b", cache.path) is None


def test_models_of_other_programs_are_found(cache: Cache) -> None:
    link = cache.add("a/one", "one-Q4_K_M.gguf", b"four")
    cache.add("a/one", "Q8_0/one-Q8_0-00001-of-00002.gguf", b"eight")
    cache.add("a/one", "Q8_0/one-Q8_0-00002-of-00002.gguf", b"eight more")
    cache.add("a/one", "mmproj-F16.gguf", b"no model")
    cache.add("b/two--x", "model.gguf", b"unnamed")
    cache.add("c/three", "config.json", b"{}")
    models = {model.name: model for model in find_models(cache.path)}
    assert list(models) == ["a/one:Q4_K_M", "a/one:Q8_0", "b/two--x:model"]
    four, eight = models["a/one:Q4_K_M"], models["a/one:Q8_0"]
    assert (four.path, four.nbytes, four.links) == (link, 4, (link,))
    assert eight.path is not None
    assert eight.path.name == "one-Q8_0-00001-of-00002.gguf"
    assert (eight.nbytes, len(eight.links)) == (15, 2)


@pytest.mark.parametrize(
    "name", ["a/one:Q4_K_M", "A/ONE:q4_k_m", "a/one", "hf.co/a/one:one-q4_k_m"]
)
def test_a_name_becomes_a_path(cache: Cache, name: str) -> None:
    link = cache.add("a/one", "one-Q4_K_M.gguf", b"four")
    assert cache.resolve(name) == link
    assert cache.resolve(f"{link}") == link
    assert cache.resolve("https://huggingface.co/a/one/blob/main/one-Q4_K_M.gguf") == link


def test_a_file_goes_before_a_name(
    cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = cache.add("a/one", "one-Q4_K_M.gguf", b"four")
    monkeypatch.chdir(tmp_path)
    assert cache.resolve("a/one") == link
    (tmp_path / "a" / "one").mkdir(parents=True)
    assert cache.resolve("a/one") == Path("a/one")


def test_unknown_names(cache: Cache) -> None:
    cache.add("a/one", "one-Q4_K_M.gguf", b"four")
    for name in ("a/one:Q8_0", "a/two"):
        with pytest.raises(ArgumentError, match=f"{name}: .*colibri-mmap pull {name}"):
            cache.resolve(name)
    with pytest.raises(ArgumentError, match=r"llama3:8b: no such file, .*owner/name:QUANT"):
        cache.resolve("llama3:8b")
    for path in ("absent.gguf", "a/absent.gguf", "a/one/absent.gguf", "../x/y", "/a/b"):
        assert cache.resolve(path) == Path(path)


def test_several_models(cache: Cache) -> None:
    cache.add("a/one", "one-Q4_K_M.gguf", b"four")
    cache.add("a/one", "one-Q8_0.gguf", b"eight")
    with pytest.raises(ArgumentError, match="name one of them: a/one:Q4_K_M, a/one:Q8_0"):
        cache.resolve("a/one")


def test_the_current_revision_goes_before_others(cache: Cache) -> None:
    new = cache.add("a/one", "one-Q8_0.gguf", b"new", NEW)
    old = cache.add("a/one", "one-Q8_0.gguf", b"older", OLD)
    (cache.repo("a/one") / "refs" / "main").write_text(NEW)
    model = cache.model("a/one")
    assert (model.path, model.nbytes, set(model.links)) == (new, 3, {new, old})


def test_a_revision_with_all_shards_goes_before_one_without(cache: Cache) -> None:
    first, second = (f"m-Q8_0-0000{number}-of-00002.gguf" for number in (1, 2))
    old = cache.add("a/one", first, b"old 1", OLD)
    cache.add("a/one", second, b"old 2", OLD)
    cache.add("a/one", first, b"new", NEW)
    assert cache.resolve("a/one") == old


def test_parts_of_models_are_told_from_models(cache: Cache) -> None:
    cache.add("a/one", "m-Q8_0-00001-of-00002.gguf", b"first")
    model = cache.model("a/one:Q8_0")
    assert (model.path, model.nbytes, model.total_bytes) == (None, 5, None)
    with pytest.raises(ArgumentError, match=r"only a part.*colibri-mmap pull a/one:Q8_0"):
        cache.resolve("a/one")


@pytest.mark.parametrize("mark", ["", ".1a2b3c4d"])
def test_unfinished_files_are_named_where_a_listing_tells(cache: Cache, mark: str) -> None:
    path = cache.add_partial("a/one", "one-Q8_0.gguf", 99, mark)
    model = cache.model("a/one:Q8_0")
    assert (model.path, model.nbytes, model.total_bytes) == (None, 10, 99)
    assert model.partials == (path,)


def test_unfinished_files_that_nothing_names(cache: Cache) -> None:
    path = cache.add_partial("a/one", None, 99)
    tree = cache.repo("a/one") / "trees" / f"{NEW}.json"
    tree.parent.mkdir()
    for content in ("", "[]", "{}", '{"format_version": 2, "files": {"x": {}}}'):
        tree.write_text(content)
        (model,) = find_models(cache.path)
        assert (model.name, model.path, model.nbytes) == ("a/one", None, 10)
        assert model.partials == (path,)
    link = cache.add("a/one", "one-Q4_K_M.gguf", b"four")
    assert cache.resolve("a/one") == link


def test_removing_the_last_model_leaves_nothing(cache: Cache) -> None:
    cache.add("a/one", "one-Q8_0.gguf", b"content")
    cache.add_partial("a/one", "one-Q8_0.gguf", 99)
    cache.add("a/two", "two-Q8_0.gguf", b"other")
    assert remove_model(cache.model("a/one"), cache.path) == len(b"content") + 10
    assert not cache.repo("a/one").exists()
    assert cache.names() == ["a/two:Q8_0"]


def test_removing_leaves_what_is_not_of_the_model(cache: Cache) -> None:
    cache.add("a/one", "one-Q8_0.gguf", b"content")
    kept = [
        cache.add("a/one", "one-Q4_K_M.gguf", b"four"),
        cache.add("a/one", "config.json", b"{}"),
        cache.add("a/one", "copy.bin", b"content"),
    ]
    assert remove_model(cache.model("a/one:Q8_0"), cache.path) == 0
    assert [path.read_bytes() for path in kept] == [b"four", b"{}", b"content"]
    assert cache.names() == ["a/one:Q4_K_M"]
    assert scan_cache_dir(cache.path).warnings == []


def test_removing_takes_every_revision(cache: Cache) -> None:
    cache.add("a/one", "one-Q8_0.gguf", b"new", NEW)
    cache.add("a/one", "one-Q8_0.gguf", b"older", OLD)
    cache.add("a/one", "config.json", b"{}", OLD)
    assert remove_model(cache.model("a/one"), cache.path) == 8
    found = scan_cache_dir(cache.path)
    assert found.size_on_disk == 2
    assert found.warnings == []


def test_removing_what_a_cache_without_links_holds(cache: Cache) -> None:
    link = cache.add("a/one", "one-Q8_0.gguf", b"content")
    blob = link.resolve()
    link.unlink()
    blob.rename(link)
    assert remove_model(cache.model("a/one"), cache.path) == 7
    assert not cache.repo("a/one").exists()


def test_content_that_lies_elsewhere_stays(cache: Cache, tmp_path: Path) -> None:
    link = cache.add("a/one", "one-Q8_0.gguf", b"content")
    blob = link.resolve()
    elsewhere = tmp_path / "my-model.gguf"
    blob.rename(elsewhere)
    blob.symlink_to(elsewhere)
    assert remove_model(cache.model("a/one"), cache.path) == 0
    assert elsewhere.read_bytes() == b"content"
    assert not cache.repo("a/one").exists()


def test_a_download_that_runs_is_not_removed(cache: Cache) -> None:
    path = cache.add_partial("a/one", "one-Q8_0.gguf", 99)
    digest = path.name.removesuffix(".incomplete")
    with (
        download_lock(cache.path, "a/one", digest),
        pytest.raises(ResourceError, match="another program is downloading"),
    ):
        remove_model(cache.model("a/one"), cache.path)
    assert path.exists()
    assert remove_model(cache.model("a/one"), cache.path) == 10


def test_a_damaged_repository_is_not_touched(cache: Cache) -> None:
    link = cache.add("a/one", "one-Q8_0.gguf", b"content")
    (link.parent / "lost.bin").symlink_to("../../blobs/absent")
    with pytest.raises(ResourceError, match=r"damaged.*Blob missing"):
        remove_model(cache.model("a/one"), cache.path)
    assert link.read_bytes() == b"content"


def test_a_cache_behind_a_link(cache: Cache, tmp_path: Path) -> None:
    cache.add("a/one", "one-Q8_0.gguf", b"content")
    moved = tmp_path / "large-disk"
    shutil.move(cache.path, moved)
    cache.path.symlink_to(moved)
    assert cache.names() == ["a/one:Q8_0"]
    assert remove_model(cache.model("a/one"), cache.path) == 7
    assert cache.names() == []
