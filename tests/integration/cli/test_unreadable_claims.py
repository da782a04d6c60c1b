"""An audit reads all ResourceClaims but those that nobody can read."""

from services.cli.audit.snapshot_reader import claims_of
from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.kubeconfig import ClusterCredentials
from shared.model.requests.claim import DRIVER
from tests.support.kubernetes.scripted_apiserver import Object, ScriptedApiserver, lists


def claim(name: str, *nodes: str) -> Object:
    results = [
        {"request": "gpu", "driver": DRIVER, "pool": node, "device": "gpu-0"} for node in nodes
    ]
    return {
        "metadata": {"name": name, "namespace": "team", "uid": name},
        "status": {"allocation": {"devices": {"results": results}}},
    }


async def test_a_claim_that_cannot_be_read_hides_no_other() -> None:
    untyped = {"metadata": {"name": "untyped"}, "status": {"allocation": 3}}
    listed = lists(claim("of-two-nodes", "a", "b"), untyped, claim("good", "a"), version=1)
    async with (
        ScriptedApiserver(listed) as server,
        KubernetesClient(ClusterCredentials(server=server.url)) as kube,
    ):
        claims = await claims_of(kube)

    assert claims is not None
    assert [claim.name for claim in claims] == ["good"]
