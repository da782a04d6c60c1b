"""Builds a node agent from real clients."""

import contextlib
import functools
import logging
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from pathlib import PurePosixPath

from services.node_agent.agent_timing import DEFAULT_TIMING, AgentTiming
from services.node_agent.allocate.admission_window import AdmissionWindow
from services.node_agent.allocate.cdi_files import CdiFiles
from services.node_agent.allocate.grants import Grants
from services.node_agent.allocate.handler import AllocationHandler
from services.node_agent.compute_time.build_library import BUILT as BUILT_LIBRARY
from services.node_agent.compute_time.steering import TimeSteering
from services.node_agent.compute_time.time_library import TimeLibrary
from services.node_agent.compute_time.time_shares import OFF
from services.node_agent.container_runtime.runtime_watch import RuntimeWatch
from services.node_agent.device_config import DeviceConfigLoader
from services.node_agent.device_watcher import DeviceWatcher
from services.node_agent.dra.driver import ClaimDriver
from services.node_agent.enforcers.compute_time import ComputeTime
from services.node_agent.enforcers.mps import Mps, SharedMps
from services.node_agent.enforcers.table import enforcer_table
from services.node_agent.gpu_access import NodeGpus
from services.node_agent.gpus.health_monitor import HealthMonitor
from services.node_agent.instance_lock import instance_lock
from services.node_agent.isolation.container_files import ContainerFiles
from services.node_agent.isolation.library import NodeLibrary
from services.node_agent.kubelet.node_pods import NodePods
from services.node_agent.kubelet.pod_list import KubeletPods
from services.node_agent.kubelet.pod_resources import KubeletPodResources
from services.node_agent.kubelet.registration import DevicePlugins
from services.node_agent.memory_limits.container_limits import ContainerLimits
from services.node_agent.memory_limits.hook_program import BUILT, HookProgram
from services.node_agent.memory_limits.hook_server import HookServer
from services.node_agent.memory_limits.listed_pods import ListPods
from services.node_agent.metrics import (
    LEASES,
    LEFTOVERS,
    PODS_UNREADABLE,
    UNREGISTERED,
    AgentMetrics,
)
from services.node_agent.mps.watch import MpsWatch
from services.node_agent.node import Node
from services.node_agent.partition.layout_reconciler import LayoutReconciler
from services.node_agent.reconcile.checkpoint_reconciler import CheckpointReconciler
from services.node_agent.records.checkpoint import Checkpoint
from services.node_agent.records.known_leases import KnownLeases
from services.node_agent.records.lease_sync import LeaseSync
from services.node_agent.resize.limit_updates import LimitUpdater
from services.node_agent.service import NodeAgent
from services.node_agent.settings import (
    MPS_PRIVATE,
    MPS_SHARED,
    AgentSettings,
    kubelet_credentials,
)
from services.node_agent.time_slices.time_slices import TimeSlices
from services.node_agent.usage.idle_shares import LastUseFile
from services.node_agent.usage.monitor import UsageMonitor
from services.node_agent.views.node_views import ViewWriter
from shared.dialects.dialect import Rules
from shared.dialects.pod_requests import enabled
from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.kubeconfig import load_credentials
from shared.kubernetes.paths import node_path
from shared.kubernetes.types import ApiNode
from shared.model.clock import Clock, SystemClock
from shared.model.errors import UnavailableError
from shared.model.requests.claim import DraMode
from shared.nats.bus import Bus
from shared.runtime.health import METRICS_PATH, metrics_application, served
from shared.runtime.run import notify_ready
from shared.runtime.telemetry import Tracing

logger = logging.getLogger(__name__)


@contextlib.asynccontextmanager
async def node_agent(
    settings: AgentSettings,
    gpus: NodeGpus,
    *,
    bus: Bus,
    tracing: Tracing,
    clock: Clock | None = None,
    timing: AgentTiming = DEFAULT_TIMING,
) -> AsyncIterator[NodeAgent]:
    """Lock the state directory until the context exits."""
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(instance_lock(settings.state_dir))
        state = PurePosixPath(settings.state_dir.absolute())
        library = NodeLibrary(settings.library_root, settings.library_origin)
        files = ContainerFiles(state, library, timing=timing)
        await files.create_shared_files()
        await files.library.update()
        checkpoint = Checkpoint(settings.state_dir / "checkpoint.json", settings.node_name)
        await checkpoint.load()
        read_credentials = functools.partial(kubelet_credentials, settings)
        kubernetes = KubernetesClient(load_credentials(settings.kubeconfig, environ=os.environ))
        kubelet = await stack.enter_async_context(KubernetesClient(read_credentials()))
        socket = settings.kubelet_dir / "pod-resources" / "kubelet.sock"
        cdi = _cdi_files(settings, gpus, checkpoint, kubernetes)
        pods = KubeletPods(kubelet, read_credentials)
        compute_time = ComputeTime(files, _time_library(settings))
        mps = _mps(settings, gpus, pods.list_pods)
        limits = _container_limits(settings, gpus, checkpoint, cdi, pods.list_pods)
        if limits is not None:
            hooks = HookServer(limits.program.socket, limits.start_container)
            await stack.enter_async_context(hooks.serve())
        node = Node(
            name=settings.node_name,
            kubernetes=await stack.enter_async_context(kubernetes),
            kubelet=pods,
            pod_resources=await stack.enter_async_context(KubeletPodResources.connected(socket)),
            checkpoint=checkpoint,
            lease_sync=LeaseSync(KnownLeases(settings.node_name), bus),
            files=files,
            enforcers=enforcer_table(files, limits, compute_time, mps),
            cdi=cdi,
            metrics=AgentMetrics(tracing),
            clock=clock or SystemClock(),
            timing=timing,
        )
        agent = _build_agent(node, settings, gpus, compute_time, mps)
        LEFTOVERS.set_function(agent.leftovers.count)
        LEASES.set_function(lambda: len(node.leases.leases))
        UNREGISTERED.set_function(lambda: bool(agent.plugins.unready_reason()))
        PODS_UNREADABLE.set_function(lambda: bool(agent.pods.unreadable_reason))
        if settings.monitor_address is not None:
            app = metrics_application(agent.usage)
            page = served(app, settings.monitor_address, flag="--monitor-http")
            address = await stack.enter_async_context(page)
            logger.info("usage metrics are served at http://%s%s", address, METRICS_PATH)
        with contextlib.suppress(UnavailableError):  # the agent retries, and logs why
            await agent.watcher.probe()
        notify_ready("serves the kubelet as soon as its socket exists")
        yield agent


