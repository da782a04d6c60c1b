"""The JetStream stream of work and its durable consumers; created if missing."""

import contextlib
import datetime
from collections.abc import Iterable, Sequence

import nats.js.errors
from nats.js import JetStreamContext
from nats.js.api import ConsumerConfig, DeliverPolicy, RetentionPolicy, StorageType, StreamConfig

from shared.nats.subjects import STREAM

ACK_WAIT_S = 5.0
"""Unacknowledged work is delivered to another replica after this time."""
DUPLICATES_S = 60.0
MAX_AGE_S = 24 * 3600.0
MAX_PENDING = 256
"""Unacknowledged messages of all replicas together; the rest waits in the stream."""


def durable_config(name: str, deliver: str, filters: Sequence[str]) -> ConsumerConfig:
    """Return the configuration of a push consumer for a queue group of replicas."""
    return ConsumerConfig(
        durable_name=name,
        deliver_subject=deliver,
        deliver_group=name,
        deliver_policy=DeliverPolicy.ALL,
        ack_wait=ACK_WAIT_S,
        max_ack_pending=MAX_PENDING,
        filter_subjects=list(filters),
    )


async def ensured(
    stream: JetStreamContext, durables: Iterable[ConsumerConfig], *, copies: int
) -> bool:
    """Create the stream with `copies` replicas, and consumers, if they are missing.

    Return whether any was missing. Raises the client's errors and TimeoutError.
    """
    missing = await _ensure_stream(stream, copies)
    for config in list(durables):
        missing |= await _ensure_consumer(stream, config)
    return missing


async def replace_stream(stream: JetStreamContext, *, copies: int, storage: StorageType) -> None:
    """Delete the stream with all that it contains, and create it again."""
    with contextlib.suppress(nats.js.errors.NotFoundError):
        await stream.delete_stream(STREAM)
    await _add_stream(stream, copies, storage)


async def stream_created_at(stream: JetStreamContext) -> datetime.datetime | None:
    """Return when the stream was created; None: there is none.

    Raises the client's errors and TimeoutError.
    """
    try:
        created_at: datetime.datetime | None = (await stream.stream_info(STREAM)).created
    except nats.js.errors.NotFoundError:
        return None
    return created_at


async def _ensure_stream(stream: JetStreamContext, copies: int) -> bool:
    if await stream_created_at(stream) is not None:
        return False
    await _add_stream(stream, copies, StorageType.FILE)
    return True


async def _add_stream(stream: JetStreamContext, copies: int, storage: StorageType) -> None:
    await stream.add_stream(
        StreamConfig(
            name=STREAM,
            subjects=["leasehold.work.>"],
            retention=RetentionPolicy.WORK_QUEUE,
            storage=storage,
            num_replicas=copies,
            max_age=MAX_AGE_S,
            duplicate_window=DUPLICATES_S,
        )
    )


async def _ensure_consumer(stream: JetStreamContext, config: ConsumerConfig) -> bool:
    try:
        await stream.consumer_info(STREAM, str(config.durable_name))
    except nats.js.errors.NotFoundError:
        await stream.add_consumer(STREAM, config)
        return True
    return False
