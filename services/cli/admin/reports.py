"""The command report: GPU time by group, costs, what idle shares hold, and promised starts."""

import csv
import io
from collections import defaultdict
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from decimal import Decimal

import msgspec
from msgspec import structs
from rich.console import Group, RenderableType
from rich.text import Text

from services.cli import terminal
from services.cli.api_client import ApiClient
from services.cli.commands import Report
from services.cli.formats import FittedTable, age, notes
from shared.kubernetes.paths import objects_path
from shared.model.bounds import printable_lines
from shared.model.budgets.cost_records import USES, CostLine, CostView
from shared.model.errors import RequestError
from shared.model.names import Namespace, NodeName, PodUid
from shared.model.quantity import timestamp
from shared.model.views.budgets import IdleHolder, IdleView, ReportView
from shared.model.views.promises import PromisesView
from shared.model.views.view import View


def report(flags: Report) -> int:
    if flags.idle:
        return report_idle(flags)
    if flags.cost:
        return report_costs(flags)
    if flags.starts:
        return report_starts(flags)
    if flags.window and (flags.from_ or flags.to):
        raise RequestError("--window reports all of a window: omit it, or --from and --to")
    api = ApiClient(flags)
    query = {"window": flags.window, "from": flags.from_, "to": flags.to}
    showback = api.get("/api/v1/reports/showback", ReportView, groupBy=flags.group_by, **query)
    if flags.output == "csv":
        print(printable_lines(showback.as_csv()), end="")
        return 0
    wide = flags.output == "wide"
    return terminal.present(flags, lambda: showback, lambda report: report_table(report, wide=wide))


def report_table(report: ReportView, *, wide: bool = False) -> RenderableType:
    amounts = ", ".join(f"{name} {amount}" for name, amount in report.not_charged.items())
    note = Text(
        "a lease's time is charged when it ends, or every 15 minutes; `leasehold budget` counts it "
        + (f"at once: not charged yet are {amounts} GPU-minutes" if amounts else "at once"),
        style="dim",
    )
    if not report.rows:
        return Group(Text("no GPU time was charged in this range"), note)
    columns = [
        *("window", "namespace", "model", "class", "gpu_minutes", "core_minutes"),
        *("mem_gib_minutes", "wall_minutes", "leases", "grants", "rollover"),
    ]
    table = FittedTable(
        *(name.upper().replace("_", " ") for name in columns),
        least=(
            *("ROLLOVER", "GRANTS", "MEM GIB MINUTES", "WALL MINUTES", "CORE MINUTES", "LEASES"),
            *("WINDOW", "CLASS"),
        ),
        wide=wide,
    )
    for row in map(msgspec.to_builtins, report.rows):
        row["window"] = _window_text(row["window"])
        table.add_row(*(str(row[name]) or "-" for name in columns))
    return Group(table, note)


def _window_text(window: str) -> str:
    period, _, start_ms = window.partition("+")
    return f"{period} from {timestamp(int(start_ms) // 1000)}" if start_ms.isdecimal() else period


FOCUS_COLUMNS = (
    *("BilledCost", "BillingAccountId", "BillingAccountName", "BillingCurrency"),
    *("BillingPeriodEnd", "BillingPeriodStart", "ChargeCategory", "ChargeClass"),
    *("ChargeDescription", "ChargeFrequency", "ChargePeriodEnd", "ChargePeriodStart"),
    *("ConsumedQuantity", "ConsumedUnit", "ContractedCost", "ContractedUnitPrice"),
    *("EffectiveCost", "InvoiceId", "InvoiceIssuerName", "ListCost", "ListUnitPrice"),
    *("PricingCategory", "PricingQuantity", "PricingUnit", "ProviderName", "PublisherName"),
    *("ServiceCategory", "ServiceName", "ServiceSubcategory", "SkuId", "SkuMeter"),
    *("SkuPriceDetails", "SkuPriceId", "SubAccountId", "SubAccountName"),
    "x_Use",
)
"""Of FOCUS 1.2, the FinOps Open Cost and Usage Specification."""