def _cdi_files(
    settings: AgentSettings, gpus: NodeGpus, checkpoint: Checkpoint, kubernetes: KubernetesClient
) -> CdiFiles:
    return CdiFiles(
        settings.cdi_directory,
        settings.device_list_strategies,
        places=settings.driver_places,
        read_runtime=functools.partial(_container_runtime, kubernetes, settings),
        list_instances=gpus.driver.instances,
        checkpoint=checkpoint,
        used_by_claims=settings.dra is not DraMode.OFF,
    )


def _container_limits(
    settings: AgentSettings,
    gpus: NodeGpus,
    checkpoint: Checkpoint,
    cdi: CdiFiles,
    list_pods: ListPods,
) -> ContainerLimits | None:
    if gpus.limits is None or not settings.driver_limits:
        return None
    program = HookProgram(
        settings.state_dir.absolute(), settings.cdi_directory, settings.limit_hook or BUILT
    )
    return ContainerLimits(
        settings.node_name,
        gpus.limits,
        checkpoint,
        program,
        strategies=lambda: cdi.strategies,
        list_pods=list_pods,
        proc=settings.proc_dir,
        bundles=settings.bundle_directories,
    )


def _mps(settings: AgentSettings, gpus: NodeGpus, list_pods: ListPods) -> Sequence[Mps]:
    runners = gpus.mps
    private = runners.private if runners is not None and settings.mps == MPS_PRIVATE else None
    shared = runners.shared if runners is not None and settings.mps == MPS_SHARED else None
    return (
        Mps(private, sample=gpus.sample, list_pods=list_pods, proc=settings.proc_dir),
        SharedMps(shared, sample=gpus.sample, list_pods=list_pods, proc=settings.proc_dir),
    )


def _time_library(settings: AgentSettings) -> TimeLibrary | None:
    if settings.compute_by_time == OFF:
        return None
    return TimeLibrary(settings.state_dir.absolute(), settings.time_library or BUILT_LIBRARY)


async def _container_runtime(kubernetes: KubernetesClient, settings: AgentSettings) -> str:
    node = await kubernetes.read(node_path(settings.node_name), ApiNode)
    return node.status.node_info.container_runtime_version


def _health(node: Node, gpus: NodeGpus) -> HealthMonitor:
    return HealthMonitor(
        node.name,
        xids=gpus.driver.xids,
        environ=os.environ,
        policy=gpus.health_policy,
        leases=node.leases,
        checkpoint=node.checkpoint,
        clock=node.clock,
    )


def _build_agent(
    node: Node,
    settings: AgentSettings,
    gpus: NodeGpus,
    compute_time: ComputeTime,
    mps: Sequence[Mps],
) -> NodeAgent:
    views = ViewWriter(node, handshake=settings.volcano_handshake)
    pods = NodePods(node, settings.proc_dir)
    partitioner = gpus.partitioner(settings, node.timing.partition_step_s)
    mig = LayoutReconciler(node, pods, gpus.driver.instances, partitioner)
    serves_claims = settings.dra is not DraMode.OFF
    reconciler = CheckpointReconciler(node, pods, mig, serves_claims=serves_claims)
    grants = Grants(node, mig, reconciler)
    plugins = DevicePlugins(
        node,
        settings.kubelet_dir / "device-plugins",
        AllocationHandler(node, pods, grants, views),
        views.read_allocatable,
    )
    watcher = DeviceWatcher(
        node,
        driver=gpus.driver,
        config=DeviceConfigLoader(node, settings),
        health=_health(node, gpus),
        mig=mig,
        window=AdmissionWindow(node),
        dialects=enabled(Rules(enabled=settings.systems)),
        plugins=plugins,
        views=views,
    )
    usage = UsageMonitor(
        node,
        sample=gpus.sample,
        list_instances=gpus.driver.instances,
        proc=settings.proc_dir,
        processes_in_pods=gpus.has_processes,
        last_uses=LastUseFile(settings.state_dir / "last-used.json"),
        bundles=settings.bundle_directories,
    )
    slices_file = settings.state_dir / "time-slices.json"
    time_slices = TimeSlices(node, gpus.set_time_slices, slices_file)
    return NodeAgent(
        node,
        watcher=watcher,
        reconciler=reconciler,
        plugins=plugins,
        claims=ClaimDriver(node, grants, time_slices, settings) if serves_claims else None,
        limits=LimitUpdater(node, usage, on_change=watcher.advertise_amounts),
        usage=usage,
        steering=TimeSteering(
            node, compute_time, settings.compute_by_time, sample=gpus.sample, proc=settings.proc_dir
        ),
        mps=MpsWatch(node, mps[settings.mps == MPS_SHARED]),
        time_slices=time_slices,
        views=views,
        runtime=RuntimeWatch(settings.runtime_root),
        failed=grants.failed,
    )
