"""What the doctor makes of what was seen of the cluster's parts; pure."""

from collections.abc import Iterable, Mapping, Sequence

from services.cli.doctor.finding import Finding, fail, ok, warn
from shared.ledger.redis_server import RedisFacts

CLOCK_WARN_S = 0.5
CLOCK_FAIL_S = 5.0
WEEK_DAYS = 7.0


def nats(messages: int | None) -> Finding:
    """Judge the stream."""
    if messages is None:
        return fail(
            "NATS has JetStream, and not our stream",
            "start a service: every one makes the stream; see its log if it cannot",
        )
    if messages > 10_000:
        return warn(f"{messages} messages wait", "kubectl -n leasehold-system get pods")
    return ok(f"JetStream answers, {messages} messages wait")


def agent_let_in() -> Finding:
    """Judge what an agent can see of NATS: that it is let in."""
    return ok("NATS lets this node's agent in; only others may look at its stream")


def redis(facts: RedisFacts, *, by_sentinels: bool) -> Finding:
    """Judge the ledger's server.

    It may stand alone: what is lost with it is rebuilt. Where Sentinels watch over it, somebody
    counts on another that takes over.
    """
    unsafe = _unsafe(facts)
    if unsafe is not None:
        return unsafe
    if not facts.replicas and by_sentinels:
        return warn(
            "it has no replica that Sentinels could have take over",
            "redis-cli info replication; start its replicas, or have them follow it",
        )
    alone = "no replica (the ledger would be rebuilt from pods and agents)"
    replicas = f"{facts.replicas} replicas" if facts.replicas else alone
    return ok(f"primary, {replicas}, appendonly, {facts.maxmemory_policy or 'policy unknown'}")


def _unsafe(facts: RedisFacts) -> Finding | None:
    """Return how the server can lose what it was told, if it can."""
    if facts.role != "master":
        return fail(
            f"it is a {facts.role}: nothing can be written", "give --redis-url of the primary"
        )
    if facts.maxmemory_policy not in {"", "noeviction"}:
        return fail(
            f"maxmemory-policy is {facts.maxmemory_policy}: it may throw leases away",
            "redis-cli config set maxmemory-policy noeviction, and in its configuration",
        )
    if not facts.last_write_succeeded:
        return fail("its last write to disk failed", "redis-cli info persistence; df -h")
    if facts.appendonly != "yes":
        return warn(
            "appendonly is off: after a crash the ledger is rebuilt, and placing waits for that",
            "redis-cli config set appendonly yes, and in its configuration",
        )
    if facts.replay_refusal:
        return fail(
            "after a restart it reads its file of writes back as its user default, and leaves out "
            f"what that may not do: {facts.replay_refusal}",
            "redis-cli acl setuser default off resetpass '~*' '&*' +@all, and so in its users file",
        )
    return None


def clock(whose: str, ahead_s: float) -> Finding:
    """Judge how far another clock is from ours."""
    text = f"the clock of {whose} is {abs(ahead_s):.2f} s {'ahead' if ahead_s > 0 else 'behind'}"
    sync = "timedatectl; chronyc tracking: have both follow the same time servers"
    if abs(ahead_s) > CLOCK_FAIL_S:
        return fail(text, sync)
    return warn(text, sync) if abs(ahead_s) > CLOCK_WARN_S else ok(text)


def webhook(missing: Sequence[str], days_left: float | None, refusal: str) -> Finding:
    """Judge registration and certificate; `refusal` says why the server is not believed."""
    if missing:
        return fail(
            f"not registered: {', '.join(missing)}: pods pass unchecked",
            "kubectl -n leasehold-system rollout restart deployment/webhook",
        )
    if refusal:
        return fail(
            f"the API server would not believe it: {refusal}",
            "kubectl -n leasehold-system logs deployment/webhook",
        )
    if days_left is None:
        return fail(
            "it is registered without a certificate authority",
            "kubectl -n leasehold-system rollout restart deployment/webhook",
        )
    if days_left <= 0:
        return fail(
            "its certificate authority has expired",
            "kubectl -n leasehold-system rollout restart deployment/webhook",
        )
    if days_left < WEEK_DAYS:
        return warn(
            f"its certificate authority expires in {days_left:.1f} days, and nobody renewed it",
            "kubectl -n leasehold-system logs deployment/webhook",
        )
    return ok(f"registered; its certificate authority is good for {days_left:.0f} days")


def versions(seen: Mapping[str, str]) -> Finding:
    """Judge the versions of replicas, by name."""
    if len(set(seen.values())) > 1:
        return warn(
            "parts are of different versions: "
            + ", ".join(f"{name} {version or 'unknown'}" for name, version in sorted(seen.items())),
            "finish the rollout: kubectl -n leasehold-system get pods -o wide",
        )
    if not seen:
        return fail(
            "no part says that it runs", "leasehold up; kubectl -n leasehold-system get pods"
        )
    return ok(f"{len(seen)} parts run, all of version {next(iter(seen.values())) or 'unknown'}")


def complaints(missing: Mapping[str, Sequence[str]]) -> Finding:
    """Judge what replicas say that they lack."""
    said = [f"{name}: {', '.join(texts)}" for name, texts in sorted(missing.items()) if texts]
    if said:
        return fail("; ".join(said), "kubectl -n leasehold-system logs POD; the part says more")
    return ok(f"{len(missing)} parts have what they need")


def rights(denied: Iterable[str], allowed: int) -> Finding:
    """Judge the rights of the agent's account."""
    lacking = sorted(denied)
    if lacking:
        return fail(
            f"the account may not {', '.join(lacking)}",
            "kubectl apply -k k8s/base; kubectl auth can-i --list --as "
            "system:serviceaccount:leasehold-system:node-agent",
        )
    return ok(f"the account has all {allowed} rights that an agent needs")


def runtime_class(there: bool) -> Finding:
    """Judge whether pods can ask for NVIDIA's runtime."""
    if there:
        return ok("RuntimeClass nvidia exists")
    return ok(
        "there is no RuntimeClass nvidia: NVIDIA's runtime has to be the default one of GPU nodes, "
        "or devices be told by CDI (on a node: container-toolkit, cdi-devices)"
    )
