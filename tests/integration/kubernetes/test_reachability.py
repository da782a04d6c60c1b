"""The readiness probe of the API server, on scripted answers."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.kubeconfig import ClusterCredentials
from shared.kubernetes.reachability import INTERVAL_S, RETRY_S, ApiServerReachability
from shared.model.clock import end
from tests.support.clock import FakeClock
from tests.support.kubernetes.scripted_apiserver import ScriptedApiserver, Step, answers, refuses
from tests.support.waiting import until


class Probed:
    """A probe whose clock the test moves."""

    def __init__(self, kube: KubernetesClient, server: ScriptedApiserver) -> None:
        self.clock = FakeClock()
        self.server = server
        self.probe = ApiServerReachability(kube, self.clock)

    async def after_request(self, number: int) -> str | None:
        """Return the reason once this request is over."""
        await until(lambda: len(self.server.requests) == number and self.clock.sleepers)
        return self.probe.unready_reason()


@asynccontextmanager
async def probed(*steps: Step) -> AsyncIterator[Probed]:
    async with (
        ScriptedApiserver(*steps) as server,
        KubernetesClient(ClusterCredentials(server=server.url)) as kube,
    ):
        found = Probed(kube, server)
        running = asyncio.create_task(found.probe.run())
        try:
            yield found
        finally:
            await end(running)


async def test_one_failure_is_followed_by_another_request_before_a_service_is_unready() -> None:
    async with probed(answers(200), refuses(503, "busy"), answers(200)) as api:
        assert "no response yet" in (api.probe.unready_reason() or "")
        assert await api.after_request(1) is None

        api.clock.advance(INTERVAL_S)
        assert await api.after_request(2) is None
        api.clock.advance(RETRY_S)
        assert await api.after_request(3) is None
        api.clock.advance(INTERVAL_S - RETRY_S)

        assert api.probe.unready_reason() is None


async def test_refused_credentials_are_a_reason_and_a_missing_permission_is_none() -> None:
    async with probed(refuses(401, "Unauthorized"), refuses(403, "Forbidden")) as api:
        reason = await api.after_request(1)
        api.clock.advance(RETRY_S)

        assert "does not accept these credentials" in (reason or "")
        assert await api.after_request(2) is None
