/* The library that holds a container's programs to their part of a GPU's time.
 *
 * /etc/ld.so.preload names it before HAMi-core, so that calls go from the program to this library,
 * then to HAMi-core if it is there, then to the driver. It replaces launches, what ends the validity
 * of handles, and what finds functions; it changes nothing that HAMi-core counts. HAMi-core's own
 * limit of cores must be off: two limiters on one GPU hold each other up.
 *
 * Programs find the files of their limits at fixed places. Where these are missing, as in simulated
 * containers, which have no mounts, LEASEHOLD_TIME_LIMITS and LEASEHOLD_TIME_USE name them. */
#define _GNU_SOURCE
#include "limiter.h"

#include <dlfcn.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* The oldest versions, so that the library also loads where glibc has no newer ones. */
#if defined(__x86_64__)
#define OLDEST "GLIBC_2.2.5"
#else
#define OLDEST "GLIBC_2.17"
#endif
__asm__(".symver dlopen, dlopen@" OLDEST);
__asm__(".symver dlvsym, dlvsym@" OLDEST);

#define API __attribute__((visibility("default")))
#define LIMITS "/usr/local/leasehold/time-limits"
#define USE "/tmp/leasehold-time/use"
#define HAMI_CORE "/usr/local/vgpu/libvgpu.so"

typedef void *(*finder)(void *, const char *);
static _Atomic finder own_dlsym;  /* glibc's */
static _Atomic finder next_dlsym; /* HAMi-core's, or glibc's if HAMi-core is not loaded */
static _Atomic(void *) libcuda;

static void find_finders(void) {
    static const char *const libraries[] = {"libc.so.6", "libdl.so.2"}, *const versions[] = {OLDEST, "GLIBC_2.34"};
    finder found = NULL;
    for (int n = 0; n < 4 && !found; n++) {
        void *library = dlopen(libraries[n / 2], RTLD_LAZY | RTLD_NOLOAD);
        if (library) found = (finder)dlvsym(library, "dlsym", versions[n % 2]);
    }
    const char *path = getenv("CUDA_REDIRECT");
    void *hami_core = dlopen(path ? path : HAMI_CORE, RTLD_LAZY | RTLD_NOLOAD);
    finder next = hami_core && found ? (finder)found(hami_core, "dlsym") : NULL;
    atomic_store(&next_dlsym, next ? next : found);
    atomic_store(&own_dlsym, found);
}
static finder dlsym_of_glibc(void) {
    if (!atomic_load(&own_dlsym)) find_finders();
    return atomic_load(&own_dlsym);
}
static void *driver_library(void) {
    if (!atomic_load(&libcuda)) atomic_store(&libcuda, dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NODELETE));
    return atomic_load(&libcuda);
}
static void *find_next(const char *name) {
    dlsym_of_glibc();
    return atomic_load(&next_dlsym)(driver_library(), name);
}
static void *find_in_driver(const char *name) { return dlsym_of_glibc()(driver_library(), name); }

static void start(void) {
    static _Atomic int state; /* 0: not started; 1: some thread is at it; 2: started */
    int before = 0;
    if (atomic_load(&state) == 2) return;
    if (atomic_compare_exchange_strong(&state, &before, 1)) {
        int is_mounted = access(LIMITS, R_OK) == 0;
        const char *limits = is_mounted ? LIMITS : getenv("LEASEHOLD_TIME_LIMITS");
        const char *use = is_mounted ? USE : getenv("LEASEHOLD_TIME_USE");
        if (limits && use) limiter_start(find_in_driver, limits, use);
        atomic_store(&state, 2);
    }
    while (atomic_load(&state) != 2) usleep(100);
}
static int before(const void *key, uint64_t size, void *stream) {
    start();
    return limiter_before(key, size, stream);
}

/* Launches. Those of programs with a default stream per thread have names of their own, and mean
 * that stream where no stream is given. */
