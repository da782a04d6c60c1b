"""ValidatingAdmissionPolicies that confine node agents to their node, and the binder; pure.

RBAC cannot restrict an account to one Node, nor to some fields of an object. All agents have the
same account, so the policies compare each write with the node in the agent's token, which the API
server has verified.
https://kubernetes.io/docs/reference/access-authn-authz/service-accounts-admin/#schema-for-service-account-private-claims
"""

from collections.abc import Iterable, Iterator

from services.webhook.annotation_policy import (
    AGENT,
    API_VERSION,
    BINDER,
    Manifest,
    account_in,
)
from shared.dialects import DIALECTS, STATUS_RESOURCES
from shared.dialects.reserved import DENIED_ANNOTATIONS, STRIPPED_ANNOTATIONS
from shared.model.claim import DRIVER, RETRIED_AT
from shared.model.node import AGENT_ANNOTATION, OWN_ENTRIES_PREFIX

NODE_CLAIM = "authentication.kubernetes.io/node-name"

NODE_ANNOTATIONS = frozenset({AGENT_ANNOTATION}).union(
    *(dialect.node_annotations for dialect in DIALECTS.values())
)
NODE_LABELS = frozenset().union(*(dialect.node_labels for dialect in DIALECTS.values()))
NODE_OBJECTS = frozenset().union(*(dialect.node_objects for dialect in DIALECTS.values()))
POD_ANNOTATIONS = frozenset({RETRIED_AT}).union(
    *(dialect.agent_annotations for dialect in DIALECTS.values())
)
NODE_MAPS = (
    "metadata",
    "metadata.labels",
    "metadata.annotations",
    "status",
    "status.capacity",
    "status.allocatable",
)
POD_MAPS = ("metadata", "metadata.annotations")
BOUND_MAPS = (*POD_MAPS, "spec", "status")
"""Maps that the validations of each policy compare."""
_SET_BY_SERVER = ("managedFields", "resourceVersion", "generation")


def service_policies(system: str, agents: str) -> list[Manifest]:
    """Return the policies and their bindings for the services of these namespaces."""
    nodes = [_rule("", "v1", ("nodes", "nodes/status"), ("UPDATE",))]
    pods = [_rule("", "v1", ("pods", "pods/*"), ("UPDATE",))]
    agent, binder = account_in(agents, AGENT), account_in(system, BINDER)
    objects = [_collection_rule(path) for path in sorted(NODE_OBJECTS)]
    written = ("CREATE", "UPDATE", "DELETE")
    slices = [_rule("resource.k8s.io", "*", ("resourceslices",), written)]
    return [
        *_policy("leasehold-agent-nodes", agent, nodes, NODE_MAPS, _node_validations()),
        *_policy("leasehold-agent-pods", agent, pods, POD_MAPS, _pod_validations()),
        *_policy("leasehold-agent-objects", agent, objects, (), _object_validations()),
        *_policy("leasehold-agent-slices", agent, slices, (), _slice_validations()),
        *_policy("leasehold-binder-pods", binder, pods, BOUND_MAPS, _binder_validations()),
    ]


def _node_validations() -> Iterator[tuple[str, str]]:
    """Yield expressions, each with the message of its denial."""
    own_entries = f"k.startsWith('{OWN_ENTRIES_PREFIX}')"
    yield _own_node("object.metadata.name", "the Node")
    yield _unchanged("spec"), "a node agent may not change the spec of its Node"
    yield (
        _unchanged_entries("metadata", f"k in {['labels', 'annotations', *_SET_BY_SERVER]}"),
        "a node agent may change only labels and annotations in the metadata of its Node",
    )
    yield (
        _unchanged_entries("labels", _is_one_of(NODE_LABELS)),
        f"a node agent may change only the labels {', '.join(sorted(NODE_LABELS))}",
    )
    yield (
        _unchanged_entries("annotations", f"{_is_one_of(NODE_ANNOTATIONS)} || {own_entries}"),
        f"a node agent may change only the annotations {', '.join(sorted(NODE_ANNOTATIONS))}",
    )
    yield (
        _unchanged_entries("status", "k in ['capacity', 'allocatable']"),
        "a node agent may change only capacity and allocatable in the status of its Node",
    )
    for part in ("capacity", "allocatable"):
        yield (
            _unchanged_entries(part, _is_one_of(STATUS_RESOURCES)),
            f"a node agent may change only {', '.join(sorted(STATUS_RESOURCES))} in {part}",
        )


def _pod_validations() -> Iterator[tuple[str, str]]:
    node = "has(oldObject.spec.nodeName) ? oldObject.spec.nodeName : ''"
    yield _own_node(node, "the pod's Node")
    for part in ("spec", "status"):
        yield _unchanged(part), f"a node agent may not change the {part} of a pod"
    yield (
        _unchanged_entries("metadata", f"k in {['annotations', *_SET_BY_SERVER]}"),
        "a node agent may change only annotations in the metadata of a pod",
    )
    yield (
        _unchanged_entries("annotations", _is_one_of(POD_ANNOTATIONS)),
        f"a node agent may change only the annotations {', '.join(sorted(POD_ANNOTATIONS))}",
    )


