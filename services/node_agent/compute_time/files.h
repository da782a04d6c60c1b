/* The two files of a container: what the agent writes, and what the container's processes write.
 *
 * time_layouts.py has the same layouts. A GPU has the same place in both. All numbers are in the order
 * of the machine; moments are of CLOCK_MONOTONIC, in ns. */
#ifndef FILES_H
#define FILES_H
#include <stdint.h>

enum { DEVICES = 16, LIMITS_MAGIC = 0x4c54494d, USE_MAGIC = 0x5554494d, NO_LIMIT = 100, EVENTS_ARE_RIGHT = 1024 };

/* Read-only in the container. */
struct limit {
    unsigned char uuid[16];     /* zero: there is no further GPU */
    _Atomic uint32_t percent;   /* of the lease; 0: none */
    _Atomic uint32_t allowed;   /* now: more than `percent` while others leave theirs unused */
    _Atomic uint32_t measured;  /* of the GPU's time, by NVML: all of the container's processes together */
    _Atomic uint32_t unused;
    _Atomic int64_t measured_at; /* 0: never */
};
struct limits {
    uint32_t magic, unused;
    struct limit devices[DEVICES];
};

struct bucket {
    _Atomic int64_t ready_at;   /* launches wait until then: earlier moments are time that was saved */
    _Atomic int64_t charged_ns; /* of GPU time, as events measure it */
    _Atomic int64_t asked_at;   /* when a process wanted to launch */
    _Atomic int64_t long_at;    /* when a kernel was charged that other processes interrupt */
    _Atomic int64_t shared_at;  /* when another process of the container launched than before */
    _Atomic int32_t process;    /* that launched last */
    _Atomic uint32_t scale;     /* of charges, against EVENTS_ARE_RIGHT */
    _Atomic int64_t compared_at; /* the measurement that `scale` knows */
    int64_t compared_charged_ns; /* `charged_ns` then */
    double seen, raw;            /* percent, averaged: by NVML, and as charged */
};
struct use {
    _Atomic uint32_t magic, unused;
    struct bucket devices[DEVICES];
};
#endif
