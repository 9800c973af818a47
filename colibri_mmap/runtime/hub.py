"""The Hugging Face hub: what a repository holds, bytes of its files, and why it refuses."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import NoReturn

import httpx2
from huggingface_hub import (
    HfApi,
    constants,
    get_session,
    get_token,
    hf_hub_url,
    hf_raise_for_status,
)
from huggingface_hub.errors import (
    DisabledRepoError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from colibri_mmap.errors import ArgumentError, ColibriError, ResourceError

_HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")  # of what becomes a name in the cache
_PASSING = (408, 425, 429, 500, 502, 503, 504)  # statuses that another try may not meet


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a repository; `sha256` is None for a small one that git itself keeps."""

    path: str
    nbytes: int
    git_id: str
    sha256: str | None

    @property
    def blob(self) -> str:
        """The name of its content in the cache."""
        return self.sha256 or self.git_id


@dataclass(frozen=True, slots=True)
class Repository:
    """A repository at one commit; `architecture` is what the hub read in a GGUF file, if any."""

    name: str
    revision: str
    commit: str
    architecture: str | None
    files: dict[str, HubFile]


class TransferError(Exception):
    """A transfer that broke off and may succeed when tried again."""


def look_up(repo: str, revision: str) -> Repository:
    """The files of a repository; a ColibriError says why there are none, and what to do."""
    try:
        info = HfApi().model_info(
            repo,
            revision=revision,
            files_metadata=True,
            timeout=constants.HF_HUB_ETAG_TIMEOUT,
        )
    except (HfHubHTTPError, HFValidationError, OfflineModeIsEnabled) as error:
        _explain(repo, revision, error)
    except httpx2.HTTPError as error:
        raise ResourceError(
            f"{constants.ENDPOINT} cannot be reached ({_reason(error)}); check the network "
            "connection and try again"
        ) from error
    except ValueError as error:
        raise ResourceError(
            f"{constants.ENDPOINT} does not answer as the hub does ({_reason(error)}); check "
            "HF_ENDPOINT, and whether the network wants a login"
        ) from error
    files = {}
    for sibling in info.siblings or ():
        if sibling.size is not None and sibling.blob_id is not None:
            sha256 = sibling.lfs.sha256 if sibling.lfs else None
            file = HubFile(sibling.rfilename, sibling.size, sibling.blob_id, sha256)
            if _HASH.fullmatch(file.blob) and ".." not in PurePosixPath(file.path).parts:
                files[file.path] = file
    architecture = (info.gguf or {}).get("architecture")
    return Repository(info.id, revision, str(info.sha), architecture, files)


@contextmanager
def transfer(
    repository: Repository, file: HubFile, start: int, stop: int
) -> Iterator[tuple[int, Iterator[bytes]]]:
    """The bytes [start, stop) of a file in chunks, and where they begin: 0 if all are sent.

    TransferError where another try may help, a ColibriError where it cannot.
    """
    url = hf_hub_url(repository.name, file.path, revision=repository.commit)
    headers = {"Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
    if token := get_token():
        headers["Authorization"] = f"Bearer {token}"
    try:
        with get_session().stream(
            "GET", url, headers=headers, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT
        ) as response:
            hf_raise_for_status(response)
            partial = response.status_code == httpx2.codes.PARTIAL_CONTENT
            yield (start if partial else 0), response.iter_bytes()
    except HfHubHTTPError as error:
        if error.response.status_code in _PASSING:
            raise TransferError(f"the hub answered {error.response.status_code}") from error
        _explain(repository.name, repository.revision, error, file.path)
    except OfflineModeIsEnabled as error:
        _explain(repository.name, repository.revision, error)
    except httpx2.HTTPError as error:
        raise TransferError(_reason(error)) from error


def _explain(repo: str, revision: str, error: Exception, file: str = "") -> NoReturn:
    """Raise what the hub's refusal means for a person."""
    raise _explanation(repo, revision, error, file) from error


def _explanation(repo: str, revision: str, error: Exception, file: str) -> ColibriError:
    page = f"{constants.ENDPOINT}/{repo}"
    login = "set HF_TOKEN to a token of that account, or run `hf auth login`"
    match error:
        case OfflineModeIsEnabled():
            return ResourceError(f"{repo}: HF_HUB_OFFLINE forbids to ask the hub; unset it")
        case HFValidationError():
            return ArgumentError(f"{repo}: not a name that the hub allows; it is owner/name")
        case GatedRepoError():
            return ArgumentError(
                f"{repo}: its owner wants conditions to be accepted: do so on {page}, then {login}"
            )
        case RevisionNotFoundError():
            return ArgumentError(f"{repo}: has no revision {revision!r}")
        case RemoteEntryNotFoundError():
            return ArgumentError(f"{repo}: has no file {file!r} any more; pull it again")
        case RepositoryNotFoundError():
            return ArgumentError(
                f"{repo}: the hub has no such repository, or a private one; check the name on "
                f"{constants.ENDPOINT}, or set HF_TOKEN to a token of an account that may see it"
            )
        case DisabledRepoError():
            return ArgumentError(f"{repo}: the hub has disabled this repository")
        case HfHubHTTPError() if error.response.status_code == httpx2.codes.UNAUTHORIZED:
            return ArgumentError(f"{repo}: the hub refuses your token; correct HF_TOKEN")
        case HfHubHTTPError() if error.response.status_code == httpx2.codes.FORBIDDEN:
            return ArgumentError(f"{repo}: your account may not read it; ask its owner on {page}")
        case HfHubHTTPError():
            status = error.response.status_code
            return ResourceError(f"{repo}: the hub answered {status}; try again later")
    raise error


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
