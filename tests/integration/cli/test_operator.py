"""The operator of a cluster is authenticated at NATS by a token of the account `operator`."""

import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.cli.doctor.cluster_probes import ClusterProbes
from services.cli.doctor.doctor import run_check
from shared.credentials.logins import NO_CREDENTIALS, ClientCredentials
from shared.credentials.tls import TlsFiles
from shared.model.findings import Finding, Outcome, SkipError
from tests.support.auth.world import AuthWorld, auth_world


@pytest.fixture
async def world() -> AsyncIterator[AuthWorld]:
    with tempfile.TemporaryDirectory(prefix="lh-operator-") as folder:
        async with auth_world(Path(folder)) as made:
            yield made


async def check_nats(world: AuthWorld, token: str) -> Finding:
    file = world.folder / "token"
    file.write_text(f"{token}\n")
    probes = ClusterProbes(
        api_server=SkipError("there is none"),
        redis_url="",
        redis_credentials=NO_CREDENTIALS,
        nats_url=world.url,
        nats_credentials=ClientCredentials(
            token_file=file, user="operator", tls=TlsFiles(ca=world.trusting.ca)
        ),
        simulated=False,
    )
    return await run_check(probes.nats())


async def test_the_token_of_the_operator_is_accepted_and_one_for_another_audience_is_not(
    world: AuthWorld,
) -> None:
    accepted = await check_nats(world, world.cluster.issue_token("operator"))
    rejected = await check_nats(world, world.cluster.issue_token("operator", audience="api-server"))

    assert (accepted.outcome, rejected.outcome) == (Outcome.OK, Outcome.FAIL)
    assert "rejects the token in" in rejected.text
