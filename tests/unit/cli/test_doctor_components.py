"""The verdicts of the doctor on heartbeats, settings, ResourceQuotas and DeviceClasses."""

from dataclasses import replace

import pytest

from services.cli.doctor import cluster_checks, cluster_probes
from services.cli.doctor.cluster_checks import (
    COMPONENTS,
    Replicas,
    WorkloadSettings,
    endpoints,
    settings,
    workloads,
)
from services.cli.doctor.cluster_probes import ClusterProbes, ClusterServers
from services.cli.doctor.doctor import run_check
from shared.model.events.pod_events import Heartbeat
from shared.model.findings import Outcome, SkipError
from shared.model.names import (
    AGENTS_NAMESPACE,
    REQUIRED_SERVICES,
    SYSTEM_NAMESPACE,
    NodeName,
)
from shared.model.requests.claim import DRIVER
from shared.nats import servers
from shared.runtime.settings import settings_digests

NOW = {"LEASEHOLD_DRA": "conditions", "LEASEHOLD_LOG_LEVEL": "info"}
WANTED = {
    "watcher": WorkloadSettings(
        {**NOW, "LEASEHOLD_INSTANCE": ""}, frozenset({"LEASEHOLD_INSTANCE"})
    ),
    "binder": WorkloadSettings(NOW, frozenset()),
}


def heartbeat(service: str, **settings: str) -> Heartbeat:
    return Heartbeat(service=service, instance=f"{service}-0", settings=settings_digests(settings))


@pytest.mark.parametrize(
    ("replica", "outcome", "shown"),
    [
        (heartbeat("watcher", **NOW, LEASEHOLD_INSTANCE="watcher-0"), Outcome.OK, "1 components"),
        (
            heartbeat("watcher", LEASEHOLD_LOG_LEVEL="info"),
            Outcome.FAIL,
            "watcher-0 (LEASEHOLD_DRA)",
        ),
        (
            heartbeat("watcher", **NOW, LEASEHOLD_QUOTAS="x"),
            Outcome.FAIL,
            "watcher-0 (LEASEHOLD_QUOTAS)",
        ),
        (
            heartbeat("placer", **NOW | {"LEASEHOLD_DRA": "off"}),
            Outcome.FAIL,
            "placer-0 (LEASEHOLD_DRA)",
        ),
        (heartbeat("watcher", **NOW, LEASEHOLD_HTTP="0.0.0.0:9100"), Outcome.OK, "1 components"),
        (heartbeat("watcher"), Outcome.OK, "0 components"),
    ],
    ids=["same", "missing", "removed", "in the binder's process", "by image", "outside a pod"],
)
def test_components_with_other_settings_than_new_pods_are_named(
    replica: Heartbeat, outcome: Outcome, shown: str
) -> None:
    finding = settings(WANTED, [replica])

    assert finding.outcome is outcome
    assert shown in finding.text
    assert "off" not in finding.text


def test_digests_are_of_our_variables_and_do_not_show_values() -> None:
    digests = settings_digests({"LEASEHOLD_REDIS_URL": "redis://u:secret@r", "PATH": "/bin"})

    assert digests.keys() == {"LEASEHOLD_REDIS_URL"}
    assert "secret" not in digests["LEASEHOLD_REDIS_URL"]


AGENT = Heartbeat(service="node-agent", instance="agent-n", node="n")
SERVICES = [Heartbeat(service=name, instance=f"{name}-0") for name in REQUIRED_SERVICES]
SICK = Heartbeat(service="webhook", instance="webhook-0", unready_reasons=("nats: closed",))


@pytest.mark.parametrize(
    ("heartbeats", "outcome", "text"),
    [
        ([*SERVICES, AGENT], Outcome.OK, "4 components are ready"),
        ([*SERVICES, AGENT, SICK], Outcome.FAIL, "webhook-0: nats: closed"),
        (SERVICES, Outcome.FAIL, "no heartbeat of the node-agent of n within 6 s"),
        ([*SERVICES[1:], AGENT], Outcome.FAIL, "no heartbeat of any watcher within 6 s"),
    ],
)
def test_missing_and_unready_components_are_named(
    heartbeats: list[Heartbeat], outcome: Outcome, text: str
) -> None:
    found = cluster_checks.components(heartbeats, {NodeName("n"): ""}, observed_s=6.0)

    assert (found.outcome, found.text) == (outcome, text)


