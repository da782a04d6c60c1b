"""The parameters in a request's query: options of writes, lists and watches; pure."""

from collections.abc import Mapping
from dataclasses import dataclass

from simcluster.apimachinery.errors import ApiError

TRUE = frozenset({"1", "t", "T", "true", "TRUE", "True"})


def non_negative_int(query: Mapping[str, str], name: str) -> int | None:
    """Return a whole number of at least 0; None if absent; 400 for anything else."""
    text = query.get(name, "")
    if not text:
        return None
    if not text.isdecimal():
        raise ApiError.bad_request(f"{name} must be a whole number of at least 0, got {text!r}")
    return int(text)


def is_set(query: Mapping[str, str], name: str) -> bool:
    """Return whether a flag is set; a flag without a value is set."""
    return name in query and (query[name] in TRUE or not query[name])


def is_dry_run(query: Mapping[str, str], body: Mapping[str, object] | None = None) -> bool:
    """Return whether the write is a dry run; 400 for any other value than `All`."""
    values = [query["dryRun"]] if query.get("dryRun") else list((body or {}).get("dryRun") or ())  # type: ignore[call-overload]
    if any(value != "All" for value in values):
        raise ApiError.bad_request(f'dryRun: Unsupported value: {values}: supported values: "All"')
    return bool(values)


@dataclass(frozen=True, slots=True)
class ListOptions:
    """The query of lists and watches; `version` is None when unset."""

    labels: str
    fields: str
    limit: int
    continue_token: str
    version: int | None
    match: str
    watch: bool
    bookmarks: bool
    initial_events: bool | None
    timeout_s: int | None

    @classmethod
    def parse(cls, query: Mapping[str, str]) -> "ListOptions":
        """Parse the query; 400 for contradictions."""
        initial = is_set(query, "sendInitialEvents") if "sendInitialEvents" in query else None
        options = cls(
            labels=query.get("labelSelector", ""),
            fields=query.get("fieldSelector", ""),
            limit=non_negative_int(query, "limit") or 0,
            continue_token=query.get("continue", ""),
            version=non_negative_int(query, "resourceVersion"),
            match=query.get("resourceVersionMatch", ""),
            watch=is_set(query, "watch"),
            bookmarks=is_set(query, "allowWatchBookmarks"),
            initial_events=initial,
            timeout_s=non_negative_int(query, "timeoutSeconds"),
        )
        options.check()
        return options

    def check(self) -> None:
        """Refuse contradictory options."""
        if self.match not in {"", "Exact", "NotOlderThan"}:
            raise ApiError.bad_request(f"resourceVersionMatch: unsupported value {self.match!r}")
        if self.match and self.version is None and not self.watch:
            raise ApiError.bad_request(
                "resourceVersionMatch is forbidden unless resourceVersion is provided"
            )
        if self.match == "Exact" and not self.version:
            raise ApiError.bad_request(
                'resourceVersionMatch "Exact" is forbidden for resourceVersion "0"'
            )
        if self.continue_token and self.version:
            raise ApiError.bad_request(
                "specifying resource version is not allowed when using continue"
            )
        if self.watch and (self.initial_events is not None) != (self.match == "NotOlderThan"):
            raise ApiError.bad_request(
                "sendInitialEvents and resourceVersionMatch=NotOlderThan must be set together"
            )
