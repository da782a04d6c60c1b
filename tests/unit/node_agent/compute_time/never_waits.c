/* A program that launches a kernel again and again and never waits for it, under the limiter, on a GPU
 * with one queue. No time passes but what calls take. Prints the percent of the GPU's time that it got.
 *
 *     never_waits LIMITS USE KERNEL_NS */
#define _GNU_SOURCE
#include "files.h"
#include "limiter.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define WARM_NS 1000000000
#define MEASURED_NS 20000000000
#define LAUNCH_NS 4000 /* until a kernel is queued */
#define RECORD_NS 1000

static int64_t now = 1000000000000, idle_at, launched_ns;
static unsigned char own_uuid[16];

struct event {
    int64_t at;
};

/* The limiter is compiled to call these. */
int clock_gettime(clockid_t id, struct timespec *time) {
    (void)id;
    *time = (struct timespec){now / 1000000000, now % 1000000000};
    return 0;
}
int nanosleep(const struct timespec *time, struct timespec *left) {
    (void)left;
    now += time->tv_sec * 1000000000 + time->tv_nsec;
    return 0;
}

static int64_t next_start(void) { return idle_at > now ? idle_at : now; }
static int get_device(int *device) { return *device = 0; }
static int get_uuid(unsigned char *uuid, int device) {
    memcpy(uuid, own_uuid, sizeof own_uuid);
    return device;
}
static int get_context(void **context) {
    *context = own_uuid;
    return 0;
}
static int create(struct event **event, unsigned flags) {
    *event = calloc(1, sizeof **event);
    return (int)flags;
}
static int record(struct event *event, void *stream) {
    (void)stream;
    now += RECORD_NS;
    event->at = next_start();
    return 0;
}
static int query(const struct event *event) { return event->at > now ? 600 : 0; }
static int elapsed(float *ms, const struct event *first, const struct event *last) {
    *ms = (float)((double)(last->at - first->at) / 1e6);
    return 0;
}
static int is_capturing(void *stream, int *status) {
    (void)stream;
    return *status = 0;
}
static int exchange(int *mode) {
    (void)mode;
    return 0;
}

static void *lookup(const char *name) {
    const struct {
        const char *name;
        void *function;
    } functions[] = {
        {"cuCtxGetDevice", (void *)get_device},
        {"cuDeviceGetUuid", (void *)get_uuid},
        {"cuCtxGetCurrent", (void *)get_context},
        {"cuEventCreate", (void *)create},
        {"cuEventRecord", (void *)record},
        {"cuEventQuery", (void *)query},
        {"cuEventElapsedTime_v2", (void *)elapsed},
        {"cuStreamIsCapturing", (void *)is_capturing},
        {"cuThreadExchangeStreamCaptureMode", (void *)exchange},
    };
    for (unsigned n = 0; n < sizeof functions / sizeof *functions; n++)
        if (!strcmp(functions[n].name, name)) return functions[n].function;
    return NULL;
}

/* What ran until now: all that was launched but what is queued. */
static int64_t ran_ns(void) { return launched_ns - (idle_at > now ? idle_at - now : 0); }

static void launch_until(int64_t until, int64_t kernel_ns) {
    while (now < until) {
        int sample = limiter_before(own_uuid, 1, NULL);
        now += LAUNCH_NS;
        idle_at = next_start() + kernel_ns;
        launched_ns += kernel_ns;
        limiter_after(sample, NULL);
    }
}

int main(int count, char **words) {
    struct limits limits;
    FILE *file = count > 3 ? fopen(words[1], "rb") : NULL;
    if (!file || fread(&limits, sizeof limits, 1, file) != 1) return 2;
    memcpy(own_uuid, limits.devices[0].uuid, sizeof own_uuid);
    limiter_start(lookup, words[1], words[2]);
    int64_t kernel_ns = atoll(words[3]);
    launch_until(now + WARM_NS, kernel_ns);
    int64_t began = now, ran = ran_ns();
    launch_until(began + MEASURED_NS, kernel_ns);
    printf("%.2f\n", 100 * (double)(ran_ns() - ran) / (double)(now - began));
    return 0;
}
