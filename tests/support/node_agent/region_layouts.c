/* Every published layout of the shared region as C sees it, for tests: writes one full of known
   numbers, shows one, and takes its locks. Compiling it checks the table of offsets. */

#include <fcntl.h>
#include <semaphore.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define DEVICES 16
#define SLOTS 1024
#define MAGIC 19920718

_Static_assert(sizeof(sem_t) == 32, "a 64-bit glibc");

struct memory40 { uint64_t context, module, data, offset, total; };
struct memory64 { uint64_t context, module, data, offset, total, spare[3]; };
struct util24 { uint64_t dec, enc, sm; };
struct util48 { uint64_t dec, enc, sm, spare[3]; };

struct slot_prev0 {
  int32_t pid, hostpid;
  struct memory40 used[DEVICES];
  uint64_t monitorused[DEVICES];
  int32_t status;
};
struct slot_v0 {
  int32_t pid, hostpid;
  struct memory40 used[DEVICES];
  uint64_t monitorused[DEVICES];
  struct util24 util[DEVICES];
  int32_t status;
};
struct slot_v11 {
  int32_t pid, hostpid;
  struct memory64 used[DEVICES];
  uint64_t monitorused[DEVICES];
  struct util48 util[DEVICES];
  int32_t status;
  uint64_t spare[3];
};
struct slot_bad {
  int32_t pid, hostpid;
  uint64_t seqlock;
  struct memory64 used[DEVICES];
  uint64_t monitorused[DEVICES];
  struct util48 util[DEVICES];
  int32_t status;
  uint64_t spare[2];
};
struct slot_v12 {
  int32_t pid, hostpid;
  struct memory64 used[DEVICES];
  uint64_t monitorused[DEVICES];
  struct util48 util[DEVICES];
  int32_t status;
  uint64_t seqlock, spare[2];
};

#define MIDDLE(slot) \
  uint64_t device_num; \
  char uuids[DEVICES][96]; \
  uint64_t limit[DEVICES], sm_limit[DEVICES]; \
  struct slot procs[SLOTS]; \
  int32_t proc_num, utilization_switch, recent_kernel, priority;

struct prev0 { int32_t magic, sm_init; uint64_t owner; sem_t sem; MIDDLE(slot_prev0) };
struct v0 { int32_t magic, sm_init; uint64_t owner; sem_t sem; MIDDLE(slot_v0) };
struct v11 {
  int32_t magic; uint32_t major, minor; int32_t sm_init; uint64_t owner; sem_t sem;
  MIDDLE(slot_v11)
  uint64_t last_kernel, spare[4];
};
struct bad {
  int32_t magic; uint32_t major, minor; int32_t sm_init; uint64_t owner; sem_t sem, postinit;
  MIDDLE(slot_bad)
  uint64_t last_kernel, spare[4];
};
struct v12 {
  int32_t magic; uint32_t major, minor; int32_t sm_init; uint64_t owner; sem_t sem;
  MIDDLE(slot_v12)
  uint64_t last_kernel; sem_t postinit;
};

#define AT(type, field, offset) _Static_assert(offsetof(struct type, field) == offset, #field)
#define HEADER(type, size, own, lock, dev, ids, lim, sm, slots, slotsize, num) \
  _Static_assert(sizeof(struct type) == size, "size"); \
  _Static_assert(sizeof(((struct type *)0)->procs[0]) == slotsize, "slot size"); \
  AT(type, owner, own); AT(type, sem, lock); AT(type, device_num, dev); AT(type, uuids, ids); \
  AT(type, limit, lim); AT(type, sm_limit, sm); AT(type, procs, slots); AT(type, proc_num, num); \
  AT(type, utilization_switch, num + 4); AT(type, recent_kernel, num + 8); \
  AT(type, priority, num + 12)

HEADER(prev0, 804680, 8, 16, 48, 56, 1592, 1720, 1848, 784, 804664);
HEADER(v0, 1197896, 8, 16, 48, 56, 1592, 1720, 1848, 1168, 1197880);
HEADER(v11, 2008952, 16, 24, 56, 64, 1600, 1728, 1856, 1960, 2008896);
HEADER(bad, 2008984, 16, 24, 88, 96, 1632, 1760, 1888, 1960, 2008928);
HEADER(v12, 2008952, 16, 24, 56, 64, 1600, 1728, 1856, 1960, 2008896);
AT(v11, last_kernel, 2008912); AT(bad, last_kernel, 2008944); AT(v12, last_kernel, 2008912);
AT(bad, postinit, 56); AT(v12, postinit, 2008920);
AT(slot_prev0, used, 8); AT(slot_prev0, monitorused, 648); AT(slot_prev0, status, 776);
AT(slot_v0, monitorused, 648); AT(slot_v0, util, 776); AT(slot_v0, status, 1160);
AT(slot_v11, monitorused, 1032); AT(slot_v11, util, 1160); AT(slot_v11, status, 1928);
AT(slot_bad, seqlock, 8); AT(slot_bad, used, 16); AT(slot_bad, monitorused, 1040);
AT(slot_bad, util, 1168); AT(slot_bad, status, 1936);
AT(slot_v12, used, 8); AT(slot_v12, monitorused, 1032); AT(slot_v12, util, 1160);
AT(slot_v12, status, 1928); AT(slot_v12, seqlock, 1936);

