"""The auth service with a real nats-server and valkey-server: which clients it authorizes."""

import asyncio
import base64
import contextlib
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import nats.errors
import pytest
import redis.asyncio

from services.auth import root_secret
from services.auth.managed_servers import ManagedServers
from services.auth.nats_users import all_users
from services.auth.service import AuthTiming
from shared.credentials.tls import TlsFiles
from shared.model.errors import RequestError, UnavailableError
from shared.model.events.node_events import DeviceReported
from shared.model.names import NodeName
from shared.nats import subjects
from shared.nats.bus import Bus
from shared.nats.servers import reload_servers
from tests.support.auth.cluster import AuthCluster
from tests.support.auth.logins import covers
from tests.support.auth.world import AuthWorld, auth_world
from tests.support.clock import FakeClock
from tests.support.servers.nats import flush, free_port
from tests.support.servers.valkey import ValkeyServer
from tests.support.waiting import until

A, B = NodeName("node-a"), NodeName("node.b")
USERS = {user.name: user for user in all_users([A, B])}


@pytest.fixture
async def world() -> AsyncIterator[AuthWorld]:
    with tempfile.TemporaryDirectory(prefix="lh-auth-") as folder:
        async with auth_world(Path(folder)) as made:
            yield made


async def refused(world: AuthWorld, token: str, user: str) -> bool:
    try:
        async with world.raw(token, user):
            return False
    except nats.errors.Error:
        return True


async def test_an_agent_has_no_permission_for_another_nodes_subjects_whatever_its_client_name_is(
    world: AuthWorld,
) -> None:
    token = world.cluster.issue_token("node-agent", node=A)
    other = USERS["node-agent.node.b"]
    published = [one for one in other.publish if one.endswith("node_b")]
    open_to_all = USERS["node-agent.node-a"].subscribe
    subscribed = [one.partition(" ")[0] for one in other.subscribe if one not in open_to_all]

    async with world.raw(token, "node-agent.node.b") as (client, errors):
        for subject in published:
            await client.publish(subject, b"x")
        for subject in subscribed:
            await client.subscribe(subject)
        await client.publish(subjects.publish_subject(DeviceReported, A), b"x")
        await flush(client)

        violations = [text for text in errors if "permissions violation" in text]

    assert len(published) >= 4
    assert len(subscribed) >= 3
    assert {_subject(text) for text in violations} == {
        one.lower() for one in (*published, *subscribed)
    }


def _subject(violation: str) -> str:
    return violation.split('"')[1]


@pytest.mark.parametrize("name", sorted(set(USERS) - {"operator", "auth"}))
async def test_each_service_account_has_the_permissions_of_its_service_and_no_more(
    world: AuthWorld, name: str
) -> None:
    service_name, _, node = name.partition(".")
    token = world.cluster.issue_token(service_name, node=node)
    mine = USERS[name]
    others = {
        subject for user in USERS.values() for subject in user.publish if "*" not in subject
    } - set(mine.publish)
    others = {subject for subject in others if not covers(mine.publish, subject.replace(">", "x"))}

    async with world.raw(token, name) as (client, errors):
        for subject in mine.publish:
            await client.publish(subject.replace("*", "x").replace(">", "x"), b"x")
        await flush(client)
        assert [text for text in errors if "violation" in text] == []
        for subject in others:
            await client.publish(subject.replace(">", "x"), b"x")
        await flush(client)

    assert {_subject(text) for text in errors if "violation" in text} == {
        subject.replace(">", "x").lower() for subject in others
    }


async def test_no_other_client_is_authorized(world: AuthWorld) -> None:
    cluster = world.cluster

    assert not await refused(world, cluster.issue_token("placer"), "placer")
    for token in (
        cluster.issue_token("node-agent"),
        cluster.issue_token("default"),
        cluster.issue_token("placer", namespace="team-a"),
        cluster.issue_token("placer", audience="another"),
        "made-up",
        "",
    ):
        assert await refused(world, token, "placer"), token
    before = cluster.reviews
    with pytest.raises(UnavailableError, match="rejects the token in"):
        async with Bus.connect(
            world.url, name="x", credentials=world.credentials("guessed", "placer"), patience_s=3
        ):
            pass
    assert cluster.reviews == before + 1  # a client that retries is not reviewed each time


async def test_a_connection_that_has_expired_is_authorized_again_with_the_current_token(
    world: AuthWorld,
) -> None:
    world.auth.timing = AuthTiming(connection_s=1)
    keys = world.credentials(world.cluster.issue_token("placer"), "placer")
    async with Bus.connect(world.url, name="placer", credentials=keys) as bus:
        before = world.cluster.reviews
        world.auth.timing = AuthTiming(connection_s=600)
        world.credentials(world.cluster.issue_token("placer"), "placer")

        await until(lambda: world.cluster.reviews != before and bus.connected, limit_s=20)

    assert world.cluster.reviews == before + 1


