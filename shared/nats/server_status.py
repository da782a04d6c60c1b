"""Whether a NATS server accepts us, and what it stores of our stream; for diagnosis, tried once."""

import nats.errors
import nats.js.errors

from shared.credentials.logins import ClientCredentials
from shared.model.errors import UnavailableError
from shared.nats.connection import connected
from shared.nats.subjects import STREAM

TIMEOUT_S = 8.0
"""Longer than a busy machine needs: slowness is not the problem that a diagnosis looks for."""
_CLIENT_NAME = "leasehold doctor"


async def check_connection(url: str, keys: ClientCredentials) -> None:
    """Connect and disconnect. Raises UnavailableError with the reason if NATS refuses us."""
    client = await connected(url, name=_CLIENT_NAME, keys=keys, patience_s=TIMEOUT_S)
    await client.close()


async def stream_messages(url: str, keys: ClientCredentials) -> int | None:
    """Return how many messages our stream holds; None: there is no such stream.

    Raises UnavailableError if NATS, or its JetStream, does not answer.
    """
    client = await connected(url, name=_CLIENT_NAME, keys=keys, patience_s=TIMEOUT_S)
    try:
        found = await client.jetstream(timeout=TIMEOUT_S).stream_info(STREAM)
    except nats.js.errors.NotFoundError:
        return None
    except (nats.errors.Error, TimeoutError) as error:
        raise UnavailableError(
            f"NATS answers, its JetStream does not: {str(error) or type(error).__name__}"
        ) from error
    else:
        return int(found.state.messages)
    finally:
        await client.close()
