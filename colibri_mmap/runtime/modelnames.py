"""Names of models on the Hugging Face hub: what people type, and which files that means."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from urllib.parse import unquote

from colibri_mmap.errors import ArgumentError

EXPECTED = "a model is named owner/name, owner/name:QUANT or by its address on huggingface.co"

# What is taken of a repository when nobody says which: the usual 4 bits, then their neighbours.
USUAL = (
    *("Q4_K_M", "UD-Q4_K_XL", "Q4_K_L", "MXFP4_MOE", "MXFP4", "Q4_K_S", "IQ4_XS", "UD-IQ4_XS"),
    *("IQ4_NL", "Q4_0", "Q4_1", "Q5_K_M", "UD-Q5_K_XL", "Q5_K_S", "Q3_K_M", "UD-Q3_K_XL"),
    *("Q6_K", "UD-Q6_K_XL", "Q8_0"),
)

_ADDRESS = re.compile(r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/", re.IGNORECASE)
_REFERENCE = re.compile(
    r"(?P<repo>[a-z0-9][\w.-]*/[a-z0-9][\w.-]*)"
    r"(?:(?:/(?:resolve|blob|raw)/(?P<revision>[^/]+))?/(?P<file>.+\.gguf)|:(?P<label>.+))?/?",
    re.IGNORECASE | re.ASCII,
)
_WORD = re.compile(r"[a-z0-9][\w-]*(?::[\w-]+)?", re.IGNORECASE | re.ASCII)
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})", re.DOTALL)
_QUANTISATION = re.compile(
    r"(?<![A-Z0-9])(?:(?:UD|i1)-)?"
    r"(?:I?Q\d(?:_[A-Z0-9]+)+|TQ\d_\d|(?:MX|NV)FP4(?:_[A-Z0-9]+)*|BF16|FP?16|FP?32)"
    r"(?![A-Z0-9])",
    re.IGNORECASE,
)
_NO_MODEL = re.compile(r"(?:^|[-_./])(?:mmproj|imatrix)(?:[-_./]|$)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Reference:
    """What a person asked for: a repository and, of its models, a label or a file."""

    repo: str
    revision: str = "main"
    label: str | None = None
    file: str | None = None


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The files of one model in a repository; `shards` is how many their names promise.

    `stem` is the path without shard number and suffix. `label` tells it from the repository's
    other models: its quantisation if it is the only one of it, else the stem.
    """

    stem: str
    label: str
    quantisation: str | None
    shards: int
    paths: tuple[str, ...]

    @property
    def complete(self) -> bool:
        """All shards are among the paths."""
        return len(self.paths) == self.shards


def parse_reference(text: str) -> Reference:
    """The repository, label and file of a name or an address; ArgumentError for anything else."""
    address = _ADDRESS.match(text)
    name = text if address is None else unquote(re.split(r"[?#]", text[address.end() :])[0])
    match = _REFERENCE.fullmatch(name)
    if match is None:
        raise ArgumentError(f"{text}: {EXPECTED}")
    return Reference(match["repo"], match["revision"] or "main", match["label"], match["file"])


def could_be_name(text: str) -> bool:
    """The text has the form of a model's name or address; a path may have it too."""
    return (
        is_address(text)
        or _REFERENCE.fullmatch(text) is not None
        or _WORD.fullmatch(text) is not None
    )


def is_address(text: str) -> bool:
    """The text can only mean the hub, never a file."""
    return _ADDRESS.match(text) is not None


def quantisation_of(stem: str) -> str | None:
    """The quantisation that a file's name tells, or its directory's: Q4_K_M, UD-IQ2_XXS, BF16."""
    path = PurePosixPath(stem)
    for text in (path.name, *reversed(path.parent.parts)):
        found = _QUANTISATION.findall(text)
        if found:
            name = str(found[-1])
            return "i1-" + name[3:].upper() if name.lower().startswith("i1-") else name.upper()
    return None


def group_files(paths: Iterable[str]) -> list[ModelFiles]:
    """The models that a repository's files make up; what only accompanies models is left out."""
    groups: dict[tuple[str, int], list[str]] = {}
    for path in sorted(paths):
        if not path.endswith(".gguf") or _NO_MODEL.search(path.removesuffix(".gguf")):
            continue
        stem = path.removesuffix(".gguf")
        shard = _SHARD.fullmatch(stem)
        key = (shard["stem"], int(shard["count"])) if shard else (stem, 1)
        groups.setdefault(key, []).append(path)
    quantisations = [quantisation_of(stem) for stem, _ in groups]
    models = []
    for ((stem, shards), files), found in zip(groups.items(), quantisations, strict=True):
        alone = found is not None and quantisations.count(found) == 1
        models.append(ModelFiles(stem, str(found) if alone else stem, found, shards, tuple(files)))
    return models


def matching(models: Sequence[ModelFiles], reference: Reference) -> list[ModelFiles]:
    """The models that a reference can mean: all if it names none, none if there is no such one."""
    if reference.file is not None:
        return [model for model in models if reference.file in model.paths]
    if reference.label is None:
        return list(models)
    wanted = reference.label.removesuffix(".gguf").casefold()
    by_name = [m for m in models if wanted in (_name(m), m.label.casefold(), m.stem.casefold())]
    exact = [model for model in models if _quantisation(model) == wanted]
    prefixed = [model for model in models if _quantisation(model).endswith(f"-{wanted}")]
    return by_name or exact or prefixed


def usual(models: Sequence[ModelFiles]) -> list[ModelFiles]:
    """Of several models those that most people take; all of them if none is usual."""
    for quantisation in USUAL:
        found = [model for model in models if model.quantisation == quantisation]
        if found and len(models) > 1:
            return found
    return list(models)


def _name(model: ModelFiles) -> str:
    return PurePosixPath(model.stem).name.casefold()


def _quantisation(model: ModelFiles) -> str:
    return (model.quantisation or "").casefold()
