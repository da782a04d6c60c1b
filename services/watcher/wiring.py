"""Builds the watcher from real clients and serves it."""

from services.watcher.quota_sources import QuotaReflectors, load_file
from services.watcher.service import Watcher
from services.watcher.settings import WatcherSettings
from services.watcher.sources import (
    ClaimReflector,
    NamespaceReflector,
    NodeReflector,
    OurPodLister,
    PodGroupReflectors,
    PodReflector,
)
from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.kubeconfig import load_credentials
from shared.kubernetes.reachability import ApiServerReachability
from shared.model.clock import SystemClock
from shared.nats.bus import Bus
from shared.runtime.run import serve
from shared.runtime.shared_process import SharedProcess


async def serve_watcher(settings: WatcherSettings, process: SharedProcess | None = None) -> None:
    """Serve the watcher until SIGTERM or SIGINT."""
    parser = settings.pod_parser()
    file_quotas = load_file(settings.quotas) if settings.quotas else {}
    async with (
        KubernetesClient(load_credentials(settings.kubeconfig)) as client,
        ApiServerReachability.observed(client) as api_server,
        Bus.connect_later(
            settings.nats_url,
            name="watcher",
            credentials=settings.nats_client_credentials("watcher"),
            handlers=process.handlers if process else None,
        ) as bus,
    ):
        pods, nodes = PodReflector(client, parser), NodeReflector(client)
        claims = ClaimReflector(client)
        watcher = Watcher(
            pods,
            nodes,
            PodGroupReflectors(client),
            OurPodLister(client, parser.schedulers, claims),
            SystemClock(),
            namespaces=NamespaceReflector(client),
            quotas=QuotaReflectors(client, file_quotas),
            claims=claims,
        )
        probes = {
            "api": api_server.unready_reason,
            "pods": lambda: None if pods.synced else "not listed yet",
            "claims": lambda: claims.unreadable or None,
            "nodes": lambda: None if nodes.revision is not None else "not listed yet",
        }
        await serve("watcher", watcher, bus=bus, settings=settings, probes=probes, process=process)
