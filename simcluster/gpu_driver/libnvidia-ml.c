/* libnvidia-ml.so.1 of the simulated GPUs: devices, memory, processes, faults and XID events.
 *
 * Structures are those of NVML's public header, written as arrays or structs of the same layout. */
#include "cgroup_limits.h"
#include "limits.h"
#include "nvml.h"
#include "turns.h"

#include <linux/futex.h>
#include <sys/syscall.h>

static struct place gpus[GPUS];
static int numbers[GPUS], gpu_count; /* the visible GPUs by NVML's index */

device gpu_handle(int gpu) {
    gpus[gpu] = (struct place){gpu, -1, -1};
    return &gpus[gpu];
}
static const struct gpu *gpu_of(device d) { return &state->gpus[d->gpu]; }

API result nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    if (!open_state(0)) return NVML_DRIVER_NOT_LOADED;
    int count = 0; /* other threads count and read GPUs meanwhile */
    for (int n = 0; n < visible_count; n++) /* MIG devices of one GPU follow each other */
        if (!has_fault(visible[n].gpu, VANISH) && (count == 0 || numbers[count - 1] != visible[n].gpu))
            numbers[count++] = visible[n].gpu;
    gpu_count = count;
    return NVML_SUCCESS;
}
API result nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
API result nvmlInit(void) { return nvmlInitWithFlags(0); }
API result nvmlShutdown(void) { return NVML_SUCCESS; }
API const char *nvmlErrorString(result error) {
    return error == NVML_SUCCESS                  ? "Success"
           : error == NVML_GPU_IS_LOST            ? "GPU is lost"
           : error == NVML_NOT_SUPPORTED          ? "Not Supported"
           : error == NVML_NO_PERMISSION          ? "Insufficient Permissions"
           : error == NVML_DRIVER_NOT_LOADED      ? "Driver Not Loaded"
           : error == NVML_NOT_FOUND              ? "Not Found"
           : error == NVML_INVALID_ARGUMENT       ? "Invalid Argument"
           : error == NVML_FUNCTION_NOT_FOUND     ? "Function Not Found"
           : error == NVML_IN_USE                 ? "In use by another client"
           : error == NVML_INSUFFICIENT_RESOURCES ? "Insufficient Resources"
                                                  : "Unknown Error";
}
API result nvmlSystemGetDriverVersion(char *text, unsigned length) {
    snprintf(text, length, "%s", state && atomic_load(&state->accounting) ? "615.71.09" : "570.00");
    return NVML_SUCCESS;
}
API result nvmlSystemGetNVMLVersion(char *text, unsigned length) {
    snprintf(text, length, "12.570.00");
    return NVML_SUCCESS;
}
API result nvmlSystemGetCudaDriverVersion(int *version) {
    *version = 12080;
    return NVML_SUCCESS;
}
API result nvmlSystemGetCudaDriverVersion_v2(int *version) { return nvmlSystemGetCudaDriverVersion(version); }

