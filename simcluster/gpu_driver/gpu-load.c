/* Uses a GPU as its commands say; prints one line for each.
 *
 *   gpu-load 'alloc 4g' 'burn 10s'    commands as arguments; the exit status is 1 if one failed
 *   gpu-load                          commands from standard input, first a line `ready PID`
 *
 *   device N                use another device
 *   alloc | managed | pitch | async | create SIZE    memory, by different functions; 1g, 512m, 64k
 *   pool | graph SIZE       memory of an own pool, of a graph's node; real drivers only
 *   path SIZE               as alloc, by the driver's library loaded again by its path
 *   direct SIZE             as alloc, past everything that replaces the driver's functions
 *   fill FUNCTION MOST      allocate to the last MiB, MOST MiB at most
 *   free N                  free the Nth allocation, counted from 0
 *   info | total | nvml [N] memory as CUDA and NVML report it
 *   calibrate               measure loops of a kernel per millisecond, on a GPU that nothing else uses
 *   burn TIME [US [BLOCKS [LOOPS]]]  launch kernels of US microseconds (1000) and BLOCKS blocks (640),
 *                           of LOOPS loops if another process has measured that
 *   flood TIME US [HOW [LOOPS]]  launch kernels of US microseconds and never wait: as far ahead as the driver
 *                           lets it. HOW: kernel, ex, cooperative, graph (of 100 kernels), thread (in the
 *                           thread's own default stream), streams (two in turn), or address (by cuGetProcAddress)
 *   percents SECONDS US [HOW [LOOPS]]  as flood; what its launches need of the GPU's time, by seconds
 *   latency TIME US PERIOD [LOOPS]  a kernel each PERIOD microseconds on average (each from half to one and a
 *                           half of it after the last, so not in step with the turns of other programs);
 *                           the time from launch to end
 *   capture TIME            replay a graph while another thread captures again and again
 *   reload TIME US US       flood by a kernel, then by another, whose module may have the memory of the first
 *   launches TIME           launch empty kernels as fast as possible
 *   sleep TIME              10s, 500ms
 *   fork COMMAND            a child that carries out one command, and lives until its parent ends
 *   spawn COMMAND           another gpu-load that carries out one command, and ends
 *
 * It also runs on real GPUs, with the driver that the loader finds.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { OUT_OF_MEMORY = 2, MOST = 4096, GRAPH_KERNELS = 100, PRINTED = -1, UNKNOWN_COMMAND = -2 };
static void *cuda, *nvml;
static struct {
    uint64_t at;
    char kind;
} allocations[MOST];
static int allocation_count;

/* Functions are looked up by name at each call, as programs that link libcudart do. */
static void *function(const char *name) {
    void *found = dlsym(name[0] == 'n' ? nvml : cuda, name);
    if (!found) {
        printf("there is no function %s\n", name);
        exit(3);
    }
    return found;
}
#define CALL(name, types) ((int(*) types)function(name))

static size_t size_of(const char *text) {
    char *unit;
    double number = strtod(text, &unit);
    return (size_t)(number * (*unit == 'g' ? 1 << 30 : *unit == 'm' ? 1 << 20 : *unit == 'k' ? 1 << 10 : 1));
}
static double seconds_of(const char *text) {
    char *unit;
    double number = strtod(text, &unit);
    return strcmp(unit, "ms") ? number : number / 1000;
}
static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

static int use_device(int number) {
    void *context = NULL;
    int error = CALL("cuDevicePrimaryCtxRetain", (void **, int))(&context, number);
    return error ? error : CALL("cuCtxSetCurrent", (void *))(context);
}
static int start(int number) {
    int error = CALL("cuInit", (unsigned))(0);
    return error ? error : use_device(number);
}

static int allocate_by_path(uint64_t *at, size_t size) {
    struct link_map *map;
    void *driver = dlinfo(cuda, RTLD_DI_LINKMAP, &map) ? NULL : dlopen(map->l_name, RTLD_NOW | RTLD_LOCAL);
    int (*found)(uint64_t *, size_t) = driver ? (int (*)(uint64_t *, size_t))dlsym(driver, "cuMemAlloc_v2") : NULL;
    return found ? found(at, size) : UNKNOWN_COMMAND;
}

