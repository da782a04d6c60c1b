"""What of a pod only services change, as a ValidatingAdmissionPolicy, which needs none; pure.

The webhook removes forged annotations. If it is bypassed, the API server denies them. After
creation only the services that write them may change them, through whatever subresource.
https://kubernetes.io/docs/reference/access-authn-authz/validating-admission-policy/
"""

from collections.abc import Sequence

from services.webhook.registration import EXEMPT_LABEL
from shared.dialects.reserved import (
    AUTHOR_ANNOTATIONS,
    CDI_ANNOTATIONS,
    CDI_VENDORS,
    COMPLETED_ANNOTATIONS,
    DENIED_ANNOTATIONS,
    EXEMPT,
    STRIPPED_ANNOTATIONS,
)
from shared.model.names import BUDGET_GATE

NAME, NODES_NAME = "leasehold-annotations", "leasehold-node-annotations"
API_VERSION = "admissionregistration.k8s.io/v1"
BINDER, AGENT = "binder", "node-agent"
"""Service accounts that write a pod's annotations."""

Manifest = dict[str, object]


def writers(system: str, agents: str) -> tuple[str, ...]:
    """Return the user names of the services that may write, by the namespaces they are in."""
    return account_in(system, BINDER), account_in(agents, AGENT)


def account_in(namespace: str, name: str) -> str:
    """Return the user name of a service account."""
    return f"system:serviceaccount:{namespace}:{name}"


def annotation_policy(users: Sequence[str]) -> list[Manifest]:
    """Return the policies and their bindings; `users` may change protected annotations."""
    return [
        *_policy(NAME, POD_RULES, users, _variables(), _validations()),
        *_policy(NODES_NAME, NODE_RULES, users, [], [_node_validation()]),
    ]


def _policy(
    name: str,
    rules: Sequence[Manifest],
    users: Sequence[str],
    variables: Sequence[Manifest],
    validations: Sequence[Manifest],
) -> list[Manifest]:
    return [
        {
            "apiVersion": API_VERSION,
            "kind": "ValidatingAdmissionPolicy",
            "metadata": {"name": name},
            "spec": {
                "failurePolicy": "Fail",
                "matchConstraints": {"resourceRules": list(rules)},
                "matchConditions": [
                    {
                        "name": "not-by-leasehold",
                        "expression": f"!(request.userInfo.username in {list(users)})",
                    }
                ],
                "variables": list(variables),
                "validations": list(validations),
            },
        },
        {
            "apiVersion": API_VERSION,
            "kind": "ValidatingAdmissionPolicyBinding",
            "metadata": {"name": name},
            "spec": {"policyName": name, "validationActions": ["Deny"]},
        },
    ]


def _rule(operations: Sequence[str], *resources: str) -> Manifest:
    return {
        "operations": list(operations),
        "apiGroups": [""],
        "apiVersions": ["v1"],
        "resources": list(resources),
    }


POD_RULES = (_rule(("CREATE", "UPDATE"), "pods", "pods/*", "bindings"),)
"""The API server merges the annotations of a Binding into its pod, and accepts changed annotations
with a pod's status. All subresources are listed, since releases of Kubernetes add some."""
NODE_RULES = (_rule(("UPDATE",), "nodes/status"),)
"""Network plugins and problem detectors may have this right without that to change a Node."""


def _variables() -> list[Manifest]:
    """Return CEL variables: protected annotations and exemption of the object, now and before."""
    old = _protected_annotations("oldObject", _is_protected())
    labels = "namespaceObject.metadata.labels"
    return [
        {
            "name": "isNewPod",
            "expression": "request.operation == 'CREATE' && request.kind.kind == 'Pod'",
        },
        {
            "name": "inExemptNamespace",
            "expression": f"has({labels}) && '{EXEMPT_LABEL}' in {labels} && "
            f"{labels}['{EXEMPT_LABEL}'] == 'true'",
        },
        {"name": "now", "expression": _annotations_now()},
        {"name": "isGated", "expression": _is_gated("object")},
        {"name": "wasGated", "expression": _is_gated("oldObject")},
        {"name": "before", "expression": f"oldObject == null ? [] : ({old})"},
    ]


