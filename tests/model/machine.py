"""One run of the model: a world, its judge, and the end of all faults."""

import math
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from shared.model.devices.enforcers import HeldBy
from shared.model.requests.request import DeviceSelection
from tests.model.judge import Judge
from tests.model.mig import SLOW_S
from tests.model.node import Node
from tests.model.redis_links import RedisServer
from tests.model.rules import Step
from tests.model.world import World
from tests.support.build import gpu, request

ROUND_S = 3.0
ROUNDS = 30
"""Rounds in which everything must be as it should once all faults have ended.

Of these 90 s, up to three pods wait for 20 s each until an agent refuses them, one after the other,
if a loss of the ledger gave them a MIG device that a running pod holds in another layout.
"""
CALM = {"create_pods", "create_instance_pods", "create_gang", "crowd", "flow", "work"}
"""Steps that disturb no planned start."""
PROMISED_ROUNDS = 400
"""Until the last promise of a start must be kept, and all have started that others let start."""
KINDS = ("what", "which", "outcome", "fault")
"""Arguments that distinguish steps in the figures."""
E = TypeVar("E")


class BrokenInvariantError(AssertionError):
    """What must hold does not; the message begins with the name of an invariant."""


def chosen(things: Iterable[E], position: int) -> E:
    several = list(things)
    return several[position % len(several)]


class Machine:
    """Two placers, two binders and two nodes' agents on one real ledger."""

    def __init__(self, server: RedisServer, folder: Any, tell: Callable[[str], None]) -> None:
        self.server = server
        self.tell = tell
        """Adds a line to the story of the run."""
        self.figures: Counter[str] = Counter()
        self.world = World(server, folder, tell)
        self.world.watches = Judge(self.world, self.figures)
        self.judge = self.world.watches

    def make(self, step: Step) -> None:
        """Make a step, and judge the state after it."""
        kinds = [str(step.arguments[kind]) for kind in KINDS if kind in step.arguments]
        self.figures[" ".join([step.rule.replace("_", " "), *kinds])] += 1
        if step.rule not in CALM:
            self.judge.starts.disturb()
            self.judge.limits.disturb()
        getattr(self, step.rule)(**step.arguments)
        self.require_invariants()

    def require_invariants(self) -> None:
        self.judge.look()
        if self.world.failures:
            raise BrokenInvariantError("\n".join(self.world.failures))

    def settle(self) -> None:
        """End all faults, and require that everything is as it should be, also for a new pod."""
        world = self.world
        self.tell("all faults end")
        for service in world.services:
            service.link.restore()
        for node in world.nodes.values():
            self.end_faults(node)
        self.end_numbers()
        while self.server.late_calls:
            self.server.run_late_call()
        world.api.answer_all()
        if any(
            not call.done() for node in world.nodes.values() for call in node.driver.calls.values()
        ):
            world.loop.advance(SLOW_S["stuck"])
        self.calm_down()
        # Pods of a higher priority come before promised starts.
        have_priority = any(pod.request.priority for pod in world.api.pods.values())
        self.judge.starts.is_calm = not (self.judge.clock_jumped or have_priority)
        by_driver = request(gpu(memory=30, held_by=HeldBy(memory="driver", compute="none")))
        has_drivers = not any(node.limit_driver.is_old for node in world.nodes.values())
        last = (
            request(gpu(memory=60, cores_percent=30)),
            *((by_driver,) if has_drivers else ()),
            request(gpu(memory=50, mig_allowed=True), selection=DeviceSelection(mode="mig")),
        )
        late = [
            world.api.create(f"late-{number}", arguments) for number, arguments in enumerate(last)
        ]
        self.calm_down()
        for pod in late:
            if pod.is_terminal and pod.uid not in self.judge.preemptions.evicted:
                raise BrokenInvariantError(f"P1: {pod.uid} is placed where its node refuses it")
        self.work_until(lambda: not self.judge.starts.promises)
        self.delete_endless()
        self.judge.check_owed()
        self.work_until(lambda: not (self.judge.starts.promises or self.judge.history.owed))

    def end_faults(self, node: Node) -> None:
        node.replicas = None
        node.silent = False
        node.loses_reply = False
        node.driver.fault = ""
        node.limit_client.fails = False
        node.limit_driver.limited_by_others.clear()
        node.limit_driver.keeps_limits = False
        node.kubelet.end_processes()
        for device in list(node.driver.hanging):
            node.respond(device)
        if node.kubelet.is_cut_off:
            node.kubelet.find_api("late")
        if node.name not in self.world.api.nodes:
            self.world.api.add_node(node.name)
        if node.limit_driver.is_old and self.needs_driver(node):
            node.reboot(other_driver=True)

    def end_numbers(self) -> None:
        """Delete the pods that request a number: devices have amounts again once none is in use."""
        for pod in list(self.world.api.pods.values()):
            if pod.request.containers[0].number_of:
                self.world.api.delete(pod.name, force=False)

    def needs_driver(self, node: Node) -> bool:
        """Whether pods wait for a driver that limits memory, or the node's cannot start again."""
        pods = [pod for pod in self.world.api.pods.values() if not pod.is_terminal]
        leases = self.judge.read_ledger().leases.values()
        leased = (share for lease in leases if lease.node == node.name for share in lease.shares)
        recorded = (
            share for entry in node.agent.checkpoint.entries for share in entry.lease.shares
        )
        return (
            any(pod.request.containers[0].held_by.memory == "driver" for pod in pods)
            or any(pod.node == node.name and '"driver"' in pod.lease for pod in pods)
            or any(share.memory == "driver" for share in leased)
            or any(share.memory == "driver" for share in recorded)
        )

    def work_until(self, is_done: Callable[[], bool]) -> None:
        """Work until all promises of starts are kept, or what is owed to pods is done."""
        for _ in range(PROMISED_ROUNDS):
            if is_done():
                return
            self.world.work()
            self.judge.check_owed()
            self.require_invariants()

    def delete_endless(self) -> None:
        """Delete all pods without a maximum run time but the first of those that wait."""
        self.judge.starts.disturb()
        pods = list(self.world.api.pods.values())
        first = next((pod for pod in pods if pod.is_pending), None)
        for pod in pods:
            if pod.request.term.max_run_s is None and pod is not first:
                self.world.api.delete(pod.name, force=False)
        self.calm_down()

    def calm_down(self) -> None:
        """Work until everything is as it should be."""
        open_ends: list[str] = []
        # Ages of leases are by the clock of Redis: they last longer by what it was set back.
        set_back_s = max(0.0, -self.server.clock.ahead_s)
        for number in range(ROUNDS + math.ceil(set_back_s / ROUND_S)):
            volumes = self.world.api.volumes
            for name in volumes.being_provisioned():
                volumes.provision(name, "made")
            self.world.work()
            self.require_invariants()
            open_ends = self.judge.open_ends() + self.judge.without_claims()
            if not open_ends and not self.world.bag:
                self.figures["rounds to quiescence"] += number + 1
                return
        raise BrokenInvariantError("\n".join(open_ends) or f"{len(self.world.bag)} messages stay")

    def close(self) -> None:
        self.world.close()
