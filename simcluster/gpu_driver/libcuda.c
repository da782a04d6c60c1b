/* libcuda.so.1 of the simulated GPUs: devices, contexts and the table of all functions.
 *
 * Signatures are those of CUDA's public driver API. Not there: nodes of graphs, peers, textures,
 * export tables (so no libcudart), IPC. */
#include "cuda.h"
#include "limits.h"
#include "mps_client.h"

#include <pthread.h>

struct context {
    int device, owned; /* owned: made by cuCtxCreate, not a primary context */
};
static struct context primary[GPUS];
static int retained[GPUS], initialized;
static __thread struct context *stack[32];
static __thread int depth;

const struct place *place_of(int device) { return device >= 0 && device < visible_count ? &visible[device] : NULL; }
int current_device(void) { return depth ? stack[depth - 1]->device : -1; }
result check(const struct place *place) {
    if (!place) return CUDA_INVALID_DEVICE;
    wait_while_hung(place->gpu);
    if (mps_terminated()) return CUDA_MPS_CLIENT_TERMINATED;
    return has_fault(place->gpu, LOST) ? CUDA_DEVICE_LOST : CUDA_SUCCESS;
}

static void forget_contexts(void) {
    mps_forget();
    initialized = depth = 0;
    memset(retained, 0, sizeof retained);
}

API result cuInit(unsigned flags) {
    static int registered;
    (void)flags;
    if (!open_state(1) || visible_count == 0) return CUDA_NO_DEVICE;
    if (!mps_connect()) return CUDA_MPS_CONNECTION_FAILED;
    if (!registered++) pthread_atfork(NULL, NULL, forget_contexts);
    for (int n = 0; n < GPUS; n++) primary[n].device = n;
    initialized = 1;
    return CUDA_SUCCESS;
}
API result cuDriverGetVersion(int *version) {
    *version = 12080;
    return CUDA_SUCCESS;
}
API result cuGetErrorString(result error, const char **text) {
    *text = error == CUDA_SUCCESS         ? "no error"
            : error == CUDA_OUT_OF_MEMORY ? "out of memory"
            : error == CUDA_INVALID_VALUE ? "invalid argument"
            : error == CUDA_NO_DEVICE     ? "no CUDA-capable device is detected"
            : error == CUDA_DEVICE_LOST   ? "unspecified launch failure"
            : error == CUDA_MPS_CLIENT_TERMINATED ? "MPS client has been terminated by the server"
                                          : "unknown error";
    return CUDA_SUCCESS;
}
API result cuGetErrorName(result error, const char **text) {
    *text = error == CUDA_SUCCESS ? "CUDA_SUCCESS" : error == CUDA_OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR";
    return CUDA_SUCCESS;
}

