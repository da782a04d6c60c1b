/* Makes simulated GPUs, and changes their state.
 *
 *   gpu-control create            GPUs and their MIG profiles from standard input, a line each:
 *                                   gpu|UUID|NAME|MIB|SMS|MIG|FAULT  MIG: 1 if MIG mode is on
 *                                   profile|ID|NAME|MIB|COMPUTE SLICES|MEMORY SLICES|COUNT|START,...
 *                                 A GPU of the same model that is there keeps its processes and instances.
 *   gpu-control set UUID FAULT N  the faults of state.h: 1 or 0, or the number of ecc-errors
 *   gpu-control xid UUID NUMBER   reports one XID event; a GPU that then works is soon healthy again
 *   gpu-control accounting WHICH  how memory of cgroups is limited: none (before R615), misc or dmem
 *   gpu-control limit UUID CGROUP SOFT HARD  sets a limit in bytes, or max, as any program on the node can
 *   gpu-control forget-limits     as a reboot and a reload of the driver do
 *   gpu-control limits-error N    what NVML returns for limits of cgroups; 0: nothing is wrong
 *   gpu-control keep-limits N     1: no limit is lowered, as if more were in use; 0: ends that
 *   gpu-control show              a line for each GPU, each MIG device and each process on it
 *   gpu-control limits            a line for each limit of a cgroup, and how often NVML was called for them
 */
#include "cgroup_limits.h"
#include "turns.h"

#include <linux/futex.h>
#include <sys/syscall.h>

