"""A stand-in for the Hugging Face Hub: the routes that `huggingface_hub` uses to push and download.

Uploads follow both of its protocols for large files. Of Xet, the default, the stand-in takes the
blocks and lists without reading them, so a file that came by Xet has no content to download.
"""

import base64
import hashlib
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

import yaml

TOKEN, XET_TOKEN = "hf_owner", "of-xet"
_LARGE = (".onnx", ".npy", ".safetensors")


@dataclass
class Repository:
    """Its commits, oldest first: the content of each file, by its name."""

    private: bool
    commits: list[tuple[str, dict[str, bytes]]] = field(default_factory=list)

    def at(self, revision: str) -> tuple[str, dict[str, bytes]] | None:
        if revision == "main":
            return self.commits[-1]
        return next((commit for commit in self.commits if commit[0] == revision), None)

    def commit(self, files: dict[str, bytes]) -> str:
        name = hashlib.sha1(repr((len(self.commits), sorted(files))).encode()).hexdigest()
        self.commits.append((name, files))
        return name


class Hub:
    """Repositories by name, and what was asked: method, path and whether a token was sent."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.large: dict[str, bytes] = {}
        self.xet: list[bytes] = []
        self.requests: list[tuple[str, str, bool]] = []
        self.url = ""

    @property
    def store(self) -> str:
        """The address of large files: another host, which must not get the token."""
        return self.url.replace("127.0.0.1", "localhost")

    def create(self, name: str, private: bool = False, **files: bytes) -> Repository:
        self.repositories[name] = repository = Repository(private)
        repository.commit({".gitattributes": b"", **files})
        return repository

    def files(self, name: str) -> dict[str, bytes]:
        return self.repositories[name].commits[-1][1]


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def do(self) -> None:
        self.body = self.read_body()
        path = unquote(urlsplit(self.path).path)
        token = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        self.hub.requests.append((self.command, path, token))
        for pattern, name in ROUTES.items():
            if found := re.fullmatch(pattern, f"{self.command} {path}"):
                repository = None
                if "repo" in found.groupdict():
                    repository = self.hub.repositories.get(found["repo"])
                    if repository is None or (repository.private and not token):
                        return self.fail(401 if not token else 404, "RepoNotFound")
                    if self.command != "GET" and self.command != "HEAD" and not token:
                        return self.fail(403, "")
                return getattr(self, name)(repository, **found.groupdict())
        return self.fail(404, "")

    do_GET = do_HEAD = do_POST = do_PUT = do  # noqa: N815

    def read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def log_message(self, *_: Any) -> None:
        """Nothing is printed."""

    def answer(self, content: Any = b"", status: int = 200, **headers: object) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def fail(self, status: int, code: str) -> None:
        self.answer({"error": code}, status, **({"X_Error_Code": code} if code else {}))

    def create_repo(self, _: None) -> None:
        given = json.loads(self.body)
        name = f"{given['organization']}/{given['name']}"
        url = {"url": f"{self.hub.url}/{name}"}
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.fail(401, "")
        if name in self.hub.repositories:
            return self.answer(url, 409)
        self.hub.create(name, given.get("visibility") == "private")
        return self.answer(url)

    def validate(self, _: None) -> None:
        text = json.loads(self.body)["content"]
        found = re.match(r"---\n(.*?)\n---\n", text, re.DOTALL)
        assert found is not None
        about = yaml.safe_load(found[1])
        licence = re.fullmatch(r"[a-z0-9.-]+", about.get("license_name", "x"))
        bad = not licence or not isinstance(about.get("tags"), list)
        self.answer(
            {"errors": [{"message": "bad"}] if bad else [], "warnings": []}, 400 * bad or 200
        )

    def info(self, repository: Repository, repo: str, revision: str | None) -> None:
        commit = repository.at(revision or "main")
        if commit is None:
            return self.fail(404, "RevisionNotFound")
        names = [{"rfilename": name} for name in commit[1]]
        about = {"id": repo, "sha": commit[0], "private": repository.private, "siblings": names}
        return self.answer(about)

    def tree(self, repository: Repository, repo: str, revision: str) -> None:
        commit = repository.at(revision)
        if commit is None:
            return self.fail(404, "RevisionNotFound")
        return self.answer([_entry(name, data) for name, data in commit[1].items()])

    def preupload(self, repository: Repository, repo: str, revision: str) -> None:
        known = repository.commits[-1][1]
        modes = [
            {
                "path": one["path"],
                "uploadMode": "lfs" if one["path"].endswith(_LARGE) else "regular",
                "shouldIgnore": False,
                "oid": _entry(one["path"], known[one["path"]])["lfs_or_git"]
                if one["path"] in known
                else None,
            }
            for one in json.loads(self.body)["files"]
        ]
        self.answer({"files": modes})

    def batch(self, repository: Repository, repo: str) -> None:
        objects = []
        for one in json.loads(self.body)["objects"]:
            actions = {"upload": {"href": f"{self.hub.store}/large/{one['oid']}"}}
            objects.append(
                {**one, **({} if one["oid"] in self.hub.large else {"actions": actions})}
            )
        self.answer({"transfer": "basic", "objects": objects})

    def xet_token(self, repository: Repository, repo: str, revision: str) -> None:
        expires = int(time.time()) + 3600
        access = {"casUrl": self.hub.store, "accessToken": XET_TOKEN, "exp": expires}
        self.answer(
            access,
            X_Xet_Cas_Url=self.hub.store,
            X_Xet_Access_Token=XET_TOKEN,
            X_Xet_Token_Expiration=expires,
        )

    def xet_block(self, _: None) -> None:
        assert self.headers.get("Authorization") == f"Bearer {XET_TOKEN}"
        self.hub.xet.append(self.body)
        self.answer({"was_inserted": True})

    def xet_list(self, _: None) -> None:
        assert self.hub.xet, "a list follows its blocks"
        self.answer({"result": 1})

    def upload(self, _: None, oid: str) -> None:
        assert hashlib.sha256(self.body).hexdigest() == oid
        self.hub.large[oid] = self.body
        self.answer()

    def commit(self, repository: Repository, repo: str, revision: str) -> None:
        files = dict(repository.commits[-1][1])
        for line in self.body.splitlines():
            operation = json.loads(line)
            value = operation["value"]
            if operation["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif operation["key"] == "lfsFile":
                content = self.hub.large.get(value["oid"])
                if content is None:
                    assert self.hub.xet, "the file was not uploaded"
                    content = f"xet:{value['oid']}".encode()
                files[value["path"]] = content
            elif operation["key"] == "deletedFile":
                del files[value["path"]]
        name = repository.commit(files)
        self.answer({"commitUrl": f"{self.hub.url}/{repo}/commit/{name}", "commitOid": name})

    def resolve(self, repository: Repository, repo: str, revision: str, name: str) -> None:
        commit = repository.at(revision)
        if commit is None:
            return self.fail(404, "RevisionNotFound")
        if name not in commit[1]:
            return self.answer(b"", 404, X_Error_Code="EntryNotFound", X_Repo_Commit=commit[0])
        data, entry = commit[1][name], _entry(name, commit[1][name])
        about = {"X_Repo_Commit": commit[0], "ETag": f'"{entry["oid"]}"'}
        if name.endswith(_LARGE):
            oid = entry["lfs"]["oid"]
            self.hub.large[oid] = data
            about |= {"X_Linked_ETag": f'"{oid}"', "X_Linked_Size": len(data)}
            return self.answer(b"", 302, Location=f"{self.hub.store}/large/{oid}", **about)
        return self.answer(data, **about)

    def large(self, _: None, oid: str) -> None:
        self.answer(self.hub.large[oid], ETag=f'"{oid}"')


_REPO = r"(?P<repo>[^/]+/[^/]+)"
_REVISION = r"(?P<revision>[^/]+)"
ROUTES = {
    "POST /api/repos/create": "create_repo",
    "POST /api/validate-yaml": "validate",
    rf"GET /api/models/{_REPO}(?:/revision/{_REVISION})?": "info",
    rf"GET /api/models/{_REPO}/tree/{_REVISION}": "tree",
    rf"POST /api/models/{_REPO}/preupload/{_REVISION}": "preupload",
    rf"POST /{_REPO}\.git/info/lfs/objects/batch": "batch",
    rf"POST /api/models/{_REPO}/commit/{_REVISION}": "commit",
    rf"GET /api/models/{_REPO}/xet-write-token/{_REVISION}": "xet_token",
    "POST /v1/xorbs/default/[0-9a-f]{64}": "xet_block",
    "POST /v1/shards": "xet_list",
    "PUT /large/(?P<oid>[0-9a-f]{64})": "upload",
    "(?:GET|HEAD) /large/(?P<oid>[0-9a-f]{64})": "large",
    rf"(?:GET|HEAD) /{_REPO}/resolve/{_REVISION}/(?P<name>.+)": "resolve",
}


def _entry(name: str, data: bytes) -> dict[str, Any]:
    """A file in a list; a large one has the hash of its content, others that of git."""
    git = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    entry: dict[str, Any] = {"type": "file", "path": name, "size": len(data), "oid": git}
    if not name.endswith(_LARGE):
        return {**entry, "lfs_or_git": git}
    sha256 = hashlib.sha256(data).hexdigest()
    return {
        **entry,
        "lfs": {"oid": sha256, "size": len(data), "pointerSize": 1},
        "lfs_or_git": sha256,
    }


@contextmanager
def serve_hub() -> Iterator[Hub]:
    hub = Hub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()
