"""Programs of the driver: whatever they print or do, they end in time."""

import pytest

from services.node_agent.programs import SilentError, UnseenError, execute


async def test_input_output_and_exit_code_are_passed_on() -> None:
    command = ("sh", "-c", "read line; echo $line and more; exit 3")

    assert await execute(command, {}, 20.0, "a line\n") == (3, "a line and more\n")
    assert await execute(("sh", "-c", "echo wrong >&2"), {}, 20.0, reads_errors=True) == (
        0,
        "wrong\n",
    )
    assert await execute(("true",), {}, 20.0, "not read\n") == (0, "")


async def test_a_program_that_prints_without_end_is_killed_at_once() -> None:
    with pytest.raises(UnseenError, match="prints more than"):
        await execute(("yes",), {}, 20.0, reads_errors=True)


@pytest.mark.parametrize("script", ["sleep 60", "while :; do echo .; sleep 0.01; done"])
async def test_a_program_that_does_not_end_is_killed(script: str) -> None:
    with pytest.raises(SilentError, match=r"did not end within 0\.3 s"):
        await execute(("sh", "-c", script), {}, 0.3, reads_errors=True)


async def test_a_program_that_cannot_be_started_has_said_nothing() -> None:
    with pytest.raises(UnseenError, match="cannot be started"):
        await execute(("/nonexistent/program",), {}, 20.0)
