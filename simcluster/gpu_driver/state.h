/* The simulated GPUs: what the libraries and programs of this folder share.
 *
 * The GPUs are a file that every process maps ($GPU_DRIVER_STATE; `gpu-control create` makes it).
 * A process that computes has a record in it, and holds a lock on one byte of the file for as long
 * as it lives: a process that is killed loses the lock, and with it its memory, as with a driver.
 *
 *   GPU_DRIVER_STATE        path of the file; without it there is no driver
 *   GPU_DRIVER_PROC         /proc of the node, if the process has another one (/proc): a driver
 *                           reports a process by its PID on the node, also inside a container
 *   GPU_DRIVER_LIMITS       path of the region file with the container's limits: limits.c
 *   GPU_DRIVER_CGROUP       directory of the process's cgroup, which may have limits: cgroup_limits.c
 *   NVIDIA_VISIBLE_DEVICES  UUIDs or numbers, all, none or void: what a container runtime gives
 *   CUDA_VISIBLE_DEVICES    UUIDs or numbers among these; read by libcuda only
 *   CUDA_DEVICE_ORDER       PCI_BUS_ID, or libcuda lists GPUs with more SMs first, as CUDA does
 */
#ifndef STATE_H
#define STATE_H
#define _GNU_SOURCE
#include <stdatomic.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define API __attribute__((visibility("default")))

enum {
    GPUS = 64,
    PROCESSES = 256,
    PROFILES = 12,
    INSTANCES = 8, /* GPU instances of one GPU */
    COMPUTES = 7,  /* compute instances of one GPU instance */
    STARTS = 8,
    XIDS = 16, /* the latest XID events that a GPU keeps */
    CGROUP_LIMITS = 2048,
    CGROUP_BYTES = 496, /* of a cgroup's path, with the byte at its end */
    QUEUES = 8,         /* GPUs on which one process has work at a time */
    RING = 1024,        /* kernels and events that a queue holds: a launch waits for room, as in a real one */
    TIMESLICES = 4,     /* lengths that processes' turns may have; here all are the same */
    TICKS = 64          /* busy time is kept in TICKS ticks of TICK_NS */
};
/* What `gpu-control` can make of a GPU; fault_names has their names. */
enum fault {
    LOST,
    HANG,
    VANISH,     /* it is not listed */
    UNHEALTHY,  /* its memory could not be remapped */
    ECC_ERRORS, /* their number */
    CREATE_FAILS,
    CREATE_NOTHING, /* success is reported, and no instance is created */
    CREATE_HANGS,
    COMPUTE_FAILS,
    ALL_BUSY, /* processes use all MIG instances */
    HOT,      /* its clocks are low because of its temperature */
    FAULTS
};
/* How the driver limits the memory of cgroups. */
enum accounting {
    NO_ACCOUNTING,   /* before R615 */
    MISC_ACCOUNTING, /* in the driver: the nearest cgroup upwards with a limit counts */
    DMEM_ACCOUNTING  /* in the kernel: all cgroups upwards count */
};
#define TICK_NS 20000000ull
#define TICKS_PER_S 50
#define CONTEXT_BYTES (256ull << 20) /* what a context takes of its GPU */

struct mig_profile {
    int id;
    char name[32];
    uint64_t memory_mib;
    int compute_slices, memory_slices, count, starts[STARTS], start_count;
};

/* Which process a GPU works for, at the moment `at` (CLOCK_MONOTONIC, ns). */
struct turns {
    uint64_t at, left, switching; /* ns that the turn still has, and that a switch still needs */
    int current;                  /* record of the process, plus 1; 0: none yet */
};

struct compute_instance {
    int slices; /* 0: there is none */
    char uuid[64];
};

struct gpu_instance {
    int made; /* 0: there is none */
    int id, profile, start;
    struct compute_instance computes[COMPUTES];
    struct turns turns;
};

