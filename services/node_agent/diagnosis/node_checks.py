"""The doctor's verdicts on a node."""

from collections.abc import Iterable, Mapping, Sequence, Set

from services.node_agent.gpus.inventory import DeviceSample, Gpu
from services.node_agent.instance_lock import POD, UNIT, AgentInstance
from services.node_agent.isolation.library import StoredLibrary
from services.node_agent.usage.attribution import AttributedProcess
from shared.dialects.advertised import PluginDeviceId
from shared.dialects.reserved import VISIBLE
from shared.model.devices.device import Device
from shared.model.events.node_events import Allocation, ViolationFound, ViolationReason
from shared.model.findings import Finding, fail, ok, warn
from shared.model.leases.lease import Lease
from shared.model.names import AGENTS_NAMESPACE, DISCOVERED_LABELS, GPU_LABEL, PodUid

AGENT_POD = f"kubectl -n {AGENTS_NAMESPACE}"
AGENT_LABEL = "leasehold.dev/agent"
"""With the value `unit` the node gets no pod of the DaemonSet."""
NONE: Mapping[int, str] = {}
OTHER_PLUGIN = (
    "of the GPU operator: helm upgrade with devicePlugin.enabled=false; else kubectl get "
    "daemonsets -A | grep -i -E 'device-plugin|vgpu|gpu-manager', and remove that one from this "
    "node"
)
DRIVER_NAME = "nvidia"
MAX_LISTED = 5
MAX_LISTED_IDS = 2_000
"""With more, a kubelet of 1.36 that restarts is busy for seconds, and allocates nothing."""

Registered = Mapping[str, frozenset[str] | None]


def gets_agent_pod(labels: Mapping[str, str]) -> bool:
    chosen = labels.get(GPU_LABEL)
    discovered = any(labels.get(name) == "true" for name in DISCOVERED_LABELS)
    is_gpu_node = chosen == "true" or (discovered and chosen != "false")
    return is_gpu_node and labels.get(AGENT_LABEL) != UNIT


def agent(node: str, instance: AgentInstance | None, labels: Mapping[str, str] | None) -> Finding:
    if instance is None:
        return fail(
            "no agent serves this node",
            f"{AGENT_POD} get pods -o wide | grep node-agent; or, for its unit: systemctl status "
            "leasehold-agent",
        )
    unit_expected = labels is not None and labels.get(AGENT_LABEL) == UNIT
    pod_expected = labels is not None and gets_agent_pod(labels)
    if instance.form == UNIT and pod_expected:
        return fail(
            f"{instance} serves this node, and the DaemonSet has a pod for it as well",
            f"kubectl label node {node} {AGENT_LABEL}={UNIT}",
        )
    if instance.form == POD and unit_expected:
        return fail(
            f"{instance} serves this node, whose label selects the unit",
            f"{AGENT_POD} delete pod {instance.name}; systemctl enable --now leasehold-agent",
        )
    return ok(f"{instance} serves this node")


def kubelet_socket(path: str, error: str) -> Finding:
    if not error:
        return ok(f"the kubelet listens on {path}")
    return fail(
        f"the kubelet does not listen on {path}: {error}",
        "systemctl status kubelet; if it has another --root-dir, set --kubelet-dir",
    )


def other_plugins(
    registered: Registered,
    served: Mapping[str, Mapping[str, PluginDeviceId]],
    other_sockets: Sequence[str],
) -> Finding:
    wrong = sorted(
        resource
        for resource, ids in registered.items()
        if resource in served and ids and not ids <= served[resource].keys()
    )
    if wrong:
        sockets = f" (other sockets: {', '.join(other_sockets)})" if other_sockets else ""
        return fail(
            f"another device plugin serves {', '.join(wrong)}{sockets}: the kubelet uses the "
            "plugin that registered last",
            OTHER_PLUGIN,
        )
    rivals = [name for name in other_sockets if name.startswith(DRIVER_NAME)]
    if rivals and any(resource.startswith(DRIVER_NAME) for resource in served):
        return fail(
            f"another device plugin runs on this node ({', '.join(rivals)}): the kubelet uses it "
            "instead of ours as soon as it registers again",
            OTHER_PLUGIN,
        )
    return ok("no other plugin serves our resources")


