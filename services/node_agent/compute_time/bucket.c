/* A bucket of GPU time: see bucket.h. */
#include "bucket.h"

#include <stdatomic.h>

/* Of GPU time, in ns: what a full bucket holds, and what one that was empty must hold again. Each
 * time that the GPU goes to another process costs some 0.2 ms of it. */
#define MOST_NS 50000000
#define WORTH_NS 5000000
#define LONGEST_CHARGE_NS 60000000000
/* NVML's percents are of short periods, in which a container may have had all turns or none. */
#define AVERAGED_NS 1500000000
#define FORGOTTEN_NS 2500000000 /* without measurements for so long, events are believed again */

static int64_t wall_ns(int64_t gpu_ns, int limit) { return gpu_ns * NO_LIMIT / limit; }

int64_t bucket_wait(const struct bucket *bucket, int64_t now, int limit, int was_empty) {
    int64_t wait = atomic_load(&bucket->ready_at) - now;
    return was_empty || wait > 0 ? wait + wall_ns(WORTH_NS, limit) : wait;
}

void bucket_charge(struct bucket *bucket, int64_t now, int limit, int64_t ns) {
    if (ns > LONGEST_CHARGE_NS) ns = LONGEST_CHARGE_NS;
    if (ns < -LONGEST_CHARGE_NS) ns = -LONGEST_CHARGE_NS;
    int64_t scale = now - atomic_load(&bucket->compared_at) < FORGOTTEN_NS ? atomic_load(&bucket->scale) : EVENTS_ARE_RIGHT;
    int64_t oldest = now - wall_ns(MOST_NS, limit), at = atomic_load(&bucket->ready_at), then;
    do then = (at > oldest ? at : oldest) + wall_ns(ns * scale / EVENTS_ARE_RIGHT, limit);
    while (!atomic_compare_exchange_weak(&bucket->ready_at, &at, then));
    atomic_fetch_add(&bucket->charged_ns, ns);
}

/* Events measure from the start of a kernel to its end: of one that is longer than the driver's
 * time slice, also what other processes had of the GPU meanwhile. NVML divides that among them. */
void bucket_compare(struct bucket *bucket, int64_t measured_at, int percent) {
    int64_t before = atomic_load(&bucket->compared_at);
    if (measured_at <= before || !atomic_compare_exchange_strong(&bucket->compared_at, &before, measured_at)) return;
    int64_t charged = atomic_load(&bucket->charged_ns), elapsed = measured_at - before;
    double more = (double)(charged - bucket->compared_charged_ns); /* less than 0 if some was given back */
    bucket->compared_charged_ns = charged;
    if (elapsed > FORGOTTEN_NS) {
        bucket->seen = bucket->raw = 0;
        atomic_store(&bucket->scale, EVENTS_ARE_RIGHT);
        return;
    }
    double weight = elapsed < AVERAGED_NS ? (double)elapsed / AVERAGED_NS : 1;
    bucket->raw += weight * (100 * more / (double)elapsed - bucket->raw);
    bucket->seen += weight * (percent + 0.5 - bucket->seen); /* NVML cuts fractions off */
    double wanted = bucket->raw > 2 ? bucket->seen / bucket->raw : 1;
    wanted = wanted < 0.1 ? 0.1 : wanted > 4 ? 4 : wanted;
    double scale = (double)atomic_load(&bucket->scale) / EVENTS_ARE_RIGHT;
    scale += (weight < 0.66 ? weight * 1.5 : 1) * (wanted - scale);
    atomic_store(&bucket->scale, (uint32_t)(scale * EVENTS_ARE_RIGHT));
}
