"""Budgets, reports and idle shares, as the API returns them; pure."""

import csv
import io
from collections.abc import Sequence
from typing import Any, Self

import msgspec

from shared.model.budgets.budget import BudgetState
from shared.model.names import Namespace, NodeName, PodUid


class ShowbackGroup(msgspec.Struct, frozen=True, kw_only=True):
    """GPU time of one group: minutes with three decimals, and exact units."""

    window: str
    namespace: str
    model: str
    lease_class: str = msgspec.field(name="class")
    gpu_minutes: str
    core_minutes: str
    mem_gib_minutes: str
    wall_minutes: str
    leases: int
    charged_in_budget: str
    charged_out_of_budget: str
    rollover: str
    grants: str
    units: str


class ShowbackView(msgspec.Struct, frozen=True, kw_only=True):
    rows: tuple[ShowbackGroup, ...] = ()

    def as_csv(self) -> str:
        text = io.StringIO()
        writer = csv.DictWriter(text, ShowbackGroup.__struct_encode_fields__, lineterminator="\n")
        writer.writeheader()
        writer.writerows(map(msgspec.to_builtins, self.rows))
        return text.getvalue()


class BudgetView(msgspec.Struct, frozen=True, kw_only=True):
    """A namespace's budget; units are text, since JSON numbers lose precision."""

    namespace: Namespace
    state: BudgetState
    window: str
    window_start_ms: int
    window_end_ms: int | None
    used_units: str
    allowed_units: str | None
    remaining_units: str | None
    used_gpu_minutes: str
    current_rate_milli_gpu: int
    leases: int
    problem: str
    exhausted_at: float | None
    """When it was, or will be at the current rate."""
    currency: str = ""
    """Of a budget in money: a unit of it is 60 GPU-minutes here."""


class BudgetsView(msgspec.Struct, frozen=True, kw_only=True):
    """The budgets of the namespaces that the viewer may see."""

    read_at: float
    budgets: tuple[BudgetView, ...]


class ReportView(ShowbackView, frozen=True, kw_only=True):
    """GPU time, and the GPU-minutes of running leases that it does not contain yet."""

    not_charged: dict[Namespace, str]


class IdleHolder(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What idle shares hold of GPUs: of one pod, of one owner of pods, or of all."""

    namespace: Namespace = Namespace("")
    owner: str = ""
    pod: PodUid = PodUid("")
    name: str = ""
    shares: int
    gpus: float
    memory_mib: int
    gpu_hours: float
    """Since the last use."""
    mib_hours: float
    idle_since: float

    @classmethod
    def total(cls, parts: Sequence[Self], now: float, **names: Any) -> Self:
        return cls(
            shares=sum(part.shares for part in parts),
            gpus=round(sum(part.gpus for part in parts), 4),
            memory_mib=sum(part.memory_mib for part in parts),
            gpu_hours=round(sum(part.gpu_hours for part in parts), 4),
            mib_hours=round(sum(part.mib_hours for part in parts), 1),
            idle_since=min((part.idle_since for part in parts), default=now),
            **names,
        )


class IdleView(msgspec.Struct, frozen=True, kw_only=True):
    """What pods have of devices that none of their running containers uses."""

    read_at: float
    idle_after_s: float
    pods: tuple[IdleHolder, ...]
    total: IdleHolder
    unmeasured_nodes: tuple[NodeName, ...] = ()
    problems: tuple[str, ...] = ()
