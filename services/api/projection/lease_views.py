"""Devices, leases, shares and budgets as the API returns them; pure."""

from collections.abc import Iterable, Iterator, Sequence

from msgspec import structs

from services.api.projection.page_views import BudgetSummary, NodeView
from shared.model.budgets.balance import balance
from shared.model.budgets.budget import (
    UNITS_PER_GPU_MINUTE,
    Accounts,
    Balance,
    Budget,
    minutes,
)
from shared.model.budgets.weights import milli_gpu, milli_gpu_of, shares_by_device
from shared.model.devices.device import Device, DeviceMode, DeviceUse, MigLayout
from shared.model.leases.lease import Lease, Share, bookings
from shared.model.names import Namespace, PodUid
from shared.model.quantity import HOUR_S, peak
from shared.model.views.budgets import BudgetView, IdleHolder
from shared.model.views.gpus import DevicePhase, DeviceReservation, DeviceView, HeldShare
from shared.model.views.pods import FinishedPod

SHOWN_TO_ALL = (
    *("device", "index", "device_mib", "memory_mib", "cores_percent", "booked_cores"),
    *("slot", "mig", "init", "state", "memory", "compute", "held_text"),
)
"""Viewers see it of a share in any namespace."""


def device_view(
    node: NodeView,
    device: Device,
    use: DeviceUse,
    *,
    excluded: str,
    shares: tuple[HeldShare, ...],
    reservation: DeviceReservation | None = None,
) -> DeviceView:
    use = use.taken
    layout = next((layout for layout in device.layouts if layout.name == use.layout), None)
    profiles = layout.profiles if layout else ()
    view = DeviceView.from_attributes(
        device,
        node=node.node,
        excluded=excluded,
        used_memory_mib=use.memory_mib,
        used_cores_percent=use.cores_percent,
        slots=_capacity(device, layout),
        used_shares=use.shares,
        fence=use.fence,
        sharing_mode=use.mode,
        layout=use.layout,
        instances=" + ".join(f"{profile.count} x {profile.name}" for profile in profiles),
        layouts=len(device.layouts),
        shares=shares,
        reservation=reservation,
        milli_gpu=sum(milli_gpu_of(held) for held in by_pod(shares)),
    )
    return structs.replace(view, phase=phase_of(view, node))


def phase_of(view: DeviceView, node: NodeView) -> DevicePhase:
    """Pages, commands and metrics count devices by it."""
    if not view.healthy:
        return DevicePhase.UNHEALTHY
    if closed_by(view, node):
        return DevicePhase.CLOSED
    if view.reservation:
        return DevicePhase.RESERVED
    return DevicePhase.LEASED if view.shares else DevicePhase.FREE


def closed_by(view: DeviceView, node: NodeView | None) -> str:
    """Return why a healthy device gets no new shares, or an empty text."""
    if node is None or node.deleted:
        return "the node is gone"
    return view.excluded or node.closed_by


def by_pod(shares: Iterable[HeldShare]) -> Iterator[list[HeldShare]]:
    pods: dict[PodUid, list[HeldShare]] = {}
    for share in shares:
        pods.setdefault(share.pod, []).append(share)
    yield from pods.values()


def is_idle(shares: Iterable[HeldShare]) -> bool:
    running = [share for share in shares if not share.init]
    return bool(running) and all(share.measured and share.measured.idle for share in running)


def unused_milli_gpu(shares: Sequence[HeldShare]) -> int | None:
    """Return 0 if a container uses the device now, or None if that is not measured."""
    measured = [share.measured for share in shares if not share.init]
    if not measured or None in measured:
        return None
    is_unused = all(usage and usage.idle_since is not None for usage in measured)
    return milli_gpu_of(shares) if is_unused else 0


def idle_milli_gpu(shares: Iterable[HeldShare]) -> int:
    return sum(milli_gpu_of(held) for held in by_pod(shares) if is_idle(held))


def _capacity(device: Device, live: MigLayout | None) -> int:
    if device.mode is not DeviceMode.MIG:
        return device.slots
    layouts = (live,) if live else device.layouts
    return max((len(layout.positions) for layout in layouts), default=0)


