/* Shift the time of day by the number of seconds in the file JUMP_FILE; other clocks are unchanged. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
static long offset(void) {
    char text[32] = {0};
    int file = open(getenv("JUMP_FILE"), O_RDONLY | O_CLOEXEC);
    if (file < 0) return 0;
    long length = read(file, text, sizeof text - 1);
    close(file);
    return length > 0 ? atol(text) : 0;
}
int clock_gettime(clockid_t clock, struct timespec *at) {
    int code = syscall(SYS_clock_gettime, clock, at);
    if (!code && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) at->tv_sec += offset();
    return code;
}
int gettimeofday(struct timeval *restrict at, void *restrict zone) {
    int code = syscall(SYS_gettimeofday, at, zone);
    if (!code && at) at->tv_sec += offset();
    return code;
}
time_t time(time_t *at) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at) *at = now.tv_sec;
    return now.tv_sec;
}
