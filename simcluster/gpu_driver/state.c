/* The file of the simulated GPUs: mapping, visible devices, processes and their accounts. */
#include "state.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>

#define MAGIC (0x4c534750u + (uint32_t)sizeof(struct state))
#define STATE_LOCK (1 << 20) /* byte of the lock on the whole; records lock the byte of their number */

struct state *state;
struct place visible[GPUS * INSTANCES];
int visible_count;
static int file = -1, own_record = -1;

uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000ull + (uint64_t)now.tv_nsec;
}

/* Locks belong to the open file, not to the process: closing another one does not drop them. */
static int lock_byte(int command, short kind, off_t at) {
    struct flock lock = {.l_type = kind, .l_whence = SEEK_SET, .l_start = at, .l_len = 1};
    int failed = fcntl(file, command, &lock);
    return command == F_OFD_GETLK && !failed ? lock.l_type != F_UNLCK : failed;
}
void lock_state(void) {
    while (lock_byte(F_OFD_SETLKW, F_WRLCK, STATE_LOCK) && errno == EINTR) {}
}
void unlock_state(void) { lock_byte(F_OFD_SETLK, F_UNLCK, STATE_LOCK); }

/* A child shares its parent's open files and so its locks: it opens the file anew. */
static void after_fork(void) {
    if (file >= 0) close(file);
    file = own_record = -1;
    state = NULL;
}

