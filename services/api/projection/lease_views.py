"""Devices, leases, shares and budgets as the API returns them; pure."""

from collections.abc import Iterable

from shared.model.budgets.balance import balance
from shared.model.budgets.budget import Accounts, Balance, Budget, minutes
from shared.model.devices.device import Device, DeviceMode, DeviceUse, MigLayout
from shared.model.leases.lease import Lease, Share
from shared.model.names import Namespace, NodeName
from shared.model.quantity import HOUR_S
from shared.model.views.budgets import BudgetView, IdleHolder
from shared.model.views.gpus import DeviceReservation, DeviceView, HeldShare
from shared.model.views.pods import FinishedPod

SHOWN_TO_ALL = (
    *("device", "index", "device_mib", "memory_mib", "cores_percent", "booked_cores"),
    *("slot", "mig", "init", "state", "memory", "compute", "held_text"),
)
"""What viewers see of a share whose namespace they may not see."""


def device_view(
    node: NodeName,
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
    return DeviceView.from_attributes(
        device,
        node=node,
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
    )


def _capacity(device: Device, live: MigLayout | None) -> int:
    """Return how many shares, or instances of the live layout, fit on the device."""
    if device.mode is not DeviceMode.MIG:
        return device.slots
    layouts = (live,) if live else device.layouts
    return max((len(layout.positions) for layout in layouts), default=0)


def held_share(lease: Lease, share: Share) -> HeldShare:
    return HeldShare.from_attributes(share, lease, claim=lease.claim is not None)


def hidden_share(share: HeldShare) -> HeldShare:
    """Return only how much of its device a share takes, and the state of its lease."""
    return HeldShare(**{name: getattr(share, name) for name in SHOWN_TO_ALL})


def idle_holder(share: HeldShare, now: float) -> IdleHolder:
    since = share.measured.idle_since if share.measured else None
    hours = max(now - (now if since is None else since), 0.0) / HOUR_S
    return IdleHolder(
        namespace=share.namespace,
        owner=f"Pod/{share.name}",
        name=share.name,
        shares=1,
        gpus=share.part_of_device,
        memory_mib=share.memory_mib,
        gpu_hours=hours * share.part_of_device,
        mib_hours=hours * share.memory_mib,
        idle_since=now if since is None else since,
    )


def finished_pod(lease: Lease, ended: float, reason: str) -> FinishedPod:
    """Describe a pod whose lease has ended, without shares of init containers."""
    shares = [share for share in lease.shares if not share.init]
    gpus = sum(share.part_of_device for share in shares)
    return FinishedPod.from_attributes(
        lease,
        claim=lease.claim is not None,
        devices=tuple(dict.fromkeys(share.device for share in shares)),
        gpus=round(gpus, 4),
        memory_mib=sum(share.memory_mib for share in shares),
        cores_percent=sum(share.booked_cores for share in shares),
        started=lease.created_at,
        ended=ended,
        reason=reason,
        gpu_hours=round(gpus * max(ended - lease.created_at, 0.0) / HOUR_S, 4),
    )


def balances(accounts: Accounts) -> list[Balance]:
    """Return the balance of each account that has a window."""
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


def uncharged_minutes(current_balances: Iterable[Balance], window: str) -> dict[Namespace, str]:
    """Return the GPU-minutes of running leases that reports do not contain yet, by namespace.

    Only of open windows, and of those only `window` unless it is empty.
    """
    uncharged = {
        balance_now.namespace: balance_now.window_used_units - balance_now.window.used_units
        for balance_now in current_balances
        if window in {"", balance_now.window.id}
    }
    return {name: minutes(units) for name, units in uncharged.items() if units}
