"""What to do where a check of the doctor could not even be made: whom it asks says nothing."""

from collections.abc import Mapping

_OURS = "kubectl -n leasehold-system"
_LOGS = f"{_OURS} logs daemonset/node-agent"
_NATS = f"{_OURS} get pods | grep nats; --nats-url and what is shown to it name another"
_REDIS = f"{_OURS} get pods | grep redis; --redis-url and --redis-credentials name another"
_API = "kubectl get --raw /readyz; --kubeconfig names another, or an account that may ask"
_DRIVER = "nvidia-smi; dmesg | grep -i -E 'nvrm|xid'; --gpus as the agent's"
_KUBELET = (
    "journalctl -u kubelet | grep -i checkpoint; it writes the file anew with the next pod that it "
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
    "container-toolkit": "look at /etc/containerd, /etc/docker and /etc/crio as root",
    "cdi": "look at /etc/cdi and /var/run/cdi as root",
    "cdi-devices": f"{_LOGS} | grep -i cdi; the agent writes its specification anew when it starts",
    "library": "ls -l the --library-dir, as root",
    "library-loads": "ldd FILE names what it lacks",
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
    "parts": _NATS,
    "versions": _NATS,
}
"""By check."""
