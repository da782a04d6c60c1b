"""The hook's program, as a runtime calls it, and the agent's socket that it reaches."""

import asyncio
import json
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from services.node_agent.memory_limits import hook_server
from services.node_agent.memory_limits.build_hook import build_hook
from services.node_agent.memory_limits.hook_program import HookProgram
from services.node_agent.memory_limits.hook_server import HookCall, HookServer, parse_call
from shared.model.errors import RequestError, UnavailableError
from tests.integration.node_agent.memory_limits.conftest import ID, OTHER_POD, POD

STATE = {
    "ociVersion": "1.2.1",
    "id": ID,
    "status": "created",
    "pid": 4321,
    "bundle": f"/run/containerd/io.containerd.runtime.v2.task/k8s.io/{ID}",
    "annotations": {"io.kubernetes.cri.container-name": "main", "note": "x" * 100_000},
}


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        return build_hook(tmp_path_factory.mktemp("hook") / "leasehold-limit-hook")
    except UnavailableError as error:
        pytest.skip(str(error))


async def call_hook(
    program: Path, socket: Path, *words: str, state: object = STATE
) -> tuple[int, str]:
    """Run the program without an environment, as runtimes do; return its status and its words."""
    process = await asyncio.create_subprocess_exec(
        program,
        socket,
        *(words or (POD, "main", "7")),
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={},
    )
    _, errors = await process.communicate(json.dumps(state).encode())
    assert process.returncode is not None
    return process.returncode, errors.decode()


def recorded(calls: list[HookCall]) -> Callable[[HookCall], Awaitable[None]]:
    async def start(call: HookCall) -> None:
        calls.append(call)

    return start


async def test_a_container_starts_once_the_agent_says_so(built: Path, tmp_path: Path) -> None:
    calls: list[HookCall] = []
    async with HookServer(tmp_path / "s", recorded(calls)).serve():
        assert await call_hook(built, tmp_path / "s") == (0, "")
        assert (tmp_path / "s").stat().st_mode & 0o777 == 0o600

    (call,) = calls
    assert (call.holder, call.container, call.fence) == (POD, "main", 7)
    assert (call.state.id, call.state.pid) == (ID, 4321)


async def test_the_reason_of_a_refusal_is_what_the_runtime_shows(
    built: Path, tmp_path: Path
) -> None:
    async def refuse(_: HookCall) -> None:
        raise RequestError("the present lease has fence 8")

    async with HookServer(tmp_path / "s", refuse).serve():
        status, words = await call_hook(built, tmp_path / "s")

    assert status == 1
    assert words == "leasehold-limit-hook: the present lease has fence 8\n"


async def test_without_an_agent_the_container_does_not_start(built: Path, tmp_path: Path) -> None:
    status, words = await call_hook(built, tmp_path / "s")

    assert status == 1
    assert "the node agent is not reached" in words


async def test_an_agent_that_is_late_starts_nothing_within_six_seconds(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hang(_: HookCall) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(hook_server, "REPLY_S", 60.0)
    async with HookServer(tmp_path / "s", hang).serve():
        began = asyncio.get_running_loop().time()
        status, words = await call_hook(built, tmp_path / "s")
        took_s = asyncio.get_running_loop().time() - began

    assert status == 1
    assert "did not reply within 5 s" in words
    assert took_s >= 4.9


async def test_a_call_that_says_too_much_or_nothing_is_refused(built: Path, tmp_path: Path) -> None:
    calls: list[HookCall] = []
    async with HookServer(tmp_path / "s", recorded(calls)).serve():
        for words in ((POD, "main", "x"), (POD, "main", ""), (POD, "a b", "7"), (POD, "main")):
            assert (await call_hook(built, tmp_path / "s", *words))[0] != 0
        states: list[object] = [[], {}, {"id": ID}, {"id": 5, "pid": 1}, {"id": ID, "pid": "1"}]
        for state in states:
            assert (await call_hook(built, tmp_path / "s", state=state))[0] == 1
        big = STATE | {"annotations": {"note": "x" * (1 << 20)}}
        assert (await call_hook(built, tmp_path / "s", state=big))[0] == 1

    assert calls == []


def test_a_call_names_no_amount() -> None:
    call = parse_call(f"{POD} main 7\n{json.dumps(STATE | {'memory': 5})}".encode())

    assert set(HookCall.__struct_fields__) == {"holder", "container", "fence", "state"}
    assert not hasattr(call.state, "memory")


async def test_the_program_is_installed_and_its_files_follow_the_pods(tmp_path: Path) -> None:
    built = tmp_path / "built"
    program = HookProgram(tmp_path / "state", tmp_path / "cdi", built)
    with pytest.raises(UnavailableError, match="is missing"):
        await program.write(POD, "main", 7)
    built.write_bytes(b"one")

    await program.write(POD, "main", 7)
    await program.write(OTHER_POD, "gpu/mig", 3)

    assert program.path.read_bytes() == b"one"
    assert program.path.stat().st_mode & 0o777 == 0o755
    (specification,) = (
        json.loads(path.read_text()) for path in (tmp_path / "cdi").iterdir() if POD in path.name
    )
    assert specification["kind"] == "leasehold.dev/limits"
    (device,) = specification["devices"]
    assert device["name"] == f"{POD}-main"
    (hook,) = device["containerEdits"]["hooks"]
    assert hook["hookName"] == "createRuntime"
    assert hook["path"] == str(program.path)
    assert hook["args"][1:] == [str(program.socket), POD, "main", "7"]
    assert hook["timeout"] == 6
    built.write_bytes(b"two")
    await program.install()
    assert program.path.read_bytes() == b"two"

    await program.remove_others({OTHER_POD})

    assert [POD in path.name for path in (tmp_path / "cdi").iterdir()] == [False]
