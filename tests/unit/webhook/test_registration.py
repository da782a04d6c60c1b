"""The URL at which the webhook registers itself."""

import pytest

from services.webhook.registration import registered_url
from shared.model.errors import RequestError


@pytest.mark.parametrize(
    ("url", "registered"),
    [
        ("https://webhook", "https://webhook:8443"),
        ("https://webhook/", "https://webhook:8443"),
        ("https://webhook:443", "https://webhook:443"),
        ("https://10.0.0.7:9443/gpus/", "https://10.0.0.7:9443/gpus"),
        ("https://[::1]", "https://[::1]:8443"),
        ("https://[::1]:1", "https://[::1]:1"),
    ],
)
def test_the_url_has_one_port(url: str, registered: str) -> None:
    assert registered_url(url, 8443) == registered


@pytest.mark.parametrize("url", ["webhook:443", "http://webhook", "https://", "https://w:port"])
def test_a_url_without_host_or_tls_is_refused(url: str) -> None:
    with pytest.raises(RequestError, match="--url"):
        registered_url(url, 8443)
