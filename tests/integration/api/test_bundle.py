"""A support bundle of an API behind an API server; its pods are accepted by another cluster."""

import asyncio
import tarfile
from pathlib import Path

import pytest
import yaml

from services.cli.__main__ import main
from tests.support.api.aggregated import aggregated
from tests.support.api.running import reserve_lease, running_api
from tests.support.simcluster.apiserver import PODS, a_pod, api_server, create

SECRET = "of-somebody"  # noqa: S105


def exit_code(arguments: list[str]) -> object:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return ended.value.code


async def test_a_bundle_has_no_secrets_nor_names_and_loads_into_another_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "bundle.tar.gz"
    monkeypatch.chdir(tmp_path)
    async with (
        api_server() as api,
        running_api() as shown,
        aggregated(api, shown, tmp_path) as _,
        api.client() as client,
    ):
        pod = a_pod("train-of-ada", {"volcano.sh/vgpu-number": 1})
        pod["spec"]["containers"][0]["env"] = [{"name": "PASSWORD", "value": SECRET}]
        uid = (await create(client, PODS, pod))["metadata"]["uid"]
        await reserve_lease(shown, uid, name="train-of-ada")
        arguments = ["bundle", "--out", str(file), "--kubeconfig", str(api.kubeconfig)]

        code = await asyncio.to_thread(exit_code, arguments)

    with tarfile.open(file) as archive:
        texts = {
            member.name.removeprefix("leasehold-bundle/"): archive.extractfile(member).read()  # type: ignore[union-attr]
            for member in archive
        }
    whole = b"".join(texts.values())
    assert code == 0
    assert {"views/gpus.json", "views/state.json", "objects/pods.json"} <= texts.keys()
    assert b"--gpus 2xT4" in texts["README.txt"]
    assert SECRET.encode() not in whole
    assert b"of-ada" not in whole
    async with api_server() as other, other.client() as client:
        (loaded,) = yaml.safe_load_all(texts["load/pods.yaml"])
        made = await create(client, PODS, loaded)
    assert made["spec"]["containers"][0]["resources"]["limits"] == {"volcano.sh/vgpu-number": "1"}