API result nvmlDeviceGetCount_v2(unsigned *count) {
    if (!state) return NVML_UNINITIALIZED;
    *count = (unsigned)gpu_count;
    return NVML_SUCCESS;
}
API result nvmlDeviceGetCount(unsigned *count) { return nvmlDeviceGetCount_v2(count); }
API result nvmlDeviceGetHandleByIndex_v2(unsigned number, device *d) {
    if (!state) return NVML_UNINITIALIZED;
    if (number >= (unsigned)gpu_count) return NVML_INVALID_ARGUMENT;
    *d = gpu_handle(numbers[number]);
    return NVML_SUCCESS;
}
API result nvmlDeviceGetHandleByIndex(unsigned number, device *d) { return nvmlDeviceGetHandleByIndex_v2(number, d); }
API result nvmlDeviceGetHandleByUUID(const char *uuid, device *d) {
    if (!state) return NVML_UNINITIALIZED;
    for (int n = 0; n < gpu_count; n++)
        if (!strcmp(uuid, state->gpus[numbers[n]].uuid)) {
            *d = gpu_handle(numbers[n]);
            return NVML_SUCCESS;
        }
    for (int n = 0; n < visible_count; n++) {
        const struct place *place = &visible[n];
        if (place->instance < 0) continue;
        *d = mig_handle(place->gpu, place->instance, place->compute);
        if (!strcmp(uuid, gpu_of(*d)->instances[place->instance].computes[place->compute].uuid)) return NVML_SUCCESS;
    }
    return NVML_NOT_FOUND;
}
API result nvmlDeviceGetIndex(device d, unsigned *number) {
    CHECK(d);
    for (int n = 0; n < gpu_count; n++)
        if (numbers[n] == d->gpu) *number = (unsigned)n;
    return NVML_SUCCESS;
}
API result nvmlDeviceGetMinorNumber(device d, unsigned *number) {
    CHECK(d);
    *number = (unsigned)d->gpu;
    return NVML_SUCCESS;
}
API result nvmlDeviceGetUUID(device d, char *uuid, unsigned length) {
    CHECK(d);
    const struct gpu *gpu = gpu_of(d);
    snprintf(uuid, length, "%s", d->instance < 0 ? gpu->uuid : gpu->instances[d->instance].computes[d->compute].uuid);
    return NVML_SUCCESS;
}
API result nvmlDeviceGetName(device d, char *name, unsigned length) {
    CHECK(d);
    int is_mig = d->instance >= 0;
    snprintf(name, length, "%s%s%s", gpu_of(d)->name, is_mig ? " MIG " : "", is_mig ? profile_at(d->gpu, d->instance)->name : "");
    return NVML_SUCCESS;
}
API result nvmlDeviceGetPciInfo_v3(device d, void *info) { /* char[16], 5 words, char[32] */
    CHECK(d);
    unsigned words[5] = {0, (unsigned)d->gpu + 1, 0, 0x20b010de, 0}; /* domain, bus, device, IDs */
    memset(info, 0, 68);
    snprintf(info, 16, "0000:%02X:00.0", words[1]);
    memcpy((char *)info + 16, words, sizeof words);
    snprintf((char *)info + 36, 32, "00000000:%02X:00.0", words[1]);
    return NVML_SUCCESS;
}
API result nvmlDeviceGetPciInfo_v2(device d, void *info) { return nvmlDeviceGetPciInfo_v3(d, info); }
API result nvmlDeviceGetPciInfo(device d, void *info) { return nvmlDeviceGetPciInfo_v3(d, info); }
API result nvmlDeviceGetTopologyCommonAncestor(device one, device other, unsigned *level) {
    CHECK(one);
    CHECK(other);
    *level = 30; /* a host bridge */
    return NVML_SUCCESS;
}

/* The limit of this process's own cgroup; those above it are not shown. */
static uint64_t cgroup_limit(device d) {
    const char *cgroup = getenv("GPU_DRIVER_CGROUP");
    if (!cgroup || d->instance >= 0) return 0;
    lock_state();
    const struct cgroup_limit *limit = limit_of(d->gpu, cgroup);
    uint64_t hard = limit ? limit->hard : 0;
    unlock_state();
    return hard;
}
static uint64_t shown_total(device d) {
    if (cgroup_limit(d)) return cgroup_limit(d);
    unsigned number = 0;
    uint64_t limit = d->instance < 0 && !nvmlDeviceGetIndex(d, &number) ? memory_limit((int)number) : 0;
    return limit ? limit : total_bytes(d->gpu, d->instance);
}
static uint64_t shown_used(device d) {
    unsigned number = 0;
    int limited = d->instance < 0 && !nvmlDeviceGetIndex(d, &number) && memory_limit((int)number);
    return limited ? container_bytes((int)number) : used_bytes(d->gpu, d->instance);
}
static uint64_t shown_reserved(device d) {
    unsigned number = 0;
    int limited = d->instance >= 0 || (!nvmlDeviceGetIndex(d, &number) && memory_limit((int)number));
    return limited ? 0 : gpu_of(d)->reserved;
}
/* Of a GPU of which a container has MIG devices only, it may not read the memory. */
static int is_forbidden(device d) { return d->instance < 0 && !sees(d->gpu, -1, -1); }
API result nvmlDeviceGetMemoryInfo(device d, unsigned long long *memory) { /* total, free, used */
    CHECK(d);
    if (is_forbidden(d)) return NVML_NO_PERMISSION;
    memory[0] = shown_total(d);
    memory[2] = shown_used(d) + shown_reserved(d);
    memory[1] = memory[0] > memory[2] ? memory[0] - memory[2] : 0;
    return NVML_SUCCESS;
}
API result nvmlDeviceGetMemoryInfo_v2(device d, unsigned long long *memory) { /* version, total, reserved, free, used */
    CHECK(d);
    if (is_forbidden(d)) return NVML_NO_PERMISSION;
    memory[1] = shown_total(d);
    memory[2] = shown_reserved(d);
    memory[4] = shown_used(d);
    memory[3] = memory[1] > memory[2] + memory[4] ? memory[1] - memory[2] - memory[4] : 0;
    return NVML_SUCCESS;
}
static unsigned busy_of(device d) {
    unsigned busy = 0;
    for (int n = 0; n < PROCESSES; n++)
        if (lives(n)) busy += busy_percent(&state->processes[n], d->gpu);
    return busy > 100 ? 100 : busy;
}
API result nvmlDeviceGetUtilizationRates(device d, unsigned *rates) { /* gpu, memory */
    CHECK(d);
    if (gpu_of(d)->mig) return NVML_NOT_SUPPORTED;
    rates[0] = busy_of(d);
    rates[1] = 0;
    return NVML_SUCCESS;
}

