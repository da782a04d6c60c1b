"""The wiring of the simulated cluster: store, API server, controllers, scheduler, kubelets."""

import argparse
import asyncio
import logging
import os
import secrets
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from shared.model.clock import in_background
from simcluster.apiserver.cel import matches_device
from simcluster.apiserver.http.server import ApiServer, ApiSettings, start_server
from simcluster.apiserver.kinds.service_account_tokens import ServiceAccountTokens
from simcluster.apiserver.registry import open_store
from simcluster.apiserver.storage.persistence import SqliteBackend
from simcluster.controller_manager.manager import ControllerManager
from simcluster.controller_manager.resource_claims import ResourceClaimController
from simcluster.controller_manager.volumes.controller import VolumeController
from simcluster.controller_manager.volumes.provisioner import create_default_class
from simcluster.credentials import api_server_certificates, load_secret, write_kubeconfig
from simcluster.installation import Installation
from simcluster.kubelet.fleet import KubeletFleet
from simcluster.kubelet.programs.gpu_programs import SimulatedPrograms
from simcluster.kubelet.programs.host_programs import HostPrograms
from simcluster.kubelet.settings import NodeSettings
from simcluster.scheduler.extender import SchedulerExtender
from simcluster.scheduler.scheduler import Scheduler

log = logging.getLogger("simcluster")


def choose_port(host: str, port_file: Path) -> int:
    """Return the port of the previous run if it is free, else another; save it for the next run.

    So clients with the old kubeconfig reach a restarted server at its old address.
    """
    for port in (int(port_file.read_text()) if port_file.exists() else 0, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError:
                continue
            found: int = probe.getsockname()[1]
            port_file.write_text(str(found))
            return found
    raise OSError(f"no free port on {host}")


@asynccontextmanager
async def _running(
    *parts: ControllerManager | ResourceClaimController | VolumeController | Scheduler,
) -> AsyncIterator[None]:
    """Run controllers and scheduler while the context is open; an error of one ends all of it."""
    async with AsyncExitStack() as running:
        for part in parts:
            await running.enter_async_context(in_background(part.run()))
        yield


def _node_settings(options: argparse.Namespace) -> NodeSettings:
    cpu, memory = options.node_cpu, options.node_memory
    if options.host_pods:  # the node is this machine
        cpu = str(os.cpu_count() or 1)
        memory = str(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return NodeSettings(
        cpu=cpu, memory=memory, max_pods=options.max_pods, labels=options.node_labels
    )


async def serve(options: argparse.Namespace) -> None:
    """Serve until SIGTERM or SIGINT; writes the kubeconfig when everything is ready."""
    state: Path = options.state
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    names = (options.name,) if options.name else ()
    installation = Installation.load(options.install)
    certs = api_server_certificates(state / "tls", *names)
    token = load_secret(state / "token", lambda: secrets.token_urlsafe(32))
    store = open_store(SqliteBackend(state / "objects.sqlite"), window=options.window)
    settings = ApiSettings(
        host=options.host,
        port=options.port or choose_port(options.host, state / "port"),
        token=token,
        bookmark_s=options.bookmark_s,
    )
    fleet = KubeletFleet(
        store,
        state,
        nodes=options.nodes,
        settings=_node_settings(options),
        prefix=options.node_prefix,
        programs=HostPrograms
        if options.host_pods
        else partial(SimulatedPrograms, more=options.programs),
    )
    server = ApiServer(store, settings, runtime=fleet)
    installation.create_objects(store)
    create_default_class(store)
    controllers = ControllerManager(store, server.create)
    schedulers = [Scheduler(store, server.bind, matches_device, server.write_status)]
    if options.scheduler_config:
        extender = SchedulerExtender.load(options.scheduler_config)
        schedulers.append(
            Scheduler(store, server.bind, matches_device, server.write_status, extender=extender)
        )
    claims = ResourceClaimController(store)
    volumes = VolumeController(store)
    try:
        async with (
            fleet,
            start_server(server, certs) as url,
            _running(controllers, claims, volumes, *schedulers),
        ):
            known_as = f"https://{options.name}:{urlsplit(url).port}" if options.name else url
            ca_pem = certs.ca.read_bytes()
            installation.write_webhook_client_ca(certs.ca.parent)
            installation.write_kubeconfigs(ServiceAccountTokens(store, token), known_as, ca_pem)
            write_kubeconfig(state / "kubeconfig", known_as, ca_pem, token)
            log.info("listening on %s as %s, nodes %d", url, known_as, options.nodes)
            await stop.wait()
    finally:
        store.close()