API result cuDeviceGetCount(int *count) {
    *count = initialized ? visible_count : 0;
    return initialized ? CUDA_SUCCESS : CUDA_NOT_INITIALIZED;
}
API result cuDeviceGet(int *device, int number) {
    *device = number;
    return !initialized ? CUDA_NOT_INITIALIZED : place_of(number) ? CUDA_SUCCESS : CUDA_INVALID_DEVICE;
}
API result cuDeviceGetName(char *name, int length, int device) {
    if (!place_of(device)) return CUDA_INVALID_DEVICE;
    const struct place *place = place_of(device);
    int is_mig = place->instance >= 0;
    snprintf(name, (size_t)length, "%s%s%s", state->gpus[place->gpu].name, is_mig ? " MIG " : "",
             is_mig ? profile_at(place->gpu, place->instance)->name : "");
    return CUDA_SUCCESS;
}
API result cuDeviceGetUuid(unsigned char *uuid, int device) {
    const struct place *place = place_of(device);
    if (!place) return CUDA_INVALID_DEVICE;
    const struct gpu *gpu = &state->gpus[place->gpu];
    const char *text = place->instance < 0 ? gpu->uuid : gpu->instances[place->instance].computes[place->compute].uuid;
    memset(uuid, 0, 16);
    text += strcspn(text, "-"); /* after GPU or MIG */
    for (int digit = 0; *text && digit < 32; text++) {
        int value = *text >= '0' && *text <= '9' ? *text - '0' : *text >= 'a' && *text <= 'f' ? *text - 'a' + 10 : -1;
        if (value < 0) continue;
        uuid[digit / 2] |= (unsigned char)(value << (digit % 2 ? 0 : 4));
        digit++;
    }
    return CUDA_SUCCESS;
}
API result cuDeviceGetUuid_v2(unsigned char *uuid, int device) { return cuDeviceGetUuid(uuid, device); }
API result cuDeviceTotalMem_v2(size_t *bytes, int device) {
    const struct place *place = place_of(device);
    if (!place) return CUDA_INVALID_DEVICE;
    *bytes = memory_limit(device) ? memory_limit(device) : usable_bytes(place->gpu, place->instance);
    return CUDA_SUCCESS;
}
API result cuDeviceGetPCIBusId(char *text, int length, int device) {
    if (!place_of(device)) return CUDA_INVALID_DEVICE;
    snprintf(text, (size_t)length, "0000:%02x:00.0", place_of(device)->gpu + 1);
    return CUDA_SUCCESS;
}
API result cuDeviceGetAttribute(int *value, int attribute, int device) {
    const struct place *place = place_of(device);
    if (!place) return CUDA_INVALID_DEVICE;
    switch (attribute) {
    case 1: *value = 1024; break;                          /* threads per block */
    case 10: *value = 32; break;                           /* warp */
    case 16: *value = state->gpus[place->gpu].sms; break;  /* multiprocessors */
    case 33: *value = place->gpu + 1; break;               /* PCI bus */
    case 39: *value = 2048; break;                         /* threads per multiprocessor */
    case 75: *value = 8; break;                            /* compute capability, major */
    default: *value = 0;
    }
    return CUDA_SUCCESS;
}

/* Add or remove a context: all of a process on one GPU take CONTEXT_BYTES together. */
static result add_contexts(int device, int change) {
    const struct place *place = place_of(device);
    result error = check(place);
    if (error) return error;
    struct process *process = own_process();
    if (!process) return CUDA_UNKNOWN;
    lock_state();
    int g = place->gpu, first = change > 0 && atomic_load(&process->contexts[g]) == 0;
    int full = first && used_bytes(g, place->instance) + CONTEXT_BYTES > usable_bytes(g, place->instance);
    if (!full) {
        atomic_store(&process->instance[g], place->instance + 1);
        int before = atomic_fetch_add(&process->contexts[g], change);
        if (before == 0) charge(device, CONTEXT_MEMORY, CONTEXT_BYTES);
        if (before + change == 0) discharge(device, CONTEXT_MEMORY, CONTEXT_BYTES);
    }
    unlock_state();
    return full ? CUDA_OUT_OF_MEMORY : CUDA_SUCCESS;
}
API result cuDevicePrimaryCtxRetain(struct context **context, int device) {
    if (!place_of(device)) return CUDA_INVALID_DEVICE;
    result error = retained[device] ? CUDA_SUCCESS : add_contexts(device, 1);
    if (!error) {
        retained[device]++;
        *context = &primary[device];
    }
    return error;
}
API result cuDevicePrimaryCtxRelease_v2(int device) {
    if (!place_of(device) || !retained[device]) return CUDA_INVALID_CONTEXT;
    if (--retained[device]) return CUDA_SUCCESS;
    free_all(device);
    return add_contexts(device, -1);
}
API result cuDevicePrimaryCtxRelease(int device) { return cuDevicePrimaryCtxRelease_v2(device); }
API result cuDevicePrimaryCtxReset_v2(int device) {
    if (!place_of(device)) return CUDA_INVALID_DEVICE;
    free_all(device);
    return CUDA_SUCCESS;
}
API result cuDevicePrimaryCtxSetFlags_v2(int device, unsigned flags) {
    (void)flags;
    return place_of(device) ? CUDA_SUCCESS : CUDA_INVALID_DEVICE;
}
API result cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    if (!place_of(device)) return CUDA_INVALID_DEVICE;
    *flags = 0;
    *active = retained[device] > 0;
    return CUDA_SUCCESS;
}
API result cuCtxCreate_v2(struct context **context, unsigned flags, int device) {
    (void)flags;
    if (!initialized) return CUDA_NOT_INITIALIZED;
    result error = add_contexts(device, 1);
    if (error) return error;
    *context = calloc(1, sizeof **context);
    **context = (struct context){device, 1};
    stack[depth++] = *context;
    return CUDA_SUCCESS;
}
API result cuCtxDestroy_v2(struct context *context) {
    if (!context || !context->owned) return CUDA_INVALID_CONTEXT;
    result error = add_contexts(context->device, -1);
    if (depth && stack[depth - 1] == context) depth--;
    free(context);
    return error;
}
API result cuCtxGetCurrent(struct context **context) {
    *context = depth ? stack[depth - 1] : NULL;
    return CUDA_SUCCESS;
}
API result cuCtxSetCurrent(struct context *context) {
    if (depth) depth--;
    if (context) stack[depth++] = context;
    return CUDA_SUCCESS;
}
API result cuCtxPushCurrent_v2(struct context *context) {
    stack[depth++] = context;
    return CUDA_SUCCESS;
}
API result cuCtxPopCurrent_v2(struct context **context) {
    if (!depth) return CUDA_INVALID_CONTEXT;
    depth--;
    if (context) *context = stack[depth];
    return CUDA_SUCCESS;
}
API result cuCtxGetDevice(int *device) {
    *device = current_device();
    return *device < 0 ? CUDA_INVALID_CONTEXT : CUDA_SUCCESS;
}
API result cuCtxGetApiVersion(struct context *context, unsigned *version) {
    (void)context;
    *version = 12080;
    return CUDA_SUCCESS;
}
API result cuCtxGetFlags(unsigned *flags) {
    *flags = 0;
    return CUDA_SUCCESS;
}
API result cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    *least = *greatest = 0;
    return CUDA_SUCCESS;
}

