"""The schemas in the CustomResourceDefinitions of our kinds, from the Structs of their specs."""

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from services.timekeeper.config.budget_spec import BudgetSpec
from services.watcher.quotas import QuotaSpec
from shared.kubernetes.custom_kinds import structural_schema
from tools.generate.pages import ROOT

FOLDER = ROOT / "shared" / "kubernetes" / "kinds"
SPECS = {"gpubudgets.yaml": BudgetSpec, "gpuquotas.yaml": QuotaSpec}
BEGIN, END = "            # generated: spec\n", "            # end\n"
DESCRIPTIONS = {
    "limitGPUMinutes": "GPU-minutes that may be used in a window. Without it, usage is only "
    "counted.",
    "policy": "The period of the limit, and how it is refilled.",
    "window": "The calendar period of a fixed policy.",
    "timeZone": "IANA name of the time zone of the calendar.",
    "rollover": "The unused part of a fixed window that is carried over to the next one.",
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
    "graceMinutes": "Minutes between exhaustion and eviction, if onExhausted is evict.",
    "onDebt.graceMinutes": "Minutes between the debt and eviction, if action is evict.",
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
}
"""Descriptions of fields by their paths, or by the last part of it for all fields of that name."""
RULES: Mapping[str, Mapping[str, Any]] = {
    "spec": {
        "!has(self.policy) || self.policy.type != 'bucket' || has(self.limitGPUMinutes)": (
            "a policy of type bucket requires limitGPUMinutes, the capacity of the bucket"
        ),
    },
    "policy": {
        "(self.type == 'bucket') == has(self.refillGPUMinutesPerHour)": (
            "refillGPUMinutesPerHour and type bucket require each other"
        ),
        "self.lengthHours * 60 >= self.bucketMinutes && self.lengthHours * 60 <= "
        "self.bucketMinutes * 1000": "lengthHours must be 1 to 1000 times bucketMinutes",
    },
    "timeZone": {
        "self != 'Local' && !self.contains(':') && "
        "timestamp('2000-01-01T00:00:00Z').getFullYear(self) > 0": (
            "timeZone must be the IANA name of a time zone such as UTC, Europe/Berlin or "
            "Asia/Shanghai"
        ),
    },
}
"""What the API server checks that no bound of a field says: rules with their messages."""
MAPS = {"models": {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]}}


def definitions() -> dict[Path, str]:
    """Return the definitions, with the part between the marks generated."""
    return {FOLDER / name: _filled(FOLDER / name, spec) for name, spec in SPECS.items()}


def _filled(path: Path, spec: type) -> str:
    head, _, rest = path.read_text().partition(BEGIN)
    schema = structural_schema(spec)
    described = _described(schema, "")
    if spec is BudgetSpec:
        described["x-kubernetes-validations"] = _rules("spec")
    text = yaml.safe_dump({"spec": described}, sort_keys=False, width=100)
    return f"{head}{BEGIN}{textwrap.indent(text, ' ' * 12)}{END}{rest.partition(END)[2]}"


def _rules(name: str) -> list[dict[str, str]]:
    return [{"rule": rule, "message": text} for rule, text in RULES[name].items()]


def _described(schema: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Return a schema with its descriptions and rules, and those of its fields."""
    name = path.rpartition(".")[2]
    found: dict[str, Any] = {}
    if text := DESCRIPTIONS.get(path.removeprefix("."), DESCRIPTIONS.get(name)):
        found["description"] = text
    found |= schema
    if name in RULES:
        found["x-kubernetes-validations"] = _rules(name)
    found |= MAPS.get(name, {})
    for fields in (found, found.get("items", {})):
        if "properties" in fields:
            fields["properties"] = {
                key: _described(each, f"{path}.{key}") for key, each in fields["properties"].items()
            }
    return found
