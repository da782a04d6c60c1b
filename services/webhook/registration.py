"""How the API server is told of the webhook: which pods reach it, and what happens if it is away.

The match conditions let through only pods that could concern us: those that ask for a GPU in any
vocabulary, and those with annotations that schedulers write. So the webhook can fail closed for
them and never delays anything else.
https://kubernetes.io/docs/reference/access-authn-authz/extensible-admission-controllers/
"""

from collections.abc import Mapping
from typing import Any

from shared.dialects import RESOURCE_PREFIXES
from shared.dialects.reserved import (
    CUDA_IMAGE_PREFIXES,
    CUDA_IMAGES,
    DENIED_ANNOTATIONS,
    DEVICE_NAME_MOUNTS,
    STRIPPED_ANNOTATIONS,
    VISIBLE,
)

NAME = "leasehold"
WEBHOOK = "pods.leasehold.dev"
PATH = "/mutate"
BESIDE = "unasked.pods.leasehold.dev"
"""The webhook for pods that ask for no GPU and would see them all."""
TIMEOUT_S = 5
OPEN_LABEL = "leasehold.dev/sees-devices"
"""On a namespace, `true`: its pods may see devices unasked, as drivers and monitoring do."""
OPEN_NAMESPACES = ("kube-system", "leasehold-system")


def asks_for_gpu() -> str:
    """Return the condition, in CEL, that some container asks for a GPU."""
    named = " || ".join(f"k.startsWith('{prefix}')" for prefix in RESOURCE_PREFIXES)
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


def would_see_devices() -> str:
    """Return the condition, in CEL, that some container would see devices unasked.

    That is what NVIDIA's container runtime makes of the variable, which its images set themselves,
    and of certain mounts.
    """
    image = " || ".join(
        [
            *(f"c.image.startsWith('{prefix}')" for prefix in CUDA_IMAGE_PREFIXES),
            *(f"c.image.contains('{part}')" for part in CUDA_IMAGES),
        ]
    )
    in_one = (
        f"(has(c.env) && c.env.exists(e, e.name == '{VISIBLE}')) || (has(c.volumeMounts) && "
        f"c.volumeMounts.exists(m, m.mountPath.contains('{DEVICE_NAME_MOUNTS}'))) || {image}"
    )
    return (
        f"object.spec.containers.exists(c, {in_one}) || "
        f"(has(object.spec.initContainers) && object.spec.initContainers.exists(c, {in_one}))"
    )


def configuration(client: Mapping[str, Any]) -> dict[str, Any]:
    """Return the MutatingWebhookConfiguration; `client` is its `clientConfig`.

    The first webhook fails closed. The second is for pods that are none of ours: without it they
    run, and what they see then is up to the container runtime, as it always was.
    """
    named = ", ".join(f"'{name}'" for name in OPEN_NAMESPACES)
    concerned = f"({asks_for_gpu()}) || ({has_reserved_annotation()})"
    common = {
        "admissionReviewVersions": ["v1"],
        "sideEffects": "None",
        "matchPolicy": "Equivalent",
        "reinvocationPolicy": "IfNeeded",
        "timeoutSeconds": TIMEOUT_S,
        "rules": [
            {
                "operations": ["CREATE"],
                "apiGroups": [""],
                "apiVersions": ["v1"],
                "resources": ["pods"],
                "scope": "Namespaced",
            }
        ],
    }
    return {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "MutatingWebhookConfiguration",
        "metadata": {"name": NAME},
        "webhooks": [
            {
                "name": WEBHOOK,
                **common,
                "failurePolicy": "Fail",
                "clientConfig": dict(client),
                "matchConditions": [{"name": "concerns-leasehold", "expression": concerned}],
            },
            {
                "name": BESIDE,
                **common,
                "failurePolicy": "Ignore",
                "clientConfig": dict(client),
                "namespaceSelector": {
                    "matchExpressions": [
                        {"key": OPEN_LABEL, "operator": "NotIn", "values": ["true"]}
                    ]
                },
                "matchConditions": [
                    {"name": "asks-for-nothing", "expression": f"!({concerned})"},
                    {
                        "name": "no-part-of-the-node",
                        "expression": f"!(request.namespace in [{named}])",
                    },
                    {"name": "would-see-devices", "expression": would_see_devices()},
                ],
            },
        ],
    }


def service_client(namespace: str, service: str = "webhook") -> dict[str, Any]:
    """Return the `clientConfig` of a webhook behind a Service."""
    return {"service": {"namespace": namespace, "name": service, "path": PATH, "port": 443}}
