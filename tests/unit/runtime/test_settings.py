"""What is refused in the settings of every component, and what a health check learns."""

import asyncio
import dataclasses
import os
import re
from pathlib import Path
from typing import Any

import pytest

from shared.model.errors import RequestError
from shared.model.names import ENDS_AT
from shared.runtime import health, probe
from shared.runtime.settings import load, settings_digests
from shared.runtime.variables import PREFIX, check_variables
from tests.support.command_server import call
from tests.support.variables import names_of_components, names_of_development
from tools.generate.reference import settings_kinds


@pytest.mark.parametrize(("missing", "status"), [(None, 200), ("not connected", 503)])
async def test_a_service_is_healthy_when_it_is_ready_and_otherwise_the_reasons_are_printed(
    missing: str | None, status: int
) -> None:
    pages = health.application({"nats": lambda: missing})
    async with health.served(pages, "127.0.0.1:0") as address:
        healthy, text = await asyncio.to_thread(probe.request_readiness, address)

    assert healthy == status
    assert (missing or "") in text


async def test_a_port_that_does_not_speak_http_is_unhealthy() -> None:
    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"INFO {}\r\n")
        writer.close()

    async with await asyncio.start_server(greet, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        with pytest.raises(OSError, match=r"not HTTP|reset"):
            await asyncio.to_thread(probe.request_readiness, f"{host}:{port}")


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"LEASEHOLD_HTTP": "0.0.0.0:9100"}, "127.0.0.1:9100"),
        ({"LEASEHOLD_HTTP": "0.0.0.0:9100", "LEASEHOLD_PROBE": "127.0.0.1:9101"}, "127.0.0.1:9101"),
        ({}, "127.0.0.1:9100"),
    ],
)
def test_the_probe_uses_the_port_of_the_service(environ: dict[str, str], expected: str) -> None:
    assert probe.address(environ) == expected


