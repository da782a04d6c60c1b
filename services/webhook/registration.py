"""The MutatingWebhookConfiguration: which pods are reviewed, and the failure policy; pure.

The match conditions select only pods that concern Leasehold: those that request a GPU in any
dialect, and those with annotations that schedulers write. So the webhook can fail closed for them.
It fails open for pods without GPUs that it reviews, and never delays any other pod.
https://kubernetes.io/docs/reference/access-authn-authz/extensible-admission-controllers/
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any
from urllib.parse import urlsplit

from shared.dialects import RESOURCE_PREFIXES, SCHEDULERS
from shared.dialects.reserved import (
    CDI_ANNOTATIONS,
    CDI_VENDORS,
    CUDA_IMAGE_PREFIXES,
    CUDA_IMAGES,
    CUDA_VERSION,
    DENIED_ANNOTATIONS,
    DEVICE_NAME_MOUNTS,
    RUNTIME_CLASSES,
    STRIPPED_ANNOTATIONS,
    VISIBLE,
)
from shared.model.claim import DRIVER, EXTENDED_RESOURCES
from shared.model.errors import RequestError
from shared.model.names import AGENTS_NAMESPACE, DEFAULT_SCHEDULER, SYSTEM_NAMESPACE

NAME = "leasehold"
WEBHOOK = "pods.leasehold.dev"
PATH, EXEMPT_PATH, ALL_PODS_PATH = "/mutate", "/mutate-exempt", "/mutate-all-pods"
CLAIMS_PATH = "/mutate-claims"
ALLOCATIONS_PATH = "/lease-allocation"
DEVICE_HIDING_WEBHOOK = "device-hiding.pods.leasehold.dev"
"""The webhook for pods that request no GPU and would see every device."""
EXEMPT_WEBHOOK = "exempt.pods.leasehold.dev"
"""The webhook for pods with GPUs in exempt namespaces, to which `pod_policy` does not apply."""
ALL_PODS_WEBHOOK = "all-pods.pods.leasehold.dev"
"""The webhook for pods without GPUs in namespaces whose pods Leasehold places, too."""
CLAIMS_WEBHOOK = "claims.pods.leasehold.dev"
"""The webhook for pods that may get GPUs by ResourceClaims, where these are served."""
ALLOCATIONS_WEBHOOK = "allocations.claims.leasehold.dev"
"""The webhook that answers schedulers' allocations of ResourceClaims as they are written."""
PATHS = {
    WEBHOOK: PATH,
    DEVICE_HIDING_WEBHOOK: PATH,
    EXEMPT_WEBHOOK: EXEMPT_PATH,
    ALL_PODS_WEBHOOK: ALL_PODS_PATH,
    CLAIMS_WEBHOOK: CLAIMS_PATH,
    ALLOCATIONS_WEBHOOK: ALLOCATIONS_PATH,
}
"""The path of each webhook."""
TIMEOUT_S, HIDING_TIMEOUT_S, ALLOCATIONS_TIMEOUT_S = 5, 2, 3
EXEMPT_LABEL = "leasehold.dev/sees-devices"
"""On a namespace, `true`: its pods may see devices without a request, as drivers do, and set what
`pod_policy` denies. Only administrators should be able to label namespaces."""
ALL_PODS_LABEL = "leasehold.dev/all-pods"
"""On a namespace, `true`: Leasehold also places its pods without GPUs."""
EXEMPT_NAMESPACES = ("kube-system", SYSTEM_NAMESPACE, AGENTS_NAMESPACE)

CONTAINER_KINDS = ("containers", "initContainers", "ephemeralContainers")

Manifest = dict[str, Any]


MAX_CONTAINERS, MAX_RESOURCES, MAX_ANNOTATIONS = 64, 32, 1000
"""A pod with more containers of a kind, more resources of a container, or more annotations counts
as one that concerns Leasehold, whatever they are."""
MAX_VARIABLES, MAX_MOUNTS = 200, 100
"""A container with more variables or mounts counts as one that would see devices.

The API server ends the evaluation of a condition whose cost exceeds its limit, and then does not
call a webhook that fails open. With these limits no pod comes near it.
"""


def requests_gpu() -> str:
    """Return the condition, in CEL, that some container requests a GPU."""
    named = _starts_with("k", RESOURCE_PREFIXES)
    amounts = " || ".join(
        f"(has(c.resources.{each}) && {_requests_some(each, named)})"
        for each in ("limits", "requests")
    )
    return _some_container(f"has(c.resources) && ({amounts})", CONTAINER_KINDS[:2])


def _requests_some(part: str, named: str) -> str:
    """Return that container `c` requests a resource `k`: the API server writes every zero as 0."""
    amounts = f"c.resources.{part}"
    return _some(amounts, "k", f"({named}) && {amounts}[k] != '0'", MAX_RESOURCES)


def uses_claims() -> str:
    """Return the condition, in CEL, that the pod may get devices by ResourceClaims.

    A pod does not say of which driver they are, and a claim may be created after its pod.
    """
    named = _requests_some("limits", _starts_with("k", EXTENDED_RESOURCES))
    extended = f"has(c.resources) && has(c.resources.limits) && {named}"
    return (
        "(has(object.spec.resourceClaims) && object.spec.resourceClaims.size() > 0) || "
        f"{_some_container(extended)}"
    )


