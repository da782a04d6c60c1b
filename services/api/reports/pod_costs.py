"""What a pod's GPUs cost and draw: by the part of each that budgets weigh."""

from collections.abc import Iterable, Mapping
from fractions import Fraction

from shared.kubernetes.kinds.gpu_prices import Prices
from shared.model.budgets.weights import milli_gpu_of
from shared.model.devices.device import Hardware
from shared.model.names import DeviceUuid
from shared.model.quantity import HOUR_S
from shared.model.views.gpus import DeviceView, ShareView
from shared.model.views.leases import LeaseView
from shared.model.views.pods import FinishedPod, PodCost


def cost_of_lease(
    lease: LeaseView,
    devices: Mapping[DeviceUuid, DeviceView],
    hardware: Mapping[DeviceUuid, Hardware],
    prices: Prices,
    now: float,
) -> PodCost:
    """Idle is what it has of each GPU since its last use."""
    parts = {uuid: _part(lease.shares, uuid) for uuid in _devices_of(lease.shares)}
    gpus = sum(parts.values(), Fraction(0))
    hours = _hours(lease.created_at, now)
    idle_hours = sum(
        float(part) * min(_hours(_unused_since(lease.shares, uuid, now), now), hours)
        for uuid, part in parts.items()
    )
    price = _price(parts, devices, prices)
    return PodCost(
        gpu_hours=round(float(gpus) * hours, 4),
        idle_gpu_hours=round(idle_hours, 4),
        currency=prices.currency,
        per_hour=None if price is None else round(price, 6),
        so_far=None if price is None else round(price * hours, 6),
        power_w=_power(parts, devices, hardware),
    )


def cost_of_finished(
    pod: FinishedPod, devices: Mapping[DeviceUuid, DeviceView], prices: Prices
) -> PodCost:
    part = Fraction(pod.gpus).limit_denominator(10_000) / max(len(pod.devices), 1)
    price = _price(dict.fromkeys(pod.devices, part), devices, prices)
    hours = _hours(pod.started, pod.ended)
    return PodCost(
        gpu_hours=pod.gpu_hours,
        idle_gpu_hours=pod.idle_gpu_hours,
        currency=prices.currency,
        per_hour=None if price is None else round(price, 6),
        so_far=None if price is None else round(price * hours, 6),
    )


def _hours(start: float, end: float) -> float:
    return max(end - start, 0.0) / HOUR_S


def _devices_of(shares: Iterable[ShareView]) -> Iterable[DeviceUuid]:
    return dict.fromkeys(share.device for share in shares)


def _unused_since(shares: Iterable[ShareView], uuid: DeviceUuid, now: float) -> float:
    measured = [share.measured for share in shares if share.device == uuid and not share.init]
    since = [usage.idle_since if usage else None for usage in measured]
    return max((now if at is None else at for at in since), default=now)


def _part(shares: Iterable[ShareView], uuid: DeviceUuid) -> Fraction:
    return Fraction(milli_gpu_of(share for share in shares if share.device == uuid), 1000)


def _price(
    parts: Mapping[DeviceUuid, Fraction],
    devices: Mapping[DeviceUuid, DeviceView],
    prices: Prices,
) -> float | None:
    total = Fraction(0)
    for uuid, part in parts.items():
        price = prices.of(devices[uuid].model) if uuid in devices else None
        if price is None:
            return None
        total += part * price
    return float(total)


def _power(
    parts: Mapping[DeviceUuid, Fraction],
    devices: Mapping[DeviceUuid, DeviceView],
    hardware: Mapping[DeviceUuid, Hardware],
) -> float | None:
    """Return the pod's part of what its devices draw now; watts."""
    watts = 0.0
    for uuid, part in parts.items():
        sensors = hardware.get(uuid)
        if sensors is None or sensors.power_w is None or uuid not in devices:
            return None
        leased = Fraction(max(devices[uuid].milli_gpu, 1), 1000)
        watts += sensors.power_w * float(min(part / leased, Fraction(1)))
    return round(watts, 1)
