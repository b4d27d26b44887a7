"""A model of the parts of Kubernetes that run a JobSet, by its published rules.

It covers three things: how the kubelet expands commands and variables, what the Job
controller and JobSet do when a pod ends, and which documents the API server refuses.
"""

import functools
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.fleet import REPOSITORY

CRDS = "LONGHAUL_CRDS"


def expanded(text: str, variables: Mapping[str, str]) -> str:
    """Expand `$(NAME)` as the kubelet does in `command`, `args` and `env`.

    `$$` becomes a literal `$`. A reference to an unknown variable stays unchanged.
    Source: the API's documentation of Container.args and EnvVar.value.
    """

    def one(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        return variables.get(match[1], match[0])

    return re.sub(r"\$\$|\$\(([^)]*)\)", one, text)


class Pod:
    """One pod of a JobSet, given by the index of its Job and its own index."""

    def __init__(self, manifest: Mapping[str, Any], job: int = 0, index: int = 0):
        replicated = manifest["spec"]["replicatedJobs"][0]
        name = manifest["metadata"]["name"]
        spec = replicated["template"]["spec"]["template"]["spec"]
        (container,) = spec["containers"]
        self._fields = {
            "metadata.labels['jobset.sigs.k8s.io/job-index']": f"{job}",
            "metadata.labels['jobset.sigs.k8s.io/jobset-uid']": f"uid of {name}",
            "metadata.annotations['batch.kubernetes.io/job-completion-index']": (
                f"{index}"
            ),
        }
        self.hostname = f"{name}-{replicated['name']}-{job}-{index}.{name}"
        # The Job controller sets the first; every pod has the second.
        self.variables = {"JOB_COMPLETION_INDEX": f"{index}"}
        self.variables["KUBERNETES_SERVICE_HOST"] = "10.0.0.1"
        for variable in container.get("env", ()):
            self.variables[variable["name"]] = self._value(variable)
        self.command = [expanded(w, self.variables) for w in container["command"]]

    def _value(self, variable: Mapping[str, Any]) -> str:
        if "value" in variable:
            return expanded(variable["value"], self.variables)
        source = variable["valueFrom"]
        if "fieldRef" in source:
            return self._fields[source["fieldRef"]["fieldPath"]]
        return "secret {name} {key}".format(**source["secretKeyRef"])


def after(manifest: Mapping[str, Any], code: int | None) -> str:
    """Return the action on a JobSet after a pod ends with a code.

    None means that its node is lost.

    Sources: kubernetes, pkg/controller/job/pod_failure_policy.go; jobset,
    pkg/controllers/failure_policy.go.
    """
    template = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]
    if code == 0:
        return "completed"
    assert template["backoffLimit"] == 0
    reason = "BackoffLimitExceeded"
    message = "Job has reached the specified backoff"
    for index, rule in enumerate(template["podFailurePolicy"]["rules"]):
        assert rule["action"] == "FailJob"
        codes = rule.get("onExitCodes", {"values": ()})
        assert codes.get("operator", "In") == "In"
        assert list(codes["values"]) == sorted({*codes["values"]})
        lost = {"type": "DisruptionTarget", "status": "True"}
        if code in codes["values"] or (
            code is None and lost in rule.get("onPodConditions", ())
        ):
            cause = f"failed with exit code {code}" if code else "has condition Disrupt"
            message = f"Container train for pod default/x {cause}"
            message += f" matching FailJob rule at index {index}"
            reason = "PodFailurePolicy"
            break
    for rule in manifest["spec"]["failurePolicy"]["rules"]:
        patterns = rule.get("onJobFailureMessagePatterns", [""])
        if reason in rule["onJobFailureReasons"] and any(
            re.search(pattern, message) for pattern in patterns
        ):
            return rule["action"]
    return "RestartJobSet"


def refused(document: Mapping[str, Any]) -> list[str]:
    """Return the errors for which the API server would refuse a document.

    An unknown field is an error too. The schemas are those of the projects' CRDs. They
    are in the folder that LONGHAUL_CRDS names, or in `shared/crds` next to the
    checkout.
    """
    jsonschema = pytest.importorskip("jsonschema")
    version = document["apiVersion"].rpartition("/")[2]
    schema = _schemas()[document["kind"]][version]
    validator = jsonschema.Draft202012Validator(schema)
    return [f"{e.json_path}: {e.message}" for e in validator.iter_errors(document)]


@functools.cache
def _schemas() -> dict[str, dict[str, Any]]:
    paths = [os.environ.get(CRDS), REPOSITORY.parent / "shared" / "crds"]
    folders = [Path(folder) for folder in paths if folder and Path(folder).is_dir()]
    if not folders:
        pytest.skip(f"needs the CRDs of JobSet and Kueue in a folder, {CRDS}")
    schemas = {}
    for file in folders[0].glob("*.yaml"):
        spec = yaml.load(file.read_text(), yaml.CSafeLoader)["spec"]
        schemas[spec["names"]["kind"]] = {
            version["name"]: _strict(version["schema"]["openAPIV3Schema"])
            for version in spec["versions"]
            if version["served"]
        }
    return schemas


_METADATA = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]{0,38}[a-z0-9])?$"},
        "namespace": {"type": "string"},
        "labels": {"additionalProperties": {"type": "string", "maxLength": 63}},
        "annotations": {"additionalProperties": {"type": "string"}},
    },
}


def _strict(schema: Any, key: str = "") -> Any:
    """Return the JSON Schema equivalent to a structural schema of Kubernetes."""
    if isinstance(schema, list):
        return [_strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if key == "metadata" and schema == {"type": "object"}:
        return _METADATA
    rules = {k: v for k, v in schema.items() if k not in ("description", "properties")}
    strict = {k: _strict(v) for k, v in rules.items()}
    if "properties" in schema:
        strict["properties"] = {
            k: _strict(v, k) for k, v in schema["properties"].items()
        }
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            strict.setdefault("additionalProperties", False)
    if schema.get("x-kubernetes-int-or-string"):
        strict["type"] = ["integer", "string"]
        strict.pop("anyOf", None)
    return strict
