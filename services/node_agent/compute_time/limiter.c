/* Holds the launches of this process to the limits of its container.
 *
 * A launch takes from the container's bucket what its function is known to need. That is measured by
 * events around some launches: the first ones of a function, and then one in SAMPLE_NS of GPU time
 * or SAMPLE_EVERY launches; what they took differently is charged, or given back. A launch also
 * waits while more than AHEAD_NS of work is queued, so that errors stay small. Copies, and kernels
 * of several streams that run at once, are not accounted for. */
#define _GNU_SOURCE
#include "limiter.h"
#include "bucket.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum {
    FUNCTIONS = 4096, /* that are told apart */
    PROBES = 8,       /* places in the table that a function may have */
    SAMPLES = 64,     /* in flight */
    FIRST_SAMPLES = 8, /* in flight of a function that is not known: more than may be queued of it */
    SURPRISES = 8,    /* measurements in a row by which a short function has become a long one */
    BATCH = 32,       /* launches that a thread makes before it looks at the clock */
    SAMPLE_EVERY = 128
};
/* Of GPU time, in ns. */
#define BATCH_NS 100000
#define SAMPLE_NS 500000
#define AHEAD_NS 20000000
#define SLICE_NS 2000000        /* the driver's: a longer kernel is interrupted if others wait */
#define UNKNOWN_QUEUED_NS 10000000 /* of a function that was never measured: few launches of it are queued at once */
#define UNKNOWN_CHARGED_NS 50000  /* charged for it until it is measured */
#define LEAST_NS 1000             /* of a launch */
#define LOOK_AGAIN_NS 5000000     /* of a wait: limits may have changed meanwhile */
enum { NOT_READY = 600, CAPTURE_RELAXED = 2, CAPTURED = -2, NONE = -1 };

struct function {
    _Atomic(const void *) key;
    _Atomic uint64_t size;
    _Atomic int64_t ns;  /* of one launch; 0: not known */
    int64_t launches, launched_ns; /* since the last sample */
    int waiting, surprises; /* samples in flight; measurements in a row that were much too long */
    int put_off;            /* the next sample was */
};
struct sample {
    void *context, *first, *last; /* events; of the context, which is NULL if there are none */
    struct function *function;    /* NULL: it was forgotten */
    int device, used, recorded;
    int64_t charged_ns; /* for this launch */
    int64_t launched_ns; /* of the device, with this launch */
};
static struct function functions[FUNCTIONS];
static struct sample samples[SAMPLES];
static struct {
    int64_t launched_ns, done_ns;
} queues[DEVICES];
static struct limits *limits;
static struct use *use;
static int places[DEVICES]; /* of the driver's devices in the files, plus 1; 0: not looked up, -1: none */
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static _Atomic unsigned generation; /* of all functions */
/* What a thread launches again and again, without looking at anything else. */
static __thread struct {
    struct function *function;
    const void *key;
    uint64_t size;
    int64_t ns; /* launched and not charged */
    int count, device;
    unsigned generation;
} own;

static struct {
    int (*device)(int *);
    int (*uuid)(unsigned char *, int);
    int (*current)(void **);
    int (*create)(void **, unsigned);
    int (*record)(void *, void *);
    int (*query)(void *);
    int (*elapsed)(float *, void *, void *);
    int (*capturing)(void *, int *);
    int (*exchange)(int *);
} driver;

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}
static void sleep_ns(int64_t ns) {
    struct timespec time = {ns / 1000000000, ns % 1000000000};
    nanosleep(&time, NULL);
}

static void *map(const char *path, off_t size, int writable) {
    int file = open(path, (writable ? O_RDWR | O_CREAT : O_RDONLY) | O_CLOEXEC | O_NOFOLLOW, 0666);
    if (file < 0) return NULL;
    int is_whole = lseek(file, 0, SEEK_END) >= size || (writable && !ftruncate(file, size));
    void *at = is_whole ? mmap(NULL, (size_t)size, PROT_READ | (writable ? PROT_WRITE : 0), MAP_SHARED, file, 0) : MAP_FAILED;
    close(file);
    return at == MAP_FAILED ? NULL : at;
}
/* A child has no context, and so none of its parent's events. */
static void after_fork(void) {
    pthread_mutex_init(&mutex, NULL);
    memset(samples, 0, sizeof samples);
    memset(queues, 0, sizeof queues);
    limiter_forget(0);
}
void limiter_start(void *(*lookup)(const char *name), const char *limits_path, const char *use_path) {
    *(void **)&driver.device = lookup("cuCtxGetDevice");
    *(void **)&driver.uuid = lookup("cuDeviceGetUuid");
    *(void **)&driver.current = lookup("cuCtxGetCurrent");
    *(void **)&driver.create = lookup("cuEventCreate");
    *(void **)&driver.record = lookup("cuEventRecord");
    *(void **)&driver.query = lookup("cuEventQuery");
    *(void **)&driver.capturing = lookup("cuStreamIsCapturing");
    *(void **)&driver.exchange = lookup("cuThreadExchangeStreamCaptureMode");
    void *elapsed = lookup("cuEventElapsedTime_v2");
    *(void **)&driver.elapsed = elapsed ? elapsed : lookup("cuEventElapsedTime");
    if (!driver.device || !driver.uuid || !driver.current || !driver.create || !driver.record || !driver.query ||
        !driver.capturing || !driver.exchange || !driver.elapsed)
        return;
    struct limits *found = map(limits_path, sizeof *limits, 0);
    if (!found || found->magic != LIMITS_MAGIC) return;
    use = map(use_path, sizeof *use, 1);
    if (!use) return;
    atomic_store(&use->magic, USE_MAGIC);
    pthread_atfork(NULL, NULL, after_fork);
    limits = found;
}

