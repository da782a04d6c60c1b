"""The users of NATS and Redis, made from the topology, and the files with their secrets."""

from pathlib import Path

import pytest

from services.auth.nats_users import all_users
from services.cli import credentials
from services.cli.commands import CredentialArguments
from services.topology import SERVICES, edges
from shared.credentials import certificates
from shared.model.errors import RequestError
from shared.model.events.pod_events import LeaseChanged
from shared.model.names import NodeName
from shared.nats import subjects

NODES = [NodeName("node-0"), NodeName("gpu.example")]


def test_every_service_has_a_user_and_every_node_its_own() -> None:
    names = {user.name for user in all_users(NODES)}

    services = {service.name for service in SERVICES if not service.per_node}
    assert names == services | {"node-agent.node-0", "node-agent.gpu.example", "operator"}


def test_each_user_may_publish_what_the_topology_has_and_nothing_else() -> None:
    published = {(edge.publisher, edge.event.subject) for edge in edges()}
    subjects_of = {edge.event.subject for edge in edges()}

    for user in all_users([NodeName("a")]):
        service = user.name.partition(".")[0]
        allowed = {
            subject
            for subject in subjects_of
            if any(each.split(".", 2)[2].startswith(subject) for each in user.publish
                   if each.startswith("leasehold."))
        }  # fmt: skip
        common = {"heartbeat.sent.v1", "resync.requested.v1"}
        assert allowed - common == {event for name, event in published if name == service} - common


def test_an_agents_subjects_all_end_in_its_node() -> None:
    agent = next(u for u in all_users(NODES) if u.name == "node-agent.gpu.example")

    assert {each for each in agent.publish if not each.endswith("gpu_example")} == set()
    assert "leasehold.broadcast.heartbeat.sent.v1.node-agent_gpu_example" in agent.publish
    assert subjects.subscribe_subject(LeaseChanged, "gpu.example") in agent.subscribe
    wildcards = {subject for subject in agent.publish + agent.subscribe if "*" in subject}
    assert wildcards == {"_INBOX.node-agent.gpu_example.*.*"}


def test_only_the_owner_reads_the_files_and_existing_secrets_stay(tmp_path: Path) -> None:
    first = credentials.write(tmp_path / "credentials", NODES)
    secret = first.redis("placer").read_text()

    second = credentials.write(tmp_path / "credentials", [*NODES, NodeName("new")])

    assert second.redis("placer").read_text() == secret
    assert second.nats("node-agent.new").exists()
    assert all(
        path.stat().st_mode & 0o077 == 0
        for path in [tmp_path / "credentials", *second.root.rglob("*")]
    )
    assert secret.strip().partition(":")[2] not in second.acl.read_text()
    assert second.nats("placer").read_text().strip().partition(":")[2] in (
        second.nats_configuration.read_text()
    )


def test_a_new_authority_issues_the_servers_certificates_anew(tmp_path: Path) -> None:
    files = credentials.write(tmp_path, [], nats=False, names=["127.0.0.1"])
    before = files.certificate.read_bytes()
    credentials.write(tmp_path, [], nats=False, names=["127.0.0.1"])
    assert files.certificate.read_bytes() == before

    (tmp_path / "ca.key").unlink()
    credentials.write(tmp_path, [], nats=False, names=["127.0.0.1"])

    authority = certificates.load(files.authority.read_bytes())
    for issued in (files.certificate, files.scheduler_certificate):
        certificates.load(issued.read_bytes()).verify_directly_issued_by(authority)


def test_the_output_has_placeholders_for_secrets(capsys: pytest.CaptureFixture[str]) -> None:
    assert credentials.show(CredentialArguments(nodes=("gpu-1",))) == 0

    shown = capsys.readouterr().out
    assert '"password": "SECRET_OF_node-agent.gpu-1"' in shown
    assert "user placer on #SHA256_OF_SECRET_OF_placer " in shown


def test_one_server_alone_can_be_shown(capsys: pytest.CaptureFixture[str]) -> None:
    credentials.show(CredentialArguments(redis=True))

    assert "accounts" not in capsys.readouterr().out


def test_writing_needs_the_nodes_since_each_agent_has_a_user(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="--nodes NAME"):
        credentials.show(CredentialArguments(out=tmp_path / "credentials"))

    credentials.show(CredentialArguments(out=tmp_path / "credentials", redis=True))
    assert (tmp_path / "credentials" / "users.acl").exists()


@pytest.mark.parametrize(
    "flags",
    [
        *({"nodes": (name,)} for name in ("*", "a/b", "..", "gpu 1", "Å", "a" * 300)),
        *({"nodes": ("a",), "names": (name,)} for name in ("a/b", "ä.example", "*", "h*.example")),
    ],
)
def test_a_name_that_no_node_or_server_has_is_refused(
    flags: dict[str, tuple[str, ...]], tmp_path: Path
) -> None:
    with pytest.raises(RequestError, match="can have this name"):
        credentials.show(CredentialArguments(out=tmp_path / "c", **flags))  # type: ignore[arg-type]

    assert not (tmp_path / "c").exists()


def test_a_server_may_have_addresses_and_a_wildcard_for_its_hosts(tmp_path: Path) -> None:
    names = ("*.example.org", "nats_server", "127.0.0.1", "::1")

    assert credentials.show(CredentialArguments(out=tmp_path, nodes=("a",), names=names)) == 0
