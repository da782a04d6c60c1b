"""The JetStream stream of work and its durable consumers; created if missing."""

from collections.abc import Iterable, Sequence

import nats.errors
import nats.js.errors
from nats.js import JetStreamContext
from nats.js.api import ConsumerConfig, DeliverPolicy, RetentionPolicy, StorageType, StreamConfig

from shared.model.errors import UnavailableError
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


async def add_durable(stream: JetStreamContext, config: ConsumerConfig) -> None:
    """Create or update a consumer. Raises UnavailableError if NATS does not."""
    try:
        await stream.add_consumer(STREAM, config)
    except (nats.errors.Error, TimeoutError) as error:
        raise UnavailableError(f"NATS made no consumer {config.durable_name}: {error!r}") from error


async def ensured(
    stream: JetStreamContext, durables: Iterable[ConsumerConfig], *, copies: int
) -> bool:
    """Create the stream with `copies` replicas, and consumers, if they are missing.

    Return whether any was. Raises UnavailableError if NATS neither has nor makes them.
    """
    try:
        missing = await _ensure_stream(stream, copies)
        for config in list(durables):
            missing |= await _ensure_consumer(stream, config)
    except (nats.errors.Error, TimeoutError) as error:
        raise UnavailableError(
            f"NATS has no JetStream for us ({error!r}): start nats-server with -js"
        ) from error
    return missing


async def _ensure_stream(stream: JetStreamContext, copies: int) -> bool:
    try:
        await stream.stream_info(STREAM)
    except nats.js.errors.NotFoundError:
        await stream.add_stream(
            StreamConfig(
                name=STREAM,
                subjects=["leasehold.work.>"],
                retention=RetentionPolicy.WORK_QUEUE,
                storage=StorageType.FILE,
                num_replicas=copies,
                max_age=MAX_AGE_S,
                duplicate_window=DUPLICATES_S,
            )
        )
        return True
    return False


async def _ensure_consumer(stream: JetStreamContext, config: ConsumerConfig) -> bool:
    try:
        await stream.consumer_info(STREAM, str(config.durable_name))
    except nats.js.errors.NotFoundError:
        await stream.add_consumer(STREAM, config)
        return True
    return False