/* The driver's own function, read from its table of symbols: nothing can have replaced that. */
static void *own_function(const char *name) {
    struct link_map *map;
    const ElfW(Sym) *symbols = NULL;
    const char *names = NULL;
    if (dlinfo(cuda, RTLD_DI_LINKMAP, &map)) return NULL;
    for (const ElfW(Dyn) *entry = map->l_ld; entry->d_tag != DT_NULL; entry++) {
        if (entry->d_tag == DT_SYMTAB) symbols = (const void *)entry->d_un.d_ptr;
        if (entry->d_tag == DT_STRTAB) names = (const void *)entry->d_un.d_ptr;
    }
    for (; symbols && (const char *)symbols < names; symbols++) /* the names follow the symbols */
        if (symbols->st_value && !strcmp(names + symbols->st_name, name)) return (void *)(map->l_addr + symbols->st_value);
    return NULL;
}
static int allocate_directly(uint64_t *at, size_t size) {
    int (*own)(uint64_t *, size_t) = own_function("cuMemAlloc_v2");
    return own ? own(at, size) : UNKNOWN_COMMAND;
}

static const int on_device[64] = {1, 0, 1, 0}; /* pinned, no handle type, on device 0; the rest is zero */
static int allocate_in_pool(uint64_t *at, size_t size) {
    static void *pool;
    int error = pool ? 0 : CALL("cuMemPoolCreate", (void **, const void *))(&pool, on_device);
    return error ? error : CALL("cuMemAllocFromPoolAsync", (uint64_t *, size_t, void *, void *))(at, size, pool, NULL);
}
static int allocate_in_graph(uint64_t *at, size_t size) {
    void *graph, *node, *program;
    struct {
        int properties[22];
        const void *access;
        size_t access_count, size;
        uint64_t at;
    } parameters = {.properties = {1, 0, 1, 0}, .size = size};
    int error = CALL("cuGraphCreate", (void **, unsigned))(&graph, 0);
    if (!error) error = CALL("cuGraphAddMemAllocNode", (void **, void *, void *, size_t, void *))(&node, graph, NULL, 0, &parameters);
    if (!error) error = CALL("cuGraphInstantiateWithFlags", (void **, void *, uint64_t))(&program, graph, 0);
    if (!error) error = CALL("cuGraphLaunch", (void *, void *))(program, NULL);
    if (!error) error = CALL("cuCtxSynchronize", (void))();
    *at = parameters.at;
    return error;
}

static int allocate(const char *how, size_t size) {
    uint64_t *at = &allocations[allocation_count].at;
    int error;
    size_t pitch;
    if (allocation_count == MOST) return OUT_OF_MEMORY;
    if (!strcmp(how, "managed")) error = CALL("cuMemAllocManaged", (uint64_t *, size_t, unsigned))(at, size, 1);
    else if (!strcmp(how, "pitch"))
        error = CALL("cuMemAllocPitch_v2", (uint64_t *, size_t *, size_t, size_t, unsigned))(at, &pitch, 1 << 20, size >> 20, 4);
    else if (!strcmp(how, "async")) error = CALL("cuMemAllocAsync", (uint64_t *, size_t, void *))(at, size, NULL);
    else if (!strcmp(how, "create"))
        error = CALL("cuMemCreate", (uint64_t *, size_t, const int *, uint64_t))(at, size, on_device, 0);
    else if (!strcmp(how, "pool")) error = allocate_in_pool(at, size);
    else if (!strcmp(how, "graph")) error = allocate_in_graph(at, size);
    else if (!strcmp(how, "path")) error = allocate_by_path(at, size);
    else if (!strcmp(how, "direct")) error = allocate_directly(at, size);
    else error = CALL("cuMemAlloc_v2", (uint64_t *, size_t))(at, size);
    if (error == -1) error = OUT_OF_MEMORY; /* of HAMi-core's cuMemAllocAsync */
    if (!error) allocations[allocation_count++].kind = how[0] == 'a' ? how[1] : how[0];
    return error;
}
/* Allocate ever smaller pieces until not even a MiB is given, or `most` MiB are. */
static int fill(const char *how, size_t most) {
    size_t piece = 1024, given = 0;
    int error = 0;
    while (piece && given < most) {
        while (piece > most - given) piece /= 2;
        error = allocate(how, piece << 20);
        if (!error) given += piece;
        else if (error == OUT_OF_MEMORY || piece == 1) piece /= 2; /* pieces of cuMemCreate are of 2 MiB */
        else return error;
    }
    printf("mib=%zu refused=%d\n", given, error);
    return 0;
}
static int release(int number) {
    if (number < 0 || number >= allocation_count) return 1;
    uint64_t at = allocations[number].at;
    switch (allocations[number].kind) {
    case 's': return CALL("cuMemFreeAsync", (uint64_t, void *))(at, NULL); /* async */
    case 'c': return CALL("cuMemRelease", (uint64_t))(at);                 /* create */
    default: return CALL("cuMemFree_v2", (uint64_t))(at);
    }
}

