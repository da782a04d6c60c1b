"""The faults of the model: what is killed, delayed, lost, moved, or set wrong."""

import contextlib
from collections.abc import Sequence
from dataclasses import replace

from shared.model.devices.device import DeviceMode
from shared.model.devices.replicas import Replicas, Strategy
from shared.model.errors import UnavailableError
from shared.model.names import DeviceUuid, NodeName
from tests.model.hostile import HostileAgent
from tests.model.machine import chosen
from tests.model.mig import instance_mode
from tests.model.node import Node
from tests.model.rules import any_of, rule
from tests.model.services import BinderReplica, Replica, Service
from tests.model.users import nodes, numbers, positions
from tests.model.world import MIG_LAYOUTS, NODES, Message
from tests.support.build import TRIGGER


class LeaseProtocol(HostileAgent):
    """All rules."""

    @rule(
        which=any_of("binder", "placer", "planner", "agent", "checkpoint", "partitioner"),
        number=numbers,
    )
    def kill(self, which: str, number: int) -> None:
        """Kill a process and start it again; with `checkpoint`, an agent that loses its own."""
        world = self.world
        if which in {"binder", "placer", "planner"}:
            world.restart(self.replicas(which)[number])
            return
        machine = world.nodes[NODES[number]]
        if which == "partitioner":
            machine.partitioner.restart()
            world.loop.settle()
            return
        if which == "checkpoint" and not machine.kubelet.claims:
            (machine.folder / f"{machine.name}.json").unlink(missing_ok=True)
            machine.lost_records = True
            self.judge.forget_fences(machine.name)
        world.loop.run_until_complete(machine.start_agent())

    @rule(
        number=any_of(0, 1, 2, 3, 4, 5),
        what=any_of("lose request", "lose reply", "delay", "delay"),
        spared_calls=any_of(0, 1, 2, 3, 4),
    )
    def disturb_link(self, number: int, what: str, spared_calls: int) -> None:
        """Delay the calls of a service, or lose one, after some that are spared."""
        service = self.world.services[number]
        self.tell(f"{what} of {service.name} to Redis")
        service.link.spared_calls = spared_calls
        if what == "delay":
            service.link.delay()
        else:
            service.link.loses = what.removeprefix("lose ")
        self.world.loop.settle()

    @rule(
        lambda self: self.for_services(),
        weight=2.0,
        position=positions,
        replica=numbers,
        spared_calls=any_of(0, 1, 1, 2, 3, 4),
    )
    def deliver_half(self, position: int, replica: int, spared_calls: int) -> None:
        """Deliver a message to a service whose calls are delayed in the middle of it."""
        world = self.world
        message = chosen(self.for_services(), position)
        service = self.replicas(message.to)[replica]
        self.tell(f"delivers {message} to {service.name}, up to call {spared_calls}")
        service.link.spared_calls = spared_calls
        service.link.delay()
        world.deliver(message, replica)

    def for_services(self) -> list[Message]:
        kinds = {"binder", "placer", "planner"}
        return [message for message in self.world.bag if message.to in kinds]

    def replicas(self, kind: str) -> Sequence[Replica]:
        """Return the replicas of a service by its name."""
        world = self.world
        kinds: dict[str, Sequence[Replica]] = {
            "binder": world.binders,
            "placer": world.placers,
            "planner": world.planners,
        }
        return kinds[kind]

    @rule(lambda self: self.disturbed(), position=positions)
    def restore_link(self, position: int) -> None:
        chosen(self.disturbed(), position).link.restore()
        self.world.loop.settle()

    def disturbed(self) -> list[Service]:
        return [service for service in self.world.services if service.link.delayed]

    @rule(lambda self: self.world.server.late_calls)
    def late_call_arrives(self) -> None:
        self.world.server.run_late_call()

    @rule(lambda self: not self.world.api.held, writes=any_of(1, 1, 2, 9))
    def slow_api(self, writes: int) -> None:
        """The model answers each of the next Bindings and allocations."""
        self.world.api.held = writes

    @rule(
        lambda self: self.world.api.calls,
        position=positions,
        outcome=any_of("done", "done", "reply lost", "lost"),
    )
    def answer_write(self, position: int, outcome: str) -> None:
        calls = self.world.api.calls
        self.tell(f"{chosen(calls, position).about}: {outcome}")
        self.world.api.answer(position % len(calls), outcome)
        self.world.loop.settle()

    @rule(node=nodes)
    def cut_off_or_reconnect(self, node: NodeName) -> None:
        """Cut an agent off from the binders, or end that."""
        machine = self.world.nodes[node]
        machine.silent = not machine.silent
        machine.was_silent = True

    @rule(node=nodes, weight=0.5)
    def lose_limits_reply(self, node: NodeName) -> None:
        """The node's next reply about limits is lost."""
        self.world.nodes[node].loses_reply = True

    @rule(what=any_of("save", "save", "flush", "roll back", "roll back unseen"))
    def redis(self, what: str) -> None:
        """Save the state of Redis, lose all of it, or return to what was saved.

        Unseen, if all services that remember a newer version are killed as well.
        """
        if what == "save" or ("roll" in what and self.server.saved is None):
            self.server.save()
            return
        self.world.lost_redis = True
        self.judge.forget_gone()
        self.server.note_version()
        if what == "flush":
            self.server.flush()
        elif what == "roll back unseen":
            self.world.lost_unseen = True
            self.server.roll_back()
            self.server.newest_version = 0
            for kind in ("binder", "placer", "planner"):
                for replica in self.replicas(kind):
                    self.world.restart(replica)
        else:
            self.roll_redis_back()

    def roll_redis_back(self) -> None:
        """Roll back while a binder that knows the newest version reads it again at once.

        It may have known the version since before a rebuild, during which nobody can read it.
        """
        witness = next((binder for binder in self.world.binders if not binder.link.delayed), None)
        self.read_version(witness)
        if witness is not None:
            witness.connection.observe_version(self.server.newest_version)
        self.server.roll_back()
        self.read_version(witness)

    def read_version(self, binder: BinderReplica | None) -> None:
        if binder is not None:
            with contextlib.suppress(UnavailableError):
                self.world.loop.run_until_complete(binder.binder.sweeper.ledger.generation())

    @rule(
        what=any_of("Redis", "Redis", "watcher", *NODES),
        seconds=any_of(-3600.0, -20.0, 40.0, 3600.0),
    )
    def clock_jumps(self, what: str, seconds: float) -> None:
        """Set the clock of a host; that of Redis is set back by seconds at most."""
        world = self.world
        if what == "Redis":
            self.server.clock.ahead_s += max(seconds, -20.0)
        else:
            clock = world.watcher_clock if what == "watcher" else world.nodes[NodeName(what)].clock
            clock.ahead_s += seconds

    @rule(lambda self: self.world.api.nodes, position=positions)
    def cordon_or_uncordon(self, position: int) -> None:
        self.world.api.cordon_or_uncordon(chosen(sorted(self.world.api.nodes), position))

    @rule(node=nodes)
    def node_goes_or_comes(self, node: NodeName) -> None:
        api = self.world.api
        if node in api.nodes:
            api.remove_node(node)
        else:
            api.add_node(node)
            self.world.nodes[node].report()

    @rule(weight=0.5)
    def device_moves(self) -> None:
        """Build a device into the other machine: containers that use it fail."""
        first, second = (self.world.nodes[name] for name in NODES)
        if len(first.devices) == 2:
            first, second = second, first
        *others, device = first.devices
        self.world.moved.add(device.uuid)
        first.respond(device.uuid)
        first.kubelet.fail_users(device.uuid)
        first.change_devices(others)
        second.change_devices([*second.devices, replace(device, index=len(second.devices))])

    @rule(lambda self: self.running(), position=positions)
    def process_stays(self, position: int) -> None:
        """A process of a running pod cannot be killed any more: it outlives the pod."""
        machine, uid = chosen(self.running(), position)
        self.tell(f"a process of {uid} cannot be killed")
        machine.kubelet.stuck.add(uid)

    @rule(node=nodes)
    def processes_end(self, node: NodeName) -> None:
        """End the processes that are left of ended pods, as their driver returns."""
        self.world.nodes[node].kubelet.end_processes()

    @rule(node=nodes, position=positions)
    def device_hangs(self, node: NodeName, position: int) -> None:
        """Let no call of the driver about a device return; its processes cannot be killed."""
        machine = self.world.nodes[node]
        device = chosen(machine.devices, position)
        if device.uuid not in machine.driver.hanging:
            self.tell(f"{device.uuid} hangs")
            machine.driver.hang(device.uuid)

    @rule(lambda self: self.hanging(), position=positions)
    def device_responds(self, position: int) -> None:
        machine, device = chosen(self.hanging(), position)
        self.tell(f"{device} responds again")
        machine.respond(device)
        self.world.loop.settle()

    def hanging(self) -> list[tuple[Node, DeviceUuid]]:
        return [
            (node, device) for node in self.world.nodes.values() for device in node.driver.hanging
        ]

    @rule(node=nodes, what=any_of("500", "403", "old", "late"))
    def kubelet_loses_api(self, node: NodeName, what: str) -> None:
        """Cut a kubelet off from the API server; what it answers its agent is old, or an error."""
        self.world.nodes[node].kubelet.lose_api(what)

    @rule(
        lambda self: any(kubelet.is_cut_off for kubelet in self.kubelets()),
        position=positions,
        what=any_of("", "500", "403", "old", "late", "late"),
    )
    def kubelet_finds_api(self, position: int, what: str) -> None:
        """End that; its answers stay so for a while, and what has ended is reported at once."""
        chosen((kubelet for kubelet in self.kubelets() if kubelet.is_cut_off), position).find_api(
            what
        )

    @rule(node=nodes, fault=any_of("fails", "slow", "stuck"))
    def disturb_driver(self, node: NodeName, fault: str) -> None:
        """Let the next change of MIG instances fail, or take long."""
        self.world.nodes[node].driver.fault = fault

    @rule(
        lambda self: any(node.limit_driver.limits for node in self.world.nodes.values()),
        weight=2.0,
        position=positions,
        what=any_of("one", "device", "all"),
    )
    def limits_vanish(self, position: int, what: str) -> None:
        """Somebody removes a limit of the driver, or it is reloaded, or lets a device go."""
        driver, cgroup = chosen(
            (
                (node.limit_driver, cgroup)
                for node in self.world.nodes.values()
                for cgroup in node.limit_driver.limits
            ),
            position,
        )
        if what == "one":
            del driver.limits[cgroup]
        else:
            driver.lose(cgroup[0] if what == "device" else None)

    @rule(node=nodes, position=positions)
    def other_program_limits_or_not(self, node: NodeName, position: int) -> None:
        """Let another program limit its cgroup's memory of a device, or remove that limit."""
        machine = self.world.nodes[node]
        machine.limit_driver.limited_by_others ^= {chosen(machine.devices, position).uuid}

    @rule(node=nodes)
    def driver_keeps_limits_or_lowers(self, node: NodeName) -> None:
        """Let the driver ignore limits that are lower than before, or end that."""
        driver = self.world.nodes[node].limit_driver
        driver.keeps_limits = not driver.keeps_limits

    @rule(node=nodes, seconds=any_of(0.0, 3.0))
    def setter_fails_or_recovers(self, node: NodeName, seconds: float) -> None:
        """Let the partitioner set and read no limits of the driver, or end that."""
        client = self.world.nodes[node].limit_client
        client.fails = not client.fails
        self.world.loop.advance(seconds)

    @rule(node=nodes, weight=0.5, other_driver=any_of(False, True, True))
    def reboot(self, node: NodeName, other_driver: bool) -> None:
        """Restart a machine: the driver that sets limits replaces the last without, or it back.

        Its containers start again, on devices without MIG instances and limits.
        """
        machine = self.world.nodes[node]
        machine.reboot(other_driver=other_driver)
        self.tell(f"the driver of {node} sets limits: {not machine.limit_driver.is_old}")
        self.world.loop.settle()

    @rule(node=nodes)
    def reset_device(self, node: NodeName) -> None:
        """Reset the device with MIG instances: they are gone, and its containers start again."""
        machine = self.world.nodes[node]
        device = machine.devices[0].uuid
        machine.respond(device)
        machine.kubelet.stop_users(device)
        machine.driver.reset(device)
        machine.limit_driver.lose(device)

    @rule(
        always=True,
        apart=True,
        node=nodes,
        number=any_of(0, 2, 3, 4),
        strategy=any_of("time-slicing", "mps"),
        rounds=any_of(0, 0, 2, 3),
    )
    def configure_replicas(
        self, node: NodeName, number: int, strategy: Strategy, rounds: int = 0
    ) -> None:
        """Change the configuration of NVIDIA's plugin: devices are replicas, or have amounts.

        With some rounds the node's pods and claims are ended, as an operator does, and pods that
        request a number come after these rounds.
        """
        wanted = Replicas(number=number, strategy=strategy, resource=TRIGGER) if number else None
        self.world.nodes[node].replicas = wanted
        for pod in list(self.world.api.pods.values()) if rounds else ():
            if pod.node == node:
                self.world.api.delete(pod.name, force=False)
        for claim in self.used_claims() if rounds else ():
            while claim.node == node and claim.consumers:
                self.world.claims.remove_consumer(claim)
        for _ in range(rounds):
            self.world.work()
        if rounds and self.free_names():
            self.create_number_pods(count=3, run_s=60)

    @rule(node=nodes, weight=0.5)
    def change_mode(self, node: NodeName) -> None:
        """Turn MIG mode of a device off or on, which resets it: containers that use it fail."""
        machine = self.world.nodes[node]
        device, *others = machine.devices
        machine.respond(device.uuid)
        machine.kubelet.fail_users(device.uuid)
        machine.driver.reset(device.uuid)
        machine.limit_driver.lose(device.uuid)
        if device.mode is DeviceMode.MIG:
            changed = replace(device, mode=DeviceMode.HAMI_CORE, layouts=())
        else:
            changed = instance_mode(device, *MIG_LAYOUTS[node])
        machine.change_devices([changed, *others])
