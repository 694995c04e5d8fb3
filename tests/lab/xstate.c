/* Lets a User-Mode Linux of 6.1 boot on processors with AMX.
 *
 * Such a kernel keeps the registers of its processes without those of AMX, which they do not use.
 * The host's kernel takes all of them or none. This library, preloaded, adds the rest: zeros.
 */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdarg.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/uio.h>

enum { XSTATE = 0x202, MAX_BYTES = 1 << 15 };

static unsigned char registers[MAX_BYTES]; /* the stack of such a kernel is too small */
static size_t num_bytes;                   /* of all registers */
static long (*next)(int, ...);

__attribute__((constructor)) static void find_next(void)
{
    next = (long (*)(int, ...))dlsym(RTLD_NEXT, "ptrace");
}

static long set(int pid, const struct iovec *kept)
{
    struct iovec all = {registers, MAX_BYTES};

    if (!num_bytes) {
        if (next(PTRACE_GETREGSET, pid, XSTATE, &all))
            return -1;
        num_bytes = all.iov_len;
        memset(registers, 0, MAX_BYTES);
    }
    if (kept->iov_len >= num_bytes)
        return next(PTRACE_SETREGSET, pid, XSTATE, kept);
    all.iov_len = num_bytes;
    memcpy(registers, kept->iov_base, kept->iov_len);
    return next(PTRACE_SETREGSET, pid, XSTATE, &all);
}

long ptrace(enum __ptrace_request request, ...)
{
    va_list arguments;
    int pid;
    void *address, *data;

    va_start(arguments, request);
    pid = va_arg(arguments, int);
    address = va_arg(arguments, void *);
    data = va_arg(arguments, void *);
    va_end(arguments);
    if (request == PTRACE_SETREGSET && address == (void *)XSTATE)
        return set(pid, data);
    return next(request, pid, address, data);
}