static int show_info(void) {
    size_t unused = 0, total = 0;
    int error = CALL("cuMemGetInfo_v2", (size_t *, size_t *))(&unused, &total);
    if (!error) printf("free=%zu total=%zu\n", unused, total);
    return error;
}
static int show_total(int number) {
    size_t total = 0;
    int error = CALL("cuDeviceTotalMem_v2", (size_t *, int))(&total, number);
    if (!error) printf("total=%zu\n", total);
    return error;
}
static int show_nvml(unsigned number) {
    unsigned long long memory[3] = {0};
    char uuid[96] = "";
    void *device = NULL;
    int error = CALL("nvmlInit_v2", (void))();
    if (!error) error = CALL("nvmlDeviceGetHandleByIndex_v2", (unsigned, void **))(number, &device);
    if (!error) error = CALL("nvmlDeviceGetMemoryInfo", (void *, void *))(device, memory);
    if (!error) error = CALL("nvmlDeviceGetUUID", (void *, char *, unsigned))(device, uuid, sizeof uuid);
    if (!error) printf("total=%llu free=%llu used=%llu uuid=%s\n", memory[0], memory[1], memory[2], uuid);
    return error;
}

/* A kernel of any duration: the simulated driver reads its name, and a real one runs its loops. */
static const char *const PTX = ".version 7.0\n.target %s\n.address_size 64\n"
    ".visible .entry us_%ld(.param .u64 loops) {\n"
    ".reg .pred %%p<2>;\n.reg .u64 %%n<4>;\n"
    "ld.param.u64 %%n1, [loops];\nmov.u64 %%n2, 0;\nmov.u64 %%n3, %%clock64;\n"
    "again:\nmad.lo.u64 %%n3, %%n3, 6364136223846793005, 1442695040888963407;\n"
    "add.u64 %%n2, %%n2, 1;\nsetp.lt.u64 %%p1, %%n2, %%n1;\n@%%p1 bra again;\n"
    "setp.eq.u64 %%p1, %%n3, %%n1;\n@%%p1 trap;\nret;\n}\n"; /* the result decides, so that no loop is left out */
typedef int (*launch_function)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);

static void *module; /* of the kernel that was loaded last */
static int load_kernel(long microseconds, void **kernel) {
    static const char *const targets[] = {"sm_75", "sm_52"};
    char text[1024], name[32];
    int error = 1;
    snprintf(name, sizeof name, "us_%ld", microseconds);
    for (int n = 0; n < 2 && error; n++) {
        snprintf(text, sizeof text, PTX, targets[n], microseconds);
        error = CALL("cuModuleLoadData", (void **, const void *))(&module, text);
    }
    return error ? error : CALL("cuModuleGetFunction", (void **, void *, const char *))(kernel, module, name);
}
/* Launch a kernel some times, and wait for the last. */
static int launch(void *kernel, unsigned blocks, uint64_t loops, long times) {
    launch_function one = (launch_function)function("cuLaunchKernel");
    void *parameters[] = {&loops};
    int error = 0;
    while (!error && times-- > 0) error = one(kernel, blocks, 1, 1, 256, 1, 1, 0, NULL, parameters, NULL);
    return error ? error : CALL("cuCtxSynchronize", (void))();
}
/* Measure how many loops of 640 blocks take a millisecond: the best of five times. */
static int measure_loops(uint64_t *per_ms) {
    enum { LOOPS = 50000, TIMES = 10 };
    void *kernel;
    double best = 1e9;
    int error = load_kernel(1000, &kernel);
    if (!error) error = launch(kernel, 640, LOOPS, 1);
    for (int n = 0; n < 5 && !error; n++) {
        double began = now();
        error = launch(kernel, 640, LOOPS, TIMES);
        double took = (now() - began) / TIMES;
        if (took < best) best = took;
    }
    *per_ms = (uint64_t)(LOOPS / (best * 1000)) + 1;
    return error;
}
static int calibrate(void) {
    uint64_t per_ms;
    int error = measure_loops(&per_ms);
    if (!error) printf("loops=%lu\n", (unsigned long)per_ms);
    return error;
}