def _is_gated(variable: str) -> str:
    gates = f"{variable}.spec.schedulingGates"
    return (
        f"{variable} != null && has({variable}.spec) && has({gates}) && "
        f"{gates}.exists(g, g.name == '{BUDGET_GATE}')"
    )


def _annotations_now() -> str:
    """Return the protected annotations of the object; the webhook completes those of a new pod."""
    new = _protected_annotations("object", _is_protected_in_new_pod())
    return f"variables.isNewPod ? ({new}) : ({_protected_annotations('object', _is_protected())})"


def _protected_annotations(variable: str, condition: str) -> str:
    annotations = f"{variable}.metadata.annotations"
    return f"has({annotations}) ? {annotations}.filter(k, {condition}) : []"


def _is_protected() -> str:
    prefixes = (*DENIED_ANNOTATIONS, *STRIPPED_ANNOTATIONS, CDI_ANNOTATIONS)
    return f"!(k in {list(AUTHOR_ANNOTATIONS)}) && ({_has_prefix(prefixes)})"


def _is_protected_in_new_pod() -> str:
    """An exemption, and devices of ours in CDI annotations, need an exempt namespace."""
    free = [*AUTHOR_ANNOTATIONS, *(each for each in COMPLETED_ANNOTATIONS if each != EXEMPT)]
    vendors = " || ".join(
        f"object.metadata.annotations[k].contains('{vendor}')" for vendor in CDI_VENDORS
    )
    return (
        f"!(k in {free}) && ({_has_prefix((*DENIED_ANNOTATIONS, *STRIPPED_ANNOTATIONS))} || "
        f"(k.startsWith('{CDI_ANNOTATIONS}') && ({vendors}))) && "
        f"!(variables.inExemptNamespace && (k == '{EXEMPT}' || k.startsWith('{CDI_ANNOTATIONS}')))"
    )


def _has_prefix(prefixes: Sequence[str]) -> str:
    return " || ".join(f"k.startsWith('{prefix}')" for prefix in prefixes)


def _validations() -> list[Manifest]:
    """Return CEL validations: no protected annotation is added, removed or changed.

    A pod is exempt from its creation on, in a namespace that an administrator has labelled, and
    stays exempt if the label is removed.
    """
    return [
        {
            "expression": (
                "variables.before.all(k, k in variables.now) && "
                "variables.now.all(k, k in variables.before)"
            ),
            "messageExpression": (
                "'annotations of an assignment are written by Leasehold only: ' + "
                "(variables.now.filter(k, !(k in variables.before)) + "
                "variables.before.filter(k, !(k in variables.now))).join(', ') + "
                f"(variables.now.exists(k, k == '{EXEMPT}') ? "
                f"': only a namespace with the label {EXEMPT_LABEL} exempts its new pods' : '')"
            ),
            "message": "annotations of an assignment are written by Leasehold only",
            "reason": "Forbidden",
        },
        {
            "expression": (
                "oldObject == null || variables.now.all(k, k in variables.before && "
                "object.metadata.annotations[k] == oldObject.metadata.annotations[k])"
            ),
            "message": "annotations of an assignment are changed by Leasehold only",
            "reason": "Forbidden",
        },
        {
            "expression": "oldObject == null || !variables.wasGated || variables.isGated",
            "message": (
                f"the scheduling gate {BUDGET_GATE} is removed by Leasehold only, when the "
                "namespace has GPU time again"
            ),
            "reason": "Forbidden",
        },
    ]


def _node_validation() -> Manifest:
    ours = _has_prefix(DENIED_ANNOTATIONS)
    notes, old = "object.metadata.annotations", "oldObject.metadata.annotations"
    return {
        "expression": (
            f"(!has({notes}) || {notes}.all(k, !({ours}) || "
            f"(has({old}) && k in {old} && {notes}[k] == {old}[k]))) && "
            f"(!has({old}) || {old}.all(k, !({ours}) || (has({notes}) && k in {notes})))"
        ),
        "message": "the status of a Node does not change annotations that its node agent writes",
        "reason": "Forbidden",
    }