enum {
    KERNEL, KERNEL_EX, COOPERATIVE, GRAPH, KERNEL_PTSZ, KERNEL_EX_PTSZ, COOPERATIVE_PTSZ, GRAPH_PTSZ,
    UNLOAD_MODULE, UNLOAD_LIBRARY, DESTROY_GRAPH, DESTROY_CONTEXT, RELEASE_CONTEXT, RESET_CONTEXT, KINDS
};
static _Atomic(void *) originals[KINDS];
static void *original(int kind);
#define STREAM_PER_THREAD ((void *)2)
static void *per_thread(void *stream) { return stream ? stream : STREAM_PER_THREAD; }

/* A launch of what `key` and `size` identify, in `stream`; the same in the thread's own stream. */
#define LAUNCH(name, kind, type, arguments, key, size, stream) \
    API int name type { \
        int sample = before(key, size, stream); \
        int error = ((int(*) type)original(kind))arguments; \
        limiter_after(sample, stream); \
        return error; \
    }
#define LAUNCHES(name, kind, type, arguments, key, size, stream) \
    LAUNCH(name, kind, type, arguments, key, size, stream) \
    LAUNCH(name##_ptsz, kind##_PTSZ, type, arguments, key, size, per_thread(stream))
typedef unsigned u;
struct config {
    u grid[3], block[3], shared;
    void *stream;
};
static uint64_t blocks(u x, u y, u z) { return (uint64_t)x * y * z; }
LAUNCHES(cuLaunchKernel, KERNEL,
         (void *f, u x, u y, u z, u bx, u by, u bz, u shared, void *stream, void **params, void **extra),
         (f, x, y, z, bx, by, bz, shared, stream, params, extra), f, blocks(x, y, z), stream)
LAUNCHES(cuLaunchCooperativeKernel, COOPERATIVE,
         (void *f, u x, u y, u z, u bx, u by, u bz, u shared, void *stream, void **params),
         (f, x, y, z, bx, by, bz, shared, stream, params), f, blocks(x, y, z), stream)
LAUNCHES(cuLaunchKernelEx, KERNEL_EX, (const struct config *config, void *f, void **params, void **extra),
         (config, f, params, extra), f, blocks(config->grid[0], config->grid[1], config->grid[2]), config->stream)
LAUNCHES(cuGraphLaunch, GRAPH, (void *program, void *stream), (program, stream), program, 0, stream)

/* What makes handles invalid, which the driver may then give to others. */
#define FORGET(name, kind, type, contexts) \
    API int name(type handle) { \
        limiter_forget(contexts); \
        return ((int (*)(type))original(kind))(handle); \
    }
FORGET(cuModuleUnload, UNLOAD_MODULE, void *, 0)
FORGET(cuLibraryUnload, UNLOAD_LIBRARY, void *, 0)
FORGET(cuGraphExecDestroy, DESTROY_GRAPH, void *, 0)
FORGET(cuCtxDestroy_v2, DESTROY_CONTEXT, void *, 1)
FORGET(cuDevicePrimaryCtxRelease_v2, RELEASE_CONTEXT, int, 1)
FORGET(cuDevicePrimaryCtxReset_v2, RESET_CONTEXT, int, 1)

/* By the names that the library exports. */
static const struct {
    const char *name;
    void *replacement;
} hooks[KINDS] = {
    [KERNEL] = {"cuLaunchKernel", cuLaunchKernel},
    [KERNEL_EX] = {"cuLaunchKernelEx", cuLaunchKernelEx},
    [COOPERATIVE] = {"cuLaunchCooperativeKernel", cuLaunchCooperativeKernel},
    [GRAPH] = {"cuGraphLaunch", cuGraphLaunch},
    [KERNEL_PTSZ] = {"cuLaunchKernel_ptsz", cuLaunchKernel_ptsz},
    [KERNEL_EX_PTSZ] = {"cuLaunchKernelEx_ptsz", cuLaunchKernelEx_ptsz},
    [COOPERATIVE_PTSZ] = {"cuLaunchCooperativeKernel_ptsz", cuLaunchCooperativeKernel_ptsz},
    [GRAPH_PTSZ] = {"cuGraphLaunch_ptsz", cuGraphLaunch_ptsz},
    [UNLOAD_MODULE] = {"cuModuleUnload", cuModuleUnload},
    [UNLOAD_LIBRARY] = {"cuLibraryUnload", cuLibraryUnload},
    [DESTROY_GRAPH] = {"cuGraphExecDestroy", cuGraphExecDestroy},
    [DESTROY_CONTEXT] = {"cuCtxDestroy_v2", cuCtxDestroy_v2},
    [RELEASE_CONTEXT] = {"cuDevicePrimaryCtxRelease_v2", cuDevicePrimaryCtxRelease_v2},
    [RESET_CONTEXT] = {"cuDevicePrimaryCtxReset_v2", cuDevicePrimaryCtxReset_v2},
};
static void *original(int kind) {
    if (!atomic_load(&originals[kind])) atomic_store(&originals[kind], find_next(hooks[kind].name));
    return atomic_load(&originals[kind]);
}
static int kind_of(const char *name) {
    int kind = 0;
    while (kind < KINDS && strcmp(name, hooks[kind].name)) kind++;
    return kind;
}

/* cuGetProcAddress finds functions by names without a version: of several versions it returns that
 * of a CUDA version, and with a flag the one for a default stream per thread. */
enum { PER_THREAD_DEFAULT_STREAM = 2 };
API int cuGetProcAddress(const char *name, void **function, int version, uint64_t flags);
API int cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *status);
static void replace(const char *name, void **function, int version, uint64_t flags) {
    static const char *const suffixes[] = {"_v2", "", "_ptsz"};
    char full[64];
    if (!*function) return;
    if (!strncmp(name, "cuGetProcAddress", 16))
        *function = name[16] || version >= 12000 ? (void *)cuGetProcAddress_v2 : (void *)cuGetProcAddress;
    for (int n = 0; n < (flags & PER_THREAD_DEFAULT_STREAM ? 3 : 2) && strlen(name) < 56; n++) {
        int kind = kind_of(strcat(strcpy(full, name), suffixes[n]));
        if (kind == KINDS || (flags & PER_THREAD_DEFAULT_STREAM && kind < KERNEL_PTSZ)) continue;
        if (*function != hooks[kind].replacement) atomic_store(&originals[kind], *function);
        *function = hooks[kind].replacement;
        return;
    }
}
API int cuGetProcAddress(const char *name, void **function, int version, uint64_t flags) {
    int (*next)(const char *, void **, int, uint64_t) = find_next("cuGetProcAddress");
    int error = next(name, function, version, flags);
    if (!error) replace(name, function, version, flags);
    return error;
}
API int cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *status) {
    int (*next)(const char *, void **, int, uint64_t, int *) = find_next("cuGetProcAddress_v2");
    int error = next(name, function, version, flags, status);
    if (!error) replace(name, function, version, flags);
    return error;
}

/* The calls of the functions below that return what they call must remain jumps (-O2): glibc's
 * dlsym looks at its return address to find out which library RTLD_NEXT is meant from. */
API void *dlsym(void *handle, const char *name) {
    finder found = dlsym_of_glibc();
    if (handle == RTLD_NEXT || handle == RTLD_DEFAULT) return found(handle, name);
    found = atomic_load(&next_dlsym);
    if (name[0] != 'c' || name[1] != 'u') return found(handle, name);
    int kind = kind_of(name);
    void *function = found(handle, name);
    if (!function) return NULL;
    if (!strcmp(name, "cuGetProcAddress")) return (void *)cuGetProcAddress;
    if (!strcmp(name, "cuGetProcAddress_v2")) return (void *)cuGetProcAddress_v2;
    return kind < KINDS ? hooks[kind].replacement : function;
}
