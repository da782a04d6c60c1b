"""The fault campaign: one round of pods and faults, and calm after it; in CI two rounds."""

import pytest

from tests.campaign.events import stories
from tests.campaign.runner import run_campaign
from tests.campaign.schedule import rounds_of
from tests.support.effort import tries

KINDS = ("api-after-write", "cut", "kill", "kubelet-restart", "node-gone", "redis-flush")
PATIENCE = 4.0
"""Other tests run at the same time, on few cores."""
LIMIT_S = 300.0


@pytest.mark.parametrize("seed", [17])
async def test_no_invariant_is_violated_under_random_pods_and_faults(seed: int) -> None:
    """Two rounds have cuts, errors after writes, a node that comes again, and a lost Redis."""
    rounds = rounds_of(seed, 60.0, KINDS)[: tries(2)]

    result, events, began_at = await run_campaign(
        rounds, seed=seed, seconds=LIMIT_S, patience=PATIENCE, kept=None
    )

    assert result.rounds == len(rounds)
    assert not result.violations, "\n\n".join(stories(result.violations, events, began_at))
