"""Quotas as the ledger's functions store them, with used and charged amounts; pure."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import msgspec

from shared.ledger.rows.unreadable import readable
from shared.model.budgets.quota import Quota, QuotaExcess, QuotaLimits, QuotaTotals, QuotaUsage
from shared.model.names import DeviceUuid, Namespace

T = TypeVar("T")

_unpack = msgspec.msgpack.Decoder().decode


def encode_quota(quota: Quota) -> list[object]:
    """Pack a quota: its name, and its values (`R_*` in `functions/common/quota.lua`)."""
    models = [(name, _encode_limits(limits)) for name, limits in quota.models]
    rule = (
        _encode_limits(quota.limits),
        models,
        quota.only_models,
        quota.model_label,
        quota.pools,
        quota.pool_label,
        -1 if quota.max_run_s is None else quota.max_run_s,
    )
    return [quota.namespace, rule]


def decode_excesses(rows: Any) -> tuple[QuotaExcess, ...]:
    """Decode which quotas were exceeded; Lua packs an empty list like an empty map."""
    return tuple(
        QuotaExcess(
            measure=measure,
            model=model,
            limit=int(limit),
            used=int(held),
            requested=int(requested),
            label=label,
            values=tuple(values),
            by_gang=int(by_gang[0]) if by_gang else 0,
        )
        for measure, model, limit, held, requested, label, values, *by_gang in rows
    )


def decode_quota_totals(
    quotas: Sequence[bytes], held: Sequence[bytes], charges: Sequence[bytes]
) -> QuotaTotals:
    """Decode quotas with used and charged amounts."""
    return QuotaTotals(
        quotas=dict(_decoded(quotas, lambda name, rule: (name, _decode_quota(name, rule)))),
        used=dict(_decoded(held, lambda name, rows: (name, _by_model(rows, _decode_usage)))),
        charges=dict(_decoded(charges, _decode_charged)),
    )


def _decode_charged(pod: Any, charge: Any) -> tuple[Any, tuple[Namespace, dict[str, QuotaUsage]]]:
    namespace, rows = charge
    return pod, (Namespace(namespace), _by_model(rows, _decode_charge))


def _by_model(rows: Any, decode: Callable[[Any], QuotaUsage]) -> dict[str, QuotaUsage]:
    return {model: decode(row) for model, row in dict(rows).items()}


def _decoded(flat: Sequence[bytes], decode: Callable[[Any, Any], T]) -> Iterator[T]:
    """Decode pairs of names and values; what cannot be read is left out."""
    pairs = zip(flat[::2], flat[1::2], strict=True)
    return readable(lambda pair: decode(pair[0].decode(), _unpack(pair[1])), pairs)


def _encode_limits(limits: QuotaLimits) -> list[int]:
    listed = (limits.cores_milli, limits.milli_gpu, limits.memory_mib, limits.cards)
    return [-1 if limit is None else limit for limit in listed]


def _decode_limits(row: Sequence[int]) -> QuotaLimits:
    cores, milli, memory, cards = (None if limit < 0 else limit for limit in row)
    return QuotaLimits(cores_milli=cores, milli_gpu=milli, memory_mib=memory, cards=cards)


def _decode_quota(name: str, rule: Sequence[Any]) -> Quota:
    limits, models, only, model_label, pools, pool_label, *more = rule
    return Quota(
        namespace=Namespace(name),
        limits=_decode_limits(limits),
        models=tuple((model, _decode_limits(row)) for model, row in models),
        only_models=only,
        model_label=model_label,
        pools=tuple(pools),
        pool_label=pool_label,
        max_run_s=next((each for each in more if each >= 0), None),
    )


def _decode_usage(row: Sequence[Any]) -> QuotaUsage:
    cores, milli, memory, devices = row
    counts = {DeviceUuid(uuid): int(count) for uuid, count in dict(devices).items()}
    return QuotaUsage(
        cores_milli=int(cores), milli_gpu=int(milli), memory_mib=int(memory), devices=counts
    )


def _decode_charge(row: Sequence[Any]) -> QuotaUsage:
    cores, milli, memory, devices = row
    return _decode_usage((cores, milli, memory, dict.fromkeys(devices, 1)))
