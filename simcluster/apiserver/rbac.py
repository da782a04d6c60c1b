"""Which rules of stored RBAC roles apply to a user."""

from collections.abc import Iterator

from simcluster.apimachinery.objects import Json, namespace_of
from simcluster.apiserver.rbac_rules import EVERYTHING
from simcluster.apiserver.storage.store import ObjectStore

_ADMINISTRATORS = "system:masters"
ACCOUNT = "system:serviceaccount:"


def rules_of(store: ObjectStore, user: Json, namespace: str) -> Iterator[Json]:
    """Yield the rules of all roles that are bound to the user, cluster-wide or in the namespace."""
    if _ADMINISTRATORS in user.get("groups", ()):
        yield from EVERYTHING
        return
    bindings = store.list("clusterrolebindings")
    if namespace:
        bindings = [*bindings, *store.list("rolebindings", namespace)]
    for binding in bindings:
        if any(_is_subject(each, user) for each in binding.get("subjects") or ()):
            role = binding["roleRef"]
            in_namespace = namespace_of(binding) if role["kind"] == "Role" else None
            found = store.find(f"{role['kind'].lower()}s", in_namespace, role["name"])
            yield from (found.obj.get("rules") or ()) if found is not None else ()


def _is_subject(subject: Json, user: Json) -> bool:
    if subject["kind"] == "ServiceAccount":
        return bool(
            user.get("username") == f"{ACCOUNT}{subject.get('namespace')}:{subject['name']}"
        )
    if subject["kind"] == "Group":
        return subject["name"] in user.get("groups", ())
    return bool(subject["name"] == user.get("username"))
