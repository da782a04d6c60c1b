"""What users and time do to the cluster, and the order in which messages arrive."""

from collections.abc import Callable, Sequence

from shared.model.bounds import KEY, LONG, LONGEST_MEMO, MOST_GROUPS
from shared.model.devices.device import DeviceMode
from shared.model.devices.enforcers import HeldBy
from shared.model.names import NodeName, PodUid
from shared.model.requests.request import DeviceSelection, Gang, Term
from tests.model.claims import Claim
from tests.model.kubelet import Kubelet
from tests.model.machine import Machine, chosen
from tests.model.node import Node
from tests.model.rules import any_of, rule, several, together
from tests.model.volumes import WITH_CLAIM
from tests.model.world import DEVICE_MIB, NODES, Message
from tests.support.build import TRIGGER, gpu, request

DEMANDS = (
    HeldBy(memory="driver"),
    HeldBy(memory="driver", compute="none"),
    HeldBy(memory="hami-core", compute="hami-core"),
)
CLAIMS = ("c0", "c1", "c2")
PODS = tuple(f"p{number}" for number in range(6))
GANGS = (Gang(name="ns/red-2", min_member=2), Gang(name="ns/blue-3", min_member=3))
URGENT_GANGS = (Gang(name="ns/urgent-2", min_member=2), Gang(name="ns/urgent-3", min_member=3))
"""The judge reads from a gang's name how many pods it needs."""
TEXTS = ("a", "\n", "|", "a\nns/red-2", "\0", "\u00e9", "\U0001f600", "'", '"', "\\")
"""What texts of hostile pods repeat: separators, and characters of several bytes."""
WATCHER = ("list pods", "resync", "queue pods again")

sizes = any_of(30, 60, 60, 100)
"""MiB of a device of 100."""
positions = any_of(0, 0, 0, 1, 2, 3, 4, 5, 6)
numbers = any_of(0, 1)
nodes = any_of(*NODES)


