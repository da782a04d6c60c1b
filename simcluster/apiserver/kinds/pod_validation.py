"""Validation of pods and their updates: all invalid fields at once, as causes of a 422; pure."""

from collections.abc import Collection, Iterator, Mapping
from functools import lru_cache

from shared.model.errors import RequestError
from shared.model.quantity import parse_quantity
from simcluster.apimachinery.errors import Cause
from simcluster.apimachinery.names import is_qualified, is_subdomain, label_name_causes
from simcluster.apimachinery.objects import Json, deep_copy, json_text, list_at
from simcluster.apimachinery.pods import qos_class

_RESTART_POLICIES = ("Always", "OnFailure", "Never")
_parsed = lru_cache(maxsize=4096)(parse_quantity)
_NATIVE = ("cpu", "memory", "ephemeral-storage", "pods", "storage")


def required(field: str) -> Cause:
    """Return the cause for a missing field."""
    return Cause("FieldValueRequired", "Required value", field)


def pod_causes(pod: Json, claimed: Collection[str] = ()) -> list[Cause]:
    """Validate the spec; its pods also have the volumes `claimed`, as those of a StatefulSet."""
    spec = pod.get("spec")
    if not isinstance(spec, dict):
        return [required("spec")]
    causes: list[Cause] = []
    containers = spec.get("containers")
    if not isinstance(containers, list) or not containers:
        causes.append(required("spec.containers"))
    if spec.get("restartPolicy") not in _RESTART_POLICIES:
        allowed = ", ".join(f'"{policy}"' for policy in _RESTART_POLICIES)
        text = f'Unsupported value: "{spec.get("restartPolicy")}": supported values: {allowed}'
        causes.append(Cause("FieldValueNotSupported", text, "spec.restartPolicy"))
    node = spec.get("nodeName")
    if node and not (isinstance(node, str) and is_subdomain(node)):
        text = f'Invalid value: "{node}": not a valid node name'
        causes.append(Cause("FieldValueInvalid", text, "spec.nodeName"))
    return [*causes, *_gate_causes(spec), *_container_causes(spec, claimed)]


def new_pod_causes(pod: Json) -> list[Cause]:
    """Validate what is restricted for new pods only."""
    spec = pod.get("spec")
    if isinstance(spec, dict) and spec.get("nodeName") and spec.get("schedulingGates"):
        text = "Forbidden: cannot be set until all schedulingGates have been cleared"
        return [Cause("FieldValueForbidden", text, "spec.nodeName")]
    return []


def _gate_causes(spec: Json) -> Iterator[Cause]:
    seen: set[str] = set()
    for at, gate in enumerate(spec.get("schedulingGates") or ()):
        name = str(gate.get("name") or "") if isinstance(gate, dict) else ""
        where = f"spec.schedulingGates[{at}]"
        if not is_qualified(name):
            text = f'Invalid value: "{name}": name part must consist of alphanumeric characters'
            yield Cause("FieldValueInvalid", text, where)
        elif name in seen:
            yield Cause("FieldValueDuplicate", f'Duplicate value: "{name}"', where)
        seen.add(name)


def _container_causes(spec: Json, claimed: Collection[str]) -> Iterator[Cause]:
    own = (volume.get("name") for volume in spec.get("volumes") or () if isinstance(volume, dict))
    volumes: set[object] = {*claimed, *own}
    seen: set[object] = set()
    for field in ("initContainers", "containers"):
        listed = spec.get(field)
        for at, container in enumerate(listed if isinstance(listed, list) else ()):
            path = f"spec.{field}[{at}]"
            if not isinstance(container, dict):
                yield Cause("FieldValueTypeInvalid", "Invalid value: not a map", path)
                continue
            yield from _one_container(container, path, seen, volumes)
            seen.add(container.get("name"))


def _one_container(
    container: Json, path: str, seen: set[object], volumes: set[object]
) -> Iterator[Cause]:
    name = container.get("name")
    if not name:
        yield required(f"{path}.name")
    elif name in seen:
        yield Cause("FieldValueDuplicate", f'Duplicate value: "{name}"', f"{path}.name")
    else:
        yield from label_name_causes(str(name), f"{path}.name")
    if not container.get("image"):
        yield required(f"{path}.image")
    for at, variable in enumerate(container.get("env") or ()):
        if not (isinstance(variable, dict) and variable.get("name")):
            yield required(f"{path}.env[{at}].name")
    for at, mount in enumerate(container.get("volumeMounts") or ()):
        if mount.get("name") not in volumes:
            where = f"{path}.volumeMounts[{at}].name"
            yield Cause("FieldValueNotFound", f'Not found: "{mount.get("name")}"', where)
    yield from _resource_causes(container.get("resources"), f"{path}.resources")


