/* What the parts of the simulated libcuda share. */
#ifndef CUDA_H
#define CUDA_H
#include "state.h"

enum {
    CUDA_SUCCESS = 0,
    CUDA_INVALID_VALUE = 1,
    CUDA_OUT_OF_MEMORY = 2,
    CUDA_NOT_INITIALIZED = 3,
    CUDA_NO_DEVICE = 100,
    CUDA_INVALID_DEVICE = 101,
    CUDA_INVALID_CONTEXT = 201,
    CUDA_NOT_FOUND = 500,
    CUDA_NOT_READY = 600,
    CUDA_DEVICE_LOST = 719,
    CUDA_MPS_CONNECTION_FAILED = 805,
    CUDA_MPS_CLIENT_TERMINATED = 810,
    CUDA_CAPTURE_UNSUPPORTED = 900,
    CUDA_CAPTURE_INVALIDATED = 901,
    CUDA_UNKNOWN = 999
};
typedef int result;
typedef uint64_t pointer;

/* The place of a CUDA device number; NULL if there is none. */
const struct place *place_of(int device);
/* The device of the current context; -1 without one. */
int current_device(void);
/* Free all memory that this process has on a device. */
void free_all(int device);
/* Whether a GPU can be used: CUDA_SUCCESS, or why not. Waits while it hangs. */
result check(const struct place *place);

/* Give a GPU work of some time, once the queue has room; its number in the queue goes to `number`. */
struct event;
result push(uint64_t ns, struct event *event);
/* Wait until all that this process gave to the current device's GPU is done. */
result wait_for_all(void);
/* Launch a kernel or graph of some time, or add it to what a stream captures. */
result launch_ns(uint64_t ns, void *stream);
/* Whether a stream captures; what it captures then grows by a kernel. */
int captures(void *stream, uint64_t ns);
/* Whether functions may be called that a capture forbids to all threads which have not relaxed it;
 * otherwise the capture is invalid. */
int may_query(void);
/* Note when the event of an entry was done, before the entry is overwritten. The lock on turns is held. */
void keep_end(struct queue *queue, uint64_t number, struct event *next);

#define CUDA_FUNCTIONS \
    BOTH(cuMemAlloc) ONE(cuMemAllocManaged) BOTH(cuMemAllocPitch) BOTH(cuMemFree) \
    ONE(cuMemAllocAsync) ONE(cuMemFreeAsync) ONE(cuDeviceGetDefaultMemPool) ONE(cuDeviceGetMemPool) \
    ONE(cuMemPoolGetAttribute) ONE(cuMemPoolTrimTo) ONE(cuMemCreate) ONE(cuMemRelease) \
    ONE(cuMemAddressReserve) ONE(cuMemMap) ONE(cuMemUnmap) ONE(cuMemSetAccess) BOTH(cuMemGetInfo) \
    ONE(cuMemHostAlloc) BOTH(cuMemAllocHost) ONE(cuMemFreeHost) BOTH(cuMemcpyHtoD) \
    BOTH(cuMemcpyDtoH) BOTH(cuMemcpyDtoD) BOTH(cuMemsetD8) \
    ONE(cuModuleLoadData) ONE(cuModuleUnload) ONE(cuModuleGetFunction) ONE(cuLaunchKernel) \
    ONE(cuLaunchKernelEx) ONE(cuLaunchCooperativeKernel) ONE(cuCtxSynchronize) ONE(cuStreamCreate) \
    BOTH(cuStreamDestroy) ONE(cuStreamSynchronize) ONE(cuEventCreate) BOTH(cuEventDestroy) ONE(cuEventRecord) \
    ONE(cuEventQuery) ONE(cuEventSynchronize) BOTH(cuEventElapsedTime) BOTH(cuStreamBeginCapture) \
    ONE(cuStreamEndCapture) ONE(cuStreamIsCapturing) ONE(cuThreadExchangeStreamCaptureMode) \
    ONE(cuGraphInstantiateWithFlags) ONE(cuGraphLaunch) ONE(cuGraphExecDestroy) ONE(cuGraphDestroy) \
    ONE(cuLaunchKernel_ptsz) ONE(cuLaunchKernelEx_ptsz) ONE(cuLaunchCooperativeKernel_ptsz) ONE(cuGraphLaunch_ptsz)

#endif
