/* Memory of the simulated GPUs: allocations with an account per process.
 *
 * An allocation is a private mapping: it takes no memory of the node until somebody writes to it. */
#include "cgroup_limits.h"
#include "cuda.h"
#include "limits.h"
#include "mps_client.h"

#include <pthread.h>
#include <sys/mman.h>

struct allocation {
    pointer at;
    size_t size;
    int device, from_pool;
    struct allocation *next;
};
static struct allocation *allocations;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static struct pool {
    _Atomic uint64_t used, most_used;
} pools[GPUS]; /* of stream-ordered allocations, one per device */

static void give_back(int device, size_t size) {
    lock_state();
    atomic_fetch_sub(&own_process()->used[place_of(device)->gpu], size);
    note_freed(own_process(), place_of(device)->gpu);
    discharge(device, DATA_MEMORY, size);
    unlock_state();
}

static result allocate(pointer *at, size_t size, int device, int from_pool) {
    const struct place *place = place_of(device);
    result error = place ? check(place) : CUDA_INVALID_CONTEXT;
    if (error) return error;
    if (size == 0) return CUDA_INVALID_VALUE;
    struct process *process = own_process();
    if (!process) return CUDA_UNKNOWN;
    lock_state();
    uint64_t limit = memory_limit(device), by_mps = mps_memory_limit(state->gpus[place->gpu].uuid);
    int full = used_bytes(place->gpu, place->instance) + size > usable_bytes(place->gpu, place->instance) ||
               (limit && container_bytes(device) + size > limit) ||
               (by_mps && held_bytes(process, place->gpu) + size > by_mps) ||
               (place->instance < 0 && !may_allocate(process, place->gpu, size));
    if (!full) {
        atomic_fetch_add(&process->used[place->gpu], size);
        note_allocated(process, place->gpu, size);
        charge(device, DATA_MEMORY, size);
    }
    unlock_state();
    if (full) return CUDA_OUT_OF_MEMORY;
    void *mapped = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    struct allocation *made = malloc(sizeof *made);
    if (mapped == MAP_FAILED || !made) {
        give_back(device, size);
        return CUDA_OUT_OF_MEMORY;
    }
    *at = (pointer)(uintptr_t)mapped;
    pthread_mutex_lock(&mutex);
    *made = (struct allocation){*at, size, device, from_pool, allocations};
    allocations = made;
    pthread_mutex_unlock(&mutex);
    return CUDA_SUCCESS;
}

static void release(struct allocation *gone) {
    munmap((void *)(uintptr_t)gone->at, gone->size);
    give_back(gone->device, gone->size);
    if (gone->from_pool) atomic_fetch_sub(&pools[gone->device].used, gone->size);
    free(gone);
}

/* Free the allocation at an address, or all of a device if that is not -1; return how many. */
static int release_matching(pointer at, int device) {
    int released = 0;
    pthread_mutex_lock(&mutex);
    for (struct allocation **link = &allocations; *link;) {
        struct allocation *one = *link;
        if (device >= 0 ? one->device == device : one->at == at) {
            *link = one->next;
            release(one);
            released++;
        } else link = &one->next;
    }
    pthread_mutex_unlock(&mutex);
    return released;
}
void free_all(int device) { release_matching(0, device); }

API result cuMemAlloc_v2(pointer *at, size_t size) { return allocate(at, size, current_device(), 0); }
API result cuMemAllocManaged(pointer *at, size_t size, unsigned flags) {
    (void)flags;
    return allocate(at, size, current_device(), 0);
}
API result cuMemAllocPitch_v2(pointer *at, size_t *pitch, size_t width, size_t height, unsigned element) {
    (void)element;
    *pitch = (width + 511) / 512 * 512;
    return allocate(at, *pitch * height, current_device(), 0);
}
API result cuMemFree_v2(pointer at) { return !at || release_matching(at, -1) ? CUDA_SUCCESS : CUDA_INVALID_VALUE; }
API result cuMemAllocAsync(pointer *at, size_t size, void *stream) {
    (void)stream;
    int device = current_device();
    result error = allocate(at, size, device, 1);
    if (!error) {
        uint64_t used = atomic_fetch_add(&pools[device].used, size) + size;
        if (used > atomic_load(&pools[device].most_used)) atomic_store(&pools[device].most_used, used);
    }
    return error;
}
API result cuMemFreeAsync(pointer at, void *stream) {
    (void)stream;
    return cuMemFree_v2(at);
}
API result cuDeviceGetDefaultMemPool(struct pool **pool, int device) {
    *pool = &pools[device];
    return place_of(device) ? CUDA_SUCCESS : CUDA_INVALID_DEVICE;
}
API result cuDeviceGetMemPool(struct pool **pool, int device) { return cuDeviceGetDefaultMemPool(pool, device); }
API result cuMemPoolGetAttribute(struct pool *pool, int attribute, uint64_t *value) {
    int high = attribute == 6 || attribute == 8; /* the most reserved, the most used */
    *value = atomic_load(high ? &pool->most_used : &pool->used);
    return CUDA_SUCCESS;
}
API result cuMemPoolTrimTo(struct pool *pool, size_t size) {
    (void)pool;
    (void)size;
    return CUDA_SUCCESS;
}

