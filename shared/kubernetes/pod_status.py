"""What a pod does and when, and its Events; pure."""

from datetime import datetime

from msgspec import Struct, field


def seconds_of(at: datetime | None) -> float | None:
    return None if at is None else at.timestamp()


class TerminatedState(Struct, rename="camel"):
    exit_code: int = 0
    reason: str = ""
    started_at: datetime | None = None
    finished_at: datetime | None = None


class WaitingState(Struct):
    reason: str = ""


class RunningState(Struct, rename="camel"):
    started_at: datetime | None = None


class TimedState(Struct):
    running: RunningState | None = None
    terminated: TerminatedState | None = None
    waiting: WaitingState | None = None

    @property
    def text(self) -> str:
        if self.terminated is not None:
            why = f": {self.terminated.reason}" if self.terminated.reason else ""
            return f"ended with code {self.terminated.exit_code}{why}"
        if self.waiting is not None:
            return f"waiting: {self.waiting.reason}" if self.waiting.reason else "waiting"
        return "running" if self.running else ""


class TimedContainerStatus(Struct, rename="camel"):
    name: str = ""
    state: TimedState = field(default_factory=TimedState)
    restart_count: int = 0


class TimedCondition(Struct, rename="camel"):
    type: str = ""
    status: str = ""
    reason: str = ""
    message: str = ""
    last_transition_time: datetime | None = None


class TimedStatus(Struct, rename="camel"):
    conditions: tuple[TimedCondition, ...] = ()
    container_statuses: tuple[TimedContainerStatus, ...] = ()
    init_container_statuses: tuple[TimedContainerStatus, ...] = ()


class TimedPod(Struct):
    status: TimedStatus = field(default_factory=TimedStatus)


class EventSource(Struct):
    component: str = ""


class EventSeries(Struct, rename="camel"):
    count: int = 0
    last_observed_time: datetime | None = None


class PodEvent(Struct, rename="camel"):
    """Written by a client of `v1` or of `events.k8s.io`."""

    type: str = ""
    reason: str = ""
    message: str = ""
    count: int | None = None
    last_timestamp: datetime | None = None
    event_time: datetime | None = None
    series: EventSeries | None = None
    source: EventSource = field(default_factory=EventSource)
    reporting_component: str = ""

    @property
    def at(self) -> float | None:
        last = self.series.last_observed_time if self.series else None
        return seconds_of(last or self.last_timestamp or self.event_time)
