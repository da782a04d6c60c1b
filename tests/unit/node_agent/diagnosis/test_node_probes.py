"""The doctor on a node: the switches of NVIDIA's runtime, and the processes on devices."""

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from services.node_agent.allocate.device_list_strategies import DeviceListStrategy
from services.node_agent.container_runtime.runtime_settings import MOUNTS_SWITCH, SWITCH
from services.node_agent.diagnosis.node_probes import NodeProbes, device_variable
from services.node_agent.gpu_access import NodeGpus, open_gpus
from services.node_agent.records.checkpoint import CheckpointFile
from services.node_agent.settings import AgentSettings
from services.node_agent.usage.leased_containers import LeasedContainer
from shared.model.errors import RequestError, UnavailableError
from shared.model.findings import Outcome, SkipError
from shared.model.leases.lease import ClaimAllocation
from shared.model.names import PodUid
from shared.runtime.settings import load
from tests.support.node_agent.agent import lease_of
from tests.support.node_agent.monitor_world import UID, monitored
from tests.support.simcluster.kubelet import NODE

ENVVAR = DeviceListStrategy.ENVVAR
MOUNTS = DeviceListStrategy.VOLUME_MOUNTS
CDI = DeviceListStrategy.CDI_CRI
IGNORED = f"{SWITCH} = false\n"


@pytest.mark.parametrize(
    ("text", "strategies", "outcome", "part"),
    [
        ("", (ENVVAR,), Outcome.WARN, f"{SWITCH} is not false"),
        ("", (CDI,), Outcome.WARN, f"{SWITCH} is not false"),
        (f"{SWITCH} = true", (MOUNTS,), Outcome.WARN, f"{SWITCH} is not false"),
        (IGNORED, (ENVVAR,), Outcome.FAIL, "which c.toml makes the runtime ignore"),
        (IGNORED, (MOUNTS,), Outcome.FAIL, "by mounts, which c.toml makes"),
        (f"{IGNORED}{MOUNTS_SWITCH} = true", (MOUNTS,), Outcome.OK, "cannot name devices"),
        (IGNORED, (CDI,), Outcome.OK, "cannot name devices"),
        (IGNORED, (ENVVAR, CDI), Outcome.OK, "cannot name devices"),
    ],
)
def test_the_variable_must_be_powerless_and_the_strategy_must_work_without_it(
    text: str, strategies: tuple[DeviceListStrategy, ...], outcome: Outcome, part: str
) -> None:
    found = device_variable("c.toml", text, strategies)

    assert (found.outcome, bool(found.fix)) == (outcome, outcome is not Outcome.OK)
    assert part in found.text


def test_a_file_that_is_not_toml_is_named() -> None:
    with pytest.raises(RequestError, match=r"c\.toml: "):
        device_variable("c.toml", "a = [", (CDI,))


@pytest.mark.parametrize(
    ("argv", "outcome"),
    [(["--device-list-strategy", "cdi-cri"], Outcome.OK), ([], Outcome.FAIL)],
    ids=["cdi", "chosen"],
)
async def test_the_file_of_the_packages_is_read(
    tmp_path: Path, argv: list[str], outcome: Outcome
) -> None:
    folder = tmp_path / "etc" / "nvidia-container-runtime"
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(IGNORED)
    settings = load(AgentSettings, "doctor", about="", argv=argv)
    probes = NodeProbes(
        settings,
        open_gpus(settings),
        kubernetes=UnavailableError("none"),
        totals=None,
        ledger_is_readable=False,
        host=tmp_path,
    )

    assert (await probes.device_variable()).outcome is outcome


@pytest.mark.parametrize(
    ("user", "outcome", "text"),
    [
        (UID, Outcome.OK, "belongs to a lease"),
        (
            "11111111-7f0c-4d55-9f5b-2f2f0f9d7a11",
            Outcome.FAIL,
            "without a lease: process 70 on GPU 0",
        ),
    ],
    ids=["of the claim's pod", "of another pod"],
)
async def test_processes_that_use_a_claim_or_have_ended_are_no_finding(
    tmp_path: Path, user: str, outcome: Outcome, text: str
) -> None:
    world = monitored(tmp_path)
    claim = ClaimAllocation(generation="g", consumers=(PodUid(UID),))
    world.add_container(lease_of("claim", claim=claim))
    others = leased_by(user)
    world.add_process(others, 70, inner=7)
    world.add_process(others, 71, inner=8)
    shutil.rmtree(tmp_path / "proc" / "71")
    (tmp_path / "agent").mkdir()
    content = CheckpointFile(node=NODE, entries=world.node.checkpoint.entries)
    (tmp_path / "agent" / "checkpoint.json").write_bytes(msgspec.json.encode(content))
    argv = [
        "--node",
        NODE,
        "--state-dir",
        str(tmp_path / "agent"),
        "--proc-dir",
        f"{tmp_path}/proc",
    ]
    settings = load(AgentSettings, "doctor", about="", argv=argv)
    driver: Any = None
    probes = NodeProbes(
        settings,
        NodeGpus(driver=driver, sample=world.driver.sample),
        kubernetes=UnavailableError("none"),
        totals=None,
        ledger_is_readable=False,
    )

    found = await probes.processes()

    assert (found.outcome, text in found.text) == (outcome, True)
    assert "71" not in found.text


@pytest.mark.parametrize("check", ["list_sizes", "mig_modes", "processes", "visible_gpus"])
async def test_what_cannot_be_compared_is_not_found_to_be_right(tmp_path: Path, check: str) -> None:
    """As on a node without an agent, whose driver does not respond, before it joins a cluster."""

    async def nothing() -> tuple[()]:
        return ()

    argv = ["--node", NODE, "--state-dir", str(tmp_path), "--proc-dir", str(tmp_path)]
    settings = load(AgentSettings, "doctor", about="", argv=argv)
    driver: Any = SimpleNamespace(discover=nothing)
    probes = NodeProbes(
        settings,
        NodeGpus(driver=driver, sample=nothing),
        kubernetes=SkipError("no kubeconfig"),
        totals=None,
        ledger_is_readable=False,
    )

    with pytest.raises(SkipError):
        await getattr(probes, check)()


@pytest.mark.parametrize(("read_at", "outcome"), [(99.0, Outcome.OK), (101.0, Outcome.FAIL)])
async def test_what_was_allocated_after_the_ledger_was_read_is_not_compared(
    tmp_path: Path, read_at: float, outcome: Outcome
) -> None:
    world = monitored(tmp_path)
    world.add_container(lease_of("p"))
    (entry,) = world.node.checkpoint.entries
    entry = replace(entry, allocation=replace(entry.allocation, activated_at=100.0))
    content = CheckpointFile(node=NODE, entries=(entry,))
    (tmp_path / "checkpoint.json").write_bytes(msgspec.json.encode(content))
    argv = ["--node", NODE, "--state-dir", str(tmp_path)]
    settings = load(AgentSettings, "doctor", about="", argv=argv)
    probes = NodeProbes(
        settings,
        open_gpus(settings),
        kubernetes=UnavailableError("none"),
        totals=None,
        ledger_is_readable=True,
        read_at=read_at,
    )

    assert (await probes.checkpoint()).outcome is outcome


def leased_by(pod: str) -> LeasedContainer:
    return LeasedContainer(lease=lease_of(pod), name="main")
