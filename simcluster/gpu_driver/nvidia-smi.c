/* Prints the GPUs that a container sees, with the memory that its lease gives.
 *
 *   nvidia-smi       a table
 *   nvidia-smi -L    a line per GPU and per MIG device with its UUID
 *   nvidia-smi compute-policy -i UUID --set-timeslice N    sets the length of a GPU's time slices
 *
 * NVML's functions are looked up by name, so that HAMi-core can replace them. */
#include "state.h"

#include <dlfcn.h>

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
    unsigned long long memory[5]; /* version, total, reserved, free, used */
    unsigned busy[2];
    int has_memory, has_busy;
};

static int read_row(void *device, struct row *row) {
    int error = CALL("nvmlDeviceGetName", (void *, char *, unsigned))(device, row->name, sizeof row->name);
    if (!error) error = CALL("nvmlDeviceGetUUID", (void *, char *, unsigned))(device, row->uuid, sizeof row->uuid);
    row->has_memory = !error && !CALL("nvmlDeviceGetMemoryInfo_v2", (void *, void *))(device, row->memory);
    row->has_busy = !error && !CALL("nvmlDeviceGetUtilizationRates", (void *, void *))(device, row->busy);
    return error;
}

static void print_row(const char *number, const char *name, const struct row *row) {
    char busy[16] = "N/A", memory[48] = "N/A";
    if (row->has_busy) snprintf(busy, sizeof busy, "%u %%", row->busy[0]);
    if (row->has_memory) snprintf(memory, sizeof memory, "%7lluMiB / %7lluMiB", row->memory[4] >> 20, row->memory[1] >> 20);
    printf("| %3s | %-26.26s | %23s | %8s |\n" RULE, number, name, memory, busy);
}

/* The MIG devices of a GPU, which have its name, MIG, and the name of their profile. */
static void print_mig_devices(void *gpu, int list) {
    void *device;
    for (unsigned n = 0; !CALL("nvmlDeviceGetMigDeviceHandleByIndex", (void *, unsigned, void **))(gpu, n, &device); n++) {
        struct row row = {0};
        if (read_row(device, &row)) continue;
        const char *profile = strstr(row.name, " MIG ");
        profile = profile ? profile + 1 : row.name;
        if (list) printf("  %-19s Device %2u: (UUID: %s)\n", profile, n, row.uuid);
        else print_row("", profile, &row);
    }
}

static void print_gpu(unsigned number, int list) {
    struct row row = {0};
    void *device;
    char text[16];
    snprintf(text, sizeof text, "%u", number);
    if (CALL("nvmlDeviceGetHandleByIndex_v2", (unsigned, void **))(number, &device) || read_row(device, &row)) {
        printf("GPU %u does not respond\n", number);
        return;
    }
    if (list) printf("GPU %u: %s (UUID: %s)\n", number, row.name, row.uuid);
    else print_row(text, row.name, &row);
    print_mig_devices(device, list);
}

static int set_timeslice(const char *uuid, const char *number) {
    char *end;
    long timeslice = strtol(number, &end, 10);
    if (!*number || *end || timeslice < 0 || timeslice >= TIMESLICES) {
        printf("Invalid timeslice %s\n", number);
        return 2;
    }
    for (int g = 0; open_state(0) && g < state->gpu_count; g++)
        if (!strcmp(state->gpus[g].uuid, uuid)) {
            atomic_store(&state->gpus[g].timeslice, (int)timeslice);
            return 0;
        }
    printf("No devices were found\n");
    return 6;
}

int main(int count, char **arguments) {
    if (count == 6 && !strcmp(arguments[1], "compute-policy") && !strcmp(arguments[2], "-i") &&
        !strcmp(arguments[4], "--set-timeslice"))
        return set_timeslice(arguments[3], arguments[5]);
    int list = count == 2 && !strcmp(arguments[1], "-L"), version = 0;
    unsigned gpus = 0;
    char driver[80] = "";
    if (count > 1 && !list) {
        fprintf(stderr, "the simulated nvidia-smi has -L, and compute-policy -i UUID --set-timeslice N\n");
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
    for (unsigned n = 0; n < gpus; n++) print_gpu(n, list);
    return 0;
}
