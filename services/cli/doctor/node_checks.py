"""What the doctor makes of what was seen on a node; pure."""

import platform
from collections.abc import Iterable, Mapping, Sequence

from services.cli.doctor.finding import Finding, fail, ok, warn
from services.node_agent.gpus.device_samples import DeviceSample
from services.node_agent.gpus.inventory import Gpu
from services.node_agent.instance_lock import POD, UNIT, AgentInstance
from services.node_agent.isolation.host_paths import is_loadable
from services.node_agent.views.advertisement import MAX_LIST_BYTES, list_size_bytes
from shared.dialects.advertised import PluginDeviceId
from shared.model.device import Device
from shared.model.events.node_events import Allocation
from shared.model.lease import Lease
from shared.model.names import PodUid

AGENT_POD = "kubectl -n leasehold-system"
AGENT_LABEL = "leasehold.dev/agent"
"""Its value `unit` keeps the DaemonSet off a node that `GPU_LABEL` would have it on."""
GPU_LABEL = "leasehold.dev/gpu"
SHOWN = 5

Registered = Mapping[str, frozenset[str]]
"""IDs that the kubelet holds for healthy, by resource."""


def agent(node: str, holder: AgentInstance | None, labels: Mapping[str, str] | None) -> Finding:
    """Judge whether an agent serves the node, and the one that its label wants; None: not known."""
    if holder is None:
        return fail(
            "no agent serves this node",
            f"{AGENT_POD} get pods -o wide | grep node-agent; or, for its unit: systemctl status "
            "leasehold-agent",
        )
    wants_unit = labels is not None and labels.get(AGENT_LABEL) == UNIT
    wants_pod = labels is not None and labels.get(GPU_LABEL) == "true" and not wants_unit
    if holder.form == UNIT and wants_pod:
        return fail(
            f"{holder} serves this node, and a pod of the DaemonSet comes here as well",
            f"kubectl label node {node} {AGENT_LABEL}={UNIT}",
        )
    if holder.form == POD and wants_unit:
        return fail(
            f"{holder} serves this node, which is labelled to be served by its unit",
            f"{AGENT_POD} delete pod {holder.name}; systemctl enable --now leasehold-agent",
        )
    return ok(f"{holder} serves this node")


def kubelet_socket(path: str, error: str) -> Finding:
    """Judge whether the kubelet listens for device plugins."""
    if not error:
        return ok(f"the kubelet listens on {path}")
    return fail(
        f"the kubelet does not listen on {path}: {error}",
        "systemctl status kubelet; if its --root-dir is another, give --kubelet-dir",
    )


def other_plugins(
    registered: Registered,
    served: Mapping[str, Mapping[str, PluginDeviceId]],
    strangers: Sequence[str],
) -> Finding:
    """Judge whether another plugin serves a resource that is ours to serve."""
    wrong = sorted(
        resource
        for resource, ids in registered.items()
        if resource in served and not ids <= served[resource].keys()
    )
    if wrong:
        sockets = f" (sockets beside ours: {', '.join(strangers)})" if strangers else ""
        return fail(
            f"another device plugin serves {', '.join(wrong)}{sockets}: the kubelet believes "
            "whoever registered last",
            "kubectl get daemonsets -A | grep -i -E 'device-plugin|vgpu|gpu-manager'; keep that "
            "one off this node",
        )
    return ok("nobody else serves our resources")


def registration(
    registered: Registered, served: Mapping[str, Mapping[str, PluginDeviceId]]
) -> Finding:
    """Judge whether the kubelet has what the agent serves."""
    missing = [name for name in sorted(served) if not registered.get(name) and _any(served[name])]
    if missing:
        return fail(
            f"the kubelet has no devices of {', '.join(missing)}",
            f"{AGENT_POD} logs daemonset/node-agent | grep -i regist; it registers anew by itself",
        )
    return ok(f"{len(served)} resources are registered")


def _any(ids: Mapping[str, PluginDeviceId]) -> bool:
    return any(one.healthy for one in ids.values())


def node_resources(
    allocatable: Mapping[str, int],
    served: Mapping[str, Mapping[str, PluginDeviceId]],
    patched: Mapping[str, int],
) -> Finding:
    """Judge whether the node shows what its devices have."""
    wanted = {
        **{name: sum(one.healthy for one in ids.values()) for name, ids in served.items()},
        **patched,
    }
    wrong = [
        f"{name} {allocatable.get(name, 0)} instead of {amount}"
        for name, amount in sorted(wanted.items())
        if allocatable.get(name, 0) != amount
    ]
    if wrong:
        return fail(
            f"the node shows {', '.join(wrong[:SHOWN])}",
            "kubectl get node NODE -o jsonpath='{.status.allocatable}'; the agent corrects it "
            "within 10 s while it runs and may patch nodes/status",
        )
    return ok(f"the node shows {len(wanted)} resources as its devices have them")


