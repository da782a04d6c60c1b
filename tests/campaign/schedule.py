"""What a campaign does and when: a pure function of its seed; pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random

from tests.campaign.workload import RESIZABLE, PodPlan, choose_gang, choose_pod, choose_preempting

ROUND_S = 12.0
"""Length of a round. What follows is calm, and as long as the system needs to settle."""
PODS_S = 10.0
"""Pods come and go from its beginning to here; faults end later."""
CALM_S = 8.0
"""Length of a calm time with which the number of rounds is estimated."""
KEPT_PODS = 30
"""From this number of pods on, a round begins with deleting some."""
NODES = ("node-0", "node-1", "node-2")
GPUS_PER_NODE = 2
LAYOUTS = {
    "node-0": "2xA100-80GB",
    "node-1": "2xA100-80GB",
    "node-2": "1xA100-80GB+1xA100-80GB:mig",
}
ACCOUNTING = {"node-0": "dmem", "node-1": "misc", "node-2": "dmem"}
"""How the driver of each node limits memory."""
MIG_DEVICES = (("node-2", 1),)
"""Node and index of the devices in MIG mode."""
DOUBLED_DEVICES = ("node-0:0", "node-0:1", "node-1:0", "node-2:0")
"""Those that can report the UUID of the same device of the next node."""
SERVICES = (
    *("watcher", "placer-0", "planner", "binder", "scheduler"),
    *("timekeeper", "webhook", *(f"agent-{node}" for node in NODES)),
)
"""`scheduler` is another watcher, placer, planner and binder, in one process."""
LINKED = tuple(name for name in SERVICES if name != "webhook")
SERVERS_OF = {
    "watcher": ("nats", "api"),
    "placer": ("nats", "redis"),
    "planner": ("nats", "redis", "api"),
    "binder": ("nats", "redis", "api"),
    "scheduler": ("nats", "redis", "api"),
    "timekeeper": ("nats", "redis", "api"),
    "agent": ("nats", "api"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultKind:
    """One kind of fault: on what it works, how long, and what it does to Redis' contents."""

    targets: tuple[str, ...] = ("",)
    seconds: tuple[float, float] = (0.0, 0.0)
    rebuilds: bool = False
    """Redis loses contents, so the ledger is rebuilt."""


def _links() -> tuple[str, ...]:
    return tuple(
        f"{part}:{server}" for part in LINKED for server in SERVERS_OF[part.partition("-")[0]]
    )


