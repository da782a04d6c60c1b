/* Makes simulated GPUs, and changes their state.
 *
 *   gpu-control create            GPUs and their MIG profiles from standard input, a line each:
 *                                   gpu|UUID|NAME|MIB|SMS|MIG        MIG: 1 if MIG mode is on
 *                                   profile|ID|NAME|MIB|COMPUTE SLICES|MEMORY SLICES|COUNT|START,...
 *   gpu-control instances         makes exactly these MIG instances, from standard input, a line each:
 *                                   instance|GPU UUID|ID|PROFILE ID|START|MIG UUID
 *   gpu-control set UUID WHAT N   WHAT: lost, hung, remap-failed (1 or 0), ecc-errors
 *   gpu-control xid UUID NUMBER   reports an XID event
 *   gpu-control show              a line for each GPU and each process on it
 */
#include "state.h"

static struct gpu *gpu_named(const char *uuid) {
    for (int g = 0; g < state->gpu_count; g++)
        if (!strcmp(state->gpus[g].uuid, uuid)) return &state->gpus[g];
    return NULL;
}
static struct gpu *find_gpu(const char *uuid) {
    struct gpu *found = gpu_named(uuid);
    if (found) return found;
    fprintf(stderr, "there is no GPU %s\n", uuid);
    exit(1);
}

static int add_profile(struct gpu *gpu, char *rest) {
    if (gpu->profile_count == PROFILES) return 0;
    struct mig_profile *profile = &gpu->profiles[gpu->profile_count];
    char starts[64] = "", *list = starts, *one;
    int fields = sscanf(rest, "%d|%31[^|]|%lu|%d|%d|%d|%63s", &profile->id, profile->name, &profile->memory_mib,
                        &profile->compute_slices, &profile->memory_slices, &profile->count, starts);
    while ((one = strsep(&list, ",")) && profile->start_count < STARTS) profile->starts[profile->start_count++] = atoi(one);
    gpu->profile_count += fields == 7;
    return fields == 7;
}

static int create(void) {
    char line[512];
    if (!create_state()) {
        perror("$GPU_DRIVER_STATE cannot be created");
        return 1;
    }
    while (fgets(line, sizeof line, stdin)) {
        struct gpu *gpu = &state->gpus[state->gpu_count];
        unsigned long mib;
        int made = 0;
        if (!strncmp(line, "gpu|", 4) && state->gpu_count < GPUS) {
            made = sscanf(line + 4, "%95[^|]|%95[^|]|%lu|%d|%d", gpu->uuid, gpu->name, &mib, &gpu->sms, &gpu->mig) == 5;
            gpu->memory = (uint64_t)mib << 20;
            state->gpu_count += made;
        } else if (!strncmp(line, "profile|", 8) && state->gpu_count > 0) made = add_profile(gpu - 1, line + 8);
        if (!made) {
            fprintf(stderr, "this line is not a GPU or a profile: %s", line);
            return 1;
        }
    }
    return 0;
}

/* Keep the instances that are listed where they are, since processes refer to them; make the others. */
static int add_instance(const char *line) {
    char gpu_uuid[96], uuid[64];
    int id, profile, start, at = -1, known = -1;
    if (sscanf(line, "instance|%95[^|]|%d|%d|%d|%63s", gpu_uuid, &id, &profile, &start, uuid) != 5) return 0;
    struct gpu *gpu = gpu_named(gpu_uuid);
    if (!gpu) return 1; /* the driver has fewer GPUs than the node */
    for (int n = 0; n < gpu->profile_count; n++)
        if (gpu->profiles[n].id == profile) known = n;
    for (int i = 0; i < INSTANCES; i++)
        if (gpu->instances[i].made && !strcmp(gpu->instances[i].computes[0].uuid, uuid)) at = i;
    for (int i = 0; i < INSTANCES && at < 0; i++)
        if (!gpu->instances[i].made) at = i;
    if (at < 0 || known < 0) return 0;
    struct gpu_instance *instance = &gpu->instances[at];
    *instance = (struct gpu_instance){.made = 1, .id = id, .profile = known, .start = start, .busy_until = instance->busy_until};
    instance->computes[0].slices = gpu->profiles[known].compute_slices;
    snprintf(instance->computes[0].uuid, sizeof instance->computes[0].uuid, "%s", uuid);
    return 1;
}
static int make_instances(void) {
    char lines[GPUS * INSTANCES][256];
    int count = 0, failed = 0;
    while (count < GPUS * INSTANCES && fgets(lines[count], sizeof lines[count], stdin)) count++;
    lock_state();
    for (int g = 0; g < state->gpu_count; g++)
        for (int i = 0; i < INSTANCES; i++) {
            int listed = 0;
            for (int n = 0; n < count; n++) listed |= strstr(lines[n], state->gpus[g].instances[i].computes[0].uuid) != NULL;
            if (!listed) state->gpus[g].instances[i].made = 0;
        }
    for (int n = 0; n < count && !failed; n++)
        if (!add_instance(lines[n])) {
            fprintf(stderr, "this line is not an instance: %s", lines[n]);
            failed = 1;
        }
    unlock_state();
    return failed;
}

static int set(struct gpu *gpu, const char *what, int value) {
    if (!strcmp(what, "lost")) atomic_store(&gpu->lost, value);
    else if (!strcmp(what, "hung")) atomic_store(&gpu->hung, value);
    else if (!strcmp(what, "remap-failed")) atomic_store(&gpu->remap_failed, value);
    else if (!strcmp(what, "ecc-errors")) atomic_store(&gpu->ecc_errors, value);
    else return 1;
    return 0;
}

static void report_xid(struct gpu *gpu, unsigned number) {
    lock_state();
    uint64_t count = atomic_load(&gpu->xid_count);
    atomic_store(&gpu->xids[count % XIDS], number);
    atomic_store(&gpu->xid_count, count + 1);
    unlock_state();
}

static void show(void) {
    for (int g = 0; g < state->gpu_count; g++) {
        printf("gpu %s total %lu used %lu\n", state->gpus[g].uuid, state->gpus[g].memory, used_bytes(g, -1));
        for (int n = 0; n < PROCESSES; n++)
            if (lives(n) && held_bytes(&state->processes[n], g))
                printf("process %d uses %lu bytes, busy %u %%\n", atomic_load(&state->processes[n].pid),
                       held_bytes(&state->processes[n], g), busy_percent(&state->processes[n], g, TICKS_PER_S));
    }
}

int main(int count, char **arguments) {
    const char *command = count > 1 ? arguments[1] : "";
    if (!strcmp(command, "create") && count == 2) return create();
    if (!open_state(0)) {
        fprintf(stderr, "$GPU_DRIVER_STATE names no simulated GPUs: make them with gpu-control create\n");
        return 1;
    }
    if (!strcmp(command, "show") && count == 2) show();
    else if (!strcmp(command, "instances") && count == 2) return make_instances();
    else if (!strcmp(command, "xid") && count == 4) report_xid(find_gpu(arguments[2]), (unsigned)atoi(arguments[3]));
    else if (!strcmp(command, "set") && count == 5 && !set(find_gpu(arguments[2]), arguments[3], atoi(arguments[4]))) {
    } else {
        fprintf(stderr, "usage: gpu-control create | instances | show | xid UUID NUMBER | set UUID lost|hung|remap-failed|ecc-errors N\n");
        return 2;
    }
    return 0;
}
