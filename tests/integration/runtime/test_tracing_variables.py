"""The variables of the OpenTelemetry SDK decide what the settings of a service leave open."""

import asyncio

import pytest

from shared.runtime.settings import ServiceSettings
from shared.runtime.telemetry import Tracing, open_tracing
from tests.support.servers.otlp import otlp_receiver


async def record_span(tracing: Tracing) -> None:
    span = tracing.over("review", 1, {})
    assert span or tracing.provider
    await asyncio.to_thread(tracing.close)


async def test_spans_go_to_the_endpoint_of_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    async with otlp_receiver() as spans:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", spans.url)
        monkeypatch.setenv("OTEL_SERVICE_NAME", "gpu-placer")

        await record_span(open_tracing("placer", ServiceSettings()))

        assert [(name, span.name) for name, span in spans.received] == [("gpu-placer", "review")]


async def test_a_service_has_its_own_name_without_the_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with otlp_receiver() as spans:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", spans.url)

        await record_span(open_tracing("placer", ServiceSettings()))

        assert [name for name, _ in spans.received] == ["leasehold-placer"]


async def test_the_sampler_of_the_variable_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    async with otlp_receiver() as spans:
        monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")

        await record_span(open_tracing("placer", ServiceSettings(otlp_endpoint=spans.url)))

        assert spans.received == []


def test_a_disabled_sdk_records_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")

    tracing = open_tracing("placer", ServiceSettings())

    assert tracing.tracer is None