WINDOW_S = (3.0, 14.0)
KUBELET_WAYS = ("pods", "resources", "plugins")
"""A kubelet's list of pods, its PodResources, and the sockets of the agent's plugins."""
PLUGIN_WAYS = ("cut", "slow", "half-open")
"""What happens to all sockets between a kubelet and the device plugins of its agent."""
FAULTS: Mapping[str, FaultKind] = {
    "kill": FaultKind(targets=(*SERVICES, "nats", "valkey", "simcluster")),
    "pause": FaultKind(targets=(*SERVICES, "nats", "valkey", "simcluster"), seconds=WINDOW_S),
    "cut": FaultKind(targets=_links(), seconds=WINDOW_S),
    "clock": FaultKind(targets=SERVICES, seconds=(5.0, 9.0)),
    "redis-flush": FaultKind(rebuilds=True),
    "redis-rollback": FaultKind(rebuilds=True),
    "redis-full": FaultKind(seconds=WINDOW_S),
    "redis-readonly": FaultKind(seconds=WINDOW_S),
    "redis-misconf": FaultKind(seconds=WINDOW_S),
    "redis-busy": FaultKind(seconds=WINDOW_S),
    "api-slow": FaultKind(seconds=WINDOW_S),
    "api-409": FaultKind(seconds=WINDOW_S),
    "api-410": FaultKind(seconds=WINDOW_S),
    "api-429": FaultKind(seconds=WINDOW_S),
    "api-500": FaultKind(seconds=WINDOW_S),
    "api-after-write": FaultKind(seconds=WINDOW_S),
    "outage": FaultKind(seconds=(2.0, 8.0)),
    "node-gone": FaultKind(targets=NODES, seconds=(0.5, 6.0)),
    "cordon": FaultKind(targets=NODES, seconds=(5.0, 20.0)),
    "device": FaultKind(
        targets=tuple(f"{node}:{index}" for node in NODES for index in range(GPUS_PER_NODE)),
        seconds=(3.0, 8.0),
    ),
    "stuck": FaultKind(
        targets=tuple(f"{node}:{index}" for node in NODES for index in range(GPUS_PER_NODE)),
        seconds=(4.0, 9.0),
    ),
    "kubelet-restart": FaultKind(targets=NODES),
    "kubelet-cut": FaultKind(
        targets=tuple(f"{node}:{way}" for node in NODES for way in KUBELET_WAYS), seconds=WINDOW_S
    ),
    "plugin-link": FaultKind(
        targets=tuple(f"{node}:{way}" for node in NODES for way in PLUGIN_WAYS), seconds=WINDOW_S
    ),
    "node-gone-unseen": FaultKind(targets=NODES, seconds=(0.5, 6.0)),
    "device-twice": FaultKind(targets=DOUBLED_DEVICES, seconds=(4.0, 9.0)),
    "driver-version": FaultKind(targets=NODES, seconds=(3.0, 8.0)),
    "limits-vanish": FaultKind(),
    "limits-error": FaultKind(targets=NODES, seconds=WINDOW_S),
    "limits-kept": FaultKind(targets=NODES, seconds=WINDOW_S),
    "quota": FaultKind(seconds=(4.0, 9.0)),
    "budget": FaultKind(seconds=(4.0, 9.0)),
    "tenant": FaultKind(seconds=(4.0, 9.0)),
    "agent": FaultKind(targets=NODES, seconds=(4.0, 9.0)),
}
"""Every kind of fault, by the name that `--fault` takes."""
CLOCK_OFFSETS_S = (-3600.0, -45.0, -5.0, 5.0, 45.0, 3600.0)
API_DELAYS_S = (0.3, 1.5, 4.0)
PLUGIN_DELAYS_S = (0.1, 0.7, 2.0)
"""For each chunk of bytes; a call has several."""
DEVICE_FAULTS = ("unhealthy", "vanish", "hang")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault of a round."""

    kind: str
    target: str = ""
    at_s: float
    """Since the beginning of the round."""
    lasts_s: float = 0.0
    detail: str = ""
    """A clock's offset or the API server's delay in seconds, or a device's fault."""

    def __str__(self) -> str:
        parts = (self.kind, self.target, self.detail, f"{self.lasts_s:.1f} s" * bool(self.lasts_s))
        return " ".join(part for part in parts if part)


@dataclass(frozen=True, slots=True, kw_only=True)
class PodAction:
    """A pod is created or deleted."""

    at_s: float
    verb: str
    """create, delete, remove (delete without a grace period), or resize."""
    name: str
    pod: PodPlan | None = None
    """Created, or as it is after the resize."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Some seconds of pods and faults, followed by calm."""

    number: int
    pods: tuple[PodAction, ...]
    faults: tuple[Fault, ...]

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of its faults, each once."""
        return tuple(sorted({fault.kind for fault in self.faults}))

    @property
    def hostile_nodes(self) -> frozenset[str]:
        """Nodes in whose agents' names somebody else speaks in it."""
        return frozenset(fault.target for fault in self.faults if fault.kind == "agent")

    @property
    def rebuilds(self) -> bool:
        """Whether Redis loses contents in it."""
        return any(FAULTS[kind].rebuilds for kind in self.kinds)


@dataclass(slots=True)
class _Names:
    """The names of pods that a campaign has created and not deleted, in order."""

    alive: list[str] = field(default_factory=list)
    count: int = 0

    def new(self, prefix: str) -> str:
        self.count += 1
        return f"{prefix}-{self.count}"


def rounds_of(seed: int, seconds: float, kinds: Sequence[str] = tuple(FAULTS)) -> tuple[Round, ...]:
    """Return the rounds of a campaign. A kind comes back only when all others had their turn."""
    random = Random(f"campaign {seed}")  # noqa: S311 - a replay needs the same numbers
    names = _Names()
    count = max(1, round(seconds / (ROUND_S + CALM_S)))
    turns: list[str] = []
    rounds = []
    for number in range(count):
        if not turns:
            turns = random.sample(list(kinds), len(kinds))
        chosen = [turns.pop()]
        if len(kinds) > 1 and random.random() < 0.5:
            chosen.append(random.choice(kinds))
        faults = tuple(sorted((_fault(random, kind) for kind in chosen), key=lambda f: f.at_s))
        pods = _pod_actions(random, names)
        rounds.append(Round(number=number, pods=pods, faults=faults))
    return tuple(rounds)


