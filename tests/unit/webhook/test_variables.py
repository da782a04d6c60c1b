"""Which variables and sources of variables a container with GPUs must not have."""

import pytest

from tests.unit.webhook.test_pod_policy import container, decided, env, gpu, pod


@pytest.mark.parametrize("prefix", [None, "", "NVIDIA_", "NV", "CUDA_DEVICE_MEMORY_", "LD"])
@pytest.mark.parametrize("always", [True, False])
def test_no_container_with_gpus_takes_variables_from_a_source_that_may_select_devices(
    prefix: str | None, *, always: bool
) -> None:
    source = {"configMapRef": {"name": "later"}} | ({} if prefix is None else {"prefix": prefix})
    first = {
        "name": "first",
        "resources": {"limits": {"nvidia.com/gpu": "1"}},
        "envFrom": [source],
        "restartPolicy": "Always" if always else None,
    }
    decision = decided(pod(container(), initContainers=[first]))

    assert not decision.allowed
    assert "container first: envFrom with" in decision.message


RESERVED = (
    *("NVIDIA_MIG_CONFIG_DEVICES", "NVIDIA_MIG_MONITOR_DEVICES", "NVIDIA_IMEX_CHANNELS"),
    *("NVIDIA_GDS", "NVIDIA_NVSWITCH", "CUDA_OVERSUBSCRIBE", "CUDA_TASK_PRIORITY", "LD_AUDIT"),
    *("CUDA_DEVICE_SM_LIMIT_3", "RECORD_KERNEL_INTERVAL", "DOCKER_RESOURCE_GPU"),
)


@pytest.mark.parametrize("variable", RESERVED)
@pytest.mark.parametrize("value", ["all", None])
def test_the_vocabulary_of_runtime_and_library_is_the_leases(
    variable: str, value: str | None
) -> None:
    decision = decided(pod(gpu(**env(variable, value))))

    assert not decision.allowed
    assert f"variable {variable} is set by the lease only" in decision.message
