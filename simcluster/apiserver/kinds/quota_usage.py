"""Usage of pods in ResourceQuotas, and which quotas apply to a pod; pure.

As Kubernetes documents it, except that a pod that outlives its grace period stays charged until it
is gone.
"""

from collections.abc import Callable, Iterable, Mapping

from simcluster.apimachinery.objects import Json, at_path
from simcluster.apimachinery.pods import has_finished, qos_class
from simcluster.apimachinery.selectors import selector_requirements
from simcluster.apiserver.kinds.quantities import (
    Amounts,
    Quantity,
    add_amounts,
    max_amounts,
    parse_amounts,
    quantity,
)

_COMPUTE = ("cpu", "memory", "ephemeral-storage")
_EXPLICIT = frozenset(f"{head}{name}" for name in ("cpu", "memory")
                      for head in ("", "requests.", "limits."))  # fmt: skip
_TRACKED = frozenset(f"{head}{name}" for name in _COMPUTE for head in ("", "requests.", "limits.")
                     ) | {"pods", "count/pods"}  # fmt: skip
_ONE = Quantity(quantity(1).value)


def counts_pods(name: str) -> bool:
    """Return whether a quota's resource is about pods."""
    return (
        name in _TRACKED
        or name.startswith(("hugepages-", "requests.hugepages-"))
        or (name.startswith("requests.") and is_extended(name.removeprefix("requests.")))
    )


def is_extended(name: str) -> bool:
    """Return whether a resource of a container is an extended resource."""
    return "/" in name and "kubernetes.io/" not in name


def pod_usage(pod: Json) -> Amounts:
    """Return the usage of a pod; a finished pod counts as an object only."""
    total: Amounts = {"count/pods": _ONE}
    if has_finished(pod):
        return total
    return (
        total
        | _charges(_pod_amounts(pod, "requests"), _pod_amounts(pod, "limits"))
        | {"pods": _ONE}
    )


def _charges(requests: Amounts, limits: Amounts) -> Amounts:
    charged: Amounts = {}
    for name, amount in requests.items():
        if name in _COMPUTE or name.startswith("hugepages-"):
            charged |= {name: amount, f"requests.{name}": amount}
        elif is_extended(name):
            charged[f"requests.{name}"] = amount
    return charged | {f"limits.{name}": limits[name] for name in _COMPUTE if name in limits}


def _pod_amounts(pod: Json, field: str) -> Amounts:
    """Sum a pod's requests or limits: init containers one by one, sidecars beside the others."""
    spec = pod["spec"]
    sidecars: Amounts = {}
    highest: Amounts = {}
    for container in spec.get("initContainers") or ():
        own = _container_amounts(container, field)
        if container.get("restartPolicy") == "Always":
            sidecars = add_amounts(sidecars, own)
            highest = max_amounts(highest, sidecars)
        else:
            highest = max_amounts(highest, add_amounts(sidecars, own))
    running = sidecars
    for container in spec.get("containers") or ():
        running = add_amounts(running, _container_amounts(container, field))
    total = max_amounts(running, highest) | _container_amounts(spec, field)
    overhead = parse_amounts(spec.get("overhead") or {})
    if field == "limits":
        overhead = {name: amount for name, amount in overhead.items() if name in total}
    return add_amounts(total, overhead)


def _container_amounts(holder: Json, field: str) -> Amounts:
    return parse_amounts(at_path(holder, f"resources.{field}") or {})


def missing_amounts(names: Iterable[str], pod: Json) -> str:
    """Describe which containers lack a resource that the quota requires; empty if none does."""
    if at_path(pod, "spec.resources"):
        return ""
    required = sorted(_EXPLICIT & set(names))
    containers = [
        container
        for f in ("containers", "initContainers")
        for container in pod["spec"].get(f) or ()
    ]
    containers_by_name: dict[str, list[str]] = {}
    for container in containers:
        given = _charges(
            _container_amounts(container, "requests"), _container_amounts(container, "limits")
        )
        for name in required:
            if name not in given:
                containers_by_name.setdefault(name, []).append(str(container.get("name")))
    parts = [
        f"{name} for: {','.join(sorted(who))}" for name, who in sorted(containers_by_name.items())
    ]
    return f"must specify {'; '.join(parts)}" if parts else ""


def quota_matches(quota: Json, pod: Json) -> bool:
    """Return whether a quota applies to a pod: it counts pods, and all its scopes match."""
    if not any(counts_pods(name) for name in at_path(quota, "spec.hard") or ()):
        return False
    scopes = [
        {"scopeName": name, "operator": "Exists"} for name in at_path(quota, "spec.scopes") or ()
    ]
    selectors = at_path(quota, "spec.scopeSelector.matchExpressions") or ()
    return all(_in_scope(selector, pod) for selector in (*scopes, *selectors))


def _in_scope(selector: Json, pod: Json) -> bool:
    test = SCOPES.get(selector["scopeName"])
    if test is not None:
        return test(pod)
    name = at_path(pod, "spec.priorityClassName")
    if selector["operator"] == "Exists":
        return bool(name)
    expression = {"key": "PriorityClass", "operator": selector["operator"],
                  "values": selector.get("values") or []}  # fmt: skip
    labels = {"PriorityClass": name} if name else {}
    return all(e(labels) for e in selector_requirements({"matchExpressions": [expression]}))


def _terminating(pod: Json) -> bool:
    return at_path(pod, "spec.activeDeadlineSeconds") is not None


def _crosses_namespaces(pod: Json) -> bool:
    terms: list[Json] = []
    for kind in ("podAffinity", "podAntiAffinity"):
        affinity = at_path(pod, f"spec.affinity.{kind}") or {}
        terms += affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or ()
        terms += [
            term.get("podAffinityTerm") or {}
            for term in affinity.get("preferredDuringSchedulingIgnoredDuringExecution") or ()
        ]
    return any(t.get("namespaces") or t.get("namespaceSelector") is not None for t in terms)


SCOPES: Mapping[str, Callable[[Json], bool]] = {
    "Terminating": _terminating,
    "NotTerminating": lambda pod: not _terminating(pod),
    "BestEffort": lambda pod: qos_class(pod) == "BestEffort",
    "NotBestEffort": lambda pod: qos_class(pod) != "BestEffort",
    "CrossNamespacePodAffinity": _crosses_namespaces,
}
