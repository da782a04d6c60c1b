"""Builds the watcher from real clients and serves it."""

from collections.abc import Mapping
from types import MappingProxyType

from services.watcher.claim_sources import RETRY_S, ClaimReflector, DeviceClassReflector
from services.watcher.node_sources import NodeReflector
from services.watcher.pod_group_sources import PodGroupConditions, PodGroupReflectors
from services.watcher.pod_sources import ManagedPodLister, NamespaceReflector, PodReflector
from services.watcher.pod_spans import PodSpans
from services.watcher.quota_sources import QuotaReflectors, load_file
from services.watcher.service import Watcher
from services.watcher.settings import WatcherSettings
from services.watcher.storage_sources import StorageReflectors
from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.kubeconfig import load_credentials
from shared.kubernetes.reachability import ApiServerReachability
from shared.model.budgets.quota import Quota
from shared.model.clock import SystemClock
from shared.model.names import Namespace
from shared.pods.pod_parser import PodParser
from shared.runtime.run import open_bus, serve
from shared.runtime.shared_process import SharedProcess
from shared.runtime.telemetry import open_tracing


def build_watcher(
    client: KubernetesClient,
    parser: PodParser,
    quotas: Mapping[Namespace, Quota] = MappingProxyType({}),
    *,
    retry_s: float = RETRY_S,
) -> Watcher:
    claims = ClaimReflector(client, retry_s)
    return Watcher(
        pod_source=PodReflector(client, parser),
        node_source=NodeReflector(client),
        group_source=PodGroupReflectors(client, retry_s),
        group_conditions=PodGroupConditions(client),
        namespace_source=NamespaceReflector(client),
        quota_source=QuotaReflectors(client, quotas),
        claim_source=claims,
        class_source=DeviceClassReflector(client, retry_s),
        storage_source=StorageReflectors(client, retry_s),
        lister=ManagedPodLister(client, parser.schedulers, claims),
        clock=SystemClock(),
    )


async def serve_watcher(settings: WatcherSettings, process: SharedProcess | None = None) -> None:
    parser = settings.pod_parser()
    tracing = open_tracing("watcher", settings)
    parser.keeps_reasons = tracing.tracer is not None
    file_quotas = load_file(settings.quotas) if settings.quotas else {}
    async with (
        KubernetesClient(load_credentials(settings.kubeconfig)) as client,
        ApiServerReachability.observed(client) as api_server,
        open_bus(settings, "watcher", process=process) as bus,
    ):
        watcher = build_watcher(client, parser, file_quotas)
        watcher.spans = PodSpans(tracing) if tracing.tracer else None
        pods = watcher.pod_source
        nodes = watcher.node_source
        claims = watcher.claim_source
        probes = {
            "api": api_server.unready_reason,
            "pods": lambda: None if pods.synced else "not listed yet",
            "claims": lambda: claims.unreadable or None,
            "nodes": lambda: None if nodes.revision is not None else "not listed yet",
        }
        await serve(
            "watcher", watcher, bus=bus, settings=settings, tracing=tracing, probes=probes,
            process=process,
        )  # fmt: skip
