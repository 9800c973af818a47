"""A hub of our own: the HTTP interface of the Hugging Face hub as far as downloads need it.

/api/models/OWNER/NAME/revision/REVISION   what a repository holds
/OWNER/NAME/resolve/COMMIT/PATH            redirects to the content
/content/BLOB                              content, whole or in ranges; on another host name
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_of_a_test"


@dataclass
class Repo:
    """A repository; `sizes` are told in place of the real ones, `missing` answers 404."""

    files: Mapping[str, bytes]
    architecture: str | None = None
    gated: bool = False
    private: bool = False
    in_git: bool = False
    sizes: dict[str, int] = field(default_factory=dict)
    missing: set[str] = field(default_factory=set)

    @property
    def commit(self) -> str:
        names = "\n".join(f"{path} {blob(data)}" for path, data in sorted(self.files.items()))
        return hashlib.sha1(names.encode()).hexdigest()


@dataclass(frozen=True)
class Request:
    """A request that was served."""

    path: str
    range: str | None
    token: str | None


def blob(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def git_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class HubServer:
    """Serves repositories until closed; remembers the requests for content.

    `stop_after`: a connection sends so many bytes of content, then nothing until `go_on` is set,
    and is closed. `damage`: the first byte of content is another one. `ignore_ranges`: content is
    sent whole. `failures`: statuses to answer first.
    """

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.requests: list[Request] = []
        self.stop_after: int | None = None
        self.damage = False
        self.ignore_ranges = False
        self.failures: list[int] = []
        self.go_on = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.01,), daemon=True
        )
        self._thread.start()

    @property
    def port(self) -> int:
        return self._server.server_address[1]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def contents(self) -> list[Request]:
        """The requests for content, in order."""
        return [request for request in self.requests if request.path.startswith("/content/")]

    def find(self, name: str) -> bytes | None:
        files = (data for repo in self.repos.values() for data in repo.files.values())
        return next((data for data in files if name in (blob(data), git_id(data))), None)

    def close(self) -> None:
        self.go_on.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def _handler(hub: HubServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            token = self.headers["Authorization"]
            hub.requests.append(Request(path, self.headers["Range"], token))
            if match := re.fullmatch(r"/content/(\w+)", path):
                self._content(hub.find(match[1]))
            elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/revision/(.+)", path):
                self._listing(match[1], match[2])
            elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
                self._resolve(match[1], match[3])
            else:
                self._refuse(404, "EntryNotFound")

        def _listing(self, name: str, revision: str) -> None:
            repo = hub.repos.get(name)
            if repo is None or (repo.private and not self._known()):
                self._refuse(401, "RepoNotFound")
                return
            if revision not in ("main", repo.commit):
                self._refuse(404, "RevisionNotFound")
                return
            siblings = []
            for path, data in repo.files.items():
                size = repo.sizes.get(path, len(data))
                entry: dict[str, Any] = {"rfilename": path, "size": size, "blobId": git_id(data)}
                if not repo.in_git:
                    entry["lfs"] = {"size": size, "sha256": blob(data), "pointerSize": 134}
                siblings.append(entry)
            body: dict[str, Any] = {"id": name, "sha": repo.commit, "siblings": siblings}
            if repo.architecture:
                body["gguf"] = {"architecture": repo.architecture}
            self._send(200, json.dumps(body).encode(), {"Content-Type": "application/json"})

        def _resolve(self, name: str, path: str) -> None:
            repo = hub.repos[name]
            if repo.gated and self.headers["Authorization"] is None:
                self._refuse(401, "GatedRepo")
                return
            if repo.gated and not self._known():
                self._refuse(403, "GatedRepo")
                return
            if path in repo.missing:
                self._refuse(404, "EntryNotFound")
                return
            data = repo.files[path]
            place = f"http://localhost:{hub.port}/content/{blob(data)}"
            linked = {"X-Linked-Etag": f'"{blob(data)}"', "X-Linked-Size": str(len(data))}
            self._send(302, b"", {"Location": place, "X-Repo-Commit": repo.commit, **linked})

        def _content(self, data: bytes | None) -> None:
            if hub.failures:
                self._refuse(hub.failures.pop(0), "")
                return
            assert data is not None
            if hub.damage:
                data = bytes([data[0] ^ 1]) + data[1:]
            whole, status, headers = data, 200, {"ETag": f'"{blob(data)}"'}
            asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers["Range"] or "")
            if asked and not hub.ignore_ranges:
                start, stop = int(asked[1]), int(asked[2] or len(whole) - 1) + 1
                data, status = whole[start:stop], 206
                headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(whole)}"
            self._send(status, data, headers, hub.stop_after)

        def _known(self) -> bool:
            return bool(self.headers["Authorization"] == f"Bearer {TOKEN}")

        def _refuse(self, status: int, code: str) -> None:
            self._send(status, b'{"error": "no"}', {"X-Error-Code": code})

        def _send(
            self, status: int, body: bytes, headers: dict[str, str], stop_after: int | None = None
        ) -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "HEAD":
                return
            try:
                self.wfile.write(body[:stop_after])
                if stop_after is not None and stop_after < len(body):
                    self.wfile.flush()
                    hub.go_on.wait()
                    self.close_connection = True
            except ConnectionError:  # the client has gone
                self.close_connection = True

        def log_message(self, *_: object) -> None:
            pass

    return Handler
