"""The watcher's Prometheus metrics."""

from prometheus_client import Gauge

from services.watcher.kept_objects import Room

LEFT_OUT = Gauge(
    "leasehold_watcher_left_out_namespaces",
    "Namespaces of which not all objects of this kind are kept: they are too many or too large, "
    "and pods that need others of them wait.",
    ["kind"],
)


def show_left_out(room: Room) -> None:
    LEFT_OUT.labels(room.kind).set(len(room.left_out))
