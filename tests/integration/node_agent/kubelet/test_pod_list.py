"""The kubelet's list of pods, over connections that are refused, broken, and newly certified."""

import ssl
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from services.node_agent.kubelet.node_pods import TLS_ADVICE, NodePods
from services.node_agent.kubelet.pod_list import KubeletPods
from services.node_agent.kubelet.pods import Deletion, KubeletContainer
from services.node_agent.settings import (
    SERVICE_ACCOUNT_TOKEN,
    AgentSettings,
    kubelet_credentials,
)
from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.kubeconfig import ClusterCredentials
from shared.model.errors import RequestError, UnavailableError
from tests.support.kubernetes.scripted_apiserver import Exchange, ScriptedApiserver, Step, answers
from tests.support.node_agent.node import FakeKubelet, node_of
from tests.support.servers.tls import Made

METADATA = {"uid": "u", "name": "a", "namespace": "x"}
PODS = {"items": [{"metadata": METADATA, "spec": {"containers": []}}]}


def serving(files: tuple[Path, Path]) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*files)
    return context


async def resets(exchange: Exchange) -> None:
    exchange.reset()


async def breaks_off(exchange: Exchange) -> None:
    exchange.writer.write(b'HTTP/1.1 200 OK\r\nContent-Length: 999\r\n\r\n{"items": [{"meta')
    await exchange.writer.drain()
    exchange.reset()


async def test_a_kubelet_certificate_of_a_new_ca_is_trusted_once_the_ca_file_has_it(
    tmp_path: Path,
) -> None:
    before, after = Made(tmp_path, "before"), Made(tmp_path, "after")
    place = tmp_path / "ca.crt"
    place.write_bytes(before.ca.read_bytes())
    tls = serving(before.issue("kubelet"))

    async with ScriptedApiserver(
        answers(200, PODS), resets, answers(200, PODS), tls=tls
    ) as kubelet:

        def described() -> ClusterCredentials:
            return ClusterCredentials(server=kubelet.url, ca_pem=place.read_text())

        async with KubernetesClient(described()) as kube:
            pods = KubeletPods(kube, described)
            assert [pod.name for pod in await pods.list_pods()] == ["a"]

            tls.load_cert_chain(*after.issue("kubelet"))
            with pytest.raises(RequestError, match="not trusted"):
                await pods.list_pods()
            seen = NodePods(node_of(pods, pod_resources=FakeKubelet()), tmp_path)
            assert await seen.list_pods() == ()
            assert TLS_ADVICE in seen.unreadable_reason

            place.write_bytes(after.ca.read_bytes())
            assert [pod.name for pod in await pods.list_pods()] == ["a"]


@pytest.mark.parametrize(
    ("step", "kind"),
    [
        (answers(401), RequestError),
        (answers(403), RequestError),
        (answers(500), UnavailableError),
        (answers(503), UnavailableError),
        (breaks_off, UnavailableError),
        (answers(200, {"items": 5}), RequestError),
    ],
)
async def test_failures_to_list_pods_are_permanent_or_temporary(
    step: Step, kind: type[Exception]
) -> None:
    async with ScriptedApiserver(*[step] * 4) as kubelet:
        credentials = ClusterCredentials(server=kubelet.url)
        async with KubernetesClient(credentials) as kube:
            with pytest.raises(kind):
                await KubeletPods(kube, lambda: replace(credentials)).list_pods()


async def test_deleted_pods_are_listed_with_the_time_of_their_kill_whatever_else_they_have() -> (
    None
):
    def listed(uid: str, deleted: str | None) -> dict[str, Any]:
        grace_s = None if deleted is None else 30
        times = {"deletionTimestamp": deleted, "deletionGracePeriodSeconds": grace_s}
        return {"metadata": {"uid": uid, **times}, "spec": {"containers": 5}}

    items = [listed("lives", None), listed("ends", "2026-11-30T12:00:30Z")]
    async with ScriptedApiserver(answers(200, {"items": items})) as kubelet:
        credentials = ClusterCredentials(server=kubelet.url)
        async with KubernetesClient(credentials) as kube:
            ending = await KubeletPods(kube, lambda: credentials).list_ending()

    killed_at = datetime(2026, 11, 30, 12, 0, 30, tzinfo=UTC).timestamp()
    assert ending == {"ends": Deletion(killed_at, 30)}