def registration(
    registered: Registered, served: Mapping[str, Mapping[str, PluginDeviceId]]
) -> Finding:
    missing = [
        name
        for name in sorted(served)
        if not registered.get(name)
        and any(served_id.healthy for served_id in served[name].values())
    ]
    if missing:
        return fail(
            f"the kubelet has no devices of {', '.join(missing)}",
            f"{AGENT_POD} logs daemonset/node-agent | grep -i regist; it retries the registration",
        )
    return ok(f"{len(served)} resources are registered")


def node_resources(
    allocatable: Mapping[str, int],
    served: Mapping[str, Mapping[str, PluginDeviceId]],
    patched: Mapping[str, int],
) -> Finding:
    expected = {
        **{
            name: sum(served_id.healthy for served_id in ids.values())
            for name, ids in served.items()
        },
        **patched,
    }
    wrong = [
        f"{name} {allocatable.get(name, 0)} instead of {amount}"
        for name, amount in sorted(expected.items())
        if allocatable.get(name, 0) != amount
    ]
    if wrong:
        return fail(
            f"the node's status has {', '.join(wrong[:MAX_LISTED])}",
            "kubectl get node NODE -o jsonpath='{.status.allocatable}'; the agent corrects it "
            "within 10 s while it runs and may patch nodes/status",
        )
    return ok(f"the node's status has {len(expected)} resources as its devices have them")


def list_sizes(served: Mapping[str, Mapping[str, PluginDeviceId]]) -> Finding:
    """See docs/kubelets.md."""
    if not served:
        return warn("nothing is served", f"{AGENT_POD} logs daemonset/node-agent")
    name = max(served, key=lambda name: len(served[name]))
    count = len(served[name])
    text = (
        f"the kubelet gets {count} device IDs of {name}; at most {MAX_LISTED_IDS} are recommended"
    )
    if count > MAX_LISTED_IDS:
        advice = "raise --memory-factor, or use --gpu-strategy auto, if it is a list of memory"
        return warn(text, advice)
    return ok(text)


def device_health(
    devices: Iterable[Device], closed: Mapping[int, str] = NONE, *, cordoned: bool = False
) -> Finding:
    listed = list(devices)
    faults = [
        f"GPU {device.index}: {device.fault or 'not healthy'}"
        for device in listed
        if not device.healthy
    ]
    if faults:
        return fail(
            "; ".join(faults[:MAX_LISTED]),
            "leasehold gpus; nvidia-smi -q; dmesg | grep -i xid; a device returns once it recovers",
        )
    if not listed:
        return fail("the node has reported no device", f"{AGENT_POD} logs daemonset/node-agent")
    text = f"healthy devices: {len(listed)}"
    if cordoned:
        return warn(f"{text}; the node gets no new pods: kubectl cordon", "kubectl uncordon NODE")
    reasons = [
        f"GPU {device.index}: {closed[device.index]}" for device in listed if device.index in closed
    ]
    if reasons:
        return warn(
            f"{text}; closed to new pods: {'; '.join(reasons[:MAX_LISTED])}",
            "leasehold uncordon NODE/GPU, or remove it from the annotation",
        )
    return ok(text)


def driver(gpus: Sequence[Gpu], unseen: Mapping[int, str]) -> Finding:
    faults = [f"GPU {gpu.index}: {gpu.fault}" for gpu in gpus if gpu.fault is not None]
    faults += [f"number {number} of its GPUs: {why}" for number, why in sorted(unseen.items())]
    if faults:
        return fail("; ".join(faults[:MAX_LISTED]), "nvidia-smi -q; dmesg | grep -i xid")
    if not gpus:
        return fail("the driver lists no GPU", "nvidia-smi -L; lspci | grep -i nvidia")
    unmeasured = [str(gpu.index) for gpu in gpus if not gpu.measured]
    if unmeasured:
        return warn(
            f"the driver does not report the memory of GPU {', '.join(unmeasured)}: pods get it "
            "whole or without a limit",
            "nvidia-smi -q -d MEMORY; N/A is usual where GPU and host share the memory (GB10)",
        )
    return ok(f"driver {gpus[0].driver or 'of unknown version'} lists all GPUs: {len(gpus)}")


