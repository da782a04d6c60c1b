"""Parses GPUQuota objects; pure."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Annotated

from msgspec import Meta, Struct, field

from shared.dialects.tencent.gpu_quota import POOL_LABEL
from shared.kubernetes.custom_kinds import convert_spec
from shared.model.bounds import MOST, check_bounds
from shared.model.errors import RequestError
from shared.model.lease import MIB
from shared.model.names import Namespace
from shared.model.quantity import parse_count
from shared.model.quota import Quota, QuotaLimits

KIND = "GPUQuota"
QUANTITY = "^[+]?([0-9]+([.][0-9]*)?|[.][0-9]+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]{1,2})?$"
Count = Annotated[int, Meta(ge=0, extra_json_schema={"format": "int64"})]
Memory = Annotated[
    int | str,
    Meta(extra_json_schema={"x-kubernetes-int-or-string": True, "pattern": QUANTITY, "minimum": 0}),
]


class LimitsSpec(Struct, frozen=True, forbid_unknown_fields=True, rename="camel", kw_only=True):
    """The most that may be used."""

    max_milli_gpu: Count | None = field(name="maxMilliGPU", default=None)
    max_core_percent: Count | None = None
    max_memory: Memory | None = None
    max_cards: Count | None = None


class ModelSpec(LimitsSpec, frozen=True, forbid_unknown_fields=True, rename="camel", kw_only=True):
    """The most that may be used of a model."""

    name: Annotated[str, Meta(min_length=1)]


class QuotaSpec(LimitsSpec, frozen=True, forbid_unknown_fields=True, rename="camel", kw_only=True):
    """The spec of a GPUQuota."""

    models: Annotated[tuple[ModelSpec, ...], Meta(max_length=64)] = ()
    only_models: bool = False
    model_label: str = ""
    pools: Annotated[tuple[str, ...], Meta(max_length=64)] = ()
    pool_label: str = POOL_LABEL


def parse_spec(namespace: Namespace, spec: object) -> Quota:
    """Parse a GPUQuota's spec. Raises RequestError naming the field and its valid values."""
    read = convert_spec(spec, QuotaSpec, f"{KIND} {namespace}")
    place = f"{KIND} {namespace}: spec"
    models = [
        (model.name, _limits(model, f"{place}.models[{number}]"))
        for number, model in enumerate(read.models)
    ]
    if len({name for name, _ in models}) < len(models):
        raise RequestError(f"{place}.models lists a model twice")
    quota = Quota(
        namespace=namespace,
        limits=_limits(read, place),
        models=tuple(models),
        only_models=read.only_models,
        model_label=read.model_label,
        pools=read.pools,
        pool_label=read.pool_label,
    )
    check_bounds(quota, place)
    return quota


def merge_sources(sources: Iterable[Mapping[Namespace, Quota]]) -> tuple[Quota, ...]:
    """Return one quota per namespace, from the first source that has one."""
    found: dict[Namespace, Quota] = {}
    for source in sources:
        for name, quota in source.items():
            found.setdefault(name, replace(quota, namespace=name))
    return tuple(found[name] for name in sorted(found))


def _limits(spec: LimitsSpec, place: str) -> QuotaLimits:
    try:
        memory = None if spec.max_memory is None else parse_count(spec.max_memory) // MIB
    except RequestError as error:
        raise RequestError(f"{place}.maxMemory: {error}") from error
    if memory is not None and memory < 0:
        raise RequestError(f"{place}.maxMemory must be at least 0")
    if memory == 0 and parse_count(spec.max_memory or 0):
        raise RequestError(
            f"{place}.maxMemory is a number of bytes: {spec.max_memory} is less than 1 MiB; for as "
            f"many MiB write {spec.max_memory}Mi, or 0 for none"
        )
    percent = spec.max_core_percent
    return QuotaLimits(
        cores_milli=_capped(None if percent is None else 10 * percent),
        milli_gpu=_capped(spec.max_milli_gpu),
        memory_mib=_capped(memory),
        cards=_capped(spec.max_cards),
    )


def _capped(limit: int | None) -> int | None:
    """Return a limit that can be counted to: a larger one has the same effect."""
    return None if limit is None else min(limit, MOST)
