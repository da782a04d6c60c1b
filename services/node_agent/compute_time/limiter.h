/* Holds the launches of this process to the limits of its container. */
#ifndef LIMITER_H
#define LIMITER_H
#include <stdint.h>

/* Use both files and the driver's own functions, which `lookup` finds by name; without them, or in
 * a container without limits, nothing is held. */
void limiter_start(void *(*lookup)(const char *name), const char *limits, const char *use);
/* Call this before each launch in the current context: it waits until the container may have the
 * GPU. `key` and `size` identify what is launched, such as a function and its grid. The result is
 * for limiter_after. */
int limiter_before(const void *key, uint64_t size, void *stream);
void limiter_after(int sample, void *stream);
/* Handles are about to become invalid, and may be used again for others: functions or graphs, and
 * with `contexts` also contexts and what belongs to them. */
void limiter_forget(int contexts);
#endif
