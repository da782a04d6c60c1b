"""Which parts of a pod may still change after its creation."""

from collections.abc import Iterator

from simcluster.apiserver.http.errors import Cause
from simcluster.apiserver.storage.objects import Json, copied

_IMMUTABLE = (
    "Forbidden: pod updates may not change fields other than `spec.containers[*].image`,"
    "`spec.initContainers[*].image`,`spec.activeDeadlineSeconds`,`spec.tolerations` (only "
    "additions to existing tolerations),`spec.terminationGracePeriodSeconds` (allow it to be set "
    "to 1 if it was previously negative)"
)


def pod_update_causes(new: Json, old: Json) -> list[Cause]:
    """Refuse changes to what is settled."""
    if new["spec"] == old["spec"]:
        return []
    causes = []
    if _settled(old) != _settled(new):
        causes.append(Cause("FieldValueForbidden", _IMMUTABLE, "spec"))
    old_tolerations = old["spec"].get("tolerations") or []
    new_tolerations = new["spec"].get("tolerations") or []
    if any(each not in new_tolerations for each in old_tolerations):
        text = "Forbidden: existing toleration can not be modified except its tolerationSeconds"
        causes.append(Cause("FieldValueForbidden", text, "spec.tolerations"))
    return [*causes, *_new_gates(new, old)]


def _new_gates(new: Json, old: Json) -> Iterator[Cause]:
    """Refuse scheduling gates that were not there: they may only be taken away."""
    known = {gate.get("name") for gate in old["spec"].get("schedulingGates") or ()}
    for at, gate in enumerate(new["spec"].get("schedulingGates") or ()):
        name = gate.get("name")
        if name not in known:
            text = f"Forbidden: only deletion is allowed, but found new scheduling gate '{name}'"
            yield Cause("FieldValueForbidden", text, f"spec.schedulingGates[{at}].name")


def _settled(pod: Json) -> Json:
    spec = copied(pod.get("spec") or {})
    for field in ("activeDeadlineSeconds", "tolerations", "schedulingGates"):
        spec.pop(field, None)
    for field in ("containers", "initContainers"):
        for container in spec.get(field) or ():
            container.pop("image", None)
            container.pop("imagePullPolicy", None)
    return {key: value for key, value in spec.items() if value not in (None, [], {})}
