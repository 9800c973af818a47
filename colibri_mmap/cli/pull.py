"""`pull`: fetch a model from the Hugging Face hub."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from colibri_mmap.cli import options
from colibri_mmap.errors import ArgumentError, UnsupportedError
from colibri_mmap.quantities import byte_size

if TYPE_CHECKING:
    from colibri_mmap.runtime.hub import Repository
    from colibri_mmap.runtime.modelnames import ModelFiles, Reference

NO_LANGUAGE_MODEL = "clip"  # what the hub tells of a repository whose first file is a projector


def pull(
    name: Annotated[
        str,
        typer.Argument(
            metavar="REPO[:QUANT]",
            help="owner/name, owner/name:Q4_K_M, owner/name/file.gguf, or the address on the hub.",
        ),
    ],
    force: Annotated[
        bool,
        typer.Option(
            "--force", metavar="", help="Fetch a model of an unsupported architecture, too."
        ),
    ] = False,
    verbose: options.Verbose = False,
) -> None:
    """Fetch a model from the Hugging Face hub.

    Without QUANT it is Q4_K_M, or what is closest to it. A pull that was interrupted goes on where
    it stopped. Files lie in the cache that other programs use too (HF_HOME), checked against the
    hub's checksums; HF_TOKEN opens private repositories.
    """
    from colibri_mmap.cli.console import ProgressBar, messages, printable, results
    from colibri_mmap.format.gguf import open_gguf
    from colibri_mmap.runtime.download import bytes_to_fetch, fetch
    from colibri_mmap.runtime.hub import look_up
    from colibri_mmap.runtime.modelnames import parse_reference
    from colibri_mmap.runtime.modelstore import hub_cache

    reference = parse_reference(name)
    repository = look_up(reference.repo, reference.revision)
    model = _choose(repository, reference)
    full_name = f"{repository.name}:{model.label}"
    if repository.architecture not in (None, NO_LANGUAGE_MODEL) and not force:
        _check_architecture(full_name, str(repository.architecture), "--force fetches it")
    files = [repository.files[path] for path in model.paths]
    cache = hub_cache()
    size = sum(file.nbytes for file in files)
    needed = bytes_to_fetch(repository, files, cache)
    console = messages()
    if needed and console.is_terminal:
        rest = "" if needed == size else f", of which {byte_size(needed)} are left to fetch"
        console.print(printable(f"{full_name}: {byte_size(size)}{rest}"), markup=False)
    try:
        with ProgressBar("bytes") as bar:
            paths = fetch(repository, files, cache, bar)
    except KeyboardInterrupt:
        print("stopped: the same command goes on from here", file=sys.stderr)
        raise
    architecture = open_gguf(paths[0]).architecture
    if not force:
        _check_architecture(full_name, architecture, f"`colibri-mmap rm {full_name}` deletes it")
    results().print(
        printable(
            f"{full_name}: {byte_size(size)}, architecture {architecture}, checksums agree\n"
            f"{paths[0]}\n"
            f"next: colibri-mmap {'inspect' if force else 'chat -m'} {full_name}"
        ),
        markup=False,
        soft_wrap=True,
    )


def _choose(repository: Repository, reference: Reference) -> ModelFiles:
    """The one model that is meant; an ArgumentError lists what there is."""
    from colibri_mmap.runtime.modelnames import group_files, matching, usual

    models = group_files(repository.files)
    if not models:
        raise ArgumentError(
            f"{repository.name}: holds no GGUF files; look for a repository that does, often named "
            f"{repository.name.split('/')[1]}-GGUF"
        )
    whole = [model for model in models if model.complete]
    found = matching(whole, reference)
    wanted = reference.label or reference.file
    if not found:
        raise ArgumentError(
            f"{repository.name}: has no {wanted or 'complete model'}; "
            f"there is {_listing(repository, models)}"
        )
    if wanted is None:
        found = usual(found)
    if len(found) > 1:
        raise ArgumentError(
            f"{repository.name}: name one of its models, as in "
            f"{repository.name}:{found[0].label}; there is {_listing(repository, found)}"
        )
    return found[0]


def _listing(repository: Repository, models: list[ModelFiles]) -> str:
    sizes = {
        model.label: sum(repository.files[path].nbytes for path in model.paths) for model in models
    }
    ordered = sorted(sizes, key=lambda label: sizes[label])
    return ", ".join(f"{label} ({byte_size(sizes[label])})" for label in ordered)


def _check_architecture(name: str, architecture: str, advice: str) -> None:
    """Refuse what cannot run, if possible before it is downloaded."""
    from colibri_mmap.runtime.models import ARCHITECTURES

    if architecture not in ARCHITECTURES:
        raise UnsupportedError(
            f"{name}: architecture {architecture!r} is not supported; {advice}; "
            f"supported: {', '.join(ARCHITECTURES)}"
        )
