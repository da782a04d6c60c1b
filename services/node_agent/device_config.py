"""Configurations of Volcano's and NVIDIA's plugins, from files or ConfigMaps.

Of an invalid document, the last valid version stays in force; without one, what is valid of it.
"""

import asyncio
import contextlib
import json
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import msgspec

from services.node_agent.files import replace_file
from services.node_agent.gpus.inventory import SharingConfig
from services.node_agent.metrics import CONFIG_ERRORS
from services.node_agent.node import Node
from services.node_agent.settings import AgentSettings
from shared.dialects.nvidia.plugin_config import CONFIG_MAP as PLUGIN_MAP
from shared.dialects.nvidia.plugin_config import (
    NODE_CONFIG,
    NodeSharing,
    UnknownConfigError,
    config_for,
    parse_sharing,
    replicas_of,
)
from shared.dialects.strict_values import load_json
from shared.dialects.volcano.device_config import (
    DEVICE_KEY,
    DEVICE_MAP,
    NAMESPACES,
    NODE_KEY,
    NODE_MAP,
    DeviceConfig,
    parse_device_config,
)
from shared.kubernetes.errors import NotFoundError
from shared.kubernetes.paths import node_path, objects_path
from shared.kubernetes.strict_yaml import load_document
from shared.kubernetes.types import ApiNode, RawObject
from shared.model.bounds import cut
from shared.model.errors import UNDECODABLE, LeaseholdError, RequestError

logger = logging.getLogger(__name__)

AGENTS = "leasehold-agents"
_KEYS = {DEVICE_MAP: DEVICE_KEY, NODE_MAP: NODE_KEY, PLUGIN_MAP: ""}
"""The node's label decides the last one's."""
REFRESH_S = 60.0
"""How long a ConfigMap's content is used."""
REQUEST_TIMEOUT_S = 3.0
"""An agent starts with its cached configuration if the API server takes longer."""


