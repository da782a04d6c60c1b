"""Replies with amounts over time."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from msgspec import UNSET

from services.api.api_call import ApiCall
from services.api.projection.page_views import HistoryView
from services.api.projection.visible_cluster import all_namespaces
from services.api.reports.history import (
    ALL_CORES,
    CLUSTER,
    MEASURED,
    HistoryRange,
    RecordedValues,
    Subject,
    history_columns,
    period_of,
    range_of,
)
from shared.model.views.gpus import DeviceView

PERIOD = {"from": "RFC 3339", "to": "RFC 3339, exclusive"}
RANGE = {
    "range": "1h, 1d (the default) or 7d; without Prometheus, the last hour at most",
    "from": "RFC 3339, instead of a range",
    "to": "RFC 3339; now by default",
}


class HistorySource(Protocol):
    name: str
    longest: HistoryRange
    """Of a range that ends now."""

    async def read(self, subject: Subject, within: HistoryRange, now: float) -> RecordedValues:
        """Read a range that ends at `now`. Raises UnavailableError."""


async def history_view(
    call: ApiCall,
    source: HistorySource,
    subject: Subject,
    *,
    now: float,
    devices: Sequence[DeviceView] = (),
) -> HistoryView:
    """Leave out measured amounts of devices unless the viewer sees everything."""
    within, end = _range_and_end(call, source, now)
    of = replace(subject, devices=tuple(view.uuid for view in devices))
    recorded = await source.read(of, within, end)
    at, columns, waiting = history_columns(recorded, within)
    hidden = MEASURED if devices and call.visible is not all_namespaces else ()
    shown: Any = {name: values for name, values in columns.items() if name not in hidden}
    return HistoryView(
        range=within.name,
        start=end - within.span_s,
        end=end,
        source=source.name,
        memory_capacity=sum(view.memory_mib for view in devices) if devices else None,
        cores_capacity=ALL_CORES * len(devices) if devices else None,
        at=at,
        waiting=waiting if subject.kind == CLUSTER else UNSET,
        **shown,
    )


def _range_and_end(call: ApiCall, source: HistorySource, now: float) -> tuple[HistoryRange, float]:
    from_ms, to_ms = call.period_ms()
    if from_ms is None:
        requested = range_of(call.query.get("range", ""))
        return min(requested, source.longest, key=lambda within: within.span_s), now
    end = now if to_ms is None else min(to_ms / 1000, now)
    return period_of(from_ms / 1000, end), end
