"""The rules on annotations as a ValidatingAdmissionPolicy, which needs no running service; pure.

The webhook removes forged annotations. If it is bypassed, the API server denies them. After
creation only the services that write them may change them.
https://kubernetes.io/docs/reference/access-authn-authz/validating-admission-policy/
"""

from collections.abc import Sequence

from services.webhook.registration import EXEMPT_LABEL
from shared.dialects.reserved import (
    AUTHOR_ANNOTATIONS,
    COMPLETED_ANNOTATIONS,
    DENIED_ANNOTATIONS,
    EXEMPT,
    STRIPPED_ANNOTATIONS,
)

NAME = "leasehold-annotations"
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
    """Return the policy and its binding; `users` may change protected annotations."""
    return [
        {
            "apiVersion": API_VERSION,
            "kind": "ValidatingAdmissionPolicy",
            "metadata": {"name": NAME},
            "spec": {
                "failurePolicy": "Fail",
                "matchConstraints": {
                    "resourceRules": [
                        {
                            "operations": ["CREATE", "UPDATE"],
                            "apiGroups": [""],
                            "apiVersions": ["v1"],
                            "resources": ["pods"],
                        }
                    ]
                },
                "matchConditions": [
                    {
                        "name": "not-by-leasehold",
                        "expression": f"!(request.userInfo.username in {list(users)})",
                    }
                ],
                "variables": _variables(),
                "validations": _validations(),
            },
        },
        {
            "apiVersion": API_VERSION,
            "kind": "ValidatingAdmissionPolicyBinding",
            "metadata": {"name": NAME},
            "spec": {"policyName": NAME, "validationActions": ["Deny"]},
        },
    ]


def _variables() -> list[Manifest]:
    """Return CEL variables: protected annotations and exemption of the object, now and before."""
    old = _protected_annotations("oldObject")
    return [
        {"name": "now", "expression": _protected_annotations("object")},
        {"name": "before", "expression": f"oldObject == null ? [] : ({old})"},
        {"name": "exempt", "expression": _has_exemption("object")},
        {"name": "wasExempt", "expression": f"oldObject != null && {_has_exemption('oldObject')}"},
    ]


def _has_exemption(variable: str) -> str:
    annotations = f"{variable}.metadata.annotations"
    return f"has({annotations}) && '{EXEMPT}' in {annotations}"


def _protected_annotations(variable: str) -> str:
    prefixes = (*DENIED_ANNOTATIONS, *STRIPPED_ANNOTATIONS)
    has_prefix = " || ".join(f"k.startsWith('{prefix}')" for prefix in prefixes)
    unprotected = [*AUTHOR_ANNOTATIONS, *COMPLETED_ANNOTATIONS]
    annotations = f"{variable}.metadata.annotations"
    protected = f"{annotations}.filter(k, !(k in {unprotected}) && ({has_prefix}))"
    return f"has({annotations}) ? {protected} : []"


def _validations() -> list[Manifest]:
    """Return CEL validations: no protected annotation is added, removed or changed.

    A pod gets an exemption only in a namespace that an administrator has labelled, and keeps it if
    the label is removed.
    """
    return [
        {
            "expression": (
                "size(variables.now) == size(variables.before) && "
                "variables.now.all(k, k in variables.before)"
            ),
            "messageExpression": (
                "'annotations of an assignment are written by Leasehold only: ' + "
                "variables.now.filter(k, !(k in variables.before)).join(', ')"
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
            "expression": (
                "!variables.exempt || variables.wasExempt || (has(namespaceObject.metadata.labels) "
                f"&& '{EXEMPT_LABEL}' in namespaceObject.metadata.labels && "
                f"namespaceObject.metadata.labels['{EXEMPT_LABEL}'] == 'true')"
            ),
            "message": f"only a namespace with the label {EXEMPT_LABEL} exempts its pods",
            "reason": "Forbidden",
        },
    ]
