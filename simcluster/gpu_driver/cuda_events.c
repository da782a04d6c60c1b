/* Events: an event has the moment at which the work before it was done. */
#include "cuda.h"
#include "turns.h"

struct event {
    struct queue *queue; /* NULL: it was not recorded, or `end` is known */
    uint64_t number, end;
};
/* The events of this process's entries, of which a queue is the nth of its process. */
static struct event *events[QUEUES][RING];

static struct event **place_in(struct queue *queue, uint64_t number) {
    return &events[queue - own_process()->queues][number % RING];
}
void keep_end(struct queue *queue, uint64_t number, struct event *next) {
    struct event **place = place_in(queue, number), *earlier = *place;
    if (earlier && earlier->queue == queue) *earlier = (struct event){.end = queue->ring[number % RING].end};
    *place = next;
    if (next) *next = (struct event){.queue = queue, .number = number};
}

API result cuEventCreate(struct event **event, unsigned flags) {
    (void)flags;
    *event = calloc(1, sizeof **event);
    return CUDA_SUCCESS;
}
static void forget(struct event *event) {
    lock_turns();
    if (event->queue) *place_in(event->queue, event->number) = NULL;
    event->queue = NULL;
    unlock_turns();
}
API result cuEventDestroy_v2(struct event *event) {
    forget(event);
    free(event);
    return CUDA_SUCCESS;
}
API result cuEventRecord(struct event *event, void *stream) {
    if (captures(stream, 0)) return CUDA_SUCCESS;
    forget(event);
    return push(0, event);
}
static int is_done(struct event *event) {
    const struct place *place = place_of(current_device());
    lock_turns();
    if (place) advance(place->gpu, place->instance);
    struct queue *queue = event->queue;
    if (queue && atomic_load(&queue->done) > event->number) keep_end(queue, event->number, NULL);
    int done = event->queue == NULL;
    unlock_turns();
    return done;
}
API result cuEventQuery(struct event *event) {
    if (!may_query()) return CUDA_CAPTURE_UNSUPPORTED;
    return is_done(event) ? CUDA_SUCCESS : CUDA_NOT_READY;
}
API result cuEventSynchronize(struct event *event) { return is_done(event) ? CUDA_SUCCESS : wait_for_all(); }
API result cuEventElapsedTime_v2(float *ms, struct event *first, struct event *second) {
    if (!is_done(first) || !is_done(second)) return CUDA_NOT_READY;
    *ms = (float)(((double)second->end - (double)first->end) / 1e6);
    return CUDA_SUCCESS;
}
