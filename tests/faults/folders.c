/* Simulate a file system that cannot sync folders: fsync of a folder fails with the number in FOLDER_SYNC_ERROR. */
#include <errno.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>
int fsync(int file) {
    struct stat about;
    if (!fstat(file, &about) && S_ISDIR(about.st_mode)) {
        errno = atoi(getenv("FOLDER_SYNC_ERROR"));
        return -1;
    }
    return syscall(SYS_fsync, file);
}
