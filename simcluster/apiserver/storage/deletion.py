"""What a deletion does to an object: remove it, mark it, or nothing more."""

from dataclasses import dataclass

from simcluster.apiserver.kinds.resources import Resource
from simcluster.apiserver.storage.objects import Json, at_path, metadata

DEFAULT_GRACE_S = 30
_FINISHED = frozenset({"Succeeded", "Failed"})


@dataclass(frozen=True, slots=True)
class Deletion:
    """`gone_now`: remove it. Otherwise mark it with `grace_s`, unless nothing `changes`."""

    gone_now: bool
    changes: bool = True
    grace_s: int = 0


def decide(kind: Resource, obj: Json, *, grace_s: int | None) -> Deletion:
    """Decide what deleting `obj` does; `grace_s` is what was asked, None for the default.

    A pod on a node is its kubelet's to end, so it stays, marked, until deleted with grace 0.
    Finalizers keep any object until they are gone.
    """
    meta = metadata(obj)
    marked = bool(meta.get("deletionTimestamp"))
    wanted = _pod_grace_s(obj, grace_s) if kind.table == "pods" else 0
    if marked and grace_s is None:
        wanted = int(meta.get("deletionGracePeriodSeconds") or 0)
    if wanted == 0 and not (meta.get("finalizers") or _spec_finalizers(kind, obj)):
        return Deletion(gone_now=True)
    current = int(meta.get("deletionGracePeriodSeconds") or 0)
    return Deletion(gone_now=False, changes=not marked or wanted < current, grace_s=wanted)


def _pod_grace_s(pod: Json, asked_s: int | None) -> int:
    if not at_path(pod, "spec.nodeName") or at_path(pod, "status.phase") in _FINISHED:
        return 0
    if asked_s is not None:
        return max(asked_s, 0)
    own = at_path(pod, "spec.terminationGracePeriodSeconds")
    return DEFAULT_GRACE_S if own is None else int(own)


def _spec_finalizers(kind: Resource, obj: Json) -> bool:
    return kind.table == "namespaces" and bool(at_path(obj, "spec.finalizers"))
