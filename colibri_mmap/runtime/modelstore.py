"""The GGUF models in the cache of the Hugging Face hub, whichever program put them there.

    models--OWNER--NAME/refs/main              the commit that a branch was at
    models--OWNER--NAME/snapshots/COMMIT/PATH  a link to the content of a file
    models--OWNER--NAME/blobs/HASH             content; HASH.incomplete while it arrives
    models--OWNER--NAME/trees/COMMIT.json      size and hash of the files of a commit

Source: the guide "Understand caching" of huggingface_hub, and its `_tree_cache.py`.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from colibri_mmap.errors import ArgumentError, ResourceError
from colibri_mmap.runtime.modelnames import (
    ModelFiles,
    Reference,
    could_be_name,
    group_files,
    is_address,
    matching,
    parse_reference,
)

INCOMPLETE = ".incomplete"
TREE_VERSION = 1


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model of a repository as far as it is here.

    `path` is its first file and None while files are missing; `links` are its files in every
    snapshot, `partials` what has arrived of others. `files` is None where nothing tells which
    model a partial file belongs to. `total_bytes` is None where it is not known.
    """

    repo: str
    files: ModelFiles | None
    path: Path | None
    nbytes: int
    total_bytes: int | None
    modified: float
    links: tuple[Path, ...]
    partials: tuple[Path, ...]

    @property
    def name(self) -> str:
        """What -m takes."""
        return f"{self.repo}:{self.files.label}" if self.files else self.repo


def hub_cache() -> Path:
    """The cache that all programs share: HF_HUB_CACHE, or `hub` in HF_HOME."""
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE)


def repository_directory(cache: Path, repo: str) -> Path:
    """Where the cache keeps a repository `owner/name`."""
    return cache / "--".join(("models", *repo.split("/")))


def find_models(cache: Path) -> list[StoredModel]:
    """All models in a cache, by name."""
    models: list[StoredModel] = []
    for directory in cache.glob("models--*--*"):
        repo = "/".join(directory.name.split("--", 2)[1:])
        models.extend(_models_of(repo, directory))
    return sorted(models, key=lambda model: model.name.casefold())


def find_model(text: str, cache: Path) -> StoredModel | None:
    """The one model that a name means, complete or not; ArgumentError if several do."""
    reference = parse_reference(text)
    here = [m for m in find_models(cache) if m.repo.casefold() == reference.repo.casefold()]
    found = _meant(here, reference)
    if len(found) > 1:
        names = ", ".join(model.name for model in found)
        raise ArgumentError(f"{text}: there are {len(found)}, name one of them: {names}")
    return found[0] if found else None


def resolve_model(text: str, cache: Path | None = None) -> Path:
    """The file of a model, given its path or its name in the cache; without network.

    What can only be a path is returned as it is: opening it says what is wrong.
    """
    path = Path(text)
    if not text:
        raise ArgumentError("the name of the model is empty: give a path, or owner/name:QUANT")
    if path.is_dir() and _of_a_cache(path):
        raise ArgumentError(
            f"{path}: is a part of the hub's cache, whose models are opened by name; "
            "`colibri-mmap list` shows the names"
        )
    if path.exists() or not could_be_name(text):
        return path
    if "/" not in text:
        raise ArgumentError(
            f"{text}: no such file, and the names of models are owner/name:QUANT; "
            "`colibri-mmap list` shows what is here"
        )
    model = find_model(text, cache or hub_cache())
    if model is None:
        if text.endswith(".gguf") and not is_address(text):
            return path  # more likely the path of a file
        raise ArgumentError(
            f"{text}: no such file, and no such model was pulled; "
            f"`colibri-mmap pull {text}` fetches it, `colibri-mmap list` shows what is here"
        )
    if model.path is None:
        raise ArgumentError(
            f"{model.name}: only a part of it is here; `colibri-mmap pull {model.name}` goes on"
        )
    return model.path


def remove_model(model: StoredModel, cache: Path) -> int:
    """Delete a model's files from the cache, and what else no one refers to; the bytes freed.

    Content that other files refer to stays, as does everything of the repository that is no part
    of the model. ResourceError while a program is downloading it.
    """
    directory = repository_directory(cache, model.repo)
    content = {file.resolve(): file.stat().st_size for file in (*model.links, *model.partials)}
    with ExitStack() as stack:
        for partial in model.partials:
            stack.enter_context(download_lock(cache, model.repo, _blob_name(partial)))
        for partial in model.partials:
            partial.unlink()
    if model.links:
        _remove_links(model.links, directory, cache)
    _remove_if_empty(directory)
    return sum(size for path, size in content.items() if not path.exists())


def _remove_links(links: Sequence[Path], directory: Path, cache: Path) -> None:
    """Delete files of snapshots, and their content where it is not another file's, too."""
    from huggingface_hub import scan_cache_dir

    wanted = {link.parent.resolve() / link.name for link in links}
    found = scan_cache_dir(cache)
    files = [
        file
        for repo in found.repos
        for revision in repo.revisions
        for file in revision.files
        if file.file_path in wanted
    ]
    if len(files) != len(wanted):
        reasons = "; ".join(str(error) for error in found.warnings if directory.name in str(error))
        raise ResourceError(f"{directory}: is damaged ({reasons}); delete the whole directory")
    strategy = found.delete_files(*files)
    strategy.execute()
    left = [path for path in (*strategy.files, *strategy.blobs) if os.path.lexists(path)]
    if left:
        raise ResourceError(f"{left[0]}: cannot be deleted; see to its permissions")


