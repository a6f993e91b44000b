/* Counts a process's calls that write into a folder, or that use a socket, and makes one of them fail.
   Preloaded by each_call_fails.py, which sets what follows by ctypes. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

char each_folder[PATH_MAX];       /* calls below it count; "" counts none */
volatile int each_memory = 0;     /* whether allocations of tensors count, too */
volatile long each_count = 0;     /* calls so far */
volatile long each_fails = -1;    /* the number of the call that fails, from 0 */
int each_error = 0;               /* its errno; 0: the process is killed before it */
int each_log = -1;                /* a descriptor for a line a call, or -1 */

static int inside(int folder, const char *path) {
    if (!each_folder[0]) return 0;
    char whole[PATH_MAX * 2], link[64];
    if (path && path[0] == '/') return !strncmp(path, each_folder, strlen(each_folder));
    if (folder == AT_FDCWD) { if (!getcwd(whole, PATH_MAX)) return 0; }
    else {
        snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
        ssize_t n = readlink(link, whole, PATH_MAX - 1);
        if (n < 0) return 0;
        whole[n] = 0;
    }
    return !strncmp(whole, each_folder, strlen(each_folder));
}

/* Whether the call that is about to be made fails. */
static int fails(const char *name) {
    long number = __sync_fetch_and_add(&each_count, 1);
    if (each_log >= 0) dprintf(each_log, "%s\n", name);
    if (number != each_fails) return 0;
    if (!each_error) kill(getpid(), SIGKILL);
    errno = each_error;
    return 1;
}

#define REAL(name) static __typeof__(&name) real; if (!real) real = (__typeof__(real))dlsym(RTLD_NEXT, #name)
#define CALL(result, name, arguments, values, where) \
    result name arguments { REAL(name); if ((where) && fails(#name)) return -1; return real values; }

CALL(ssize_t, write, (int fd, const void *from, size_t n), (fd, from, n), fd != each_log && inside(fd, NULL))
CALL(ssize_t, pwrite64, (int fd, const void *from, size_t n, off64_t at), (fd, from, n, at), inside(fd, NULL))
CALL(ssize_t, writev, (int fd, const struct iovec *from, int n), (fd, from, n), inside(fd, NULL))
CALL(int, fsync, (int fd), (fd), inside(fd, NULL))
CALL(int, ftruncate64, (int fd, off64_t n), (fd, n), inside(fd, NULL))
CALL(int, rename, (const char *from, const char *to), (from, to), inside(AT_FDCWD, to))
CALL(int, renameat, (int a, const char *from, int b, const char *to), (a, from, b, to), inside(b, to))
CALL(int, unlink, (const char *path), (path), inside(AT_FDCWD, path))
CALL(int, unlinkat, (int folder, const char *path, int flags), (folder, path, flags), inside(folder, path))
CALL(int, rmdir, (const char *path), (path), inside(AT_FDCWD, path))
CALL(int, mkdir, (const char *path, mode_t mode), (path, mode), inside(AT_FDCWD, path))
CALL(int, mkdirat, (int folder, const char *path, mode_t mode), (folder, path, mode), inside(folder, path))
CALL(int, chmod, (const char *path, mode_t mode), (path, mode), inside(AT_FDCWD, path))
CALL(int, connect, (int fd, const struct sockaddr *to, socklen_t n), (fd, to, n), each_folder[0] && to->sa_family == AF_INET)
CALL(ssize_t, send, (int fd, const void *from, size_t n, int flags), (fd, from, n, flags), each_folder[0])
CALL(ssize_t, recv, (int fd, void *to, size_t n, int flags), (fd, to, n, flags), each_folder[0])

int posix_memalign(void **to, size_t alignment, size_t n) {
    REAL(posix_memalign);
    if (each_memory && each_folder[0] && fails("posix_memalign")) return errno == EIO ? EIO : ENOMEM;
    return real(to, alignment, n);
}

#define OPEN(name) \
    int name(const char *path, int flags, ...) { \
        REAL(name); va_list more; va_start(more, flags); mode_t mode = va_arg(more, mode_t); va_end(more); \
        if ((flags & (O_CREAT | O_WRONLY | O_RDWR)) && inside(AT_FDCWD, path) && fails("open")) return -1; \
        return real(path, flags, mode); \
    }
OPEN(open)
OPEN(open64)