def report_costs(flags: Report) -> int:
    as_csv = flags.output == "csv"
    step = flags.step or ("day" if as_csv else "")
    query = {"from": flags.from_, "to": flags.to, "step": step}
    costs = ApiClient(flags).get("/api/v1/reports/costs", CostView, **query)
    if as_csv:
        print(printable_lines(focus_csv(costs.lines, costs.currency)), end="")
    else:
        terminal.show(flags.output, costs, cost_table)
    return 0


def cost_table(costs: CostView) -> RenderableType:
    if not costs.lines:
        return Text("nothing is recorded of this time; the timekeeper records once a minute")
    rows: dict[tuple[float, str, str], dict[str, Decimal]] = {}
    total: dict[str, Decimal] = defaultdict(Decimal)
    for line in costs.lines:
        key = (line.start, line.namespace, line.model)
        for sums in (rows.setdefault(key, defaultdict(Decimal)), total):
            sums[line.use] += Decimal(line.gpu_hours)
            sums["cost"] += Decimal(line.cost or 0)
    table = FittedTable(
        *("FROM", "NAMESPACE", "MODEL", *(use.upper() for use in USES), costs.currency or "COST"),
        least=("FROM", "UNMEASURED", "MODEL"),
    )
    for (start, name, model), row in (*rows.items(), ((costs.start, "total", ""), total)):
        amounts = [f"{row[use]:.3f}" if row[use] else "-" for use in USES]
        cost = f"{row['cost']:.2f}" if costs.currency else "-"
        table.add_row(timestamp(start), name or "(free)", model, *amounts, cost)
    remarks = [
        f"GPU-hours from {timestamp(costs.start)} to {timestamp(costs.end)}",
        "prices: " + costs.problem if costs.problem else "",
        "" if costs.currency or costs.problem else "there are no prices: see --prices of the API",
    ]
    missing_s = round(costs.end - costs.start - costs.recorded_s)
    if missing_s:
        remarks.append(f"{missing_s} s of that are not recorded")
    return Group(table, *(Text(remark, style="dim") for remark in remarks if remark))


def focus_csv(lines: Iterable[CostLine], currency: str) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, FOCUS_COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(_focus_row(line, currency) for line in lines if line.price is not None)
    return text.getvalue()


def _focus_row(line: CostLine, currency: str) -> dict[str, object]:
    first = datetime.fromtimestamp(line.start, UTC).replace(
        day=1, hour=0, minute=0, second=0, microsecond=0
    )
    after = (first + timedelta(days=31)).replace(day=1)
    values = {
        "BilledCost ContractedCost EffectiveCost ListCost": line.cost,
        "ContractedUnitPrice ListUnitPrice": line.price,
        "ConsumedQuantity PricingQuantity": line.gpu_hours,
        "ConsumedUnit PricingUnit": "GPU-Hours",
        "InvoiceIssuerName ProviderName PublisherName": "Leasehold",
        "BillingAccountId BillingAccountName": "leasehold",
        "BillingCurrency": currency,
        "SubAccountId SubAccountName": line.namespace,
        "SkuId SkuPriceId": line.model,
        "SkuMeter": "GPU time",
        "BillingPeriodStart": timestamp(first.timestamp()),
        "BillingPeriodEnd": timestamp(after.timestamp()),
        "ChargePeriodStart": timestamp(line.start),
        "ChargePeriodEnd": timestamp(line.end),
        "ChargeCategory": "Usage",
        "ChargeFrequency": "Usage-Based",
        "ChargeDescription": f"{line.model}, {line.use}",
        "PricingCategory": "Standard",
        "ServiceCategory": "Compute",
        "ServiceName": "GPU sharing",
        "ServiceSubcategory": "Containers",
        "x_Use": line.use,
    }
    return {column: value for columns, value in values.items() for column in columns.split()}


