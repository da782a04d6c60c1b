"""Runs the watcher: `python -m services.watcher --help`."""

from services.watcher.pods import PodReader
from services.watcher.quota_sources import QuotaReflectors
from services.watcher.quotas import load_file
from services.watcher.service import Watcher
from services.watcher.settings import WatcherSettings, load_rules
from services.watcher.sources import FreshListing, GroupReflectors, NodeReflector, PodReflector
from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.kubeconfig import load_credentials
from shared.model.clock import SystemClock
from shared.nats.bus import Bus
from shared.runtime.run import run, serve
from shared.runtime.settings import load_or_exit


async def watch(settings: WatcherSettings) -> None:
    """Build the watcher from real parts and serve it until told to stop."""
    rules, schedulers = load_rules(settings), frozenset(settings.schedulers)
    async with (
        KubernetesClient(load_credentials(settings.kubeconfig)) as kube,
        Bus.connect_later(
            settings.nats_url,
            name="watcher",
            keys=settings.nats_client_credentials("watcher"),
            keeps_stream=True,
            copies=settings.nats_copies,
        ) as bus,
    ):
        pods = PodReflector(
            kube, PodReader(schedulers, rules, allow_privileged=settings.allow_privileged)
        )
        nodes = NodeReflector(kube)
        groups, listing = GroupReflectors(kube), FreshListing(kube, schedulers)
        quotas = QuotaReflectors(kube, load_file(settings.quotas) if settings.quotas else {})
        watcher = Watcher(pods, nodes, groups, listing, SystemClock(), quotas=quotas)
        probes = {
            "pods": lambda: None if pods.synced else "not listed yet",
            "nodes": lambda: None if nodes.synced else "not listed yet",
        }
        await serve("watcher", watcher, bus=bus, settings=settings, probes=probes)


def main() -> None:
    """Read the settings and run."""
    settings = load_or_exit(
        WatcherSettings,
        "python -m services.watcher",
        about="Turn the API server's pods and nodes into events. Any number of replicas may run.",
        examples=(
            "python -m services.watcher --kubeconfig .leasehold/kubeconfig --nats-url nats://nats:4222",
            "python -m services.watcher --schedulers volcano --volcano-conf volcano-scheduler.conf",
        ),
    )
    run(lambda: watch(settings), service="watcher", log_level=settings.log_level)


if __name__ == "__main__":
    main()
