"""The settings that components run with, beside those of their workloads and ConfigMaps."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from urllib.parse import quote

from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.full_pods import FullContainer, Workload
from shared.kubernetes.types import ObjectList, RawObject
from shared.model.events.pod_events import Heartbeat
from shared.model.findings import Finding, SkipError, fail, ok
from shared.model.names import AGENTS_NAMESPACE, SYSTEM_NAMESPACE
from shared.runtime.settings import digest
from shared.runtime.variables import PREFIX

COMBINED = "binder"
"""The Deployment whose pods have watcher and placer, too, with the component combined-scheduler."""


@dataclass(frozen=True, slots=True)
class WorkloadSettings:
    """The variables of a workload's pods."""

    values: Mapping[str, str]
    computed: frozenset[str]
    """Those whose value the kubelet computes for each pod."""


async def read_settings(kubernetes: KubernetesClient) -> dict[str, WorkloadSettings]:
    """Read the settings of each workload, as new pods would get them.

    Raises SkipError if there is none.
    """
    found: dict[str, WorkloadSettings] = {}
    for namespace, kind in ((SYSTEM_NAMESPACE, "deployments"), (AGENTS_NAMESPACE, "daemonsets")):
        path = f"/apis/apps/v1/namespaces/{namespace}/{kind}"
        for workload in (await kubernetes.read(path, ObjectList[Workload])).items or ():
            for container in workload.spec.template.spec.containers[:1]:
                found[workload.metadata.name] = await _read(kubernetes, namespace, container)
    if not found:
        raise SkipError("the components do not run as workloads of this cluster")
    return found


async def _read(
    kubernetes: KubernetesClient, namespace: str, container: FullContainer
) -> WorkloadSettings:
    values: dict[str, str] = {}
    for source in (each.config_map_ref for each in container.env_from):
        if source:
            path = f"/api/v1/namespaces/{namespace}/configmaps/{quote(source.name, safe='')}"
            values |= (await kubernetes.read(path, RawObject)).data or {}
    values |= {each.name: each.value for each in container.env}
    computed = {each.name for each in container.env if each.value_from or "$(" in each.value}
    return WorkloadSettings(values, frozenset(computed))


def judge(wanted: Mapping[str, WorkloadSettings], heartbeats: Iterable[Heartbeat]) -> Finding:
    """Judge which components run with other settings than new pods would get."""
    others, compared = dict[str, tuple[str, list[str]]](), 0
    for each in heartbeats:
        expected = wanted.get(each.service, wanted.get(COMBINED))
        if expected is None or not each.settings:
            continue  # it runs outside the cluster
        compared += 1
        if keys := _differing(expected, each.settings):
            others[each.instance] = each.service, keys
    if not others:
        return ok(f"{compared} components run with the settings of their workloads")
    shown = "; ".join(f"{name} ({', '.join(keys)})" for name, (_, keys) in sorted(others.items()))
    service = min(others.items())[1][0]
    name = service if service in wanted else COMBINED
    kind = f"daemonset/{name}" if name == "node-agent" else f"deployment/{name}"
    namespace = AGENTS_NAMESPACE if name == "node-agent" else SYSTEM_NAMESPACE
    return fail(
        f"they run with other settings than new pods would get: {shown}",
        f"kubectl -n {namespace} rollout status {kind}; if it is complete: rollout restart",
    )


def _differing(wanted: WorkloadSettings, running: Mapping[str, str]) -> list[str]:
    digests = {key: digest(value) for key, value in wanted.values.items() if key.startswith(PREFIX)}
    keys = (digests.keys() | running.keys()) - wanted.computed
    return sorted(key for key in keys if digests.get(key) != running.get(key))
