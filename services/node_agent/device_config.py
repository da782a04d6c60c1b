"""Finds Volcano's ConfigMaps, in files or at the API server, and reads them again now and then."""

import asyncio
import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import yaml

from services.node_agent.gpus.inventory import SharingConfig, check_sharing_config
from services.node_agent.mig.layouts import KNOWN_GEOMETRIES
from shared.dialects.advertised import Strategy
from shared.dialects.volcano.device_config import (
    DEVICE_KEY,
    DEVICE_MAP,
    NAMESPACES,
    NODE_KEY,
    NODE_MAP,
    DeviceConfig,
    parse_device_config,
)
from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.errors import NotFoundError
from shared.model.clock import Clock
from shared.model.errors import LeaseholdError, RequestError
from shared.model.names import NodeName

logger = logging.getLogger(__name__)

READ_AGAIN_S = 60.0
ASK_S = 3.0


def merge_sharing(
    config: DeviceConfig, flags: SharingConfig, *, split: int | None, unit: int | None
) -> SharingConfig:
    """Return how the node's devices are divided.

    Flags (`split` and `unit`, None where not given) win over the file for all nodes, and the
    node's own entry over both; 10 slots and 1 MiB per unit are what nobody has to say.
    """
    return replace(
        flags,
        split_count=config.node_split_count or split or config.split_count or flags.split_count,
        unit_mib=unit or config.unit_mib or flags.unit_mib,
        geometries=(*config.geometries, *KNOWN_GEOMETRIES),
        hidden=config.excluded_devices,
        expected_mode=config.mode,
    )


class _ConfigMap(msgspec.Struct):
    data: dict[str, str] | None = None


class DeviceConfigLoader:
    """How the node's devices are divided, as flags and both ConfigMaps say together.

    What the API server said is kept in a file, so that an agent that starts without it divides
    devices as before.
    """

    def __init__(
        self,
        kube: KubernetesClient,
        node: NodeName,
        *,
        flags: SharingConfig,
        split: int | None,
        unit: int | None,
        device_file: Path | None,
        node_file: Path | None,
        cache_file: Path,
        clock: Clock,
    ) -> None:
        self.kube = kube
        self.node = node
        self.flags = flags
        self.split = split
        self.unit = unit
        self.files = {DEVICE_MAP: device_file, NODE_MAP: node_file}
        self.kept = cache_file
        self.clock = clock
        self._sharing: SharingConfig | None = None
        self._read_at = 0.0
        self._texts: dict[str, str | None] = {}
        self._warnings: tuple[str, ...] = ()
        self._read_errors: dict[str, str] = {}
        """Why a ConfigMap could not be read when it was last tried."""

    async def load(self) -> SharingConfig:
        """Return it, as of at most `READ_AGAIN_S` ago.

        Raises RequestError if a file that a flag names cannot be read when it is first wanted, or
        if the settings divide nothing.
        """
        if self._sharing is None or self.clock.ticks() >= self._read_at + READ_AGAIN_S:
            texts = {
                DEVICE_MAP: await self._read_text(DEVICE_MAP, DEVICE_KEY),
                NODE_MAP: await self._read_text(NODE_MAP, NODE_KEY),
            }
            self._read_at = self.clock.ticks()
            if self._sharing is None or texts != self._texts:
                self._sharing = self._parse(texts)
                self._texts = texts
                await asyncio.to_thread(self._save_cache, texts)
        return self._sharing

    async def _read_text(self, name: str, key: str) -> str | None:
        file = self.files[name]
        if file is None:
            return await self._from_cluster(name, key)
        try:
            return await asyncio.to_thread(file.read_text)
        except (OSError, UnicodeDecodeError) as error:
            if self._sharing is None:
                raise RequestError(f"{file} cannot be read: {error}") from error
            logger.warning("%s cannot be read, and counts as it was: %s", file, error)
            return self._texts.get(name)

    async def _from_cluster(self, name: str, key: str) -> str | None:
        try:
            async with asyncio.timeout(ASK_S):
                for namespace in NAMESPACES:
                    try:
                        found = await self.kube.read(
                            f"/api/v1/namespaces/{namespace}/configmaps/{name}", _ConfigMap
                        )
                    except NotFoundError:
                        continue
                    self._read_errors.pop(name, None)
                    return (found.data or {}).get(key)
                self._read_errors.pop(name, None)
                return None
        except (LeaseholdError, TimeoutError) as error:
            before = self._texts or await asyncio.to_thread(self._load_cache)
            why = str(error) or f"no answer within {ASK_S:g} s"
            if self._read_errors.get(name) != why:
                logger.warning("ConfigMap %s cannot be read, and counts as it was: %s", name, why)
            self._read_errors[name] = why
            return before.get(name)

    def _parse(self, texts: dict[str, str | None]) -> SharingConfig:
        said: list[str] = []
        config = parse_device_config(
            _document(texts[DEVICE_MAP], DEVICE_KEY, yaml.safe_load, said),
            _document(texts[NODE_MAP], NODE_KEY, json.loads, said),
            self.node,
        )
        for text in (*said, *config.warnings):
            if text not in self._warnings:
                logger.warning("configuration: %s", text)
        self._warnings = (*said, *config.warnings)
        division = merge_sharing(config, self.flags, split=self.split, unit=self.unit)
        check_sharing_config(division, Strategy.ALL)
        return division

    def _save_cache(self, texts: dict[str, str | None]) -> None:
        """Keep them for a start without the API server; a full disk is no reason to stop."""
        draft = self.kept.with_suffix(".new")
        try:
            draft.write_text(json.dumps(texts))
            draft.replace(self.kept)
        except OSError as error:
            logger.warning("%s cannot be written: %s", self.kept, error.strerror)

    def _load_cache(self) -> dict[str, str | None]:
        try:
            kept: dict[str, str | None] = json.loads(self.kept.read_text())
        except (OSError, ValueError):
            return {}
        return kept


def _document(
    text: str | None, where: str, load: Callable[[str], object], said: list[str]
) -> object:
    """Return what a text says; None for none, or for one that is not in its language."""
    try:
        return load(text) if text and text.strip() else None
    except (yaml.YAMLError, ValueError) as error:
        said.append(f"{where} cannot be read, and says nothing: {error}")
        return None
