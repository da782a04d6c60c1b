"""What placing derives from a request alone, kept for the next pods that request the same; pure."""

from collections.abc import Hashable

from shared.model.device import DeviceMode
from shared.model.request import PodRequest
from shared.placing.choice.device_choice import allowed_modes, device_chooser, device_key
from shared.placing.index.node_rank import request_kind

CACHED_PLANS = 8_192


class RequestPlan:
    """The kinds of a request and the choice of its devices."""

    __slots__ = ("choose", "kinds", "refused", "share_kinds")

    def __init__(self, request: PodRequest) -> None:
        modes = allowed_modes(request)
        self.kinds = [request_kind(request, mode) for mode in modes]
        """Its kind and the headroom that it needs, for each of `allowed_modes`."""
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