def _object_validations() -> Iterator[tuple[str, str]]:
    owners, finalizers = "metadata.ownerReferences", "metadata.finalizers"
    yield _own_node("object.metadata.name", "the object")
    yield (
        f"oldObject == null || (({_unchanged(owners)}) && ({_unchanged(finalizers)}))",
        "a node agent may not change the owners and finalizers of its node's object",
    )
    yield (
        f"oldObject != null || (!has(object.{finalizers}) && has(object.{owners}) && "
        f"object.{owners}.all(o, o.kind == 'Node' && o.name == variables.node))",
        "the object of a node is owned by its Node and has no finalizers",
    )


def _slice_validations() -> Iterator[tuple[str, str]]:
    """Yield expressions; a slice's driver, node and pool never change, so the old ones count."""
    spec = "(oldObject == null ? object : oldObject).spec"
    yield _own_node(f"has({spec}.nodeName) ? {spec}.nodeName : ''", "the ResourceSlice")
    yield (
        f"{spec}.pool.name == variables.node",
        "the pool of a ResourceSlice is not that of its node: schedulers would ignore the slices "
        "that another node has there",
    )
    yield (
        f"{spec}.driver == '{DRIVER}'",
        f"a node agent writes only ResourceSlices of {DRIVER}",
    )


def _binder_validations() -> Iterator[tuple[str, str]]:
    prefixes = (*DENIED_ANNOTATIONS, *STRIPPED_ANNOTATIONS)
    ours = " || ".join(f"k.startsWith('{prefix}')" for prefix in prefixes)
    yield (
        _unchanged_entries("spec", "k == 'schedulingGates'"),
        "the binder may change only scheduling gates in the spec of a pod",
    )
    yield (
        _unchanged_entries("metadata", f"k in {['annotations', *_SET_BY_SERVER]}"),
        "the binder may change only annotations in the metadata of a pod",
    )
    yield (
        _unchanged_entries("annotations", ours),
        "the binder may change only annotations of an assignment",
    )
    yield (
        _unchanged_entries("status", "k == 'conditions'"),
        "the binder may change only conditions in the status of a pod",
    )


def _policy(
    name: str,
    user: str,
    rules: list[Manifest],
    maps: Iterable[str],
    validations: Iterable[tuple[str, str]],
) -> list[Manifest]:
    has_node = f"has(request.userInfo.extra) && '{NODE_CLAIM}' in request.userInfo.extra"
    return [
        {
            "apiVersion": API_VERSION,
            "kind": "ValidatingAdmissionPolicy",
            "metadata": {"name": name},
            "spec": {
                "failurePolicy": "Fail",
                "matchConstraints": {"resourceRules": rules},
                "matchConditions": [
                    {
                        "name": "by-this-service",
                        "expression": f"request.userInfo.username == '{user}'",
                    }
                ],
                "variables": [
                    {
                        "name": "node",
                        "expression": f"{has_node} ? request.userInfo.extra['{NODE_CLAIM}'][0]"
                        " : ''",
                    },
                    *_map_variables(maps),
                ],
                "validations": [
                    {"expression": expression, "message": message, "reason": "Forbidden"}
                    for expression, message in validations
                ],
            },
        },
        {
            "apiVersion": API_VERSION,
            "kind": "ValidatingAdmissionPolicyBinding",
            "metadata": {"name": name},
            "spec": {"policyName": name, "validationActions": ["Deny"]},
        },
    ]


def _collection_rule(path: str) -> Manifest:
    """Return the rule for the objects at an API path `/apis/GROUP/VERSION/PLURAL`."""
    _, _, group, _, plural = path.split("/")
    return _rule(group, "*", (plural,), ("CREATE", "UPDATE"))


def _rule(
    group: str, version: str, resources: tuple[str, ...], operations: tuple[str, ...]
) -> Manifest:
    return {
        "operations": list(operations),
        "apiGroups": [group],
        "apiVersions": [version],
        "resources": list(resources),
    }


def _own_node(expression: str, what: str) -> tuple[str, str]:
    return (
        f"variables.node != '' && ({expression}) == variables.node",
        f"{what} is not of the node in the token: a node agent writes only for its own",
    )


def _unchanged(path: str) -> str:
    return (
        f"has(object.{path}) == has(oldObject.{path}) && "
        f"(!has(object.{path}) || object.{path} == oldObject.{path})"
    )


def _unchanged_entries(name: str, free: str) -> str:
    """Return the condition that no entry of a map changes, except those with a key `k` in `free`.

    The map and its old version are variables of the policy.
    """
    new, old = f"variables.{name}", f"variables.{_old(name)}"
    return (
        f"{new}.all(k, {free} || (k in {old} && {new}[k] == {old}[k])) && "
        f"{old}.all(k, {free} || k in {new})"
    )


def _map_variables(paths: Iterable[str]) -> Iterator[Manifest]:
    """Yield variables with the maps at these paths, named by their last part; `{}` if absent.

    `dyn` prevents the warnings of the API server that fields of a known type are used as keys.
    """
    for path in paths:
        name = path.rpartition(".")[2]
        for variable, root in ((name, "object"), (_old(name), "oldObject")):
            parts = path.split(".")
            steps = [".".join((root, *parts[: end + 1])) for end in range(len(parts))]
            exists = " && ".join(f"has({step})" for step in steps)
            yield {
                "name": variable,
                "expression": f"{exists} ? dyn({steps[-1]}) : dyn({{}})",
            }


def _old(name: str) -> str:
    return f"old{name[0].upper()}{name[1:]}"


def _is_one_of(keys: Iterable[str]) -> str:
    return f"k in {sorted(keys)}"
