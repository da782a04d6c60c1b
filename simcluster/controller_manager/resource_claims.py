"""The controller of ResourceClaims: makes those of templates, and deallocates unused ones.

https://kubernetes.io/docs/concepts/scheduling-eviction/dynamic-resource-allocation/
"""

import asyncio
import logging
import secrets
from collections.abc import Mapping

from simcluster.apimachinery.errors import ApiError
from simcluster.apimachinery.objects import (
    Json,
    annotations_of,
    at_path,
    labels_of,
    list_at,
    metadata,
    name_of,
    namespace_of,
)
from simcluster.apimachinery.pods import has_finished
from simcluster.controller_manager.waits import first_of
from simcluster.ports import ClusterStore

log = logging.getLogger(__name__)

POD_CLAIM = "resource.kubernetes.io/pod-claim-name"
"""Annotation of a claim that was made for a pod: its name in the pod."""
_MADE = frozenset({POD_CLAIM, "resource.kubernetes.io/extended-resource-claim"})
FINALIZER = "resource.kubernetes.io/delete-protection"
RETRY_S = 1.0


class ResourceClaimController:
    """Runs until cancelled."""

    def __init__(self, store: ClusterStore) -> None:
        self._store = store

    async def run(self) -> None:
        """Follow pods and claims."""
        while True:
            pods = self._store.watch("pods")
            claims = self._store.watch("resourceclaims")
            try:
                while True:
                    changed = [change for watch in (pods, claims) for change in watch.poll()]
                    if any(_uses_claims(event.object) for event in changed):
                        self._sync()
                    await first_of((pods.wait(), claims.wait()))
            except ApiError as error:
                log.info("ResourceClaims: %s", error)
                await asyncio.sleep(RETRY_S)

    def _sync(self) -> None:
        pods = {metadata(pod)["uid"]: pod for pod in self._store.list("pods")}
        for pod in pods.values():
            if list_at(pod, "spec.resourceClaims") and not has_finished(pod):
                self._create_claims(pod)
        for claim in self._store.list("resourceclaims"):
            self._release(claim, pods)

    def _create_claims(self, pod: Json) -> None:
        statuses = {
            status["name"]: status for status in list_at(pod, "status.resourceClaimStatuses")
        }
        missing = [
            entry
            for entry in list_at(pod, "spec.resourceClaims")
            if entry.get("resourceClaimTemplateName") and entry["name"] not in statuses
        ]
        for entry in missing:
            name = self._claim_of(pod, entry["name"]) or self._create(pod, entry)
            if name:
                statuses[entry["name"]] = {"name": entry["name"], "resourceClaimName": name}
        if missing:
            status = {"status": {"resourceClaimStatuses": list(statuses.values())}}
            self._store.patch("pods", namespace_of(pod), name_of(pod), status, subresource="status")

    def _claim_of(self, pod: Json, name: str) -> str:
        """Return the claim that was made for the pod before; empty: none."""
        uid = metadata(pod)["uid"]
        return next(
            (
                name_of(claim)
                for claim in self._store.list("resourceclaims")
                if annotations_of(claim).get(POD_CLAIM) == name and uid in _owners(claim)
            ),
            "",
        )

    def _create(self, pod: Json, entry: Json) -> str:
        template = self._store.find(
            "resourceclaimtemplates", namespace_of(pod), entry["resourceClaimTemplateName"]
        )
        if template is None:
            log.info("pod %s: no template %s", name_of(pod), entry["resourceClaimTemplateName"])
            return ""
        wanted = template.obj.get("spec") or {}
        name = f"{name_of(pod)}-{entry['name']}-{secrets.token_hex(3)[:5]}"
        owner = {
            "apiVersion": "v1",
            "kind": "Pod",
            "name": name_of(pod),
            "uid": metadata(pod)["uid"],
            "controller": True,
        }
        claim = {
            "metadata": {
                "name": name,
                "namespace": namespace_of(pod),
                "labels": dict(labels_of(wanted)),
                "annotations": {**annotations_of(wanted), POD_CLAIM: entry["name"]},
                "ownerReferences": [owner],
            },
            "spec": wanted.get("spec") or {},
        }
        self._store.create("resourceclaims", claim)
        return name

    def _release(self, claim: Json, pods: Mapping[str, Json]) -> None:
        """Remove ended pods from a claim; deallocate it after the last one."""
        reserved = list_at(claim, "status.reservedFor")
        running = [
            consumer for consumer in reserved if _is_running(pods.get(str(consumer.get("uid"))))
        ]
        where = (namespace_of(claim), name_of(claim))
        is_unused = not running and bool(at_path(claim, "status.allocation"))
        if is_unused or running != reserved:
            patch = _released(claim, running)
            self._store.patch("resourceclaims", *where, patch, subresource="status")
        if not running and _is_of_ended_pods(claim, pods):
            self._store.delete("resourceclaims", *where, uid=metadata(claim)["uid"])


def _released(claim: Json, running: list[Json]) -> Json:
    """Return the patch that leaves these pods, or deallocates the claim."""
    if running:
        return {"status": {"reservedFor": running}}
    finalizers = [
        finalizer for finalizer in metadata(claim).get("finalizers") or () if finalizer != FINALIZER
    ]
    return {
        "metadata": {"finalizers": finalizers},
        "status": {"reservedFor": None, "allocation": None, "devices": None},
    }


def _is_of_ended_pods(claim: Json, pods: Mapping[str, Json]) -> bool:
    """Return whether a claim was made for pods that have ended."""
    owners = [pods[uid] for uid in _owners(claim) if uid in pods]
    is_made = bool(_MADE & annotations_of(claim).keys())
    return is_made and bool(owners) and all(map(has_finished, owners))


def _uses_claims(obj: Json) -> bool:
    spec = obj.get("spec") or {}
    status = obj.get("status") or {}
    return bool({"resourceClaims", "devices"} & spec.keys()) or (
        "extendedResourceClaimStatus" in status
    )


def _is_running(pod: Json | None) -> bool:
    return pod is not None and not has_finished(pod)


def _owners(claim: Json) -> list[str]:
    return [str(owner.get("uid")) for owner in metadata(claim).get("ownerReferences") or ()]