async def test_replicas_that_start_together_store_the_same_secrets(tmp_path: Path) -> None:
    cluster = AuthCluster()
    async with cluster.served() as kube:
        replicas = [AuthWorld(tmp_path / f"{n}", cluster, kube, "unix:///x") for n in range(4)]

        found = await asyncio.gather(*(each.auth.reconcile() for each in replicas))
        files = [(each.folder / "run" / "redis").read_bytes() for each in replicas]

    assert all(each == found[0] for each in found)
    assert len(set(files)) == 1


async def test_an_invalid_entry_of_the_root_secret_is_named_with_its_remedy(
    tmp_path: Path,
) -> None:
    cluster = AuthCluster()
    async with cluster.served() as kube:
        world = AuthWorld(tmp_path, cluster, kube, "unix:///x")
        await world.auth.reconcile()
        root = cluster.objects["secrets", "auth"]
        root["server.crt"] = base64.b64encode(b"no PEM").decode()

        with pytest.raises(RequestError, match=r"Secret .*/auth: server.crt is .*: remove that"):
            await world.auth.reconcile()
        del root["server.crt"]
        await world.auth.reconcile()


async def test_a_new_certificate_is_served_without_a_restart_and_clients_reconnect(
    world: AuthWorld,
) -> None:
    token = world.cluster.issue_token("placer")
    async with Bus.connect(
        world.url, name="placer", credentials=world.credentials(token, "placer")
    ) as bus:
        root = world.cluster.objects["secrets", "auth"]
        before = root["server.crt"]
        root["server.crt"] = ""
        await world.auth.reconcile()
        world.mount("auth-nats", world.files)

        await world.servers.reload()

        assert root["server.crt"] != before
        issued = base64.b64decode(root["server.crt"])
        await until(lambda: _shown(world), lambda shown: shown == issued)
        await until(lambda: bus.connected)


async def test_a_ca_is_replaced_while_clients_with_old_and_new_files_connect_and_auth_is_killed(
    world: AuthWorld,
) -> None:
    token = world.cluster.issue_token("placer")
    old, new = world.folder / "old.crt", world.folder / "run" / "ca.crt"
    before = new.read_bytes()
    old.write_bytes(before)
    world.timing = AuthTiming(propagation_s=0.0)
    root = world.cluster.objects["secrets", "auth"]
    authority = world.cluster.objects["configmaps", "auth-ca"]
    old_accepted: list[tuple[str, bool]] = []

    del root["ca.crt"], root["ca.key"]
    for _ in range(10):
        replica = world.new_replica()
        data = await replica.reconcile()
        world.mount("auth-nats", world.files)
        await until(lambda: _is_accepted(world, token, new))
        old_accepted.append((authority["rotation"], await _is_accepted(world, token, old)))
        await replica.update_servers(data)
        if await replica.update_servers(await replica.reconcile()):
            await replica.reconcile()
        await until(lambda: _is_accepted(world, token, new))
        if authority["rotation"] == "complete":
            break

    assert old_accepted == [("trusting", True), ("replacing", True)]
    assert new.read_bytes() == base64.b64decode(root["ca.crt"]) != before
    assert not await _is_accepted(world, token, old)


async def test_servers_load_a_new_ca_once_its_files_were_unchanged_for_five_minutes(
    tmp_path: Path,
) -> None:
    cluster = AuthCluster()
    clock = FakeClock()
    async with cluster.served() as kube:
        world = AuthWorld(tmp_path, cluster, kube, "unix:///nowhere")
        world.servers = servers = CountedReloads(world.settings)
        await world.new_replica().reconcile()
        root = cluster.objects["secrets", "auth"]
        del root["ca.crt"], root["ca.key"]
        replica = world.new_replica()
        replica.clock = clock

        assert not await replica.update_servers(await replica.reconcile())
        clock.advance(200)
        cluster.objects["secrets", "auth-redis"]["ca.crt"] = ""  # another replica was killed here
        assert not await replica.update_servers(await replica.reconcile())
        clock.advance(299)
        assert not await replica.update_servers(await replica.reconcile())
        assert servers.reloads == 0
        clock.advance(1)

        assert await replica.update_servers(await replica.reconcile())
        assert servers.reloads == 1
        assert cluster.objects["configmaps", "auth-ca"]["rotation"] == "trusting"
        await replica.reconcile()
        assert cluster.objects["configmaps", "auth-ca"]["rotation"] == "replacing"


class CountedReloads(ManagedServers):
    """Servers that reload at once."""

    reloads = 0

    async def reload(self) -> None:
        self.reloads += 1


async def _is_accepted(world: AuthWorld, token: str, ca: Path) -> bool:
    """Whether a client connects that has read this file with CAs."""
    try:
        client = await nats.connect(
            world.url,
            user="placer",
            password=token,
            tls=TlsFiles(ca=ca).context(),
            allow_reconnect=False,
            connect_timeout=20,
        )
    except (nats.errors.Error, OSError):
        return False
    await client.close()
    return True