static int burn(double seconds, long microseconds, unsigned blocks, uint64_t loops) {
    void *kernel;
    long launched = 0, queued = microseconds < 10000 ? 10000 / microseconds : 1;
    int error = load_kernel(microseconds, &kernel);
    if (!error && !loops) error = measure_loops(&loops);
    loops = loops * (uint64_t)microseconds / 1000;
    double began = now(), took;
    while (!error && now() < began + seconds) {
        error = launch(kernel, blocks, loops, queued);
        launched += queued;
    }
    took = now() - began;
    if (!error) printf("%ld kernels in %.1f s, busy=%.0f %%\n", launched, took, (double)launched * (double)microseconds / 1e4 / took);
    return error;
}
/* A launch of one kernel, or of a graph. */
struct work {
    void *kernel, *streams[2], *graph;
    void *launch; /* the driver's function */
    uint64_t loops;
    const char *how;
};
static struct {
    unsigned grid[3], block[3], shared;
    void *stream, *attributes;
    unsigned attribute_count;
} config = {.grid = {640, 1, 1}, .block = {256, 1, 1}};

static int launch_in(const struct work *work, void *stream) {
    void *parameters[] = {(void *)&work->loops};
    if (!strcmp(work->how, "ex")) return ((int (*)(const void *, void *, void **, void **))work->launch)(&config, work->kernel, parameters, NULL);
    if (!strcmp(work->how, "cooperative"))
        return ((int (*)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **))work->launch)(
            work->kernel, 132, 1, 1, 256, 1, 1, 0, stream, parameters);
    if (work->graph) return ((int (*)(void *, void *))work->launch)(work->graph, stream);
    return ((launch_function)work->launch)(work->kernel, 640, 1, 1, 256, 1, 1, 0, stream, parameters, NULL);
}
static void *by_address(const char *name) {
    int (*first)(const char *, void **, int, uint64_t, int *) = dlsym(cuda, "cuGetProcAddress_v2"), (*second)(const char *, void **, int, uint64_t, int *) = NULL;
    void *found = NULL;
    int status;
    if (first && first("cuGetProcAddress", (void **)&second, 12000, 0, &status)) second = NULL;
    if (second && second(name, &found, 12000, 0, &status)) found = NULL;
    return found;
}
static int capture(struct work *work, int kernels) {
    void *graph;
    struct work own = {.kernel = work->kernel, .launch = function("cuLaunchKernel"), .loops = work->loops, .how = ""};
    int error = CALL("cuStreamBeginCapture_v2", (void *, int))(work->streams[0], 0);
    while (!error && kernels-- > 0) error = launch_in(&own, work->streams[0]);
    if (!error) error = CALL("cuStreamEndCapture", (void *, void **))(work->streams[0], &graph);
    if (!error) error = CALL("cuGraphInstantiateWithFlags", (void **, void *, uint64_t))(&work->graph, graph, 0);
    return error ? error : CALL("cuGraphDestroy", (void *))(graph);
}
static int prepare(struct work *work, long microseconds, const char *how, uint64_t loops) {
    const char *name = !strcmp(how, "ex") ? "cuLaunchKernelEx" : !strcmp(how, "cooperative") ? "cuLaunchCooperativeKernel"
                       : !strcmp(how, "graph") ? "cuGraphLaunch" : !strcmp(how, "thread") ? "cuLaunchKernel_ptsz" : "cuLaunchKernel";
    int error = loops ? 0 : measure_loops(&loops);
    *work = (struct work){.loops = loops * (uint64_t)microseconds / 1000, .how = how};
    work->launch = !strcmp(how, "address") ? by_address(name) : function(name);
    for (int n = 0; n < 2 && !error; n++) error = CALL("cuStreamCreate", (void **, unsigned))(&work->streams[n], 0);
    if (!error) error = load_kernel(microseconds, &work->kernel);
    return error || strcmp(how, "graph") ? error : capture(work, GRAPH_KERNELS);
}
static int flood_with(const struct work *work, double seconds) {
    int own_streams = work->graph || !strcmp(work->how, "streams"), error = 0;
    double until = now() + seconds;
    for (long n = 0; !error && now() < until; n++) error = launch_in(work, own_streams ? work->streams[!work->graph && n % 2] : NULL);
    return error;
}
static int flood(double seconds, long microseconds, const char *how, uint64_t loops) {
    struct work work;
    int error = prepare(&work, microseconds, how, loops);
    return error ? error : flood_with(&work, seconds);
}
static int percents(int seconds, long microseconds, const char *how, uint64_t loops) {
    struct work work;
    double total = 0, first = 0, later = 0;
    int error = prepare(&work, microseconds, how, loops);
    double each = (double)microseconds * (work.graph ? GRAPH_KERNELS : 1) / 1e6;
    for (int n = 0; n < seconds && !error; n++) {
        double began = now(), had = 0;
        if (!n) first = began;
        for (later = began; !error && later < began + 1; later = now(), had += each) error = launch_in(&work, work.graph ? work.streams[0] : NULL);
        if (!error) printf("%s%.0f", n ? "," : "by=", 100 * had / (later - began));
        total += had;
    }
    if (!error && seconds > 0) printf(" mean=%.1f\n", 100 * total / (later - first));
    return error;
}
static int reload(double seconds, long microseconds, long others) {
    struct work first, second;
    int error = prepare(&first, microseconds, "kernel", 1);
    if (!error) error = flood_with(&first, seconds);
    if (!error) error = CALL("cuModuleUnload", (void *))(module);
    if (!error) error = prepare(&second, others, "kernel", 1);
    if (!error) printf("same=%d ", first.kernel == second.kernel), fflush(stdout);
    return error ? error : flood_with(&second, seconds);
}
static int compare(const void *one, const void *other) {
    double difference = *(const double *)one - *(const double *)other;
    return difference < 0 ? -1 : difference > 0;
}
static int latency(double seconds, long microseconds, long period, uint64_t loops) {
    enum { ROOM = 100000 };
    static double took[ROOM];
    struct work work;
    unsigned seed = 1;
    int count = 0, error = prepare(&work, microseconds, "kernel", loops);
    prctl(PR_SET_TIMERSLACK, 1);
    for (double until = now() + seconds; !error && count < ROOM && now() < until; count++) {
        double began = now(), interval = (double)period / 1e6 * (0.5 + (double)rand_r(&seed) / RAND_MAX);
        error = launch_in(&work, NULL);
        if (!error) error = CALL("cuCtxSynchronize", (void))();
        took[count] = now() - began;
        double left = interval - took[count];
        if (left > 0) usleep((useconds_t)(left * 1e6));
    }
    qsort(took, (size_t)count, sizeof *took, compare);
    if (!error && count) printf("count=%d p50_us=%.0f p99_us=%.0f\n", count, took[count / 2] * 1e6, took[count * 99 / 100] * 1e6);
    return error;
}
static volatile int is_over, failed_captures;
static void *keep_capturing(void *unused) {
    struct work work;
    (void)unused;
    int error = use_device(0) ?: prepare(&work, 20, "kernel", 1);
    while (!error && !is_over) {
        error = capture(&work, 20000); /* which takes long enough for the other thread to come to it */
        if (!error) error = CALL("cuGraphExecDestroy", (void *))(work.graph);
        usleep(3000);
    }
    failed_captures = error;
    return NULL;
}
static int replay(double seconds) {
    struct work work;
    pthread_t thread;
    int error = prepare(&work, 20, "graph", 1);
    if (error || pthread_create(&thread, NULL, keep_capturing, NULL)) return error ?: 1;
    error = flood_with(&work, seconds);
    is_over = 1;
    pthread_join(thread, NULL);
    return error ?: failed_captures;
}
static int count_launches(double seconds) {
    enum { TIMES = 500 };
    void *kernel;
    long launched = 0;
    int error = load_kernel(1, &kernel);
    if (!error) error = launch(kernel, 1, 1, TIMES);
    double began = now();
    for (; !error && now() < began + seconds; launched += TIMES) error = launch(kernel, 1, 1, TIMES);
    if (!error) printf("per_s=%.0f\n", (double)launched / (now() - began));
    return error;
}

