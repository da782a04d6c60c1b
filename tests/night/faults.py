"""The table of faults: how each is made and ended, and what every place has to say of it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from services.node_agent.gpus.device_faults import XID_GUIDES
from tests.night.places import Place
from tests.night.remedies import (
    Act,
    audit,
    reset_gpu,
    restart,
    restart_node,
    restart_program,
)
from tests.night.stack import NODES, RUNS, Night
from tests.support.stack import running

LIMIT_S = 30.0
"""From a fault to the words of a place."""
LOOK_S = 8.0
QUOTAS = "/api/v1/namespaces/default/resourcequotas"
WAITING, RUNNING, DOCTOR, BANNER, ALERT = Place
MISSING = "LeaseholdComponentMissing"
SLOW = "LeaseholdServerSlow"
UNAFFECTED = "it is not affected"
NO_PROBLEM = "it is no error of a component"
RUNS_TOO = "it runs"
NOT_CREATED = "no pod with GPUs can be created: failed calling webhook"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault, and what each place has to contain; or why it may be silent.

    Of the doctor that is `CHECK: ` and text, or `CHECK NODE: `; of alerts the name.
    """

    name: str
    text: str
    begin: Act
    end: Act
    remedy: str
    """What an operator does; `end` does it here, or what it stands for."""
    says: Mapping[Place, str]
    silent: Mapping[Place, str] = field(default_factory=dict)
    runbook: str
    """A section of docs/troubleshooting.md."""
    entry: str
    """Words of that section which are about this fault."""
    gpu: str = "node-0/0"
    """The GPU that both pods may have."""
    pod_after_s: float = 0.0
    """When the second pod is created: an agent looks at its GPUs and its disk every few seconds."""

    made_by: tuple[str, ...] = ()
    """Words of lines that say how it is made here."""

    @property
    def check(self) -> str:
        """The check of the doctor that reports it, or empty."""
        return self.says.get(DOCTOR, "").partition(":")[0].partition(" ")[0]


def _now(act: Callable[[Night], object]) -> Act:
    async def acted(night: Night) -> None:
        act(night)

    return acted


def _ended(*names: str) -> Act:
    return lambda night: night.end(*names)


def _redis(*command: str) -> Act:
    async def send(night: Night) -> None:
        await night.redis(*command)

    return send


def _problem(text: str) -> dict[Place, str]:
    """Return what explanations say of a problem that the banner shows."""
    line = f"problem     {text}"
    return {WAITING: line, RUNNING: line, BANNER: f"error: {text}"}


AGENTS = tuple(f"agent-{node}" for node in NODES)
SILENT = tuple(f"node-agent of {node}" for node in NODES)
ALL_SILENT = ", ".join(SILENT)
NATS = "nats"
NO_MEMORY = "command not allowed when used memory > 'maxmemory'"


def _xid(number: int, gpu: str, end: Act = reset_gpu) -> Fault:
    guide = XID_GUIDES[number]
    text = f"Xid {number}, {guide.meaning}"
    node, _, index = gpu.partition("/")
    return Fault(
        name=f"xid-{number}",
        text=f"a GPU reports Xid {number}: {guide.meaning}",
        gpu=gpu,
        begin=lambda night: night.sim("break", "--xid", str(number)),
        end=end,
        remedy=guide.remedy,
        says={
            WAITING: text,
            RUNNING: f"UNHEALTHY: cordoned: XidError: {text}: {guide.remedy}",
            DOCTOR: f"device-health {node}: GPU {index}: cordoned: XidError: {text}",
            BANNER: f"warning: Unhealthy: {text}: GPU {index} of {node} -> {guide.remedy}",
            ALERT: "LeaseholdDeviceUnhealthy",
        },
        runbook="a-gpu-is-unhealthy",
        entry=f"| {number} |",
        pod_after_s=LOOK_S,
    )


def _xid_of_program(number: int, gpu: str) -> Fault:
    guide = XID_GUIDES[number]
    index = gpu.partition("/")[2]
    silent = "the GPU works on: the owner of the pod restarts it"
    return Fault(
        name=f"xid-{number}",
        text=f"a GPU reports Xid {number}: {guide.meaning}",
        gpu=gpu,
        begin=lambda night: night.sim("break", "--xid", str(number)),
        end=restart_program,
        remedy=guide.remedy,
        says={RUNNING: f"XID {number}      GPU {index} at "},
        silent={WAITING: RUNS_TOO, DOCTOR: silent, BANNER: silent, ALERT: silent},
        runbook="a-gpu-is-unhealthy",
        entry=f"| {number} |",
    )


