"""`leasehold sim`: which faults the node agents read, and what is refused."""

import json
from pathlib import Path

import pytest

from services.cli.__main__ import main
from services.cli.state_dir import StateDir, locked, save_state
from tests.support.states import state


def sim(root: Path, *words: str) -> int:
    """Run the command on a stack of two nodes; return its exit code."""
    directory = StateDir.at(root)
    directory.make()
    save_state(directory, state(nodes={"node-0": "2xT4", "node-1": "1xT4+2xA10"}))
    for node in ("node-0", "node-1"):
        directory.node(node).mkdir(parents=True, exist_ok=True)
    with locked(directory):
        return run(*words, "--state", str(root))


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as ending:
        main(["sim", *words])
    return int(str(ending.value.code or 0))


def faults(root: Path, node: str) -> object:
    return json.loads(StateDir.at(root).faults(node).read_text())


def test_faults_are_added_and_healed_one_by_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sim(tmp_path, "break", "node-1/2", "--xid", "79") == 0
    assert sim(tmp_path, "break", "node-1/0", "--fault", "vanish") == 0
    assert faults(tmp_path, "node-1") == {"2": "xid-79", "0": "vanish"}
    assert "sim heal node-1/2" in capsys.readouterr().out

    assert sim(tmp_path, "heal", "node-1/2") == 0
    assert faults(tmp_path, "node-1") == {"0": "vanish"}
    assert "its agent opens it after 30 s" in capsys.readouterr().out
    assert sim(tmp_path, "heal", "node-1/1") == 0
    assert "no simulated fault" in capsys.readouterr().out


def test_processes_are_made_to_outlive_their_pods(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sim(tmp_path, "break", "node-0/1", "--fault", "stuck") == 0
    assert faults(tmp_path, "node-0") == {"1": "stuck"}
    assert "the processes of a container stay" in capsys.readouterr().out

    assert sim(tmp_path, "heal", "node-0/1") == 0
    assert "processes that stayed end within a second" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["break", "node-0/2"], "node-0 has 2 GPUs, 0 to 1: there is no GPU 2"),
        (["break", "node-9/0"], "the nodes are node-0, node-1"),
        (["break", "node-0"], "node-0 is not NODE/GPU, such as node-0/0"),
        (["heal", "node-0/0", "--xid", "79"], "omit --xid and --fault"),
        (["brake", "node-0/0"], "did you mean break?"),
    ],
)
def test_what_is_not_a_simulated_gpu_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], text: str
) -> None:
    assert sim(tmp_path, *words) == 2
    assert text in capsys.readouterr().err


def test_without_a_running_stack_it_says_how_to_start_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("break", "node-0/0", "--state", str(tmp_path)) == 3
    assert f"no simulated cluster runs in {tmp_path}: start one" in capsys.readouterr().err
