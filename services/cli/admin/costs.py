"""The command report --cost: what all GPUs were used for, and what that cost."""

import csv
import io
import sys
from collections import defaultdict
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from decimal import Decimal

from rich.console import Group, RenderableType
from rich.text import Text

from services.cli import terminal
from services.cli.api_client import ApiClient
from services.cli.commands import Report
from services.cli.formats import FittedTable
from shared.model.costs.cost_records import USES, CostLine, CostView
from shared.model.quantity import timestamp

FOCUS_COLUMNS = (
    *("BilledCost", "BillingAccountId", "BillingAccountName", "BillingCurrency"),
    *("BillingPeriodEnd", "BillingPeriodStart", "ChargeCategory", "ChargeClass"),
    *("ChargeDescription", "ChargeFrequency", "ChargePeriodEnd", "ChargePeriodStart"),
    *("ConsumedQuantity", "ConsumedUnit", "ContractedCost", "ContractedUnitPrice"),
    *("EffectiveCost", "InvoiceId", "InvoiceIssuerName", "ListCost", "ListUnitPrice"),
    *("PricingCategory", "PricingQuantity", "PricingUnit", "ProviderName", "PublisherName"),
    *("ResourceType", "ServiceCategory", "ServiceName", "ServiceSubcategory", "SkuId"),
    *("SkuPriceId", "SubAccountId", "SubAccountName"),
    "x_Use",
)
"""Of FOCUS 1.2, the FinOps Open Cost and Usage Specification."""


def report_costs(flags: Report) -> int:
    """Report what all GPUs were used for, and what that cost."""
    as_csv = flags.output == "csv"
    step = flags.step or ("day" if as_csv else "")
    query = {"from": flags.from_, "to": flags.to, "step": step}
    found = ApiClient(flags).get("/api/v1/reports/costs", CostView, **query)
    if as_csv:
        sys.stdout.write(focus_csv(found.lines, found.currency))
    else:
        terminal.show(flags.output, found, cost_table)
    return 0


def cost_table(found: CostView) -> RenderableType:
    """List GPU-hours by use, and the cost, of each namespace and model, and their sums."""
    if not found.lines:
        return Text("nothing is recorded of this time; the timekeeper records once a minute")
    rows: dict[tuple[float, str, str], dict[str, Decimal]] = {}
    total: dict[str, Decimal] = defaultdict(Decimal)
    for line in found.lines:
        key = (line.start, line.namespace, line.model)
        for each in (rows.setdefault(key, defaultdict(Decimal)), total):
            each[line.use] += Decimal(line.gpu_hours)
            each["cost"] += Decimal(line.cost or 0)
    table = FittedTable(
        *("FROM", "NAMESPACE", "MODEL", *(use.upper() for use in USES), found.currency or "COST"),
        least=("FROM", "UNMEASURED", "MODEL"),
    )
    for (start, name, model), row in (*rows.items(), ((found.start, "total", ""), total)):
        amounts = [f"{row[use]:.3f}" if row[use] else "-" for use in USES]
        cost = f"{row['cost']:.2f}" if found.currency else "-"
        table.add_row(timestamp(start), name or "(free)", model, *amounts, cost)
    notes = [
        f"GPU-hours from {timestamp(found.start)} to {timestamp(found.end)}",
        "prices: " + found.problem if found.problem else "",
        "" if found.currency or found.problem else "there are no prices: see --prices of the API",
    ]
    missing_s = round(found.end - found.start - found.recorded_s)
    if missing_s:
        notes.append(f"{missing_s} s of that are not recorded")
    return Group(table, *(Text(note, style="dim") for note in notes if note))


def focus_csv(lines: Iterable[CostLine], currency: str) -> str:
    """Return lines that have a price as CSV with the columns of FOCUS, and their use."""
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
        "BillingPeriodStart": timestamp(first.timestamp()),
        "BillingPeriodEnd": timestamp(after.timestamp()),
        "ChargePeriodStart": timestamp(line.start),
        "ChargePeriodEnd": timestamp(line.end),
        "ChargeCategory": "Usage",
        "ChargeFrequency": "Usage-Based",
        "ChargeDescription": f"{line.model}, {line.use}",
        "PricingCategory": "Standard",
        "ResourceType": "GPU",
        "ServiceCategory": "Compute",
        "ServiceName": "GPU sharing",
        "ServiceSubcategory": "Containers",
        "x_Use": line.use,
    }
    return {column: value for columns, value in values.items() for column in columns.split()}
