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
    CUDA_DEVICE_LOST = 719,
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

#define CUDA_FUNCTIONS \
    BOTH(cuMemAlloc) ONE(cuMemAllocManaged) BOTH(cuMemAllocPitch) BOTH(cuMemFree) \
    ONE(cuMemAllocAsync) ONE(cuMemFreeAsync) ONE(cuDeviceGetDefaultMemPool) ONE(cuDeviceGetMemPool) \
    ONE(cuMemPoolGetAttribute) ONE(cuMemPoolTrimTo) ONE(cuMemCreate) ONE(cuMemRelease) \
    ONE(cuMemAddressReserve) ONE(cuMemMap) ONE(cuMemUnmap) ONE(cuMemSetAccess) BOTH(cuMemGetInfo) \
    ONE(cuMemHostAlloc) BOTH(cuMemAllocHost) ONE(cuMemFreeHost) BOTH(cuMemcpyHtoD) \
    BOTH(cuMemcpyDtoH) BOTH(cuMemcpyDtoD) BOTH(cuMemsetD8) \
    ONE(cuModuleLoadData) ONE(cuModuleUnload) ONE(cuModuleGetFunction) ONE(cuLaunchKernel) \
    ONE(cuLaunchKernelEx) ONE(cuCtxSynchronize) ONE(cuStreamCreate) BOTH(cuStreamDestroy) \
    ONE(cuStreamSynchronize)

#endif
