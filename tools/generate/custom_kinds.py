"""The schemas in the CustomResourceDefinitions of our kinds, from the Structs of their specs."""

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from msgspec.inspect import CollectionType, Metadata, StructType, Type, UnionType, type_info

from services.timekeeper.config.budget_spec import BudgetSpec, BudgetStatus
from services.timekeeper.report.budget_reports import QuotaStatus
from shared.kubernetes.kinds.custom_kinds import (
    NamespaceObject,
    RuledStruct,
    structural_schema,
)
from shared.kubernetes.kinds.gpu_quotas import QuotaSpec
from tools.generate.pages import ROOT

FOLDER = ROOT / "shared" / "kubernetes" / "kinds"
KINDS = {
    "gpubudgets.yaml": ("The GPU time that a namespace may use.", BudgetSpec, BudgetStatus),
    "gpuquotas.yaml": (
        "The most that a namespace's live leases may use together, by any resource names.",
        QuotaSpec,
        QuotaStatus,
    ),
}
RULES = "x-kubernetes-validations"
BEGIN, END = "        # generated: schema\n", "        # end\n"
DESCRIPTIONS = {
    "limitGPUMinutes": "GPU-minutes that may be used in a window. Without it, usage is only "
    "counted.",
    "limitMoney": "Money that may be used in a window, by the prices of GPUs.",
    "amount": "At most two decimals, in quotation marks if there are any.",
    "currency": "Three letters, that of the prices.",
    "policy": "The period of the limit, and how it is refilled.",
    "policy.type": "fixed: a calendar period; sliding: the last hours; bucket: an amount that is "
    "refilled every hour.",
    "policy.window": "The calendar period of a fixed policy.",
    "timeZone": "IANA name of the time zone of the calendar.",
    "rollover": "The unused part of a fixed window that is carried over to the next one.",
    "rollover.percent": "The percentage of it that is carried over.",
    "rollover.maxGPUMinutes": "The most that is carried over.",
    "lengthHours": "Length of a sliding window.",
    "bucketMinutes": "Resolution of a sliding window.",
    "refillGPUMinutesPerHour": "GPU-minutes that a bucket policy adds every hour, up to the limit.",
    "weightMode": "How fractions of cores and of memory are combined to one weight.",
    "uncappedCorePercent": "The percentage of cores that a share without a core limit counts as; "
    "without it, its fraction of the memory.",
    "warnAt": "Percentages of the limit at which the state becomes warning.",
    "debtLimitGPUMinutes": "GPU-minutes below zero at which the state becomes overdrawn; without "
    "it, never.",
    "hysteresisGPUMinutes": "GPU-minutes that must remain before the state exhausted ends.",
    "onExhausted": "The effect of an exhausted budget on pods.",
    "onDebt": "The effect of a debt on pods that run.",
    "onDebt.action": "none, or evict, which requires debtLimitGPUMinutes.",
    "onDebt.graceMinutes": "Minutes between the debt and eviction, if action is evict.",
    "graceMinutes": "Minutes between exhaustion and eviction, if onExhausted is evict.",
    "share": "The weight of the namespace if several compete.",
    "maxMilliGPU": "Thousandths of GPUs. A share counts by its larger fraction of cores or memory.",
    "maxCorePercent": "Percentages of GPU cores; a share without cores counts by its fraction of "
    "the memory.",
    "maxMemory": "GPU memory, as a quantity such as 80Gi.",
    "maxCards": "GPUs on which the namespace has leases; two shares of one GPU count once.",
    "models": "Limits on GPUs of a model.",
    "models.name": "Part of the GPU's product name, or a value of modelLabel.",
    "onlyModels": "The namespace may not use GPUs of other models.",
    "modelLabel": "The node label with the model; without it, the product name of the GPU.",
    "pools": "Only nodes of these pools; all nodes if empty.",
    "poolLabel": "The node label with the pool.",
    "defaultRunTime": "The maximum run time of pods that set none, such as 8h or 2h30m; without "
    "it, maxRunTime.",
    "maxRunTime": "The longest maximum run time of a pod, such as 24h.",
    "conditions.type": "Applied or Ready.",
    "conditions.status": "True, False or Unknown.",
    "conditions.reason": "Why it has this status, in one word.",
    "conditions.message": "Why it has this status, and what to do.",
    "conditions.lastTransitionTime": "When the status changed last.",
    "observedGeneration": "The generation of the object that this is about.",
    "conditions": "Applied: whether the spec of observedGeneration is in force. Ready is the same, "
    "for tools that wait for it.",
    "specInForce": "The last valid spec, which is in force.",
    "state": "ok, warning, exhausted, overdrawn or invalid.",
    "since": "When the state began.",
    "status.window": "The window that is open, in Unix milliseconds.",
    "windowUsedUnits": "What was used in the open window alone; 60,000,000 units are a GPU-minute.",
    "usedUnits": "usedGPUMinutes, exactly.",
    "grantedUnits": "Grants in the open window.",
    "rolloverUnits": "What was carried over from the window before.",
    "remainingUnits": "remainingGPUMinutes, exactly.",
    "usedGPUMinutes": "GPU-minutes used in the window; of a budget in money, money with the "
    "currency.",
    "remainingGPUMinutes": "GPU-minutes left; absent without a limit.",
    "currentRateMilliGPU": "Thousandths of GPUs in use.",
    "leases": "Leases that are charged.",
    "projectedExhaustion": "When the budget is used up at the current rate.",
    "checkpointAt": "When this was written, in Unix milliseconds.",
    "status.window.id": "The name of the window, such as 2026-11 for a month.",
    "status.window.start": "When it began, in Unix milliseconds.",
    "status.window.end": "When it ends, in Unix milliseconds; absent if it has no end.",
    "status.used": "What the namespace's leases hold, as the quota counts it.",
    "used.milliGPU": "Thousandths of GPUs.",
    "used.corePercent": "Percentages of GPU cores.",
    "used.memory": "GPU memory, as a quantity.",
    "used.cards": "GPUs on which the namespace has leases.",
    "spec": "What is to be in force.",
    "status": "What is in force, and what is used.",
}
"""Descriptions of fields by the ends of their paths; the first one counts."""
MAPS = {
    name: {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key]}
    for name, key in {"models": "name", "conditions": "type"}.items()
}


