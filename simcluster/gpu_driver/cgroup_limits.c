/* The driver's limits on the memory of cgroups: who is charged, and what has room.
 *
 * A cgroup is the path of a directory; a process names its own in $GPU_DRIVER_CGROUP. */
#include "cgroup_limits.h"

static int is_within(const char *path, const char *ancestor) {
    size_t length = strlen(ancestor);
    return !strncmp(path, ancestor, length) && (path[length] == '\0' || path[length] == '/');
}

struct cgroup_limit *limit_of(int gpu, const char *path) {
    for (int n = 0; n < CGROUP_LIMITS; n++) {
        struct cgroup_limit *limit = &state->cgroup_limits[n];
        if (limit->path[0] && limit->gpu == gpu && !strcmp(limit->path, path)) return limit;
    }
    return NULL;
}

struct cgroup_limit *nearest_limit(int gpu, const char *path) {
    struct cgroup_limit *nearest = NULL;
    for (int n = 0; n < CGROUP_LIMITS; n++) {
        struct cgroup_limit *limit = &state->cgroup_limits[n];
        int counts = limit->path[0] && limit->gpu == gpu && is_within(path, limit->path);
        if (counts && (!nearest || strlen(limit->path) > strlen(nearest->path))) nearest = limit;
    }
    return nearest;
}

static int is_misc(void) { return atomic_load(&state->accounting) == MISC_ACCOUNTING; }

/* What a process holds, and with `misc` only what it allocated since its cgroup had a limit. */
static uint64_t counted_bytes(const struct process *process, int gpu) {
    uint64_t held = held_bytes(process, gpu), uncounted = is_misc() ? atomic_load(&process->uncounted[gpu]) : 0;
    return held > uncounted ? held - uncounted : 0;
}

uint64_t charged_bytes(int gpu, const char *path) {
    uint64_t bytes = 0;
    for (int n = 0; n < PROCESSES; n++) {
        const struct process *process = &state->processes[n];
        if (!lives(n) || !is_within(process->cgroup, path)) continue;
        struct cgroup_limit *nearest = is_misc() ? nearest_limit(gpu, process->cgroup) : NULL;
        if (!is_misc() || (nearest && !strcmp(nearest->path, path))) bytes += counted_bytes(process, gpu);
    }
    return bytes;
}

/* With `misc`, a new limit counts from zero. */
static void begin_counting(int gpu, const char *path) {
    for (int n = 0; n < PROCESSES; n++) {
        struct process *process = &state->processes[n];
        if (lives(n) && is_within(process->cgroup, path))
            atomic_store(&process->uncounted[gpu], held_bytes(process, gpu));
    }
}

int put_limit(int gpu, const char *path, uint64_t soft, uint64_t hard) {
    struct cgroup_limit *limit = limit_of(gpu, path);
    if (soft == 0 && hard == UNLIMITED) {
        if (limit) memset(limit, 0, sizeof *limit);
        return 1;
    }
    for (int n = 0; n < CGROUP_LIMITS && !limit; n++)
        if (!state->cgroup_limits[n].path[0]) {
            limit = &state->cgroup_limits[n];
            limit->gpu = gpu;
            snprintf(limit->path, CGROUP_BYTES, "%s", path);
            if (is_misc()) begin_counting(gpu, path);
        }
    if (!limit) return 0;
    limit->soft = soft;
    limit->hard = hard;
    return 1;
}

int may_allocate(const struct process *process, int gpu, uint64_t size) {
    for (int n = 0; n < CGROUP_LIMITS; n++) {
        struct cgroup_limit *limit = &state->cgroup_limits[n];
        if (!limit->path[0] || limit->gpu != gpu || !is_within(process->cgroup, limit->path)) continue;
        if (is_misc() && limit != nearest_limit(gpu, process->cgroup)) continue;
        if (charged_bytes(gpu, limit->path) + size > limit->hard) return 0;
    }
    return 1;
}

void note_allocated(struct process *process, int gpu, uint64_t size) {
    if (!nearest_limit(gpu, process->cgroup)) atomic_fetch_add(&process->uncounted[gpu], size);
}

void note_freed(struct process *process, int gpu) {
    uint64_t held = held_bytes(process, gpu);
    if (atomic_load(&process->uncounted[gpu]) > held) atomic_store(&process->uncounted[gpu], held);
}