/* The place of the current context's GPU in both files; -1 if it has no limit. CUDA and NVML may
 * number GPUs in different orders, so they are compared by UUID. */
static int current_device(void) {
    unsigned char uuid[16];
    int device;
    if (driver.device(&device) || device < 0 || device >= DEVICES) return -1;
    if (!places[device]) {
        int place = -1;
        for (int n = 0; n < DEVICES && !driver.uuid(uuid, device); n++)
            if (!memcmp(uuid, limits->devices[n].uuid, sizeof uuid)) place = n + 1;
        places[device] = place;
    }
    return places[device] < 0 ? -1 : places[device] - 1;
}
/* The percent that holds now; NO_LIMIT if none does. */
static int allowed_percent(int device) {
    uint32_t allowed = atomic_load_explicit(&limits->devices[device].allowed, memory_order_relaxed);
    return allowed && allowed < NO_LIMIT ? (int)allowed : NO_LIMIT;
}
static void charge(int device, int64_t ns) { bucket_charge(&use->devices[device], now_ns(), allowed_percent(device), ns); }

static struct function *function_of(const void *key, uint64_t size) {
    uint64_t hash = ((uint64_t)(uintptr_t)key ^ size * 0x9e3779b97f4a7c15ull) * 0x9e3779b97f4a7c15ull >> 52;
    for (int n = 0; n < PROBES; n++) {
        struct function *function = &functions[(hash + (uint64_t)n) % FUNCTIONS];
        if (function->key == key && function->size == size) return function;
        if (function->key) continue;
        function->size = size;
        function->key = key;
        return function;
    }
    return &functions[hash % FUNCTIONS]; /* which several share */
}

/* Learn from a measurement what a launch needs; returns what is charged for the measured one.
 *
 * Events measure from start to end. A kernel that is shorter than a time slice is interrupted now and
 * then, and then takes about a slice longer: such a surprise counts only if it is none any more. Of
 * a longer kernel the measured time counts, with what other processes had of it, which NVML
 * corrects. A thread that loses the CPU between two events also makes a launch seem long. */
static int64_t learn(struct function *function, int64_t measured) {
    int64_t known = function->ns, more = measured - known;
    int is_short = known && known < SLICE_NS;
    if (is_short && more > SLICE_NS / 2) {
        if (++function->surprises < (more > 5 * SLICE_NS ? 2 : SURPRISES)) return known;
        known = 0;
    }
    function->surprises = 0;
    if (!known || (!is_short && measured < SLICE_NS)) return function->ns = measured;
    if (is_short && measured > 4 * known) measured = 4 * known;
    function->ns = known + (measured - known) / (is_short && measured > known + known / 2 ? 16 : 4);
    return measured;
}
static void finish(struct sample *sample) {
    if (sample->function) sample->function->waiting--;
    sample->used = 0;
}
/* Look at the samples in flight of a device. The mutex is held, as for all below. */
static void collect(int device) {
    int is_empty = 1;
    for (int n = 0; n < SAMPLES; n++) {
        struct sample *sample = &samples[n];
        float ms = 0;
        if (!sample->used || !sample->recorded || sample->device != device) continue;
        int error = driver.query(sample->last);
        if (error == NOT_READY) {
            is_empty = 0;
            continue;
        }
        if (error || driver.elapsed(&ms, sample->first, sample->last)) {
            sample->context = NULL; /* its events are not used again */
            finish(sample);
            continue;
        }
        int64_t measured = (int64_t)((double)ms * 1e6);
        if (measured < LEAST_NS) measured = LEAST_NS;
        charge(device, (sample->function ? learn(sample->function, measured) : measured) - sample->charged_ns);
        if (measured > 2 * SLICE_NS) atomic_store(&use->devices[device].long_at, now_ns());
        if (sample->launched_ns > queues[device].done_ns) queues[device].done_ns = sample->launched_ns;
        finish(sample);
    }
    if (is_empty) queues[device].done_ns = queues[device].launched_ns;
}

static struct sample *free_sample(void *context) {
    struct sample *other = NULL;
    for (int n = 0; n < SAMPLES; n++) {
        if (samples[n].used) continue;
        if (samples[n].context == context) return &samples[n];
        if (!other || !samples[n].context) other = &samples[n]; /* events of another context stay there unused */
    }
    if (!other || driver.create(&other->first, 0) || driver.create(&other->last, 0)) return NULL;
    other->context = context;
    return other;
}
/* Record the first event of a launch. Returns its sample, or NONE; CAPTURED if the launch becomes a
 * part of a graph and does not run now. */
