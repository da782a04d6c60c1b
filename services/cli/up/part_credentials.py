"""What `up` adds to its parts so that each is somebody: users for servers, secrets for services."""

from collections.abc import Sequence
from dataclasses import replace

from services.auth.redis_users import PROBE
from services.cli.admin.credentials import Doors
from services.cli.up.parts import Answers, Part
from shared.nats.subjects import user_of


def guarded(
    parts: Sequence[Part], doors: Doors, *, nats: bool = True, redis: bool = True
) -> list[Part]:
    """Return the parts with what they need at a NATS, or a Redis, that asks who they are."""
    return [_guarded(part, doors, nats=nats, redis=redis) for part in parts]


def _guarded(part: Part, doors: Doors, *, nats: bool, redis: bool) -> Part:
    added: list[str] = []
    checks = part.checks
    if part.name == "nats":
        added += ["--config", str(doors.nats_configuration)]
    elif part.name == "valkey":
        added += ["--aclfile", str(doors.acl)]
        checks = tuple(
            replace(check, says=f"AUTH {PROBE} -\r\nPING\r\n".encode(), expects=b"+OK\r\n+PONG")
            if isinstance(check, Answers)
            else check
            for check in checks
        )
    if nats and "--nats-url" in part.argv:
        added += ["--nats-credentials", str(doors.nats(user_of(_service(part), _node(part))))]
        added += ["--nats-ca-file", str(doors.authority)]
    if redis and "--redis-url" in part.argv:
        added += ["--redis-credentials", str(doors.redis(_service(part)))]
    return replace(part, argv=(*part.argv, *added), checks=checks)


def _service(part: Part) -> str:
    module = next(word for word in part.argv if word.startswith("services."))
    return module.removeprefix("services.").replace("_", "-")


def _node(part: Part) -> str:
    return part.argv[part.argv.index("--node") + 1] if "--node" in part.argv else ""
