/* Prints the GPUs that a container sees, with the memory that its lease gives.
 *
 *   nvidia-smi       a table
 *   nvidia-smi -L    a line per GPU with its UUID
 *
 * NVML's functions are looked up by name, so that HAMi-core can replace them. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void *library;
static void *function(const char *name) {
    void *found = dlsym(library, name);
    if (!found) {
        fprintf(stderr, "there is no function %s\n", name);
        exit(1);
    }
    return found;
}
#define CALL(name, types) ((int(*) types)function(name))
#define RULE "+-----+----------------------------+-------------------------+----------+\n"

struct row {
    char name[64], uuid[96];
    unsigned long long memory[3]; /* total, free, used */
    unsigned busy[2];
    int has_busy;
};

static int read_row(unsigned number, struct row *row) {
    void *device;
    int error = CALL("nvmlDeviceGetHandleByIndex_v2", (unsigned, void **))(number, &device);
    if (!error) error = CALL("nvmlDeviceGetName", (void *, char *, unsigned))(device, row->name, sizeof row->name);
    if (!error) error = CALL("nvmlDeviceGetUUID", (void *, char *, unsigned))(device, row->uuid, sizeof row->uuid);
    if (!error) error = CALL("nvmlDeviceGetMemoryInfo", (void *, void *))(device, row->memory);
    row->has_busy = !error && !CALL("nvmlDeviceGetUtilizationRates", (void *, void *))(device, row->busy);
    return error;
}

static void print_row(unsigned number, const struct row *row) {
    char busy[16] = "N/A";
    if (row->has_busy) snprintf(busy, sizeof busy, "%u %%", row->busy[0]);
    printf("| %3u | %-26.26s | %7lluMiB / %7lluMiB | %8s |\n" RULE, number, row->name, row->memory[2] >> 20,
           row->memory[0] >> 20, busy);
}

int main(int count, char **arguments) {
    int list = count == 2 && !strcmp(arguments[1], "-L"), version = 0;
    unsigned gpus = 0;
    char driver[80] = "";
    if (count > 1 && !list) {
        fprintf(stderr, "the simulated nvidia-smi has one option: -L\n");
        return 2;
    }
    library = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    if (!library || CALL("nvmlInit_v2", (void))() || CALL("nvmlDeviceGetCount_v2", (unsigned *))(&gpus) || gpus == 0) {
        fprintf(stderr, "No devices were found\n");
        return 6;
    }
    CALL("nvmlSystemGetDriverVersion", (char *, unsigned))(driver, sizeof driver);
    CALL("nvmlSystemGetCudaDriverVersion", (int *))(&version);
    if (!list) {
        printf("Simulated driver %s, CUDA %d.%d\n" RULE, driver, version / 1000, version % 1000 / 10);
        printf("| GPU | %-26s | %23s | %8s |\n" RULE, "Name", "Memory used / total", "GPU use");
    }
    for (unsigned n = 0; n < gpus; n++) {
        struct row row = {0};
        if (read_row(n, &row)) printf("GPU %u does not respond\n", n);
        else if (list) printf("GPU %u: %s (UUID: %s)\n", n, row.name, row.uuid);
        else print_row(n, &row);
    }
    return 0;
}