static struct gpu *find_gpu(const char *uuid) {
    for (int g = 0; g < state->gpu_count; g++)
        if (!strcmp(state->gpus[g].uuid, uuid)) return &state->gpus[g];
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

static int set_fault(struct gpu *gpu, const char *name, int value) {
    for (int n = 0; n < FAULTS; n++)
        if (!strcmp(name, fault_names[n])) {
            atomic_store(&gpu->faults[n], value);
            return 1;
        }
    return 0;
}

static int read_gpu(struct gpu *gpu, const char *line) {
    char fault[32] = "";
    int fields = sscanf(line, "gpu|%95[^|]|%95[^|]|%lu|%lu|%d|%d|%31s", gpu->uuid, gpu->name, &gpu->memory, &gpu->reserved,
                        &gpu->sms, &gpu->mig, fault);
    gpu->memory <<= 20;
    gpu->reserved <<= 20;
    return fields == 6 || (fields == 7 && set_fault(gpu, fault, 1));
}

/* Processes and the library read the GPU meanwhile: what stays the same is not written. */
static void update(struct gpu *gpu, const struct gpu *wanted) {
    if (strcmp(gpu->name, wanted->name) || memcmp(gpu->profiles, wanted->profiles, sizeof gpu->profiles)) {
        *gpu = *wanted;
        return;
    }
    if (strcmp(gpu->uuid, wanted->uuid)) memcpy(gpu->uuid, wanted->uuid, sizeof gpu->uuid);
    gpu->memory = wanted->memory;
    gpu->reserved = wanted->reserved;
    gpu->sms = wanted->sms;
    gpu->mig = wanted->mig;
    for (int n = 0; n < FAULTS; n++) atomic_store(&gpu->faults[n], atomic_load(&wanted->faults[n]));
}

static int create(void) {
    static struct gpu wanted[GPUS];
    char line[512];
    int count = 0;
    while (fgets(line, sizeof line, stdin)) {
        int is_gpu = !strncmp(line, "gpu|", 4) && count < GPUS && read_gpu(&wanted[count], line);
        count += is_gpu;
        if (is_gpu || (!strncmp(line, "profile|", 8) && count > 0 && add_profile(&wanted[count - 1], line + 8))) continue;
        fprintf(stderr, "this line is not a GPU or a profile: %s", line);
        return 1;
    }
    if (!create_state()) {
        perror("$GPU_DRIVER_STATE cannot be created");
        return 1;
    }
    lock_state();
    for (int g = 0; g < count; g++) update(&state->gpus[g], &wanted[g]);
    state->gpu_count = count;
    unlock_state();
    return 0;
}

static void report_xid(struct gpu *gpu, unsigned number) {
    lock_state();
    uint64_t count = atomic_load(&gpu->xid_count);
    atomic_store(&gpu->xids[count % XIDS], number);
    atomic_store(&gpu->xid_count, count + 1);
    unlock_state();
    atomic_fetch_add(&state->xid_events, 1);
    syscall(SYS_futex, &state->xid_events, FUTEX_WAKE, PROCESSES, NULL, NULL, 0);
}

static int set_accounting(const char *name) {
    static const char *const names[] = {"none", "misc", "dmem"};
    for (int n = 0; n < 3; n++)
        if (!strcmp(name, names[n])) {
            atomic_store(&state->accounting, n);
            return 1;
        }
    return 0;
}
static void forget_limits(void) {
    lock_state();
    memset(state->cgroup_limits, 0, sizeof state->cgroup_limits);
    unlock_state();
}
static uint64_t bytes_of(const char *text) { return strcmp(text, "max") ? strtoull(text, NULL, 10) : UNLIMITED; }
static void set_limit(const char *uuid, const char *path, const char *soft, const char *hard) {
    int gpu = (int)(find_gpu(uuid) - state->gpus);
    lock_state();
    put_limit(gpu, path, bytes_of(soft), bytes_of(hard));
    unlock_state();
}
static void show_limits(void) {
    lock_state();
    for (int n = 0; n < CGROUP_LIMITS; n++) {
        const struct cgroup_limit *limit = &state->cgroup_limits[n];
        if (limit->path[0])
            printf("limit %s %s soft %lu hard %lu used %lu\n", state->gpus[limit->gpu].uuid, limit->path, limit->soft,
                   limit->hard, charged_bytes(limit->gpu, limit->path));
    }
    unlock_state();
    printf("limit-calls %u\n", atomic_load(&state->limit_calls));
}

static void show(void) {
    for (int g = 0; g < state->gpu_count; g++) {
        printf("gpu %s total %lu used %lu timeslice %d\n", state->gpus[g].uuid, state->gpus[g].memory, used_bytes(g, -1),
               atomic_load(&state->gpus[g].timeslice));
        for (int i = 0; i < INSTANCES; i++)
            for (int c = 0; state->gpus[g].instances[i].made && c < COMPUTES; c++)
                if (state->gpus[g].instances[i].computes[c].slices)
                    printf("mig %s %s\n", state->gpus[g].instances[i].computes[c].uuid, profile_at(g, i)->name);
        for (int n = 0; n < PROCESSES; n++)
            if (lives(n) && held_bytes(&state->processes[n], g))
                printf("process %d uses %lu bytes of %s, busy %u %%, ran %lu us until %lu\n",
                       atomic_load(&state->processes[n].pid), held_bytes(&state->processes[n], g), state->gpus[g].uuid,
                       busy_percent(&state->processes[n], g), atomic_load(&state->processes[n].ran_ns[g]) / 1000,
                       now_ns() / 1000);
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
    else if (!strcmp(command, "limits") && count == 2) show_limits();
    else if (!strcmp(command, "accounting") && count == 3 && set_accounting(arguments[2])) {
    } else if (!strcmp(command, "limit") && count == 6) set_limit(arguments[2], arguments[3], arguments[4], arguments[5]);
    else if (!strcmp(command, "forget-limits") && count == 2) forget_limits();
    else if (!strcmp(command, "limits-error") && count == 3) atomic_store(&state->limits_error, atoi(arguments[2]));
    else if (!strcmp(command, "keep-limits") && count == 3) atomic_store(&state->keeps_limits, atoi(arguments[2]));
    else if (!strcmp(command, "xid") && count == 4) report_xid(find_gpu(arguments[2]), (unsigned)atoi(arguments[3]));
    else if (!strcmp(command, "set") && count == 5 && set_fault(find_gpu(arguments[2]), arguments[3], atoi(arguments[4]))) {
    } else {
        fprintf(stderr, "usage: gpu-control create | show | limits | xid UUID NUMBER | set UUID FAULT N | accounting WHICH | "
                        "limit UUID CGROUP SOFT HARD | forget-limits | limits-error N | keep-limits N\n");
        return 2;
    }
    return 0;
}
