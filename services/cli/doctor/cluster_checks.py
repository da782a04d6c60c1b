"""The doctor's verdicts on the cluster's components."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from shared.dialects import GPU_RESOURCES, KUBE_SCHEDULER
from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.full_pods import FullContainer, Workload
from shared.kubernetes.paths import objects_path
from shared.kubernetes.types import ObjectList, RawObject
from shared.ledger.redis_server import RedisFacts
from shared.ledger.server_errors import KEEPS_KEYS, SET_POLICY
from shared.model.devices.device import END_LEFTOVERS, Device
from shared.model.events.pod_events import Heartbeat
from shared.model.findings import Finding, SkipError, fail, ok, warn
from shared.model.leases.ledger import UnreadableRecord
from shared.model.names import AGENTS_NAMESPACE, REQUIRED_SERVICES, SYSTEM_NAMESPACE, NodeName
from shared.model.requests.claim import DRIVER
from shared.nats.wire import MAX_PAYLOAD
from shared.runtime.settings import digest
from shared.runtime.variables import PREFIX

COMBINED = "binder"
"""Its pods have `COMBINED_PARTS`, too, with the component combined-scheduler."""
COMPONENTS = frozenset(
    {"api", "binder", "node-agent", "placer", "planner", "timekeeper", "watcher", "webhook"}
)
"""Deployments and DaemonSets of every installation."""
COMBINED_PARTS = frozenset({"placer", "planner", "watcher"})
"""The component combined-scheduler replaces them."""
UNANSWERED_WEBHOOK = "every new pod with GPUs is denied, and others are not reviewed"
UNANSWERED_API = (
    "kubectl get gpuleases reports no such resource type, and namespaces that are deleted stay "
    "Terminating, see docs/troubleshooting.md"
)
BY_IMAGE = frozenset({"LEASEHOLD_HTTP"})
"""Pods have them without their template."""


@dataclass(frozen=True, slots=True)
class WorkloadSettings:
    values: Mapping[str, str]
    computed: frozenset[str]
    """The kubelet computes them for each pod."""


async def read_settings(kubernetes: KubernetesClient) -> dict[str, WorkloadSettings]:
    """Read the settings as new pods would get them. Raises SkipError if there is none."""
    settings: dict[str, WorkloadSettings] = {}
    for namespace, kind in ((SYSTEM_NAMESPACE, "deployments"), (AGENTS_NAMESPACE, "daemonsets")):
        path = objects_path(namespace, kind, group="/apis/apps/v1")
        for workload in (await kubernetes.read(path, ObjectList[Workload])).items or ():
            for container in workload.spec.template.spec.containers[:1]:
                settings[workload.metadata.name] = await _read(kubernetes, namespace, container)
    if not settings:
        raise SkipError("the components do not run as workloads of this cluster")
    return settings


async def _read(
    kubernetes: KubernetesClient, namespace: str, container: FullContainer
) -> WorkloadSettings:
    values: dict[str, str] = {}
    for source in (source.config_map_ref for source in container.env_from):
        if source:
            path = objects_path(namespace, "configmaps", source.name)
            values |= (await kubernetes.read(path, RawObject)).data or {}
    values |= {variable.name: variable.value for variable in container.env}
    computed = {
        variable.name for variable in container.env if variable.value_from or "$(" in variable.value
    }
    return WorkloadSettings(values, frozenset(computed))


def settings(wanted: Mapping[str, WorkloadSettings], heartbeats: Iterable[Heartbeat]) -> Finding:
    others = dict[str, tuple[str, list[str]]]()
    compared = 0
    for heartbeat in heartbeats:
        expected = wanted.get(heartbeat.service, wanted.get(COMBINED))
        if expected is None or not heartbeat.settings:
            continue  # it runs outside the cluster
        compared += 1
        if keys := _differing(expected, heartbeat.settings):
            others[heartbeat.instance] = heartbeat.service, keys
    if not others:
        return ok(f"{compared} components run with the settings of their workloads")
    shown = "; ".join(f"{name} ({', '.join(keys)})" for name, (_, keys) in sorted(others.items()))
    service = min(others.items())[1][0]
    name = service if service in wanted else COMBINED
    kind = f"daemonset/{name}" if name == "node-agent" else f"deployment/{name}"
    namespace = AGENTS_NAMESPACE if name == "node-agent" else SYSTEM_NAMESPACE
    return fail(
        f"components run with old settings: {shown}",
        f"kubectl -n {namespace} rollout status {kind}; if it is complete: rollout restart",
    )


def _differing(wanted: WorkloadSettings, running: Mapping[str, str]) -> list[str]:
    digests = {key: digest(value) for key, value in wanted.values.items() if key.startswith(PREFIX)}
    keys = (digests.keys() | (running.keys() - BY_IMAGE)) - wanted.computed
    return sorted(key for key in keys if digests.get(key) != running.get(key))


Version = tuple[int, ...]

AS_OF = "November 2026"
PATCHED: Mapping[str, tuple[Version, ...]] = {
    "Valkey": ((7, 2, 14), (8, 0, 10), (8, 1, 9), (9, 0, 5), (9, 1, 1)),
    "Redis": ((7, 2, 15), (7, 4, 10), (8, 2, 8), (8, 4, 5), (8, 6, 5), (8, 8, 1)),
}
"""The first patch of each maintained minor version without a vulnerability known `AS_OF`.