def definitions() -> dict[Path, str]:
    """Return the definitions, with the part between the marks generated."""
    return {FOLDER / name: _filled(FOLDER / name, *kinds) for name, kinds in KINDS.items()}


def _filled(path: Path, text: str, spec: type, status: type) -> str:
    schema = {
        "description": text,
        "type": "object",
        "required": ["spec"],
        "properties": {
            "spec": _with_rules(_described(structural_schema(spec), "spec"), type_info(spec)),
            "status": _described(structural_schema(status), "status"),
        },
        **_cel_rules(NamespaceObject),
    }
    written = yaml.safe_dump({"openAPIV3Schema": schema}, sort_keys=False, width=100)
    head, _, rest = path.read_text().partition(BEGIN)
    return f"{head}{BEGIN}{textwrap.indent(written, ' ' * 8)}{END}{rest.partition(END)[2]}"


def _described(schema: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Return a schema with its descriptions, and those of its fields; raise if one has none."""
    described = next(suffix for suffix in DESCRIPTIONS if f".{path}".endswith(f".{suffix}"))
    described_schema = {"description": DESCRIPTIONS[described], **schema}
    described_schema |= MAPS.get(path.rpartition(".")[2], {})
    for fields in (described_schema, described_schema.get("items", {})):
        if "properties" in fields:
            fields["properties"] = {
                key: _described(value, f"{path}.{key}")
                for key, value in fields["properties"].items()
            }
    return described_schema


def _with_rules(schema: dict[str, Any], kind: Type) -> dict[str, Any]:
    """Return the schema of a type with the rules of its Structs."""
    if isinstance(kind, UnionType):
        kind = kind.types[0]
    if isinstance(kind, Metadata):
        kind = kind.type
    if isinstance(kind, CollectionType):
        return {**schema, "items": _with_rules(schema["items"], kind.item_type)}
    if not isinstance(kind, StructType):
        return schema
    fields = {
        field.encode_name: _with_rules(schema["properties"][field.encode_name], field.type)
        | _cel_rules(kind.cls, field.name)
        for field in kind.fields
    }
    return {**schema, "properties": fields, **_cel_rules(kind.cls)}


def _cel_rules(kind: type, field: str = "") -> dict[str, list[dict[str, str]]]:
    """Return the rules of a Struct about itself, or about one of its fields."""
    rules = kind.rules if issubclass(kind, RuledStruct) else ()
    written = [{"rule": it.cel, "message": it.message} for it in rules if it.field == field]
    return {RULES: written} if written else {}
