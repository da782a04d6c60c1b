"""The outcome of one check, why, and what to do about it; pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from shared.model.errors import LeaseholdError


class Outcome(StrEnum):
    """The outcome of a check."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of one check."""

    outcome: Outcome
    text: str
    """What the check found, or why it was skipped."""
    fix: str = ""
    """The command, or what else to do, that fixes it."""
    check: str = ""
    subject: str = ""
    """The node; empty: the cluster."""


class SkipError(LeaseholdError):
    """A check cannot run here; the message is the reason."""


def ok(text: str) -> Finding:
    """Return a finding that all is well."""
    return Finding(outcome=Outcome.OK, text=text)


def warn(text: str, fix: str) -> Finding:
    """Return a finding that something should be different."""
    return Finding(outcome=Outcome.WARN, text=text, fix=fix)


def fail(text: str, fix: str) -> Finding:
    """Return a finding that something is wrong."""
    return Finding(outcome=Outcome.FAIL, text=text, fix=fix)


_KUBECTL = "kubectl -n leasehold-system"
_LOGS = f"{_KUBECTL} logs daemonset/node-agent"
_NATS = f"{_KUBECTL} get pods | grep nats; --nats-url and its credentials name another"
_REDIS = f"{_KUBECTL} get pods | grep redis; --redis-url and --redis-credentials name another"
_API = "kubectl get --raw /readyz; --kubeconfig names another, or an account with the rights"
_DRIVER = "nvidia-smi; dmesg | grep -i -E 'nvrm|xid'; --gpus as the agent's"
_KUBELET = (
    "journalctl -u kubelet | grep -i checkpoint; it rewrites the file with the next pod that it "
    "gives devices to"
)
_RECORD = f"{_LOGS} | grep -i checkpoint; the agent rebuilds what it cannot read when it starts"

REMEDIES: Mapping[str, str] = {
    "agent": "ls -l the --state-dir (--agent-dir here): its agent.lock is a file of the agent's",
    "kubelet-socket": "systemctl status kubelet",
    "other-plugins": _KUBELET,
    "registration": _KUBELET,
    "node-resources": _API,
    "list-size": "give --redis-url of the ledger, and flags as the agent's",
    "driver": _DRIVER,
    "device-health": _REDIS,
    "mig-mode": _DRIVER,
    "container-toolkit": "read /etc/containerd, /etc/docker and /etc/crio as root",
    "cdi": "read /etc/cdi and /var/run/cdi as root",
    "cdi-devices": f"{_LOGS} | grep -i cdi; the agent rewrites its specification when it starts",
    "library": "ls -l the --library-dir, as root",
    "library-loads": "ldd FILE lists what is missing",
    "checkpoint": _RECORD,
    "pod-resources": "systemctl status kubelet; its socket is pod-resources/kubelet.sock below its "
    f"--root-dir; {_RECORD}",
    "kubelet-checkpoint": f"{_KUBELET}; {_RECORD}",
    "processes": _DRIVER,
    "nats": _NATS,
    "redis": _REDIS,
    "redis-clock": _REDIS,
    "api-clock": _API,
    "webhook": _API,
    "rights": _API,
    "runtime-class": _API,
    "components": _NATS,
    "versions": _NATS,
}
"""What to do about a check that fails without a fix of its own, by the check's name."""
