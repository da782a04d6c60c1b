/* A program as a client of MPS, if a control daemon has its socket in $CUDA_MPS_PIPE_DIRECTORY
 * (/tmp/nvidia-mps): mps_daemon.py. Without one it is an ordinary program, without an error. */
#ifndef MPS_CLIENT_H
#define MPS_CLIENT_H
#include <stdint.h>

/* Connect, once per process; 0 if there is a daemon that refuses. Waits for its reply. */
int mps_connect(void);
/* Forget the connection of the process that this one was forked from. */
void mps_forget(void);
/* Whether the daemon or the server has ended this process's work. */
int mps_terminated(void);
/* Bytes that this process may use of a GPU, by its UUID; 0: there is no limit. */
uint64_t mps_memory_limit(const char *uuid);
/* Percent of a GPU that this process may use, 1 to 100. */
unsigned mps_percent(void);

#endif