API result cuGetExportTable(const void **table, const void *id) {
    (void)id;
    *table = NULL;
    return CUDA_NOT_FOUND;
}

/* A name without a version means the newest function, as in the real table. */
API result cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *status);
API result cuGetProcAddress(const char *name, void **function, int version, uint64_t flags) {
    return cuGetProcAddress_v2(name, function, version, flags, NULL);
}
#define ONE(name) extern API result name();
#define BOTH(name) extern API result name##_v2();
CUDA_FUNCTIONS
#undef ONE
#undef BOTH
#define ONE(name) {#name, (void *)name},
#define BOTH(name) {#name, (void *)name##_v2}, {#name "_v2", (void *)name##_v2},
static const struct {
    const char *name;
    void *function;
} table[] = {
    ONE(cuInit) ONE(cuDriverGetVersion) ONE(cuGetErrorString) ONE(cuGetErrorName) ONE(cuDeviceGetCount)
    ONE(cuDeviceGet) ONE(cuDeviceGetName) ONE(cuDeviceGetUuid) BOTH(cuDeviceTotalMem) ONE(cuDeviceGetPCIBusId)
    ONE(cuDeviceGetAttribute) ONE(cuDevicePrimaryCtxRetain) BOTH(cuDevicePrimaryCtxRelease)
    BOTH(cuDevicePrimaryCtxReset) BOTH(cuDevicePrimaryCtxSetFlags) ONE(cuDevicePrimaryCtxGetState)
    BOTH(cuCtxCreate) BOTH(cuCtxDestroy) ONE(cuCtxGetCurrent) ONE(cuCtxSetCurrent) BOTH(cuCtxPushCurrent)
    BOTH(cuCtxPopCurrent) ONE(cuCtxGetDevice) ONE(cuCtxGetApiVersion) ONE(cuCtxGetFlags)
    ONE(cuCtxGetStreamPriorityRange) BOTH(cuGetProcAddress) CUDA_FUNCTIONS
};
static void *find(const char *name) {
    for (size_t n = 0; n < sizeof table / sizeof *table; n++)
        if (!strcmp(table[n].name, name)) return table[n].function;
    return NULL;
}
enum { PER_THREAD_DEFAULT_STREAM = 2 };
API result cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *status) {
    (void)version;
    char per_thread[64];
    snprintf(per_thread, sizeof per_thread, "%s_ptsz", name);
    *function = flags & PER_THREAD_DEFAULT_STREAM ? find(per_thread) : NULL;
    if (!*function) *function = find(name);
    if (status) *status = *function ? 0 : 1;
    return *function ? CUDA_SUCCESS : CUDA_NOT_FOUND;
}
