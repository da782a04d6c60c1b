"""Reads quotas: GPUQuota objects, a file of them, and gpu-admission's ConfigMap; pure.

The ConfigMap is kube-system/gpuquota with the key gpu_quota: per namespace, cards of each model and
the pools whose nodes it may use. A model's cards are hundredths of cores there, as pods ask for
them; models and pools are values of node labels; a model that is not named is not allowed, an empty
list of pools allows all, and a namespace that is not named has no quota.
https://github.com/tkestack/gpu-admission
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import yaml

from shared.model.errors import RequestError
from shared.model.lease import MIB
from shared.model.names import Namespace
from shared.model.quantity import MOST, parse_count
from shared.model.quota import Limits, Quota

API_VERSION = "leasehold.dev/v1alpha1"
KIND = "GPUQuota"
CONFIG_MAP = ("kube-system", "gpuquota")
CONFIG_KEY = "gpu_quota"
MODEL_LABEL = "gaia.tencent.com/gpu-model"
POOL_LABEL = "gaia.tencent.com/gpu-pool"


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


class _Cards(msgspec.Struct, frozen=True):
    quota: dict[str, int] | None = None
    pool: tuple[str, ...] | None = None


_config_of = msgspec.json.Decoder(dict[str, _Cards]).decode


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


def read_config(data: Mapping[str, str]) -> dict[Namespace, Quota]:
    """Read gpu-admission's ConfigMap. Raises RequestError for what it would not take either."""
    place = "/".join(CONFIG_MAP)
    if CONFIG_KEY not in data:
        raise RequestError(f"ConfigMap {place} has no key {CONFIG_KEY}")
    try:
        read = _config_of(data[CONFIG_KEY])
    except msgspec.DecodeError as error:
        raise RequestError(f"ConfigMap {place}: {CONFIG_KEY}: {error}") from error
    return {
        Namespace(name): Quota(
            namespace=Namespace(name),
            models=tuple(
                (model, Limits(cores_milli=min(max(0, 1000 * cards), MOST)))
                for model, cards in sorted((said.quota or {}).items())
            ),
            only_models=True,
            model_label=MODEL_LABEL,
            pools=said.pool or (),
            pool_label=POOL_LABEL,
        )
        for name, said in read.items()
    }


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


def _limits(read: _Limits, place: str) -> Limits:
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
    return Limits(
        cores_milli=_counted(None if percent is None else 10 * percent),
        milli_gpu=_counted(read.max_milli_gpu),
        memory_mib=_counted(memory),
        cards=_counted(read.max_cards),
    )


def _counted(limit: int | None) -> int | None:
    """Return a limit that can be counted to: one above that is as good as none."""
    return None if limit is None else min(limit, MOST)