def list_sizes(served: Mapping[str, Mapping[str, PluginDeviceId]]) -> Finding:
    """Judge whether the kubelet can take the lists of devices."""
    sizes = {name: list_size_bytes(ids.values()) for name, ids in served.items()}
    if not sizes:
        return warn("nothing is served", f"{AGENT_POD} logs daemonset/node-agent")
    name = max(sizes, key=lambda name: sizes[name])
    share = sizes[name] / MAX_LIST_BYTES
    text = f"the longest list, of {name}, has {sizes[name]} of at most {MAX_LIST_BYTES} bytes"
    if share > 1:
        return fail(text, "raise --memory-factor, or use --gpu-strategy auto")
    if share > 0.8:
        return warn(text, "raise --memory-factor before devices are added")
    return ok(text)


def device_health(devices: Iterable[Device]) -> Finding:
    """Judge whether all devices are healthy."""
    listed = list(devices)
    sick = [f"GPU {one.index}: {one.fault or 'not healthy'}" for one in listed if not one.healthy]
    if sick:
        return fail(
            "; ".join(sick[:SHOWN]),
            "leasehold gpus; nvidia-smi -q; dmesg | grep -i xid; it returns by itself once clean",
        )
    if not listed:
        return fail("the node has reported no device", f"{AGENT_POD} logs daemonset/node-agent")
    return ok(f"{len(listed)} devices are healthy")


def driver(gpus: Sequence[Gpu], unseen: Mapping[int, str]) -> Finding:
    """Judge what the driver lists, and why it has said nothing of others that it counts."""
    silent = [f"GPU {gpu.index}: {gpu.fault}" for gpu in gpus if gpu.fault is not None]
    silent += [f"number {number} of its GPUs: {why}" for number, why in sorted(unseen.items())]
    if silent:
        return fail("; ".join(silent[:SHOWN]), "nvidia-smi -q; dmesg | grep -i xid")
    if not gpus:
        return fail("the driver lists no GPU", "nvidia-smi -L; lspci | grep -i nvidia")
    return ok(f"driver {gpus[0].driver or 'of unknown version'} lists {len(gpus)} GPUs")


def mig_modes(gpus: Iterable[Gpu], devices: Iterable[Device]) -> Finding:
    """Judge whether the hardware's modes are those that the ledger knows, and stay so."""
    known = {device.uuid: device.mode for device in devices}
    wrong = [
        f"GPU {gpu.index} is in {gpu.mode} mode, the ledger has {known[gpu.uuid]}"
        for gpu in gpus
        if gpu.uuid in known and known[gpu.uuid] is not gpu.mode
    ]
    wrong += [
        f"GPU {gpu.index} changes its MIG mode with the next reset"
        for gpu in gpus
        if gpu.mig is not None and gpu.mig.enabled != gpu.mig.pending
    ]
    if wrong:
        return warn(
            "; ".join(wrong), "drain the GPU, then nvidia-smi -i INDEX --gpu-reset, or set it back"
        )
    return ok("MIG modes are as the ledger has them")


def library_file(path: str, head: bytes | None) -> Finding:
    """Judge whether HAMi-core's library is there, for this machine."""
    install = "node_agent --library-source FILE of HAMi-core's libvgpu.so, or --library-dir"
    if head is None:
        return fail(f"{path} is not there: shares cannot be held to their limits", install)
    machine = platform.machine()
    if not is_loadable(head, machine):
        return fail(f"{path} is no 64-bit shared library for {machine}", install)
    return ok(f"{path} is a shared library for {machine}")


def library_loads(path: str, why: str) -> Finding:
    """Judge why a process could not load the library, if it could not."""
    if not why:
        return ok(f"{path} loads, as far as it can without the driver's own libraries")
    return fail(
        f"{path} is of no use: {why}",
        "ldd FILE names what it lacks; install HAMi-core of 2.8.2 or newer for this node's libc",
    )


def checkpoint(told: Iterable[Allocation], leases: Mapping[PodUid, Lease] | None) -> Finding:
    """Judge whether what the agent told the kubelet is what leases say."""
    listed = list(told)
    if leases is None:
        return ok(f"{len(listed)} containers in the agent's checkpoint")
    wrong = [
        f"{one.namespace}/{one.name} container {one.container} "
        f"{'has other shares than its lease' if one.pod in leases else 'has no live lease'}"
        for one in listed
        if one.pod not in leases
        or _devices(one.lease, one.container) != _devices(leases[one.pod], one.container)
    ]
    if wrong:
        return fail(
            "; ".join(wrong[:SHOWN]),
            "leasehold audit; what is over settles within 30 s while the agent runs",
        )
    return ok(f"{len(listed)} containers in the agent's checkpoint, all as leased")