struct gpu {
    char uuid[96], name[96];
    uint64_t memory, reserved; /* reserved: by the driver itself */
    int sms, mig, profile_count, created; /* created: MIG devices so far, for their UUIDs */
    struct mig_profile profiles[PROFILES];
    struct gpu_instance instances[INSTANCES];
    struct turns turns;
    _Atomic int faults[FAULTS];
    _Atomic int timeslice; /* as nvidia-smi compute-policy sets it: 0 to TIMESLICES - 1 */
    _Atomic uint64_t xid_count;
    _Atomic uint32_t xids[XIDS];
};

/* Kernels and events that a process has given to a GPU; they are done in order. */
struct queue {
    _Atomic int gpu;               /* plus 1; 0: the queue is free */
    _Atomic uint64_t pushed, done; /* entries so far */
    uint64_t left;                 /* ns that the entry `done` still needs */
    struct {
        uint64_t ns, end; /* what it needs; when it was done, CLOCK_MONOTONIC */
    } ring[RING];
};

struct process {
    _Atomic int pid; /* on the node; 0: the record is free */
    _Atomic int instance[GPUS]; /* position of the GPU instance that it uses, plus 1; 0: none */
    _Atomic uint64_t used[GPUS];
    _Atomic int contexts[GPUS];
    char cgroup[CGROUP_BYTES];
    _Atomic uint64_t uncounted[GPUS]; /* of `used`, what was allocated before the cgroup had a limit */
    struct {
        _Atomic uint64_t tick, ns;
    } busy[GPUS][TICKS];
    _Atomic uint64_t ran_ns[GPUS]; /* time that its kernels have had */
    struct queue queues[QUEUES];
};

struct cgroup_limit {
    int gpu;
    char path[CGROUP_BYTES]; /* empty: the record is free */
    uint64_t soft, hard;
};

struct state {
    _Atomic uint32_t magic;
    _Atomic uint32_t xid_events; /* of all GPUs: those who wait for one sleep on it */
    int gpu_count;
    _Atomic int record_count; /* records from here on were never used */
    pthread_mutex_t turns;    /* of all GPUs, and of the queues */
    struct gpu gpus[GPUS];
    struct process processes[PROCESSES];
    _Atomic int accounting;
    _Atomic int limits_error; /* what setting and getting a limit return; 0: nothing is wrong */
    _Atomic int keeps_limits; /* it lowers no limit, whatever is in use */
    _Atomic uint32_t limit_calls;
    struct cgroup_limit cgroup_limits[CGROUP_LIMITS];
};

/* A GPU, or one GPU instance of it, that this process may use. */
struct place {
    int gpu, instance, compute; /* instance, compute: -1 for the whole GPU */
};

extern struct state *state;
extern struct place visible[GPUS * INSTANCES];
extern int visible_count;

/* Map the file, and find the visible devices; 0 if there is no driver. */
int open_state(int for_cuda);
/* The same for a file that is made if it is missing, or of another build of the driver. */
int create_state(void);
/* Hold the lock on all accounts and instances. */
void lock_state(void);
void unlock_state(void);

uint64_t now_ns(void);
/* This process's record, made at the first call; NULL if there is no room. */
struct process *own_process(void);
/* This process's PID on the node. */
int node_pid(void);
/* Whether a record is of a living process; the record of another is cleared. */
int lives(int record);
/* Bytes that a process holds of a GPU, with its context. */
uint64_t held_bytes(const struct process *process, int gpu);
/* Bytes in use of a GPU, or of one of its instances unless that is -1. */
uint64_t used_bytes(int gpu, int instance);
uint64_t total_bytes(int gpu, int instance);
uint64_t usable_bytes(int gpu, int instance); /* by programs */
/* Whether this process sees a device: an instance, or the whole GPU if that is -1. */
int sees(int gpu, int instance, int compute);
/* The profile of a GPU instance. */
const struct mig_profile *profile_at(int gpu, int instance);
extern const char *const fault_names[FAULTS];
int has_fault(int gpu, enum fault fault);
/* Wait while a GPU hangs. */
void wait_while_hung(int gpu);

#endif
