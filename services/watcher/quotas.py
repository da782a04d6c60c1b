"""Parses GPUQuota objects; pure."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

import msgspec

from shared.dialects.tencent.gpu_quota import POOL_LABEL
from shared.model.bounds import MOST, check_bounds
from shared.model.errors import RequestError
from shared.model.lease import MIB
from shared.model.names import Namespace
from shared.model.quantity import parse_count
from shared.model.quota import Quota, QuotaLimits

API_VERSION = "leasehold.dev/v1alpha1"
KIND = "GPUQuota"


class _QuotaLimitsSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    max_core_percent: int | None = None
    max_milli_gpu: int | None = msgspec.field(name="maxMilliGPU", default=None)
    max_memory: str | int | None = None
    max_cards: int | None = None


class _QuotaModelSpec(_QuotaLimitsSpec, frozen=True, forbid_unknown_fields=True, rename="camel"):
    name: str = ""


class _QuotaSpec(_QuotaLimitsSpec, frozen=True, forbid_unknown_fields=True, rename="camel"):
    models: tuple[_QuotaModelSpec, ...] = ()
    only_models: bool = False
    model_label: str = ""
    pools: tuple[str, ...] = ()
    pool_label: str = POOL_LABEL


class _QuotaMetadata(msgspec.Struct, frozen=True):
    name: str


class _QuotaObject(msgspec.Struct, frozen=True, rename="camel"):
    api_version: str
    kind: str
    metadata: _QuotaMetadata
    spec: object = None


def parse_spec(namespace: Namespace, spec: object) -> Quota:
    """Parse a GPUQuota's spec. Raises RequestError naming the field and its valid values."""
    try:
        read = msgspec.convert(spec if spec is not None else {}, _QuotaSpec)
    except msgspec.ValidationError as error:
        raise RequestError(f"{KIND} {namespace}: spec: {error}") from error
    place = f"{KIND} {namespace}: spec"
    models = []
    for number, model in enumerate(read.models):
        if not model.name:
            raise RequestError(f"{place}.models[{number}].name must be the name of a model")
        models.append((model.name, _limits(model, f"{place}.models[{number}]")))
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


def by_namespace(parsed: Iterable[Quota]) -> dict[Namespace, Quota]:
    """Return quotas by namespace. Raises RequestError for two of one namespace."""
    quotas: dict[Namespace, Quota] = {}
    for quota in parsed:
        if quota.namespace in quotas:
            raise RequestError(f"{KIND} {quota.namespace} is defined twice")
        quotas[quota.namespace] = quota
    return quotas


def parse_object(item: object) -> Quota:
    """Parse a GPUQuota object. Raises RequestError for anything else."""
    try:
        read = msgspec.convert(item, _QuotaObject)
    except msgspec.ValidationError as error:
        raise RequestError(f"an object must be a {KIND} of {API_VERSION}: {error}") from error
    if (read.api_version, read.kind) != (API_VERSION, KIND):
        raise RequestError(
            f"an object must be a {KIND} of {API_VERSION}, not {read.kind} of {read.api_version}"
        )
    return parse_spec(Namespace(read.metadata.name), read.spec)


def _limits(spec: _QuotaLimitsSpec, place: str) -> QuotaLimits:
    try:
        memory = None if spec.max_memory is None else parse_count(spec.max_memory) // MIB
    except RequestError as error:
        raise RequestError(f"{place}.maxMemory: {error}") from error
    for name, number in (
        ("maxCorePercent", spec.max_core_percent),
        ("maxMilliGPU", spec.max_milli_gpu),
        ("maxMemory", memory),
        ("maxCards", spec.max_cards),
    ):
        if number is not None and number < 0:
            raise RequestError(f"{place}.{name} must be at least 0")
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