def _without_agents(
    name: str,
    text: str,
    begin: Act,
    end: Act,
    *,
    silent: str,
    doctor: str,
    remedy: str,
) -> Fault:
    return Fault(
        name=name,
        text=text,
        begin=begin,
        end=end,
        remedy=remedy,
        says={
            **_problem(f"No heartbeats: {silent}"),
            WAITING: "node(s) had a node agent that ",
            DOCTOR: doctor,
            ALERT: MISSING,
        },
        runbook="a-service-is-not-ready",
        entry="`No heartbeats",
    )


def _without_service(
    name: str,
    *,
    text: str,
    doctor: str,
    waiting: str,
    runbook: str = "a-service-is-not-ready",
    entry: str = "`No heartbeats",
) -> Fault:
    return Fault(
        name=f"{name}-away",
        text=text,
        begin=_now(lambda night: night.keep_away(name)),
        end=_ended("away"),
        remedy=f"kubectl -n leasehold-system get deployment/{name}; scale it, or see its log",
        says={
            RUNNING: f"problem     No heartbeats: {name}",
            DOCTOR: doctor,
            BANNER: f"error: No heartbeats: {name}",
            ALERT: MISSING,
        },
        silent={WAITING: waiting},
        runbook=runbook,
        entry=entry,
    )


def _slow(
    name: str,
    part: str,
    still_s: float,
    works_s: float,
    shown: str,
    *,
    check: str,
    remedy: str,
) -> Fault:
    return Fault(
        name=name,
        text=f"{shown} works for a tenth of the time",
        begin=_now(lambda night: night.slow_down(part, still_s=still_s, works_s=works_s)),
        end=_ended("slow"),
        remedy=remedy,
        says={BANNER: f"warning: {shown} is slow", DOCTOR: f"{check}: ", ALERT: SLOW},
        silent={WAITING: RUNS_TOO, RUNNING: UNAFFECTED},
        runbook="a-server-is-slow",
        entry=f"- {shown.removeprefix('The ')}:",
    )


def _rebuilt(name: str, text: str, begin: Act, *, remedy: str) -> Fault:
    """Return a fault that ends before anybody reads of it, but for the alert."""
    return Fault(
        name=name,
        text=text,
        begin=begin,
        end=audit,
        remedy=remedy,
        says={ALERT: "LeaseholdLedgerRebuilt"},
        silent=dict.fromkeys(
            (WAITING, RUNNING, DOCTOR, BANNER), "the ledger is rebuilt within seconds"
        ),
        made_by=(MISSING,),  # for the seconds of the rebuild, and the alert waits two minutes
        runbook="a-service-is-not-ready",
        entry="has lost writes",
    )


async def _older_redis(night: Night) -> None:
    night.save_redis()
    await night.create_pod("later")
    await night.up.until("later", running, limit_s=LIMIT_S * night.patience)
    night.roll_back_redis()


async def _lose_lease(night: Night) -> None:
    """Have Redis lose the lease of the pod that runs, as by a manual write."""
    uid = (await night.up.pod(RUNS))["metadata"]["uid"]
    await night.redis("HDEL", "lh:leases", uid)


async def _set_quota(night: Night) -> None:
    spec = {"hard": {"requests.volcano.sh/vgpu-number": "1"}}
    await night.up.kube.create(QUOTAS, {"metadata": {"name": "gpus"}, "spec": spec})


