"""Lists in node annotations that an operator and the agent both write."""

import pytest

from services.node_agent.views.node_patches import merge_own_entries

KEY, OWN = "volcano.sh/gpu-unhealthy-ids", "leasehold.dev/own-gpu-unhealthy-ids"


@pytest.mark.parametrize(
    ("present", "ours", "changes"),
    [
        pytest.param({}, (), {}, id="no entries"),
        pytest.param({}, ("3",), {KEY: "3", OWN: "3"}, id="the first of ours"),
        pytest.param({KEY: "0, 1"}, (), {}, id="an operator's stay as written"),
        pytest.param({KEY: "0"}, ("3",), {KEY: "0,3", OWN: "3"}, id="ours beside others'"),
        pytest.param({KEY: "0,3", OWN: "3"}, ("3",), {}, id="no change, no write"),
        pytest.param({KEY: "0,3", OWN: "3"}, (), {KEY: "0", OWN: None}, id="ours recovers"),
        pytest.param({KEY: "3", OWN: "3"}, (), {KEY: None, OWN: None}, id="the last one goes"),
        pytest.param({KEY: "3"}, ("3",), {}, id="an operator named it before: it is theirs"),
        pytest.param({KEY: "0", OWN: "3"}, ("3",), {KEY: "0,3"}, id="removed, and still unhealthy"),
    ],
)
def test_item_6_only_the_agents_own_entries_change(
    present: dict[str, str], ours: tuple[str, ...], changes: dict[str, str | None]
) -> None:
    assert merge_own_entries(present, {KEY: ours}) == changes