async def _shown(world: AuthWorld) -> bytes:
    import ssl  # noqa: PLC0415 - one test looks at a certificate

    async with world.raw(world.cluster.issue_token("placer"), "placer") as (client, _):
        tls = client._transport._io_writer.get_extra_info("ssl_object")
        return ssl.DER_cert_to_PEM_cert(tls.getpeercert(binary_form=True)).encode()


# Redis


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[ValkeyServer]:
    server = ValkeyServer()
    yield server
    server.forget()


async def test_a_deleted_password_is_created_again_and_redis_is_updated(
    valkey: ValkeyServer, tmp_path: Path
) -> None:
    cluster = AuthCluster()
    async with cluster.served() as kube:
        world = AuthWorld(tmp_path, cluster, kube, valkey.url)
        first = await world.auth.reconcile()
        world.mount("auth-redis", tmp_path / "etc-redis")
        valkey.start("--aclfile", str(tmp_path / "etc-redis" / "users.acl"))
        await valkey.ready()
        assert await _pings(valkey, first["redis.binder"])

        del cluster.objects["secrets", "auth"]["redis.binder"]
        second = await world.auth.reconcile()
        await world.servers.set_users(root_secret.redis_user_rules(second))

        assert await _pings(valkey, second["redis.binder"])
        assert not await _pings(valkey, first["redis.binder"])
        assert await _pings(valkey, second["redis.placer"])


async def test_a_redis_that_takes_over_without_our_users_gets_them(
    valkey: ValkeyServer, tmp_path: Path
) -> None:
    cluster = AuthCluster()
    async with cluster.served() as kube:
        world = AuthWorld(tmp_path, cluster, kube, valkey.url)
        made = await world.auth.reconcile()
        admin, _, secret = made["redis.admin"].decode().partition(":")
        bare = tmp_path / "bare.acl"
        bare.write_text(f"user default off\nuser {admin} on >{secret} ~* &* +@all\n")

        async def updated() -> bool:
            with contextlib.suppress(UnavailableError):
                await world.auth.update_redis_users()
            return await _pings(valkey, made["redis.binder"])

        for _ in range(2):
            valkey.start("--aclfile", str(bare))
            await until(updated)
            valkey.kill()


async def _pings(valkey: ValkeyServer, login: bytes) -> bool:
    user, _, secret = login.decode().partition(":")
    async with redis.asyncio.Redis.from_url(valkey.url, username=user, password=secret) as client:
        try:
            return bool(await client.ping())
        except redis.exceptions.ConnectionError:
            return False


ALONE = "system_account: SYS, accounts { SYS { users: [{ user: system, password: x }] } }\n"


def write_peer(folder: Path, data: Mapping[str, bytes]) -> Path:
    """Write the configuration of a server with the certificate of kube-scheduler."""
    for name in ("kube-scheduler.crt", "kube-scheduler.key", "ca.crt"):
        (folder / name).write_bytes(data[name])
    tls = f'cert_file: "{folder}/kube-scheduler.crt", key_file: "{folder}/kube-scheduler.key"'
    made = folder / "peer.conf"
    cluster = f'cluster {{ tls {{ {tls}, ca_file: "{folder}/ca.crt", verify: true }} }}'
    made.write_text(f"{ALONE}log_file: {made}.log\n{cluster}\n")
    return made


async def test_servers_of_a_cluster_accept_each_other_by_certificate_and_no_server_without_one(
    tmp_path: Path,
) -> None:
    cluster = AuthCluster()
    async with cluster.served() as kube:
        worlds = [AuthWorld(tmp_path / f"{n}", cluster, kube, "unix:///x") for n in range(4)]
        bare = tmp_path / "2" / "bare.conf"
        bare.write_text(f"{ALONE}log_file: {bare}.log\n")
        ports = [free_port() for _ in worlds]
        routes = ",".join(f"nats://localhost:{port}" for port in ports[:2])
        flags = [
            (f"--cluster=nats://127.0.0.1:{port}", "--cluster_name=c", f"--name=n{port}",
             f"--routes={routes}")
            for port in ports
        ]  # fmt: skip
        try:
            for each, mine in zip(worlds[:2], flags, strict=False):
                data = await each.auth.reconcile()
                each.start_nats("nats-cluster.conf", *mine)
            worlds[2].start_nats(str(bare), *flags[2])
            worlds[3].start_nats(str(write_peer(worlds[3].folder, data)), *flags[3])
            system = replace(
                worlds[0].servers.nats_credentials,
                login_file=worlds[0].folder / "run" / "nats-system",
            )

            await until(lambda: reload_servers(worlds[0].url, system), lambda count: count >= 2)
            log = worlds[3].folder / "peer.conf.log"
            await until(lambda: log.exists() and "Authorization Violation" in log.read_text())
            assert await reload_servers(worlds[0].url, system) == 2
            async with worlds[0].authorizing():  # the other server sends requests, too
                token = cluster.issue_token("placer")
                assert not await refused(worlds[1], token, "placer")
        finally:
            for each in worlds:
                each.stop_nats()
