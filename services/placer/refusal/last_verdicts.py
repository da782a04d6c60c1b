"""What pods were told last, so that they are not told the same again."""

from shared.model.events.pod_events import PodQueued
from shared.model.names import PodUid
from shared.model.placement import Refusal

REMEMBERED_VERDICTS = 65_536


class Told:
    """The reason that each waiting pod heard last; who heard longest ago is forgotten."""

    def __init__(self) -> None:
        self._reasons: dict[PodUid, str] = {}

    def forget(self, pod: PodUid) -> None:
        """Whatever the pod is told next is news."""
        self._reasons.pop(pod, None)

    def is_news(self, event: PodQueued, refusal: Refusal) -> bool:
        """Say whether the pod was told another verdict before, or none, or none that arrived."""
        pod = event.pod
        if self._reasons.pop(pod, None) == refusal.reason and not event.unexplained:
            self._reasons[pod] = refusal.reason
            return False
        if len(self._reasons) >= REMEMBERED_VERDICTS:
            del self._reasons[next(iter(self._reasons))]
        self._reasons[pod] = refusal.reason
        return True
