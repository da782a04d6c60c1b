/* What the parts of the simulated libnvidia-ml share. */
#ifndef NVML_H
#define NVML_H
#include "state.h"

enum {
    NVML_SUCCESS = 0,
    NVML_UNINITIALIZED = 1,
    NVML_INVALID_ARGUMENT = 2,
    NVML_NOT_SUPPORTED = 3,
    NVML_NO_PERMISSION = 4,
    NVML_NOT_FOUND = 6,
    NVML_INSUFFICIENT_SIZE = 7,
    NVML_DRIVER_NOT_LOADED = 9,
    NVML_TIMEOUT = 10,
    NVML_FUNCTION_NOT_FOUND = 13,
    NVML_GPU_IS_LOST = 15,
    NVML_IN_USE = 19,
    NVML_INSUFFICIENT_RESOURCES = 23,
    NVML_UNKNOWN = 999
};
typedef int result;

/* A device handle points to a place: of a GPU, or of a MIG device. */
typedef struct place *device;

/* The handle of a whole GPU. */
device gpu_handle(int gpu);
/* The handle of a MIG device. */
device mig_handle(int gpu, int instance, int compute);
/* Return from the calling function if a device handle cannot be used. */
#define CHECK(handle)                                                                  \
    do {                                                                               \
        if (!state) return NVML_UNINITIALIZED;                                         \
        if (!(handle)) return NVML_INVALID_ARGUMENT;                                   \
        wait_while_hung((handle)->gpu);                                                \
        if (has_fault((handle)->gpu, LOST)) return NVML_GPU_IS_LOST;                   \
    } while (0)

#endif