@pytest.mark.parametrize("where", ["agent", "agent:", "agent:http", "agent:99999"])
def test_the_probe_reports_what_is_no_address(
    where: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(probe.PROBE_VARIABLE, where)

    assert probe.main() == 1
    assert capsys.readouterr().out == f"http://{where}/readyz: {where!r} is not HOST:PORT\n"


KINDS = settings_kinds()
SUFFIXES = {".yaml", ".md", ".env", ".json", ".service"}
VARIABLE = re.compile(r"LEASEHOLD_[A-Z0-9_]+")
OF_CONTAINERS = {ENDS_AT, "LEASEHOLD_TIME_"}
"""Set in containers with GPUs; the second is the beginning of some."""
SERVICE_VARIABLES = {
    "LEASEHOLD_SERVICE_HOST": "10.0.0.1",
    "LEASEHOLD_SERVICE_PORT": "443",
    "LEASEHOLD_SERVICE_PORT_HTTPS": "443",
    "LEASEHOLD_PORT": "tcp://10.0.0.1:443",
    "LEASEHOLD_PORT_443_TCP": "tcp://10.0.0.1:443",
    "LEASEHOLD_PORT_443_TCP_ADDR": "10.0.0.1",
    "LEASEHOLD_WEB_HOOK_SERVICE_HOST": "10.0.0.2",
    "LEASEHOLD_WEB_HOOK_PORT_443_TCP_PROTO": "tcp",
}


def started(module: str, *argv: str, **environ: str) -> tuple[int, str]:
    outside = {name: text for name, text in os.environ.items() if not name.startswith(PREFIX)}
    code, _, err = call(argv, {**outside, **environ}, limit_s=60.0, module=module)
    return code, err


def parsed(kind: type[Any], *argv: str, **environ: str) -> Any:
    return load(kind, "example", about="", argv=argv, environ=environ)


@pytest.mark.parametrize("service", KINDS)
def test_each_number_of_each_service_is_refused_with_the_setting_the_value_and_what_is_allowed(
    service: str,
) -> None:
    kind = KINDS[service]
    numbers = [
        item.name
        for item in dataclasses.fields(kind)
        if str(item.type).partition(" ")[0] in {"int", "float", "<class"}
        and isinstance(item.default, int | float | None)
        and item.type in {int, float, int | None, float | None}
    ]

    assert "trace_ratio" in numbers
    for name in numbers:
        variable = f"LEASEHOLD_{name.upper()}"
        flag = f"--{name.replace('_', '-')}"
        for value in ("abc", "nan", "inf", "-1", "1e300", "9" * 5000):
            with pytest.raises(RequestError, match=rf"^{variable}='{value}' must be a .*number"):
                parsed(kind, **{variable: value})
            with pytest.raises(RequestError, match=rf"^{flag}: '{value}' must be a .*number"):
                parsed(kind, f"{flag}={value}")


@pytest.mark.parametrize("service", KINDS)
def test_words_addresses_and_booleans_are_refused_alike(service: str) -> None:
    values = {"LOG_LEVEL": "loud", "HTTP": "9100", "NATS_URL": "nats.example"}

    for name, value in values.items():
        with pytest.raises(RequestError, match=rf"^LEASEHOLD_{name}='{value}' must be"):
            parsed(KINDS[service], **{f"LEASEHOLD_{name}": value})


@pytest.mark.parametrize(
    ("module", "variable"),
    [
        ("services.node_agent", "LEASEHOLD_DEVICE_SPLIT_COUNT"),
        ("services.node_agent", "LEASEHOLD_SYSTEMS"),
        ("simcluster.node_agent", "LEASEHOLD_GPUS"),
        ("services.scheduler", "LEASEHOLD_API_CONCURRENCY"),
        ("services.cli", "LEASEHOLD_IDLE_AFTER"),
    ],
)
def test_a_process_ends_with_one_line_and_code_2(module: str, variable: str) -> None:
    argv = ["gpus"] if module == "services.cli" else []

    code, text = started(module, *argv, **{variable: "abc"})

    assert code == 2
    assert text.count("\n") == 1
    assert variable in text or variable.removeprefix("LEASEHOLD_").lower() in text or "abc" in text


@pytest.mark.parametrize(
    ("module", "misspelt", "meant"),
    [
        ("services.node_agent", "LEASEHOLD_DEVICE_SPLTI_COUNT", "LEASEHOLD_DEVICE_SPLIT_COUNT"),
        ("services.placer", "LEASEHOLD_REDIS_ULR", "LEASEHOLD_REDIS_URL"),
        ("services.cli", "LEASEHOLD_KUBECONFG", "LEASEHOLD_KUBECONFIG"),
    ],
)
def test_a_misspelt_variable_is_refused_with_the_one_that_was_meant(
    module: str, misspelt: str, meant: str
) -> None:
    argv = ["gpus"] if module == "services.cli" else []

    code, text = started(module, *argv, **{misspelt: "5"})

    assert code == 2
    assert f"{misspelt} is not a setting; did you mean {meant}?" in text
    assert text.count("\n") == 1


@pytest.mark.parametrize(
    ("written", "said"),
    [
        (
            "--device-split-cuont=4",
            "there is no flag --device-split-cuont=4; did you mean --device",
        ),
        ("--xyz", "there is no flag --xyz; --help lists all flags"),
    ],
)
def test_an_unknown_flag_is_refused_with_the_one_that_was_meant(written: str, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        load(KINDS["node_agent"], "agent", about="", argv=[written], environ={})


def test_no_setting_of_a_component_is_taken_for_a_misspelt_one_of_another() -> None:
    of_all = names_of_components()
    environ = dict.fromkeys(set().union(*of_all.values(), names_of_development()), "1")
    assert len(environ) > 100

    for own in of_all.values():
        check_variables(environ, own)


def test_variables_of_services_and_of_containers_with_gpus_are_no_settings() -> None:
    own = {"LEASEHOLD_WEB_HOOK_PORT"}
    environ = {**SERVICE_VARIABLES, ENDS_AT: "2026-11-27T16:40:00+00:00"}
    check_variables(environ, own)

    assert settings_digests(environ).keys() == {ENDS_AT}
    with pytest.raises(RequestError, match="did you mean LEASEHOLD_WEB_HOOK_PORT"):
        check_variables({"LEASEHOLD_WEBHOOK_PORT": "1"}, own)


@pytest.mark.parametrize(
    ("service", "name", "value"),
    [
        ("api", "auth", "both"),
        ("api", "trace_url", "javascript:alert(1)"),
        ("webhook", "all_pods_by", "volcano"),
        ("webhook", "systems", "hami,volcanoo"),
        ("node_agent", "isolation", "none"),
        ("node_agent", "gpu_strategy", "guess"),
        ("timekeeper", "old_reports", "never"),
        ("watcher", "mode_first", "mps"),
    ],
)
def test_a_word_that_is_none_of_the_choices_is_refused_with_them(
    service: str, name: str, value: str
) -> None:
    with pytest.raises(RequestError, match=rf"LEASEHOLD_{name.upper()}='.*' must be "):
        parsed(KINDS[service], **{f"LEASEHOLD_{name.upper()}": value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HTTP", f"{'x' * 64}.example:9100"),
        ("NATS_URL", f"nats://{'x' * 64}.example:4222"),
        ("NATS_URL", "nats://[::1"),
        ("NATS_URL", "nats://nats:port"),
        ("NATS_URL", "nats://nats:70000"),
        ("NATS_URL", "nats://:4222"),
    ],
)
def test_an_address_that_no_connection_could_have_is_refused(name: str, value: str) -> None:
    with pytest.raises(RequestError, match=rf"^LEASEHOLD_{name}='.*' must be .*HOST:PORT"):
        parsed(KINDS["placer"], **{f"LEASEHOLD_{name}": value})


def test_a_password_in_a_url_is_not_printed() -> None:
    with pytest.raises(RequestError) as refused:
        parsed(KINDS["placer"], LEASEHOLD_NATS_URL="http://me:secret@nats:4222")

    assert "secret" not in str(refused.value)
    assert "//...@nats:4222" in str(refused.value)


@pytest.mark.parametrize(
    "argv",
    [["--port", "70000"], ["--nodes", "-1"], ["--node-cpu", "much"], ["--bookmark-s", "nan"]],
)
def test_the_simulated_cluster_refuses_invalid_flags(argv: list[str], tmp_path: Path) -> None:
    code, text = started("simcluster", "--state", str(tmp_path), *argv)

    assert code == 2
    assert f"{argv[0]}: {argv[1]!r}" in text


def test_every_variable_in_manifests_images_and_pages_is_known() -> None:
    root = Path(__file__).parents[3]
    texts = [root / "compose.yaml", root / "Dockerfile"]
    for folder in ("k8s", "docs", "examples"):
        texts += [path for path in (root / folder).rglob("*") if path.suffix in SUFFIXES]

    named = {name for path in texts for name in VARIABLE.findall(path.read_text())}

    assert "LEASEHOLD_NATS_URL" in named
    read = set().union(*names_of_components().values(), names_of_development())
    assert named - OF_CONTAINERS <= read
