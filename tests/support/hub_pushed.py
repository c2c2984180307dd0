"""The hub's side of an upload, in memory: who asks, which repositories there are, and one commit at a time.

It answers huggingface_hub's own requests. Files travel inside the commit, as the hub takes small ones; transfers of
large files (LFS, Xet) are not part of it.
"""

from __future__ import annotations

import base64
import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urlsplit

import hub_server
import pytest
from hub_server import SECRET, Handler, serve


@dataclass
class Repo:
    """A repository: its files, and the messages of its commits."""

    private: bool
    files: dict[str, bytes] = field(default_factory=dict)
    commits: list[str] = field(default_factory=list)


class PushedHub:
    """What was pushed: `repos` by name."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.repos: dict[str, Repo] = {}
        self.refuses: set[str] = set()  # what it answers 403 to: "create", "commit"


class PushHandler(Handler):
    pushed: PushedHub

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if not path.startswith("/api/"):
            super().do_GET()
        elif not self._known():
            self._say(401, {"error": "Invalid credentials"})
        elif path == "/api/whoami-v2":
            self._say(200, {"type": "user", "name": "me"})
        elif (repo := self._repo(path)) is None:
            self._say(404, {"error": "Repository not found"}, error="RepoNotFound")
        elif "/tree/" in path:
            listed = [
                {"type": "file", "path": name, "size": len(file), "oid": "0"} for name, file in repo.files.items()
            ]
            self._say(200, listed)
        else:
            self._say(200, {"id": "/".join(path.split("/")[3:5]), "private": repo.private, "sha": "0" * 40})

    def do_POST(self) -> None:
        path = unquote(urlsplit(self.path).path)
        sent = (
            self.rfile.read(int(self.headers["Content-Length"])) if "Content-Length" in self.headers else self._chunks()
        )
        if not self._known():
            self._say(401, {"error": "Invalid credentials"})
        elif path == "/api/validate-yaml":
            self._say(200, {"errors": [], "warnings": []})
        elif path == "/api/repos/create":
            asked = json.loads(sent)
            name = f"{asked.get('organization') or 'me'}/{asked['name']}"
            if "create" in self.pushed.refuses:
                return self._say(403, {"error": f"You don't have the rights to create a model under {name}"})
            private = asked.get("private") or asked.get("visibility") == "private"
            self.pushed.repos[name] = Repo(private=private)
            self._say(200, {"url": f"{self.pushed.url}/{name}"})
        elif "/preupload/" in path:
            files = [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                for file in json.loads(sent)["files"]
            ]
            self._say(200, {"files": files})
        elif "/commit/" in path:
            if "a person" in self.pushed.refuses:
                os.kill(os.getpid(), signal.SIGINT)
                return time.sleep(2)
            if "commit" in self.pushed.refuses:
                return self._say(403, {"error": "You are over your quota"})
            repo = self._repo(path)
            assert repo is not None
            self._commit(repo, [json.loads(line) for line in sent.splitlines()])
            name, oid = "/".join(path.split("/")[3:5]), "1" * 40
            self._say(200, {"commitUrl": f"{self.pushed.url}/{name}/commit/{oid}", "commitOid": oid, "success": True})
        else:
            self._say(404, {"error": path})

    def _commit(self, repo: Repo, operations: list[dict[str, Any]]) -> None:
        for operation in operations:
            value = operation["value"]
            if operation["key"] == "header":
                repo.commits.append(value["summary"])
            elif operation["key"] == "file":
                repo.files[value["path"]] = base64.b64decode(value["content"])
            else:
                assert operation["key"] == "deletedFile", operation
                del repo.files[value["path"]]

    def _known(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {SECRET}"

    def _repo(self, path: str) -> Repo | None:
        return self.pushed.repos.get("/".join(path.split("/")[3:5]))

    def _chunks(self) -> bytes:
        content = b""
        while size := int(self.rfile.readline(), 16):
            content += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return content

    def _say(self, code: int, body: Any, **headers: str) -> None:
        self._send(code, json.dumps(body).encode(), **headers)


@contextmanager
def pushed_hub() -> Iterator[PushedHub]:
    handler = type("OneHub", (PushHandler,), {})
    with serve(handler) as found:
        handler.pushed = PushedHub(found.url)  # type: ignore[attr-defined]
        yield handler.pushed  # type: ignore[attr-defined]


def variables(hub: PushedHub) -> dict[str, str]:
    """Return what a process needs to push to it."""
    return {"HF_ENDPOINT": hub.url, "HF_TOKEN": SECRET, "HF_HUB_OFFLINE": "0", "no_proxy": "127.0.0.1"}


def use(hub: PushedHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have this process push to it."""
    hub_server.use(hub.url, monkeypatch)
    monkeypatch.setenv("HF_TOKEN", SECRET)
