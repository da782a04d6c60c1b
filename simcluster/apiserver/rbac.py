"""Which rules of stored RBAC roles apply to a user, from an index by subject."""

from collections.abc import Iterator, Mapping, Sequence

from simcluster.apimachinery.objects import Json, list_at, metadata, name_of, namespace_of
from simcluster.apimachinery.resources import Resource
from simcluster.apimachinery.selectors import selector_requirements
from simcluster.apiserver.rbac_rules import EVERYTHING
from simcluster.apiserver.storage.records import ObjectChange
from simcluster.apiserver.storage.store import ObjectStore

_ADMINISTRATORS = "system:masters"
ACCOUNT = "system:serviceaccount:"
_TABLES = frozenset({"roles", "rolebindings", "clusterroles", "clusterrolebindings"})
_Grants = dict[tuple[str, str], list[tuple[str, Sequence[Json]]]]
"""By kind and name of a subject, the namespaces (empty: all) and rules of its roles."""


class RoleIndex:
    """The rules of each subject; made anew after a change of roles or bindings."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._grants: _Grants | None = None
        store.listeners.append(self._on_change)

    def rules_of(self, user: Json, namespace: str) -> Iterator[Json]:
        """Yield the rules that apply to a user, in the whole cluster or in the namespace."""
        groups = user.get("groups") or ()
        if _ADMINISTRATORS in groups:
            yield from EVERYTHING
            return
        if self._grants is None:
            self._grants = self._indexed()
        subjects = (("User", str(user.get("username"))), *(("Group", group) for group in groups))
        for subject in subjects:
            for scope, rules in self._grants.get(subject, ()):
                if scope in {"", namespace}:
                    yield from rules

    def rules_of_reference(self, binding: Json, namespace: str) -> Sequence[Json]:
        """Return the rules of the role that a binding names; none if there is no such role."""
        cluster_roles = {name_of(role): role for role in self._store.list("clusterroles")}
        return self._rules(binding, namespace, cluster_roles)

    def _on_change(self, kind: Resource, _change: ObjectChange) -> None:
        if kind.table in _TABLES:
            self._grants = None

    def _indexed(self) -> _Grants:
        cluster_roles = {name_of(role): role for role in self._store.list("clusterroles")}
        grants: _Grants = {}
        for table in ("clusterrolebindings", "rolebindings"):
            for binding in self._store.list(table):
                scope = namespace_of(binding) if table == "rolebindings" else ""
                rules = self._rules(binding, scope, cluster_roles)
                for subject in binding.get("subjects") or ():
                    grants.setdefault(_subject(subject), []).append((scope, rules))
        return grants

    def _rules(
        self, binding: Json, scope: str, cluster_roles: Mapping[str, Json]
    ) -> Sequence[Json]:
        """Return the rules of a binding's role; none if there is no such role."""
        reference = binding["roleRef"]
        if reference["kind"] == "ClusterRole":
            role = cluster_roles.get(reference["name"])
            return () if role is None else role_rules(role, cluster_roles)
        record = self._store.find("roles", scope, reference["name"])
        return () if record is None else record.obj.get("rules") or ()


def role_rules(role: Json, cluster_roles: Mapping[str, Json]) -> Sequence[Json]:
    """Return a ClusterRole's rules: for an aggregated one, those of the roles it selects."""
    selectors = list_at(role, "aggregationRule.clusterRoleSelectors")
    if not selectors:
        return role.get("rules") or ()
    chosen = [selector_requirements(selector) for selector in selectors]
    return [
        rule
        for other in cluster_roles.values()
        if other is not role
        and any(
            all(holds(metadata(other).get("labels") or {}) for holds in requirements)
            for requirements in chosen
        )
        for rule in role_rules(other, {})
    ]


def _subject(subject: Json) -> tuple[str, str]:
    if subject["kind"] == "ServiceAccount":
        return "User", f"{ACCOUNT}{subject.get('namespace')}:{subject['name']}"
    return ("Group" if subject["kind"] == "Group" else "User"), subject["name"]
