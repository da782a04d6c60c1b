/* A bucket of GPU time, which all processes of a container share; the clock is the caller's.
 *
 * It fills at the rate of the limit. One word holds it: the moment from which launches may go on.
 * A charge moves that moment on, and so does nothing else. */
#ifndef BUCKET_H
#define BUCKET_H
#include "files.h"

/* How long a launch has to wait at `now`, in ns; at most 0 if it may go on. `was_empty`: it waits
 * already, and goes on once the bucket holds enough to be worth a switch of the GPU. */
int64_t bucket_wait(const struct bucket *bucket, int64_t now, int limit, int was_empty);
/* Take `ns` of GPU time; negative: give back what was charged and not used. */
void bucket_charge(struct bucket *bucket, int64_t now, int limit, int64_t ns);
/* Take note that NVML measured a percent of the GPU's time at a moment. */
void bucket_compare(struct bucket *bucket, int64_t measured_at, int percent);
#endif