def test_clocks_that_differ_by_more_than_5_s_are_named() -> None:
    found = cluster_checks.clocks({"binder": 0.2, "node-agent of n": -45.0, "api": 6.0})

    assert found.outcome is Outcome.FAIL
    assert found.text == (
        "clocks differ from this machine's: api is 6 s ahead; node-agent of n is 45 s behind"
    )
    assert cluster_checks.clocks({"binder": 0.2}).outcome is Outcome.OK


FULL = "redis: the call to the ledger failed: its memory is full; check Redis"


def test_what_several_components_lack_is_said_once() -> None:
    sick = [Heartbeat(service="w", instance=f"w-{n}", unready_reasons=(FULL,)) for n in range(2)]

    found = cluster_checks.components([*SERVICES, *sick], {}, observed_s=6.0)

    assert found.text == "w-0, w-1: redis: the call to the ledger failed: its memory is full"
    assert found.fix == "check Redis"


def test_a_slow_nats_hides_what_its_own_check_reports() -> None:
    late = [replace(SERVICES[1], unready_reasons=("nats: it does not reply",)), *SERVICES[2:]]

    def judged(*, slow: bool) -> Outcome:
        return cluster_checks.components(late, {}, observed_s=6.0, nats_is_slow=slow).outcome

    assert (judged(slow=False), judged(slow=True)) == (Outcome.FAIL, Outcome.OK)


