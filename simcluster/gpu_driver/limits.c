/* The limits of a container, which the driver enforces in place of HAMi-core.
 *
 * $GPU_DRIVER_LIMITS names the container's region file, which the node agent has written. It has
 * HAMi-core's layout 1.2, and processes keep their accounts in it as the library does, so that the
 * agent reads the same either way. Without the variable there are no limits. */
#include "limits.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>

enum { /* offsets in the file, and in the slot of a process */
    FILE_BYTES = 2008953,
    MAGIC = 19920718,
    DEVICE_COUNT = 56,
    UUIDS = 64,
    UUID_BYTES = 96,
    MEMORY_LIMITS = 1600,
    CORE_LIMITS = 1728,
    FIRST_SLOT = 1856,
    SLOT_COUNT = 2008896,
    LAST_KERNEL = 2008912,
    SLOT_BYTES = 1960,
    SLOTS = 1024,
    NODE_PID = 4,
    USED = 8,
    USED_BYTES = 64,
    USED_DATA = 16,
    USED_TOTAL = 32,
    BUSY = 1160 + 16,
    BUSY_BYTES = 48,
    STATUS = 1928,
    SEQUENCE = 1936
};

static unsigned char *region;
static unsigned char *own_slot;
static int own_pid;

#define WORD(at) (*(_Atomic int32_t *)(void *)(at))
#define LONG(at) (*(_Atomic uint64_t *)(void *)(at))

static int open_region(void) {
    static int tried;
    const char *path = getenv("GPU_DRIVER_LIMITS");
    struct stat status;
    if (region || tried || !path) return region != NULL;
    tried = 1;
    int file = open(path, O_RDWR | O_CLOEXEC | O_NOFOLLOW);
    if (file < 0) return 0;
    void *at = fstat(file, &status) || status.st_size != FILE_BYTES
                   ? MAP_FAILED
                   : mmap(NULL, FILE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (at == MAP_FAILED || WORD(at) != MAGIC) return 0;
    region = at;
    return 1;
}

static unsigned char *slot_at(int number) { return region + FIRST_SLOT + number * SLOT_BYTES; }
static int slot_count(void) {
    int count = WORD(region + SLOT_COUNT);
    return count < 0 ? 0 : count > SLOTS ? SLOTS : count;
}
static int slot_lives(unsigned char *slot) {
    int pid = WORD(slot);
    return WORD(slot + STATUS) == 1 && pid > 0 && (kill(pid, 0) == 0 || errno != ESRCH);
}
static void clear_slot(unsigned char *slot) { memset(slot, 0, SLOT_BYTES); }

static void write_uuids(void) {
    LONG(region + DEVICE_COUNT) = (uint64_t)visible_count;
    for (int n = 0; n < visible_count && n < GPUS; n++)
        snprintf((char *)region + UUIDS + n * UUID_BYTES, UUID_BYTES, "%s", state->gpus[visible[n].gpu].uuid);
}

/* This process's slot: its own, or that of a process that has ended, or a new one. */
static unsigned char *slot_of_process(void) {
    if (own_slot && own_pid == getpid()) return own_slot;
    own_slot = NULL;
    own_pid = getpid();
    for (int n = 0; n < slot_count() && !own_slot; n++)
        if (!slot_lives(slot_at(n)) || WORD(slot_at(n)) == own_pid) own_slot = slot_at(n);
    if (!own_slot && slot_count() < SLOTS) {
        own_slot = slot_at(slot_count());
        WORD(region + SLOT_COUNT) = slot_count() + 1;
    }
    if (!own_slot) return NULL;
    clear_slot(own_slot);
    WORD(own_slot) = own_pid;
    WORD(own_slot + NODE_PID) = node_pid();
    WORD(own_slot + STATUS) = 1;
    write_uuids();
    return own_slot;
}

uint64_t memory_limit(int device) { return open_region() ? LONG(region + MEMORY_LIMITS + device * 8) : 0; }

uint64_t container_bytes(int device) {
    uint64_t bytes = 0;
    for (int n = 0; open_region() && n < slot_count(); n++)
        if (slot_lives(slot_at(n))) bytes += LONG(slot_at(n) + USED + device * USED_BYTES + USED_TOTAL);
    return bytes;
}

uint64_t core_limit(int device) {
    uint64_t percent = open_region() ? LONG(region + CORE_LIMITS + device * 8) : 0;
    return percent == 0 || percent > 100 ? 100 : percent;
}

/* The sequence number is odd while the account is written, for readers that hold no lock. */
static void add(int device, enum memory_kind kind, uint64_t bytes) {
    unsigned char *slot = open_region() ? slot_of_process() : NULL;
    if (!slot) return;
    unsigned char *used = slot + USED + device * USED_BYTES;
    LONG(slot + SEQUENCE)++;
    LONG(used + (kind == DATA_MEMORY ? USED_DATA : 0)) += bytes;
    LONG(used + USED_TOTAL) += bytes;
    LONG(slot + SEQUENCE)++;
}
void charge(int device, enum memory_kind kind, uint64_t bytes) { add(device, kind, bytes); }
void discharge(int device, enum memory_kind kind, uint64_t bytes) { add(device, kind, -bytes); }

void note_launch(int device, unsigned busy) {
    if (!open_region() || !own_slot || own_pid != getpid()) return;
    LONG(own_slot + BUSY + device * BUSY_BYTES) = busy;
    LONG(region + LAST_KERNEL) = (uint64_t)time(NULL);
}

__attribute__((destructor)) static void leave_region(void) {
    if (own_slot && own_pid == getpid()) clear_slot(own_slot);
}
