/* The driver's limits on the memory of cgroups, R615. Callers hold lock_state(). */
#ifndef CGROUP_LIMITS_H
#define CGROUP_LIMITS_H
#include "state.h"

#define UNLIMITED UINT64_MAX

/* The limit of a cgroup itself, or NULL. */
struct cgroup_limit *limit_of(int gpu, const char *path);
/* The limit that counts first for a cgroup: its own, or that of the nearest cgroup above it. */
struct cgroup_limit *nearest_limit(int gpu, const char *path);
/* Bytes that are charged to a cgroup. */
uint64_t charged_bytes(int gpu, const char *path);
/* Set a limit; 0 if there is no room for one more. Without a limit, the record is freed. */
int put_limit(int gpu, const char *path, uint64_t soft, uint64_t hard);
/* Whether all limits on a process allow it to allocate. */
int may_allocate(const struct process *process, int gpu, uint64_t size);
/* Note an allocation or the end of one, after `used` has changed. */
void note_allocated(struct process *process, int gpu, uint64_t size);
void note_freed(struct process *process, int gpu);

#endif