From the security releases of 21 July 2026 (Valkey) and 24 July 2026 (Redis).
"""


def patched_version(program: str, version: str) -> str:
    """Return the version to upgrade to, or empty if no vulnerability of `version` is known.

    It is of the same minor version, or of the next one that is maintained.
    """
    numbers = tuple(int(part) if part.isdecimal() else -1 for part in version.split("."))
    if -1 in numbers:
        return ""
    minor = numbers[:2]
    later = [patched for patched in PATCHED[program] if patched[:2] >= minor]
    if not later or numbers >= later[0]:
        return ""
    return ".".join(map(str, later[0]))


ALL_PODS = "kubectl get pods -A -l app.kubernetes.io/part-of=leasehold"

AGENT = "node-agent"
_AGENT_OF = f"the {AGENT} of "
CLOCK_WARN_S = 0.5
"""A difference between clocks that makes times in logs and traces misleading."""
CLOCK_FAIL_S = 5.0
"""A difference between clocks at which leases and reservations end too early or too late."""
WEEK_DAYS = 7.0


SLOW_S = 3.0
"""A server that takes longer to connect and for a command without work is overloaded."""
SET_CLOCK = "timedatectl; chronyc tracking: all machines need the same time servers"
NAMED_RECORDS = 5
FUNCTIONS_SINCE = 7
"""The first major version that has libraries of functions."""


def redis(
    facts: RedisFacts, *, by_sentinels: bool, unreadable: Sequence[UnreadableRecord] = ()
) -> Finding:
    """A single server is fine: the ledger is rebuilt if it is lost. Sentinels need a replica."""
    unsuited = _too_old(facts) or _full(facts) or _unsafe(facts) or _slow(facts)
    if unsuited is not None:
        return unsuited
    if unreadable:
        names = ", ".join(f"{record.kind} {record.key}" for record in unreadable[:NAMED_RECORDS])
        return warn(
            f"{len(unreadable)} records were damaged in the last 24 hours, and were written anew: "
            f"{names}",
            "find out what writes to Redis; test the memory and the disk of its machine",
        )
    if not facts.replicas and by_sentinels:
        return warn(
            "it has no replica that Sentinels could promote",
            "redis-cli info replication; start its replicas, or have them follow it",
        )
    patched = patched_version(facts.program, facts.version)
    if patched:
        return warn(
            f"{facts.program} {facts.version} has vulnerabilities that were known in {AS_OF}",
            f"upgrade it to {patched} or newer, see docs/versions.md",
        )
    alone = "no replica (the ledger would be rebuilt from pods and agents)"
    replicas = f"{facts.replicas} replicas" if facts.replicas else alone
    server = f"{facts.program} {facts.version or 'of unknown version'}"
    policy = facts.maxmemory_policy or "policy unknown"
    return ok(f"{server}, primary, {replicas}, appendonly, {policy}")


def _too_old(facts: RedisFacts) -> Finding | None:
    major = facts.version.partition(".")[0]
    if not major.isdecimal() or int(major) >= FUNCTIONS_SINCE:
        return None
    return fail(
        f"{facts.program} {facts.version} cannot load the ledger's functions",
        f"upgrade it to {facts.program} 7.2 or newer, see docs/versions.md",
    )


def _full(facts: RedisFacts) -> Finding | None:
    if not 0 < facts.most_mib <= facts.used_mib:
        return None
    return fail(
        f"its memory is full, {facts.used_mib} of {facts.most_mib} MiB: it refuses writes, so "
        "that no pod is placed",
        "redis-cli config set maxmemory AMOUNT, and in its configuration; redis-cli --bigkeys "
        "shows what other programs have stored",
    )


def _slow(facts: RedisFacts) -> Finding | None:
    if facts.reply_s <= SLOW_S:
        return None
    return warn(
        f"it takes {facts.reply_s:.1f} s to reply: pods are placed late, or not at all",
        "redis-cli --latency; redis-cli slowlog get; give its machine CPU and a faster disk",
    )


def _unsafe(facts: RedisFacts) -> Finding | None:
    if facts.role != "master":
        return fail(
            f"it is a {facts.role}: nothing can be written", "set --redis-url to the primary's URL"
        )
    if facts.maxmemory_policy not in {"", KEEPS_KEYS}:
        return fail(
            f"maxmemory-policy is {facts.maxmemory_policy}: it may evict leases",
            SET_POLICY,
        )
    if not facts.last_write_succeeded:
        return fail("its last write to disk failed", "redis-cli info persistence; df -h")
    if facts.appendonly != "yes":
        return warn(
            "appendonly is off: after a crash the ledger is rebuilt, and placing waits for that",
            "redis-cli config set appendonly yes, and in its configuration",
        )
    if facts.replay_refusal:
        return fail(
            "after a restart it replays its append-only file as the user default, and drops what "
            f"that user may not do: {facts.replay_refusal}",
            "redis-cli acl setuser default off resetpass '~*' '&*' +@all, and so in its users file",
        )
    return None


def nats(most_bytes: int, reply_s: float) -> Finding:
    if reply_s > SLOW_S:
        return warn(
            f"NATS takes {reply_s:.1f} s to reply: leases and events are late",
            "nats-server's log and its CPU; leasehold topology shows what passes through it",
        )
    if most_bytes < MAX_PAYLOAD:
        return warn(
            f"NATS accepts messages of at most {most_bytes} bytes: the leases of a node whose pods "
            "have many containers may not fit into one",
            f"set max_payload of NATS to {MAX_PAYLOAD}",
        )
    return ok("NATS accepts the connection and the user")


def clock(server: str, ahead_s: float) -> Finding:
    text = f"the clock of {server} is {abs(ahead_s):.2f} s {'ahead' if ahead_s > 0 else 'behind'}"
    if abs(ahead_s) > CLOCK_FAIL_S:
        return fail(text, SET_CLOCK)
    return warn(text, SET_CLOCK) if abs(ahead_s) > CLOCK_WARN_S else ok(text)


def slow_api_server(reply_s: float) -> Finding:
    return warn(
        f"the API server takes {reply_s:.1f} s to reply: pods are placed and bound late",
        "kubectl get --raw /readyz?verbose; see the latency of etcd, and apiserver_request_duration"
        "_seconds",
    )


def clocks(ahead_s: Mapping[str, float]) -> Finding:
    wrong = [
        f"{name} is {abs(ahead):.0f} s {'ahead' if ahead > 0 else 'behind'}"
        for name, ahead in sorted(ahead_s.items())
        if abs(ahead) > CLOCK_FAIL_S
    ]
    if wrong:
        return fail(f"clocks differ from this machine's: {'; '.join(wrong)}", SET_CLOCK)
    return ok(f"the clocks of {len(ahead_s)} components agree with this machine's")


CALLERS = {
    True: "; only API servers with a client certificate are served",
    False: "; it does not know its callers: pods with claims are bound about 5 s later, and floods "
    "may delay reviews (docs/install.md, client certificates of the API server)",
    None: "",
}
"""None if it is unknown whether the webhook knows its callers."""


def webhook(
    missing: Sequence[str],
    days_left: float | None,
    refusal: str,
    *,
    knows_callers: bool | None = None,
) -> Finding:
    """`refusal` is why the server is not trusted."""
    command = f"kubectl -n {SYSTEM_NAMESPACE} %s deployment/webhook"
    restart = command % "rollout restart"
    logs = command % "logs"
    if missing:
        return fail(
            f"not registered: {', '.join(missing)}: pods pass unchecked",
            f"kubectl apply -k OVERLAY, with all its components, or helm upgrade; then {restart}",
        )
    if refusal:
        return fail(f"the API server cannot use it: {refusal}", logs)
    if days_left is None:
        return fail("it is registered without a certificate authority", restart)
    if days_left <= 0:
        return fail("its certificate authority has expired", restart)
    if days_left < WEEK_DAYS:
        text = f"its certificate authority expires in {days_left:.1f} days, and is not renewed"
        return warn(text, logs)
    text = f"registered; its certificate authority is valid for {days_left:.0f} days"
    return ok(text + CALLERS[knows_callers])


@dataclass(frozen=True, slots=True)
class Replicas:
    namespace: str
    kind: str
    wanted: int
    ready: int


def endpoints(unanswered: Mapping[str, str], count: int) -> Finding:
    """`unanswered` has the names of Services by registration."""
    if not unanswered:
        return ok(f"{count} registrations with the API server have a ready endpoint")
    if (agent := unanswered.get(f"deviceclasses/{DRIVER}")) is not None:
        return fail(
            f"ResourceClaims of {DRIVER} wait: no {agent} publishes ResourceSlices",
            f"set LEASEHOLD_DRA=conditions for the agents; kubectl -n {AGENTS_NAMESPACE} logs "
            f"daemonset/{agent} | grep -i slice",
        )
    listed = ", ".join(f"{name} (Service {service})" for name, service in unanswered.items())
    effects = (
        (UNANSWERED_WEBHOOK, any("webhook" in name for name in unanswered)),
        (UNANSWERED_API, any(name.startswith("apiservices/") for name in unanswered)),
    )
    said = "; ".join(text for text, applies in effects if applies)
    deployment = next(iter(unanswered.values()))
    return fail(
        f"registered, and nothing answers: {listed}: {said}",
        f"kubectl -n {SYSTEM_NAMESPACE} get deployment/{deployment}; if its replicas are 0: "
        f"kubectl -n {SYSTEM_NAMESPACE} scale deployment/{deployment} --replicas=2",
    )


def workloads(sizes: Mapping[str, Replicas]) -> Finding:
    combined = not COMBINED_PARTS & sizes.keys()
    missing = sorted(COMPONENTS - sizes.keys() - (COMBINED_PARTS if combined else set()))
    problems = [f"{name} is not installed" for name in missing]
    for name, size in sorted(sizes.items()):
        if size.kind != "daemonsets" and size.wanted == 0:
            problems.append(f"{size.kind[:-1]}/{name} is scaled to 0")
        elif size.ready < size.wanted:
            problems.append(
                f"{size.kind[:-1]}/{name}: {size.ready} of {size.wanted} replicas are ready"
            )
    if problems:
        return fail(
            "; ".join(problems),
            f"kubectl -n {SYSTEM_NAMESPACE} get deployments,statefulsets,pods; kubectl -n "
            f"{AGENTS_NAMESPACE} get pods; kubectl scale, or kubectl apply -k OVERLAY, or helm "
            "upgrade",
        )
    counts = ", ".join(f"{name} {size.ready}" for name, size in sorted(sizes.items()))
    return ok(f"ready replicas: {counts}")


def versions(by_replica: Mapping[str, str]) -> Finding:
    if len(set(by_replica.values())) > 1:
        replicas = sorted(by_replica.items())
        return warn(
            "components are of different versions: "
            + ", ".join(f"{name} {version or 'unknown'}" for name, version in replicas),
            f"finish the rollout: {ALL_PODS} -o wide",
        )
    if not by_replica:
        return fail("no component sends a heartbeat", f"leasehold up; {ALL_PODS}")
    version = next(iter(by_replica.values())) or "unknown"
    return ok(f"{len(by_replica)} components run, all of version {version}")


def components(
    heartbeats: Iterable[Heartbeat],
    nodes: Mapping[NodeName, str],
    *,
    observed_s: float,
    required: Iterable[str] = REQUIRED_SERVICES,
    reported: Collection[str] = (),
    nats_is_slow: bool = False,
) -> Finding:
    """`nodes` have devices that their agents reported, each with why it is cordoned, or empty.

    Probes named `reported` are left to the checks of their servers. Through a slow NATS, a
    heartbeat may arrive later than it was waited for.
    """
    running = tuple(heartbeats)
    missing = [] if nats_is_slow else _missing(running, nodes, required)
    problems = [f"no heartbeat of {name} within {observed_s:g} s" for name in missing]
    names_of: dict[str, list[str]] = {}
    waiting: set[str] = set()
    for component in sorted(running, key=lambda component: component.instance):
        for reason in component.unready_reasons:
            probe = reason.partition(": ")[0]
            if probe in reported or (nats_is_slow and probe == "nats"):
                waiting.add(component.instance)
            else:
                names_of.setdefault(reason, []).append(component.instance)
    hints: list[str] = []
    for reason, names in sorted(names_of.items()):
        cause, _, hint = reason.partition("; ")
        problems.append(f"{', '.join(names)}: {cause}")
        hints += [hint] if hint else []
    silent = {name.removeprefix(_AGENT_OF) for name in missing}
    unready = {component.node for component in running if component.unready_reasons}
    problems += [
        f"node {name} gets no pods: {why}"
        for name, why in sorted(nodes.items())
        if why and name not in silent | unready
    ]
    if problems:
        return fail(
            "; ".join(problems),
            hints[0]
            if hints
            else f"kubectl -n {SYSTEM_NAMESPACE} logs POD; of agents: -n {AGENTS_NAMESPACE}",
        )
    if waiting:
        return ok(f"{len(running)} components run; {len(waiting)} wait for what another check has")
    return ok(f"{len(running)} components are ready")


def leftovers(nodes: Mapping[NodeName, Sequence[Device]]) -> Finding:
    findings = [
        leftover.text(f"GPU {device.index} of node {node}")
        for node, devices in sorted(nodes.items())
        for device in devices
        for leftover in device.leftovers
    ]
    if not findings:
        return ok("no process of an earlier pod holds a GPU")
    more = f"; and {len(findings) - NAMED_RECORDS} more" if len(findings) > NAMED_RECORDS else ""
    return fail("; ".join(findings[:NAMED_RECORDS]) + more, END_LEFTOVERS)


def _missing(
    running: Sequence[Heartbeat], nodes: Iterable[NodeName], required: Iterable[str]
) -> list[str]:
    services = {heartbeat.service for heartbeat in running}
    served = {heartbeat.node for heartbeat in running if heartbeat.service == AGENT}
    absent = [f"any {name}" for name in required if name not in services]
    return absent + [f"{_AGENT_OF}{node}" for node in sorted(nodes) if node not in served]


def rights(denied: Iterable[str], allowed: int) -> Finding:
    missing = sorted(denied)
    if missing:
        return fail(
            f"the account may not {', '.join(missing)}",
            "kubectl apply -k k8s/base; kubectl auth can-i --list --as "
            f"system:serviceaccount:{AGENTS_NAMESPACE}:node-agent",
        )
    return ok(f"the account has all {allowed} rights that an agent needs")


def storage_rights(user: str, denied: Sequence[str], count: int) -> Finding:
    if denied:
        return fail(
            f"{user} may not {', '.join(denied)}: pods with PersistentVolumeClaims wait",
            f"kubectl apply -k OVERLAY, or helm upgrade; kubectl auth can-i --list --as {user}",
        )
    return ok(f"the watcher has all {count} rights to read claims, volumes and their drivers")


def runtime_class(exists: bool) -> Finding:
    if exists:
        return ok("RuntimeClass nvidia exists")
    return ok(
        "there is no RuntimeClass nvidia: NVIDIA's runtime must be the default one of GPU nodes, "
        "or devices be passed by CDI (on a node: container-toolkit, cdi-devices)"
    )


def resource_quotas(hard: Mapping[str, Iterable[str]]) -> Finding:
    """Extended resources are counted as `requests.NAME` only.

    https://kubernetes.io/docs/concepts/policy/resource-quotas/#quota-for-extended-resources
    """
    quotas = {quota: set(names) for quota, names in sorted(hard.items())}
    counted = {f"requests.{name}" for name in GPU_RESOURCES}
    uncounted = {f"limits.{name}" for name in GPU_RESOURCES} | GPU_RESOURCES
    wrong = {quota: names & uncounted for quota, names in quotas.items() if names & uncounted}
    if not wrong:
        number = sum(bool(names & counted) for names in quotas.values())
        return ok(f"ResourceQuotas that limit GPUs: {number}")
    first = next(iter(wrong))
    namespace, _, name = first.partition("/")
    instead = ", ".join(sorted(f"requests.{name.removeprefix('limits.')}" for name in wrong[first]))
    return warn(
        "not counted, so they limit nothing: "
        + "; ".join(f"{', '.join(sorted(names))} of {quota}" for quota, names in wrong.items()),
        f"kubectl -n {namespace} edit resourcequota {name}, and write {instead}; a GPUQuota limits "
        "all resource names together, see docs/budgets.md",
    )


def _minor(version: str) -> int | None:
    """Return the minor version, or None of text that is no version.

    >>> _minor("v1.36.2-gke.100")
    36
    """
    match = re.match(r"v?1\.(\d+)\b", version)
    return int(match[1]) if match else None


def device_classes(
    resources: Mapping[str, str], allocatable: Mapping[NodeName, Iterable[str]]
) -> Finding:
    """A node serves an extended resource by a device plugin or by ResourceClaims, not by both.

    https://kubernetes.io/docs/concepts/scheduling-eviction/dynamic-resource-allocation/#extended-resource
    """
    twice = {
        (node, device_class): name
        for node, names in sorted(allocatable.items())
        for device_class, name in sorted(resources.items())
        if name in set(names)
    }
    if not twice:
        return ok("no device plugin serves an extended resource of a DeviceClass")
    (node, device_class), name = next(iter(twice.items()))
    more = f" and {len(twice) - 1} more" if len(twice) > 1 else ""
    return warn(
        f"node {node} has {name} of a device plugin, and DeviceClass {device_class} has the same "
        f"extended resource{more}: kube-scheduler uses the device plugin's there",
        f"kubectl edit deviceclass {device_class}, and choose another extendedResourceName; or "
        "leave the system with that resource name out of the node agents' --systems",
    )


def extender(ready_replicas: Mapping[str, int | None], *, image: str, cluster: str) -> Finding:
    """Judge Deployments, with None for a missing one.

    `image` is that of kube-scheduler, and `cluster` the version of the API server: kube-scheduler
    may be one minor version older, and not newer.
    https://kubernetes.io/releases/version-skew-policy/#kube-controller-manager-kube-scheduler-and-cloud-controller-manager
    """
    own = _minor(image.rpartition(":")[2])
    served = _minor(cluster)
    if own is not None and served is not None and not 0 <= served - own <= 1:
        return fail(
            f"kube-scheduler is of version 1.{own}, and the API server of 1.{served}: it may not "
            "find what it watches, and then places no pod",
            "set the image registry.k8s.io/kube-scheduler to the tag "
            f"{cluster.partition('+')[0].partition('-')[0]} in your overlay, or kubeSchedulerImage "
            "of the chart",
        )
    lacking = sorted(name for name, ready in ready_replicas.items() if not ready)
    if not lacking:
        counts = ", ".join(f"{name} {ready}" for name, ready in sorted(ready_replicas.items()))
        return ok(f"ready replicas: {counts}")
    name = lacking[0]
    text = "has no ready replica"
    if ready_replicas[name] is None:
        text = "does not exist"
    return fail(
        f"deployment/{name} {text}: pods with schedulerName {KUBE_SCHEDULER} wait",
        f"kubectl -n {SYSTEM_NAMESPACE} describe pods -l app.kubernetes.io/name={name}; the auth "
        f"service creates the Secret auth-{name}",
    )