class IdleReport(View, frozen=True, kw_only=True):
    report: str = "idle"
    read_at: float
    idle_after_s: float
    holders: tuple[IdleHolder, ...]
    total: IdleHolder
    unmeasured_nodes: tuple[NodeName, ...] = ()


def by_owner(view: IdleView, owners: Mapping[PodUid, str]) -> IdleReport:
    grouped: dict[tuple[Namespace, str], list[IdleHolder]] = {}
    for pod in view.pods:
        grouped.setdefault((pod.namespace, owners.get(pod.pod) or pod.owner), []).append(pod)
    holders = [
        IdleHolder.total(held, view.read_at, namespace=namespace, owner=owner)
        for (namespace, owner), held in grouped.items()
    ]
    holders.sort(key=lambda holder: (-holder.gpu_hours, holder.namespace, holder.owner))
    return IdleReport(
        read_at=view.read_at,
        idle_after_s=view.idle_after_s,
        holders=tuple(holders),
        total=view.total,
        unmeasured_nodes=view.unmeasured_nodes,
    )


def idle_table(report: IdleReport, view: IdleView, *, wide: bool = False) -> RenderableType:
    if not report.holders:
        text = f"no share has been idle for {age(report.idle_after_s)}"
        return Group(Text(text), *notes(view))
    listed = FittedTable(
        *("NAMESPACE", "OWNER", "SHARES", "GPUS", "MIB", "GPU-HOURS", "MIB-HOURS", "SINCE"),
        least=("MIB-HOURS", "SHARES", "MIB", "SINCE"),
        wide=wide,
    )
    for holder in (*report.holders, structs.replace(report.total, owner="total")):
        listed.add_row(
            holder.namespace,
            holder.owner,
            str(holder.shares),
            f"{holder.gpus:.2f}",
            str(holder.memory_mib),
            f"{holder.gpu_hours:.2f}",
            f"{holder.mib_hours:.0f}",
            timestamp(holder.idle_since),
        )
    return Group(listed, *notes(view))


def report_idle(flags: Report) -> int:
    api = ApiClient(flags)
    view = api.get("/api/v1/reports/idle", IdleView, idle_after_s=flags.idle_after_s)
    namespaces = sorted({pod.namespace for pod in view.pods})
    owners = {
        PodUid(pod.uid): f"{owner.kind}/{owner.name}"
        for name in namespaces
        for pod in api.server.selected(objects_path(name, "pods"))
        for owner in pod.owner_references
        if owner.controller
    }
    terminal.show(
        flags.output,
        by_owner(view, owners),
        lambda report: idle_table(report, view, wide=flags.output == "wide"),
    )
    return 0


def report_starts(flags: Report) -> int:
    query = {"from": flags.from_, "to": flags.to}
    view = ApiClient(flags).get("/api/v1/reports/starts", PromisesView, **query)
    terminal.show(flags.output, view, starts_table)
    return 0


def starts_table(view: PromisesView) -> RenderableType:
    period = f"from {timestamp(view.start)} to {timestamp(view.end)}"
    if not view.namespaces:
        return Text(f"no promised start ended {period}")
    table = FittedTable(
        *("NAMESPACE", "KEPT", "WITHDRAWN", "NOT NEEDED", "KEPT %"),
        *("HALF KNOWN BEFORE", "9 OF 10 KNOWN BEFORE"),
        least=("NOT NEEDED",),
    )
    for sums in (*view.namespaces, structs.replace(view.total, namespace=Namespace("total"))):
        table.add_row(
            sums.namespace,
            *(str(count) for count in (sums.kept, sums.withdrawn, sums.not_needed)),
            "-" if sums.kept_percent is None else f"{sums.kept_percent:.1f}",
            *("-" if s is None else age(s) for s in (sums.half_known_s, sums.most_known_s)),
        )
    return Group(table, Text(f"promised starts that ended {period}", style="dim"))
