/* MIG of the simulated GPUs: profiles, GPU instances, compute instances and MIG devices. */
#include "nvml.h"

static struct place mig_devices[GPUS][INSTANCES][COMPUTES];

device mig_handle(int gpu, int instance, int compute) {
    mig_devices[gpu][instance][compute] = (struct place){gpu, instance, compute};
    return &mig_devices[gpu][instance][compute];
}
static struct gpu *gpu_of(device d) { return &state->gpus[d->gpu]; }
static result check_mig(device d) {
    CHECK(d);
    return gpu_of(d)->mig ? NVML_SUCCESS : NVML_NOT_SUPPORTED;
}
static const struct mig_profile *profile_of(const struct gpu *gpu, unsigned id) {
    for (int n = 0; n < gpu->profile_count; n++)
        if (gpu->profiles[n].id == (int)id) return &gpu->profiles[n];
    return NULL;
}
/* The GPU of a GPU instance, whose handle points into the mapped file. */
static int owner_of(const struct gpu_instance *instance) {
    return (int)(((const char *)instance - (const char *)state->gpus) / (ptrdiff_t)sizeof(struct gpu));
}
static const struct mig_profile *profile_of_instance(const struct gpu_instance *instance) {
    return &state->gpus[owner_of(instance)].profiles[instance->profile];
}
/* Compute profiles have the number of their slices as ID, by NVML's number of the profile. */
static int slices_of(const struct gpu_instance *instance, unsigned number) {
    static const int slices[] = {1, 2, 3, 4, 7, 8, 6};
    int found = number < sizeof slices / sizeof *slices ? slices[number] : 0;
    return found <= profile_of_instance(instance)->compute_slices ? found : 0;
}

API result nvmlDeviceGetMigMode(device d, unsigned *current, unsigned *pending) {
    CHECK(d);
    if (!gpu_of(d)->profile_count) return NVML_NOT_SUPPORTED;
    *current = *pending = (unsigned)gpu_of(d)->mig;
    return NVML_SUCCESS;
}
API result nvmlDeviceSetMigMode(device d, unsigned mode, result *status) {
    CHECK(d);
    if (!gpu_of(d)->profile_count) return NVML_NOT_SUPPORTED;
    gpu_of(d)->mig = (int)mode;
    *status = NVML_SUCCESS;
    return NVML_SUCCESS;
}

struct profile_info {
    unsigned id, is_p2p_supported, slices, count, multiprocessors, copy_engines, decoders, encoders, jpeg, ofa;
    unsigned long long memory_mib;
};
API result nvmlDeviceGetGpuInstanceProfileInfo(device d, unsigned number, struct profile_info *info) {
    result error = check_mig(d);
    if (error) return error;
    if (number >= (unsigned)gpu_of(d)->profile_count) return NVML_NOT_SUPPORTED;
    const struct mig_profile *profile = &gpu_of(d)->profiles[number];
    *info = (struct profile_info){.id = (unsigned)profile->id,
                                  .slices = (unsigned)profile->compute_slices,
                                  .count = (unsigned)profile->count,
                                  .multiprocessors = (unsigned)profile->compute_slices * 14,
                                  .memory_mib = profile->memory_mib};
    return NVML_SUCCESS;
}
struct profile_info_v2 {
    unsigned version;
    unsigned fields[10]; /* as in the first version */
    unsigned long long memory_mib;
    char name[96];
};
API result nvmlDeviceGetGpuInstanceProfileInfoV(device d, unsigned number, struct profile_info_v2 *info) {
    struct profile_info first;
    result error = nvmlDeviceGetGpuInstanceProfileInfo(d, number, &first);
    if (error) return error;
    memcpy(info->fields, &first, sizeof info->fields);
    info->memory_mib = first.memory_mib;
    snprintf(info->name, sizeof info->name, "MIG %s", gpu_of(d)->profiles[number].name);
    return NVML_SUCCESS;
}

struct placement {
    unsigned start, size;
};
API result nvmlDeviceGetGpuInstancePossiblePlacements_v2(device d, unsigned id, struct placement *list, unsigned *count) {
    result error = check_mig(d);
    const struct mig_profile *profile = error ? NULL : profile_of(gpu_of(d), id);
    if (!profile) return error ? error : NVML_NOT_SUPPORTED;
    for (int n = 0; list && n < profile->start_count && n < (int)*count; n++)
        list[n] = (struct placement){(unsigned)profile->starts[n], (unsigned)profile->memory_slices};
    *count = (unsigned)profile->start_count;
    return NVML_SUCCESS;
}