def mig_modes(gpus: Iterable[Gpu], devices: Iterable[Device]) -> Finding:
    modes = {device.uuid: device.mode for device in devices}
    wrong = [
        f"GPU {gpu.index} is in {gpu.mode} mode, the ledger has {modes[gpu.uuid]}"
        for gpu in gpus
        if gpu.uuid in modes and modes[gpu.uuid] is not gpu.mode
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
    return ok("MIG modes match the ledger")


def library(
    current: StoredLibrary | None, source: str, *, layout: str = "", replaced_by: str | None = None
) -> Finding:
    """`replaced_by` is why other content at the source cannot be used, or None if there is none."""
    if current is None:
        return fail(
            f"no library is installed, so no shares are allocated here: {source} has none",
            "install HAMi-core: see the page docs/hami-core.md",
        )
    version = current.version or "of unknown version"
    text = (
        f"HAMi-core {version}, limits file of layout {layout or 'unknown'}, content "
        f"{current.content[:12]}, at {current.path}"
    )
    if replaced_by is None:
        return ok(text)
    return warn(
        f"{text}; {source} has other content, which is not installed"
        f"{f': {replaced_by}' if replaced_by else ''}",
        "the agent installs it within 5 s if it is usable: see its log",
    )


def library_loads(path: str, error: str) -> Finding:
    if not error:
        return ok(f"{path} loads, as far as possible without the driver's own libraries")
    return fail(
        f"{path} is unusable: {error}",
        "ldd FILE lists what is missing; install HAMi-core 2.8.2 or newer for this node's libc",
    )


def checkpoint(allocations: Iterable[Allocation], leases: Mapping[PodUid, Lease] | None) -> Finding:
    listed = list(allocations)
    if leases is None:
        return ok(f"containers in the agent's checkpoint: {len(listed)}")
    wrong = [
        f"{allocation.namespace}/{allocation.name} container {allocation.container} "
        f"{'has other shares than its lease' if allocation.pod in leases else 'has no live lease'}"
        for allocation in listed
        if allocation.pod not in leases
        or _devices(allocation.lease, allocation.container)
        != _devices(leases[allocation.pod], allocation.container)
    ]
    if wrong:
        return fail(
            "; ".join(wrong[:MAX_LISTED]),
            "leasehold audit; entries of ended pods go within 30 s while the agent runs",
        )
    return ok(f"containers in the agent's checkpoint: {len(listed)}, all match their leases")


def _devices(lease: Lease, container: str) -> set[tuple[str, int]]:
    return {(share.device, share.memory_mib) for share in lease.shares_of(container)}


def pod_resources(
    held_ids: Mapping[tuple[str, str], frozenset[str]], allocations: Iterable[Allocation]
) -> Finding:
    allocated: dict[tuple[str, str], set[str]] = {}
    for allocation in allocations:
        allocated.setdefault((allocation.namespace, allocation.name), set()).update(
            allocation.device_ids
        )
    foreign = {pod: ids - allocated.get(pod, set()) for pod, ids in held_ids.items()}
    wrong = [
        f"{namespace}/{name} holds {len(ids)} devices that the agent has not allocated"
        for (namespace, name), ids in sorted(foreign.items())
        if ids
    ]
    if wrong:
        return fail(
            "; ".join(wrong[:MAX_LISTED]),
            "delete those pods: they got devices from another plugin, or before the state "
            "directory was lost",
        )
    return ok(f"pods with devices: {len(held_ids)}, all allocated by the agent")


def kubelet_checkpoint(
    pods: Set[str], allocations: Iterable[Allocation], live: Mapping[str, str] | None
) -> Finding:
    """The kubelet keeps ended pods until it allocates again; `live` are the others, if known."""
    unknown = pods - {str(allocation.pod) for allocation in allocations}
    running = sorted(live[pod] for pod in unknown if live is not None and pod in live)
    if running:
        return warn(
            "the kubelet's checkpoint names pods that the agent's does not: "
            f"{', '.join(running[:MAX_LISTED])}",
            "delete them: they got devices from another plugin, or before the state directory was "
            "lost",
        )
    if unknown:
        which = "which this account may not list" if live is None else "which have ended"
        return ok(f"the kubelet's checkpoint names {len(unknown)} other pods, {which}")
    return ok("the kubelet's checkpoint names only pods that the agent's does, too")


def temperature(samples: Iterable[DeviceSample]) -> Finding:
    hot = [
        f"GPU {sample.index} {sample.hardware.heat_text}"
        for sample in samples
        if sample.hardware is not None and sample.hardware.is_hot
    ]
    if hot:
        return warn(
            f"{'; '.join(hot[:MAX_LISTED])}: its pods are slower",
            "nvidia-smi -q -d TEMPERATURE,POWER; check fans and airflow; leasehold cordon NODE/GPU "
            "keeps new pods away meanwhile",
        )
    return ok("no GPU is slowed down by its temperature")


def processes(samples: Iterable[DeviceSample], unleased: Iterable[AttributedProcess]) -> Finding:
    index_of = {sample.device: sample.index for sample in samples}
    wrong = [
        f"process {process.process.pid} on GPU {index_of[process.device]}" for process in unleased
    ]
    if wrong:
        return fail(
            f"without a lease: {', '.join(wrong[:MAX_LISTED])}",
            "ps -fp PID; end it, or exclude GPUs that the host uses "
            "(filterdevices of the device configuration)",
        )
    return ok("every process on a device belongs to a lease")


def no_bundles(directories: Sequence[str]) -> Finding:
    return warn(
        "containers that could use GPUs without a lease are not noticed: the container runtime "
        f"describes none in {', '.join(directories)}",
        "set --bundle-dir to its directory with one of each container's ID, and mount it in the "
        "agent's pod",
    )


def visible_gpus(violations: Sequence[ViolationFound], count: int) -> Finding:
    texts = [
        f"{violation.namespace}/{violation.name}: {violation.message}" for violation in violations
    ]
    if not texts:
        return ok(f"containers: {count}, none can open a GPU that it does not lease")
    more = f"; and {len(texts) - MAX_LISTED} more pods" if len(texts) > MAX_LISTED else ""
    text = "; ".join(texts[:MAX_LISTED]) + more
    fix = "kubectl delete pod, once the container runtime is closed: see docs/install.md, step 2"
    is_open = any(violation.reason == ViolationReason.VISIBLE for violation in violations)
    return fail(text, fix) if is_open else warn(text, "deny privileged pods with Pod Security")


def runtime(tools: Sequence[str], *, is_configured: bool) -> Finding:
    if not tools:
        return fail(
            "NVIDIA's container toolkit is not installed",
            "install nvidia-container-toolkit, then nvidia-ctk runtime configure && systemctl "
            "restart containerd",
        )
    if not is_configured:
        return warn(
            f"{', '.join(tools)} is installed, and no runtime is configured for it",
            "nvidia-ctk runtime configure --runtime=containerd && systemctl restart containerd",
        )
    return ok(f"{', '.join(tools)}, and the runtime is configured for it")


def not_by_cdi(why: str) -> Finding:
    return warn(
        f"devices are passed to containers by {VISIBLE}, not by CDI: {why}",
        "docs/install.md, step 2; --device-list-strategy envvar if it is meant so",
    )


def cdi_devices(path: str, expected: Iterable[str], named: frozenset[str] | None) -> Finding:
    if named is None:
        return fail(
            f"containers get their devices by CDI, and {path} is missing",
            f"{AGENT_POD} logs daemonset/node-agent | grep -i cdi; the agent needs --cdi-dir of "
            "the node and access to its driver's files by --host-root",
        )
    missing = sorted(set(expected) - named)
    if missing:
        return fail(
            f"{path} does not name {', '.join(missing[:MAX_LISTED])}",
            "nvidia-smi -L; the agent rewrites it within 5 s while it runs",
        )
    return ok(f"devices in {path}: {len(named)}")


def cdi(kinds: Mapping[str, Sequence[str]], broken: Sequence[str]) -> Finding:
    repeated = {kind: files for kind, files in kinds.items() if len(files) > 1}
    if broken:
        return fail(
            f"not a CDI specification: {', '.join(broken)}",
            "nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml",
        )
    if repeated:
        kind, files = next(iter(sorted(repeated.items())))
        return warn(
            f"{kind} is specified in {', '.join(files)}",
            "keep one: runtimes refuse a device that is named twice",
        )
    return ok(f"{sum(map(len, kinds.values()))} CDI specifications: {', '.join(sorted(kinds))}")
