"""Settings of the services that parse pods' requests; they must be equal for all of them."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from shared.dialects import DIALECTS, SCHEDULERS
from shared.dialects.dialect import Rules
from shared.dialects.pod_requests import check_rules
from shared.dialects.protected_paths import HOST_PATHS
from shared.dialects.volcano import scheduler_arguments
from shared.kubernetes.strict_yaml import load_document
from shared.model.devices.device import POD_MODES, DeviceMode
from shared.model.errors import RequestError
from shared.pods.pod_parser import PodParser
from shared.runtime.settings import setting

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RequestSettings:
    schedulers: tuple[str, ...] = setting(
        SCHEDULERS, "schedulerName values of the pods that Leasehold schedules"
    )
    koordinator_scoring: str = setting(
        "LeastAllocated",
        "scoringStrategy for pods with Koordinator's resource names: LeastAllocated (devices and "
        "nodes with more free capacity first) or MostAllocated",
        one_of=("LeastAllocated", "MostAllocated"),
    )
    allow_privileged: bool = setting(False, "GPU pods may have privileged containers")
    host_paths: tuple[str, ...] = setting(
        HOST_PATHS,
        "directories of nodes that contain only data, below which GPU pods may mount a hostPath",
    )
    systems: tuple[str, ...] = setting(
        (), "systems that are served, comma-separated; empty: all", one_of=tuple(DIALECTS)
    )
    mode_first: str = setting(
        DeviceMode.HAMI_CORE.value,
        "devices that are tried first for pods that accept both: hami-core (shares) or mig "
        "(instances)",
        one_of=POD_MODES,
    )
    strict_namespaces: tuple[str, ...] = setting(
        (), "namespaces whose pods get only MIG instances and whole devices; *: all"
    )
    volcano_conf: Path | None = setting(
        None,
        "a volcano-scheduler.conf, or the ConfigMap with it, whose deviceshare arguments apply",
    )
    node_scheduler_policy: str = setting(
        "binpack",
        "how nodes are chosen. For pods with HAMi's resource names: binpack or spread. For all "
        "pods: fragmentation, which keeps the idle GPUs usable for the pods that usually arrive, "
        "or power, which also weighs how much more power the node draws",
    )
    gpu_scheduler_policy: str = setting(
        "spread",
        "how GPUs are chosen for pods with HAMi's resource names: binpack, spread, numa, mutex, "
        "topology-aware, comma-separated",
    )

    def check(self) -> None:
        load_rules(self)

    def pod_parser(self) -> PodParser:
        return PodParser(
            frozenset(self.schedulers),
            load_rules(self),
            allow_privileged=self.allow_privileged,
            host_paths=self.host_paths,
        )


def load_rules(settings: RequestSettings) -> Rules:
    """Raises RequestError for settings that contradict."""
    rules = Rules()
    if settings.volcano_conf is not None:
        arguments = _arguments(settings.volcano_conf)
        rules = scheduler_arguments.parse_rules(arguments)
        for warning in scheduler_arguments.find_warnings(arguments):
            logger.warning("%s: %s", settings.volcano_conf, warning)
    rules = replace(
        rules,
        enabled=settings.systems,
        node_scheduler_policy=settings.node_scheduler_policy,
        gpu_scheduler_policy=settings.gpu_scheduler_policy,
        scoring_strategy=settings.koordinator_scoring,
        strict_namespaces=settings.strict_namespaces,
        prefer_mig=settings.mode_first == DeviceMode.MIG,
    )
    check_rules(rules)
    return rules


def _arguments(path: Path) -> Mapping[str, object]:
    try:
        conf = load_document(path.read_text(encoding="utf-8"))
        if conf.get("kind") == "ConfigMap":
            conf = load_document(conf["data"][scheduler_arguments.CONFIG_MAP_KEY])
        return scheduler_arguments.plugin_arguments(conf)
    except OSError as error:
        raise RequestError(f"{path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RequestError(
            f"{path} is not a valid {scheduler_arguments.CONFIG_MAP_KEY}: {error}"
        ) from error