/* Sensors follow how busy the GPU is: at 100 %, its clocks are held down by the power limit. */
enum { IDLE_WATTS = 55, LIMIT_WATTS = 400, IDLE_CELSIUS = 31, BUSY_CELSIUS = 74, SLOWED_CELSIUS = 93, IDLE_MHZ = 210, SM_MHZ = 1410, MEMORY_MHZ = 1593 };
API result nvmlDeviceGetTemperature(device d, int sensor, unsigned *celsius) {
    CHECK(d);
    if (sensor != 0) return NVML_INVALID_ARGUMENT;
    *celsius = IDLE_CELSIUS + (unsigned)(d->gpu % 4) + busy_of(d) * (BUSY_CELSIUS - IDLE_CELSIUS) / 100;
    if (has_fault(d->gpu, HOT)) *celsius = SLOWED_CELSIUS;
    return NVML_SUCCESS;
}
API result nvmlDeviceGetPowerUsage(device d, unsigned *milliwatts) {
    CHECK(d);
    *milliwatts = 1000 * IDLE_WATTS + 10 * busy_of(d) * (LIMIT_WATTS - IDLE_WATTS);
    return NVML_SUCCESS;
}
API result nvmlDeviceGetEnforcedPowerLimit(device d, unsigned *milliwatts) {
    CHECK(d);
    *milliwatts = 1000 * LIMIT_WATTS;
    return NVML_SUCCESS;
}
API result nvmlDeviceGetClockInfo(device d, int type, unsigned *mhz) { /* graphics, SM, memory, video */
    CHECK(d);
    *mhz = type == 2 ? MEMORY_MHZ : busy_of(d) ? SM_MHZ : IDLE_MHZ;
    return NVML_SUCCESS;
}
API result nvmlDeviceGetCurrentClocksThrottleReasons(device d, unsigned long long *reasons) {
    CHECK(d);
    *reasons = busy_of(d) == 100 ? 0x4 : busy_of(d) == 0 ? 0x1 : 0;
    if (has_fault(d->gpu, HOT)) *reasons = 0x20;
    return NVML_SUCCESS;
}

struct process_info { /* the older one ends after `memory` */
    unsigned pid;
    unsigned long long memory;
    unsigned instance, compute;
};
static result list_processes(device d, unsigned *count, void *list, size_t size) {
    unsigned room = *count, found = 0;
    CHECK(d);
    lock_state();
    for (int i = 0; has_fault(d->gpu, ALL_BUSY) && i < INSTANCES; i++) { /* one process in each instance */
        struct process_info info = {1, 0, (unsigned)gpu_of(d)->instances[i].id, 0};
        if (!gpu_of(d)->instances[i].made || (d->instance >= 0 && d->instance != i)) continue;
        if (found < room && list) memcpy((char *)list + found * size, &info, size);
        found++;
    }
    for (int n = 0; n < PROCESSES; n++) {
        struct process *process = &state->processes[n];
        if (!lives(n) || !held_bytes(process, d->gpu)) continue;
        int instance = atomic_load(&process->instance[d->gpu]) - 1;
        if (d->instance >= 0 && d->instance != instance) continue;
        if (found < room && list) {
            struct process_info info = {(unsigned)atomic_load(&process->pid), held_bytes(process, d->gpu), ~0u, ~0u};
            if (instance >= 0) info.instance = (unsigned)gpu_of(d)->instances[instance].id, info.compute = 0;
            memcpy((char *)list + found * size, &info, size);
        }
        found++;
    }
    unlock_state();
    *count = found;
    return found > room ? NVML_INSUFFICIENT_SIZE : NVML_SUCCESS;
}
API result nvmlDeviceGetComputeRunningProcesses(device d, unsigned *count, void *list) {
    return list_processes(d, count, list, 16);
}
API result nvmlDeviceGetComputeRunningProcesses_v2(device d, unsigned *count, void *list) {
    return list_processes(d, count, list, sizeof(struct process_info));
}
API result nvmlDeviceGetComputeRunningProcesses_v3(device d, unsigned *count, void *list) {
    return list_processes(d, count, list, sizeof(struct process_info));
}
API result nvmlDeviceGetGraphicsRunningProcesses_v3(device d, unsigned *count, void *list) {
    (void)list;
    CHECK(d);
    *count = 0;
    return NVML_SUCCESS;
}
API result nvmlDeviceGetGraphicsRunningProcesses_v2(device d, unsigned *count, void *list) {
    return nvmlDeviceGetGraphicsRunningProcesses_v3(d, count, list);
}
API result nvmlDeviceGetGraphicsRunningProcesses(device d, unsigned *count, void *list) {
    return nvmlDeviceGetGraphicsRunningProcesses_v3(d, count, list);
}

