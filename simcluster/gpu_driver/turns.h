/* How processes take turns on a simulated GPU, and what they got of it. */
#ifndef TURNS_H
#define TURNS_H
#include "state.h"

/* Hold the lock on turns and queues. */
void lock_turns(void);
void unlock_turns(void);
/* This process's queue for a GPU; NULL if all are in use for other GPUs. The lock is held. */
struct queue *queue_of(struct process *process, int gpu);
/* Let a GPU, or an instance unless that is -1, work until now. The lock is held. */
void advance(int gpu, int instance);

/* Percent of the last second in which a process kept a GPU busy. */
unsigned busy_percent(const struct process *process, int gpu);
/* The same of the last whole sample period, which is all that NVML knows of processes. */
unsigned sampled_percent(const struct process *process, int gpu);

#endif
