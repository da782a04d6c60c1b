/* Preloaded into a part: shifts its wall clock by the nanoseconds in the file $CAMPAIGN_CLOCK, which
 * may change at any time. Its monotonic clock stays. If $CAMPAIGN_CLOCK is a directory, the file has the
 * name of the part: that after --instance, or else its program's. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define SECOND 1000000000LL

static volatile long long *offset_ns;
static int (*real_gettime)(clockid_t, struct timespec *);

__attribute__((constructor)) static void map_offset(int count, char **words) {
  const char *path = getenv("CAMPAIGN_CLOCK");
  char named[4096];
  int file = path ? open(path, O_RDONLY | O_CLOEXEC | O_DIRECTORY) : -1;
  if (file >= 0) {
    const char *slash = count > 0 ? strrchr(words[0], '/') : NULL;
    const char *part = slash ? slash + 1 : "";
    for (int n = 1; n + 1 < count; n++)
      if (!strcmp(words[n], "--instance")) part = words[n + 1];
    close(file);
    snprintf(named, sizeof named, "%s/%s", path, part);
    path = named;
  }
  file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
  if (file < 0) return;
  void *mapped = mmap(0, sizeof *offset_ns, PROT_READ, MAP_SHARED, file, 0);
  close(file);
  if (mapped != MAP_FAILED) offset_ns = mapped;
}

int clock_gettime(clockid_t clock, struct timespec *at) {
  if (!real_gettime) real_gettime = dlsym(RTLD_NEXT, "clock_gettime");
  int failed = real_gettime(clock, at);
  if (!failed && offset_ns && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) {
    long long now = at->tv_sec * SECOND + at->tv_nsec + *offset_ns;
    at->tv_sec = now / SECOND;
    at->tv_nsec = now % SECOND;
  }
  return failed;
}

int gettimeofday(struct timeval *at, void *zone) {
  struct timespec now;
  int failed = clock_gettime(CLOCK_REALTIME, &now);
  at->tv_sec = now.tv_sec;
  at->tv_usec = now.tv_nsec / 1000;
  return failed;
}

time_t time(time_t *at) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (at) *at = now.tv_sec;
  return now.tv_sec;
}
