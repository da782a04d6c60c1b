"""Which cluster a command reads: that of a stack, or that of KUBECONFIG."""

from pathlib import Path

import pytest

from services.cli.arguments import ClusterArguments, StateArguments
from services.cli.state_dir import State, StateDir, locked, save_state, stack_of


@pytest.fixture
def stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StateDir:
    """A stack in the default directory that does not run."""
    monkeypatch.chdir(tmp_path)
    directory = StateDir.at(StateArguments.state)
    directory.make()
    state = State(
        pid=1,
        started_at=0.0,
        ready=False,
        nats_url="",
        redis_url="",
        kubeconfig=str(directory.kubeconfig),
        nodes={},
    )
    save_state(directory, state)
    return directory


@pytest.fixture
def other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """KUBECONFIG names another cluster."""
    path = tmp_path / "another-cluster"
    monkeypatch.setenv("KUBECONFIG", str(path))
    return path


@pytest.mark.usefixtures("stopped", "other")
def test_a_stopped_stack_gives_way_to_kubeconfig() -> None:
    assert stack_of(ClusterArguments())[1] is None


@pytest.mark.usefixtures("other")
def test_a_running_stack_comes_before_kubeconfig(stopped: StateDir) -> None:
    with locked(stopped):
        assert stack_of(ClusterArguments())[1] is not None


@pytest.mark.usefixtures("other")
def test_a_stack_that_is_named_comes_before_kubeconfig(stopped: StateDir) -> None:
    assert stack_of(ClusterArguments(state=stopped.root))[1] is not None


@pytest.mark.parametrize("is_set", [True, False])
def test_without_another_cluster_a_stopped_stack_counts(
    stopped: StateDir, is_set: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_set:
        monkeypatch.setenv("KUBECONFIG", str(stopped.kubeconfig))
    else:
        monkeypatch.delenv("KUBECONFIG", raising=False)

    assert stack_of(ClusterArguments())[1] is not None
