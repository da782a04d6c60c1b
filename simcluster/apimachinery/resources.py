"""Resources: the kinds that an API server serves, with their names and versions; pure."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

VERBS = ("create", "delete", "deletecollection", "get", "list", "patch", "update", "watch")


@dataclass(frozen=True, slots=True, kw_only=True)
class Resource:
    """One kind in one version: its place in the API, its names, and what it supports."""

    plural: str
    kind: str
    group: str = ""
    version: str = "v1"
    namespaced: bool = True
    short_names: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()
    has_status: bool = False
    selectable: tuple[str, ...] = ()
    subresources: tuple[str, ...] = ()
    verbs: tuple[str, ...] = VERBS
    singular_name: str = ""
    list_name: str = ""
    stored_as: str = ""
    """The table, if it is not the plural: another kind has that name, or versions share a table."""
    status_only: bool = False
    """Whether a write to `status` changes the status only, and not labels or annotations."""

    @property
    def api_version(self) -> str:
        """`v1` for the core group, `group/version` for the others."""
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def qualified(self) -> str:
        """The plural with its group, as error messages show it."""
        return f"{self.plural}.{self.group}" if self.group else self.plural

    @property
    def singular(self) -> str:
        """The singular name, which kubectl also accepts."""
        return self.singular_name or self.kind.lower()

    @property
    def list_kind(self) -> str:
        """The kind of the lists."""
        return self.list_name or f"{self.kind}List"

    @property
    def table(self) -> str:
        """The store's table: one for all versions of a kind."""
        return self.stored_as or self.plural


class Kinds:
    """The served kinds, by their path in the API and by the table of the store."""

    def __init__(self, builtin: Iterable[Resource]) -> None:
        rows = list(builtin)
        self._by_path = {(row.group, row.version, row.plural): row for row in rows}
        self._stored = {row.table: row for row in rows if not row.stored_as}
        self._added: dict[str, Sequence[Resource]] = {}

    def __getitem__(self, table: str) -> Resource:
        """Return a table's kind in its storage version."""
        return self._stored[table]

    def __contains__(self, table: str) -> bool:
        return table in self._stored

    def __iter__(self) -> Iterator[Resource]:
        """Iterate over all kinds in all served versions."""
        return iter(self._by_path.values())

    def storage_versions(self) -> Iterable[Resource]:
        """Return each table's kind in its storage version."""
        return self._stored.values()

    def find(self, group: str, version: str, plural: str) -> Resource | None:
        """Return the kind that is served at a path of the API, or None."""
        return self._by_path.get((group, version, plural))

    def in_version(self, table: str, api_version: object) -> Resource:
        """Return a table's kind in this version, or in its storage version if it lacks it."""
        versions = self._added.get(table, ())
        return next((k for k in versions if k.api_version == api_version), self._stored[table])

    def versions(self, table: str) -> Sequence[Resource]:
        """Return a table's kind in all served versions."""
        return self._added.get(table) or (self._stored[table],)

    def install(self, table: str, stored: Resource, served: Sequence[Resource]) -> None:
        """Serve a table in exactly these versions from now on."""
        self._forget_paths(table)
        self._stored[table] = stored
        self._added[table] = served
        for kind in served:
            self._by_path[kind.group, kind.version, kind.plural] = kind

    def remove(self, table: str) -> None:
        """Stop serving a table."""
        self._forget_paths(table)
        self._stored.pop(table, None)
        self._added.pop(table, None)

    def _forget_paths(self, table: str) -> None:
        for kind in self._added.get(table, ()):
            self._by_path.pop((kind.group, kind.version, kind.plural), None)