def _resource_causes(resources: object, path: str) -> Iterator[Cause]:
    if not isinstance(resources, dict):
        yield Cause("FieldValueTypeInvalid", "Invalid value: not a map", path)
        return
    limits, requests = resources.get("limits") or {}, resources.get("requests") or {}
    unreadable: set[str] = set()
    for field, listed in (("limits", limits), ("requests", requests)):
        for name, value in listed.items():
            faults = list(_quantity_causes(name, value, f"{path}.{field}"))
            if faults:
                unreadable.add(name)
            yield from faults
    for name in sorted({*limits, *requests} - unreadable):
        yield from _pair_causes(name, limits, requests, path)


def _quantity_causes(name: str, value: object, path: str) -> Iterator[Cause]:
    where = f"{path}[{name}]"
    if not is_qualified(name) or ("/" not in name and not _is_native(name)):
        text = f'Invalid value: "{name}": must be a standard resource type or fully qualified'
        yield Cause("FieldValueInvalid", text, where)
        return
    try:
        amount = _parsed(str(value))
    except RequestError:
        text = (
            f'Invalid value: "{value}": quantities must match the regular expression '
            "'^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'"
        )
        yield Cause("FieldValueInvalid", text, where)
        return
    if amount < 0:
        text = f'Invalid value: "{value}": must be greater than or equal to 0'
        yield Cause("FieldValueInvalid", text, where)
    elif not _is_native(name) and amount.denominator != 1:
        yield Cause("FieldValueInvalid", f'Invalid value: "{value}": must be an integer', where)


def _pair_causes(name: str, limits: Json, requests: Json, path: str) -> Iterator[Cause]:
    if _is_native(name) and not name.startswith("hugepages-"):
        if name in limits and name in requests:
            limit, request = _parsed(limits[name]), _parsed(requests[name])
            if request > limit:
                text = (
                    f'Invalid value: "{requests[name]}": must be less than or equal to {name} '
                    f"limit of {limits[name]}"
                )
                yield Cause("FieldValueInvalid", text, f"{path}.requests")
        return
    if name not in limits:
        text = "Required value: Limit must be set for non overcommitable resources"
        yield Cause("FieldValueRequired", text, f"{path}.limits")
    elif _parsed(requests.get(name, limits[name])) != _parsed(limits[name]):
        text = f'Invalid value: "{requests[name]}": must be equal to {name} limit of {limits[name]}'
        yield Cause("FieldValueInvalid", text, f"{path}.requests")


def _is_native(name: str) -> bool:
    return name in _NATIVE or name.startswith("hugepages-") or "kubernetes.io/" in name


_IMMUTABLE = (
    "Forbidden: pod updates may not change fields other than `spec.containers[*].image`,"
    "`spec.initContainers[*].image`,`spec.activeDeadlineSeconds`,`spec.tolerations` (only "
    "additions to existing tolerations),`spec.terminationGracePeriodSeconds` (allow it to be set "
    "to 1 if it was previously negative)"
)


def pod_update_causes(new: Json, old: Json) -> list[Cause]:
    """Refuse changes of immutable fields."""
    if new["spec"] == old["spec"]:
        return []
    causes: list[Cause] = []
    before, after = _immutable_fields(old), _immutable_fields(new)
    if old["spec"].get("schedulingGates"):
        causes += _directive_causes(after, before)
        for spec in (before, after):
            _drop_directives(spec)
    if before != after:
        causes.append(Cause("FieldValueForbidden", _IMMUTABLE, "spec"))
    old_tolerations = old["spec"].get("tolerations") or []
    new_tolerations = new["spec"].get("tolerations") or []
    if any(toleration not in new_tolerations for toleration in old_tolerations):
        text = "Forbidden: existing toleration can not be modified except its tolerationSeconds"
        causes.append(Cause("FieldValueForbidden", text, "spec.tolerations"))
    return [*causes, *_new_gates(new, old)]


_RESIZED = ("cpu", "memory")