RESERVED = (
    "CONTAINER_VGPU_MOUNT CUDA_DEVICE_MEMORY_LIMIT_0 CUDA_DISABLE_CONTROL CUDA_OVERSUBSCRIBE "
    "CUDA_REDIRECT CUDA_TASK_PRIORITY GPU_CORE_UTILIZATION_POLICY LD_PRELOAD NVIDIA_IMEX_CHANNELS "
    "NVIDIA_MIG_CONFIG_DEVICES NVIDIA_VISIBLE_DEVICES VOLCANO_GPU_ALLOCATED"
)


async def list_containers(*containers: dict[str, Any]) -> tuple[KubeletContainer, ...]:
    limits = {"limits": {"nvidia.com/gpu": "1"}}
    described = [{"name": "main", "resources": limits, **container} for container in containers]
    listed = {"items": [{"metadata": METADATA, "spec": {"containers": described}}]}
    async with ScriptedApiserver(answers(200, listed)) as kubelet:
        credentials = ClusterCredentials(server=kubelet.url)
        async with KubernetesClient(credentials) as kube:
            (pod,) = await KubeletPods(kube, lambda: credentials).list_pods()
    return pod.containers


async def test_the_first_reserved_variable_of_a_container_is_kept() -> None:
    free = [
        {"name": "CUDA_DEVICE_ORDER", "value": "PCI_BUS_ID"},
        {"name": "PATH", "value": "x"},
        {"name": "NVIDIA_API_KEY", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}},
        {"name": "CUDA_VISIBLE_DEVICES", "value": "0"},
    ]
    other_order = {"name": "CUDA_DEVICE_ORDER", "value": "FASTEST_FIRST"}
    reserved = [other_order, *({"name": name, "value": "x"} for name in RESERVED.split())]

    containers = await list_containers(
        {"env": free}, *({"env": [*free, variable, *reserved]} for variable in reserved)
    )

    kept = [container.reserved_variable for container in containers]
    assert kept == ["", "CUDA_DEVICE_ORDER", *RESERVED.split()]


async def test_the_first_prefix_that_may_set_a_reserved_variable_is_kept() -> None:
    prefixes = ["", "N", "NVIDIA_", "NVIDIA_VISIBLE_DEV", "CUDA", "L", "GPU_"]

    containers = await list_containers(
        {"envFrom": [{"prefix": "APP_"}]},
        *({"envFrom": [{"prefix": "APP_"}, {"prefix": prefix}]} for prefix in prefixes),
    )

    assert [container.reserved_prefix for container in containers] == [None, *prefixes]


@pytest.mark.parametrize(
    ("text", "server", "token"),
    [
        ('{"port": 1, "tokenPath": "/t"}', "https://127.0.0.1:1", Path("/t")),
        (None, "https://127.0.0.1:10250", SERVICE_ACCOUNT_TOKEN),
        ('{"port": "a"}', "", None),
        ("{", "", None),
    ],
)
def test_a_file_describes_where_the_kubelet_is(
    tmp_path: Path, text: str | None, server: str, token: Path | None
) -> None:
    settings = AgentSettings(kubelet_dir=tmp_path)
    if text is not None:
        (tmp_path / "kubelet.json").write_text(text)

    if server:
        found = kubelet_credentials(settings)
        assert (found.server, found.token_file) == (server, token)
    else:
        with pytest.raises(RequestError, match=r"kubelet\.json does not describe a kubelet"):
            kubelet_credentials(settings)