class Users(Machine):
    """Users, messages, loops and time."""

    @rule(lambda self: self.free_names(), weight=2.0, always=True, mib=several(sizes, at_most=3),
          run_s=any_of(None, 5, 60, 200))  # fmt: skip
    def create_pods(self, mib: Sequence[int], run_s: int | None = None) -> None:
        for amount in mib[: len(self.free_names())]:
            self.create(amount, run_s=run_s)

    @rule(
        lambda self: self.free_names(),
        weight=2.0,
        mib=several(any_of(10, 25, 50, 100), at_most=3),
        mode=any_of(DeviceMode.MIG, DeviceMode.MIG, None),
        run_s=any_of(None, 60),
    )
    def create_instance_pods(
        self, mib: Sequence[int], mode: DeviceMode | None, run_s: int | None = None
    ) -> None:
        """Create pods for MIG instances; without a mode, they take shares of other devices, too."""
        for amount in mib[: len(self.free_names())]:
            self.create(amount, mode=mode, mig_allowed=True, run_s=run_s)

    @rule(
        lambda self: self.free_names(),
        weight=2.0,
        mib=several(sizes, at_most=2),
        demand=any_of(*DEMANDS),
        run_s=any_of(None, 60),
    )
    def create_demanding_pods(
        self, mib: Sequence[int], demand: HeldBy, run_s: int | None = None
    ) -> None:
        """Create pods that demand what holds their memory."""
        for amount in mib[: len(self.free_names())]:
            cores = 0 if demand.compute == "none" else amount // 2
            wanted = gpu(memory=amount, cores_percent=cores, held_by=demand)
            term = Term(max_run_s=run_s)
            self.world.api.create(self.free_names()[0], request(wanted, term=term))

    @rule(lambda self: self.free_names(), weight=0.5, run_s=any_of(None, 60))
    def create_whole_pod(self, run_s: int | None = None) -> None:
        wanted = request(gpu(whole=True), term=Term(max_run_s=run_s))
        self.world.api.create(self.free_names()[0], wanted)

    @rule(
        lambda self: self.free_names(),
        always=True,
        apart=True,
        count=any_of(1, 2, 3),
        run_s=any_of(5, 60, 60),
    )
    def create_number_pods(self, count: int, run_s: int) -> None:
        """Create pods that request a number: they get a whole device, or a replica."""
        wanted = request(gpu(whole=True, number_of=TRIGGER), term=Term(max_run_s=run_s))
        for name in self.free_names()[:count]:
            self.world.api.create(name, wanted)

    @rule(
        lambda self: self.free_names(),
        mib=sizes,
        gang=any_of(*GANGS),
        members=any_of(1, 2, 3),
        mode=any_of(None, None, DeviceMode.MIG),
        run_s=any_of(None, 60),
    )
    def create_gang(
        self,
        mib: int,
        gang: Gang,
        members: int,
        mode: DeviceMode | None = None,
        run_s: int | None = None,
    ) -> None:
        for _ in range(min(members, len(self.free_names()))):
            self.create(mib, gang, mode=mode, mig_allowed=mode is not None, run_s=run_s)

    @rule(
        lambda self: self.free_names(),
        mib=sizes,
        text=any_of(*TEXTS),
        length=any_of(1, KEY, LONG, LONGEST_MEMO),
        count=any_of(1, 2, MOST_GROUPS),
    )
    def create_hostile(self, mib: int, text: str, length: int, count: int) -> None:
        """Create a pod whose texts are as long and odd as messages may carry."""
        filled = [f"{number}{text * length}"[:length] for number in range(count)]
        request_ = request(
            gpu(memory=mib, cores_percent=mib // 2),
            anti_affinity_groups=tuple(text[:LONG] for text in filled),
            memo=filled[0],
            resources=dict.fromkeys((text[:KEY] for text in filled), 0) | {"pods": 1},
        )
        self.world.api.create(self.free_names()[0], request_)

    @rule(
        lambda self: len(self.free_names()) > 3,
        weight=2.0,
        mib=any_of(60, 100),
        run_s=any_of(60, 200),
        rounds=any_of(0, 3, 5),
    )
    def crowd(self, mib: int, run_s: int, rounds: int) -> None:
        """Fill the cluster with pods that end in time; one waits, and brief ones come later."""
        for size, limit, count, waits in (
            (100, run_s if mib == DEVICE_MIB else None, 2, 0),
            (mib, run_s, 1, 0),
            (100, None, 1, rounds),
            (30, 5, 2, 0),
        ):
            for _ in range(min(count, len(self.free_names()))):
                self.create(size, run_s=limit)
            self.world.flow()
            for _ in range(waits):
                self.world.work()

    @rule(
        lambda self: self.free_names(),
        mib=sizes,
        gang=any_of(None, *URGENT_GANGS),
        members=any_of(1, 2, 3),
        priority=any_of(5, 10),
    )
    def create_urgent(self, mib: int, gang: Gang | None, members: int, priority: int) -> None:
        """Create a pod or a gang for which others may be evicted."""
        for _ in range(min(members, len(self.free_names())) if gang else 1):
            self.create(mib, gang, priority=priority)

    @rule(
        lambda self: len(self.free_names()) > 4,
        weight=6.0,
        mib=any_of(60, 100),
        gang=any_of(None, *GANGS),
        needed=any_of(1, 2),
        before=any_of(1, 6),
        rounds=any_of(0, 1, 2, 4),
    )
    def outrank(self, mib: int, gang: Gang | None, needed: int, before: int, rounds: int) -> None:
        """Fill the cluster, with a gang or without one; then pods of higher priority come."""
        for _ in range(3):
            self.create(mib, gang)
        self.world.flow()
        for _ in range(before):
            self.world.work()
        for _ in range(needed):
            self.create(100, URGENT_GANGS[0] if needed > 1 else None, priority=5)
        for _ in range(rounds):
            self.world.work()

    @rule(lambda self: self.world.api.pods, position=positions)
    def protect_or_release(self, position: int) -> None:
        """Let a PodDisruptionBudget forbid the eviction of a pod, or allow it again."""
        pod = self.world.api.pods[chosen(self.world.api.pods, position)]
        pod.is_protected = not pod.is_protected

    @rule(lambda self: self.free_names(), weight=2.0, mib=several(sizes, at_most=3))
    def create_claiming_pods(self, mib: Sequence[int]) -> None:
        """Create pods with a claim each, whose volume is made where the pod is placed."""
        for amount in mib[: len(self.free_names())]:
            name = self.free_names()[0]
            if name not in self.world.api.volumes.claims:
                self.world.api.volumes.create(name)
            wanted = request(gpu(memory=amount, cores_percent=amount // 2), claims=WITH_CLAIM)
            self.world.api.create(name, wanted)

    @rule(
        lambda self: self.world.api.volumes.being_provisioned(),
        weight=3.0,
        position=positions,
        outcome=any_of("made", "made", "given up"),
    )
    def provision(self, position: int, outcome: str) -> None:
        volumes = self.world.api.volumes
        volumes.provision(chosen(volumes.being_provisioned(), position), outcome)

    @rule(lambda self: self.world.api.volumes.claims, position=positions)
    def delete_volume_claim(self, position: int) -> None:
        volumes = self.world.api.volumes
        volumes.delete(chosen(volumes.claims, position))

    def create(
        self,
        mib: int,
        gang: Gang | None = None,
        *,
        mode: DeviceMode | None = None,
        mig_allowed: bool = False,
        run_s: int | None = None,
        priority: int = 0,
    ) -> None:
        self.world.api.create(
            self.free_names()[0],
            request(
                gpu(memory=mib, cores_percent=mib // 2, mig_allowed=mig_allowed),
                term=Term(max_run_s=run_s),
                selection=DeviceSelection(mode=mode),
                gang=gang,
                priority=priority,
            ),
        )

    def free_names(self) -> list[str]:
        return [name for name in PODS if name not in self.world.api.pods]

    @rule(lambda self: self.world.api.pods, position=positions, force=any_of(False, True))
    def delete_pod(self, position: int, force: bool) -> None:
        self.world.api.delete(chosen(self.world.api.pods, position), force=force)

    @rule(lambda self: self.running(), position=positions)
    def pod_succeeds(self, position: int) -> None:
        node, pod = chosen(self.running(), position)
        node.kubelet.end(pod, "Succeeded")

    @rule(
        lambda self: self.running(),
        weight=2.0,
        position=positions,
        mib=any_of(10, 30, 60, 100),
        number=numbers,
    )
    def resize(self, position: int, mib: int, number: int) -> None:
        """Request another size of a running pod; a smaller one needs its container's consent."""
        _, pod = chosen(self.running(), position)
        self.world.resize(pod, mib, self.world.binders[number])

    @rule(
        lambda self: self.running(),
        position=positions,
        percent=any_of(0, 50, 100),
        uncounted=any_of(False, True),
    )
    def use_memory(self, position: int, percent: int, uncounted: bool = False) -> None:
        """Let a container use this part of its limit.

        What its library does not count, such as memory pools, the driver counts if it holds it.
        """
        node, pod = chosen(self.running(), position)
        record = node.kubelet.records[pod]
        record.uncounted = uncounted and record.hooked
        record.used_mib = node.limit_mib(record) * percent // 100

    @rule(lambda self: self.running(), position=positions)
    def restart_container(self, position: int) -> None:
        """Let a container crash; the kubelet starts it again."""
        node, pod = chosen(self.running(), position)
        node.kubelet.stop(pod)

    # ResourceClaims

    @rule(lambda self: self.free_claims(), weight=2.0, mib=any_of(10, 30, 60, 100))
    def create_claim(self, mib: int) -> None:
        self.world.claims.create(self.free_claims()[0], mib)

    @rule(lambda self: self.allocatable(), weight=2.0, position=positions, device=positions)
    def allocate_claim(self, position: int, device: int) -> None:
        """Allocate a claim to a device of which the scheduler knows only other claims."""
        claims = self.world.claims
        claim = chosen(self.allocatable(), position)
        node, shared = chosen(self.world.scheduler.devices(), device)
        if sum(leased.mib for leased in claims.on(shared.uuid)) + claim.mib <= DEVICE_MIB:
            self.world.scheduler.allocate(claim, node, shared.uuid)

    @rule(
        lambda self: self.allocatable(),
        weight=3.0,
        position=positions,
        device=positions,
        replicas=any_of((0,), (1,), (0, 1)),
        is_lost=any_of(False, False, True),
    )
    def begin_allocation(
        self, position: int, device: int, replicas: Sequence[int], is_lost: bool
    ) -> None:
        """Begin a write of an allocation, which binders answer; it may be lost after that.

        Another scheduler may write one of the same claim meanwhile.
        """
        node, shared = chosen(self.world.scheduler.devices(), device)
        self.world.scheduler.begin_write(
            chosen(self.allocatable(), position),
            node,
            shared.uuid,
            replicas=replicas,
            is_lost=is_lost,
        )
        self.world.loop.settle()

    @rule(lambda self: self.world.claims.stored, position=positions)
    def share_claim(self, position: int) -> None:
        """Let one more pod use a claim, unless it is one pod's own."""
        claim = chosen(self.world.claims.stored.values(), position)
        if not claim.owner:
            self.world.claims.add_consumer(claim)

    @rule(lambda self: self.used_claims(), position=positions, force=any_of(False, True))
    def leave_claim(self, position: int, force: bool) -> None:
        """End a pod that uses a claim; by force, its container runs until the kubelet ends it."""
        claim = chosen(self.used_claims(), position)
        is_last = len(claim.consumers) == 1
        if is_last and not force and any(claim.uid in k.claims for k in self.kubelets()):
            claim.ending = True
        else:
            self.world.claims.remove_consumer(claim)

    def free_claims(self) -> list[str]:
        return [name for name in CLAIMS if name not in self.world.claims.stored]

    def allocatable(self) -> list[Claim]:
        stored = self.world.claims.stored.values()
        waiting = [claim for claim in stored if claim.consumers and claim.node is None]
        return waiting if self.world.scheduler.devices() else []

    def used_claims(self) -> list[Claim]:
        stored = self.world.claims.stored.values()
        return [claim for claim in stored if claim.consumers and not claim.ending]

    def kubelets(self) -> list[Kubelet]:
        return [node.kubelet for node in self.world.nodes.values()]

    def running(self) -> list[tuple[Node, PodUid]]:
        """Return the pods whose containers run, with their nodes."""
        return [
            (node, uid)
            for node in self.world.nodes.values()
            for uid, record in node.kubelet.records.items()
            if record.given is not None
        ]

    # Messages

    @rule(
        lambda self: self.world.bag,
        weight=4.0,
        always=True,
        deliveries=several(together(positions, numbers, any_of(False, True)), at_most=4),
    )
    def deliver(self, deliveries: Sequence[tuple[int, int, bool]]) -> None:
        """Deliver some messages in any order; a `stale` placer has not read the feed since."""
        for position, replica, stale in deliveries:
            if self.world.bag:
                message = chosen(self.world.bag, position)
                self.tell(f"delivers {message} to {message.to} {replica}")
                self.world.deliver(message, replica, stale=stale)

    @rule(lambda self: self.world.bag, position=positions)
    def duplicate(self, position: int) -> None:
        message = chosen(self.world.bag, position)
        self.tell(f"duplicates {message}")
        self.world.bag.append(Message(message.event, message.to))

    @rule(lambda self: self.world.bag, position=positions)
    def lose(self, position: int) -> None:
        message = chosen(self.world.bag, position)
        self.tell(f"loses {message}")
        self.world.bag.remove(message)

    @rule(weight=3.0, always=True)
    def flow(self) -> None:
        """Everything that is on its way arrives, in order."""
        self.world.flow()

    @rule(weight=2.0, always=True)
    def work(self) -> None:
        """Let 3 s pass in which every loop of every service runs, and messages arrive in order."""
        self.world.work()

    # Time and loops

    @rule(seconds=any_of(0.3, 1.0, 3.0, 7.0, 31.0))
    def pass_time(self, seconds: float) -> None:
        self.world.loop.advance(seconds)

    @rule(number=numbers)
    def binder_works(self, number: int) -> None:
        """One round of each loop of a binder: expiry, offers, vanished pods, cordons, rebuild."""
        self.world.binders[number].run_loops()
        self.world.loop.settle()

    @rule(node=nodes, what=any_of("kubelet", "report", "sync", "clean up", *WATCHER))
    def part_works(self, node: NodeName, what: str) -> None:
        """The kubelet reads the API server, or a loop of the agent or the watcher runs once."""
        machine = self.world.nodes[node]
        api = self.world.api
        works: dict[str, Callable[[], None]] = {
            "kubelet": machine.kubelet.sync,
            "report": machine.report,
            "sync": lambda: self.world.sync_agent(machine),
            "clean up": lambda: self.world.clean_up_agent(machine),
            "list pods": api.list_pods,
            "resync": api.resync,
            "queue pods again": api.queue_again,
        }
        works[what]()
        self.world.loop.settle()
