"""What events.k8s.io/v1 demands of a new Event, beyond what core/v1 does."""

from collections.abc import Iterator

from simcluster.apiserver.crd.schema_check import shown
from simcluster.apiserver.http.errors import Cause
from simcluster.apiserver.storage.objects import Json

_REQUIRED = ("eventTime", "reportingController", "reportingInstance", "action", "reason")
_UNSET = {
    "firstTimestamp": "deprecatedFirstTimestamp",
    "lastTimestamp": "deprecatedLastTimestamp",
    "count": "deprecatedCount",
    "source": "deprecatedSource",
}


def new_event_causes(event: Json) -> Iterator[Cause]:
    """Check an event as it came in; errors name core's fields, as the real server's do."""
    for field in _REQUIRED:
        if not event.get(field):
            yield Cause("FieldValueRequired", "Required value", field)
    if event.get("type") not in {"Normal", "Warning"}:
        text = f'Invalid value: "": has invalid value: {event.get("type") or ""}'
        yield Cause("FieldValueInvalid", text, "type")
    for field, name in _UNSET.items():
        if event.get(name):
            yield Cause("FieldValueInvalid", 'Invalid value: "": needs to be unset', field)
    series = event.get("series")
    if isinstance(series, dict) and int(series.get("count") or 0) < 2:
        text = f"Invalid value: {shown(series.get('count'))}: should be at least 2"
        yield Cause("FieldValueInvalid", text, "series.count")
