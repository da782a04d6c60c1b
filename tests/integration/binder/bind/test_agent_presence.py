"""Pods wait while the agent of their node is away, and its node is cordoned until it replies."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from services.binder.bind.agent_presence import (
    FORGET_S,
    MAX_RETRY_S,
    NO_AGENT_S,
    RETRY_S,
    TRUSTED_S,
    AgentPresence,
    Deferral,
    NodeCordons,
)
from services.binder.bind.pod_binder import (
    ADMISSION_WAIT_S,
    CORDONED_S,
    EXPLAIN_S,
    GIVE_UP_AGE_S,
    MAX_ADMISSION_WAIT_S,
)
from shared.model.errors import UnavailableError
from shared.model.events.pod_events import BindingFailed, LeaseChanged, PodBound
from shared.model.events.request_reply import BindReply
from shared.model.leases.lease import LeaseState
from shared.model.names import NodeName, PodUid
from shared.pods.pod_snapshot import PodSnapshot
from tests.support.binder.events import HANGING, N1, N2, away, no_agents
from tests.support.binder.world import NOW, FakeAgents, NewWorld, World, chosen, lease, running
from tests.support.clock import FakeClock
from tests.support.waiting import until


async def test_a_deferred_pod_is_not_committed_and_redelivered_with_the_reason(
    new_world: NewWorld,
) -> None:
    world = await new_world(lease("p1"), lease("p2", node="n2"))
    world.agents.replies = {N1: away("p1"), N2: BindReply()}
    batch = chosen(lease("p1"), lease("p2", node="n2"))

    async with running(world.binder.sender.send_bindings):
        with pytest.raises(UnavailableError, match=r"1 of 2 .* its agent is being stopped"):
            await world.binder.pods.bind_pods(batch)
        states = await world.states()
        world.agents.replies[N1] = BindReply()
        await world.binder.pods.bind_pods(batch)

    assert states == {"p1": LeaseState.RESERVED, "p2": LeaseState.BOUND}
    assert [name for name, *_ in world.pods.bindings] == ["p2", "p1"]
    assert any(isinstance(event, PodBound) for event in world.bus.published)


async def test_a_pod_waits_for_a_resource_that_is_not_registered_and_another_is_bound(
    new_world: NewWorld,
) -> None:
    world = await new_world(lease("p1"), lease("p2"))
    waits = BindReply(
        window_open=False,
        unserved_pods=(lease("p1").pod,),
        unserved_reason="not registered with the kubelet: nvidia.com/gpu",
        unserved_s=1.0,
    )
    world.agents.replies = {N1: waits}

    async with running(world.binder.sender.send_bindings):
        with pytest.raises(UnavailableError, match=waits.unserved_reason):
            await world.binder.pods.bind_pods(chosen(lease("p1"), lease("p2")))
        states = await world.states()
        world.agents.replies = {N1: replace(waits, unserved_s=60.0)}
        with pytest.raises(UnavailableError):  # it would be placed there again at once
            await world.binder.pods.bind_pods(chosen(lease("p1")))
        world.clock.advance(GIVE_UP_AGE_S)
        events = await world.binder.pods.bind_pods(chosen(lease("p1")))

    assert states == {"p1": LeaseState.RESERVED, "p2": LeaseState.BOUND}
    failed = [event.reason for event in events if isinstance(event, BindingFailed)]
    assert failed == [waits.unserved_reason]


async def test_a_pod_that_its_agent_would_refuse_is_not_bound_and_placed_again_soon(
    new_world: NewWorld,
) -> None:
    world = await new_world(lease("p1"), lease("p2"))
    refused = BindReply(window_open=False, refusals={lease("p1").pod: "GPU-0 would be exceeded"})
    world.agents.replies = {N1: refused}

    async with running(world.binder.sender.send_bindings):
        with pytest.raises(UnavailableError, match="GPU-0 would be exceeded"):
            await world.binder.pods.bind_pods(chosen(lease("p1"), lease("p2")))
        states = await world.states()
        world.clock.advance(GIVE_UP_AGE_S)
        events = await world.binder.pods.bind_pods(chosen(lease("p1")))

    assert states == {"p1": LeaseState.RESERVED, "p2": LeaseState.BOUND}
    assert [name for name, *_ in world.pods.bindings] == ["p2"]
    failed = [event.reason for event in events if isinstance(event, BindingFailed)]
    assert failed == ["GPU-0 would be exceeded"]
    assert await world.states() == {"p2": LeaseState.BOUND}


async def test_a_gang_waits_as_a_whole_while_an_agent_would_refuse_one_of_its_pods(
    new_world: NewWorld,
) -> None:
    members = [lease(name, gang="ns/red-2") for name in ("p1", "p2")]
    world = await new_world(*members)
    refusals = {members[0].pod: "GPU-0 would be exceeded"}
    world.agents.replies = {N1: BindReply(window_open=False, refusals=refusals)}

    async with running(world.binder.sender.send_bindings):
        with pytest.raises(UnavailableError, match=r"2 of 2 .* GPU-0 would be exceeded"):
            await world.binder.pods.bind_pods(chosen(*members))

    assert set((await world.states()).values()) == {LeaseState.RESERVED}
    assert world.pods.bindings == []


async def test_pods_that_are_next_in_line_are_retried_in_the_same_batch(
    new_world: NewWorld,
) -> None:
    clock = TurningClock()
    world = await new_world(lease("p1"), lease("p2"), lease("p3"), clock=clock)
    turns = [("p2", "p3"), ("p3",), ("p3",), ()]
    clock.each_sleep = lambda: world.agents.replies.update({N1: next_in_turn(*turns.pop(0))})
    clock.each_sleep()

    async with running(world.binder.sender.send_bindings):
        await world.binder.pods.bind_pods(chosen(lease("p1"), lease("p2"), lease("p3")))

    assert [name for name, *_ in world.pods.bindings] == ["p1", "p2", "p3"]
    assert turns == []


async def test_a_batch_is_redelivered_if_its_pods_are_not_admitted_in_time(
    new_world: NewWorld,
) -> None:
    clock = TurningClock()
    world = await new_world(lease("p1"), clock=clock)
    world.agents.replies = {N1: next_in_turn("p1")}

    with pytest.raises(UnavailableError, match="the kubelet is busy"):
        await world.binder.pods.bind_pods(chosen(lease("p1")))

    assert ADMISSION_WAIT_S < clock.slept < 2 * ADMISSION_WAIT_S
    assert await world.states() == {"p1": LeaseState.RESERVED}


async def test_a_batch_goes_on_while_its_pods_are_admitted_one_after_the_other(
    new_world: NewWorld,
) -> None:
    clock = TurningClock()
    names = [f"p{number}" for number in range(6)]
    world = await new_world(*map(lease, names), clock=clock)
    waiting = list(names)

    def admit_next() -> None:
        if clock.slept > 0.8 * ADMISSION_WAIT_S * (len(names) - len(waiting)):
            waiting.pop(0)
        world.agents.replies = {N1: next_in_turn(*waiting)}

    clock.each_sleep = admit_next
    admit_next()
    async with running(world.binder.sender.send_bindings):
        await world.binder.pods.bind_pods(chosen(*map(lease, names)))

    assert [name for name, *_ in world.pods.bindings] == names
    assert 3 * ADMISSION_WAIT_S < clock.slept < MAX_ADMISSION_WAIT_S


async def test_a_reservation_that_ended_while_deferred_is_a_failed_binding(world: World) -> None:
    world.agents.replies = {N1: away("p1")}

    events = await world.binder.pods.bind_pods(chosen(lease("p1")))

    assert [type(event) for event in events] == [BindingFailed]


def next_in_turn(*pods: str) -> BindReply:
    return replace(away(*pods), reason="the kubelet is busy", retry_soon=True)


class TurningClock(FakeClock):
    """Whoever sleeps finds that the time has passed, and that something has happened."""

    def __init__(self) -> None:
        super().__init__(NOW)
        self.slept = 0.0
        self.each_sleep: Callable[[], object] = lambda: None

    async def sleep(self, duration_s: float) -> None:
        self.slept += duration_s
        self.advance(duration_s)
        self.each_sleep()
        await asyncio.sleep(0)


@dataclass
class Near:
    """What a binder knows of the agents of nodes."""

    agents: FakeAgents = field(default_factory=no_agents)
    clock: FakeClock = field(default_factory=FakeClock)

    def __post_init__(self) -> None:
        self.presence = AgentPresence(self.agents, self.agents.reported_by_agent, self.clock)


@pytest.fixture
def near() -> Near:
    return Near()


async def test_a_node_without_our_agent_defers_no_pod(near: Near) -> None:

    deferrals = [await near.presence.deferrals([lease()]) for _ in range(3)]
    near.clock.advance(NO_AGENT_S)
    deferrals.append(await near.presence.deferrals([lease()]))

    assert deferrals == [{}] * 4
    assert near.agents.requests == 2, "not a request for every pod"


async def test_pods_wait_for_an_agent_that_was_away_before_the_binder_started(near: Near) -> None:
    near.agents.reported.add(N1)

    deferrals = []
    for _ in range(60):
        deferrals.append(await near.presence.deferrals([lease()]))
        near.clock.advance(RETRY_S)
    near.agents.replies[N1] = BindReply()
    near.clock.advance(MAX_RETRY_S)

    assert all("does not respond" in each[lease().pod].reason for each in deferrals)
    assert await near.presence.deferrals([lease()]) == {}


async def test_pods_wait_after_the_ledger_could_not_be_read_until_their_agent_replies(
    near: Near,
) -> None:
    near.agents.reported.add(N1)
    near.agents.cut_off = True
    with pytest.raises(UnavailableError):
        await near.presence.deferrals([lease()])

    near.agents.cut_off = False
    deferrals = await near.presence.deferrals([lease()])

    assert lease().pod in deferrals, "it may have been replaced while NATS was away"


async def test_pods_of_an_agent_that_stops_wait_until_it_is_back(near: Near) -> None:
    near.agents.replies[N1] = BindReply()

    assert await near.presence.deferrals([lease()]) == {}
    del near.agents.replies[N1]
    assert await near.presence.deferrals([lease()]) == {}, "it was there a moment ago"
    near.clock.advance(TRUSTED_S)
    deferrals = await near.presence.deferrals([lease()])
    requests = near.agents.requests
    await near.presence.deferrals([lease("p2")])
    assert near.agents.requests == requests, "a batch is not to wait for it each time"
    near.agents.replies[N1] = BindReply()
    near.clock.advance(RETRY_S)

    assert "the agent of node n1 does not respond" in deferrals[lease().pod].reason
    assert await near.presence.deferrals([lease()]) == {}


async def test_a_silent_agent_gets_requests_at_growing_intervals(near: Near) -> None:
    near.agents.replies[N1] = BindReply()
    await near.presence.deferrals([lease()])
    near.agents.replies.clear()
    near.clock.advance(TRUSTED_S)

    for _ in range(600):
        assert_held = await near.presence.deferrals([lease()])
        near.clock.advance(0.1)
        assert not near.agents.replies
        assert assert_held

    asked_in_a_minute = near.agents.requests - 1
    assert 60 / MAX_RETRY_S <= asked_in_a_minute <= 60 / MAX_RETRY_S + 4


async def test_an_agent_with_a_closed_window_gets_a_request_each_time(near: Near) -> None:
    near.agents.replies[N1] = BindReply(window_open=False)

    for _ in range(3):
        await asyncio.gather(
            near.presence.deferrals([lease(), lease("p2"), lease("p3", node="n2")])
        )

    assert near.agents.requests == 4, "n1 three times, n2 once"


async def test_batches_share_the_next_request_while_an_agent_has_not_replied(near: Near) -> None:
    near.agents.replies[N1] = next_in_turn("p3")

    requests, deferrals = await ask_while_it_is_slow(near, batches=16)

    assert requests == 2
    assert [pod for deferred in deferrals for pod in deferred] == [lease("p3").pod]


async def test_one_reply_that_is_missing_cordons_no_node_whatever_waits_for_it(near: Near) -> None:
    near.agents.replies[N1] = HANGING

    requests, deferrals = await ask_while_it_is_slow(near, batches=16)

    assert requests == 1
    assert [len(deferred) for deferred in deferrals] == [1] * 16, (
        "each waits until it is tried again"
    )
    assert near.presence.cordon_changes() == {}


async def test_batches_with_different_leases_of_a_pod_share_no_request(near: Near) -> None:
    near.agents.replies[N1] = BindReply(window_open=False)
    earlier = lease()
    later = lease(version=2, created_at=NOW)

    await asyncio.gather(*(near.presence.deferrals([asked]) for asked in (earlier, later)))

    assert near.agents.requests == 2, "a reply about one says nothing about the other"
    assert near.agents.bind_requests == [earlier, later]


async def ask_while_it_is_slow(
    near: Near, *, batches: int
) -> tuple[int, list[dict[PodUid, Deferral]]]:
    """Return how many requests were sent for batches that ask while the first waits, and more."""
    replies = asyncio.Event()

    async def wait() -> None:
        await replies.wait()

    near.agents.before_reply = wait
    asking: list[asyncio.Task[dict[PodUid, Deferral]]] = []
    for number in range(batches):
        ask = near.presence.deferrals([lease(f"p{number}")])
        asking.append(asyncio.create_task(ask))
        await until(lambda: near.agents.requests)
    replies.set()
    deferrals = list(await asyncio.gather(*asking))
    return near.agents.requests, deferrals


async def test_a_subscribed_agent_without_a_reply_defers_from_the_first_request(near: Near) -> None:
    near.agents.replies[N1] = HANGING

    assert "does not respond" in (await near.presence.deferrals([lease()]))[lease().pod].reason


async def test_without_nats_no_agent_counts_as_silent(near: Near) -> None:
    near.agents.replies[N1] = BindReply()
    near.agents.cut_off = True

    for _ in range(3):
        with pytest.raises(UnavailableError, match="NATS is away"):
            await near.presence.deferrals([lease()])

    assert near.presence.cordon_changes() == {}


async def test_an_agent_that_replaces_another_plugin_gets_requests_again(near: Near) -> None:
    near.presence.mark_absent([N1])
    near.presence.mark_present([N1])

    deferrals = await near.presence.deferrals([lease()])

    assert "does not respond" in deferrals[lease().pod].reason


async def test_what_is_known_of_nodes_is_forgotten_unless_it_is_needed(near: Near) -> None:
    near.presence.mark_present([N1, *(NodeName(f"deleted-{number}") for number in range(100))])
    near.clock.advance(FORGET_S / 2)
    near.presence.mark_present([N1])
    near.clock.advance(FORGET_S / 2 + 1.0)

    near.presence.apply_cordons({}, {})

    assert set(near.presence._records) == {N1}


async def test_pods_wait_for_an_agent_that_reported_before_any_request(near: Near) -> None:
    near.presence.mark_present([N1])

    deferrals = await near.presence.deferrals([lease(), lease("p2", node="n2")])

    assert list(deferrals) == [lease().pod]


@pytest.mark.parametrize("jump_s", [-3600.0, 3600.0])
async def test_a_changed_wall_clock_does_not_change_how_long_replies_are_trusted(
    near: Near, jump_s: float
) -> None:
    near.agents.replies[N1] = BindReply()
    await near.presence.deferrals([lease()])

    near.clock.set_by = jump_s
    await near.presence.deferrals([lease()])
    trusted = near.agents.requests
    near.clock.advance(TRUSTED_S)
    await near.presence.deferrals([lease()])

    assert (trusted, near.agents.requests) == (1, 2)


def cordons(world: World, agents: FakeAgents, clock: FakeClock) -> NodeCordons:
    return NodeCordons(world.ledger, AgentPresence(agents, agents.reported_by_agent, clock))


async def test_a_node_is_cordoned_after_two_missed_replies_and_uncordoned_by_the_next(
    new_world: NewWorld,
) -> None:
    world = await new_world()
    agents = no_agents()
    clock = FakeClock()
    agents.replies[N1] = HANGING
    it = cordons(world, agents, clock)

    await it.presence.deferrals([lease()])
    await it.cordon_nodes()
    slow = dict(await world.cordoned())
    clock.advance(RETRY_S)
    await it.presence.deferrals([lease()])
    await it.cordon_nodes()
    cordoned = dict(await world.cordoned())
    agents.replies[N1] = BindReply()
    clock.advance(MAX_RETRY_S)
    await it.cordon_nodes()

    assert slow == {}
    assert list(cordoned) == [N1]
    assert "does not respond" in cordoned[N1]
    assert await world.cordoned() == {}


async def test_a_node_is_cordoned_at_once_when_its_agent_is_being_stopped(
    new_world: NewWorld,
) -> None:
    world = await new_world()
    agents = no_agents()
    clock = FakeClock()
    agents.replies[N1] = away("p1")
    it = cordons(world, agents, clock)

    await it.presence.deferrals([lease()])
    await it.cordon_nodes()

    assert await world.cordoned() == {N1: "its agent is being stopped"}


async def test_a_device_report_of_a_cordoned_node_has_its_agent_probed_at_once(
    new_world: NewWorld,
) -> None:
    world = await new_world()
    agents = no_agents()
    clock = FakeClock()
    agents.replies[N1] = HANGING
    it = cordons(world, agents, clock)
    for _ in range(8):
        await it.presence.deferrals([lease()])
        await it.cordon_nodes()
        clock.advance(MAX_RETRY_S)
    await it.cordon_nodes()
    agents.replies[N1] = BindReply()

    await it.cordon_nodes()
    assert N1 in await world.cordoned(), "its pause is not over"
    it.presence.mark_present([N1, N2])
    async with asyncio.timeout(30):
        await it.wait()
    await it.cordon_nodes()

    assert await world.cordoned() == {}


async def test_a_node_of_another_device_plugin_is_uncordoned_and_gets_no_request(
    new_world: NewWorld,
) -> None:
    world = await new_world()
    agents = no_agents()
    clock = FakeClock()
    agents.replies[N1] = BindReply()
    one, two = cordons(world, agents, clock), cordons(world, agents, clock)
    for it in (one, two):
        await it.presence.deferrals([lease()])
    agents.replies.clear()
    clock.advance(TRUSTED_S)
    for _ in range(2):
        await one.presence.deferrals([lease()])
        clock.advance(RETRY_S)
    for it in (one, two):
        await it.cordon_nodes()
    cordoned = dict(await world.cordoned())

    one.presence.mark_absent([N1])
    for it in (one, two):
        await it.cordon_nodes()
    requests = agents.requests
    clock.advance(NO_AGENT_S)

    assert list(cordoned) == [N1]
    assert await world.cordoned() == {}
    assert await one.presence.deferrals([lease()]) == {}
    assert agents.requests == requests
    assert await two.presence.deferrals([lease()]) == {}, "it knows that the node is uncordoned"
    for it in (one, two):
        await it.cordon_nodes()
    assert await world.cordoned() == {}


async def test_a_binder_uncordons_the_node_of_another_only_after_a_reply(
    new_world: NewWorld,
) -> None:
    world = await new_world()
    agents = no_agents()
    clock = FakeClock()
    agents.replies[N1] = BindReply()
    one, two = cordons(world, agents, clock), cordons(world, agents, clock)
    await two.presence.deferrals([lease()])
    agents.replies.clear()
    agents.replies[N1] = HANGING
    for _ in range(2):
        await one.presence.deferrals([lease()])
        clock.advance(RETRY_S)
    await one.cordon_nodes()

    await two.cordon_nodes()
    assert N1 in await world.cordoned()
    assert (await two.presence.deferrals([lease()])) != {}
    agents.replies[N1] = BindReply()
    clock.advance(MAX_RETRY_S)
    await two.cordon_nodes()
    assert await world.cordoned() == {}
    await one.cordon_nodes()
    await one.cordon_nodes()
    assert await world.cordoned() == {}, "the other one has the newer reply"
    assert await one.presence.deferrals([lease()]) == {}


async def test_a_pod_on_a_cordoned_node_is_explained_and_then_placed_elsewhere(
    new_world: NewWorld,
) -> None:
    new = lease("p1", created_at=NOW)
    world = await new_world(new)
    world.agents.replies = {N1: away("p1")}
    world.pods.seen["p1"] = PodSnapshot(new.pod, None, resource_version="7")
    batch = chosen(new)

    with pytest.raises(UnavailableError, match="being stopped"):
        await world.binder.pods.bind_pods(batch)
    world.clock.advance(EXPLAIN_S)
    with pytest.raises(UnavailableError, match="being stopped"):
        await world.binder.pods.bind_pods(batch)
    async with running(world.binder.conditions.write_conditions):
        await until(lambda: world.pods.patches)
    world.clock.advance(CORDONED_S)
    events = await world.binder.pods.bind_pods(batch)

    [(_, patch)] = world.pods.patches
    [condition] = patch["status"]["conditions"]
    assert condition["message"] == (
        "its share is reserved on node n1, but it must wait: its agent is being stopped"
    )
    assert [type(event) for event in events] == [LeaseChanged, BindingFailed]
    assert await world.leases() == {}


async def test_only_a_pod_that_is_deferred_for_a_while_is_explained(new_world: NewWorld) -> None:
    new, old = lease("p1", created_at=NOW), lease("p2", created_at=NOW - EXPLAIN_S)
    world = await new_world(new, old)
    world.agents.replies = {N1: away("p1", "p2")}
    for each in (new, old):
        seen = PodSnapshot(each.pod, None, resource_version="7")
        world.pods.seen[each.name] = seen

    with pytest.raises(UnavailableError, match="being stopped"):
        await world.binder.pods.bind_pods(chosen(new, old))
    async with running(world.binder.conditions.write_conditions):
        await until(lambda: world.pods.patches)

    assert [name for name, _ in world.pods.patches] == ["p2"]


async def test_a_late_placement_does_not_wait_for_a_node_that_its_pod_has_left(
    new_world: NewWorld,
) -> None:
    world = await new_world(lease("p1", node="n2", state=LeaseState.ACTIVE))
    world.agents.replies = {N1: away("p1")}

    events = await world.binder.pods.bind_pods(chosen(lease("p1")))

    assert not events
    assert [each.node for each in (await world.leases()).values()] == [N2]