struct utilization_sample {
    unsigned pid;
    unsigned long long at_us;
    unsigned sm, memory, encoder, decoder;
};
API result nvmlDeviceGetProcessUtilization(device d, struct utilization_sample *list, unsigned *count,
                                           unsigned long long since_us) {
    unsigned room = *count, found = 0;
    struct timespec time;
    CHECK(d);
    if (gpu_of(d)->mig) return NVML_NOT_SUPPORTED;
    clock_gettime(CLOCK_REALTIME, &time);
    unsigned long long now_us = (unsigned long long)time.tv_sec * 1000000 + (unsigned long long)time.tv_nsec / 1000;
    (void)since_us;
    for (int n = 0; n < PROCESSES; n++) {
        unsigned percent = lives(n) ? sampled_percent(&state->processes[n], d->gpu) : 0;
        if (!percent) continue;
        if (found < room && list)
            list[found] = (struct utilization_sample){
                (unsigned)atomic_load(&state->processes[n].pid), now_us, percent, 0, 0, 0};
        found++;
    }
    *count = found;
    return !found ? NVML_NOT_FOUND : found > room || !list ? NVML_INSUFFICIENT_SIZE : NVML_SUCCESS;
}

API result nvmlDeviceGetRemappedRows(device d, unsigned *corrected, unsigned *uncorrected, unsigned *pending,
                                     unsigned *failed) {
    CHECK(d);
    *corrected = *uncorrected = *pending = 0;
    *failed = (unsigned)has_fault(d->gpu, UNHEALTHY);
    return NVML_SUCCESS;
}
API result nvmlDeviceGetTotalEccErrors(device d, int type, int counter, unsigned long long *errors) {
    (void)counter;
    CHECK(d);
    *errors = type == 1 ? (unsigned long long)has_fault(d->gpu, ECC_ERRORS) : 0; /* 1: uncorrected */
    return NVML_SUCCESS;
}

/* An event set remembers, by GPU, how many of its XID events it has returned. */
struct event_set {
    int registered[GPUS];
    uint64_t returned[GPUS];
};
#define XID_EVENT 8
API result nvmlDeviceGetSupportedEventTypes(device d, unsigned long long *types) {
    CHECK(d);
    *types = XID_EVENT;
    return NVML_SUCCESS;
}
API result nvmlEventSetCreate(struct event_set **set) {
    *set = calloc(1, sizeof **set);
    return NVML_SUCCESS;
}
API result nvmlEventSetFree(struct event_set *set) {
    free(set);
    return NVML_SUCCESS;
}
API result nvmlDeviceRegisterEvents(device d, unsigned long long types, struct event_set *set) {
    (void)types;
    CHECK(d);
    set->registered[d->gpu] = 1;
    set->returned[d->gpu] = atomic_load(&state->gpus[d->gpu].xid_count);
    return NVML_SUCCESS;
}
struct event {
    device device;
    unsigned long long type, data;
    unsigned instance, compute;
};
API result nvmlEventSetWait_v2(struct event_set *set, struct event *event, unsigned timeout_ms) {
    uint64_t until = now_ns() + timeout_ms * 1000000ull, now;
    for (;;) {
        uint32_t seen = atomic_load(&state->xid_events);
        for (int g = 0; g < GPUS; g++) {
            const struct gpu *gpu = &state->gpus[g];
            if (!set->registered[g] || set->returned[g] >= atomic_load(&gpu->xid_count)) continue;
            *event = (struct event){gpu_handle(g), XID_EVENT, atomic_load(&gpu->xids[set->returned[g] % XIDS]), ~0u, ~0u};
            set->returned[g]++;
            return NVML_SUCCESS;
        }
        if ((now = now_ns()) >= until) return NVML_TIMEOUT;
        struct timespec left = {(time_t)((until - now) / 1000000000ull), (long)((until - now) % 1000000000ull)};
        syscall(SYS_futex, &state->xid_events, FUTEX_WAIT, seen, &left, NULL, 0);
    }
}
