"""A stand-in of the hub's HTTP API on loopback: one model repository with two commits, and what goes wrong with it."""

import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

NAME = "org/tiny"
API = re.compile(r"/api/models/(?P<name>[^/]+/[^/]+)/(?P<kind>revision|tree)/(?P<revision>[^/]+)$")
FILE = re.compile(r"/(?P<name>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<path>.+)$")


@dataclass
class Hub:
    """What the stand-in serves, and what was asked of it.

    Attributes:
      commits: files of each commit by path.
      branches: commit of each branch or tag.
      refuses: status and error code of every answer, None to serve.
      asked: method and path of each request.
      fetched: paths of the files whose content was sent.
      endpoint: where it listens.
    """

    commits: Mapping[str, Mapping[str, bytes]]
    branches: dict[str, str]
    refuses: tuple[int, str] | None = None
    asked: list[tuple[str, str]] = field(default_factory=list)
    fetched: list[str] = field(default_factory=list)
    endpoint: str = ""


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """Serves it from a thread, on a port of its own."""

    class Handler(_Handler):
        served = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    served: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""

    def _answer(self, with_body: bool) -> None:
        hub, path = self.served, unquote(urlsplit(self.path).path)
        hub.asked.append((self.command, path))
        if hub.refuses is not None:
            self._send(hub.refuses[0], {"X-Error-Code": hub.refuses[1]}, b"", with_body)
            return
        wanted = API.match(urlsplit(self.path).path) or FILE.match(path)
        if wanted is None or wanted["name"] != NAME:
            self._send(404, {"X-Error-Code": "RepoNotFound"}, b"", with_body)
            return
        revision = unquote(wanted["revision"])
        commit = hub.branches.get(revision, revision)
        if commit not in hub.commits:
            self._send(404, {"X-Error-Code": "RevisionNotFound"}, b"", with_body)
        elif "kind" in wanted.groupdict():
            self._send(200, {}, json.dumps(_about(hub, commit, wanted["kind"])).encode(), with_body)
        else:
            self._file(commit, wanted["path"], with_body)

    def _file(self, commit: str, path: str, with_body: bool) -> None:
        data = self.served.commits[commit].get(path)
        if data is None:
            self._send(404, {"X-Error-Code": "EntryNotFound"}, b"", with_body)
            return
        if with_body:
            self.served.fetched.append(path)
        first = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        start = int(first[1]) if first else 0
        headers = {"ETag": f'"{_digest(data)}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        self._send(206 if start else 200, headers, data[start:], with_body)

    def _send(self, status: int, headers: Mapping[str, str], body: bytes, with_body: bool) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)


def _about(hub: Hub, commit: str, kind: str) -> Any:
    files = hub.commits[commit]
    if kind == "tree":
        return [{"type": "file", "path": path, "size": len(data), "oid": _digest(data)} for path, data in files.items()]
    return {"id": NAME, "sha": commit, "siblings": [{"rfilename": path} for path in files]}


def _digest(data: bytes) -> str:
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()
