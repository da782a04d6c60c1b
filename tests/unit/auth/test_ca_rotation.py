"""A CA is replaced while all stay connected, whatever is interrupted or repeated."""

import hashlib
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cache

import pytest
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from hypothesis import given, settings
from hypothesis import strategies as st

from services.auth import ca_rotation, root_secret
from services.auth.ca_rotation import HOLDERS, Rotation, RotationProgress
from shared.model.errors import RequestError
from tests.support.effort import tries

START = datetime(2031, 5, 1, tzinfo=UTC)


@cache
def is_trusted(certificate: bytes, bundle: bytes) -> bool:
    """Whether a client with these CAs accepts a server with this certificate."""
    served = x509.load_pem_x509_certificate(certificate)
    for authority in x509.load_pem_x509_certificates(bundle):
        try:
            served.verify_directly_issued_by(authority)
        except (InvalidSignature, ValueError):
            continue
        return True
    return False


@dataclass
class Installation:
    """The root Secret, what kubelets have written to files, and what the servers have loaded."""

    root: dict[str, bytes] = field(default_factory=dict)
    now: datetime = START
    observed: RotationProgress = field(default_factory=RotationProgress)

    def __post_init__(self) -> None:
        self.reconcile()
        self.loaded = dict(self.root)
        self.files = self.loaded
        self.first = self.root["ca.crt"]

    def completed(self) -> dict[str, bytes]:
        self.now += timedelta(minutes=1)

        def random(number: int) -> bytes:
            return hashlib.shake_128(str(self.now).encode()).digest(number)

        return root_secret.complete(
            self.root, ("nats",), self.now, random, namespace="n", observed=self.observed
        )

    def reconcile(self) -> None:
        self.root = self.completed()

    def remove(self) -> None:
        """Begin a replacement, as the documentation has it."""
        self.root = {key: self.root[key] for key in self.root if key not in {"ca.crt", "ca.key"}}

    def killed_before_saving(self) -> None:
        self.completed()

    def restart(self) -> None:
        self.observed = RotationProgress()

    def propagate(self) -> None:
        self.files = dict(self.root)

    def update_servers(self) -> None:
        """Do what the service does once all files are as they are stored."""
        if self.files != self.root or not self.root.get("ca.crt"):
            return
        self.loaded = self.files
        match ca_rotation.rotation(self.root):
            case Rotation.TRUSTING:
                self.observed = RotationProgress(loaded=self.root["ca.trusted"])
            case Rotation.REPLACING:
                if is_trusted(self.loaded["server.crt"], self.root["ca.crt"]):
                    self.observed = RotationProgress(verified=self.root["ca.crt"])

    def check(self) -> None:
        """Whoever has read the newest files, or those before, accepts every certificate in use."""
        for holder in HOLDERS:
            for source in (self.files, self.loaded):
                for trusting in (self.files, self.loaded):
                    assert is_trusted(source[f"{holder}.crt"], trusting["ca.trusted"]), holder


STEPS = ("reconcile", "remove", "killed_before_saving", "restart", "propagate", "update_servers")


@settings(max_examples=tries(50))
@given(st.lists(st.sampled_from(STEPS), max_size=40))
def test_all_stay_connected_and_the_replacement_ends_whatever_is_interrupted(
    steps: list[str],
) -> None:
    installation = Installation()

    for step in ("remove", *steps):
        getattr(installation, step)()
        installation.check()
    for _ in range(6):
        for step in ("reconcile", "propagate", "update_servers"):
            getattr(installation, step)()
            installation.check()

    root = installation.root
    assert ca_rotation.rotation(root) is Rotation.COMPLETE
    assert root["ca.trusted"] == root["ca.crt"] != installation.first
    assert installation.loaded["ca.trusted"] == root["ca.crt"]
    assert all(is_trusted(root[f"{holder}.crt"], root["ca.crt"]) for holder in HOLDERS)


def test_a_replacement_that_begins_anew_again_and_again_does_not_grow_the_bundle() -> None:
    installation = Installation()

    for _ in range(5):
        installation.remove()
        installation.reconcile()

    assert installation.root["ca.trusted"].count(b"BEGIN CERTIFICATE") == 2
    assert installation.first in installation.root["ca.trusted"]


@pytest.mark.parametrize("removed", ["ca.crt", "ca.key"])
def test_one_of_both_keys_removed_begins_a_replacement(removed: str) -> None:
    installation = Installation()
    server = installation.root["server.crt"]

    del installation.root[removed]
    installation.reconcile()

    assert ca_rotation.rotation(installation.root) is Rotation.TRUSTING
    assert installation.root["server.crt"] == server


def test_certificates_of_a_ca_that_nothing_knows_are_issued_anew_at_once() -> None:
    installation = Installation()

    for key in ("ca.crt", "ca.key", "ca.trusted"):
        del installation.root[key]
    installation.reconcile()

    assert ca_rotation.rotation(installation.root) is Rotation.COMPLETE
    assert is_trusted(installation.root["server.crt"], installation.root["ca.crt"])


@pytest.mark.parametrize("entry", ["ca.trusted", "ca.crt", "server.crt", "api.crt"])
def test_an_entry_that_cannot_be_parsed_is_refused_by_name_and_created_again_once_removed(
    entry: str,
) -> None:
    installation = Installation()
    installation.root[entry] = b"-----BEGIN CERTIFICATE-----\nx\n-----END CERTIFICATE-----"

    with pytest.raises(RequestError, match=entry.replace(".", r"\.")):
        installation.reconcile()
    del installation.root[entry]
    installation.reconcile()

    assert x509.load_pem_x509_certificates(installation.root[entry])
