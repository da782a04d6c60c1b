"""The rules of the model: what users, time, faults and chance may do to the cluster."""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from hypothesis import note
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from shared.model.errors import UnavailableError
from shared.model.names import NodeName, PodUid
from shared.model.request import Gang
from tests.model.judge import Judge
from tests.model.node import Node
from tests.model.redis_links import RedisServer
from tests.model.services import BinderReplica
from tests.model.world import NODES, Message, World
from tests.support.build import gpu, request

PODS = tuple(f"p{number}" for number in range(6))
GANGS = (Gang(name="ns/red-2", min_member=2), Gang(name="ns/blue-3", min_member=3))
"""The judge reads from a gang's name how many pods it needs."""
ROUNDS = 20
"""Rounds of 3 s in which everything must be as it should once all faults have ended."""
E = TypeVar("E")

pods = st.sampled_from(PODS)
nodes = st.sampled_from(NODES)
sizes = st.sampled_from((30, 60, 60, 100))
"""MiB of a device of 100."""
WATCHER = ("list pods", "resync", "queue pods again")
numbers = st.integers(0, 1)
positions = st.sampled_from((0, 0, 0, 1, 2, 3, 4, 5, 6))
deliveries = st.tuples(positions, numbers, st.booleans())


def chosen(things: Iterable[E], position: int) -> E:
    several = list(things)
    return several[position % len(several)]


