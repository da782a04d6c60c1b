/* Uses a GPU as its commands say; prints one line for each.
 *
 *   gpu-load 'alloc 4g' 'burn 10s'    commands as arguments; the exit status is 1 if one failed
 *   gpu-load                          commands from standard input, first a line `ready PID`
 *
 *   device N                use another device
 *   alloc | managed | pitch | async | create SIZE    memory, by different functions; 1g, 512m, 64k
 *   free N                  free the Nth allocation, counted from 0
 *   info | total | nvml [N] memory as CUDA and NVML report it
 *   burn TIME [US [BLOCKS]] launch kernels of US microseconds (1000) and BLOCKS blocks (640)
 *   sleep TIME              10s, 500ms
 *   fork COMMAND            a child that carries out one command, and lives until its parent ends
 *   spawn COMMAND           another gpu-load that carries out one command, and ends
 */
#include <dlfcn.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { OUT_OF_MEMORY = 2, MOST = 4096, PRINTED = -1, UNKNOWN_COMMAND = -2 };
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

static int allocate(const char *how, size_t size) {
    uint64_t *at = &allocations[allocation_count].at;
    int error, properties[8] = {1, 0, 1, 0}; /* pinned, no handle type, on device 0 */
    size_t pitch;
    if (allocation_count == MOST) return OUT_OF_MEMORY;
    if (!strcmp(how, "managed")) error = CALL("cuMemAllocManaged", (uint64_t *, size_t, unsigned))(at, size, 1);
    else if (!strcmp(how, "pitch"))
        error = CALL("cuMemAllocPitch_v2", (uint64_t *, size_t *, size_t, size_t, unsigned))(at, &pitch, 1 << 20, size >> 20, 4);
    else if (!strcmp(how, "async")) error = CALL("cuMemAllocAsync", (uint64_t *, size_t, void *))(at, size, NULL);
    else if (!strcmp(how, "create"))
        error = CALL("cuMemCreate", (uint64_t *, size_t, int *, uint64_t))(at, size, properties, 0);
    else error = CALL("cuMemAlloc_v2", (uint64_t *, size_t))(at, size);
    if (!error) allocations[allocation_count++].kind = how[0] == 'a' ? how[1] : how[0];
    return error;
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

static int burn(double seconds, long microseconds, unsigned blocks) {
    char name[32];
    void *module, *kernel;
    double began = now();
    long launched = 0;
    snprintf(name, sizeof name, "us_%ld", microseconds);
    int error = CALL("cuModuleLoadData", (void **, const void *))(&module, "");
    if (!error) error = CALL("cuModuleGetFunction", (void **, void *, const char *))(&kernel, module, name);
    int (*launch)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **) =
        function("cuLaunchKernel");
    while (!error && now() < began + seconds) {
        error = launch(kernel, blocks, 1, 1, 256, 1, 1, 0, NULL, NULL, NULL);
        launched++;
    }
    if (!error) error = CALL("cuCtxSynchronize", (void))();
    double took = now() - began;
    if (!error) printf("%ld kernels in %.1f s, busy=%.0f %%\n", launched, took, (double)launched * (double)microseconds / 1e4 / took);
    return error;
}

static const char *const allocators[] = {"alloc", "managed", "pitch", "async", "create"};

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
static int execute(const char *line, char *command, char words[3][64], int count) {
    const char *first = count > 0 ? words[0] : "";
    if (!strcmp(command, "device")) return use_device(atoi(first));
    if (!strcmp(command, "free")) return release(atoi(first));
    if (!strcmp(command, "info")) return show_info() ?: PRINTED;
    if (!strcmp(command, "total")) return show_total(atoi(first)) ?: PRINTED;
    if (!strcmp(command, "nvml")) return show_nvml((unsigned)atoi(first)) ?: PRINTED;
    if (!strcmp(command, "burn"))
        return burn(seconds_of(first), count > 1 ? atol(words[1]) : 1000, count > 2 ? (unsigned)atoi(words[2]) : 640) ?: PRINTED;
    if (!strcmp(command, "sleep")) return usleep((useconds_t)(seconds_of(first) * 1e6));
    if (!strcmp(command, "fork") && count > 0) return fork_child(strchr(line, ' ') + 1);
    if (!strcmp(command, "spawn") && count > 0) return spawn(strchr(line, ' ') + 1);
    for (unsigned n = 0; count > 0 && n < sizeof allocators / sizeof *allocators; n++)
        if (!strcmp(command, allocators[n])) return allocate(command, size_of(first));
    return UNKNOWN_COMMAND;
}

/* Carry out a line, and print its result; return 0 if it succeeded. */
static int run(char *line) {
    char command[32] = "", words[3][64] = {"", "", ""};
    line[strcspn(line, "\n")] = '\0';
    int count = sscanf(line, "%31s %63s %63s %63s", command, words[0], words[1], words[2]) - 1;
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