class DeviceConfigLoader:
    """The contents in force are cached in a file: an agent that restarts needs no API server."""

    def __init__(self, node: Node, settings: AgentSettings) -> None:
        self.client = node.kubernetes
        self.node = node.name
        self.flags = settings.sharing
        self.split = settings.device_split_count
        self.unit = settings.memory_factor
        self.files = {
            DEVICE_MAP: settings.device_config,
            NODE_MAP: settings.node_config,
            PLUGIN_MAP: settings.plugin_config,
        }
        self.cache_file = settings.state_dir / "device-config.json"
        self.clock = node.clock
        self.report_error = node.config_errors.append
        self._sharing: SharingConfig | None = None
        self._read_at = 0.0
        self._texts: dict[str, str | None] = {}
        self._in_force: dict[str, str | None] | None = None
        self._warnings: tuple[str, ...] = ()
        self._read_errors: dict[str, str] = {}

    async def load(self) -> SharingConfig:
        """Return ConfigMaps as cached the first time.

        Raises RequestError if the file of a flag cannot be read then.
        """
        if self._sharing is None or self.clock.ticks() >= self._read_at + REFRESH_S:
            if self._in_force is None:
                self._in_force = await asyncio.to_thread(self._load_cache)
            from_cache = self._sharing is None and bool(self._in_force)
            texts = {
                name: self._in_force.get(name)
                if from_cache and self.files[name] is None
                else await self._read_text(name, key)
                for name, key in _KEYS.items()
            }
            self._read_at = -math.inf if from_cache else self.clock.ticks()
            if self._sharing is None or texts != self._texts:
                self._in_force = {
                    name: self._choose(name, text, self._in_force.get(name))
                    for name, text in texts.items()
                }
                self._sharing = self._parse(self._in_force)
                self._texts = texts
                await asyncio.to_thread(self._save_cache, self._in_force)
        return self._sharing

    async def _read_text(self, name: str, key: str) -> str | None:
        file = self.files[name]
        if file is None:
            return await self._read_config_map(name, key)
        try:
            return await asyncio.to_thread(file.read_text)
        except (OSError, UnicodeDecodeError) as error:
            if self._sharing is None:
                raise RequestError(f"{file} cannot be read: {error}") from error
            logger.warning("%s cannot be read, using the previous content: %s", file, error)
            return self._texts.get(name)

    async def _read_config_map(self, name: str, key: str) -> str | None:
        try:
            text = None
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                for namespace in (AGENTS,) if name == PLUGIN_MAP else NAMESPACES:
                    with contextlib.suppress(NotFoundError):
                        path = objects_path(namespace, "configmaps", name)
                        stored = await self.client.read(path, RawObject)
                        text = await self._text_in(stored.data or {}, key)
                        break
            self._read_errors.pop(name, None)
        except (LeaseholdError, TimeoutError) as error:
            previous = self._texts
            reason = str(error) or f"no response within {REQUEST_TIMEOUT_S:g} s"
            if self._read_errors.get(name) != reason:
                logger.warning(
                    "ConfigMap %s cannot be read, using the previous content: %s", name, reason
                )
                if isinstance(error, UnknownConfigError):
                    self.report_error(reason)
            self._read_errors[name] = reason
            text = previous.get(name)
        return text

    async def _text_in(self, data: Mapping[str, str], key: str) -> str | None:
        """Without a key, the node's label decides. Raises UnknownConfigError if it names none."""
        if key:
            return data.get(key)
        node = await self.client.read(node_path(self.node), ApiNode)
        return config_for(data, node.metadata.labels.get(NODE_CONFIG))

    def _choose(self, name: str, text: str | None, valid: str | None) -> str | None:
        texts = {name: text}
        errors = self._replicas_of(texts)[1] or self._config_of(texts).errors
        CONFIG_ERRORS.labels(name).set(len(errors))
        if not errors:
            return text
        in_force = "its last valid version" if valid else "what is valid of it"
        problem = f"{name} is invalid, and {in_force} is in force: {'; '.join(errors)}"
        logger.error("ConfigMap or file %s", problem)
        self.report_error(problem)
        return valid or text

    def _config_of(self, texts: Mapping[str, str | None]) -> DeviceConfig:
        errors: list[str] = []
        device = _document(texts.get(DEVICE_MAP), DEVICE_KEY, load_document, errors)
        node = _document(texts.get(NODE_MAP), NODE_KEY, load_json, errors)
        config = parse_device_config(device, node, self.node)
        return replace(config, errors=(*errors, *config.errors))

    def _replicas_of(self, texts: Mapping[str, str | None]) -> tuple[NodeSharing, tuple[str, ...]]:
        errors: list[str] = []
        document = _document(texts.get(PLUGIN_MAP), PLUGIN_MAP, load_document, errors)
        if document is None:
            return NodeSharing(), tuple(errors)
        try:
            sharing = parse_sharing(document)
            replicas_of(sharing)
        except RequestError as error:
            return NodeSharing(), (str(error),)
        return sharing, ()

    def _parse(self, texts: Mapping[str, str | None]) -> SharingConfig:
        config = self._config_of(texts)
        shared, _ = self._replicas_of(texts)
        warnings = (*config.warnings, *shared.warnings)
        for text in warnings:
            if text not in self._warnings:
                logger.warning("configuration: %s", text)
        self._warnings = warnings
        sharing = self.flags.merged(config, split=self.split, unit=self.unit)
        return replace(sharing, replicas=replicas_of(shared))

    def _save_cache(self, texts: dict[str, str | None]) -> None:
        try:
            replace_file(self.cache_file, json.dumps(texts).encode())
        except OSError as error:
            logger.warning("%s cannot be written: %s", self.cache_file, error.strerror)

    def _load_cache(self) -> dict[str, str | None]:
        try:
            return msgspec.json.decode(self.cache_file.read_bytes(), type=dict[str, str | None])
        except (OSError, *UNDECODABLE):
            return {}


def _document(
    text: str | None, source: str, load: Callable[[str], object], errors: list[str]
) -> object:
    try:
        return load(text) if text and text.strip() else None
    except ValueError as error:
        errors.append(f"{source} is ignored, its syntax is invalid: {cut(str(error))}")
        return None