static int map_state(int flags) {
    static int registered;
    const char *path = getenv("GPU_DRIVER_STATE");
    if (!path || (file = open(path, O_RDWR | O_CLOEXEC | flags, 0666)) < 0) return 0;
    if (flags & O_CREAT && (fchmod(file, 0666) || ftruncate(file, sizeof *state))) return 0;
    struct stat status;
    void *at = fstat(file, &status) || status.st_size < (off_t)sizeof *state
                   ? MAP_FAILED
                   : mmap(NULL, sizeof *state, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (at == MAP_FAILED) {
        close(file);
        file = -1;
        return 0;
    }
    state = at;
    if (!registered++) pthread_atfork(NULL, NULL, after_fork);
    return 1;
}

static void add_visible(int gpu, int instance, int compute) {
    if (visible_count < GPUS * INSTANCES)
        visible[visible_count++] = (struct place){gpu, instance, compute};
}

/* Add the device of a UUID. */
static void add_named(const char *uuid) {
    for (int g = 0; g < state->gpu_count; g++) {
        struct gpu *gpu = &state->gpus[g];
        if (!strcmp(uuid, gpu->uuid)) add_visible(g, -1, -1);
        for (int i = 0; i < INSTANCES; i++)
            for (int c = 0; gpu->instances[i].made && c < COMPUTES; c++)
                if (gpu->instances[i].computes[c].slices && !strcmp(uuid, gpu->instances[i].computes[c].uuid))
                    add_visible(g, i, c);
    }
}

/* The devices that a container runtime gave to this process. */
static void find_injected(void) {
    const char *list = getenv("NVIDIA_VISIBLE_DEVICES");
    visible_count = 0;
    if (!list || !*list || !strcmp(list, "all")) {
        for (int g = 0; g < state->gpu_count; g++) add_visible(g, -1, -1);
        return;
    }
    char text[4096], *rest = text, *one;
    snprintf(text, sizeof text, "%s", list);
    while ((one = strsep(&rest, ","))) {
        char *end;
        long number = strtol(one, &end, 10);
        if (*one && !*end && number >= 0 && number < state->gpu_count) add_visible((int)number, -1, -1);
        else add_named(one);
    }
}

static int comes_after(const struct place *one, const struct place *other, int fastest_first) {
    int more = state->gpus[other->gpu].sms - state->gpus[one->gpu].sms;
    return fastest_first && more ? more > 0 : one->gpu > other->gpu;
}

static void sort_visible(int fastest_first) {
    for (int i = 1; i < visible_count; i++)
        for (int k = i; k > 0 && comes_after(&visible[k - 1], &visible[k], fastest_first); k--) {
            struct place swapped = visible[k];
            visible[k] = visible[k - 1];
            visible[k - 1] = swapped;
        }
}

/* CUDA uses one compute instance of a GPU in MIG mode: the named one, or the first. */
static void resolve_instances(void) {
    int kept = 0;
    for (int n = 0; n < visible_count; n++) {
        struct place place = visible[n];
        struct gpu *gpu = &state->gpus[place.gpu];
        for (int i = 0; gpu->mig && place.instance < 0 && i < INSTANCES; i++)
            for (int c = 0; gpu->instances[i].made && place.instance < 0 && c < COMPUTES; c++)
                if (gpu->instances[i].computes[c].slices) place = (struct place){place.gpu, i, c};
        if (!gpu->mig || place.instance >= 0) visible[kept++] = place;
    }
    visible_count = kept;
}

static const char *uuid_of(const struct place *place) {
    const struct gpu *gpu = &state->gpus[place->gpu];
    return place->instance < 0 ? gpu->uuid : gpu->instances[place->instance].computes[place->compute].uuid;
}

/* Reduce to what CUDA_VISIBLE_DEVICES names; CUDA stops at the first entry that names nothing. */
static void choose_visible(const char *list) {
    struct place before[GPUS * INSTANCES];
    int count = visible_count;
    char text[4096], *rest = text, *one;
    memcpy(before, visible, sizeof before);
    snprintf(text, sizeof text, "%s", list);
    visible_count = 0;
    while ((one = strsep(&rest, ","))) {
        char *end;
        long number = strtol(one, &end, 10);
        int found = -1;
        for (int n = 0; n < count; n++)
            if ((*one && !*end && number == n) || !strcmp(one, uuid_of(&before[n]))) found = n;
        if (found < 0) return;
        add_visible(before[found].gpu, before[found].instance, before[found].compute);
    }
}

static void find_visible(int for_cuda) {
    const char *order = getenv("CUDA_DEVICE_ORDER"), *chosen = getenv("CUDA_VISIBLE_DEVICES");
    find_injected();
    if (for_cuda) resolve_instances();
    sort_visible(for_cuda && !(order && !strcmp(order, "PCI_BUS_ID")));
    if (for_cuda && chosen) choose_visible(chosen);
}

/* The file that is mapped stays so, since handles point into it; another one is mapped anew. */
int open_state(int for_cuda) {
    static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    static char mapped[PATH_MAX];
    const char *path = getenv("GPU_DRIVER_STATE");
    pthread_mutex_lock(&mutex);
    int same = state && path && !strcmp(path, mapped);
    int opened = same || (path && map_state(0) && atomic_load(&state->magic) == MAGIC);
    if (opened && !same) {
        snprintf(mapped, sizeof mapped, "%s", path);
        find_visible(for_cuda);
    }
    pthread_mutex_unlock(&mutex);
    return opened;
}

int create_state(void) {
    if (open_state(0)) return 1;
    if (getenv("GPU_DRIVER_STATE")) unlink(getenv("GPU_DRIVER_STATE"));
    if (!map_state(O_CREAT)) return 0;
    pthread_mutexattr_t attributes; /* a process that is killed while it holds the lock does not stop the others */
    pthread_mutexattr_init(&attributes);
    pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
    pthread_mutex_init(&state->turns, &attributes);
    atomic_store(&state->magic, MAGIC);
    return 1;
}

/* The PID of this process on the node: /proc there names it, whatever PID it has in a container. */
int node_pid(void) {
    const char *proc = getenv("GPU_DRIVER_PROC");
    char path[PATH_MAX], text[32];
    snprintf(path, sizeof path, "%s/self", proc ? proc : "/proc");
    ssize_t length = readlink(path, text, sizeof text - 1);
    if (length <= 0) return getpid();
    text[length] = '\0';
    return atoi(text);
}

int lives(int record) {
    struct process *process = &state->processes[record];
    if (atomic_load(&process->pid) == 0) return 0;
    if (record == own_record || lock_byte(F_OFD_GETLK, F_WRLCK, record)) return 1;
    memset((void *)process, 0, sizeof *process);
    return 0;
}

struct process *own_process(void) {
    if (own_record < 0) {
        lock_state();
        for (int n = 0; n < PROCESSES && own_record < 0; n++)
            if (!lives(n) && lock_byte(F_OFD_SETLK, F_WRLCK, n) == 0) {
                memset((void *)&state->processes[n], 0, sizeof(struct process));
                const char *cgroup = getenv("GPU_DRIVER_CGROUP");
                snprintf(state->processes[n].cgroup, CGROUP_BYTES, "%s", cgroup ? cgroup : "");
                atomic_store(&state->processes[n].pid, node_pid());
                if (n >= atomic_load(&state->record_count)) atomic_store(&state->record_count, n + 1);
                own_record = n;
            }
        unlock_state();
    }
    return own_record < 0 ? NULL : &state->processes[own_record];
}

uint64_t held_bytes(const struct process *process, int gpu) {
    return atomic_load(&process->used[gpu]) + (atomic_load(&process->contexts[gpu]) > 0 ? CONTEXT_BYTES : 0);
}

uint64_t used_bytes(int gpu, int instance) {
    uint64_t used = 0;
    for (int n = 0; n < PROCESSES; n++) {
        const struct process *process = &state->processes[n];
        if (lives(n) && (instance < 0 || atomic_load(&process->instance[gpu]) == instance + 1))
            used += held_bytes(process, gpu);
    }
    return used;
}

uint64_t total_bytes(int gpu, int instance) {
    return instance < 0 ? state->gpus[gpu].memory : profile_at(gpu, instance)->memory_mib << 20;
}
uint64_t usable_bytes(int gpu, int instance) { return total_bytes(gpu, instance) - (instance < 0 ? state->gpus[gpu].reserved : 0); }

const struct mig_profile *profile_at(int gpu, int instance) {
    return &state->gpus[gpu].profiles[state->gpus[gpu].instances[instance].profile];
}

int sees(int gpu, int instance, int compute) {
    int found = 0;
    for (int n = 0; n < visible_count; n++) {
        const struct place *place = &visible[n];
        int whole = place->instance < 0, same = place->instance == instance && place->compute == compute;
        found |= place->gpu == gpu && (whole || same);
    }
    return found;
}

const char *const fault_names[FAULTS] = {
    [LOST] = "lost",
    [HANG] = "hang",
    [VANISH] = "vanish",
    [UNHEALTHY] = "unhealthy",
    [ECC_ERRORS] = "ecc-errors",
    [CREATE_FAILS] = "create-fails",
    [CREATE_NOTHING] = "create-nothing",
    [CREATE_HANGS] = "create-hangs",
    [COMPUTE_FAILS] = "compute-fails",
    [ALL_BUSY] = "busy",
    [HOT] = "hot",
};
int has_fault(int gpu, enum fault fault) { return atomic_load(&state->gpus[gpu].faults[fault]); }
void wait_while_hung(int gpu) {
    while (has_fault(gpu, HANG)) usleep(5000);
}
