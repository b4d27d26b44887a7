"""A kubectl that knows what `python -m launch` asks of it, and refuses all else.

For machines without the real one. It asks api_server.py; tests run with both, so its
flags are those of the real one.
"""

import argparse
import json
import os
import sys
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

import yaml

PATHS = {
    "jobset": "/apis/jobset.x-k8s.io/v1alpha2/namespaces/{}/jobsets",
    "workloads.kueue.x-k8s.io": "/apis/kueue.x-k8s.io/v1beta2/namespaces/{}/workloads",
    "pods": "/api/v1/namespaces/{}/pods",
    "events": "/api/v1/namespaces/{}/events",
}


def main() -> int:
    told = _parser().parse_args()
    try:
        return {"create": create, "get": get, "delete": delete, "logs": logs}[
            told.verb
        ](told)
    except urllib.error.HTTPError as error:
        body = json.loads(error.read())
        if error.code == 404 and getattr(told, "ignore_not_found", False):
            return 0
        print(f"Error from server: {body['message']}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kubectl", allow_abbrev=False)
    parser.add_argument("--namespace")
    parser.add_argument("--context")
    verbs = parser.add_subparsers(dest="verb", required=True)
    create = verbs.add_parser("create", allow_abbrev=False)
    create.add_argument("-f", dest="file", required=True)
    get = verbs.add_parser("get", allow_abbrev=False)
    get.add_argument("what", nargs="*")
    get.add_argument("--raw")
    get.add_argument("-o", dest="output")
    get.add_argument("--ignore-not-found", action="store_true")
    get.add_argument("--selector")
    get.add_argument("--field-selector")
    delete = verbs.add_parser("delete", allow_abbrev=False)
    delete.add_argument("what", nargs=2)
    delete.add_argument("--ignore-not-found", action="store_true")
    delete.add_argument("--cascade", choices=["background", "foreground", "orphan"])
    delete.add_argument("--wait", action="store_true")
    delete.add_argument("--timeout")
    logs = verbs.add_parser("logs", allow_abbrev=False)
    logs.add_argument("pod")
    logs.add_argument("--container")
    logs.add_argument("--follow", action="store_true")
    logs.add_argument("--since-time")
    return parser


def create(told: Any) -> int:
    text = sys.stdin.read() if told.file == "-" else open(told.file).read()  # noqa: SIM115, PTH123
    found = yaml.safe_load(text)
    _ask(PATHS["jobset"].format(told.namespace), "POST", found)
    return 0


def get(told: Any) -> int:
    if told.raw:
        print(_ask(told.raw))
        return 0
    kind, *name = told.what
    path = "/".join([PATHS[kind].format(told.namespace), *name])
    selectors = {"labelSelector": told.selector, "fieldSelector": told.field_selector}
    query = [f"{k}={urllib.parse.quote(v)}" for k, v in selectors.items() if v]
    assert told.output == "json"
    print(_ask("?".join([path, *(["&".join(query)] if query else [])])))
    return 0


def delete(told: Any) -> int:
    _ask(PATHS[told.what[0]].format(told.namespace) + f"/{told.what[1]}", "DELETE")
    return 0


def logs(told: Any) -> int:
    path = PATHS["pods"].format(told.namespace)
    print(_ask(f"{path}/{told.pod}/log"), end="")
    return 0


def _ask(path: str, method: str = "GET", body: Any = None) -> str:
    with open(os.environ["KUBECONFIG"]) as file:  # noqa: PTH123
        server = json.load(file)["clusters"][0]["cluster"]["server"]
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(server + path, data, method=method)
    with urllib.request.urlopen(request) as answer:
        return answer.read().decode()


if __name__ == "__main__":
    sys.exit(main())
