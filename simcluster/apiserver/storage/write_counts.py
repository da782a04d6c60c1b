"""How often each object was written, and how: tests assert that binding a pod is one write."""

from collections import Counter, defaultdict

from simcluster.apiserver.storage.objects import Json


class WriteCounter:
    """Counts accepted writes per object and verb, such as `create/binding` or `patch/status`.

    Requests that came over HTTP and were refused are counted as `create/binding refused 409`.
    """

    def __init__(self) -> None:
        self._counts: dict[str, Counter[str]] = defaultdict(Counter)

    def count(self, resource: str, key: str, verb: str) -> None:
        """Count one write; `key` is `namespace/name`, or the name alone."""
        self._counts[f"{resource}/{key}"][verb] += 1

    def of(self, resource: str, key: str) -> dict[str, int]:
        """Return the writes of one object by verb."""
        return dict(self._counts.get(f"{resource}/{key}", {}))

    def everything(self, prefix: str = "") -> Json:
        """Return the writes of all objects whose path starts with `prefix`."""
        return {
            path: dict(counts) for path, counts in self._counts.items() if path.startswith(prefix)
        }
