"""Builds a node agent out of real clients."""

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Mapping
from pathlib import PurePosixPath

from services.node_agent import metrics
from services.node_agent.allocate.cdi_files import CdiFiles
from services.node_agent.allocate.handler import AllocationHandler
from services.node_agent.allocate.pod_resolver import LeaseRequester, PodResolver
from services.node_agent.device_config import DeviceConfigLoader
from services.node_agent.gpus.device_faults import DISABLE_VARIABLE, ENABLE_VARIABLE, XidRules
from services.node_agent.gpus.device_health import HealthPolicy
from services.node_agent.gpus.driver import GpuDriver, open_gpu_driver
from services.node_agent.gpus.health_monitor import HealthMonitor
from services.node_agent.gpus.simulated.gpus import NoUsage
from services.node_agent.instance_lock import instance_lock
from services.node_agent.isolation import library
from services.node_agent.isolation.container_files import ContainerFiles
from services.node_agent.isolation.host_paths import HostLayout
from services.node_agent.isolation.limit_updates import LimitUpdater
from services.node_agent.kubelet.admission_window import AdmissionWindow
from services.node_agent.kubelet.node_pods import NodePods
from services.node_agent.kubelet.pod_list import KubeletPods
from services.node_agent.kubelet.pod_resources import KubeletPodResources
from services.node_agent.kubelet.registration import DevicePlugins
from services.node_agent.mig.layout_reconciler import LayoutPartitioner, LayoutReconciler
from services.node_agent.mig.partition_client import RemoteMigGpus, RemotePartitioner
from services.node_agent.mig.partitioner import Partitioner
from services.node_agent.ports import Gpus
from services.node_agent.records.checkpoint import Checkpoint
from services.node_agent.records.known_leases import KnownLeases
from services.node_agent.service import NodeAgent
from services.node_agent.settings import (
    NVML_LOOK_S,
    SIMULATED_FIRST_S,
    SIMULATED_LOOK_S,
    AgentSettings,
    kubelet_credentials,
)
from services.node_agent.usage.monitor import UsageMonitor, UsageSource
from services.node_agent.usage.usage_metrics import METRICS_PATH, metrics_app
from services.node_agent.views.handshake import Handshake
from services.node_agent.views.node_views import ViewWriter
from shared.dialects.dialect import Rules
from shared.dialects.pod_requests import enabled
from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.kubeconfig import load_credentials
from shared.model.clock import SystemClock
from shared.model.errors import UnavailableError
from shared.runtime.health import served
from shared.runtime.sd_notify import notify_ready
from shared.runtime.telemetry import Tracing

logger = logging.getLogger(__name__)


def gpus_of(settings: AgentSettings) -> GpuDriver | RemoteMigGpus:
    """Return the node's GPUs."""
    gpus = open_gpu_driver(
        settings.node_name,
        settings.gpus,
        fault_file=settings.fault_file or settings.state_dir / "faults.json",
        mig_file=settings.mig_file or settings.state_dir / "simulated-mig.json",
    )
    if settings.partition_socket is None:
        return gpus
    return RemoteMigGpus(gpus, RemotePartitioner(settings.partition_socket))


def partitioning_of(
    settings: AgentSettings, gpus: GpuDriver | RemoteMigGpus
) -> LayoutPartitioner | None:
    """Return who changes the layouts of GPUs; None: nobody may."""
    if not settings.partitions:
        return None
    return gpus.remote if isinstance(gpus, RemoteMigGpus) else Partitioner(gpus)


def xid_rules(environ: Mapping[str, str]) -> XidRules:
    """Return which XIDs condemn a GPU, as the environment says; what it says wrongly is logged."""
    rules = XidRules.from_environment(environ)
    if rules.invalid_words:
        words = ", ".join(rules.invalid_words)
        logger.warning(
            "%s and %s list XIDs by number, not %s", DISABLE_VARIABLE, ENABLE_VARIABLE, words
        )
    return rules


def usage_of(settings: AgentSettings, gpus: Gpus) -> UsageSource:
    """Return who knows what runs on the node's GPUs."""
    if settings.simulated:
        return NoUsage(gpus.discover)
    from services.node_agent.gpus.nvml.processes import NvmlProcesses  # noqa: PLC0415 - as above

    return NvmlProcesses()


async def install_library(settings: AgentSettings) -> None:
    """Install the library that the operator names; if that fails, the one before goes on."""
    if settings.library_source is None:
        return
    try:
        source, root = settings.library_source, settings.library_root
        place = await asyncio.to_thread(library.install, source, root)
        logger.info("containers mount %s", place)
    except UnavailableError as error:
        logger.error("containers mount %s still: %s", settings.library, error)  # noqa: TRY400


