"""A hub on the loopback interface, for real HTTP: as much of Hugging Face's protocol as its client needs to make a
model's repository, to send files to it by Git LFS, and to fetch a revision of it."""

import base64
import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from tests.helpers import ROOT

TOKEN, READER = "hf_ours", "hf_may_only_read"
LARGE = (".safetensors", ".bin")  # by LFS
Files = dict[str, bytes]


@dataclass
class Repository:
    private: bool
    commits: dict[str, Files] = field(default_factory=dict)  # the last one is main

    @property
    def head(self) -> str:
        return [*self.commits][-1]

    def revision(self, name: str) -> str:
        return self.head if name == "main" else name

    def commit(self, files: Files) -> str:
        said = json.dumps([len(self.commits), sorted((name, sha(data)) for name, data in files.items())])
        self.commits[name := hashlib.sha1(said.encode()).hexdigest()] = files
        return name


@dataclass
class LocalHub:
    """What a hub knows, and what it was asked."""

    repositories: dict[str, Repository] = field(default_factory=dict)
    objects: Files = field(default_factory=dict)  # by SHA-256
    asked: list[str] = field(default_factory=list)
    url: str = ""
    before_object: Callable[[str], None] = lambda oid: None  # called before one is taken

    def env(self, home: Path, token: str = TOKEN) -> dict[str, str]:
        """For a process that is to know this hub alone; files go by LFS."""
        said = {"HF_ENDPOINT": self.url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}
        more = {"HF_TOKEN": token, "HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "*", "XDG_STATE_HOME": str(home)}
        return {**os.environ, **said, **more}

    def count(self, words: str) -> int:
        return sum(bool(re.match(words, each)) for each in self.asked)


@contextmanager
def hub() -> Iterator[LocalHub]:
    known = LocalHub()
    handler = type("HubRequest", (_Request,), {"known": known})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    known.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield known
    finally:
        server.shutdown()
        server.server_close()


def call(known: LocalHub, home: Path, *words: str, code: int = 0, **env: str) -> str:
    """A command that knows this hub alone; what it says, on either stream, without the token."""
    told = {**known.env(home), **env}
    done = subprocess.run([sys.executable, *words], cwd=ROOT, env=told, capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr
    assert TOKEN not in done.stdout + done.stderr
    return done.stdout + done.stderr


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def blob(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class _Refusal(Exception):
    def __init__(self, code: int, why: str, name: str = "", **more: str) -> None:
        super().__init__(why)
        self.code, self.name, self.more = code, name, more


class _Request(BaseHTTPRequestHandler):
    known: LocalHub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *words: Any) -> None: ...

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.known.asked.append(f"{self.command} {path}")
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0)) or self._chunks()
        try:
            for words, serve in _ROUTES.items():
                if found := re.fullmatch(words, f"{self.command} {path}"):
                    return serve(self, *found.groups())
            raise _Refusal(404, f"{self.command} {path}: nothing is there")
        except _Refusal as error:
            more = {"X-Error-Message": str(error)} | ({"X-Error-Code": error.name} if error.name else {})
            self.send(json.dumps({"error": str(error), **error.more}).encode(), more, error.code)

    do_GET = do_HEAD = do_POST = do_PUT = _answer

    def _chunks(self) -> bytes:
        """A body whose length is not told before."""
        data = b""
        while "chunked" in self.headers.get("Transfer-Encoding", ""):
            size = int(self.rfile.readline().split(b";")[0], 16)
            data += self.rfile.read(size)
            self.rfile.readline()
            if not size:
                break
        return data

    def send(self, data: bytes, headers: dict[str, str] | None = None, code: int = 200) -> None:
        self.send_response(code)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def say(self, value: Any) -> None:
        self.send(json.dumps(value).encode(), {"Content-Type": "application/json"})

    # -- who may what --------------------------------------------------------------------------------------------------

    @property
    def token(self) -> str:
        return self.headers.get("Authorization", "").removeprefix("Bearer ")

    def known_user(self) -> None:
        if self.token not in (TOKEN, READER):
            raise _Refusal(401, "Invalid credentials in Authorization header")

    def writer(self) -> None:
        self.known_user()
        if self.token != TOKEN:
            raise _Refusal(403, "this token may only read")

    def repository(self, name: str) -> Repository:
        """Whoever may not see one is told that there is none."""
        found = self.known.repositories.get(name)
        if not found or found.private and self.token not in (TOKEN, READER):
            raise _Refusal(404 if self.token else 401, "Repository not found", "RepoNotFound")
        return found

    def files(self, name: str, revision: str) -> tuple[str, Files]:
        repository = self.repository(name)
        at = repository.revision(revision)
        if at not in repository.commits:
            raise _Refusal(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return at, repository.commits[at]

    # -- repositories --------------------------------------------------------------------------------------------------

    def whoami(self) -> None:
        self.known_user()
        self.say({"name": "ann", "type": "user", "orgs": [{"name": "org"}]})

    def create(self) -> None:
        self.writer()
        said = json.loads(self.body)
        name = f"{said['organization']}/{said['name']}"
        if name in self.known.repositories:
            raise _Refusal(409, "You already created this model repo", url=f"{self.known.url}/{name}")
        made = self.known.repositories[name] = Repository(said.get("visibility") == "private")
        made.commit({".gitattributes": b"*.safetensors filter=lfs\n"})
        self.say({"url": f"{self.known.url}/{name}"})

    def info(self, name: str, revision: str | None = None) -> None:
        at, files = self.files(name, revision or "main")
        private, named = self.repository(name).private, [{"rfilename": file} for file in sorted(files)]
        self.say({"id": name, "modelId": name, "sha": at, "private": private, "siblings": named})

    def tree(self, name: str, revision: str) -> None:
        _, files = self.files(name, revision)
        self.say([{"type": "file", "path": file, "size": len(data), "oid": blob(data)} for file, data in files.items()])

    def resolve(self, name: str, revision: str, file: str) -> None:
        at, files = self.files(name, revision)
        if file not in files:
            raise _Refusal(404, "Entry not found", "EntryNotFound")
        data, tag = files[file], sha(files[file]) if file.endswith(LARGE) else blob(files[file])
        begin, partial = re.match(r"bytes=(\d+)-", self.headers.get("Range", "")), {}
        if begin:
            partial = {"Content-Range": f"bytes {begin[1]}-{len(data) - 1}/{len(data)}"}
            data = data[int(begin[1]) :]
        self.send(data, {"ETag": f'"{tag}"', "X-Repo-Commit": at, **partial}, 206 if begin else 200)

    # -- sending -------------------------------------------------------------------------------------------------------

    def validate(self) -> None:
        self.say({"errors": [], "warnings": []})

    def preupload(self, name: str, revision: str) -> None:
        self.writer()
        files, there = json.loads(self.body)["files"], self.files(name, revision)[1]
        told = []
        for each in files:
            path, large = each["path"], each["path"].endswith(LARGE)
            old = {"oid": sha(there[path]) if large else blob(there[path])} if path in there else {}
            told.append({"path": path, "uploadMode": "lfs" if large else "regular", "shouldIgnore": False, **old})
        self.say({"files": told})

    def batch(self, name: str) -> None:
        self.writer()
        self.repository(name)
        objects = []
        for each in json.loads(self.body)["objects"]:
            href = f"{self.known.url}/objects/{each['oid']}"
            new = each["oid"] not in self.known.objects
            objects.append({**each, **({"actions": {"upload": {"href": href}}} if new else {})})
        self.say({"transfer": "basic", "objects": objects})

    def take(self, oid: str) -> None:
        self.known.before_object(oid)
        if sha(self.body) != oid:
            raise _Refusal(400, "these are other bytes")
        self.known.objects[oid] = self.body
        self.send(b"")

    def commit(self, name: str, revision: str) -> None:
        self.writer()
        files = dict(self.files(name, revision)[1])
        for key, value in ((said["key"], said["value"]) for said in map(json.loads, self.body.splitlines())):
            if key == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif key == "lfsFile":
                if value["oid"] not in self.known.objects:
                    raise _Refusal(400, f"{value['path']}: its content was not sent")
                files[value["path"]] = self.known.objects[value["oid"]]
            elif key == "deletedFile":
                del files[value["path"]]
        oid = self.repository(name).commit(files)
        self.say({"commitUrl": f"{self.known.url}/{name}/commit/{oid}", "commitOid": oid})


_NAME, _AT = "([^/]+/[^/]+)", "([^/]+)"
_ROUTES: dict[str, Callable[..., None]] = {
    "GET /api/whoami-v2": _Request.whoami,
    "POST /api/repos/create": _Request.create,
    "POST /api/validate-yaml": _Request.validate,
    f"GET /api/models/{_NAME}": _Request.info,
    f"GET /api/models/{_NAME}/revision/{_AT}": _Request.info,
    f"GET /api/models/{_NAME}/tree/{_AT}": _Request.tree,
    f"POST /api/models/{_NAME}/preupload/{_AT}": _Request.preupload,
    f"POST /api/models/{_NAME}/commit/{_AT}": _Request.commit,
    f"POST /{_NAME}.git/info/lfs/objects/batch": _Request.batch,
    "PUT /objects/(.+)": _Request.take,
    f"(?:GET|HEAD) /{_NAME}/resolve/{_AT}/(.+)": _Request.resolve,
}
