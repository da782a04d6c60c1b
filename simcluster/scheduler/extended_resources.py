"""Extended resources that DeviceClasses stand for: which a pod requests, and their claim; pure.

A node serves such a resource by a device plugin or by claims, not by both.
https://kubernetes.io/docs/concepts/scheduling-eviction/dynamic-resource-allocation/#extended-resource
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from shared.model.quantity import parse_resources
from simcluster.apimachinery.objects import (
    Json,
    at_path,
    list_at,
    metadata,
    name_of,
    namespace_of,
)

OF_CLASS = "deviceclass.resource.kubernetes.io/"
"""Prefix of the resource that every DeviceClass has by its name."""
_ANNOTATION = "resource.kubernetes.io/extended-resource-claim"


@dataclass(frozen=True, slots=True)
class ExtendedRequest:
    """How many units of an extended resource a container requests."""

    container: str
    number: int
    """Of the container in the pod."""
    resource: str
    count: int


def extended_requests(pod: Json) -> list[ExtendedRequest]:
    """Return what the pod's containers request of extended resources, in the order of its spec."""
    containers = [*list_at(pod, "spec.initContainers"), *list_at(pod, "spec.containers")]
    return [
        ExtendedRequest(container["name"], number, resource, count)
        for number, container in enumerate(containers)
        for resource, count in sorted(
            parse_resources(at_path(container, "resources.requests") or {}).items()
        )
        if count and _is_extended(resource)
    ]


def _is_extended(resource: str) -> bool:
    own = "/" in resource and "kubernetes.io/" not in resource
    return own or resource.startswith(OF_CLASS)


def classes_by_resource(classes: Iterable[Json]) -> Mapping[str, str]:
    """Return the DeviceClass of each extended resource; of several, the newest one."""
    mapping: dict[str, str] = {}
    for device_class in sorted(classes, key=_age):
        name = name_of(device_class)
        mapping[f"{OF_CLASS}{name}"] = name
        own = at_path(device_class, "spec.extendedResourceName")
        if own:
            mapping[str(own)] = name
    return mapping


def _age(device_class: Json) -> tuple[str, str]:
    return str(metadata(device_class).get("creationTimestamp") or ""), name_of(device_class)


def unserved_text(
    requests: Iterable[ExtendedRequest], classes: Mapping[str, str], nodes: Iterable[Json]
) -> str:
    """Return why the simulated scheduler cannot place such a pod; empty if claims serve it all."""
    listed = list(nodes)
    for request in requests:
        resource = request.resource
        with_plugin = [
            node
            for node in listed
            if parse_resources(at_path(node, "status.allocatable") or {}).get(resource)
        ]
        head = f"0/{len(listed)} nodes are available: "
        if with_plugin:
            return (
                f"{head}{len(with_plugin)} serve {resource} by a device plugin, which this "
                "simulated scheduler does not count. Set schedulerName to a scheduler of GPUs"
            )
        if resource not in classes:
            return f"{head}{len(listed)} Insufficient {resource}."
    return ""


def claim_for(
    pod: Json, requests: Iterable[ExtendedRequest], classes: Mapping[str, str], *, suffix: str
) -> Json:
    """Return the claim, not created yet, that serves a pod's extended resources."""
    owner = {
        "apiVersion": "v1",
        "kind": "Pod",
        "name": name_of(pod),
        "uid": metadata(pod)["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }
    wanted = [
        {
            "name": name,
            "exactly": {
                "deviceClassName": classes[request.resource],
                "allocationMode": "ExactCount",
                "count": request.count,
            },
        }
        for name, request in _named(requests)
    ]
    return {
        "metadata": {
            "name": f"{name_of(pod)}-extended-resources-{suffix}",
            "namespace": namespace_of(pod),
            "annotations": {_ANNOTATION: "true"},
            "ownerReferences": [owner],
        },
        "spec": {"devices": {"requests": wanted}},
    }


def claim_status(claim: str, requests: Iterable[ExtendedRequest]) -> Json:
    """Return the pod's `extendedResourceClaimStatus`."""
    mappings = [
        {"containerName": request.container, "resourceName": request.resource, "requestName": name}
        for name, request in _named(requests)
    ]
    return {"resourceClaimName": claim, "requestMappings": mappings}


def _named(requests: Iterable[ExtendedRequest]) -> Iterator[tuple[str, ExtendedRequest]]:
    """Yield each request with its name in the claim."""
    counts: dict[int, int] = {}
    for request in requests:
        at = counts.get(request.number, 0)
        counts[request.number] = at + 1
        yield f"container-{request.number}-request-{at}", request
