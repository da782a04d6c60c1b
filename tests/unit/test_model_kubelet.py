"""The kubelet of the model after an outage of its API server."""

from typing import Any
from unittest.mock import Mock

import pytest

from shared.model.names import PodUid
from shared.model.requests.request import PodRequest
from tests.model.api_server import Pod
from tests.model.kubelet import Kubelet, KubeletRecord


def admitted(name: str, number: int) -> dict[PodUid, KubeletRecord]:
    uid = PodUid(f"{name}-{number}")
    request: Any = Mock(PodRequest)
    return {uid: KubeletRecord(Pod(uid, name, request, created_at=0.0))}


@pytest.mark.parametrize(("answer", "listed"), [("old", ["b-2"]), ("late", ["b-2", "a-3"])])
async def test_an_old_list_has_no_pod_besides_the_one_that_was_made_again_under_its_name(
    answer: str, listed: list[str]
) -> None:
    """The API server has one pod of a name, and a kubelet removes what is gone before it adds."""
    node: Any = Mock()
    node.clock.ticks.return_value = 0.0
    kubelet = Kubelet(node)
    kubelet.records = admitted("a", 1) | admitted("b", 2)
    kubelet.lose_api(answer)
    kubelet.records = admitted("a", 3)

    assert [pod.uid for pod in await kubelet.list_pods()] == listed