def held_share(lease: Lease, share: Share) -> HeldShare:
    return HeldShare.from_attributes(share, lease, claim=lease.claim is not None)


def hidden_share(share: HeldShare) -> HeldShare:
    return HeldShare(**{name: getattr(share, name) for name in SHOWN_TO_ALL})


def idle_holder(shares: Sequence[HeldShare], now: float) -> IdleHolder:
    running = [share for share in shares if not share.init]
    used_at = [share.measured.idle_since for share in running if share.measured]
    since = max((at for at in used_at if at is not None), default=now)
    hours = max(now - since, 0.0) / HOUR_S
    gpus = milli_gpu_of(shares) / 1000
    memory_mib = peak(((share.memory_mib, share.init) for share in shares), 0)
    return IdleHolder(
        namespace=running[0].namespace,
        owner=f"Pod/{running[0].name}",
        name=running[0].name,
        shares=len(running),
        gpus=gpus,
        memory_mib=memory_mib,
        gpu_hours=hours * gpus,
        mib_hours=hours * memory_mib,
        idle_since=since,
    )


def finished_pod(lease: Lease, ended: float, reason: str) -> FinishedPod:
    """Describe a pod by the most that it had of each device at one time."""
    taken = bookings(lease.shares)
    gpus = sum(map(milli_gpu, shares_by_device(lease).values())) / 1000
    return FinishedPod.from_attributes(
        lease,
        claim=lease.claim is not None,
        devices=tuple(booking.device for booking in taken),
        gpus=round(gpus, 4),
        memory_mib=sum(booking.memory_mib for booking in taken),
        cores_percent=sum(booking.cores_percent for booking in taken),
        started=lease.created_at,
        ended=ended,
        reason=reason,
        gpu_hours=round(gpus * max(ended - lease.created_at, 0.0) / HOUR_S, 4),
    )


def balances(accounts: Accounts) -> list[Balance]:
    return [
        balance(account, account.budget or Budget(namespace=account.namespace), accounts.now_ms)
        for account in accounts.accounts
        if account.windows
    ]


def budget_view(current: Balance) -> BudgetView:
    allowed = current.allowed_units
    remaining = current.remaining_units
    return BudgetView(
        namespace=current.namespace,
        state=current.state,
        window=current.window.id,
        window_start_ms=current.window.start_ms,
        window_end_ms=current.window.end_ms,
        used_units=str(current.used_units),
        allowed_units=None if allowed is None else str(allowed),
        remaining_units=None if remaining is None else str(remaining),
        used_gpu_minutes=minutes(current.used_units),
        current_rate_milli_gpu=current.current_rate_milli_gpu,
        leases=current.leases,
        problem=current.problem,
        exhausted_at=None if current.exhausted_at_ms is None else current.exhausted_at_ms / 1000,
        currency=current.currency,
    )


def budget_summary(current: Balance, reported: BudgetSummary | None) -> BudgetSummary:
    """What follows from the state is as reported last."""
    remaining = current.remaining_units
    return BudgetSummary(
        state=current.state,
        lease_class=reported.lease_class if reported else "",
        new_pods=reported.new_pods if reported else "",
        window=current.window.id,
        used_minutes=current.used_units / UNITS_PER_GPU_MINUTE,
        remaining_minutes=None if remaining is None else remaining / UNITS_PER_GPU_MINUTE,
        current_rate_milli_gpu=current.current_rate_milli_gpu,
        exhausted_at=None if current.exhausted_at_ms is None else current.exhausted_at_ms / 1000,
        at=current.at_ms / 1000,
        currency=current.currency,
    )


def uncharged_minutes(current_balances: Iterable[Balance], window: str) -> dict[Namespace, str]:
    """Return what running leases have used that reports do not contain yet, in open windows.

    An empty `window` is any.
    """
    uncharged = {
        balance_now.namespace: balance_now.window_used_units - balance_now.window.used_units
        for balance_now in current_balances
        if window in {"", balance_now.window.id}
    }
    return {name: minutes(units) for name, units in uncharged.items() if units}
