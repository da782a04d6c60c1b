/* A container's program: `first-process SECONDS` shows the limits of the simulated driver, if the
 * container has one, as they are when its first process runs, and goes on for so long. Without
 * arguments it waits for ever, as the program of a sandbox does. */
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

int main(int count, char **arguments) {
    if (count < 2) for (;;) pause();
    if (getenv("GPU_DRIVER_STATE")) {
        pid_t child = fork();
        if (!child) {
            execl("/gpu-control", "gpu-control", "limits", NULL);
            _exit(127);
        }
        int status;
        if (child < 0 || waitpid(child, &status, 0) < 0 || status) return 1;
    }
    sleep((unsigned)atoi(arguments[1]));
    return 0;
}