@contextlib.asynccontextmanager
async def node_agent(
    settings: AgentSettings, *, asking: LeaseRequester, tracing: Tracing
) -> AsyncIterator[NodeAgent]:
    """Open everything a node agent needs; the state directory is this agent's alone."""
    node, clock = settings.node_name, SystemClock()
    await install_library(settings)
    layout = HostLayout(
        state_dir=PurePosixPath(settings.state_dir.absolute()),
        library=PurePosixPath(settings.library.absolute()),
    )
    preparing = ContainerFiles(
        layout,
        simulated=settings.simulated and settings.library_source is None,
        installed=settings.library_root if settings.library_source else None,
    )
    record = Checkpoint(settings.state_dir / "checkpoint.json", node)
    leases = KnownLeases(node)
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(instance_lock(settings.state_dir))
        await preparing.create_shared_files()
        await record.load()
        kube = await stack.enter_async_context(
            KubernetesClient(load_credentials(settings.kubeconfig, environ=os.environ))
        )
        kubelet = await stack.enter_async_context(KubernetesClient(kubelet_credentials(settings)))
        held = await stack.enter_async_context(
            KubeletPodResources(settings.kubelet_dir / "pod-resources" / "kubelet.sock")
        )
        views = ViewWriter(kube, node, clock)
        handshake = Handshake(kube, views.path, clock) if settings.volcano_handshake else None
        gpus, counting = gpus_of(settings), metrics.AgentMetrics(tracing)
        pods = KubeletPods(kubelet, lambda: kubelet_credentials(settings))
        turns = AdmissionWindow(leases, record, lambda: answering.refused, clock.ticks)
        seen = NodePods(
            pods,
            held,
            implied=lambda: turns.implied_pods(answering.facts),
            proc=settings.proc_dir,
            clock=clock,
        )
        instances = LayoutReconciler(
            gpus,
            partitioning_of(settings, gpus),
            leases=leases,
            checkpoint=record,
            pods=pods,
            counting=counting,
            clock=clock,
        )
        cdi = CdiFiles(
            settings.cdi_directory,
            settings.device_list_strategies,
            places=settings.driver_places,
            driver=gpus,
            record=record,
        )
        answering = AllocationHandler(
            node,
            finding=PodResolver(
                node,
                leases=leases,
                pods=seen,
                pod_resources=held,
                lease_requester=asking,
                clock=clock,
            ),
            record=record,
            preparing=preparing,
            cdi=cdi,
            instances=instances,
            views=views,
            measuring=counting,
            clock=clock,
        )
        plugins = DevicePlugins(
            settings.kubelet_dir / "device-plugins", answering, views.read_allocatable
        )
        monitor = UsageMonitor(
            node,
            usage=usage_of(settings, gpus),
            list_instances=gpus.instances,
            pods=pods,
            checkpoint=record,
            leases=leases,
            clock=clock,
            proc=settings.proc_dir,
        )
        if settings.monitor_address is not None:
            address = await stack.enter_async_context(
                served(metrics_app(monitor), settings.monitor_address, flag="--monitor-http")
            )
            logger.info("what containers use is shown at http://%s%s", address, METRICS_PATH)
        metrics.watch(
            lambda: len(leases.leases),
            lambda: plugins.unready_reason() is not None,
            lambda: bool(seen.unreadable_reason),
        )
        agent = NodeAgent(
            node,
            gpus=gpus,
            look_s=SIMULATED_LOOK_S if settings.simulated else NVML_LOOK_S,
            health_monitor=HealthMonitor(
                node,
                xids=gpus,
                rules=xid_rules(os.environ),
                policy=HealthPolicy(first_backoff_s=SIMULATED_FIRST_S)
                if settings.simulated
                else HealthPolicy(),
                leases=leases,
                clock=clock,
            ),
            sharing_source=DeviceConfigLoader(
                kube,
                node,
                flags=settings.sharing,
                split=settings.device_split_count,
                unit=settings.memory_factor,
                device_file=settings.device_config,
                node_file=settings.node_config,
                cache_file=settings.state_dir / "device-config.json",
                clock=clock,
            ),
            instances=instances,
            dialects=enabled(Rules(enabled=settings.dialects)),
            paths=layout.paths,
            answering=answering,
            turns=turns,
            plugins=plugins,
            views=views,
            handshake=handshake,
            record=record,
            cleaning=preparing,
            cdi=cdi,
            limiting=LimitUpdater(
                node,
                leases=leases,
                record=record,
                facts=lambda: answering.facts,
                monitor=monitor,
                asking=asking,
                clock=clock,
            ),
            usage=monitor,
            clock=clock,
        )
        with contextlib.suppress(UnavailableError):  # the agent looks again, and says so
            await agent.look()
        notify_ready("serves the kubelet as soon as its socket is there")
        yield agent
