/* Kernels of the simulated GPUs, which only take time.
 *
 * A kernel is named `us_<n>`: it keeps its GPU busy for n microseconds, whatever its grid. Kernels
 * of all processes on a GPU, or on an instance of one, run one after the other. */
#include "cuda.h"
#include "limits.h"

#define MOST_QUEUED_NS 10000000ull /* a launch waits while so much is queued */

static _Atomic uint64_t last_end, not_before[GPUS];

static void sleep_ns(uint64_t ns) {
    struct timespec time = {(time_t)(ns / 1000000000), (long)(ns % 1000000000)};
    nanosleep(&time, NULL);
}

API result cuModuleLoadData(void **module, const void *image) {
    (void)image;
    *module = (void *)1;
    return CUDA_SUCCESS;
}
API result cuModuleUnload(void *module) {
    (void)module;
    return CUDA_SUCCESS;
}
API result cuModuleGetFunction(void **function, void *module, const char *name) {
    (void)module;
    long microseconds = strncmp(name, "us_", 3) ? 0 : atol(name + 3);
    *function = (void *)(uintptr_t)microseconds;
    return microseconds > 0 ? CUDA_SUCCESS : CUDA_NOT_FOUND;
}

static result launch(void *function) {
    const struct place *place = place_of(current_device());
    result error = place ? check(place) : CUDA_INVALID_CONTEXT;
    if (error) return error;
    struct process *process = own_process();
    if (!process) return CUDA_UNKNOWN;
    struct gpu *gpu = &state->gpus[place->gpu];
    _Atomic uint64_t *busy_until = place->instance < 0 ? &gpu->busy_until : &gpu->instances[place->instance].busy_until;
    uint64_t cost = (uint64_t)(uintptr_t)function * 1000, busy, from;
    int device = current_device();
    for (uint64_t now; (now = now_ns()) < atomic_load(&not_before[device]);) sleep_ns(not_before[device] - now);
    for (;;) {
        uint64_t now = now_ns();
        busy = atomic_load(busy_until);
        from = busy > now ? busy : now;
        if (from - now > MOST_QUEUED_NS) sleep_ns(MOST_QUEUED_NS / 5);
        else if (atomic_compare_exchange_weak(busy_until, &busy, from + cost)) break;
    }
    if (core_limit(device) < 100) atomic_store(&not_before[device], from + cost * 100 / core_limit(device));
    note_busy(process, place->gpu, from, from + cost);
    note_launch(device, busy_percent(process, place->gpu, TICKS_PER_S));
    atomic_store(&last_end, from + cost);
    return CUDA_SUCCESS;
}
API result cuLaunchKernel(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                          unsigned block_y, unsigned block_z, unsigned shared, void *stream, void **params,
                          void **extra) {
    (void)grid_x, (void)grid_y, (void)grid_z, (void)block_x, (void)block_y, (void)block_z;
    (void)shared, (void)stream, (void)params, (void)extra;
    return launch(function);
}
API result cuLaunchKernelEx(const void *config, void *function, void **params, void **extra) {
    (void)config, (void)params, (void)extra;
    return launch(function);
}
API result cuCtxSynchronize(void) {
    uint64_t now = now_ns(), end = atomic_load(&last_end);
    if (end > now) sleep_ns(end - now);
    return CUDA_SUCCESS;
}
API result cuStreamCreate(void **stream, unsigned flags) {
    (void)flags;
    *stream = (void *)1;
    return CUDA_SUCCESS;
}
API result cuStreamDestroy_v2(void *stream) {
    (void)stream;
    return CUDA_SUCCESS;
}
API result cuStreamSynchronize(void *stream) {
    (void)stream;
    return cuCtxSynchronize();
}