/* Virtual memory: creating takes memory of the device named in the properties, mapping does not. */
API result cuMemCreate(pointer *handle, size_t size, const int *properties, uint64_t flags) {
    (void)flags;
    return allocate(handle, size, properties[3], 0);
}
API result cuMemRelease(pointer handle) { return cuMemFree_v2(handle); }
API result cuMemAddressReserve(pointer *at, size_t size, size_t alignment, pointer hint, uint64_t flags) {
    (void)alignment;
    (void)hint;
    (void)flags;
    void *reserved = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    *at = (pointer)(uintptr_t)reserved;
    return reserved == MAP_FAILED ? CUDA_OUT_OF_MEMORY : CUDA_SUCCESS;
}
API result cuMemMap(pointer at, size_t size, size_t offset, pointer handle, uint64_t flags) {
    (void)at, (void)size, (void)offset, (void)handle, (void)flags;
    return CUDA_SUCCESS;
}
API result cuMemUnmap(pointer at, size_t size) {
    (void)at, (void)size;
    return CUDA_SUCCESS;
}
API result cuMemSetAccess(pointer at, size_t size, const void *access, size_t count) {
    (void)at, (void)size, (void)access, (void)count;
    return CUDA_SUCCESS;
}

API result cuMemGetInfo_v2(size_t *unused, size_t *total) {
    const struct place *place = place_of(current_device());
    if (!place) return CUDA_INVALID_CONTEXT;
    uint64_t limit = memory_limit(current_device());
    uint64_t used = limit ? container_bytes(current_device()) : used_bytes(place->gpu, place->instance);
    *total = limit ? limit : usable_bytes(place->gpu, place->instance);
    const char *cgroup = getenv("GPU_DRIVER_CGROUP");
    lock_state();
    const struct cgroup_limit *held = cgroup && place->instance < 0 ? limit_of(place->gpu, cgroup) : NULL;
    if (held) { /* those above it are not shown */
        *total = held->hard;
        used = charged_bytes(place->gpu, cgroup);
    }
    unlock_state();
    *unused = used > *total ? 0 : *total - used;
    uint64_t by_mps = mps_memory_limit(state->gpus[place->gpu].uuid); /* it does not change the total */
    uint64_t own = by_mps && own_process() ? held_bytes(own_process(), place->gpu) : 0;
    uint64_t left = own > by_mps ? 0 : by_mps - own;
    if (by_mps && left < *unused) *unused = left;
    return CUDA_SUCCESS;
}
API result cuMemHostAlloc(void **at, size_t size, unsigned flags) {
    (void)flags;
    *at = malloc(size);
    return *at ? CUDA_SUCCESS : CUDA_OUT_OF_MEMORY;
}
API result cuMemAllocHost_v2(void **at, size_t size) { return cuMemHostAlloc(at, size, 0); }
API result cuMemFreeHost(void *at) {
    free(at);
    return CUDA_SUCCESS;
}
API result cuMemcpyHtoD_v2(pointer to, const void *from, size_t size) {
    memcpy((void *)(uintptr_t)to, from, size);
    return CUDA_SUCCESS;
}
API result cuMemcpyDtoH_v2(void *to, pointer from, size_t size) {
    memcpy(to, (void *)(uintptr_t)from, size);
    return CUDA_SUCCESS;
}
API result cuMemcpyDtoD_v2(pointer to, pointer from, size_t size) {
    memcpy((void *)(uintptr_t)to, (void *)(uintptr_t)from, size);
    return CUDA_SUCCESS;
}
API result cuMemsetD8_v2(pointer at, unsigned char value, size_t size) {
    memset((void *)(uintptr_t)at, value, size);
    return CUDA_SUCCESS;
}
