/* NVML's limits on the memory of cgroups, R615: before that, the functions are missing.
 *
 * Which cgroups have files of the controller `dmem` is read from `cgroup.subtree_control` of the
 * directories above, as the kernel decides it: a directory that a test makes is empty. */
#include "cgroup_limits.h"
#include "nvml.h"

#include <limits.h>
#include <sys/stat.h>

struct limits { /* of setting; getting has `used` at its end */
    char *path;
    unsigned long long soft, hard, used;
};

static int accounting(void) { return atomic_load(&state->accounting); }
static int is_directory(const char *path) {
    struct stat status;
    return !stat(path, &status) && S_ISDIR(status.st_mode);
}
static int file_has(const char *directory, const char *name, const char *word) {
    char path[PATH_MAX], text[512] = "";
    snprintf(path, sizeof path, "%s/%s", directory, name);
    FILE *file = fopen(path, "r");
    if (!file) return 0;
    size_t length = fread(text, 1, sizeof text - 1, file);
    fclose(file);
    text[length] = '\0';
    for (char *rest = text, *one; (one = strsep(&rest, " \n"));)
        if (!strcmp(one, word) || !*word) return 1;
    return 0;
}
static void cut_last(char *path) {
    char *slash = strrchr(path, '/');
    if (slash) *slash = '\0';
}
static int is_root(const char *path) {
    char parent[CGROUP_BYTES];
    snprintf(parent, sizeof parent, "%s", path);
    cut_last(parent);
    return !file_has(parent, "cgroup.subtree_control", "");
}
static int has_dmem(const char *path) {
    char parent[CGROUP_BYTES];
    snprintf(parent, sizeof parent, "%s", path);
    cut_last(parent);
    return file_has(parent, "cgroup.subtree_control", "dmem");
}
/* With `dmem`, the kernel drops the limits of a cgroup that is removed. */
static void forget_removed(void) {
    for (int n = 0; accounting() == DMEM_ACCOUNTING && n < CGROUP_LIMITS; n++)
        if (state->cgroup_limits[n].path[0] && !is_directory(state->cgroup_limits[n].path))
            memset(&state->cgroup_limits[n], 0, sizeof state->cgroup_limits[n]);
}

static result check_call(device d, const struct limits *limits) {
    CHECK(d);
    atomic_fetch_add(&state->limit_calls, 1);
    if (accounting() == NO_ACCOUNTING) return NVML_FUNCTION_NOT_FOUND;
    if (atomic_load(&state->limits_error)) return atomic_load(&state->limits_error);
    if (d->instance >= 0 || state->gpus[d->gpu].mig) return NVML_NOT_SUPPORTED;
    if (!limits || !limits->path || limits->path[0] != '/' || strlen(limits->path) >= CGROUP_BYTES) return NVML_INVALID_ARGUMENT;
    if (!is_directory(limits->path)) return NVML_NOT_FOUND;
    return is_root(limits->path) ? NVML_NOT_SUPPORTED : NVML_SUCCESS;
}

/* The driver adds the change of a guarantee to all cgroups above, up to the first without files of
 * `dmem`. It does not take back what a removed cgroup had. */
static void guarantee_above(int gpu, const char *path, uint64_t change) {
    char above[CGROUP_BYTES];
    snprintf(above, sizeof above, "%s", path);
    for (cut_last(above); change && !is_root(above) && has_dmem(above); cut_last(above)) {
        const struct cgroup_limit *limit = limit_of(gpu, above);
        put_limit(gpu, above, (limit ? limit->soft : 0) + change, limit ? limit->hard : UNLIMITED);
    }
}

static result set_limit(int gpu, const struct limits *wanted) {
    struct cgroup_limit *limit = limit_of(gpu, wanted->path);
    uint64_t hard_before = limit ? limit->hard : UNLIMITED;
    uint64_t soft_before = limit ? limit->soft : 0;
    int is_below_use = (limit || accounting() == DMEM_ACCOUNTING) && charged_bytes(gpu, wanted->path) > wanted->hard;
    int is_kept = is_below_use || (limit && wanted->hard < hard_before && atomic_load(&state->keeps_limits));
    if (is_kept && accounting() == MISC_ACCOUNTING) return NVML_INVALID_ARGUMENT;
    /* With `dmem`, the kernel reports success, and keeps the limit. */
    if (!put_limit(gpu, wanted->path, wanted->soft, is_kept ? hard_before : wanted->hard)) return NVML_INSUFFICIENT_RESOURCES;
    if (accounting() == DMEM_ACCOUNTING) guarantee_above(gpu, wanted->path, wanted->soft - soft_before);
    return NVML_SUCCESS;
}

API result nvmlDeviceSetMemoryLimits_v1(device d, const struct limits *wanted) {
    result error = check_call(d, wanted);
    if (error) return error;
    if (accounting() == DMEM_ACCOUNTING && !has_dmem(wanted->path)) return NVML_NOT_FOUND;
    if (wanted->soft > wanted->hard) return NVML_INVALID_ARGUMENT;
    lock_state();
    forget_removed();
    error = set_limit(d->gpu, wanted);
    unlock_state();
    return error;
}

API result nvmlDeviceGetMemoryLimits_v1(device d, struct limits *limits) {
    char path[CGROUP_BYTES];
    result error = check_call(d, limits);
    if (error) return error;
    snprintf(path, sizeof path, "%s", limits->path);
    while (accounting() == DMEM_ACCOUNTING && !has_dmem(path) && !is_root(path)) cut_last(path);
    lock_state();
    forget_removed();
    const struct cgroup_limit *limit =
        accounting() == DMEM_ACCOUNTING ? limit_of(d->gpu, path) : nearest_limit(d->gpu, path);
    if (limit || accounting() == DMEM_ACCOUNTING) {
        limits->soft = limit ? limit->soft : 0;
        limits->hard = limit ? limit->hard : UNLIMITED;
        limits->used = charged_bytes(d->gpu, limit ? limit->path : path);
    } else error = NVML_NOT_SUPPORTED;
    unlock_state();
    return error;
}