@pytest.mark.parametrize(("reply_s", "outcome"), [(9.0, Outcome.SKIPPED), (0.1, Outcome.FAIL)])
async def test_heartbeats_that_a_slow_nats_does_not_deliver_are_left_to_its_own_check(
    reply_s: float, outcome: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def connected(*_: object) -> tuple[int, float]:
        return 8_000_000, reply_s

    monkeypatch.setattr(servers, "connection_facts", connected)
    monkeypatch.setattr(cluster_probes, "DIAGNOSIS_TIMEOUT_S", 0.1)
    deaf = ClusterServers(nats_url="nats://127.0.0.1:9")
    probes = ClusterProbes(deaf, SkipError("there is none"))

    checks = probes.components(), probes.versions(), probes.clocks()
    outcomes = [(await run_check(check)).outcome for check in checks]
    assert outcomes == [outcome] * 3


def test_what_the_check_of_a_server_reports_is_not_repeated_for_components() -> None:
    sick = Heartbeat(service="w", instance="w-0", unready_reasons=(FULL,))

    found = cluster_checks.components(
        [*SERVICES, sick], {}, observed_s=6.0, reported={"redis", "ledger"}
    )

    assert found.outcome is Outcome.OK
    assert found.text == "4 components run; 1 wait for what another check has"


def test_a_silent_agent_is_named_once_although_its_node_is_closed_for_that() -> None:
    closed = {NodeName("n"): "the agent of node n does not respond: no responders"}

    found = cluster_checks.components(SERVICES, closed, observed_s=6.0)

    assert found.text == "no heartbeat of the node-agent of n within 6 s"


def test_a_cordoned_node_is_named_with_the_reason() -> None:
    cordoned = {NodeName("n"): "its agent's messages are refused: it lies"}

    found = cluster_checks.components([*SERVICES, AGENT], cordoned, observed_s=6.0)

    assert found.outcome is Outcome.FAIL
    assert found.text == "node n gets no pods: its agent's messages are refused: it lies"


@pytest.mark.parametrize(
    ("hard", "outcome", "text", "instead"),
    [
        (
            {"a/gpus": ["requests.nvidia.com/gpu", "limits.cpu"]},
            Outcome.OK,
            "ResourceQuotas that limit GPUs: 1",
            "",
        ),
        (
            {"a/other": ["limits.cpu", "limits.example.org/dongle"]},
            Outcome.OK,
            "ResourceQuotas that limit GPUs: 0",
            "",
        ),
        (
            {"b/gpus": ["limits.nvidia.com/gpu", "pods"], "a/vgpus": ["volcano.sh/vgpu-memory"]},
            Outcome.WARN,
            "not counted, so they limit nothing: volcano.sh/vgpu-memory of a/vgpus; "
            "limits.nvidia.com/gpu of b/gpus",
            "kubectl -n a edit resourcequota vgpus, and write requests.volcano.sh/vgpu-memory",
        ),
    ],
)
def test_names_in_quotas_that_kubernetes_does_not_count_are_found(
    hard: dict[str, list[str]], outcome: Outcome, text: str, instead: str
) -> None:
    found = cluster_checks.resource_quotas(hard)

    assert (found.outcome, found.text, instead in found.fix) == (outcome, text, True)


@pytest.mark.parametrize(
    ("allocatable", "outcome", "text"),
    [
        ({"n0": ["cpu", "nvidia.com/gpu"]}, Outcome.OK, "no device plugin serves"),
        (
            {"n0": ["cpu"], "n1": ["cpu", "leasehold.dev/whole-gpu"]},
            Outcome.WARN,
            "node n1 has leasehold.dev/whole-gpu of a device plugin, and DeviceClass whole has",
        ),
    ],
)
def test_an_extended_resource_of_a_class_and_of_a_device_plugin_is_found(
    allocatable: dict[NodeName, list[str]], outcome: Outcome, text: str
) -> None:
    found = cluster_checks.device_classes({"whole": "leasehold.dev/whole-gpu"}, allocatable)

    assert found.outcome is outcome
    assert found.text.startswith(text)


ALL = {name: Replicas(SYSTEM_NAMESPACE, "deployments", 2, 2) for name in COMPONENTS} | {
    "node-agent": Replicas(AGENTS_NAMESPACE, "daemonsets", 3, 3)
}


@pytest.mark.parametrize(
    ("changes", "outcome", "shown"),
    [
        ({}, Outcome.OK, "webhook 2"),
        ({"webhook": (0, 0)}, Outcome.FAIL, "deployment/webhook is scaled to 0"),
        ({"api": (2, 1)}, Outcome.FAIL, "deployment/api: 1 of 2 replicas are ready"),
        ({"timekeeper": None}, Outcome.FAIL, "timekeeper is not installed"),
        ({"watcher": None}, Outcome.FAIL, "watcher is not installed"),
        ({"planner": None}, Outcome.FAIL, "planner is not installed"),
        ({"watcher": None, "placer": None, "planner": None}, Outcome.OK, "binder 2"),
    ],
)
def test_components_are_compared_with_what_should_run(
    changes: dict[str, tuple[int, int] | None], outcome: Outcome, shown: str
) -> None:
    sizes = dict(ALL)
    for name, counts in changes.items():
        if counts is None:
            del sizes[name]
        else:
            sizes[name] = Replicas(SYSTEM_NAMESPACE, "deployments", *counts)

    finding = workloads(sizes)

    assert finding.outcome is outcome
    assert shown in finding.text


def test_an_agent_that_is_not_ready_on_a_node_is_reported_and_no_node_is_no_fault() -> None:
    def agents(wanted: int, ready: int) -> Outcome:
        size = Replicas(AGENTS_NAMESPACE, "daemonsets", wanted, ready)
        return workloads({**ALL, "node-agent": size}).outcome

    assert (agents(3, 2), agents(0, 0)) == (Outcome.FAIL, Outcome.OK)


def test_claims_without_resource_slices_are_reported() -> None:
    finding = endpoints({f"deviceclasses/{DRIVER}": "node-agent"}, 2)

    assert finding.outcome is Outcome.FAIL
    assert "no node-agent publishes ResourceSlices" in finding.text