/* Whether a GPU has room for an instance of a profile at a memory slice. */
static int has_room(const struct gpu *gpu, const struct mig_profile *wanted, int start) {
    int compute_slices = wanted->compute_slices, most = 0, same = 0, allowed = 0;
    for (int n = 0; n < gpu->profile_count; n++)
        if (gpu->profiles[n].compute_slices > most) most = gpu->profiles[n].compute_slices;
    for (int n = 0; n < wanted->start_count; n++) allowed |= wanted->starts[n] == start;
    for (int i = 0; i < INSTANCES; i++) {
        const struct gpu_instance *other = &gpu->instances[i];
        if (!other->made) continue;
        const struct mig_profile *profile = &gpu->profiles[other->profile];
        compute_slices += profile->compute_slices;
        same += profile == wanted;
        if (start < other->start + profile->memory_slices && other->start < start + wanted->memory_slices) return 0;
    }
    return allowed && compute_slices <= most && same < wanted->count;
}
API result nvmlDeviceCreateGpuInstanceWithPlacement(device d, unsigned id, const struct placement *place,
                                                    struct gpu_instance **made) {
    result error = check_mig(d);
    if (error) return error;
    struct gpu *gpu = gpu_of(d);
    const struct mig_profile *profile = profile_of(gpu, id);
    if (!profile) return NVML_INVALID_ARGUMENT;
    while (has_fault(d->gpu, CREATE_HANGS)) usleep(5000);
    if (has_fault(d->gpu, CREATE_FAILS)) return NVML_UNKNOWN;
    lock_state();
    *made = NULL;
    for (int i = 0; has_room(gpu, profile, (int)place->start) && i < INSTANCES && !*made; i++)
        if (!gpu->instances[i].made) {
            memset((void *)&gpu->instances[i], 0, sizeof gpu->instances[i]);
            gpu->instances[i].profile = (int)(profile - gpu->profiles);
            gpu->instances[i].start = (int)place->start;
            gpu->instances[i].id = i + 1;
            gpu->instances[i].made = !has_fault(d->gpu, CREATE_NOTHING);
            *made = &gpu->instances[i];
        }
    unlock_state();
    return *made ? NVML_SUCCESS : NVML_INSUFFICIENT_RESOURCES;
}
API result nvmlDeviceGetGpuInstances(device d, unsigned id, struct gpu_instance **list, unsigned *count) {
    result error = check_mig(d);
    if (error) return error;
    *count = 0;
    for (int i = 0; i < INSTANCES; i++) {
        struct gpu_instance *instance = &gpu_of(d)->instances[i];
        if (instance->made && profile_of_instance(instance)->id == (int)id) list[(*count)++] = instance;
    }
    return NVML_SUCCESS;
}
API result nvmlDeviceGetGpuInstanceById(device d, unsigned id, struct gpu_instance **found) {
    result error = check_mig(d);
    if (error) return error;
    for (int i = 0; i < INSTANCES; i++)
        if (gpu_of(d)->instances[i].made && gpu_of(d)->instances[i].id == (int)id) {
            *found = &gpu_of(d)->instances[i];
            return NVML_SUCCESS;
        }
    return NVML_NOT_FOUND;
}
struct instance_info {
    device device;
    unsigned id, profile;
    struct placement placement;
};
API result nvmlGpuInstanceGetInfo(struct gpu_instance *instance, struct instance_info *info) {
    const struct mig_profile *profile = profile_of_instance(instance);
    if (!instance->made && !has_fault(owner_of(instance), CREATE_NOTHING)) return NVML_NOT_FOUND;
    *info = (struct instance_info){gpu_handle(owner_of(instance)),
                                   (unsigned)instance->id,
                                   (unsigned)profile->id,
                                   {(unsigned)instance->start, (unsigned)profile->memory_slices}};
    return NVML_SUCCESS;
}
/* Whether a process uses an instance. */
static int in_use(const struct gpu_instance *instance) {
    int gpu = owner_of(instance), number = (int)(instance - state->gpus[gpu].instances) + 1;
    int found = has_fault(gpu, ALL_BUSY);
    for (int n = 0; n < PROCESSES; n++)
        found |= lives(n) && atomic_load(&state->processes[n].instance[gpu]) == number &&
                 held_bytes(&state->processes[n], gpu) > 0;
    return found;
}
API result nvmlGpuInstanceDestroy(struct gpu_instance *instance) {
    for (int c = 0; c < COMPUTES; c++)
        if (instance->computes[c].slices) return NVML_IN_USE;
    instance->made = 0;
    return NVML_SUCCESS;
}

