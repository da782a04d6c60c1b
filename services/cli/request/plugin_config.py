"""`leasehold migrate FILE`: what another device plugin's configuration stands for here."""

import sys
from collections.abc import Iterable, Iterator

from msgspec import field
from rich.console import Group
from rich.text import Text

from services.cli import terminal
from services.cli.commands import Migrate
from services.cli.request.command import load
from shared.dialects.nvidia.plugin_config import (
    NamedSharing,
    NodeSharing,
    named_configs,
    parse_sharing,
    replicas_of,
)
from shared.dialects.vocabulary import did_you_mean, unknown_gpus
from shared.kubernetes.strict_yaml import load_document
from shared.model.errors import RequestError
from shared.model.views.view import View

TWO_WAYS = (
    "Nodes of Leasehold offer the same replicas, with the same labels, by this configuration in "
    "ConfigMap nvidia-plugin-configs of the namespace leasehold-agents; or write these limits into "
    "the pods, for shares whose memory is held"
)


class ConfigurationReport(View, frozen=True, kw_only=True):
    name: str
    fault: str = ""
    strategy: str = ""
    replicas: dict[str, int] = field(default_factory=dict)
    resource: str = ""
    """Under which such nodes offer GPUs."""
    labels: dict[str, str] = field(default_factory=dict)
    several: str = ""
    write: dict[str, int] = field(default_factory=dict)
    """Limits that get as much from Leasehold as one replica."""
    warnings: tuple[str, ...] = ()


class MigrationReport(View, frozen=True, kw_only=True):
    configurations: tuple[ConfigurationReport, ...]


def read_configurations(text: str, source: str) -> Iterator[NamedSharing]:
    """Raises RequestError."""
    try:
        configs = list(named_configs(load_document(text)))
    except ValueError as error:
        raise RequestError(f"{source} is not YAML: {error}") from error
    for name, config in configs:
        try:
            document = load_document(str(config)) if name else config
            yield NamedSharing(name=name, sharing=parse_sharing(document))
        except RequestError as error:
            yield NamedSharing(name=name, fault=str(error))
        except ValueError as error:
            yield NamedSharing(name=name, fault=f"it is not YAML: {error}")


def report_of(config: NamedSharing) -> ConfigurationReport:
    if config.fault:
        return ConfigurationReport(name=config.name, fault=config.fault)
    sharing = config.sharing
    return ConfigurationReport(
        name=config.name,
        strategy=sharing.strategy,
        replicas=dict(sharing.replicas),
        resource=sharing.resource,
        labels=sharing.labels,
        several=_several(sharing),
        write=sharing.part,
        warnings=(*sharing.warnings, *_unmapped(sharing)),
    )


def _unmapped(sharing: NodeSharing) -> Iterator[str]:
    for resource in unknown_gpus(sharing.replicas):
        yield f"{resource}: {did_you_mean(resource, 1)}"
    try:
        replicas_of(sharing)
    except RequestError as error:
        yield f"a node of Leasehold refuses it: {error}"


def _several(sharing: NodeSharing) -> str:
    if sharing.strategy == "none":
        return "as many different GPUs"
    if sharing.fails_above_one:
        return "it fails on the node; here it waits, or gets shares of as many different GPUs"
    return "they may be of one GPU; here they are of as many different GPUs"


def _lines(report: ConfigurationReport) -> Iterable[Text]:
    yield Text(report.name or "the configuration", style="bold")
    if report.fault:
        yield Text(f"  invalid     {report.fault}", style="red")
        return
    for warning in report.warnings:
        yield Text(f"  warning     {warning}", style="yellow")
    if report.strategy == "none":
        yield Text("  shares no GPU: pods request whole GPUs, as here")
        return
    for resource, number in report.replicas.items():
        yield Text(f"  shares      {resource}: {number} replicas by {report.strategy}")
    yield Text(f"  offers      {report.resource}")
    for key, value in report.labels.items():
        yield Text(f"  node label  {key}={value}")
    yield Text(f"  above one   {report.several}")
    for name, amount in report.write.items():
        yield Text(f"  write       {name}: {amount}", style="green")
    held = "memory and cores are" if report.strategy == "mps" else "memory, which it was not, is"
    yield Text(f"  here        {held} held to that part")


def migrate(flags: Migrate) -> int:
    source, text = load(flags.file, sys.stdin)
    reports = tuple(map(report_of, read_configurations(text, source)))
    terminal.show(
        flags.output,
        MigrationReport(configurations=reports),
        lambda view: Group(
            *(line for report in view.configurations for line in _lines(report)),
            *([Text(TWO_WAYS)] if any(report.replicas for report in view.configurations) else []),
        ),
    )
    return 1 if any(report.fault for report in reports) else 0
