/* Processes take turns on a simulated GPU, as they were seen to do on an H200 (docs/hardware.md).
 *
 * A process with work has the GPU for a slice of SLICE_NS, and goes on if no other has work then.
 * Otherwise the next process has a turn, after a switch of SWITCH_NS in which nothing runs: so two
 * processes that always compute get 46 % each. Kernels are interrupted at the end of a slice. No
 * process runs for the GPU: whichever looks at it lets it work until now. */
#include "turns.h"

#include <errno.h>

#define SLICE_NS 2000000ull
#define SWITCH_NS 160000ull
#define SAMPLE_NS 160000000ull /* NVML's period, a multiple of TICK_NS */

void lock_turns(void) {
    if (pthread_mutex_lock(&state->turns) == EOWNERDEAD) pthread_mutex_consistent(&state->turns);
}
void unlock_turns(void) { pthread_mutex_unlock(&state->turns); }

static int is_idle(const struct queue *queue) { return atomic_load(&queue->done) >= atomic_load(&queue->pushed); }

struct queue *queue_of(struct process *process, int gpu) {
    struct queue *unused = NULL;
    for (int n = 0; n < QUEUES; n++) {
        struct queue *queue = &process->queues[n];
        if (atomic_load(&queue->gpu) == gpu + 1) return queue;
        if (!unused && is_idle(queue)) unused = queue;
    }
    if (unused) atomic_store(&unused->gpu, gpu + 1);
    return unused;
}

/* The queue with work of a process for a GPU or instance; NULL if there is none. */
static struct queue *waiting_queue(int record, int gpu, int instance) {
    struct process *process = &state->processes[record];
    if (!atomic_load(&process->pid) || atomic_load(&process->instance[gpu]) != instance + 1) return NULL;
    for (int n = 0; n < QUEUES; n++)
        if (atomic_load(&process->queues[n].gpu) == gpu + 1 && !is_idle(&process->queues[n])) return &process->queues[n];
    return NULL;
}
static int next_record(int after, int gpu, int instance) {
    int count = atomic_load(&state->record_count);
    for (int n = 1; n <= count; n++) {
        int record = (after + n) % count;
        if (waiting_queue(record, gpu, instance) && lives(record)) return record;
    }
    return -1;
}

static void note_busy(struct process *process, int gpu, uint64_t from_ns, uint64_t until_ns) {
    atomic_fetch_add(&process->ran_ns[gpu], until_ns - from_ns);
    while (from_ns < until_ns) {
        uint64_t tick = from_ns / TICK_NS, end = (tick + 1) * TICK_NS;
        uint64_t part = (end < until_ns ? end : until_ns) - from_ns;
        __typeof__(&process->busy[0][0]) busy = &process->busy[gpu][tick % TICKS];
        if (atomic_load(&busy->tick) != tick) {
            atomic_store(&busy->ns, 0);
            atomic_store(&busy->tick, tick);
        }
        atomic_fetch_add(&busy->ns, part);
        from_ns += part;
    }
}

static uint64_t least(uint64_t one, uint64_t other) { return one < other ? one : other; }

/* Run the first entry of a queue for as long as the turn and the time allow. */
static void work(struct queue *queue, struct process *process, int gpu, struct turns *turns, uint64_t until) {
    uint64_t done = atomic_load(&queue->done), ns = least(least(queue->left, until - turns->at), turns->left);
    note_busy(process, gpu, turns->at, turns->at + ns);
    turns->at += ns;
    turns->left -= ns;
    queue->left -= ns;
    if (queue->left) return;
    queue->ring[done % RING].end = turns->at;
    if (done + 1 < atomic_load(&queue->pushed)) queue->left = queue->ring[(done + 1) % RING].ns;
    atomic_store(&queue->done, done + 1);
}

void advance(int gpu, int instance) {
    struct turns *turns = instance < 0 ? &state->gpus[gpu].turns : &state->gpus[gpu].instances[instance].turns;
    uint64_t until = now_ns();
    if (!turns->at) turns->at = until;
    while (turns->at < until) {
        uint64_t part = least(turns->switching, until - turns->at);
        turns->switching -= part;
        turns->at += part;
        if (turns->at == until) return;
        int record = turns->current - 1;
        struct queue *queue = record < 0 || !turns->left ? NULL : waiting_queue(record, gpu, instance);
        if (queue) {
            work(queue, &state->processes[record], gpu, turns, until);
            continue;
        }
        int next = next_record(record, gpu, instance);
        if (next < 0) {
            turns->at = until;
            return;
        }
        turns->left = SLICE_NS;
        turns->switching = next == record ? 0 : SWITCH_NS;
        turns->current = next + 1;
    }
}

static void advance_all(int gpu) {
    lock_turns();
    advance(gpu, -1);
    for (int i = 0; i < INSTANCES; i++)
        if (state->gpus[gpu].instances[i].made) advance(gpu, i);
    unlock_turns();
}
static unsigned percent_between(const struct process *process, int gpu, uint64_t from_tick, uint64_t until_tick) {
    uint64_t ns = 0;
    for (uint64_t tick = from_tick; tick < until_tick; tick++)
        if (atomic_load(&process->busy[gpu][tick % TICKS].tick) == tick)
            ns += atomic_load(&process->busy[gpu][tick % TICKS].ns);
    return (unsigned)least(ns * 100 / ((until_tick - from_tick) * TICK_NS), 100);
}
unsigned busy_percent(const struct process *process, int gpu) {
    advance_all(gpu);
    uint64_t now = now_ns() / TICK_NS;
    return percent_between(process, gpu, now - TICKS_PER_S, now);
}
unsigned sampled_percent(const struct process *process, int gpu) {
    advance_all(gpu);
    uint64_t end = now_ns() / SAMPLE_NS * SAMPLE_NS / TICK_NS;
    return percent_between(process, gpu, end - SAMPLE_NS / TICK_NS, end);
}
