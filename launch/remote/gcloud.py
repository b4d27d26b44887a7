"""Build gcloud commands for queued resources, and classify the errors of gcloud.

Source of the flags: the reference of gcloud compute tpus queued-resources (SDK 528).
"""

import re
from collections.abc import Sequence

from launch.config import TpuVmCluster
from launch.job import long_options
from launch.subprocesses import COMMAND_TIMEOUT_S, run_captured
from train.hardware.targets import parse_target

_MAX_MESSAGE = 2000  # the maximum length of an error message
# Permanent errors, by status code. Source: googleapis, google/rpc/code.proto.
_PERMANENT_ERRORS = {3: "INVALID_ARGUMENT", 5: "NOT_FOUND", 7: "PERMISSION_DENIED"}
_PERMANENT_ERRORS |= {16: "UNAUTHENTICATED"}
_ACCOUNT_ERRORS = ("active account", "gcloud auth login", "Reauthentication")
_USAGE = 2  # the exit code of gcloud for a wrong command line

# Accelerator type and software version by TPU family. Sources:
# docs.cloud.google.com/tpu/docs/v5e, .../v5p and so on, and .../tpu/docs/runtimes.
TYPES = {
    "v4": ("v4", "tpu-ubuntu2204-base"),
    "v5e": ("v5litepod", "v2-alpha-tpuv5-lite"),
    "v5p": ("v5p", "v2-alpha-tpuv5"),
    "v6e": ("v6e", "v2-alpha-tpuv6e"),
}


def resource_commands(name: str, cluster: TpuVmCluster) -> dict[str, list[str]]:
    """Return the commands that create, describe and delete a queued resource."""
    target = parse_target(cluster.target or "")
    kind, runtime = TYPES[target.family]
    labels = {"longhaul": name, **cluster.labels}
    size = target.name.rpartition("-")[2].partition("x")[0]
    flags = {
        "accelerator-type": f"{kind}-{size}",
        "runtime-version": cluster.runtime_version or runtime,
        "node-id": name if target.slices == 1 else None,
        "node-count": target.slices if target.slices > 1 else None,
        "node-prefix": name if target.slices > 1 else None,
        "spot": cluster.spot,
        "reserved": cluster.reserved,
        "valid-until-duration": cluster.valid_until,
        "network": cluster.network,
        "subnetwork": cluster.subnetwork,
        "service-account": cluster.service_account,
        "labels": ",".join(f"{key}={value}" for key, value in labels.items()),
    }
    create = [*long_options(flags), *cluster.options]
    return {
        "create": gcloud_command("create", [name], cluster, *create),
        "describe": gcloud_command("describe", [name], cluster, "--format=json"),
        "delete": gcloud_command("delete", [name], cluster, "--force"),
    }


def gcloud_command(
    verb: str, names: Sequence[str], cluster: TpuVmCluster, *arguments: str
) -> list[str]:
    """Return a command of `gcloud compute tpus queued-resources`."""
    location = {"zone": cluster.zone, "project": cluster.project, "quiet": True}
    group = ["gcloud", "compute", "tpus", "queued-resources"]
    return [*group, verb, *names, *long_options(location), *arguments]


class GcloudError(Exception):
    """A command of gcloud failed. The message is the end of its error output."""

    def __init__(self, message: str, code: int):
        self.code = code
        super().__init__(message[-_MAX_MESSAGE:].strip())

    def is_status(self, name: str) -> bool:
        """Return whether the service answered with this status, such as NOT_FOUND."""
        return re.search(rf"\b{name}\b", str(self)) is not None

    @property
    def is_permanent(self) -> bool:
        """Whether the same call would fail again, so that retries are useless."""
        text = str(self)
        is_refused = any(self.is_status(name) for name in _PERMANENT_ERRORS.values())
        no_account = any(phrase in text for phrase in _ACCOUNT_ERRORS)
        return is_refused or no_account or self.code == _USAGE or is_quota_error(text)


def is_quota_error(message: str) -> bool:
    """Return whether the quota, and not a lack of capacity, made a request fail."""
    return "quota" in message.lower()


def is_permanent(code: int | None, message: str) -> bool:
    """Return whether a request that failed with this status would fail again."""
    return code in _PERMANENT_ERRORS or is_quota_error(message)


def call(command: Sequence[str], timeout_s: float = COMMAND_TIMEOUT_S) -> str:
    """Run a command; return its output, or raise GcloudError if it fails."""
    code, out, err = run_captured(command, timeout_s)
    if code:
        raise GcloudError(err, code)
    return out.decode(errors="replace")
