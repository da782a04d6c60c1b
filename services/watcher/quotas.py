"""Reads quotas from GPUQuota objects and from a file of them."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import yaml

from shared.dialects.tencent.gpu_quota import POOL_LABEL
from shared.model.errors import RequestError
from shared.model.lease import MIB
from shared.model.names import Namespace
from shared.model.quantity import MOST, parse_count
from shared.model.quota import Quota, QuotaLimits

API_VERSION = "leasehold.dev/v1alpha1"
KIND = "GPUQuota"


class _Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    max_core_percent: int | None = None
    max_milli_gpu: int | None = msgspec.field(name="maxMilliGPU", default=None)
    max_memory: str | int | None = None
    max_cards: int | None = None


class _Model(_Limits, frozen=True, forbid_unknown_fields=True, rename="camel"):
    name: str = ""


class _Spec(_Limits, frozen=True, forbid_unknown_fields=True, rename="camel"):
    models: tuple[_Model, ...] = ()
    only_models: bool = False
    model_label: str = ""
    pools: tuple[str, ...] = ()
    pool_label: str = POOL_LABEL


class _Metadata(msgspec.Struct, frozen=True):
    name: str


class _Object(msgspec.Struct, frozen=True, rename="camel"):
    api_version: str
    kind: str
    metadata: _Metadata
    spec: Any = None


def read_spec(namespace: Namespace, spec: Any) -> Quota:
    """Read a GPUQuota's spec. Raises RequestError that names the field and what may be there."""
    try:
        read = msgspec.convert(spec if spec is not None else {}, _Spec)
    except msgspec.ValidationError as error:
        raise RequestError(f"{KIND} {namespace}: spec: {error}") from error
    place = f"{KIND} {namespace}: spec"
    models = []
    for number, model in enumerate(read.models):
        if not model.name:
            raise RequestError(f"{place}.models[{number}].name must be a model's name")
        models.append((model.name, _limits(model, f"{place}.models[{number}]")))
    if len({name for name, _ in models}) < len(models):
        raise RequestError(f"{place}.models names a model twice")
    return Quota(
        namespace=namespace,
        limits=_limits(read, place),
        models=tuple(models),
        only_models=read.only_models,
        model_label=read.model_label,
        pools=read.pools,
        pool_label=read.pool_label,
    )


def load_file(path: Path) -> dict[Namespace, Quota]:
    """Read a file of GPUQuota objects; the one named `*` is for all namespaces without another.

    Raises RequestError naming the file and what is wrong in it.
    """
    try:
        items = [item for item in yaml.safe_load_all(path.read_text("utf-8")) if item is not None]
        return _by_namespace(map(_read_object, items))
    except OSError as error:
        raise RequestError(f"{path}: {error.strerror}; give a file of {KIND} objects") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RequestError(f"{path} is no YAML: {error}") from error
    except RequestError as error:
        raise RequestError(f"{path}: {error}") from error


def together(sources: Iterable[Mapping[Namespace, Quota]]) -> tuple[Quota, ...]:
    """Return one quota per namespace, that of the first source that has one."""
    found: dict[Namespace, Quota] = {}
    for source in sources:
        for name, quota in source.items():
            found.setdefault(name, replace(quota, namespace=name))
    return tuple(found[name] for name in sorted(found))


def _by_namespace(read: Iterable[Quota]) -> dict[Namespace, Quota]:
    quotas: dict[Namespace, Quota] = {}
    for quota in read:
        if quota.namespace in quotas:
            raise RequestError(f"{KIND} {quota.namespace} is there twice")
        quotas[quota.namespace] = quota
    return quotas


def _read_object(item: Any) -> Quota:
    try:
        read = msgspec.convert(item, _Object)
    except msgspec.ValidationError as error:
        raise RequestError(f"a {KIND} of {API_VERSION} is wanted: {error}") from error
    if (read.api_version, read.kind) != (API_VERSION, KIND):
        raise RequestError(
            f"a {KIND} of {API_VERSION} is wanted, not {read.kind} of {read.api_version}"
        )
    return read_spec(Namespace(read.metadata.name), read.spec)


def _limits(read: _Limits, place: str) -> QuotaLimits:
    memory = None if read.max_memory is None else parse_count(read.max_memory) // MIB
    for name, number in (
        ("maxCorePercent", read.max_core_percent),
        ("maxMilliGPU", read.max_milli_gpu),
        ("maxMemory", memory),
        ("maxCards", read.max_cards),
    ):
        if number is not None and number < 0:
            raise RequestError(f"{place}.{name} may not be below 0")
    percent = read.max_core_percent
    return QuotaLimits(
        cores_milli=_counted(None if percent is None else 10 * percent),
        milli_gpu=_counted(read.max_milli_gpu),
        memory_mib=_counted(memory),
        cards=_counted(read.max_cards),
    )


def _counted(limit: int | None) -> int | None:
    """Return a limit that can be counted to: one above that is as good as none."""
    return None if limit is None else min(limit, MOST)
