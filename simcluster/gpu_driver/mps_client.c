#include "mps_client.h"
#include "state.h"

#include <errno.h>
#include <sys/socket.h>
#include <sys/un.h>

static int daemon_socket = -1;
static unsigned percent = 100;
static char memory[4096]; /* UUID=BYTES, with commas; or *=BYTES, for every GPU */

int mps_connect(void) {
    static const char *const by_default = "/tmp/nvidia-mps";
    const char *pipes = getenv("CUDA_MPS_PIPE_DIRECTORY");
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    char line[sizeof memory + 64];
    size_t length = 0;
    double given = 0;
    if (daemon_socket >= 0) return 1;
    snprintf(address.sun_path, sizeof address.sun_path, "%s/control", pipes ? pipes : by_default);
    int file = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (file < 0 || connect(file, (struct sockaddr *)&address, sizeof address)) {
        if (file >= 0) close(file);
        return 1;
    }
    daemon_socket = file;
    if (dprintf(file, "client %d\n", node_pid()) < 0) return 0;
    while (length < sizeof line - 1 && (!length || line[length - 1] != '\n')) {
        ssize_t got = read(file, line + length, sizeof line - 1 - length);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) return 0;
        length += (size_t)got;
    }
    line[length] = 0;
    if (sscanf(line, "ok %*d %lf %4095s", &given, memory) < 1) return 0;
    percent = given < 1 ? 1 : (unsigned)given;
    return 1;
}

void mps_forget(void) {
    if (daemon_socket >= 0) close(daemon_socket);
    daemon_socket = -1;
    percent = 100;
    memory[0] = 0;
}

int mps_terminated(void) {
    char byte;
    if (daemon_socket < 0) return 0;
    return recv(daemon_socket, &byte, 1, MSG_PEEK | MSG_DONTWAIT) == 0;
}

uint64_t mps_memory_limit(const char *uuid) {
    if (memory[0] == '*') uuid = "*";
    const char *at = memory[0] ? strstr(memory, uuid) : NULL;
    return at && at[strlen(uuid)] == '=' ? strtoull(at + strlen(uuid) + 1, NULL, 10) : 0;
}

unsigned mps_percent(void) { return percent; }