def has_reserved_annotation() -> str:
    """Return the condition, in CEL, that the pod has an annotation that its author must not set."""
    named = _starts_with("k", (*DENIED_ANNOTATIONS, *STRIPPED_ANNOTATIONS))
    vendors = " || ".join(
        f"object.metadata.annotations[k].contains('{vendor}')" for vendor in CDI_VENDORS
    )
    devices = f"k.startsWith('{CDI_ANNOTATIONS}') && ({vendors})"
    some = _some("object.metadata.annotations", "k", f"{named} || ({devices})", MAX_ANNOTATIONS)
    return f"has(object.metadata.annotations) && {some}"


def would_see_devices() -> str:
    """Return the condition, in CEL, that some container would see devices without a request.

    NVIDIA's container runtime injects devices for the variable, which CUDA images set, and for
    certain mounts.
    """
    image = " || ".join(
        [
            _starts_with("c.image", CUDA_IMAGE_PREFIXES),
            *(f"c.image.contains('{part}')" for part in CUDA_IMAGES),
        ]
    )
    variables = _some("c.env", "e", f"e.name in {[VISIBLE, CUDA_VERSION]}", MAX_VARIABLES)
    mounts = _some(
        "c.volumeMounts", "m", f"m.mountPath.contains('{DEVICE_NAME_MOUNTS}')", MAX_MOUNTS
    )
    in_one = (
        f"(has(c.env) && {variables}) || has(c.envFrom) || "
        f"(has(c.volumeMounts) && {mounts}) || {image}"
    )
    runtime_class = f"object.spec.runtimeClassName.contains('{RUNTIME_CLASSES}')"
    return f"(has(object.spec.runtimeClassName) && {runtime_class}) || {_some_container(in_one)}"


def has_our_scheduler() -> str:
    """Return the condition, in CEL, that the pod names one of the schedulers served by default."""
    return f"object.spec.schedulerName in {list(SCHEDULERS)}"


def changes_images() -> str:
    """Return the condition, in CEL, that a pod is new, or gets another image or container."""
    before = "oldObject.spec.{0}"
    same = f"{before}.exists(o, o.name == c.name && o.image == c.image)"
    changed = _some_container(f"!(has({before}) && {before}.size() <= {MAX_CONTAINERS} && {same})")
    return f"request.operation == 'CREATE' || {changed}"


def _some_container(condition: str, kinds: Iterable[str] = CONTAINER_KINDS) -> str:
    """Return that some container `c` fulfils a condition, in which `{0}` is its kind."""
    return " || ".join(
        f"(has(object.spec.{kind}) && "
        f"{_some(f'object.spec.{kind}', 'c', condition.format(kind), MAX_CONTAINERS)})"
        for kind in kinds
    )


def _some(items: str, name: str, condition: str, limit: int) -> str:
    """Return that some item, called `name`, fulfils a condition, or that there are too many."""
    return f"({items}.size() > {limit} || {items}.exists({name}, {condition}))"


def _starts_with(text: str, prefixes: Iterable[str]) -> str:
    return " || ".join(f"{text}.startsWith('{prefix}')" for prefix in prefixes)


def configuration(client: Callable[[str], Mapping[str, Any]], *, claims: bool = False) -> Manifest:
    """Return the MutatingWebhookConfiguration; `client` returns the `clientConfig` of a webhook.

    `claims`: with the webhook of `claims_configuration`.

    The webhooks for pods with GPUs fail closed. Those for other pods fail open: without them they
    run, the container runtime decides which devices they see, and kube-scheduler places them;
    placers refuse those of them that only kube-scheduler could place.
    """
    concerned = ("concerns-leasehold", _concerns())
    without_gpu = ("requests-no-gpu", f"!({_concerns()})")
    not_own = _not_own()
    changed = ("is-new-or-changes-images", changes_images())
    added = claims_configuration(client)["webhooks"] if claims else []
    return {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "MutatingWebhookConfiguration",
        "metadata": {"name": NAME},
        "webhooks": [
            _webhook(client, WEBHOOK, [concerned, changed], _labelled(EXEMPT_LABEL, "NotIn")),
            _webhook(
                client,
                DEVICE_HIDING_WEBHOOK,
                [
                    without_gpu,
                    not_own,
                    changed,
                    (
                        "would-see-devices-or-has-our-scheduler",
                        f"{would_see_devices()} || {has_our_scheduler()}",
                    ),
                ],
                _labelled(EXEMPT_LABEL, "NotIn"),
                fails_open=True,
            ),
            _webhook(
                client,
                EXEMPT_WEBHOOK,
                [concerned],
                _labelled(EXEMPT_LABEL, "In"),
                new_only=True,
            ),
            _webhook(
                client,
                ALL_PODS_WEBHOOK,
                [
                    without_gpu,
                    not_own,
                    ("has-no-scheduler", f"object.spec.schedulerName == '{DEFAULT_SCHEDULER}'"),
                ],
                _labelled(ALL_PODS_LABEL, "In"),
                fails_open=True,
                new_only=True,
            ),
            *added,
        ],
    }


