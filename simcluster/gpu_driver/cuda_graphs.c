/* Graphs: what was launched in a stream while it captured. */
#include "cuda.h"

enum { CAPTURE_RELAXED = 2 };
struct graph {
    uint64_t ns;
};
static _Atomic(void *) capturing; /* the stream that captures, or NULL: one at a time */
static _Atomic uint64_t captured_ns;
static _Atomic int invalid;
static __thread int mode; /* of this thread: 0 until it is relaxed */

int captures(void *stream, uint64_t ns) {
    if (!stream || atomic_load(&capturing) != stream) return 0;
    atomic_fetch_add(&captured_ns, ns);
    return 1;
}
int may_query(void) {
    if (!atomic_load(&capturing) || mode == CAPTURE_RELAXED) return 1;
    atomic_store(&invalid, 1);
    return 0;
}
API result cuStreamBeginCapture_v2(void *stream, int capture_mode) {
    (void)capture_mode; /* all are as strict as the global one */
    atomic_store(&captured_ns, 0);
    atomic_store(&invalid, 0);
    atomic_store(&capturing, stream);
    return CUDA_SUCCESS;
}
API result cuStreamEndCapture(void *stream, struct graph **graph) {
    (void)stream;
    atomic_store(&capturing, NULL);
    *graph = NULL;
    if (atomic_load(&invalid)) return CUDA_CAPTURE_INVALIDATED;
    *graph = malloc(sizeof **graph);
    **graph = (struct graph){atomic_load(&captured_ns)};
    return CUDA_SUCCESS;
}
API result cuStreamIsCapturing(void *stream, int *status) {
    *status = stream && atomic_load(&capturing) == stream;
    return CUDA_SUCCESS;
}
API result cuThreadExchangeStreamCaptureMode(int *exchanged) {
    int before = mode;
    mode = *exchanged;
    *exchanged = before;
    return CUDA_SUCCESS;
}
API result cuGraphInstantiateWithFlags(struct graph **program, const struct graph *graph, uint64_t flags) {
    (void)flags;
    *program = malloc(sizeof **program);
    **program = *graph;
    return CUDA_SUCCESS;
}
API result cuGraphLaunch(const struct graph *program, void *stream) { return launch_ns(program->ns, stream); }
API result cuGraphLaunch_ptsz(const struct graph *program, void *stream) { return launch_ns(program->ns, stream); }
API result cuGraphExecDestroy(struct graph *program) {
    free(program);
    return CUDA_SUCCESS;
}
API result cuGraphDestroy(struct graph *graph) {
    free(graph);
    return CUDA_SUCCESS;
}