struct compute_profile_info {
    unsigned id, slices, count, multiprocessors, copy_engines, decoders, encoders, jpeg, ofa;
};
API result nvmlGpuInstanceGetComputeInstanceProfileInfo(struct gpu_instance *instance, unsigned number, unsigned engine,
                                                        struct compute_profile_info *info) {
    (void)engine;
    int slices = slices_of(instance, number);
    if (!slices) return NVML_NOT_SUPPORTED;
    *info = (struct compute_profile_info){
        .id = (unsigned)slices,
        .slices = (unsigned)slices,
        .count = (unsigned)(profile_of_instance(instance)->compute_slices / slices)};
    return NVML_SUCCESS;
}
struct compute_profile_info_v2 {
    unsigned version;
    struct compute_profile_info first;
    char name[96];
};
API result nvmlGpuInstanceGetComputeInstanceProfileInfoV(struct gpu_instance *instance, unsigned number, unsigned engine,
                                                         struct compute_profile_info_v2 *info) {
    return nvmlGpuInstanceGetComputeInstanceProfileInfo(instance, number, engine, &info->first);
}
API result nvmlGpuInstanceCreateComputeInstance(struct gpu_instance *instance, unsigned id, struct compute_instance **made) {
    int left = profile_of_instance(instance)->compute_slices - (int)id, gpu = owner_of(instance);
    if (has_fault(gpu, COMPUTE_FAILS)) return NVML_INSUFFICIENT_RESOURCES;
    *made = NULL;
    lock_state();
    for (int c = 0; c < COMPUTES; c++) left -= instance->computes[c].slices;
    for (int c = 0; left >= 0 && c < COMPUTES && !*made; c++)
        if (!instance->computes[c].slices) {
            snprintf(instance->computes[c].uuid, sizeof instance->computes[c].uuid, "MIG-%.23s-%012x", /* unique in the cluster */
                     state->gpus[gpu].uuid + strlen("GPU-"), ++state->gpus[gpu].created);
            instance->computes[c].slices = (int)id;
            *made = &instance->computes[c];
        }
    unlock_state();
    return *made ? NVML_SUCCESS : NVML_INSUFFICIENT_RESOURCES;
}
API result nvmlGpuInstanceGetComputeInstances(struct gpu_instance *instance, unsigned id, struct compute_instance **list,
                                              unsigned *count) {
    *count = 0;
    for (int c = 0; c < COMPUTES; c++)
        if (instance->computes[c].slices == (int)id) list[(*count)++] = &instance->computes[c];
    return NVML_SUCCESS;
}
API result nvmlGpuInstanceGetComputeInstanceById(struct gpu_instance *instance, unsigned id, struct compute_instance **found) {
    if (id >= COMPUTES || !instance->computes[id].slices) return NVML_NOT_FOUND;
    *found = &instance->computes[id];
    return NVML_SUCCESS;
}
/* The GPU instance of a compute instance. */
static struct gpu_instance *parent_of(const struct compute_instance *compute) {
    struct gpu *gpu = &state->gpus[((const char *)compute - (const char *)state->gpus) / (ptrdiff_t)sizeof(struct gpu)];
    return &gpu->instances[((const char *)compute - (const char *)gpu->instances) / (ptrdiff_t)sizeof *gpu->instances];
}
struct compute_info {
    device device;
    struct gpu_instance *instance;
    unsigned id, profile;
    struct placement placement;
};
API result nvmlComputeInstanceGetInfo_v2(struct compute_instance *compute, struct compute_info *info) {
    struct gpu_instance *parent = parent_of(compute);
    if (!compute->slices) return NVML_NOT_FOUND;
    *info = (struct compute_info){gpu_handle(owner_of(parent)),
                                  parent,
                                  (unsigned)(compute - parent->computes),
                                  (unsigned)compute->slices,
                                  {0, (unsigned)compute->slices}};
    return NVML_SUCCESS;
}
API result nvmlComputeInstanceDestroy(struct compute_instance *compute) {
    if (in_use(parent_of(compute))) return NVML_IN_USE;
    compute->slices = 0;
    return NVML_SUCCESS;
}

API result nvmlDeviceGetMaxMigDeviceCount(device d, unsigned *count) {
    CHECK(d);
    *count = gpu_of(d)->profile_count ? COMPUTES : 0;
    return NVML_SUCCESS;
}
API result nvmlDeviceGetMigDeviceHandleByIndex(device d, unsigned number, device *found) {
    result error = check_mig(d);
    if (error) return error;
    for (int i = 0; i < INSTANCES; i++)
        for (int c = 0; gpu_of(d)->instances[i].made && c < COMPUTES; c++)
            if (gpu_of(d)->instances[i].computes[c].slices && sees(d->gpu, i, c) && number-- == 0) {
                *found = mig_handle(d->gpu, i, c);
                return NVML_SUCCESS;
            }
    return NVML_NOT_FOUND;
}
API result nvmlDeviceGetGpuInstanceId(device d, unsigned *id) {
    CHECK(d);
    if (d->instance < 0) return NVML_INVALID_ARGUMENT;
    *id = (unsigned)gpu_of(d)->instances[d->instance].id;
    return NVML_SUCCESS;
}
API result nvmlDeviceGetComputeInstanceId(device d, unsigned *id) {
    CHECK(d);
    if (d->instance < 0) return NVML_INVALID_ARGUMENT;
    *id = (unsigned)d->compute;
    return NVML_SUCCESS;
}
API result nvmlDeviceIsMigDeviceHandle(device d, unsigned *is_mig) {
    CHECK(d);
    *is_mig = d->instance >= 0;
    return NVML_SUCCESS;
}
API result nvmlDeviceGetDeviceHandleFromMigDeviceHandle(device d, device *parent) {
    CHECK(d);
    *parent = gpu_handle(d->gpu);
    return NVML_SUCCESS;
}
