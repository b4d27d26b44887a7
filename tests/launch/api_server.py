"""As much of Kubernetes' API server as kubectl needs to act on a JobSet and its pods.

It keeps what is created and deletes what is told to be; pods and all else are put there
by a test. It speaks plain HTTP on this machine.
"""

import http.server
import json
import threading
import urllib.parse
from pathlib import Path
from typing import Any

GROUPS = {
    "jobset.x-k8s.io": ("v1alpha2", "JobSet", "jobsets"),
    "kueue.x-k8s.io": ("v1beta2", "Workload", "workloads"),
}
CORE = {"pods": "Pod", "events": "Event", "namespaces": "Namespace"}


class ApiServer(http.server.ThreadingHTTPServer):
    """One namespace, `default`.

    objects: by kind (plural) and name.
    raw: answers to other paths.
    logs: what pods have said, by name.
    asked: what was asked for: method, path, parameters.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        kinds = ("jobsets", "workloads", *CORE)
        self.objects: dict[str, dict[str, Any]] = {kind: {} for kind in kinds}
        self.raw: dict[str, Any] = {}
        self.logs: dict[str, str] = {}
        self.asked: list[tuple[str, str, dict[str, str]]] = []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def kubeconfig(self, folder: Path) -> str:
        """Write what kubectl finds it by."""
        server = {"server": f"http://127.0.0.1:{self.server_port}"}
        context = {"cluster": "c", "user": "u"}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "x",
            "clusters": [{"name": "c", "cluster": server}],
            "contexts": [{"name": "x", "context": context}],
            "users": [{"name": "u", "user": {}}],
        }
        path = folder / "kubeconfig"
        path.write_text(json.dumps(config))
        return str(path)


class _Answer(http.server.BaseHTTPRequestHandler):
    server: ApiServer

    def do_GET(self) -> None:
        path, query = self._asked()
        if path in self.server.raw:
            return self._say(self.server.raw[path])
        if (known := _discovery(path)) is not None:
            return self._say(known)
        if path.endswith("/log"):
            return self._text(self.server.logs.get(path.split("/")[-2], ""))
        kind, name = _place(path)
        if kind not in self.server.objects:
            return self._missing(path)
        here = self.server.objects[kind]
        if name:
            return self._say(here[name]) if name in here else self._missing(name)
        if query.get("watch"):
            return self._text("")
        found = [item for item in here.values() if _fits(item, query)]
        return self._say({"kind": "List", "apiVersion": "v1", "items": found})

    def do_POST(self) -> None:
        path, _ = self._asked()
        kind, _ = _place(path)
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        name = body["metadata"]["name"]
        if name in self.server.objects[kind]:
            return self._say(_status(f"{name} already exists", "AlreadyExists"), 409)
        body["metadata"] |= {"uid": f"uid-{name}", "resourceVersion": "1"}
        self.server.objects[kind][name] = body
        return self._say(body, 201)

    def do_DELETE(self) -> None:
        path, _ = self._asked()
        kind, name = _place(path)
        if self.server.objects[kind].pop(name, None) is None:
            return self._missing(name)
        return self._say({"kind": "Status", "apiVersion": "v1", "status": "Success"})

    def _asked(self) -> tuple[str, dict[str, str]]:
        parts = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(parts.query))
        self.server.asked.append((self.command, parts.path, query))
        return parts.path, query

    def _say(self, answer: Any, code: int = 200) -> None:
        self._text(json.dumps(answer), code, "application/json")

    def _text(self, text: str, code: int = 200, kind: str = "text/plain") -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(text.encode())

    def _missing(self, name: str) -> None:
        self._say(_status(f'"{name}" not found', "NotFound"), 404)

    def log_message(self, *_: object) -> None:
        pass


def _status(message: str, reason: str) -> dict[str, Any]:
    status = {"kind": "Status", "apiVersion": "v1", "status": "Failure"}
    code = 409 if reason == "AlreadyExists" else 404
    return {**status, "message": message, "reason": reason, "code": code}


def _place(path: str) -> tuple[str, str]:
    """Give kind and name of /api.../namespaces/default/<kind>[/<name>]."""
    words = path.partition("/namespaces/default/")[2].split("/")
    return words[0], words[1] if len(words) > 1 else ""


def _fits(item: Any, query: dict[str, str]) -> bool:
    labels = item["metadata"].get("labels", {})
    wanted = filter(None, query.get("labelSelector", "").split(","))
    if any(labels.get(k) != v for k, _, v in (w.partition("=") for w in wanted)):
        return False
    involved = query.get("fieldSelector", "").partition("involvedObject.name=")[2]
    return not involved or item["involvedObject"]["name"] == involved


def _validates(path: str) -> dict[str, Any]:
    """Say that fields are validated here: kubectl leaves it to the server then."""
    (group, (version, kind, _)), *_ = GROUPS.items()
    where = f"apis/{group}/{version}"
    if path == "/openapi/v3":
        return {"paths": {where: {"serverRelativeURL": f"/openapi/v3/{where}"}}}
    about = {"group": group, "version": version, "kind": kind}
    patch = {
        "x-kubernetes-group-version-kind": about,
        "parameters": [{"name": "fieldValidation", "in": "query"}],
        "responses": {},
    }
    paths = {f"/{where}/namespaces/{{namespace}}/jobsets/{{name}}": {"patch": patch}}
    return {"openapi": "3.0.0", "info": {"title": "", "version": ""}, "paths": paths}


def _discovery(path: str) -> dict[str, Any] | None:
    if path.startswith("/openapi/v3"):
        return _validates(path)
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"]}
    if path == "/apis":
        groups = []
        for group, (version, _, _) in GROUPS.items():
            is_in = {"groupVersion": f"{group}/{version}", "version": version}
            both = {"versions": [is_in], "preferredVersion": is_in}
            groups.append({"name": group, **both})
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
    known = [(f"/apis/{g}/{v}", f"{g}/{v}", {p: k}) for g, (v, k, p) in GROUPS.items()]
    for where, group, kinds in [*known, ("/api/v1", "v1", CORE)]:
        if path == where:
            verbs = ["create", "delete", "get", "list", "watch"]
            about = {"namespaced": True, "verbs": verbs}
            resources = [
                {"name": plural, "singularName": kind.lower(), "kind": kind, **about}
                for plural, kind in kinds.items()
            ]
            return {
                "kind": "APIResourceList",
                "groupVersion": group,
                "resources": resources,
            }
    return None
