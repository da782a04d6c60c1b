"""The MutatingWebhookConfiguration: which pods are reviewed, and the failure policy; pure.

The match conditions select only pods that concern Leasehold: those that request a GPU in any
dialect, and those with annotations that schedulers write. So the webhook can fail closed for them
and never delays any other pod.
https://kubernetes.io/docs/reference/access-authn-authz/extensible-admission-controllers/
"""

from collections.abc import Mapping

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
DEVICE_HIDING_WEBHOOK = "device-hiding.pods.leasehold.dev"
"""The webhook for pods that request no GPU and would see every device."""
TIMEOUT_S = 5
EXEMPT_LABEL = "leasehold.dev/sees-devices"
"""On a namespace, `true`: its pods may see devices without a request, as drivers do."""
EXEMPT_NAMESPACES = ("kube-system", "leasehold-system")

Manifest = dict[str, object]


def requests_gpu() -> str:
    """Return the condition, in CEL, that some container requests a GPU."""
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
    """Return the condition, in CEL, that the pod has an annotation that its author must not set."""
    prefixes = (*DENIED_ANNOTATIONS, *STRIPPED_ANNOTATIONS)
    named = " || ".join(f"k.startsWith('{prefix}')" for prefix in prefixes)
    return f"has(object.metadata.annotations) && object.metadata.annotations.exists(k, {named})"


def would_see_devices() -> str:
    """Return the condition, in CEL, that some container would see devices without a request.

    NVIDIA's container runtime injects devices for the variable, which CUDA images set, and for
    certain mounts.
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


def configuration(client: Mapping[str, object]) -> Manifest:
    """Return the MutatingWebhookConfiguration; `client` is its `clientConfig`.

    The first webhook fails closed. The second fails open, since its pods request no GPU: without
    it they run, and the container runtime decides which devices they see.
    """
    exempt = ", ".join(f"'{name}'" for name in EXEMPT_NAMESPACES)
    concerns = f"({requests_gpu()}) || ({has_reserved_annotation()})"
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
                "matchConditions": [{"name": "concerns-leasehold", "expression": concerns}],
            },
            {
                "name": DEVICE_HIDING_WEBHOOK,
                **common,
                "failurePolicy": "Ignore",
                "clientConfig": dict(client),
                "namespaceSelector": {
                    "matchExpressions": [
                        {"key": EXEMPT_LABEL, "operator": "NotIn", "values": ["true"]}
                    ]
                },
                "matchConditions": [
                    {"name": "requests-no-gpu", "expression": f"!({concerns})"},
                    {
                        "name": "not-an-exempt-namespace",
                        "expression": f"!(request.namespace in [{exempt}])",
                    },
                    {"name": "would-see-devices", "expression": would_see_devices()},
                ],
            },
        ],
    }


def service_client(namespace: str, service: str = "webhook") -> Manifest:
    """Return the `clientConfig` of a webhook behind a Service."""
    return {"service": {"namespace": namespace, "name": service, "path": PATH, "port": 443}}
