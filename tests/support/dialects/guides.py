"""The manifests that the vendors' user guides print, in full, and what their readers type.

Two of them are fragments in their guide (`metadata` and `spec` alone); `POD` stands before those.
"""

from pathlib import Path

POD = "apiVersion: v1\nkind: Pod\n"


def _printed(name: str) -> str:
    return Path(__file__).with_name("printed").joinpath(f"{name}.yaml").read_text()


VOLCANO_GPU_SHARING_CONF = _printed("volcano-gpu-sharing-conf")
VOLCANO_GPU_POD_1 = _printed("volcano-gpu-pod-1")
VOLCANO_GPU_POD_2 = VOLCANO_GPU_POD_1.replace("gpu-pod1", "gpu-pod2")
VOLCANO_VGPU_POD = _printed("volcano-vgpu-pod")
VOLCANO_HAMI_CONF = _printed("volcano-hami-conf")
VOLCANO_HAMI_POD = _printed("volcano-hami-pod")
VOLCANO_MIG_CONF = _printed("volcano-mig-conf")
VOLCANO_MIG_POD = _printed("volcano-mig-pod")
KOORDINATOR_POD = _printed("koordinator-pod")
GPUSHARING_POD = _printed("gpusharing-pod")


def without_webhook(pod: str) -> str:
    """Return a pod of the GPU sharing guide as the webhook completes it, for stacks without one."""
    limit = "          volcano.sh/gpu-memory: "
    return pod.replace(limit, f'          leasehold.dev/share: "1"\n{limit}')
