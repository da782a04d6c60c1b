"""Builds a node agent from real clients."""

import contextlib
import logging
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import PurePosixPath

from services.node_agent.agent_timing import DEFAULT_TIMING, AgentTiming
from services.node_agent.allocate.admission_window import AdmissionWindow
from services.node_agent.allocate.cdi_files import CdiFiles
from services.node_agent.allocate.handler import AllocationHandler
from services.node_agent.allocate.pod_resolver import PodResolver
from services.node_agent.allocate.reporter import AllocationReporter
from services.node_agent.claim_driver import build_claim_driver
from services.node_agent.device_config import DeviceConfigLoader
from services.node_agent.device_watcher import DeviceWatcher
from services.node_agent.gpu_access import NodeGpus, read_xid_rules
from services.node_agent.gpus.health_monitor import HealthMonitor
from services.node_agent.instance_lock import instance_lock
from services.node_agent.isolation.container_files import ContainerFiles
from services.node_agent.isolation.library import NodeLibrary
from services.node_agent.kubelet.device_checkpoint import PluginResources
from services.node_agent.kubelet.node_pods import NodePods
from services.node_agent.kubelet.registration import DevicePlugins
from services.node_agent.metrics import export_gauges
from services.node_agent.node_clients import NodeClients, open_clients
from services.node_agent.partition.layout_reconciler import LayoutReconciler
from services.node_agent.reconcile.checkpoint_reconciler import CheckpointReconciler
from services.node_agent.records.lease_sync import LeaseRequester
from services.node_agent.resize.limit_updates import LimitUpdater
from services.node_agent.service import NodeAgent
from services.node_agent.settings import AgentSettings
from services.node_agent.usage.last_use_file import LastUseFile
from services.node_agent.usage.monitor import UsageMonitor
from services.node_agent.usage.usage_metrics import METRICS_PATH, metrics_app
from services.node_agent.views.node_views import Handshake, ViewWriter
from shared.dialects.dialect import Rules
from shared.dialects.pod_requests import enabled
from shared.model.claim import DraMode
from shared.model.errors import UnavailableError
from shared.runtime.health import served
from shared.runtime.run import notify_ready
from shared.runtime.telemetry import Tracing

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Views:
    views: ViewWriter
    handshake: Handshake | None
    reporter: AllocationReporter


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gpus:
    node: NodeGpus
    health: HealthMonitor
    mig: LayoutReconciler


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kubelet:
    window: AdmissionWindow
    pods: NodePods


@dataclass(frozen=True, slots=True, kw_only=True)
class _Allocation:
    resolver: PodResolver
    reconciler: CheckpointReconciler
    cdi: CdiFiles
    plugins: DevicePlugins


async def _prepare_isolation(settings: AgentSettings, timing: AgentTiming) -> ContainerFiles:
    files = ContainerFiles(
        PurePosixPath(settings.state_dir.absolute()),
        NodeLibrary(settings.library_root, settings.library_origin),
        timing=timing,
    )
    await files.create_shared_files()
    await files.library.update()
    return files


def _build_views(base: NodeClients) -> _Views:
    views = ViewWriter(
        base.kubernetes,
        base.node,
        base.clock,
        compare_s=base.timing.view_compare_s,
        object_retry_s=base.timing.object_retry_s,
    )
    wanted = base.settings.volcano_handshake
    handshake = Handshake(base.kubernetes, views.path, base.clock) if wanted else None
    reporter = AllocationReporter(base.node, leases=base.leases, views=views)
    return _Views(views=views, handshake=handshake, reporter=reporter)


def _build_gpus(base: NodeClients, gpus: NodeGpus) -> _Gpus:
    health = HealthMonitor(
        base.node,
        xids=gpus.driver,
        rules=read_xid_rules(os.environ),
        policy=gpus.health_policy,
        leases=base.leases,
        allocations=lambda: base.checkpoint.allocations,
        clock=base.clock,
    )
    mig = LayoutReconciler(
        gpus.driver.instances,
        gpus.partitioner(base.settings, base.timing),
        lease_sync=base.lease_sync,
        checkpoint=base.checkpoint,
        pods=base.pod_list,
        metrics=base.metrics,
        clock=base.clock,
        timing=base.timing,
    )
    return _Gpus(node=gpus, health=health, mig=mig)


