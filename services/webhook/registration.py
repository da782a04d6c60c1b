"""How the API server is told of the webhook: which pods reach it, and what happens if it is away.

The match conditions let through only pods that could concern us: those that ask for a GPU in any
vocabulary, and those with annotations that schedulers write. So the webhook can fail closed for
them and never delays anything else.
https://kubernetes.io/docs/reference/access-authn-authz/extensible-admission-controllers/
"""

from collections.abc import Mapping
from typing import Any

from shared.dialects.reserved import DENIED_ANNOTATIONS, STRIPPED_ANNOTATIONS

NAME = "leasehold"
WEBHOOK = "pods.leasehold.dev"
PATH = "/mutate"
TIMEOUT_S = 5
RESOURCES = (
    "volcano.sh/",
    "koordinator.sh/",
    "kubernetes.io/gpu",
    "tencent.com/vcuda-",
    "nvidia.com/gpu",
    "leasehold.dev/",
)
"""Prefixes of all resource names that dialects know."""


def asks_for_gpu() -> str:
    """Return the condition, in CEL, that some container asks for a GPU."""
    named = " || ".join(f"k.startsWith('{prefix}')" for prefix in RESOURCES)
    in_one = (
        "has(c.resources) && ("
        f"(has(c.resources.limits) && c.resources.limits.exists(k, {named})) || "
        f"(has(c.resources.requests) && c.resources.requests.exists(k, {named})))"
    )
    return (
        f"object.spec.containers.exists(c, {in_one}) || "
        f"(has(object.spec.initContainers) && object.spec.initContainers.exists(c, {in_one}))"
    )


def has_reserved_annotation() -> str:
    """Return the condition, in CEL, that the pod carries an annotation that is not its author's."""
    prefixes = (*DENIED_ANNOTATIONS, *STRIPPED_ANNOTATIONS)
    named = " || ".join(f"k.startsWith('{prefix}')" for prefix in prefixes)
    return f"has(object.metadata.annotations) && object.metadata.annotations.exists(k, {named})"


def configuration(client: Mapping[str, Any]) -> dict[str, Any]:
    """Return the MutatingWebhookConfiguration; `client` is its `clientConfig`."""
    return {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "MutatingWebhookConfiguration",
        "metadata": {"name": NAME},
        "webhooks": [
            {
                "name": WEBHOOK,
                "admissionReviewVersions": ["v1"],
                "sideEffects": "None",
                "failurePolicy": "Fail",
                "matchPolicy": "Equivalent",
                "reinvocationPolicy": "IfNeeded",
                "timeoutSeconds": TIMEOUT_S,
                "clientConfig": dict(client),
                "rules": [
                    {
                        "operations": ["CREATE"],
                        "apiGroups": [""],
                        "apiVersions": ["v1"],
                        "resources": ["pods"],
                        "scope": "Namespaced",
                    }
                ],
                "matchConditions": [
                    {
                        "name": "concerns-leasehold",
                        "expression": f"({asks_for_gpu()}) || ({has_reserved_annotation()})",
                    }
                ],
            }
        ],
    }


def service_client(namespace: str, service: str = "webhook") -> dict[str, Any]:
    """Return the `clientConfig` of a webhook behind a Service."""
    return {"service": {"namespace": namespace, "name": service, "path": PATH, "port": 443}}
