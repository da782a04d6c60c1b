"""The clients and values that all parts of a node agent use."""

import functools
import os
from contextlib import AsyncExitStack
from dataclasses import dataclass

from services.node_agent.agent_timing import AgentTiming
from services.node_agent.kubelet.pod_list import KubeletPods
from services.node_agent.kubelet.pod_resources import KubeletPodResources
from services.node_agent.metrics import AgentMetrics
from services.node_agent.node_state import AgentNodeState
from services.node_agent.records.checkpoint import Checkpoint
from services.node_agent.records.known_leases import KnownLeases
from services.node_agent.records.lease_sync import LeaseRequester, LeaseSync
from services.node_agent.settings import AgentSettings, kubelet_credentials
from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.kubeconfig import load_credentials
from shared.model.clock import Clock, SystemClock
from shared.model.names import NodeName
from shared.runtime.telemetry import Tracing


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeClients:
    """Clients and values that all parts use."""

    node: NodeName
    settings: AgentSettings
    clock: Clock
    timing: AgentTiming
    state: AgentNodeState
    metrics: AgentMetrics
    kubernetes: KubernetesClient
    pod_list: KubeletPods
    pod_resources: KubeletPodResources
    checkpoint: Checkpoint
    leases: KnownLeases
    lease_sync: LeaseSync


async def open_clients(
    settings: AgentSettings,
    stack: AsyncExitStack,
    *,
    requester: LeaseRequester,
    tracing: Tracing,
    timing: AgentTiming,
) -> NodeClients:
    """Load the checkpoint, and open the connections to the API server and the kubelet."""
    node = settings.node_name
    checkpoint, leases = Checkpoint(settings.state_dir / "checkpoint.json", node), KnownLeases(node)
    await checkpoint.load()
    api_server = load_credentials(settings.kubeconfig, environ=os.environ)
    current_credentials = functools.partial(kubelet_credentials, settings)
    kubelet = await stack.enter_async_context(KubernetesClient(current_credentials()))
    socket = settings.kubelet_dir / "pod-resources" / "kubelet.sock"
    return NodeClients(
        node=node,
        settings=settings,
        clock=SystemClock(),
        timing=timing,
        state=AgentNodeState(),
        metrics=AgentMetrics(tracing),
        kubernetes=await stack.enter_async_context(KubernetesClient(api_server)),
        pod_list=KubeletPods(kubelet, current_credentials),
        pod_resources=await stack.enter_async_context(KubeletPodResources(socket)),
        checkpoint=checkpoint,
        leases=leases,
        lease_sync=LeaseSync(node, leases, requester),
    )
