"""One GPU, a namespace with a second's worth of it, and evictions of those that break a limit."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.support.stack import Stack, stack

BUDGETS = """
apiVersion: leasehold.dev/v1beta1
kind: GPUBudget
metadata: {name: team-a}
spec: {limitGPUMinutes: 0.02, policy: {type: none}}
"""
QUICK = {
    "LEASEHOLD_TICK_S": "0.2",
    "LEASEHOLD_PREEMPTION_NOTICE_S": "12",
    "LEASEHOLD_PREEMPTION_MIN_RUNTIME_S": "4",
    "LEASEHOLD_EVICT_VIOLATORS": "GpuLimitTampered",
}


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def whole(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    budgets = tmp_path_factory.mktemp("budgets") / "budgets.yaml"
    budgets.write_text(BUDGETS)
    async with stack("--nodes", "1", "--gpus", "1xT4", "--budgets", str(budgets), env=QUICK) as up:
        for namespace in ("team-a", "team-b"):
            await up.kube.create("/api/v1/namespaces", {"metadata": {"name": namespace}})
        yield up