static int begin_sample(int device, struct function *function, int64_t charged_ns, void *stream) {
    void *context = NULL;
    struct sample *sample = driver.current(&context) || !context ? NULL : free_sample(context);
    if (!sample || driver.record(sample->first, stream)) return NONE;
    sample->function = function;
    sample->device = device;
    sample->charged_ns = charged_ns;
    sample->launched_ns = queues[device].launched_ns;
    sample->used = 1;
    sample->recorded = 0;
    function->waiting++;
    function->launches = function->launched_ns = function->put_off = 0;
    return (int)(sample - samples);
}

static void note_use(struct bucket *bucket) {
    int64_t now = now_ns();
    int32_t process = getpid();
    if (atomic_exchange(&bucket->process, process) != process) atomic_store(&bucket->shared_at, now);
    atomic_store(&bucket->asked_at, now);
}
/* Returns whether the launch had to wait. */
static int wait_for_turn(int device) {
    struct bucket *bucket = &use->devices[device];
    for (int was_empty = 0, waited = 0;; waited = 1) {
        const struct limit *limit = &limits->devices[device];
        note_use(bucket);
        bucket_compare(bucket, atomic_load(&limit->measured_at), (int)atomic_load(&limit->measured));
        collect(device);
        int allowed = allowed_percent(device);
        if (allowed == NO_LIMIT) return waited;
        int64_t wait = bucket_wait(bucket, now_ns(), allowed, was_empty);
        if (wait > 0) was_empty = 1;
        else if (queues[device].launched_ns - queues[device].done_ns > AHEAD_NS) wait = 200000;
        if (wait <= 0) return waited;
        pthread_mutex_unlock(&mutex);
        sleep_ns(wait < LOOK_AGAIN_NS ? wait : LOOK_AGAIN_NS);
        pthread_mutex_lock(&mutex);
    }
}
/* Whether this launch of a known function is to be measured. Of one that waited, the GPU has done all
 * that was queued, and events would also measure how long the kernel takes to come. */
static int is_due(struct function *function, int waited) {
    if (!function->surprises && function->launched_ns < SAMPLE_NS && function->launches < SAMPLE_EVERY) return 0;
    int put_off = waited && !function->put_off && function->ns < SLICE_NS;
    if (put_off) function->put_off = 1;
    return !put_off;
}
/* A launch that is more than the rest of a batch. */
static int take(int device, struct function *function, void *stream) {
    int mode = CAPTURE_RELAXED, status = 0, sample = NONE;
    driver.exchange(&mode); /* another thread may capture, which forbids to look at events */
    if (driver.capturing(stream, &status) || status) sample = CAPTURED;
    pthread_mutex_lock(&mutex);
    if (sample != CAPTURED) {
        int waited = wait_for_turn(device);
        int64_t known = function->ns, charged = known ? known : UNKNOWN_CHARGED_NS;
        queues[device].launched_ns += own.ns + (known ? known : UNKNOWN_QUEUED_NS);
        function->launches += own.count + 1;
        function->launched_ns += own.ns + charged;
        if (known ? is_due(function, waited) : function->waiting < FIRST_SAMPLES)
            sample = begin_sample(device, function, charged, stream);
        charge(device, own.ns + charged);
        own.ns = own.count = 0;
    }
    pthread_mutex_unlock(&mutex);
    driver.exchange(&mode);
    return sample < 0 ? NONE : sample;
}

int limiter_before(const void *key, uint64_t size, void *stream) {
    if (!limits) return NONE;
    int device = current_device();
    if (device < 0 || !atomic_load_explicit(&limits->devices[device].percent, memory_order_relaxed)) return NONE;
    if (own.device != device) {
        if (own.ns) charge(own.device, own.ns);
        own.ns = own.count = 0;
        own.device = device;
    }
    unsigned now = atomic_load_explicit(&generation, memory_order_relaxed);
    if (own.key != key || own.size != size || own.generation != now) {
        own.function = function_of(key, size);
        own.key = key;
        own.size = size;
        own.generation = now;
    }
    int64_t known = atomic_load_explicit(&own.function->ns, memory_order_relaxed);
    if (known && own.ns + known < BATCH_NS && own.count < BATCH) {
        own.ns += known;
        own.count++;
        return NONE;
    }
    return take(device, own.function, stream);
}
void limiter_after(int sample, void *stream) {
    if (sample < 0) return;
    pthread_mutex_lock(&mutex);
    if (driver.record(samples[sample].last, stream)) finish(&samples[sample]);
    else samples[sample].recorded = 1;
    pthread_mutex_unlock(&mutex);
}
void limiter_forget(int contexts) {
    pthread_mutex_lock(&mutex);
    for (int n = 0; n < SAMPLES; n++) {
        samples[n].function = NULL;
        if (contexts) samples[n].context = NULL;
        if (contexts && samples[n].recorded) samples[n].used = 0;
    }
    memset(functions, 0, sizeof functions);
    atomic_fetch_add(&generation, 1);
    pthread_mutex_unlock(&mutex);
}