FAULTS: tuple[Fault, ...] = (
    Fault(
        name="redis-full",
        text="Redis has no memory left",
        begin=_redis("CONFIG", "SET", "maxmemory", "1mb"),
        end=_redis("CONFIG", "SET", "maxmemory", "0"),
        remedy="redis-cli config set maxmemory AMOUNT",
        says={
            WAITING: NO_MEMORY,
            RUNNING: NO_MEMORY,
            DOCTOR: "redis: its memory is full",
            BANNER: NO_MEMORY,
            ALERT: MISSING,
        },
        runbook="a-service-is-not-ready",
        entry="`OOM`",
    ),
    _slow("redis-slow", "valkey", 4.0, 0.3, "Redis", check="redis",
          remedy="give its machine CPU and a faster disk"),
    _rebuilt("redis-older", "Redis starts with an older file", _older_redis,
             remedy="none: a binder rebuilds the leases; find out why writes were lost"),
    Fault(
        name="nats-deaf",
        text="NATS replies to nothing",
        begin=_now(lambda night: night.hold(NATS)),
        end=restart(NATS),
        remedy="restart NATS",
        says={
            **_problem("NATS delivers no heartbeats"),
            DOCTOR: "nats: ",
            ALERT: MISSING,
        },
        runbook="a-service-is-not-ready",
        entry="`NATS delivers no heartbeats`",
    ),
    _slow("nats-slow", NATS, 4.0, 0.2, "NATS", check="nats",
          remedy="give it CPU"),
    _without_agents(
        "agent-away",
        "the agent of a node does not run",
        _now(lambda night: night.keep_away(AGENTS[0])),
        _ended("away"),
        silent=SILENT[0],
        doctor="agent node-0: no agent serves this node",
        remedy="start the agent: its pod, or its unit",
    ),
    _without_agents(
        "agents-away",
        "no agent runs",
        _now(lambda night: night.keep_away(*AGENTS)),
        _ended("away"),
        silent=ALL_SILENT,
        doctor="agent node-0, node-1: no agent serves this node",
        remedy="start the agents: kubectl -n leasehold-agents get daemonsets",
    ),
    _without_agents(
        "agent-hangs",
        "the agent of a node hangs",
        _now(lambda night: night.hold(AGENTS[0])),
        restart(AGENTS[0]),
        silent=SILENT[0],
        doctor="components: no heartbeat of the node-agent of node-0 within 6 s",
        remedy="delete the agent's pod, or restart its unit",
    ),
    _without_agents(
        "agents-hang",
        "all agents hang",
        _now(lambda night: night.hold(*AGENTS)),
        restart(*AGENTS),
        silent=ALL_SILENT,
        doctor="components: no heartbeat of the node-agent of node-0 within 6 s; no heartbeat of "
        "the node-agent of node-1 within 6 s",
        remedy="kubectl -n leasehold-agents rollout restart daemonset/node-agent",
    ),
    _without_service(
        "webhook",
        text="no webhook runs",
        doctor="webhook: the API server cannot use it",
        waiting=NOT_CREATED,
        runbook="the-webhook-denies-a-pod",
        entry="`failed calling webhook",
    ),
    Fault(
        name="webhook-slow",
        text="the webhook works for a tenth of the time",
        begin=_now(lambda night: night.slow_down("webhook", still_s=9.0, works_s=1.0)),
        end=_ended("slow"),
        remedy="give the webhook CPU, or more replicas",
        says={DOCTOR: "webhook: the API server cannot use it: it takes"},
        silent={
            WAITING: RUNS_TOO,
            RUNNING: UNAFFECTED,
            BANNER: "only the API server measures it: apiserver_admission_webhook_admission_"
            "duration_seconds",
            ALERT: "LeaseholdHandlingSlow needs ten minutes of many pods",
        },
        runbook="a-server-is-slow",
        entry="- Webhook:",
    ),
    Fault(
        name="webhook-certificate",
        text="the webhook's certificate is over, and was not renewed",
        begin=lambda night: night.let_certificate_expire(),
        end=_now(lambda night: night.renew_certificate()),
        remedy="let the webhook write its Secret; it renews within 10 s",
        says={
            RUNNING: "problem     the certificate has expired",
            BANNER: "error: the certificate has expired",
            DOCTOR: "components: webhook: certificate: the certificate has expired",
            ALERT: MISSING,
        },
        silent={WAITING: NOT_CREATED},
        made_by=("Clocks differ: webhook", "clocks: clocks differ", "LeaseholdClocksDiffer"),
        runbook="a-service-is-not-ready",
        entry="`the certificate has expired`",
    ),
    _slow("api-slow", "simcluster", 4.0, 0.4, "The API server", check="api-clock",
          remedy="give the API server and etcd CPU and a faster disk"),
    _xid_of_program(13, "node-1/0"),
    _xid_of_program(31, "node-1/1"),
    _xid(48, "node-1/2"),
    _xid(74, "node-1/3"),
    _xid(79, "node-1/4", restart_node),
    _xid(94, "node-1/5"),
    _xid(95, "node-0/1"),
    Fault(
        name="gpu-gone",
        text="the driver does not list a GPU any more",
        gpu="node-0/2",
        begin=lambda night: night.sim("break", "--fault", "vanish"),
        end=restart_node,
        remedy="drain and restart the node; have the GPU replaced if it stays away",
        says={
            WAITING: "the driver no longer lists it",
            RUNNING: "the driver no longer lists it",
            DOCTOR: "device-health node-0: GPU 2: cordoned: NotListed",
            BANNER: "warning: Unhealthy: the driver no longer lists it: GPU 2 of node-0",
            ALERT: "LeaseholdDeviceUnhealthy",
        },
        runbook="a-gpu-is-unhealthy",
        entry="`NotListed`",
        pod_after_s=2 * LOOK_S,
    ),
    Fault(
        name="gpu-hot",
        text="a GPU is slowed down by its temperature",
        gpu="node-0/3",
        begin=lambda night: night.sim("break", "--fault", "hot"),
        end=lambda night: night.sim("heal"),
        remedy="check fans, airflow and its power limit",
        says={
            RUNNING: "SLOW        GPU 3 is slowed down by its temperature",
            DOCTOR: "temperature node-0: GPU 3 is slowed down by its temperature",
            BANNER: "warning: Slowed down by temperature: GPU 3 of node-0",
            ALERT: "LeaseholdGpuHot",
        },
        silent={WAITING: RUNS_TOO},
        runbook="a-gpu-is-unhealthy",
        entry="`LeaseholdGpuHot`",
    ),
    Fault(
        name="disk-full",
        text="the disk of a node is full",
        begin=_now(lambda night: night.fill_disk()),
        end=_now(lambda night: night.filling.unlink()),
        remedy="free some of the disk",
        says={
            WAITING: "nothing can be written below",
            DOCTOR: "components: node node-0 gets no pods: nothing can be written below",
            BANNER: "warning: nothing can be written below",
            ALERT: "LeaseholdNodeClosed",
        },
        silent={RUNNING: UNAFFECTED},
        runbook="what-closes-and-when-it-opens-again",
        entry="the disk is full",
        pod_after_s=LOOK_S,
    ),
    Fault(
        name="library-missing",
        text="HAMi-core's library is missing on a node",
        gpu="node-0/4",
        begin=_now(lambda night: night.library.unlink()),
        end=_now(lambda night: night.library.touch()),
        remedy="install it again: the component hami-core, or libvgpu.so in /usr/local/vgpu",
        says={
            WAITING: "had no GPU on which limits would be enforced",
            RUNNING: "new pods    do not get that of GPU 4: HAMi-core's library is missing",
            DOCTOR: "library node-0: no library is installed",
            BANNER: "warning: HAMi-core's library is missing or unusable on its node",
            ALERT: "LeaseholdEnforcerLost",
        },
        runbook="codes-of-refusals",
        entry="`LeaseholdEnforcerLost`",
        pod_after_s=LOOK_S,
    ),
    Fault(
        name="clock-of-redis",
        text="the clock of Redis' machine is 45 s ahead",
        begin=_now(lambda night: night.clocks.shift("valkey-server", 45.0)),
        end=_now(lambda night: night.clocks.shift("valkey-server", 0.0)),
        remedy="chronyc makestep on its machine",
        says={
            DOCTOR: "redis-clock: the clock of Redis is ",
            BANNER: "warning: Clocks differ: redis is ",
            ALERT: "LeaseholdClocksDiffer",
        },
        silent={WAITING: RUNS_TOO, RUNNING: UNAFFECTED},
        runbook="clocks-differ",
        entry="`redis-clock`",
    ),
    Fault(
        name="clock-of-node",
        text="the clock of a node is 45 s behind",
        begin=_now(lambda night: night.clocks.shift(AGENTS[0], -45.0)),
        end=_now(lambda night: night.clocks.shift(AGENTS[0], 0.0)),
        remedy="chronyc makestep on the node",
        says={
            DOCTOR: "clocks: clocks differ from this machine's: node-agent of node-0 is ",
            BANNER: "warning: Clocks differ: node-agent of node-0 is ",
            ALERT: "LeaseholdClocksDiffer",
        },
        silent={WAITING: RUNS_TOO, RUNNING: UNAFFECTED},
        runbook="clocks-differ",
        entry="`clocks`",
    ),
    _rebuilt("ledger-differs", "Redis has lost a lease that the agent has", _lose_lease,
             remedy="none: a binder rebuilds the leases; find out what writes to Redis"),
    Fault(
        name="quota",
        text="a ResourceQuota of Kubernetes is used up",
        begin=_set_quota,
        end=lambda night: night.up.kube.delete(f"{QUOTAS}/gpus"),
        remedy="kubectl edit resourcequota",
        says={},
        silent={
            WAITING: "no pod is created: kubectl, and FailedCreate of its controller, name the "
            "quota",
            RUNNING: UNAFFECTED,
            DOCTOR: "it is as its administrator wants it",
            BANNER: NO_PROBLEM,
            ALERT: NO_PROBLEM,
        },
        runbook="a-pod-is-pending",
        entry="`exceeded quota",
    ),
    _without_service(
        "extender",
        text="the extender does not run",
        doctor="components: no heartbeat of any extender",
        waiting=RUNS_TOO,
    ),
)  # fmt: skip


def _cause(shown: str) -> str:
    """Return a line of the banner without its severity and hint."""
    cause = shown.partition(" -> ")[0]
    return cause.removeprefix("error: ").removeprefix("warning: ").strip()


def page_table() -> str:
    """Return the table of docs/troubleshooting.md."""
    rows = [
        "| "
        + " | ".join(
            (
                f"[{fault.text}](#{fault.runbook})",
                fault.check or "-",
                _cause(fault.says.get(BANNER, "-")),
                fault.says.get(ALERT, "-"),
                fault.remedy,
            )
        )
        + " |"
        for fault in FAULTS
    ]
    head = ("| fault | check of the doctor | banner | alert | remedy |", "|---|---|---|---|---|")
    return "\n".join(("", *head, *rows, ""))
