"""Which requests the containers of a pod use."""

import msgspec

from services.claims.clients import uses_of
from shared.kubernetes.types import ApiPod


def test_uses_name_claims_of_templates_extended_resources_and_vendors_resources() -> None:
    pod = {
        "metadata": {"name": "p", "uid": "u"},
        "spec": {
            "resourceClaims": [
                {"name": "own", "resourceClaimName": "shared"},
                {"name": "made", "resourceClaimTemplateName": "t"},
                {"name": "not-yet", "resourceClaimTemplateName": "t"},
            ],
            "initContainers": [{"name": "first", "resources": {"claims": [{"name": "made"}]}}],
            "containers": [
                {
                    "name": "main",
                    "resources": {
                        "limits": {"cpu": 1, "volcano.sh/vgpu-number": "1"},
                        "claims": [{"name": "own", "request": "a"}, {"name": "not-yet"}],
                    },
                }
            ],
        },
        "status": {
            "resourceClaimStatuses": [
                {"name": "made", "resourceClaimName": "p-made-x"},
                {"name": "not-yet", "resourceClaimName": None},
            ],
            "extendedResourceClaimStatus": {
                "resourceClaimName": "p-extended-resources-y",
                "requestMappings": [
                    {
                        "containerName": "main",
                        "requestName": "container-0-request-0",
                        "resourceName": "leasehold.dev/whole-gpu",
                    }
                ],
            },
        },
    }

    found = uses_of(msgspec.json.decode(msgspec.json.encode(pod), type=ApiPod))

    assert [(use.container, use.claim, use.request) for use in found] == [
        ("first", "p-made-x", ""),
        ("main", "shared", "a"),
        ("main", "", "volcano.sh/vgpu-number"),
        ("main", "p-extended-resources-y", "container-0-request-0"),
    ]
