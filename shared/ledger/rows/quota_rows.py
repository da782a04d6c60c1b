"""Quotas as the ledger's functions store them, with used and charged amounts; pure."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from msgspec import structs

from shared.ledger.records import (
    NO_LIMIT,
    ChargeRecord,
    ChargesRecord,
    ExcessRecord,
    LimitsRecord,
    QuotaRecord,
    QuotaRowRecord,
    UsageRecord,
)
from shared.ledger.rows.unreadable import readable
from shared.model.budgets.quota import Quota, QuotaExcess, QuotaLimits, QuotaTotals, QuotaUsage
from shared.model.names import DeviceUuid, Namespace

T = TypeVar("T")

_decode_quota = msgspec.msgpack.Decoder(QuotaRecord).decode
_decode_used = msgspec.msgpack.Decoder(dict[str, UsageRecord] | tuple[()]).decode
_decode_charges = msgspec.msgpack.Decoder(ChargesRecord).decode


def quota_row(quota: Quota) -> QuotaRowRecord:
    record = QuotaRecord(
        limits=_limits_record(quota.limits),
        models=tuple((name, _limits_record(limits)) for name, limits in quota.models),
        only_models=quota.only_models,
        model_label=quota.model_label,
        pools=quota.pools,
        pool_label=quota.pool_label,
        max_run_s=_stored_limit(quota.max_run_s),
    )
    return QuotaRowRecord(quota.namespace, record)


def as_excess(record: ExcessRecord) -> QuotaExcess:
    return QuotaExcess(**structs.asdict(record))


def decode_quota_totals(
    quotas: Sequence[bytes], held: Sequence[bytes], charges: Sequence[bytes]
) -> QuotaTotals:
    return QuotaTotals(
        quotas=dict(_decoded(quotas, lambda name, value: (name, _quota(name, value)))),
        used=dict(_decoded(held, lambda name, value: (name, _used(value)))),
        charges=dict(_decoded(charges, lambda pod, value: (pod, _charged(value)))),
    )


def _decoded(flat: Sequence[bytes], decode: Callable[[Any, bytes], T]) -> Iterator[T]:
    """Leave out what cannot be read."""
    pairs = zip(flat[::2], flat[1::2], strict=True)
    return readable(lambda pair: decode(pair[0].decode(), pair[1]), pairs)


def _quota(name: str, value: bytes) -> Quota:
    record = _decode_quota(value)
    return Quota(
        namespace=Namespace(name),
        limits=_limits(record.limits),
        models=tuple((model, _limits(limits)) for model, limits in record.models),
        only_models=record.only_models,
        model_label=record.model_label,
        pools=record.pools,
        pool_label=record.pool_label,
        max_run_s=_limit_of(record.max_run_s),
    )


def _used(value: bytes) -> dict[str, QuotaUsage]:
    used = _decode_used(value)
    return {model: _usage(usage, dict(usage.devices)) for model, usage in dict(used).items()}


def _charged(value: bytes) -> tuple[Namespace, dict[str, QuotaUsage]]:
    record = _decode_charges(value)
    return record.namespace, {
        model: _usage(charge, dict.fromkeys(charge.devices, 1))
        for model, charge in dict(record.by_model).items()
    }


def _usage(counted: UsageRecord | ChargeRecord, devices: Mapping[str, int]) -> QuotaUsage:
    return QuotaUsage(
        cores_milli=counted.cores_milli,
        milli_gpu=counted.milli_gpu,
        memory_mib=counted.memory_mib,
        devices={DeviceUuid(uuid): count for uuid, count in devices.items()},
    )


def _limits_record(limits: QuotaLimits) -> LimitsRecord:
    return LimitsRecord(
        cores_milli=_stored_limit(limits.cores_milli),
        milli_gpu=_stored_limit(limits.milli_gpu),
        memory_mib=_stored_limit(limits.memory_mib),
        cards=_stored_limit(limits.cards),
    )


def _limits(record: LimitsRecord) -> QuotaLimits:
    return QuotaLimits(
        cores_milli=_limit_of(record.cores_milli),
        milli_gpu=_limit_of(record.milli_gpu),
        memory_mib=_limit_of(record.memory_mib),
        cards=_limit_of(record.cards),
    )


def _stored_limit(limit: int | None) -> int:
    return NO_LIMIT if limit is None else limit


def _limit_of(limit: int) -> int | None:
    return None if limit == NO_LIMIT else limit
