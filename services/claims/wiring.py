"""Builds the leases of claims, from ports or on the connections of the binder."""

from dataclasses import dataclass

from services.claims.claim_answers import AnswerWriter, ClaimEnder
from services.claims.claim_leaser import ClaimLeaser
from services.claims.clients import ClaimAgentClient, ClaimClient
from services.claims.service import Claims
from shared.kubernetes.client import KubernetesClient
from shared.ledger.leases import RedisLeases
from shared.model.clock import Clock, SystemClock
from shared.nats.bus import Bus
from shared.runtime.service import Publish


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimPorts:
    ledger: RedisLeases
    claims: ClaimClient
    agents: ClaimAgentClient
    publish: Publish
    clock: Clock
    """Of the ledger: whatever is stored is compared with it."""
    host_clock: Clock
    """For times that are only shown."""


def build_claims(ports: ClaimPorts) -> Claims:
    ender = ClaimEnder(ports.ledger, ports.agents)
    leaser = ClaimLeaser(
        ledger=ports.ledger,
        publish=ports.publish,
        writer=AnswerWriter(ports.claims, ports.agents, ender),
        ender=ender,
        clock=ports.clock,
        host_clock=ports.host_clock,
    )
    return Claims(leaser=leaser, ender=ender)


def claims_beside(client: KubernetesClient, ledger: RedisLeases, bus: Bus, clock: Clock) -> Claims:
    return build_claims(
        ClaimPorts(
            ledger=ledger,
            claims=ClaimClient(client, SystemClock()),
            agents=ClaimAgentClient(bus),
            publish=bus.publish,
            clock=clock,
            host_clock=SystemClock(),
        )
    )
