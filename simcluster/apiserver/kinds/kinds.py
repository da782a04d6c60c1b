"""The kinds one API server serves: those it is built with, and those that definitions add."""

from collections.abc import Iterable, Iterator, Sequence

from simcluster.apiserver.kinds.resources import BY_PATH, RESOURCES, Resource


class Kinds:
    """Kinds by their place in the API, and by the table in which the store keeps them."""

    def __init__(self) -> None:
        self._by_path = dict(BY_PATH)
        self._stored = dict(RESOURCES)
        self._added: dict[str, Sequence[Resource]] = {}

    def __getitem__(self, table: str) -> Resource:
        """Return the kind as which a table's objects are stored."""
        return self._stored[table]

    def __contains__(self, table: str) -> bool:
        return table in self._stored

    def __iter__(self) -> Iterator[Resource]:
        """Iterate over every kind in every version that is served."""
        return iter(self._by_path.values())

    def stored(self) -> Iterable[Resource]:
        """Return each table's kind."""
        return self._stored.values()

    def find(self, group: str, version: str, plural: str) -> Resource | None:
        """Return what is served at a place of the API, or None."""
        return self._by_path.get((group, version, plural))

    def of(self, table: str, api_version: object) -> Resource:
        """Return a table's kind in the version that an object names, else as it is stored."""
        versions = self._added.get(table, ())
        return next((k for k in versions if k.api_version == api_version), self._stored[table])

    def versions(self, table: str) -> Sequence[Resource]:
        """Return a table's kind in every version that is served."""
        return self._added.get(table) or (self._stored[table],)

    def install(self, table: str, stored: Resource, served: Sequence[Resource]) -> None:
        """Serve a table in these versions from now on, and in no others."""
        self._forget_paths(table)
        self._stored[table] = stored
        self._added[table] = served
        for kind in served:
            self._by_path[kind.group, kind.version, kind.plural] = kind

    def remove(self, table: str) -> None:
        """Serve a table no longer."""
        self._forget_paths(table)
        self._stored.pop(table, None)
        self._added.pop(table, None)

    def _forget_paths(self, table: str) -> None:
        for kind in self._added.get(table, ()):
            self._by_path.pop((kind.group, kind.version, kind.plural), None)
