"""The doctor's judgement of the switches of NVIDIA's runtime, beside the agent's strategies."""

from pathlib import Path

import pytest

from services.node_agent.allocate.device_list_strategies import DeviceListStrategy
from services.node_agent.diagnosis.node_probes import (
    MOUNTS_SWITCH,
    SWITCH,
    NodeProbes,
    device_variable,
)
from services.node_agent.gpu_access import open_gpus
from services.node_agent.settings import AgentSettings
from shared.model.errors import RequestError, UnavailableError
from shared.model.findings import Outcome
from shared.runtime.settings import load

ENVVAR, MOUNTS = DeviceListStrategy.ENVVAR, DeviceListStrategy.VOLUME_MOUNTS
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
