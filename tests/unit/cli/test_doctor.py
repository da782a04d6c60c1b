"""The findings of the doctor, check by check."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from services.cli.doctor import cluster_checks
from services.cli.doctor.doctor import (
    NODE_CHECKS,
    REMEDIES,
    DoctorTarget,
    complete,
    run_check,
    run_checks,
)
from services.node_agent.allocate.cdi import FILE
from services.node_agent.diagnosis import node_checks
from services.node_agent.diagnosis.node_probes import NodeProbes
from services.node_agent.gpu_access import open_gpus
from services.node_agent.gpus.device_faults import no_response
from services.node_agent.gpus.inventory import DeviceSample, Gpu
from services.node_agent.instance_lock import AgentInstance
from services.node_agent.isolation.library import StoredLibrary
from services.node_agent.kubelet import pod_resources
from services.node_agent.mig.instances import MigState
from services.node_agent.settings import AgentSettings
from shared.dialects.advertised import PluginDeviceId
from shared.ledger.redis_server import RedisFacts, redis_facts
from shared.model.clock import clock_ahead_s
from shared.model.devices.device import Device, DeviceMode, Hardware
from shared.model.errors import UnavailableError
from shared.model.findings import Finding, Outcome, SkipError
from shared.model.leases.lease import Lease
from shared.model.leases.ledger import NodeTotals
from shared.model.names import DeviceUuid, PodUid
from shared.nats.wire import MAX_PAYLOAD
from shared.runtime.settings import load
from simcluster.node_agent.agent import SimulatedAgentSettings, simulated_gpus
from tests.support import build
from tests.support.build import allocation_of, share

OK = Outcome.OK
WARN = Outcome.WARN
FAIL = Outcome.FAIL
GPU = DeviceUuid("GPU-a")
COUNT = "volcano.sh/vgpu-number"
BOTH = frozenset({"u", "v"})
LIBRARY = StoredLibrary(path=Path("/s/abc123456789def/libvgpu.so"), version="v2.9.0")
SERVED = {COUNT: {f"GPU-a-{n}": PluginDeviceId(id=f"GPU-a-{n}", healthy=True) for n in range(2)}}
DEVICE = Device(uuid=GPU, index=0, model="Tesla T4", memory_mib=15360, slots=2)


def lease(mib: int = 1000) -> Lease:
    return build.lease("u", "n", share(memory_mib=mib), namespace="team", name="one")


ALLOCATION = allocation_of(lease(), resource=COUNT, device_ids=("GPU-a-0",))


def gpu(**changes: Any) -> Gpu:
    facts: dict[str, Any] = {"uuid": GPU, "index": 0, "model": "Tesla T4", "memory_mib": 15360}
    return Gpu(**(facts | changes))


LONG = [(str(n), PluginDeviceId(id=str(n), healthy=True)) for n in range(2001)]
IDS = frozenset(SERVED[COUNT])


def sample_of(*throttle: str) -> DeviceSample:
    hardware = Hardware(device=DeviceUuid("GPU-a"), at=1.0, throttle=throttle)
    return DeviceSample(device=hardware.device, index=0, model="A", hardware=hardware)


KUBE = "registry.k8s.io/kube-scheduler"
VERSIONS = {"image": "registry.k8s.io/kube-scheduler:v1.36.2", "cluster": "v1.36.4+k3s1"}
NO_EXTENDER = cluster_checks.extender({"extender": 0, "kube-scheduler": 1}, **VERSIONS)
READY = {"extender": 2, "kube-scheduler": 2}
CASES: list[tuple[Finding, Outcome, str]] = [
    (node_checks.temperature([sample_of("power limit")]), OK, "no GPU"),
    (node_checks.temperature([sample_of("temperature")]), WARN, "GPU 0 is slowed down by its"),
    (cluster_checks.nats(MAX_PAYLOAD, 0.1), OK, "accepts the connection"),
    (cluster_checks.nats(MAX_PAYLOAD, 4.2), WARN, "NATS takes 4.2 s to reply"),
    (cluster_checks.nats(1 << 20, 0.1), WARN, "at most 1048576 bytes"),
    (node_checks.kubelet_socket("/k", ""), OK, "listens"),
    (node_checks.kubelet_socket("/k", "No such file"), FAIL, "No such file"),
    (node_checks.other_plugins({COUNT: IDS}, SERVED, ["vgpu.sock"]), OK, ""),
    (node_checks.other_plugins({"nvidia.com/other": IDS}, SERVED, []), OK, ""),
    (
        node_checks.other_plugins({}, {"nvidia.com/gpu": {}}, ["nvidia-gpu.sock"]),
        FAIL,
        "(nvidia-gpu.sock)",
    ),
    (node_checks.other_plugins({}, SERVED, ["nvidia-gpu.sock"]), OK, ""),
    (node_checks.other_plugins({COUNT: IDS | {"x"}}, SERVED, ["vgpu.sock"]), FAIL, "vgpu.sock"),
    (node_checks.registration({COUNT: IDS}, SERVED), OK, ""),
    (node_checks.registration({}, SERVED), FAIL, COUNT),
    (node_checks.registration({}, {COUNT: {}}), OK, ""),
    (node_checks.node_resources({COUNT: 2, "m": 5}, SERVED, {"m": 5}), OK, ""),
    (node_checks.node_resources({COUNT: 2, "m": 4}, SERVED, {"m": 5}), FAIL, "m 4 instead of 5"),
    (node_checks.node_resources({}, SERVED, {}), FAIL, f"{COUNT} 0 instead of 2"),
    (node_checks.list_sizes(SERVED), OK, COUNT),
    (node_checks.list_sizes({}), WARN, "nothing"),
    (node_checks.list_sizes({COUNT: dict(LONG[:2000])}), OK, "2000 device IDs"),
    (node_checks.list_sizes({COUNT: dict(LONG)}), WARN, "2001 device IDs"),
    (node_checks.device_health([DEVICE]), OK, "healthy devices: 1"),
    (node_checks.device_health([]), FAIL, "no device"),
    (node_checks.driver([gpu(driver="550.1")], {}), OK, "550.1"),
    (node_checks.driver([], {}), FAIL, "no GPU"),
    (node_checks.driver([gpu(fault=no_response("lost"))], {}), FAIL, "NoResponse: lost"),
    (node_checks.driver([gpu()], {3: "no answer"}), FAIL, "number 3 of its GPUs: no answer"),
    (node_checks.mig_modes([gpu()], [DEVICE]), OK, ""),
    (
        node_checks.mig_modes([gpu(mig=MigState(enabled=True, pending=True))], [DEVICE]),
        WARN,
        f"in {DeviceMode.MIG} mode",
    ),
    (
        node_checks.mig_modes([gpu(mig=MigState(enabled=False, pending=True))], [DEVICE]),
        WARN,
        "next reset",
    ),
    (
        node_checks.library(LIBRARY, "/l", layout="1.2"),
        OK,
        "v2.9.0, limits file of layout 1.2, content abc",
    ),
    (node_checks.library(None, "/l"), FAIL, "/l has none"),
    (node_checks.library(LIBRARY, "/l", replaced_by=""), WARN, "/l has other content"),
    (node_checks.library(LIBRARY, "/l", replaced_by="no ELF"), WARN, "installed: no ELF"),
    (node_checks.library_loads("/l", ""), OK, "loads"),
    (node_checks.library_loads("/l", "OSError: version `GLIBC_2.99' not found"), FAIL, "GLIBC"),
    (node_checks.checkpoint([ALLOCATION], {PodUid("u"): lease()}), OK, "match their leases"),
    (node_checks.checkpoint([ALLOCATION], None), OK, "checkpoint: 1"),
    (node_checks.checkpoint([ALLOCATION], {}), FAIL, "team/one container main has no live lease"),
    (node_checks.checkpoint([ALLOCATION], {PodUid("u"): lease(9)}), FAIL, "other shares"),
    (
        node_checks.pod_resources({("team", "one"): frozenset({"GPU-a-0"})}, [ALLOCATION]),
        OK,
        "pods with devices: 1",
    ),
    (node_checks.pod_resources({("team", "one"): IDS}, [ALLOCATION]), FAIL, "team/one holds 1"),
    (node_checks.kubelet_checkpoint({"u"}, [ALLOCATION], {}), OK, "only pods"),
    (node_checks.kubelet_checkpoint(BOTH, [ALLOCATION], {"v": "team/two"}), WARN, "team/two"),
    (node_checks.kubelet_checkpoint(BOTH, [ALLOCATION], {}), OK, "1 other pods, which have ended"),
    (node_checks.kubelet_checkpoint(BOTH, [ALLOCATION], None), OK, "may not list"),
    (node_checks.runtime(["nvidia-ctk"], is_configured=True), OK, "nvidia-ctk"),
    (node_checks.runtime(["nvidia-ctk"], is_configured=False), WARN, "no runtime is configured"),
    (node_checks.runtime([], is_configured=True), FAIL, "not installed"),
    (node_checks.cdi({"nvidia.com/gpu": ["/a"]}, []), OK, "nvidia.com/gpu"),
    (node_checks.cdi({"nvidia.com/gpu": ["/a", "/b"]}, []), WARN, "/a, /b"),
    (node_checks.cdi({}, ["/c"]), FAIL, "/c"),
    (node_checks.not_by_cdi("no driver"), WARN, "not by CDI: no driver"),
    (node_checks.cdi_devices("/c", ["x"], None), FAIL, "/c is missing"),
    (node_checks.cdi_devices("/c", ["x", "y"], frozenset("x")), FAIL, "does not name y"),
    (node_checks.cdi_devices("/c", ["x"], frozenset("xy")), OK, "devices in /c: 2"),
    (cluster_checks.clock("Redis", 0.1), OK, ""),
    (cluster_checks.clock("Redis", -0.8), WARN, "0.80 s behind"),
    (cluster_checks.clock("Redis", 30), FAIL, "30.00 s ahead"),
    (cluster_checks.webhook([], 80.0, ""), OK, "80 days"),
    (cluster_checks.webhook(["mutating"], None, ""), FAIL, "unchecked"),
    (cluster_checks.webhook([], None, ""), FAIL, "without a certificate"),
    (cluster_checks.webhook([], -1.0, ""), FAIL, "expired"),
    (cluster_checks.webhook([], 2.0, ""), WARN, "2.0 days"),
    (cluster_checks.webhook([], 80.0, "unknown authority"), FAIL, "unknown authority"),
    (cluster_checks.versions({"a": "1", "b": "1"}), OK, "all of version 1"),
    (cluster_checks.versions({"a": "1", "b": "2"}), WARN, "a 1, b 2"),
    (cluster_checks.versions({}), FAIL, "no component"),
    (cluster_checks.rights([], 5), OK, "5 rights"),
    (cluster_checks.rights(["patch pods"], 5), FAIL, "patch pods"),
    (cluster_checks.storage_rights("watcher", [], 12), OK, "12 rights"),
    (cluster_checks.storage_rights("w", ["list csinodes"], 12), FAIL, "w may not list csinodes"),
    (
        cluster_checks.extender({"extender": 2, "kube-scheduler": 1}, **VERSIONS),
        OK,
        "ready replicas: extender 2, kube-scheduler 1",
    ),
    (
        cluster_checks.extender(
            {"extender": 2, "kube-scheduler": None}, image="", cluster="v1.36.4"
        ),
        FAIL,
        "deployment/kube-scheduler does not exist",
    ),
    (NO_EXTENDER, FAIL, "deployment/extender has no ready replica"),
    (cluster_checks.extender(READY, image=f"{KUBE}:v1.36.2", cluster="v1.37.0"), OK, "ready"),
    (cluster_checks.extender(READY, image=f"{KUBE}:v1.36.2", cluster="v1.38.0"), FAIL, "of 1.38"),
    (cluster_checks.extender(READY, image=f"{KUBE}:v1.36.2", cluster="v1.35.9"), FAIL, "of 1.35"),
    (cluster_checks.extender(READY, image=f"{KUBE}@sha256:1", cluster="v1.35.9"), OK, "ready"),
    (cluster_checks.runtime_class(exists=True), OK, ""),
    (cluster_checks.runtime_class(exists=False), OK, "must be the default"),
]


@pytest.mark.parametrize(("finding", "outcome", "expected_text"), CASES)
def test_each_finding_has_an_outcome_and_each_problem_a_fix(
    finding: Finding, outcome: Outcome, expected_text: str
) -> None:
    assert finding.outcome is outcome
    assert expected_text in finding.text
    assert bool(finding.fix) is (outcome is not Outcome.OK)


def test_an_unhealthy_device_is_named_with_its_fault() -> None:
    sick = Device(
        uuid=GPU, index=3, model="T4", memory_mib=1, slots=1, healthy=False, fault="cordoned: x"
    )

    assert node_checks.device_health([DEVICE, sick]).text == "GPU 3: cordoned: x"


@pytest.mark.parametrize(
    ("changes", "by_sentinels", "outcome", "expected_text"),
    [
        ({}, False, OK, "primary, 1 replicas"),
        ({"replicas": 0}, False, OK, "primary, no replica (the ledger would be rebuilt"),
        ({"replicas": 0}, True, WARN, "no replica that Sentinels"),
        (
            {"replay_refusal": "User default may not 'hset'"},
            False,
            FAIL,
            "User default may not 'hset'",
        ),
        ({"role": "slave"}, False, FAIL, "slave"),
        ({"maxmemory_policy": "allkeys-lru"}, False, FAIL, "allkeys-lru"),
        ({"maxmemory_policy": ""}, False, OK, "unknown"),
        ({"appendonly": "no"}, False, WARN, "rebuilt"),
        ({"last_write_succeeded": False}, False, FAIL, "write to disk"),
        ({"version": "7.4.2"}, False, WARN, "Redis 7.4.2 has vulnerabilities"),
        ({"version": "7.0.15"}, False, WARN, "known"),
        ({"version": "6.2.14"}, False, FAIL, "cannot load the ledger's functions"),
        ({"version": "7.4.10"}, False, OK, "Redis 7.4.10"),
        ({"program": "Valkey", "version": "9.1.0"}, False, WARN, "Valkey 9.1.0 has"),
        ({"program": "Valkey", "version": "9.1.2"}, False, OK, "Valkey 9.1.2"),
        ({"program": "Valkey", "version": "9.2.0-rc1"}, False, OK, "9.2.0-rc1"),
        ({"used_mib": 64, "most_mib": 64}, False, FAIL, "its memory is full, 64 of 64 MiB"),
        ({"used_mib": 64, "most_mib": 0}, False, OK, "primary"),
        ({"reply_s": 3.1}, False, WARN, "it takes 3.1 s to reply"),
    ],
)
def test_a_redis_that_may_lose_leases_is_reported(
    changes: dict[str, Any], by_sentinels: bool, outcome: Outcome, expected_text: str
) -> None:
    facts: dict[str, Any] = {
        "role": "master",
        "replicas": 1,
        "appendonly": "yes",
        "maxmemory_policy": "noeviction",
    }

    found = cluster_checks.redis(RedisFacts(**(facts | changes)), by_sentinels=by_sentinels)

    assert (found.outcome, expected_text in found.text) == (outcome, True)


def test_a_clock_is_off_only_by_what_is_certain() -> None:
    assert clock_ahead_s(105.0, before=100.0, after=110.0) == 0.0
    assert clock_ahead_s(115.0, before=100.0, after=110.0) == 5.0
    assert clock_ahead_s(97.0, before=100.0, after=110.0) == -3.0


UNIT_LABEL = {"leasehold.dev/agent": "unit"}


@pytest.mark.parametrize(
    ("form", "labels", "outcome", "expected_text"),
    [
        ("unit", UNIT_LABEL, OK, "a unit of this node, pid 7 serves"),
        ("pod", {}, OK, "pod node-agent-x serves"),
        ("process", None, OK, "process 7 serves"),
        ("unit", None, OK, "a unit of this node"),
        ("unit", {}, OK, "a unit of this node"),
        ("unit", {"leasehold.dev/gpu": "true"}, FAIL, "the DaemonSet has a pod for it as well"),
        ("unit", {"nvidia.com/gpu.present": "true"}, FAIL, "the DaemonSet has a pod for it"),
        ("unit", {"nvidia.com/gpu.present": "true", "leasehold.dev/gpu": "false"}, OK, "a unit"),
        ("pod", UNIT_LABEL, FAIL, "whose label selects the unit"),
    ],
)
def test_one_agent_serves_a_node_as_its_labels_select(
    form: str, labels: dict[str, str] | None, outcome: Outcome, expected_text: str
) -> None:
    instance = AgentInstance(form=form, name="node-agent-x", pid=7)

    found = node_checks.agent("gpu-1", instance, labels)

    assert (found.outcome, expected_text in found.text) == (outcome, True)
    assert bool(found.fix) == (outcome is FAIL)
    if form == "unit" and found.fix:
        assert found.fix == "kubectl label node gpu-1 leasehold.dev/agent=unit"


def test_a_node_without_an_agent_has_a_fix() -> None:
    found = node_checks.agent("gpu-1", None, {})

    assert found.outcome is FAIL
    assert "systemctl status leasehold-agent" in found.fix


def test_every_check_has_a_remedy_if_it_cannot_run() -> None:
    assert all(REMEDIES.values())
    assert "auth-extender" in NO_EXTENDER.fix


def test_an_unexpected_error_fails_its_own_check_only() -> None:
    found = complete(KeyError("x"), check="cdi", subject="gpu-1")

    assert (found.check, found.subject, found.outcome) == ("cdi", "gpu-1", FAIL)
    assert "KeyError: 'x'" in found.text
    assert found.fix == REMEDIES["cdi"]


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the directory of a kubelet, on a machine that knows of no cluster."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("KUBECONFIG", "")
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    (tmp_path / "device-plugins").mkdir()
    (tmp_path / "agent").mkdir()
    return tmp_path


async def found_on(kubelet: Path, totals: NodeTotals | None = None) -> dict[str, Finding]:
    place = ["--kubelet-dir", str(kubelet), "--state-dir", str(kubelet / "agent"), "--node", "n"]
    argv = [*place, "--gpus", "1xT4"]
    settings = load(SimulatedAgentSettings, "doctor", about="", argv=argv)
    node = NodeProbes(
        settings,
        simulated_gpus(settings),
        kubernetes=SkipError("no cluster"),
        totals=totals,
        ledger_is_readable=True,
        host=kubelet,
    )
    found = {name: await run_check(check.run(node)) for name, check in NODE_CHECKS.items()}
    return {name: complete(one, check=name, subject="n") for name, one in found.items()}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"{}",
        b'{"Data": 5}',
        b'{"Data": {"RegisteredDevices": [], "PodDeviceEntries": 0}}',
        b'{"Data": {"PodDeviceEntries": [{}]}}',
        b"\xff\xfe\x00",
        b"[" * 100_000,
    ],
)
async def test_a_broken_file_fails_checks_and_not_the_doctor(
    content: bytes, alone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pod_resources, "TIMEOUT_S", 0.05)
    (alone / "device-plugins" / "kubelet_internal_checkpoint").write_bytes(content)
    (alone / "agent" / "checkpoint.json").write_bytes(content)
    (alone / "agent" / "cdi").mkdir()
    (alone / "agent" / "cdi" / FILE).write_bytes(content)

    found = await found_on(alone)

    broken = {name for name, one in found.items() if one.outcome is FAIL}
    assert {"other-plugins", "registration", "checkpoint", "cdi-devices"} <= broken
    assert not [one for one in found.values() if "a bug" in one.text]
    assert all(found[name].fix for name in broken)


async def test_in_a_pod_checks_of_the_nodes_files_are_skipped(
    alone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    argv = ["--kubelet-dir", str(alone), "--state-dir", str(alone / "agent")]
    settings = load(AgentSettings, "doctor", about="", argv=argv)

    target = DoctorTarget(nodes=((settings, open_gpus(settings)),), only="node")
    found = {one.check: one for one in await run_checks(target)}

    for name in ("container-toolkit", "device-variable", "cdi"):
        assert found[name].outcome is Outcome.SKIPPED
        assert "on the node" in found[name].text


async def test_an_invalid_kubeconfig_fails_and_a_missing_one_is_skipped(alone: Path) -> None:
    broken = alone / "kubeconfig"
    broken.write_text("a: [")

    expected_text = await run_checks(DoctorTarget(nodes=(), kubeconfig=broken))
    nowhere = await run_checks(DoctorTarget(nodes=()))

    assert {one.check: one.outcome for one in expected_text}["rights"] is FAIL
    assert next(one.text for one in expected_text if one.check == "rights").startswith(
        f"{broken}: not valid"
    )
    assert {one.check: one.outcome for one in nowhere}["rights"] is Outcome.SKIPPED


async def test_an_invalid_address_is_reported_without_its_secret() -> None:
    (found,) = [
        one
        for one in await run_checks(
            DoctorTarget(nodes=(), redis_url="redis://me:s3cret", only="cluster")
        )
        if one.check == "redis"
    ]

    assert found.outcome is FAIL
    assert "not an address of a Redis server" in found.text
    assert "s3cret" not in found.text


async def test_a_redis_that_does_not_respond_is_reported() -> None:
    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(hang, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(UnavailableError, match=r"no reply within 0\.2 s"):
            await redis_facts(f"redis://127.0.0.1:{port}/0", timeout_s=0.2)
