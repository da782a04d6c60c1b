/* The limits of a container, which the driver enforces in place of HAMi-core. */
#ifndef LIMITS_H
#define LIMITS_H
#include "state.h"

enum memory_kind { CONTEXT_MEMORY, DATA_MEMORY };

/* Bytes that the container may use of a device; 0: there is no limit. */
uint64_t memory_limit(int device);
/* Bytes that the container's living processes use of a device. */
uint64_t container_bytes(int device);
/* Percent of a device's time that each process may use, 1 to 100. */
uint64_t core_limit(int device);
/* Add to this process's account, or subtract. The caller holds lock_state(). */
void charge(int device, enum memory_kind kind, uint64_t bytes);
void discharge(int device, enum memory_kind kind, uint64_t bytes);
/* Note a launch, and how busy this process keeps a device, in percent. */
void note_launch(int device, unsigned busy);

#endif
