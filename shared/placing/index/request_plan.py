"""What placing derives from a request alone, kept for the next pods that request the same; pure."""

from collections.abc import Hashable
from functools import lru_cache

from shared.model.device import DeviceMode
from shared.model.request import PodRequest
from shared.placing.choice.device_choice import allowed_modes, device_chooser, device_key
from shared.placing.index.node_rank import RequestKind, request_kind

CACHED_PLANS = 8_192
CACHED_KINDS = 64


class PlannedKind:
    """A request's kind, and the headroom that it needs."""

    __slots__ = ("kind", "likely", "need")

    def __init__(self, kind: RequestKind, need: int) -> None:
        self.kind = self.likely = _one_object(kind)
        if kind.cores not in {0, 1, 100}:
            self.likely = _one_object(kind._replace(cores=1))
        """The kind that leaves the percentage of cores out: see `NodeIndex.likely_nodes`."""
        self.need = need


@lru_cache(CACHED_KINDS)
def _one_object(kind: RequestKind) -> RequestKind:
    """Return one object for equal kinds, which dictionaries find without comparing fields."""
    return kind


class RequestPlan:
    """The kinds of a request and the choice of its devices."""

    __slots__ = ("choose", "kinds", "refused", "share_kinds")

    def __init__(self, request: PodRequest) -> None:
        modes = allowed_modes(request)
        self.kinds = [PlannedKind(*request_kind(request, mode)) for mode in modes]
        """Its kind for each of `allowed_modes`."""
        self.share_kinds = [
            kind
            for kind, mode in zip(self.kinds, modes, strict=True)
            if mode is DeviceMode.HAMI_CORE
        ]
        """Those for shares that HAMi-core enforces."""
        self.choose = device_chooser(request)
        self.refused = False
        """No node fitted the last request: likely ones are not tried before the next is decided."""


class RequestPlans:
    """The plans of the latest kinds of requests."""

    def __init__(self) -> None:
        self._plans: dict[Hashable, RequestPlan] = {}

    def plan(self, request: PodRequest) -> RequestPlan:
        """Return the plan of a request."""
        key = (device_key(request), request.node_order)
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= CACHED_PLANS:
                del self._plans[next(iter(self._plans))]
            plan = self._plans[key] = RequestPlan(request)
        return plan
