"""The manifests that the vendors' user guides print, in full, and what their readers type.

Two of them are fragments in their guide (`metadata` and `spec` alone); `POD` stands before those.
"""

POD = "apiVersion: v1\nkind: Pod\n"


def without_webhook(pod: str) -> str:
    """Return a pod of the GPU sharing guide as the webhook completes it, for stacks without one."""
    limit = "          volcano.sh/gpu-memory: "
    return pod.replace(limit, f'          leasehold.dev/share: "1"\n{limit}')


VOLCANO_GPU_SHARING_CONF = """
kind: ConfigMap
apiVersion: v1
metadata:
  name: volcano-scheduler-configmap
  namespace: volcano-system
data:
  volcano-scheduler.conf: |
    actions: "enqueue, allocate, backfill"
    tiers:
    - plugins:
      - name: priority
      - name: gang
      - name: conformance
    - plugins:
      - name: drf
      - name: predicates
        arguments:
          predicate.GPUSharingEnable: true # enable gpu sharing
      - name: proportion
      - name: nodeorder
      - name: binpack
"""
VOLCANO_GPU_POD_1 = """
apiVersion: v1
kind: Pod
metadata:
  name: gpu-pod1
spec:
  schedulerName: volcano
  containers:
    - name: cuda-container
      image: nvidia/cuda:9.0-devel
      command: ["sleep"]
      args: ["100000"]
      resources:
        limits:
          volcano.sh/gpu-memory: 1024 # requesting 1024MB GPU memory
"""
VOLCANO_GPU_POD_2 = VOLCANO_GPU_POD_1.replace("gpu-pod1", "gpu-pod2")
VOLCANO_VGPU_POD = """
apiVersion: v1
kind: Pod
metadata:
  name: gpu-pod1
spec:
  schedulerName: volcano
  containers:
    - name: cuda-container
      image: nvidia/cuda:9.0-devel
      command: ["sleep"]
      args: ["100000"]
      resources:
        limits:
          volcano.sh/vgpu-number: 2 # requesting 2 gpu cards
          volcano.sh/vgpu-memory: 3000 # (optinal)each vGPU uses 3G device memory
          volcano.sh/vgpu-cores: 50 # (optional)each vGPU uses 50% core  
"""  # noqa: W291 - the guide has the blanks

VOLCANO_HAMI_CONF = """
kind: ConfigMap
apiVersion: v1
metadata:
  name: volcano-scheduler-configmap
  namespace: volcano-system
data:
  volcano-scheduler.conf: |
    actions: "enqueue, allocate, backfill"
    tiers:
    - plugins:
      - name: predicates
      - name: deviceshare
        arguments:
          deviceshare.VGPUEnable: true
"""
VOLCANO_HAMI_POD = """
metadata:
  name: hami-pod
spec:
  schedulerName: volcano
  containers:
  - name: cuda-container
    image: nvidia/cuda:9.0-devel
    resources:
      limits:
        volcano.sh/vgpu-number: 1    # requesting 1 gpu cards
        volcano.sh/vgpu-cores: 50    # (optional)each vGPU uses 50%
        volcano.sh/vgpu-memory: 3000 # (optional)each vGPU uses 3G GPU memory
"""
VOLCANO_MIG_CONF = f"""{VOLCANO_HAMI_CONF}\
          deviceshare.KnowGeometriesCMName: volcano-vgpu-device-config
          deviceshare.KnowGeometriesCMNamespace: kube-system
          deviceshare.SchedulePolicy: binpack
"""
VOLCANO_MIG_POD = """
metadata:
  name: mig-pod
  annotations:
    volcano.sh/vgpu-mode: "mig"
spec:
  schedulerName: volcano
  containers:
  - name: cuda-container
    image: nvidia/cuda:9.0-devel
    resources:
      limits:
        volcano.sh/vgpu-number: 1
        volcano.sh/vgpu-memory: 3000
"""

KOORDINATOR_POD = """
apiVersion: v1
kind: Pod
metadata:
  name: pod-example
  namespace: default
  labels:
    koordinator.sh/gpu-isolation-provider: hami-core
spec:
  schedulerName: koord-scheduler
  containers:
  - command:
    - sleep
    - 365d
    image: busybox
    imagePullPolicy: IfNotPresent
    name: curlimage
    resources:
      limits:
        cpu: 40m
        memory: 40Mi
        koordinator.sh/gpu.shared: 1
        koordinator.sh/gpu-core: 50
        koordinator.sh/gpu-memory-ratio: 50
      requests:
        cpu: 40m
        memory: 40Mi
        koordinator.sh/gpu.shared: 1
        koordinator.sh/gpu-core: 50
        koordinator.sh/gpu-memory-ratio: 50
    terminationMessagePath: /dev/termination-log
    terminationMessagePolicy: File
  restartPolicy: Always
"""

GPUSHARING_POD = """
apiVersion: v1
kind: Pod
metadata:
  name: mnist-case
spec:
  containers:
  - image: localhost:5000/usecase/mnist:latest
    name: nvidia
    resources:
      limits:
        tencent.com/vcuda-core: 50      # 50% of a GPU
        tencent.com/vcuda-memory: 15    # 15 * 256MB of VRAM
"""
