"""Pods of a tenant who harms others, if a field of a pod can; pure.

Each is created where no webhook reviews it, requests a device, and must not get one. The cluster
goes on for everybody else.
"""

from collections.abc import Mapping
from typing import Any

from tests.campaign.workload import DEVICE_MIB

NAMESPACE = "kube-system"
"""Exempt from admission."""
TOO_MUCH = {"nvidia.com/gpu": "1", "nvidia.com/gpumem": str(9 * DEVICE_MIB)}
VGPU = {"volcano.sh/vgpu-number": "1", "volcano.sh/vgpu-memory": "100"}
GROUP = "scheduling.k8s.io/group-name"
SPREAD = {"volcano.sh/group-policy": "spread"}
GANG_NAME = "gang.scheduling.koordinator.sh/name"
GANG_MIN = "gang.scheduling.koordinator.sh/min-available"
LONG = 70_000
MANY = 1000
_LABELS = {f"tenant.example.com/{number}": "x" * 63 for number in range(MANY)}
_NAMES = tuple(f"{number:063}" for number in range(MANY))


def _annotated(**annotations: str) -> dict[str, Any]:
    return {"metadata": {"annotations": annotations}}


def _requesting(limits: Mapping[str, str]) -> dict[str, Any]:
    return {"spec": {"containers": [_container("main", limits)]}}


def _container(name: str, limits: Mapping[str, str]) -> dict[str, Any]:
    return {"name": name, "image": "busybox", "resources": {"limits": dict(limits)}}


HOSTILE: Mapping[str, dict[str, Any]] = {
    "long group": _annotated(**{GROUP: "g" * LONG}, **SPREAD),
    "group with a line feed": _annotated(**{GROUP: "a0\ndefault/pod"}, **SPREAD),
    "group with a separator": _annotated(**{GROUP: "a|b|c"}, **SPREAD),
    "long gang": _annotated(**{GANG_NAME: "g" * LONG, GANG_MIN: "2"}),
    "gang of too many": _annotated(**{GANG_NAME: "g", GANG_MIN: "9" * 30}),
    "long choice": _annotated(**{"volcano.sh/vgpu-mode": "m" * LONG}),
    "many choices": _annotated(**{"nvidia.com/use-gpuuuid": ",".join(_NAMES)}),
    "many containers": {"spec": {"containers": [_container(name, VGPU) for name in _NAMES]}},
    "many labels": {"metadata": {"labels": _LABELS}},
    "many selectors": {"spec": {"nodeSelector": _LABELS}},
    "many tolerations": {"spec": {"tolerations": [{"key": key} for key in _LABELS]}},
    "many devices": _requesting({"volcano.sh/vgpu-number": str(MANY)}),
    "much memory": _requesting(VGPU | {"volcano.sh/vgpu-memory": str(2**62)}),
    "more than a device": _requesting(TOO_MUCH),
    "a forged lease": _annotated(**{"leasehold.dev/lease": "[" * LONG}) | _requesting(TOO_MUCH),
}  # fmt: skip
"""What each of them has, by its name."""


def hostile_pods(number: int) -> list[dict[str, Any]]:
    """Return all of them as the API server takes them; `number` distinguishes their names."""
    return [
        _pod(f"hostile-{number}-{place}", parts) for place, parts in enumerate(HOSTILE.values())
    ]


def _pod(name: str, parts: Mapping[str, Any]) -> dict[str, Any]:
    spec = {"containers": [_container("main", VGPU)], **parts.get("spec", {})}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, **parts.get("metadata", {})},
        "spec": {"schedulerName": "volcano", "terminationGracePeriodSeconds": 1, **spec},
    }
