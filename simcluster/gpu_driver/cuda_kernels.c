/* Kernels of the simulated GPUs, which only take time.
 *
 * A kernel is named `us_<n>`: it takes n microseconds of its GPU, whatever its grid. All streams of
 * a process are one: its kernels run in the order in which they are launched. */
#include "cuda.h"
#include "limits.h"
#include "mps_client.h"
#include "turns.h"

#include <sys/prctl.h>

struct function {
    uint64_t ns;
    struct function *next; /* of the module */
};
struct module {
    struct function *functions;
};
static _Atomic uint64_t not_before[GPUS];

static void sleep_ns(uint64_t ns) {
    static __thread int precise;
    if (!precise) precise = !prctl(PR_SET_TIMERSLACK, 1);
    struct timespec time = {(time_t)(ns / 1000000000), (long)(ns % 1000000000)};
    nanosleep(&time, NULL);
}

API result cuModuleLoadData(struct module **module, const void *image) {
    (void)image;
    *module = calloc(1, sizeof **module);
    return CUDA_SUCCESS;
}
/* The memory of functions is used again at once: a later one may have the same handle. */
static struct function *unused;
API result cuModuleUnload(struct module *module) {
    lock_turns();
    while (module->functions) {
        struct function *function = module->functions;
        module->functions = function->next;
        function->next = unused;
        unused = function;
    }
    unlock_turns();
    free(module);
    return CUDA_SUCCESS;
}
API result cuModuleGetFunction(struct function **function, struct module *module, const char *name) {
    long microseconds = strncmp(name, "us_", 3) ? 0 : atol(name + 3);
    if (microseconds <= 0) return CUDA_NOT_FOUND;
    lock_turns();
    *function = unused ? unused : malloc(sizeof **function);
    if (unused) unused = unused->next;
    **function = (struct function){(uint64_t)microseconds * 1000, module->functions};
    module->functions = *function;
    unlock_turns();
    return CUDA_SUCCESS;
}

result push(uint64_t ns, struct event *event) {
    const struct place *place = place_of(current_device());
    result error = place ? check(place) : CUDA_INVALID_CONTEXT;
    if (error) return error;
    struct process *process = own_process();
    if (!process) return CUDA_UNKNOWN;
    for (;;) {
        lock_turns();
        advance(place->gpu, place->instance);
        struct queue *queue = queue_of(process, place->gpu);
        uint64_t pushed = queue ? atomic_load(&queue->pushed) : 0, left = queue ? queue->left : 0;
        int has_room = queue && pushed - atomic_load(&queue->done) < RING - 1;
        if (has_room) {
            keep_end(queue, pushed, event);
            queue->ring[pushed % RING].ns = ns;
            if (pushed == atomic_load(&queue->done)) queue->left = ns;
            atomic_store(&queue->pushed, pushed + 1);
        }
        unlock_turns();
        if (!queue) return CUDA_UNKNOWN;
        if (has_room) return CUDA_SUCCESS;
        sleep_ns(left > 50000 ? left : 50000);
    }
}

result wait_for_all(void) {
    const struct place *place = place_of(current_device());
    struct process *process = own_process();
    if (!place || !process) return CUDA_INVALID_CONTEXT;
    uint64_t last = 0;
    for (int first = 1;; first = 0) {
        uint64_t left = 0;
        lock_turns();
        advance(place->gpu, place->instance);
        struct queue *queue = queue_of(process, place->gpu);
        if (queue && first) last = atomic_load(&queue->pushed);
        uint64_t done = queue ? atomic_load(&queue->done) : last;
        if (done < last) left = queue->left;
        for (uint64_t n = done + 1; n < last; n++) left += queue->ring[n % RING].ns;
        unlock_turns();
        if (done >= last) return CUDA_SUCCESS;
        sleep_ns(left > 5000 ? left : 5000);
    }
}

result launch_ns(uint64_t ns, void *stream) {
    int device = current_device();
    if (captures(stream, ns)) return CUDA_SUCCESS;
    for (uint64_t now; device >= 0 && (now = now_ns()) < atomic_load(&not_before[device]);) sleep_ns(not_before[device] - now);
    result error = push(ns, NULL);
    uint64_t percent = mps_percent() < core_limit(device) ? mps_percent() : core_limit(device);
    if (error || percent >= 100) return error;
    uint64_t now = now_ns(), from = atomic_load(&not_before[device]);
    atomic_store(&not_before[device], (from > now ? from : now) + ns * 100 / percent);
    note_launch(device, busy_percent(own_process(), place_of(device)->gpu));
    return CUDA_SUCCESS;
}
/* Also under the name that programs with a default stream per thread use. */
#define LAUNCH(name, parameters, ...) \
    API result name parameters __VA_ARGS__ \
    API result name##_ptsz parameters __VA_ARGS__
struct launch_config {
    unsigned grid[3], block[3], shared;
    void *stream;
};
LAUNCH(cuLaunchKernel,
       (struct function *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
        unsigned block_y, unsigned block_z, unsigned shared, void *stream, void **params, void **extra),
       {
           (void)grid_x, (void)grid_y, (void)grid_z, (void)block_x, (void)block_y, (void)block_z;
           (void)shared, (void)params, (void)extra;
           return launch_ns(function->ns, stream);
       })
LAUNCH(cuLaunchCooperativeKernel,
       (struct function *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
        unsigned block_y, unsigned block_z, unsigned shared, void *stream, void **params),
       {
           (void)grid_x, (void)grid_y, (void)grid_z, (void)block_x, (void)block_y, (void)block_z;
           (void)shared, (void)params;
           return launch_ns(function->ns, stream);
       })
LAUNCH(cuLaunchKernelEx, (const struct launch_config *config, struct function *function, void **params, void **extra), {
    (void)params, (void)extra;
    return launch_ns(function->ns, config->stream);
})

API result cuCtxSynchronize(void) { return wait_for_all(); }
API result cuStreamCreate(void **stream, unsigned flags) {
    (void)flags;
    *stream = malloc(1);
    return CUDA_SUCCESS;
}
API result cuStreamDestroy_v2(void *stream) {
    free(stream);
    return CUDA_SUCCESS;
}
API result cuStreamSynchronize(void *stream) {
    (void)stream;
    return wait_for_all();
}