def _devices(lease: Lease, container: str) -> set[tuple[str, int]]:
    return {(share.device, share.memory_mib) for share in lease.shares_of(container)}


def pod_resources(
    held: Mapping[tuple[str, str], frozenset[str]], told: Iterable[Allocation]
) -> Finding:
    """Judge whether what the kubelet holds of our resources is what the agent knows of."""
    known: dict[tuple[str, str], set[str]] = {}
    for one in told:
        known.setdefault((one.namespace, one.name), set()).update(one.device_ids)
    wrong = [
        f"{namespace}/{name} holds {len(ids - known.get((namespace, name), set()))} devices that "
        "the agent has not given"
        for (namespace, name), ids in sorted(held.items())
        if not ids <= known.get((namespace, name), set())
    ]
    if wrong:
        return fail(
            "; ".join(wrong[:SHOWN]),
            "delete those pods: they got devices from another plugin, or before the state "
            "directory was lost",
        )
    return ok(f"{len(held)} pods hold devices, all given by the agent")


def kubelet_record(owners: Mapping[str, frozenset[str]], told: Iterable[Allocation]) -> Finding:
    """Judge whether the kubelet's checkpoint names pods that the agent does not know."""
    known = {str(one.pod) for one in told}
    strange = sorted({pod for pods in owners.values() for pod in pods} - known)
    if strange:
        return warn(
            f"the kubelet's checkpoint names {len(strange)} pods that the agent does not know: "
            f"{', '.join(strange[:SHOWN])}",
            "those that still run: delete them; the kubelet drops the others by itself",
        )
    return ok("the kubelet's checkpoint names only pods that the agent knows")


def processes(
    samples: Iterable[DeviceSample],
    pods: Mapping[int, PodUid | None],
    leased: Mapping[str, set[PodUid]],
) -> Finding:
    """Judge whether processes use devices that their pod has no lease of."""
    wrong = [
        f"process {process.pid} on GPU {sample.index}"
        for sample in samples
        for process in sample.processes
        if pods.get(process.pid) not in leased.get(sample.device, set())
    ]
    if wrong:
        return fail(
            f"outside any lease: {', '.join(wrong[:SHOWN])}",
            "ps -fp PID; end it, or keep GPUs that the host uses out of sharing "
            "(filterdevices of the device configuration)",
        )
    return ok("every process on a device belongs to a lease")


def runtime(found: Sequence[str], *, handlers: bool) -> Finding:
    """Judge whether the container runtime can give containers GPUs."""
    if not found:
        return fail(
            "NVIDIA's container toolkit is not installed",
            "install nvidia-container-toolkit, then nvidia-ctk runtime configure && systemctl "
            "restart containerd",
        )
    if not handlers:
        return warn(
            f"{', '.join(found)} is there, and no configuration of a runtime names it",
            "nvidia-ctk runtime configure --runtime=containerd && systemctl restart containerd",
        )
    return ok(f"{', '.join(found)}, and the runtime is configured for it")


def cdi_devices(path: str, wanted: Iterable[str], named: frozenset[str] | None) -> Finding:
    """Judge whether the agent's CDI specification names what containers are told of by CDI."""
    if named is None:
        return fail(
            f"containers are told their devices by CDI, and {path} is not there",
            f"{AGENT_POD} logs daemonset/node-agent | grep -i cdi; the agent needs --cdi-dir of "
            "the host and sees its driver by --driver-root-ctr-path",
        )
    missing = sorted(set(wanted) - named)
    if missing:
        return fail(
            f"{path} does not name {', '.join(missing[:SHOWN])}",
            "nvidia-smi -L; the agent writes it anew within 5 s while it runs",
        )
    return ok(f"{path} names {len(named)} devices")


def cdi(kinds: Mapping[str, Sequence[str]], broken: Sequence[str]) -> Finding:
    """Judge the CDI specifications: files by kind."""
    doubled = {kind: files for kind, files in kinds.items() if len(files) > 1}
    if broken:
        return fail(
            f"no CDI specification: {', '.join(broken)}",
            "nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml",
        )
    if doubled:
        kind, files = next(iter(sorted(doubled.items())))
        return warn(
            f"{kind} is specified in {', '.join(files)}",
            "keep one: where devices are named twice, runtimes refuse both",
        )
    return ok(f"{sum(map(len, kinds.values()))} CDI specifications: {', '.join(sorted(kinds))}")
