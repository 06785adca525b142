"""A server that speaks the part of the Hub's API that huggingface_hub uses to push and pull a model.

Repositories are in memory; every commit keeps the whole tree, so that what a reader sees changes at a commit alone.
Faults are a list: the first whose method and path fit a request is taken from it and played out.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import socket
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

LFS_SUFFIXES = (".safetensors", ".png", ".model")


@dataclass
class Fault:
    """What happens to one request in place of its answer: `status`, or a cut connection.

    The connection is cut once `cut` bytes of the request's body are read, or, with `after`, when the request has taken
    effect and only its answer is lost.
    """

    method: str
    path: str  # a regular expression, searched in the path
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: dict[str, Any] = field(default_factory=dict)
    cut: int | None = None
    after: bool = False
    times: int = 1


@dataclass
class Blob:
    content: bytes
    lfs: bool

    @property
    def oid(self) -> str:
        if self.lfs:
            return hashlib.sha256(self.content).hexdigest()
        return hashlib.sha1(b"blob %d\0" % len(self.content) + self.content).hexdigest()


@dataclass
class Repo:
    private: bool
    branches: dict[str, str] = field(default_factory=dict)
    commits: dict[str, dict[str, Blob]] = field(default_factory=dict)
    titles: list[str] = field(default_factory=list)

    def commit(self, branch: str, tree: dict[str, Blob], title: str) -> str:
        oid = hashlib.sha1(f"{len(self.commits)} {branch} {title}".encode()).hexdigest()
        self.commits[oid], self.branches[branch] = tree, oid
        self.titles.append(title)
        return oid

    def tree(self, revision: str) -> dict[str, Blob] | None:
        return self.commits.get(self.branches.get(revision, revision))


class Hub:
    """The server and what is on it; use as a context manager.

    Attributes:
        endpoint: Its address.
        token: The one token that it takes.
        repos: By id.
        stored: Large files that are uploaded, committed or not, by sha256.
        faults: To be played out.
        requests: Method and path of each request so far.
        part_size: Bytes above which a large file goes up in parts; None for never.
        ignored: Paths that a .gitignore of every repository names.
    """

    def __init__(self, token: str) -> None:
        self.token, self.namespaces = token, ("user", "team")
        self.repos: dict[str, Repo] = {}
        self.stored: dict[str, bytes] = {}
        self.parts: dict[tuple[str, int], bytes] = {}
        self.faults: list[Fault] = []
        self.requests: list[str] = []
        self.part_size: int | None = None
        self.ignored: set[str] = set()
        self.lock = threading.RLock()
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self.endpoint = f"http://127.0.0.1:{self.http.server_port}"

    def __enter__(self) -> Hub:
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.http.shutdown()
        self.http.server_close()

    def files(self, repo_id: str, revision: str = "main") -> dict[str, bytes]:
        """What a reader of a repository gets."""
        tree = self.repos[repo_id].tree(revision) or {}
        return {path: blob.content for path, blob in tree.items() if path != ".gitattributes"}

    def make(self, repo_id: str, private: bool = False, **files: bytes) -> Repo:
        """Make a repository as the Hub does: with a first commit."""
        repo = self.repos[repo_id] = Repo(private)
        tree = {".gitattributes": Blob(b"*.safetensors filter=lfs\n", False)}
        tree |= {path: Blob(content, path.endswith(LFS_SUFFIXES)) for path, content in files.items()}
        repo.commit("main", tree, "initial commit")
        return repo

    def take_fault(self, method: str, path: str) -> Fault | None:
        with self.lock:
            for fault in self.faults:
                if fault.method == method and re.search(fault.path, path):
                    fault.times -= 1
                    if fault.times == 0:
                        self.faults.remove(fault)
                    return fault
        return None


class _Answer(Exception):  # noqa: N818
    def __init__(self, status: int, body: Any = None, **headers: str) -> None:
        self.status, self.body, self.headers = status, body, headers


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *words: object) -> None:
        pass

    def do_GET(self) -> None:
        self._serve("GET")

    def do_HEAD(self) -> None:
        self._serve("HEAD")

    def do_POST(self) -> None:
        self._serve("POST")

    def do_PUT(self) -> None:
        self._serve("PUT")

    def _serve(self, method: str) -> None:
        path = urlsplit(self.path).path
        self.hub.requests.append(f"{method} {path}")
        fault = self.hub.take_fault(method, path)
        if fault is not None and fault.cut is not None:
            self.rfile.read(fault.cut)
            return self._cut()
        body = self._read_body()
        if fault is not None and not fault.after:
            return self._answer(fault.status, fault.body, fault.headers)
        try:
            answer = self._route(method, path, body)
        except _Answer as found:
            answer = found
        if fault is not None:
            return self._cut()
        self._answer(answer.status, answer.body, answer.headers)

    def _cut(self) -> None:
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def _read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            read = b""
            while size := int(self.rfile.readline(), 16):
                read += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return read
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _answer(self, status: int, body: Any, headers: dict[str, str]) -> None:
        content = body if isinstance(body, bytes) else json.dumps({} if body is None else body).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _route(self, method: str, path: str, body: bytes) -> _Answer:
        routes = (
            (r"POST /api/repos/create", self._create),
            (r"POST /api/validate-yaml", self._validate),
            (r"GET /api/models/([^/]+/[^/]+?)(?:/revision/([^/]+))?", self._info),
            (r"GET /api/models/([^/]+/[^/]+)/tree/([^/]+)(?:/(.+))?", self._tree),
            (r"POST /api/models/([^/]+/[^/]+)/branch/([^/]+)", self._branch),
            (r"POST /api/models/([^/]+/[^/]+)/preupload/([^/]+)", self._preupload),
            (r"POST /api/models/([^/]+/[^/]+)/commit/([^/]+)", self._commit),
            (r"POST /([^/]+/[^/]+)\.git/info/lfs/objects/batch", self._batch),
            (r"PUT /lfs/(\w+)(?:/(\d+))?", self._store),
            (r"POST /lfs/(\w+)/complete", self._complete),
            (r"(?:HEAD|GET) /([^/]+/[^/]+)/resolve/([^/]+)/(.+)", self._resolve),
        )
        with self.hub.lock:
            for pattern, handle in routes:
                found = re.fullmatch(pattern, f"{method} {path}")
                if found:
                    return handle(body, *(group and unquote(group) for group in found.groups()))
        return _Answer(501, {"error": f"this server has no {method} {path}"})

    def _allowed(self) -> bool:
        given = self.headers.get("Authorization")
        if given not in (None, f"Bearer {self.hub.token}"):
            message = "Invalid credentials in Authorization header"
            raise _Answer(401, {"error": message}, X_Error_Message=message)
        return given is not None

    def _repo(self, repo_id: str, write: bool = False) -> Repo:
        allowed, repo = self._allowed(), self.hub.repos.get(repo_id)
        if repo is None or (repo.private and not allowed):
            raise _Answer(404, {"error": "Repository not found"}, X_Error_Code="RepoNotFound")
        if write and not allowed:
            raise _Answer(401, {"error": "Invalid username or password."})
        return repo

    def _found(self, repo: Repo, revision: str) -> dict[str, Blob]:
        tree = repo.tree(revision)
        if tree is None:
            raise _Answer(404, {"error": "Invalid rev id"}, X_Error_Code="RevisionNotFound")
        return tree

    def _create(self, body: bytes) -> _Answer:
        if not self._allowed():
            return _Answer(401, {"error": "Invalid username or password."})
        asked = json.loads(body)
        repo_id = f"{asked['organization']}/{asked['name']}"
        if asked["organization"] not in self.hub.namespaces:
            return _Answer(403, {"error": "You don't have the rights to create a model under this namespace"})
        url = {"url": f"{self.hub.endpoint}/{repo_id}"}
        if repo_id in self.hub.repos:
            return _Answer(409, {**url, "error": "You already created this model repo"})
        self.hub.make(repo_id, private=asked.get("visibility") == "private" or bool(asked.get("private")))
        return _Answer(200, url)

    def _validate(self, body: bytes) -> _Answer:
        import yaml

        text = json.loads(body)["content"]
        found = re.match(r"---\n(.*?)\n---\n", text, re.DOTALL)
        try:
            metadata = yaml.safe_load(found[1]) if found else {}
        except yaml.YAMLError as error:
            return _Answer(400, {"errors": [{"message": str(error)}]})
        for entry in metadata.get("model-index", []):
            if not entry.get("name") or not all("value" in m for r in entry["results"] for m in r["metrics"]):
                return _Answer(400, {"errors": [{"message": '"model-index" is not as it must be'}]})
        return _Answer(200, {"warnings": []})

    def _info(self, body: bytes, repo_id: str, revision: str | None) -> _Answer:
        repo = self._repo(repo_id)
        tree = self._found(repo, revision or "main")
        sha = repo.branches.get(revision or "main", revision)
        siblings = [{"rfilename": path} for path in tree]
        return _Answer(200, {"id": repo_id, "sha": sha, "private": repo.private, "tags": [], "siblings": siblings})

    def _tree(self, body: bytes, repo_id: str, revision: str, below: str | None) -> _Answer:
        tree = self._found(self._repo(repo_id), revision)
        rows = []
        for path, blob in tree.items():
            if below is not None and not path.startswith(f"{below}/"):
                continue
            lfs = {"lfs": {"oid": blob.oid, "size": len(blob.content), "pointerSize": 1}} if blob.lfs else {}
            rows.append({"type": "file", "path": path, "size": len(blob.content), "oid": blob.oid, **lfs})
        if below is not None and not rows:
            return _Answer(404, {"error": f"{below} does not exist"}, X_Error_Code="EntryNotFound")
        return _Answer(200, rows)

    def _branch(self, body: bytes, repo_id: str, branch: str) -> _Answer:
        repo = self._repo(repo_id, write=True)
        if branch in repo.branches:
            return _Answer(409, {"error": "Reference already exists"})
        repo.branches[branch] = repo.branches["main"]
        return _Answer(200)

    def _preupload(self, body: bytes, repo_id: str, revision: str) -> _Answer:
        tree, rows = self._found(self._repo(repo_id, write=True), revision), []
        for file in json.loads(body)["files"]:
            mode = "lfs" if file["path"].endswith(LFS_SUFFIXES) else "regular"
            row = {"path": file["path"], "uploadMode": mode, "shouldIgnore": file["path"] in self.hub.ignored}
            if file["path"] in tree:
                row["oid"] = tree[file["path"]].oid
            rows.append(row)
        return _Answer(200, {"files": rows})

    def _batch(self, body: bytes, repo_id: str) -> _Answer:
        self._repo(repo_id, write=True)
        objects = []
        for one in json.loads(body)["objects"]:
            row, at = {"oid": one["oid"], "size": one["size"]}, f"{self.hub.endpoint}/lfs/{one['oid']}"
            if one["oid"] not in self.hub.stored:
                upload: dict[str, Any] = {"href": f"{at}?signature=of-this-upload"}
                if self.hub.part_size is not None and one["size"] > self.hub.part_size:
                    count = -(-one["size"] // self.hub.part_size)
                    numbered = {str(n): f"{at}/{n}" for n in range(1, count + 1)}
                    upload = {"href": f"{at}/complete", "header": {"chunk_size": str(self.hub.part_size), **numbered}}
                row["actions"] = {"upload": upload}
            objects.append(row)
        return _Answer(200, {"transfer": "basic", "objects": objects})

    def _store(self, body: bytes, oid: str, part: str | None) -> _Answer:
        if part is not None:
            self.hub.parts[oid, int(part)] = body
            return _Answer(200, ETag=f'"{hashlib.md5(body).hexdigest()}"')
        if hashlib.sha256(body).hexdigest() != oid:
            return _Answer(400, {"error": "the content is not what was announced"})
        self.hub.stored[oid] = body
        return _Answer(200)

    def _complete(self, body: bytes, oid: str) -> _Answer:
        numbers = [part["partNumber"] for part in json.loads(body)["parts"]]
        return self._store(b"".join(self.hub.parts[oid, number] for number in numbers), oid, None)

    def _commit(self, body: bytes, repo_id: str, revision: str) -> _Answer:
        repo = self._repo(repo_id, write=True)
        tree = dict(self._found(repo, revision))
        header, *operations = [json.loads(line) for line in body.splitlines()]
        parent = header["value"].get("parentCommit")
        if parent not in (None, repo.branches[revision]):
            return _Answer(412, {"error": "A commit has happened since. Please refresh and try again."})
        for operation in operations:
            value = operation["value"]
            if operation["key"] == "file":
                tree[value["path"]] = Blob(base64.b64decode(value["content"]), False)
            elif operation["key"] == "lfsFile":
                if value["oid"] not in self.hub.stored:
                    return _Answer(400, {"error": f"LFS pointer to {value['path']} does not exist"})
                tree[value["path"]] = Blob(self.hub.stored[value["oid"]], True)
            else:
                del tree[value["path"]]
        oid = repo.commit(revision, tree, header["value"]["summary"])
        return _Answer(200, {"commitOid": oid, "commitUrl": f"{self.hub.endpoint}/{repo_id}/commit/{oid}"})

    def _resolve(self, body: bytes, repo_id: str, revision: str, path: str) -> _Answer:
        repo = self._repo(repo_id)
        blob, sha = self._found(repo, revision).get(path), repo.branches.get(revision, revision)
        if blob is None:
            return _Answer(404, {"error": "Entry not found"}, X_Error_Code="EntryNotFound", X_Repo_Commit=sha)
        headers = {"ETag": f'"{blob.oid}"', "X_Repo_Commit": sha, "X_Linked_Size": str(len(blob.content))}
        return _Answer(200, blob.content, **headers)
