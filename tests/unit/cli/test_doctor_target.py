"""What `leasehold doctor` checks: the nodes that `leasehold up` runs, as it runs them."""

from pathlib import Path

import pytest

from services.cli.commands import Doctor
from services.cli.doctor.doctor import run_check, target_of
from services.cli.parser import parse
from services.cli.state_dir import StateDir, save_state
from services.node_agent.diagnosis.node_probes import NodeProbes
from services.node_agent.gpu_access import NodeGpus
from services.node_agent.isolation.library import simulated_library
from services.node_agent.settings import AgentSettings
from shared.model.errors import UnavailableError
from shared.model.findings import Finding, Outcome
from tests.support.states import state


def doctor_arguments(*words: str) -> Doctor:
    _, arguments = parse(["doctor", *words], "leasehold")
    assert isinstance(arguments, Doctor)
    return arguments


def node_of(
    root: Path, *arguments: str, library_source: str = ""
) -> tuple[AgentSettings, NodeGpus]:
    """Return the settings and GPUs of the one node of a stack, as the doctor reads them."""
    saved = state(nodes={"node-0": "2xT4"}, library_source=library_source)
    save_state(StateDir.at(root), saved)
    flags = doctor_arguments("--state", str(root), *arguments)
    (node,) = target_of(flags).nodes
    return node


async def library_check(settings: AgentSettings, gpus: NodeGpus) -> Finding:
    node = NodeProbes(
        settings,
        gpus,
        kubernetes=UnavailableError("no API server"),
        totals=None,
        ledger_is_readable=False,
        host=Path("/"),
    )
    return await run_check(NodeProbes.library(node))


async def test_the_library_of_a_stack_is_the_one_that_up_got(tmp_path: Path) -> None:
    library = tmp_path / "libvgpu.so"

    settings, gpus = node_of(tmp_path, library_source=str(library))
    found = await library_check(settings, gpus)

    assert settings.library_source == library
    assert (found.outcome, str(library) in found.text) == (Outcome.FAIL, True)


async def test_a_stack_without_a_library_needs_none(tmp_path: Path) -> None:
    found = await library_check(*node_of(tmp_path))

    assert found.outcome is Outcome.SKIPPED
    assert "--library-source" in found.text


async def test_a_node_of_a_stack_that_has_lost_its_library_fails(tmp_path: Path) -> None:
    settings, gpus = node_of(tmp_path)
    library = simulated_library(settings.library_root).path
    library.parent.mkdir(parents=True)
    library.touch()
    assert (await library_check(settings, gpus)).outcome is Outcome.SKIPPED

    library.unlink()

    found = await library_check(settings, gpus)
    assert (found.outcome, str(library.parent) in found.text) == (Outcome.FAIL, True)


def test_the_flag_names_another_library(tmp_path: Path) -> None:
    settings, _ = node_of(tmp_path, "--library-source", "/other", library_source="/first")

    assert settings.library_source == Path("/other")


@pytest.mark.parametrize("before", ["{}", "no state"])
def test_without_the_state_of_a_stack_the_flags_describe_the_node(
    tmp_path: Path, before: str
) -> None:
    (tmp_path / "state.json").write_text(before)
    flags = doctor_arguments("--state", str(tmp_path), "--library-source", "/other")

    ((settings, _),) = target_of(flags).nodes

    assert settings.library_source == Path("/other")