@contextmanager
def download_lock(cache: Path, repo: str, blob: str) -> Iterator[None]:
    """Keep every program off the content of one file; ResourceError if one is at it."""
    directory = repository_directory(cache, repo).name
    path = cache / ".locks" / directory / f"{blob}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ResourceError(
                f"{repo}: another program is downloading it; wait for that to end"
            ) from None
        yield


def _of_a_cache(directory: Path) -> bool:
    """A cache of the hub, or the place of a repository there; snapshots are plain directories."""
    place = directory.absolute()
    inside = place.name in ("blobs", "refs", "snapshots", "trees")
    repository = place.parent if inside else place
    return repository.name.startswith("models--") or any(directory.glob("models--*--*"))


def _meant(models: Sequence[StoredModel], reference: Reference) -> list[StoredModel]:
    named = [model.files for model in models if model.files is not None]
    wanted = matching(named, reference)
    unnamed = reference.label is None and reference.file is None
    if unnamed and len(wanted) > 1:  # one that is complete goes before what was left half done
        complete = [model.files for model in models if model.path is not None]
        wanted = [files for files in wanted if files in complete] or wanted
    found = [model for model in models if model.files is not None and model.files in wanted]
    return found or [model for model in models if unnamed]


def _models_of(repo: str, directory: Path) -> Iterator[StoredModel]:
    """The models of one repository, from all its snapshots and unfinished downloads."""
    snapshots = _snapshots(directory)
    links: dict[str, list[Path]] = {}
    for snapshot in snapshots:
        for link in snapshot.rglob("*.gguf"):
            if link.is_file():
                links.setdefault(link.relative_to(snapshot).as_posix(), []).append(link)
    listed = _listed_files(directory)
    partials: dict[str, list[Path]] = {}
    unknown = []
    for partial in directory.glob(f"blobs/*{INCOMPLETE}"):
        path, _ = listed.get(_blob_name(partial), (None, 0))
        if path is None:
            unknown.append(partial)
        else:
            partials.setdefault(path, []).append(partial)
    sizes = dict(listed.values())
    siblings = {(one.stem, one.shards): one for one in group_files(sizes)}
    for files in group_files({**links, **partials}):
        whole = siblings.get((files.stem, files.shards), files)
        yield _stored(repo, whole, snapshots, links, partials, sizes)
    if unknown:
        newest = max(partial.stat().st_mtime for partial in unknown)
        nbytes = sum(partial.stat().st_size for partial in unknown)
        yield StoredModel(repo, None, None, nbytes, None, newest, (), tuple(unknown))


def _stored(
    repo: str,
    files: ModelFiles,
    snapshots: Sequence[Path],
    links: dict[str, list[Path]],
    partials: dict[str, list[Path]],
    sizes: dict[str, int],
) -> StoredModel:
    """One model of a repository: of the snapshots that have all of it, the first."""
    present = [path for path in files.paths if path in links]
    arriving = [part for path in files.paths for part in partials.get(path, ())]
    chosen: list[Path] = []
    if len(present) == files.shards:
        for snapshot in snapshots:
            chosen = [snapshot / path for path in files.paths]
            if all(link.is_file() for link in chosen):
                break
            chosen = []
    counted = chosen or [*(links[path][0] for path in present), *arriving]
    known = files.complete and all(path in sizes for path in files.paths)
    total = sum(sizes[path] for path in files.paths) if known else None
    nbytes = sum(file.stat().st_size for file in counted)
    return StoredModel(
        repo,
        files,
        chosen[0] if chosen else None,
        nbytes,
        nbytes if chosen else total,
        max(file.stat().st_mtime for file in counted),
        tuple(link for path in present for link in links[path]),
        tuple(arriving),
    )


def _snapshots(directory: Path) -> list[Path]:
    """The snapshots of a repository: that of the branch `main` first, then the newest."""
    main = directory / "refs" / "main"
    current = main.read_text("utf-8").strip() if main.is_file() else ""
    found = [path for path in directory.glob("snapshots/*") if path.is_dir()]
    found.sort(key=lambda path: (path.name == current, path.stat().st_mtime), reverse=True)
    return found


def _listed_files(directory: Path) -> dict[str, tuple[str, int]]:
    """Path and size of the files of the repository by the name of their blob, where it is known."""
    found: dict[str, tuple[str, int]] = {}
    trees = sorted(directory.glob("trees/*.json"), key=lambda path: path.stat().st_mtime)
    for tree in trees:
        try:
            content = json.loads(tree.read_bytes())
            if content["format_version"] != TREE_VERSION:
                continue
            for path, entry in content["files"].items():
                blob = entry.get("lfs_sha256") or entry["blob_id"]
                found[str(blob)] = (str(path), int(entry.get("lfs_size") or entry["size"]))
        except (ValueError, KeyError, TypeError, AttributeError):
            continue  # another program's file, and only a help
    return found


def _blob_name(partial: Path) -> str:
    """The name that the content of an unfinished download will have."""
    return partial.name.split(".")[0]  # some programs put a mark of their own behind it


def _remove_if_empty(directory: Path) -> None:
    """Delete what frames a repository once nothing of its content is left."""
    content = [*directory.glob("blobs/*"), *directory.glob("snapshots/**/*")]
    if not any(path.is_symlink() or path.is_file() for path in content):
        shutil.rmtree(directory)
