"""The rules on annotations once more, as a ValidatingAdmissionPolicy that needs no service of ours.

The webhook takes forged annotations away; where it was passed by, the API server denies them. Later
only the services that write them may change them.
https://kubernetes.io/docs/reference/access-authn-authz/validating-admission-policy/
"""

from collections.abc import Sequence
from typing import Any

from shared.dialects.reserved import (
    AUTHOR_ANNOTATIONS,
    COMPLETED_ANNOTATIONS,
    DENIED_ANNOTATIONS,
    STRIPPED_ANNOTATIONS,
)

NAME = "leasehold-annotations"
WRITERS = ("binder", "node-agent")
"""Service accounts that write a pod's annotations."""


def writers_in(namespace: str) -> tuple[str, ...]:
    """Return the user names of the services that may write."""
    return tuple(f"system:serviceaccount:{namespace}:{name}" for name in WRITERS)


def policy(users: Sequence[str]) -> list[dict[str, Any]]:
    """Return the policy and its binding; `users` may change what it protects."""
    prefixes = (*DENIED_ANNOTATIONS, *STRIPPED_ANNOTATIONS)
    named = " || ".join(f"k.startsWith('{prefix}')" for prefix in prefixes)
    free = [*AUTHOR_ANNOTATIONS, *COMPLETED_ANNOTATIONS]
    named = f"!(k in {free}) && ({named})"
    api_version = "admissionregistration.k8s.io/v1"
    return [
        {
            "apiVersion": api_version,
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
                "variables": [
                    {"name": "now", "expression": _reserved("object", named)},
                    {
                        "name": "before",
                        "expression": f"oldObject == null ? [] : ({_reserved('oldObject', named)})",
                    },
                ],
                "validations": [
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
                ],
            },
        },
        {
            "apiVersion": api_version,
            "kind": "ValidatingAdmissionPolicyBinding",
            "metadata": {"name": NAME},
            "spec": {"policyName": NAME, "validationActions": ["Deny"]},
        },
    ]


def _reserved(of: str, named: str) -> str:
    annotations = f"{of}.metadata.annotations"
    return f"has({annotations}) ? {annotations}.filter(k, {named}) : []"