def _build_kubelet(base: NodeClients, reporter: AllocationReporter) -> _Kubelet:
    window = AdmissionWindow(
        base.leases,
        base.checkpoint,
        refused=reporter.refused,
        get_snapshot=base.state.get_snapshot,
        ticks=base.clock.ticks,
    )
    pods = NodePods(
        base.pod_list,
        base.pod_resources,
        implied=window.implied_pods,
        proc=base.settings.proc_dir,
        starting=lambda: base.checkpoint.started_since(
            base.clock.now() - base.timing.process_start_s
        ),
        clock=base.clock,
        timing=base.timing,
    )
    return _Kubelet(window=window, pods=pods)


def _build_allocation(
    base: NodeClients, views: _Views, gpus: _Gpus, *, files: ContainerFiles, pods: NodePods
) -> _Allocation:
    settings = base.settings
    reconciler = CheckpointReconciler(
        base.checkpoint,
        base.leases,
        pods=pods,
        pod_resources=base.pod_resources,
        list_mig_instances=gpus.mig.list_instances,
        retain_refused=views.reporter.retain_refused,
        files=files,
        clock=base.clock,
        serves_claims=settings.dra is not DraMode.OFF,
    )
    resolver = PodResolver(
        base.lease_sync,
        pods=pods,
        pod_resources=base.pod_resources,
        clock=base.clock,
        timing=base.timing,
    )
    cdi = CdiFiles(
        settings.cdi_directory,
        settings.device_list_strategies,
        places=settings.driver_places,
        list_instances=gpus.node.driver.instances,
        checkpoint=base.checkpoint,
        used_by_claims=settings.dra is not DraMode.OFF,
    )
    handler = AllocationHandler(
        base.node,
        require_snapshot=base.state.require_snapshot,
        resolver=resolver,
        pod_resources=base.pod_resources,
        checkpoint=base.checkpoint,
        forget_ended=reconciler.forget_ended,
        files=files,
        name_cdi_devices=cdi.ensure_named,
        mig_instances_of=gpus.mig.instance_uuids,
        reporter=views.reporter,
        metrics=base.metrics,
        clock=base.clock,
        timing=base.timing,
    )
    sockets, allocatable = settings.kubelet_dir / "device-plugins", views.views.read_allocatable
    plugins = DevicePlugins(
        sockets,
        handler,
        allocatable,
        plugin_resources=PluginResources(
            sockets,
            base.pod_resources,
            allocatable,
            recorded=lambda: frozenset(e.allocation.resource for e in base.checkpoint.entries),
        ),
        timing=base.timing,
    )
    return _Allocation(resolver=resolver, reconciler=reconciler, cdi=cdi, plugins=plugins)


def _build_watcher(
    base: NodeClients, views: _Views, gpus: _Gpus, *, files: ContainerFiles, allocation: _Allocation
) -> DeviceWatcher:
    settings = base.settings
    sharing = DeviceConfigLoader(
        base.kubernetes,
        base.node,
        flags=settings.sharing,
        split=settings.device_split_count,
        unit=settings.memory_factor,
        device_file=settings.device_config,
        node_file=settings.node_config,
        cache_file=settings.state_dir / "device-config.json",
        clock=base.clock,
        report_error=base.state.config_errors.append,
    )
    return DeviceWatcher(
        base.node,
        state=base.state,
        discover=gpus.node.driver.discover,
        read_sharing_config=sharing.load,
        health=gpus.health,
        observe_mig=gpus.mig.update_devices,
        update_library=files.library.update,
        cdi=allocation.cdi,
        dialects=enabled(Rules(enabled=settings.dialects)),
        get_paths=lambda: files.layout.paths,
        checkpoint=base.checkpoint,
        leases=base.leases,
        serve=allocation.plugins.serve,
        advertise=views.views.set_advertisement,
        probe_s=base.timing.gpu_probe_s,
    )