def claims_configuration(client: Callable[[str], Mapping[str, Any]]) -> Manifest:
    """Return the webhooks for ResourceClaims and pods with them, which the component `dra` adds.

    They alone decide whether claims are reviewed, so that no setting of the webhook must agree.
    """
    conditions = [
        ("uses-claims", uses_claims()),
        _not_own(),
        ("is-new-or-changes-images", changes_images()),
    ]
    selector = _labelled(EXEMPT_LABEL, "NotIn")
    return {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "MutatingWebhookConfiguration",
        "metadata": {"name": NAME},
        "webhooks": [
            _webhook(client, CLAIMS_WEBHOOK, conditions, selector),
            _allocations_webhook(client),
        ],
    }


def _allocations_webhook(client: Callable[[str], Mapping[str, Any]]) -> Manifest:
    """Return the webhook that answers allocations.

    Only for schedulers that may write the answer. Without it, the same allocation is written, and
    its pods wait for the binding conditions.
    """
    conditions = {
        "is-allocated-now": (
            "has(object.status) && has(object.status.allocation) && "
            "!(has(oldObject.status) && has(oldObject.status.allocation))"
        ),
        "has-our-devices": (
            f"object.status.allocation.devices.results.exists(r, r.driver == '{DRIVER}')"
        ),
        "may-be-answered": " && ".join(
            "authorizer.group('resource.k8s.io').resource('resourceclaims').subresource('driver')"
            f".namespace(request.namespace).name('{DRIVER}')"
            f".check('arbitrary-node:{verb}').allowed()"
            for verb in ("update", "patch")
        ),
    }
    return {
        "name": ALLOCATIONS_WEBHOOK,
        "admissionReviewVersions": ["v1"],
        "sideEffects": "NoneOnDryRun",
        "matchPolicy": "Equivalent",
        "reinvocationPolicy": "Never",
        "timeoutSeconds": ALLOCATIONS_TIMEOUT_S,
        "rules": [
            {
                "operations": ["UPDATE"],
                "apiGroups": ["resource.k8s.io"],
                "apiVersions": ["v1"],
                "resources": ["resourceclaims/status"],
                "scope": "Namespaced",
            }
        ],
        "failurePolicy": "Ignore",
        "clientConfig": dict(client(ALLOCATIONS_WEBHOOK)),
        "matchConditions": [
            {"name": name, "expression": text} for name, text in conditions.items()
        ],
    }


def _concerns() -> str:
    return f"({requests_gpu()}) || ({has_reserved_annotation()})"


def _not_own() -> tuple[str, str]:
    own = ", ".join(f"'{name}'" for name in EXEMPT_NAMESPACES)
    return "not-an-exempt-namespace", f"!(request.namespace in [{own}])"


def _webhook(
    client: Callable[[str], Mapping[str, Any]],
    name: str,
    conditions: Iterable[tuple[str, str]],
    namespaces: Manifest,
    *,
    fails_open: bool = False,
    new_only: bool = False,
) -> Manifest:
    created = _pods_rule("CREATE", "pods")
    changed = _pods_rule("UPDATE", "pods", "pods/ephemeralcontainers")
    return {
        "name": name,
        "admissionReviewVersions": ["v1"],
        "sideEffects": "None",
        "matchPolicy": "Equivalent",
        "reinvocationPolicy": "IfNeeded",
        "timeoutSeconds": HIDING_TIMEOUT_S if fails_open else TIMEOUT_S,
        "rules": [created] if new_only else [created, changed],
        "failurePolicy": "Ignore" if fails_open else "Fail",
        "clientConfig": dict(client(name)),
        "namespaceSelector": {"matchExpressions": [namespaces]},
        "matchConditions": [
            {"name": condition, "expression": text} for condition, text in conditions
        ],
    }


def _labelled(label: str, operator: str) -> Manifest:
    return {"key": label, "operator": operator, "values": ["true"]}


def _pods_rule(operation: str, *resources: str) -> Manifest:
    return {
        "operations": [operation],
        "apiGroups": [""],
        "apiVersions": ["v1"],
        "resources": list(resources),
        "scope": "Namespaced",
    }


def service_client(namespace: str, service: str = "webhook") -> Callable[[str], Manifest]:
    """Return the `clientConfig` of each webhook behind a Service."""
    return lambda name: {
        "service": {"namespace": namespace, "name": service, "path": PATHS[name], "port": 443}
    }


def registered_url(url: str, port: int) -> str:
    """Return the URL below which API servers call webhooks: `url`, with `port` if it has none.

    Raises RequestError if it is not an https URL of a host.
    """
    parts = urlsplit(url)
    try:
        has_port = parts.port is not None
    except ValueError as error:
        raise RequestError(f"--url {url!r}: {error}") from error
    if parts.scheme != "https" or not parts.hostname:
        raise RequestError(f"--url {url!r} is not https://HOST or https://HOST:PORT")
    address = parts.netloc if has_port else f"{parts.netloc}:{port}"
    return f"https://{address}{parts.path.rstrip('/')}"