def _fault(random: Random, kind: str) -> Fault:
    described = FAULTS[kind]
    lasts_s = round(random.uniform(*described.seconds), 1)
    ends_s = random.uniform(PODS_S - 1.0, ROUND_S)
    detail = ""
    if kind == "clock":
        detail = f"{random.choice(CLOCK_OFFSETS_S):+g}"
    if kind == "api-slow":
        detail = f"{random.choice(API_DELAYS_S)}"
    if kind == "device":
        detail = random.choice(DEVICE_FAULTS)
    target = random.choice(described.targets)
    if target.endswith(":slow"):
        detail = f"{random.choice(PLUGIN_DELAYS_S)}"
    return Fault(
        kind=kind,
        target=target,
        at_s=round(max(ends_s - lasts_s, 0.5), 1),
        lasts_s=lasts_s,
        detail=detail,
    )


def _pod_actions(random: Random, names: _Names) -> tuple[PodAction, ...]:
    actions: list[PodAction] = []
    surplus = max(len(names.alive) - KEPT_PODS, 0)
    for _ in range(surplus + random.randint(2, 6)):
        if names.alive:
            name = names.alive.pop(random.randrange(len(names.alive)))
            actions.append(_gone(random, name, random.uniform(0.0, PODS_S)))
    for _ in range(random.randint(4, 8)):
        actions += _come(random, names, random.uniform(0.0, PODS_S - 2.0))
    if random.random() < 0.5:
        urgent = choose_preempting(random, names.new("urgent"))
        at_s = round(random.uniform(2.0, PODS_S - 2.0), 2)
        actions.append(PodAction(at_s=at_s, verb="create", name=urgent.name, pod=urgent))
        names.alive.append(urgent.name)
    if random.random() < 0.75:
        actions += _gang(random, names, random.uniform(0.0, PODS_S - 1.0))
    return tuple(sorted(actions, key=lambda action: action.at_s))


def _gone(random: Random, name: str, at_s: float) -> PodAction:
    verb = "remove" if random.random() < 0.2 else "delete"
    return PodAction(at_s=round(at_s, 2), verb=verb, name=name)


def _come(random: Random, names: _Names, at_s: float) -> list[PodAction]:
    """A pod comes; some are deleted at once, some come again under the same name."""
    run_s = random.choice((3, 10, 100_000, 100_000))
    name = names.new("pod")
    forged = random.choice(NODES) if random.random() < 0.05 else ""
    pod = choose_pod(random, name, run_s=run_s, forged_node=forged)
    actions = [PodAction(at_s=round(at_s, 2), verb="create", name=name, pod=pod)]
    fate = random.random()
    if fate < 0.35:
        at_s += random.choice((0.01, 0.1, 0.5, 1.5))
        actions.append(_gone(random, name, at_s))
    if fate < 0.15:
        again = choose_pod(random, name, run_s=run_s)
        actions.append(PodAction(at_s=round(at_s + 0.01, 2), verb="create", name=name, pod=again))
    if fate >= 0.35 or fate < 0.15:
        names.alive.append(name)
    if fate > 0.5 and pod.vocabulary in RESIZABLE and not (forged or pod.init):
        for after_s, halves in ((4.0, 1), (random.uniform(5.0, 7.0), random.choice((2, 3)))):
            sized = replace(pod, want=replace(pod.want, mib=pod.want.mib * halves // 2))
            action = PodAction(at_s=round(at_s + after_s, 2), verb="resize", name=name, pod=sized)
            actions.append(action)
    return actions


def _gang(random: Random, names: _Names, at_s: float) -> list[PodAction]:
    """A gang comes; some lose a member while they wait, so that it is never complete."""
    members = choose_gang(random, names.new("gang"), random.randint(2, 3), run_s=100_000)
    actions = [
        PodAction(at_s=round(at_s + 0.05 * number, 2), verb="create", name=pod.name, pod=pod)
        for number, pod in enumerate(members)
    ]
    names.alive += [pod.name for pod in members]
    if random.random() < 0.4:
        first = members[0].name
        names.alive.remove(first)
        late = [action for action in actions if action.name != first]
        gone = PodAction(at_s=round(at_s + 0.2, 2), verb="remove", name=first)
        return [
            actions[0],
            gone,
            *(
                PodAction(at_s=round(a.at_s + 0.4, 2), verb="create", name=a.name, pod=a.pod)
                for a in late
            ),
        ]
    return actions