def resize_causes(new: Json, old: Json) -> list[Cause]:
    """Refuse changes of a pod's resources other than of cpu and memory, within its QoS class."""
    before, after = _resources_of(old), _resources_of(new)
    if before == after:
        return []
    causes = pod_causes(new)
    if causes:
        return causes
    if _others(before) != _others(after):
        text = "Forbidden: only cpu and memory resources are mutable"
        causes.append(Cause("FieldValueForbidden", text, "spec"))
    for path, resources in before.items():
        for kind in ("requests", "limits"):
            removed = (resources.get(kind) or {}).keys() - (after[path].get(kind) or {}).keys()
            if removed & set(_RESIZED):
                text = f"Forbidden: resource {kind} cannot be removed"
                causes.append(Cause("FieldValueForbidden", text, f"{path}.{kind}"))
    if qos_class(new) != qos_class(old):
        text = (
            f'Invalid value: "{qos_class(old)}": Pod QOS Class may not change as a result of '
            "resizing"
        )
        causes.append(Cause("FieldValueInvalid", text, "spec"))
    return causes


def _resources_of(pod: Json) -> dict[str, Json]:
    """Return the resources of each container, by their field."""
    return {
        f"spec.{field}[{at}].resources": container.get("resources") or {}
        for field in ("initContainers", "containers")
        for at, container in enumerate(list_at(pod, f"spec.{field}"))
    }


def _others(resources: Mapping[str, Json]) -> list[Json]:
    """Return the amounts of resources that cannot be resized."""
    return [
        {
            kind: {name: amount for name, amount in amounts.items() if name not in _RESIZED}
            for kind, amounts in each.items()
            if isinstance(amounts, dict)
        }
        for each in resources.values()
    ]


_AFFINITY = "requiredDuringSchedulingIgnoredDuringExecution"


def _directive_causes(new: Json, old: Json) -> Iterator[Cause]:
    """Refuse changes of a gated pod's node selector and affinity that let it run on more nodes."""
    before, after = old.get("nodeSelector") or {}, new.get("nodeSelector") or {}
    if not before.items() <= after.items():
        text = f"Invalid value: {json_text(after)}: field is immutable"
        yield Cause("FieldValueInvalid", text, "spec.nodeSelector")
    where = f"spec.affinity.nodeAffinity.{_AFFINITY}.nodeSelectorTerms"
    terms = _terms(new)
    old_terms = _terms(old)
    if old_terms and len(terms) != len(old_terms):
        text = (
            f"Invalid value: {json_text(terms)}: no additions/deletions to non-empty "
            "NodeSelectorTerms list are allowed"
        )
        yield Cause("FieldValueInvalid", text, where)
        return
    for at, (term, old_term) in enumerate(zip(terms, old_terms, strict=False)):
        if not _has_only_additions(term, old_term):
            text = (
                f"Invalid value: {json_text(term)}: only additions are allowed (no mutations or "
                "deletions)"
            )
            yield Cause("FieldValueInvalid", text, f"{where}[{at}]")


def _terms(spec: Json) -> list[Json]:
    return list_at(spec, f"affinity.nodeAffinity.{_AFFINITY}.nodeSelectorTerms")


def _has_only_additions(new: Json, old: Json) -> bool:
    """Return whether a term has more requirements; an empty one matches nothing and stays so."""
    if not (old.get("matchExpressions") or old.get("matchFields")):
        return not (new.get("matchExpressions") or new.get("matchFields"))
    return all(
        (new.get(field) or [])[: len(old.get(field) or [])] == (old.get(field) or [])
        for field in ("matchExpressions", "matchFields")
    )


def _drop_directives(spec: Json) -> None:
    """Remove what may change while a pod is gated."""
    spec.pop("nodeSelector", None)
    affinity = spec.get("affinity") or {}
    affinity.pop("nodeAffinity", None)
    if not affinity:
        spec.pop("affinity", None)


def _new_gates(new: Json, old: Json) -> Iterator[Cause]:
    """Refuse new scheduling gates: updates may only remove gates."""
    earlier_gates = {gate.get("name") for gate in old["spec"].get("schedulingGates") or ()}
    for at, gate in enumerate(new["spec"].get("schedulingGates") or ()):
        name = gate.get("name")
        if name not in earlier_gates:
            text = f"Forbidden: only deletion is allowed, but found new scheduling gate '{name}'"
            yield Cause("FieldValueForbidden", text, f"spec.schedulingGates[{at}].name")


def _immutable_fields(pod: Json) -> Json:
    spec = deep_copy(pod.get("spec") or {})
    for field in ("activeDeadlineSeconds", "tolerations", "schedulingGates"):
        spec.pop(field, None)
    for field in ("containers", "initContainers"):
        for container in spec.get(field) or ():
            container.pop("image", None)
            container.pop("imagePullPolicy", None)
    return {key: value for key, value in spec.items() if value not in (None, [], {})}