async def _open_monitor(base: NodeClients, gpus: NodeGpus, stack: AsyncExitStack) -> UsageMonitor:
    settings = base.settings
    monitor = UsageMonitor(
        base.node,
        usage=gpus.usage,
        list_instances=gpus.driver.instances,
        list_pods=base.pod_list.list_pods,
        list_holdings=base.pod_resources.list_holdings,
        checkpoint=base.checkpoint,
        leases=base.leases,
        clock=base.clock,
        proc=settings.proc_dir,
        processes_in_pods=gpus.has_processes,
        scan_interval_s=base.timing.usage_scan_s,
        last_uses=LastUseFile(settings.state_dir / "last-used.json"),
    )
    if settings.monitor_address is not None:
        page = served(metrics_app(monitor), settings.monitor_address, flag="--monitor-http")
        address = await stack.enter_async_context(page)
        logger.info("usage metrics are served at http://%s%s", address, METRICS_PATH)
    return monitor


@contextlib.asynccontextmanager
async def node_agent(
    settings: AgentSettings,
    hardware: NodeGpus,
    *,
    requester: LeaseRequester,
    tracing: Tracing,
    timing: AgentTiming = DEFAULT_TIMING,
) -> AsyncIterator[NodeAgent]:
    """Open all clients of a node agent, and lock its state directory until the context exits."""
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(instance_lock(settings.state_dir))
        files = await _prepare_isolation(settings, timing)
        base = await open_clients(
            settings, stack, requester=requester, tracing=tracing, timing=timing
        )
        agent = await _build_agent(base, hardware, files, stack)
        with contextlib.suppress(UnavailableError):  # the agent retries, and logs why
            await agent.watcher.probe()
        notify_ready("serves the kubelet as soon as its socket exists")
        yield agent


async def _build_agent(
    base: NodeClients, hardware: NodeGpus, files: ContainerFiles, stack: AsyncExitStack
) -> NodeAgent:
    views = _build_views(base)
    gpus = _build_gpus(base, hardware)
    kubelet = _build_kubelet(base, views.reporter)
    allocation = _build_allocation(base, views, gpus, files=files, pods=kubelet.pods)
    watcher = _build_watcher(base, views, gpus, files=files, allocation=allocation)
    monitor = await _open_monitor(base, hardware, stack)
    export_gauges(
        leases=base.leases.leases,
        unregistered=allocation.plugins.unready_reason,
        unreadable=kubelet.pods.get_unreadable_reason,
    )
    limits = LimitUpdater(
        base.node,
        lease_sync=base.lease_sync,
        checkpoint=base.checkpoint,
        get_snapshot=base.state.get_snapshot,
        monitor=monitor,
        on_change=watcher.advertise_amounts,
        clock=base.clock,
        timing=base.timing,
    )
    return NodeAgent(
        base.node,
        state=base.state,
        watcher=watcher,
        health=gpus.health,
        mig=gpus.mig,
        checkpoint=base.checkpoint,
        lease_sync=base.lease_sync,
        reconciler=allocation.reconciler,
        window=kubelet.window,
        pods=kubelet.pods,
        resolver=allocation.resolver,
        plugins=allocation.plugins,
        claims=build_claim_driver(
            base,
            forget_ended=allocation.reconciler.forget_ended,
            files=files,
            name_cdi_devices=allocation.cdi.ensure_named,
            mig=gpus.mig,
            outbox=views.reporter.outbox,
        ),
        outbox=views.reporter.outbox,
        files=files,
        limits=limits,
        usage=monitor,
        view_loops=[view.run for view in (views.views, views.handshake) if view is not None],
        api_unready_reason=views.views.unready_reason,
        clock=base.clock,
        timing=base.timing,
    )
