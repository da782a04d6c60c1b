"""Runs the binder: `python -m services.binder --help`."""

from services.binder.bind.agent_client import NodeAgentClient
from services.binder.bind.pod_client import PodClient
from services.binder.metrics import PrometheusEvictions, PrometheusTally, count_resize
from services.binder.preempt.eviction_client import EvictionClient
from services.binder.preempt.preemption_controller import PreemptionController
from services.binder.report.event_writer import EventWriter
from services.binder.settings import BinderSettings
from services.binder.wiring import assemble
from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.kubeconfig import load_credentials
from shared.ledger.leases import RedisLeases
from shared.ledger.preemptions import Preemptions
from shared.ledger.staging import LedgerStaging
from shared.ledger.waiting_pods import GatedPods
from shared.model.clock import SystemClock
from shared.model.events.pod_events import ResyncRequested
from shared.nats.bus import Bus
from shared.placing.node_fit import fit_on_node
from shared.runtime.run import run, serve
from shared.runtime.settings import load_or_exit


async def bind(settings: BinderSettings) -> None:
    """Build the binder from real parts and serve it until told to stop."""
    credentials = load_credentials(settings.kubeconfig)
    redis_url, keys = settings.redis_url, settings.redis_client_credentials
    async with (
        KubernetesClient(credentials, timeout_s=settings.api_timeout_s) as kube,
        Bus.connect_later(
            settings.nats_url,
            name="binder",
            keys=settings.nats_client_credentials("binder"),
            keeps_stream=True,
            copies=settings.nats_copies,
        ) as bus,
        RedisLeases.connect(redis_url, credentials=keys, detects_lost_writes=True) as ledger,
        LedgerStaging.connect(redis_url, credentials=keys) as staging,
        Preemptions.connect(redis_url, credentials=keys) as preemptions,
        GatedPods.connect(redis_url, credentials=keys) as gates,
    ):
        clock = SystemClock()

        def preemptor(events: EventWriter) -> PreemptionController:
            return PreemptionController(
                ledger=ledger,
                store=preemptions,
                victims=EvictionClient(kube),
                events=events,
                counts=PrometheusEvictions(),
                clock=clock,
                fit=fit_on_node,
                rules=settings.rules,
                enabled=settings.preemption,
            )

        binder = assemble(
            ledger=ledger,
            staging=staging,
            gates=gates,
            pods=PodClient(kube),
            bus=bus,
            agents=NodeAgentClient(bus),
            clock=clock,
            tally=PrometheusTally(),
            preemptor=preemptor,
            resized=count_resize,
            concurrency=settings.api_concurrency,
            events_per_s=settings.events_per_s,
        )

        async def begin() -> None:
            await bus.publish([ResyncRequested(reason="a binder has started")])

        probes = {"redis": ledger.unready_reason}
        await serve("binder", binder, bus=bus, settings=settings, probes=probes, begin=begin)


def main() -> None:
    """Read the settings and run."""
    settings = load_or_exit(
        BinderSettings,
        "python -m services.binder",
        about="Bind placed pods and keep the ledger in step. Any number of replicas may run.",
        examples=(
            "python -m services.binder --kubeconfig .leasehold/kubeconfig "
            "--redis-url redis://redis:6379 --nats-url nats://nats:4222",
            "python -m services.binder --api-concurrency 16 --events-per-s 20",
        ),
    )
    run(lambda: bind(settings), service="binder", log_level=settings.log_level)


if __name__ == "__main__":
    main()
