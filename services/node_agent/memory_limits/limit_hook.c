/* An OCI hook of kind createRuntime: has the node agent limit a container before its first process.
 *
 *   leasehold-limit-hook SOCKET HOLDER CONTAINER FENCE < state
 *
 * It carries names and no amounts, and decides nothing: the agent on SOCKET, which has the lease of
 * HOLDER (a pod's UID, or a ResourceClaim's), compares them with the container's state, which the
 * runtime writes to standard input. Its reply is "ok", or the reason why the container must not
 * start. Without that reply within 5 s, the container does not start. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>
#include <signal.h>

enum { SECONDS = 5, STATE_BYTES = 1 << 20, REPLY_BYTES = 4096 };
static const char NAME[] = "leasehold-limit-hook: ";

static void give_up(int signal) {
    static const char text[] = "leasehold-limit-hook: the node agent did not reply within 5 s\n";
    (void)signal;
    if (write(STDERR_FILENO, text, sizeof text - 1) < 0) _exit(3);
    _exit(1);
}

static int fail(const char *what) {
    fprintf(stderr, "%s%s: %s\n", NAME, what, strerror(errno));
    return 1;
}

static int write_all(int file, const char *bytes, size_t length) {
    while (length > 0) {
        ssize_t written = send(file, bytes, length, MSG_NOSIGNAL);
        if (written < 0 && errno == EINTR) continue;
        if (written <= 0) return 0;
        bytes += written;
        length -= (size_t)written;
    }
    return 1;
}

/* Read until the end; -1 if it is longer than there is room. */
static ssize_t read_all(int file, char *bytes, size_t room) {
    size_t length = 0;
    while (length < room) {
        ssize_t got = read(file, bytes + length, room - length);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) return -1;
        if (got == 0) return (ssize_t)length;
        length += (size_t)got;
    }
    errno = EMSGSIZE;
    return -1;
}

int main(int count, char **arguments) {
    static char state[STATE_BYTES];
    char head[1024], reply[REPLY_BYTES];
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    if (count != 5 || strlen(arguments[1]) >= sizeof address.sun_path) {
        fprintf(stderr, "usage: leasehold-limit-hook SOCKET HOLDER CONTAINER FENCE < state\n");
        return 2;
    }
    signal(SIGALRM, give_up);
    alarm(SECONDS);
    int length = snprintf(head, sizeof head, "%s %s %s\n", arguments[2], arguments[3], arguments[4]);
    if (length < 0 || (size_t)length >= sizeof head) {
        errno = EMSGSIZE;
        return fail("its arguments");
    }
    ssize_t state_length = read_all(STDIN_FILENO, state, sizeof state);
    if (state_length < 0) return fail("the container's state");
    int agent = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (agent < 0) return fail("a socket");
    memcpy(address.sun_path, arguments[1], strlen(arguments[1]));
    if (connect(agent, (struct sockaddr *)&address, sizeof address)) return fail("the node agent is not reached");
    if (!write_all(agent, head, (size_t)length) || !write_all(agent, state, (size_t)state_length) ||
        shutdown(agent, SHUT_WR))
        return fail("the node agent");
    ssize_t reply_length = read_all(agent, reply, sizeof reply);
    if (reply_length < 0) return fail("the node agent's reply");
    if (reply_length == 3 && !memcmp(reply, "ok\n", 3)) return 0;
    if (!reply_length) fprintf(stderr, "%sthe node agent did not reply\n", NAME);
    else fprintf(stderr, "%s%.*s", NAME, (int)reply_length, reply);
    return 1;
}