class LeaseProtocol(RuleBasedStateMachine):
    """Two placers, two binders and two nodes' agents on one real ledger."""

    server: ClassVar[RedisServer]
    folder: ClassVar[Path]
    figures: ClassVar[Counter[str]] = Counter()

    def __init__(self) -> None:
        super().__init__()
        self.world = World(self.server, self.folder, self.tell)
        self.judge = Judge(self.world)
        self.world.check_given = self.judge.check_given
        self.world.check_gangs = self.judge.check_gangs
        self.world.note_handled = self.judge.note_handled
        self.figures["runs"] += 1

    def tell(self, text: str) -> None:
        """Add a line to the story of a failure."""
        note(f"  # {text}")

    def count(self, what: str) -> None:
        self.figures[what] += 1
        self.figures["steps"] += 1

    # Users

    @initialize(sizes=st.lists(sizes, min_size=1, max_size=4))
    def begin(self, sizes: list[int]) -> None:
        for mib in sizes:
            self.create(mib)

    @precondition(lambda self: self.free_names())
    @rule(mib=sizes)
    def create_pod(self, mib: int) -> None:
        self.create(mib)

    @precondition(lambda self: self.free_names())
    @rule(mib=sizes, gang=st.sampled_from(GANGS), count=st.integers(1, 3))
    def create_gang(self, mib: int, gang: Gang, count: int) -> None:
        for _ in range(min(count, len(self.free_names()))):
            self.create(mib, gang)

    def create(self, mib: int, gang: Gang | None = None) -> None:
        self.count("pods created")
        wanted = replace(request(gpu(memory=mib, cores_percent=mib // 2)), gang=gang)
        self.world.api.create(self.free_names()[0], wanted)

    def free_names(self) -> list[str]:
        return [name for name in PODS if name not in self.world.api.pods]

    @precondition(lambda self: self.world.api.pods)
    @rule(position=positions, force=st.booleans())
    def delete_pod(self, position: int, force: bool) -> None:
        self.count("pods deleted by force" if force else "pods deleted")
        self.world.api.delete(chosen(self.world.api.pods, position), force=force)

    @precondition(lambda self: self.running())
    @rule(position=positions)
    def pod_succeeds(self, position: int) -> None:
        self.count("pods succeeded")
        node, pod = chosen(self.running(), position)
        node.kubelet.end(pod, "Succeeded")

    def running(self) -> list[tuple[Node, PodUid]]:
        """Return the pods whose containers run, with their nodes."""
        return [
            (node, uid)
            for node in self.world.nodes.values()
            for uid, record in node.kubelet.records.items()
            if record.given is not None
        ]

    # Messages

    @precondition(lambda self: self.world.bag)
    @rule(deliveries=st.lists(deliveries, min_size=1, max_size=5))
    def deliver(self, deliveries: list[tuple[int, int, bool]]) -> None:
        """Deliver some messages in any order; a `stale` placer has not read the feed since."""
        for position, replica, stale in deliveries:
            if self.world.bag:
                message = chosen(self.world.bag, position)
                self.tell(f"delivers {message} to {message.to} {replica}")
                self.count("messages delivered out of order" if position else "messages delivered")
                self.world.deliver(message, replica, stale=stale)

    @precondition(lambda self: self.world.bag)
    @rule(position=positions)
    def duplicate(self, position: int) -> None:
        message = chosen(self.world.bag, position)
        self.tell(f"duplicates {message}")
        self.count("messages duplicated")
        self.world.bag.append(Message(message.event, message.to))

    @precondition(lambda self: self.world.bag)
    @rule(position=positions)
    def lose(self, position: int) -> None:
        message = chosen(self.world.bag, position)
        self.tell(f"loses {message}")
        self.count("messages lost")
        self.world.bag.remove(message)

    @rule()
    def flow(self) -> None:
        """Everything that is on its way arrives, in order."""
        self.count("calm moments")
        self.world.flow()

    @rule()
    def work(self) -> None:
        """Let 3 s pass in which every loop of every service runs, and messages arrive in order."""
        self.count("calm spells")
        self.world.work()

    # Time and loops

    @rule(seconds=st.sampled_from((0.3, 1.0, 3.0, 7.0, 31.0)))
    def pass_time(self, seconds: float) -> None:
        self.count("pauses")
        self.world.loop.advance(seconds)

    @rule(number=numbers)
    def binder_works(self, number: int) -> None:
        """One round of each loop of a binder: expiry, offers, vanished pods, cordons, rebuild."""
        self.count("rounds of a binder's loops")
        self.world.binders[number].run_loops()
        self.world.loop.settle()

    @rule(node=nodes, what=st.sampled_from(("kubelet", "report", "sync", "clean up", *WATCHER)))
    def part_works(self, node: NodeName, what: str) -> None:
        """The kubelet reads the API server, or a loop of the agent or the watcher runs once."""
        self.count(f"loops: {what}")
        machine, api = self.world.nodes[node], self.world.api
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

    # Faults

    @rule(which=st.sampled_from(("binder", "placer", "agent", "checkpoint")), number=numbers)
    def kill(self, which: str, number: int) -> None:
        """Kill a process and start it again; with `checkpoint`, an agent that loses its own."""
        self.count(f"{which}s lost" if which == "checkpoint" else f"{which}s killed")
        world = self.world
        if which in {"binder", "placer"}:
            world.restart((world.binders if which == "binder" else world.placers)[number])
            return
        machine = world.nodes[NODES[number]]
        if which == "checkpoint":
            (machine.folder / f"{machine.name}.json").unlink(missing_ok=True)
            self.judge.forget_fences(machine.name)
        world.loop.run_until_complete(machine.start_agent())

    @rule(
        number=st.integers(0, 3),
        what=st.sampled_from(("lose request", "lose reply", "delay", "delay", "restore")),
        spared_calls=st.integers(0, 4),
    )
    def disturb_link(self, number: int, what: str, spared_calls: int) -> None:
        """Delay the calls of a service, or lose one, after some that are spared."""
        service = self.world.services[number]
        self.count(f"links: {what}")
        self.tell(f"{what} of {service.name} to Redis")
        service.link.spared_calls = spared_calls
        if what == "delay":
            service.link.delay()
        elif what == "restore":
            service.link.restore()
        else:
            service.link.loses = what.removeprefix("lose ")
        self.world.loop.settle()

    @precondition(lambda self: self.world.server.late_calls)
    @rule()
    def late_call_arrives(self) -> None:
        self.count("late calls")
        self.world.server.run_late_call()

    @precondition(lambda self: not self.world.api.slow)
    @rule()
    def slow_api(self) -> None:
        """From now on the model answers each Binding."""
        self.count("API server slow")
        self.world.api.slow = True

    @precondition(lambda self: self.world.api.calls)
    @rule(position=positions, outcome=st.sampled_from(("done", "done", "reply lost", "lost")))
    def answer_binding(self, position: int, outcome: str) -> None:
        calls = self.world.api.calls
        self.tell(f"Binding of {chosen(calls, position).about}: {outcome}")
        self.count(f"slow Bindings: {outcome}")
        self.world.api.answer(position % len(calls), outcome)
        self.world.loop.settle()

    @rule(node=nodes)
    def cut_off_or_reconnect(self, node: NodeName) -> None:
        """Cut an agent off from the binders, or end that."""
        machine = self.world.nodes[node]
        machine.silent = not machine.silent
        machine.was_silent = True
        self.count("agents cut off" if machine.silent else "agents reconnected")

    @rule(what=st.sampled_from(("save", "save", "flush", "roll back", "roll back unseen")))
    def redis(self, what: str) -> None:
        """Save the state of Redis, lose all of it, or return to what was saved.

        Unseen, if all binders and placers that remember a newer version are killed as well.
        """
        if what == "save" or ("roll" in what and self.server.saved is None):
            self.count("Redis: save")
            self.server.save()
            return
        self.count(f"Redis: {what}")
        self.world.lost_redis = True
        self.judge.forget_gone()
        if what == "flush":
            self.server.flush()
        elif what == "roll back unseen":
            self.server.roll_back()
            for binder, placer in zip(self.world.binders, self.world.placers, strict=True):
                self.world.restart(binder)
                self.world.restart(placer)
        else:
            self.roll_redis_back()

    def roll_redis_back(self) -> None:
        """Roll back while a binder that knows the newest version reads it again at once."""
        witness = next((each for each in self.world.binders if not each.link.delayed), None)
        self.read_version(witness)
        self.server.roll_back()
        self.read_version(witness)

    def read_version(self, binder: BinderReplica | None) -> None:
        if binder is not None:
            with contextlib.suppress(UnavailableError):
                self.world.loop.run_until_complete(binder.binder.ledger.generation())

    @rule(
        what=st.sampled_from(("Redis", "Redis", "watcher", *NODES)),
        seconds=st.sampled_from((-3600.0, -20.0, 40.0, 3600.0)),
    )
    def clock_jumps(self, what: str, seconds: float) -> None:
        """Set the clock of a host; that of Redis is set back by seconds at most."""
        self.count(f"clock jumps: {what}")
        world = self.world
        if what == "Redis":
            self.server.clock.ahead_s += max(seconds, -20.0)
            self.judge.forget_gone()
        else:
            clock = world.watcher_clock if what == "watcher" else world.nodes[NodeName(what)].clock
            clock.ahead_s += seconds

    @precondition(lambda self: self.world.api.nodes)
    @rule(position=positions)
    def cordon_or_uncordon(self, position: int) -> None:
        self.count("nodes cordoned or uncordoned")
        self.world.api.cordon_or_uncordon(chosen(sorted(self.world.api.nodes), position))

    @rule(node=nodes)
    def node_goes_or_comes(self, node: NodeName) -> None:
        api = self.world.api
        self.count("nodes deleted" if node in api.nodes else "nodes back")
        if node in api.nodes:
            api.remove_node(node)
        else:
            api.add_node(node)
            self.world.nodes[node].report()

    @rule()
    def device_moves(self) -> None:
        """Build a device into the other machine: containers that use it fail."""
        self.count("devices moved")
        first, second = (self.world.nodes[name] for name in NODES)
        if len(first.devices) == 1:
            first, second = second, first
        device = first.devices.pop()
        first.kubelet.fail_users(device.uuid)
        second.devices.append(replace(device, index=len(second.devices)))
        for machine in (first, second):
            machine.report()

    # Judgement

    def check_invariants(self, *args: Any) -> None:
        super().check_invariants(*args)
        self.holds()

    def holds(self) -> None:
        """Judge the state after a step."""
        self.judge.look()
        if self.world.failures:
            raise AssertionError("\n".join(self.world.failures))

    def teardown(self) -> None:
        try:
            if not self.world.failures:
                self.settle()
        finally:
            self.world.close()

    def settle(self) -> None:
        """End all faults; what is not as it should be after some rounds has failed."""
        world = self.world
        self.tell("all faults end")
        for service in world.services:
            service.link.restore()
        for node in world.nodes.values():
            node.silent = False
            if node.name not in world.api.nodes:
                world.api.add_node(node.name)
        while self.server.late_calls:
            self.server.run_late_call()
        world.api.answer_all()
        open_ends: list[str] = []
        for number in range(ROUNDS):
            world.work()
            self.holds()
            open_ends = self.judge.open_ends()
            if not open_ends and not world.bag:
                self.figures["rounds to quiescence"] += number + 1
                return
        raise AssertionError("\n".join(open_ends) or f"{len(world.bag)} messages stay")