static const char *const allocators[] = {"alloc", "managed", "pitch", "async", "create", "pool", "graph", "path", "direct"};

static int run(char *line);
static int fork_child(char *command) {
    int pipes[2];
    char done;
    if (pipe(pipes)) return 1;
    fflush(stdout);
    pid_t parent = getpid(), child = fork();
    if (child == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        int error = start(0);
        printf("child %d: ", getpid());
        if (error) printf("CUDA error %d\n", error);
        else run(command);
        fflush(stdout);
        close(pipes[0]);
        close(pipes[1]);
        while (getppid() == parent) pause();
        _exit(0);
    }
    close(pipes[1]);
    while (read(pipes[0], &done, 1) > 0) {} /* until the child has printed */
    close(pipes[0]);
    return PRINTED;
}
static int spawn(char *command) {
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        execl("/proc/self/exe", "gpu-load", command, NULL);
        _exit(3);
    }
    int status;
    waitpid(child, &status, 0);
    return PRINTED;
}

/* Carry out a command; return CUDA's or NVML's error, PRINTED if the command has printed its line. */
static int execute(const char *line, char *command, char words[4][64], int count) {
    const char *first = count > 0 ? words[0] : "";
    if (!strcmp(command, "device")) return use_device(atoi(first));
    if (!strcmp(command, "free")) return release(atoi(first));
    if (!strcmp(command, "info")) return show_info() ?: PRINTED;
    if (!strcmp(command, "total")) return show_total(atoi(first)) ?: PRINTED;
    if (!strcmp(command, "nvml")) return show_nvml((unsigned)atoi(first)) ?: PRINTED;
    if (!strcmp(command, "burn"))
        return burn(seconds_of(first), count > 1 ? atol(words[1]) : 1000, count > 2 ? (unsigned)atoi(words[2]) : 640,
                    count > 3 ? strtoul(words[3], NULL, 10) : 0) ?: PRINTED;
    if (!strcmp(command, "flood") && count > 1)
        return flood(seconds_of(first), atol(words[1]), count > 2 ? words[2] : "kernel", count > 3 ? strtoul(words[3], NULL, 10) : 0);
    if (!strcmp(command, "percents") && count > 1)
        return percents(atoi(first), atol(words[1]), count > 2 ? words[2] : "kernel", count > 3 ? strtoul(words[3], NULL, 10) : 0) ?: PRINTED;
    if (!strcmp(command, "latency") && count > 2)
        return latency(seconds_of(first), atol(words[1]), atol(words[2]), count > 3 ? strtoul(words[3], NULL, 10) : 0) ?: PRINTED;
    if (!strcmp(command, "capture")) return replay(seconds_of(first));
    if (!strcmp(command, "reload") && count > 2) return reload(seconds_of(first), atol(words[1]), atol(words[2]));
    if (!strcmp(command, "calibrate")) return calibrate() ?: PRINTED;
    if (!strcmp(command, "launches")) return count_launches(seconds_of(first)) ?: PRINTED;
    if (!strcmp(command, "fill") && count > 1) return fill(first, strtoul(words[1], NULL, 10)) ?: PRINTED;
    if (!strcmp(command, "sleep")) return usleep((useconds_t)(seconds_of(first) * 1e6));
    if (!strcmp(command, "fork") && count > 0) return fork_child(strchr(line, ' ') + 1);
    if (!strcmp(command, "spawn") && count > 0) return spawn(strchr(line, ' ') + 1);
    for (unsigned n = 0; count > 0 && n < sizeof allocators / sizeof *allocators; n++)
        if (!strcmp(command, allocators[n])) return allocate(command, size_of(first));
    return UNKNOWN_COMMAND;
}

