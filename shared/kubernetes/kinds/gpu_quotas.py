"""GPUQuota objects: their specs, and the quotas of namespaces; pure."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Annotated, ClassVar

from msgspec import Meta, field

from shared.dialects.tencent.gpu_quota import POOL_LABEL
from shared.kubernetes.kinds.custom_kinds import API_VERSION, Rule, RuledStruct, convert_spec
from shared.model.bounds import KEY, LONGEST_MODEL, MOST, MOST_GROUPS, SHORT
from shared.model.budgets.quota import Quota, QuotaLimits
from shared.model.errors import RequestError
from shared.model.leases.lease import MIB
from shared.model.names import Namespace
from shared.model.quantity import LONGEST, parse_duration_s, parse_quantity

KIND = "GPUQuota"
OBJECTS = f"/apis/{API_VERSION}/gpuquotas"
MOST_BYTES = 10**18
"""1E: the API server cuts off quantities of more than eight times as much."""
LABEL_VALUE = "^([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?$"
LABEL_KEY = (
    "^([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$"
)
RUN_TIME = "^([1-9][0-9]{0,4}h)?([1-9][0-9]{0,4}m)?([1-9][0-9]{0,4}s)?$"
Count = Annotated[int, Meta(ge=0, le=MOST // 10, extra_json_schema={"format": "int64"})]
Memory = Annotated[
    int | str,
    Meta(
        extra_json_schema={"x-kubernetes-int-or-string": True, "maxLength": LONGEST},
    ),
]
Duration = Annotated[str, Meta(min_length=2, max_length=18)]
LabelKey = Annotated[str, Meta(max_length=KEY)]
PoolName = Annotated[str, Meta(max_length=SHORT)]
_MEMORY = "quantity(string(self))"


class LimitsSpec(RuledStruct, frozen=True, forbid_unknown_fields=True):
    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            f"isQuantity(string(self)) && ({_MEMORY}.compareTo(quantity('0')) == 0 || "
            f"{_MEMORY}.compareTo(quantity('1Mi')) >= 0 && "
            f"{_MEMORY}.compareTo(quantity('1E')) < 0)",
            lambda memory: _is_memory(str(memory)),
            "must be a quantity of bytes such as 160Gi or 160G, not 160GB or 160: 0, or from 1Mi "
            "to below 1E",
            field="max_memory",
        ),
    )

    max_milli_gpu: Count | None = field(name="maxMilliGPU", default=None)
    max_core_percent: Count | None = None
    max_memory: Memory | None = None
    max_cards: Count | None = None


class ModelSpec(LimitsSpec, frozen=True, forbid_unknown_fields=True, kw_only=True):
    name: Annotated[str, Meta(min_length=1, max_length=LONGEST_MODEL)]


def _matching(pattern: str, field: str, message: str) -> Rule:
    return Rule(
        f"self.matches('{pattern}')",
        lambda text: re.fullmatch(pattern, text) is not None,
        message,
        field=field,
    )


class QuotaSpec(LimitsSpec, frozen=True, forbid_unknown_fields=True, kw_only=True):
    rules = (
        *LimitsSpec.rules,
        *(
            _matching(LABEL_KEY, name, "must be the key of a label such as nvidia.com/gpu.product")
            for name in ("model_label", "pool_label")
        ),
        Rule(
            f"self.all(pool, pool.matches('{LABEL_VALUE}'))",
            lambda pools: all(re.fullmatch(LABEL_VALUE, pool) for pool in pools),
            "must be values of a label such as training or a100.large",
            field="pools",
        ),
        *(
            _matching(RUN_TIME, name, "must be hours, minutes and seconds such as 8h, 90m or 2h30m")
            for name in ("default_run_time", "max_run_time")
        ),
        Rule(
            "!has(self.maxRunTime) || !has(self.defaultRunTime) || "
            f"!self.maxRunTime.matches('{RUN_TIME}') || "
            f"!self.defaultRunTime.matches('{RUN_TIME}') || "
            "duration(self.defaultRunTime) <= duration(self.maxRunTime)",
            lambda spec: (
                not (spec.max_run_time and spec.default_run_time)
                or parse_duration_s(spec.default_run_time) <= parse_duration_s(spec.max_run_time)
            ),
            "defaultRunTime must not be longer than maxRunTime",
        ),
    )

    models: Annotated[tuple[ModelSpec, ...], Meta(max_length=MOST_GROUPS)] = ()
    only_models: bool = False
    model_label: LabelKey | None = None
    pools: Annotated[tuple[PoolName, ...], Meta(max_length=MOST_GROUPS)] = ()
    pool_label: LabelKey = POOL_LABEL
    default_run_time: Duration | None = None
    max_run_time: Duration | None = None


NOTHING = QuotaLimits(cores_milli=0, milli_gpu=0, memory_mib=0, cards=0)
"""For a namespace whose quota is invalid and never was valid."""


def parse_spec(namespace: Namespace, spec: object) -> Quota:
    """Raises RequestError naming the field and its valid values."""
    read = convert_spec(spec, QuotaSpec, f"{KIND} {namespace}")
    if len({model.name for model in read.models}) < len(read.models):
        raise RequestError(f"{KIND} {namespace}: spec.models lists a model twice")
    return Quota(
        namespace=namespace,
        limits=_limits(read),
        models=tuple((model.name, _limits(model)) for model in read.models),
        only_models=read.only_models,
        model_label=read.model_label or "",
        pools=read.pools,
        pool_label=read.pool_label,
        default_run_s=_run_s(read.default_run_time),
        max_run_s=_run_s(read.max_run_time),
    )


def merge_sources(sources: Iterable[Mapping[Namespace, Quota]]) -> tuple[Quota, ...]:
    """Return the first quota of each namespace."""
    quotas: dict[Namespace, Quota] = {}
    for source in sources:
        for name, quota in source.items():
            quotas.setdefault(name, replace(quota, namespace=name))
    return tuple(quotas[name] for name in sorted(quotas))


def _limits(spec: LimitsSpec) -> QuotaLimits:
    percent = spec.max_core_percent
    return QuotaLimits(
        cores_milli=None if percent is None else 10 * percent,
        milli_gpu=spec.max_milli_gpu,
        memory_mib=None if spec.max_memory is None else _mib(str(spec.max_memory)),
        cards=spec.max_cards,
    )


def _run_s(text: str | None) -> int | None:
    return None if text is None else parse_duration_s(text)


def _is_memory(text: str) -> bool:
    try:
        amount = parse_quantity(text)
    except RequestError:
        return False
    return text == text.strip() and (amount == 0 or MIB <= amount < MOST_BYTES)


def _mib(text: str) -> int:
    return int(parse_quantity(text)) // MIB