static uint64_t amount(int slot, int device, int field) {
  return 1000000ULL * (slot + 1) + 1000ULL * device + field;
}

#define FILL(r) do { \
    sem_init(&(r)->sem, 1, 1); \
    (r)->device_num = 4; \
    (r)->proc_num = 3; (r)->utilization_switch = 0; (r)->recent_kernel = -1; (r)->priority = 5; \
    for (int d = 0; d < DEVICES; d++) { \
      if (d < 4) snprintf((r)->uuids[d], 96, "GPU-%08x-1111-2222-3333-444444444444", d); \
      (r)->limit[d] = (uint64_t)(d + 1) << 30; (r)->sm_limit[d] = d + 10; \
      for (int k = 0; k < 3; k++) { \
        (r)->procs[k].pid = 100 + k; (r)->procs[k].hostpid = 9000 + k; (r)->procs[k].status = 1; \
        (r)->procs[k].used[d].context = amount(k, d, 1); \
        (r)->procs[k].used[d].module = amount(k, d, 2); \
        (r)->procs[k].used[d].data = amount(k, d, 3); \
        (r)->procs[k].used[d].offset = amount(k, d, 4); \
        (r)->procs[k].used[d].total = amount(k, d, 5); \
        (r)->procs[k].monitorused[d] = amount(k, d, 6); \
      } } (r)->magic = MAGIC; } while (0)
#define FILL_UTIL(r) \
  for (int d = 0; d < DEVICES; d++) for (int k = 0; k < 3; k++) { \
    (r)->procs[k].util[d].dec = 77; (r)->procs[k].util[d].enc = 78; \
    (r)->procs[k].util[d].sm = (k * 7 + d * 3) % 100; }
#define FILL_SEQLOCK(r) for (int k = 0; k < 3; k++) (r)->procs[k].seqlock = 2 * k
#define FILL_VERSION(r, second) \
  (r)->major = 1; (r)->minor = second; (r)->last_kernel = 1787000000

#define SHOW(r) do { \
    printf("magic %d\nsm_init %d\nowner %llu\ndevice_num %llu\nproc_num %d\nswitch %d\n" \
           "recent_kernel %d\npriority %d\n", (r)->magic, (r)->sm_init, \
           (unsigned long long)(r)->owner, (unsigned long long)(r)->device_num, (r)->proc_num, \
           (r)->utilization_switch, (r)->recent_kernel, (r)->priority); \
    for (int d = 0; d < DEVICES; d++) \
      printf("limit%d %llu\nsm_limit%d %llu\nuuid%d \"%s\"\n", d, \
             (unsigned long long)(r)->limit[d], d, (unsigned long long)(r)->sm_limit[d], d, \
             (r)->uuids[d]); \
    printf("sem %d\n", sem_trywait(&(r)->sem)); } while (0)
#define SHOW_VERSION(r) printf("major %u\nminor %u\nlast_kernel %llu\n", (r)->major, (r)->minor, \
                               (unsigned long long)(r)->last_kernel)

#define CASE(label, type, also_fill, also_show) \
  if (!strcmp(argv[2], label)) { \
    struct type *r = map(argv[3], sizeof(struct type), writing); \
    if (writing) { FILL(r); also_fill; } else { SHOW(r); also_show; } \
    return 0; \
  }

static void *map(const char *path, size_t size, int writing) {
  int fd = open(path, O_RDWR | (writing ? O_CREAT : 0), 0666);
  if (fd < 0 || (writing && ftruncate(fd, (off_t)size + 1))) exit(2);
  if (lseek(fd, 0, SEEK_END) != (off_t)size + 1) exit(3);
  void *region = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (region == MAP_FAILED) exit(4);
  return region;
}

int main(int argc, char **argv) {
  if (argc != 4) return 1;
  int writing = !strcmp(argv[1], "write");
  CASE("pre-v0", prev0, (void)0, (void)0)
  CASE("v0", v0, FILL_UTIL(r), (void)0)
  CASE("1.1", v11, FILL_UTIL(r); FILL_VERSION(r, 1), SHOW_VERSION(r))
  CASE("1.1-bad", bad, FILL_UTIL(r); FILL_SEQLOCK(r); FILL_VERSION(r, 1); sem_init(&r->postinit, 1, 1),
       SHOW_VERSION(r); printf("postinit %d\n", sem_trywait(&r->postinit)))
  CASE("1.2", v12, FILL_UTIL(r); FILL_SEQLOCK(r); FILL_VERSION(r, 2); sem_init(&r->postinit, 1, 1),
       SHOW_VERSION(r); printf("postinit %d\n", sem_trywait(&r->postinit)))
  return 5;
}