/* Carry out a line, and print its result; return 0 if it succeeded. */
static int run(char *line) {
    char command[32] = "", words[4][64] = {"", "", "", ""};
    line[strcspn(line, "\n")] = '\0';
    int count = sscanf(line, "%31s %63s %63s %63s %63s", command, words[0], words[1], words[2], words[3]) - 1;
    int error = execute(line, command, words, count);
    if (error == 0) printf("ok\n");
    else if (error == UNKNOWN_COMMAND) printf("unknown command: %s\n", line);
    else if (error == OUT_OF_MEMORY) printf("out of memory\n");
    else if (error != PRINTED) printf("error %d\n", error);
    return error != 0 && error != PRINTED;
}

int main(int count, char **commands) {
    char line[256];
    int failed = 0;
    setvbuf(stdout, NULL, _IOLBF, 0);
    cuda = dlopen("libcuda.so.1", RTLD_NOW);
    nvml = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    if (!cuda || !nvml) {
        printf("there is no driver: %s\n", dlerror());
        return 3;
    }
    int error = start(0);
    if (error) {
        printf("CUDA error %d\n", error);
        return 3;
    }
    if (count == 1) printf("ready %d\n", getpid());
    for (int n = 1; n < count; n++) {
        snprintf(line, sizeof line, "%s", commands[n]);
        printf("%s: ", commands[n]);
        failed |= run(line);
    }
    while (count == 1 && fgets(line, sizeof line, stdin)) run(line);
    return failed;
}
