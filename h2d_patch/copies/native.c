/* Copies within host memory by several threads, and what follows them: one call from Python instead of several.
 *
 * Compiled at device start-up by h2d_patch/copies/native.py, which says what is called how; without a compiler, or where
 * anything else is wrong, Python does the same with one thread. Calls nothing but libc and the three functions of the
 * CUDA runtime that it is given. Keeps no pointer beyond a call.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <string.h>

enum { HOST_TO_DEVICE = 1, MOST_THREADS = 64, SPINS = 20000 };
static const size_t SMALLEST_CHUNK = 64 << 10;

typedef int (*copy_fn)(void *, const void *, size_t, int, void *);
typedef int (*copy_rows_fn)(void *, size_t, const void *, size_t, size_t, size_t, int, void *);
static copy_fn copy_async;
static copy_rows_fn copy_rows_async;

/* `rows` rows of `width` bytes, every `pitch` bytes from `src`, to dense memory at `dst`. */
struct job {
    char *dst;
    const char *src;
    size_t pitch, width, bytes, chunk;
};

static void copy_part(const struct job *job, size_t from, size_t to)
{
    if (job->pitch == job->width) {
        memcpy(job->dst + from, job->src + from, to - from);
        return;
    }
    while (from < to) {
        size_t row = from / job->width, column = from % job->width;
        size_t length = job->width - column;
        if (length > to - from)
            length = to - from;
        memcpy(job->dst + from, job->src + row * job->pitch + column, length);
        from += length;
    }
}

static pthread_mutex_t in_use = PTHREAD_MUTEX_INITIALIZER; /* one job at a time */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;   /* of what follows */
static pthread_cond_t wake = PTHREAD_COND_INITIALIZER;
static struct job current;
static unsigned long generation;
static int threads, wanted;
static atomic_int active;         /* helpers that may still look at `current` */
static atomic_size_t next, left;  /* the next chunk of `current`, and how many are not copied yet */

static void copy_chunks(const struct job *job)
{
    for (;;) {
        size_t from = atomic_fetch_add(&next, 1) * job->chunk;
        if (from >= job->bytes)
            return;
        size_t to = job->bytes - from > job->chunk ? from + job->chunk : job->bytes;
        copy_part(job, from, to);
        atomic_fetch_sub(&left, 1);
    }
}

static void *help(void *argument)
{
    int number = (int)(size_t)argument;
    unsigned long seen = 0;
    pthread_mutex_lock(&lock);
    for (;;) {
        while (generation == seen)
            pthread_cond_wait(&wake, &lock);
        seen = generation;
        if (number >= wanted)
            continue;
        struct job job = current;
        atomic_fetch_add(&active, 1);
        pthread_mutex_unlock(&lock);
        copy_chunks(&job);
        atomic_fetch_sub(&active, 1);
        pthread_mutex_lock(&lock);
    }
    return NULL;
}

static void wait_for_zero(atomic_size_t *counter)
{
    for (unsigned spins = 0; atomic_load(counter); spins++)
        if (spins > SPINS)
            sched_yield();
}

/* Start `number` helpers and say what copies to the device. Once. Returns how many there are. */
int h2d_start(int number, copy_fn memcpy_async, copy_rows_fn memcpy_2d_async)
{
    copy_async = memcpy_async;
    copy_rows_async = memcpy_2d_async;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* the process's signals are for its other threads */
    while (threads < number && threads < MOST_THREADS) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, help, (void *)(size_t)threads))
            break;
        pthread_detach(thread);
        threads++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return threads;
}

/* Dense at `dst`: `rows` rows of `width` bytes, every `pitch` bytes from `src`, by up to `helpers` threads and this one. */
void h2d_copy(void *dst, const void *src, size_t pitch, size_t width, size_t rows, int helpers)
{
    struct job job = {dst, src, rows == 1 ? width : pitch, width, width * rows, 0};
    if (helpers > threads)
        helpers = threads;
    if (helpers < 1 || pthread_mutex_trylock(&in_use)) {
        copy_part(&job, 0, job.bytes);
        return;
    }
    job.chunk = job.bytes / (4 * ((size_t)helpers + 1));
    if (job.chunk < SMALLEST_CHUNK)
        job.chunk = SMALLEST_CHUNK;
    job.chunk = (job.chunk + 63) & ~(size_t)63;
    pthread_mutex_lock(&lock);
    while (atomic_load(&active)) { /* a helper that woke late finds nothing left of the last job, and goes */
        pthread_mutex_unlock(&lock);
        sched_yield();
        pthread_mutex_lock(&lock);
    }
    current = job;
    wanted = helpers;
    atomic_store(&next, 0);
    atomic_store(&left, (job.bytes + job.chunk - 1) / job.chunk);
    generation++;
    pthread_cond_broadcast(&wake);
    pthread_mutex_unlock(&lock);
    copy_chunks(&job);
    wait_for_zero(&left);
    pthread_mutex_unlock(&in_use);
}

/* The same to pinned memory `at`, then from there to every `dst_pitch` bytes of device memory `dst`, on `stream`. */
int h2d_send(void *dst, size_t dst_pitch, const void *src, size_t src_pitch, size_t width, size_t rows, void *at,
             void *stream, int helpers)
{
    h2d_copy(at, src, src_pitch, width, rows, helpers);
    if (rows == 1 || dst_pitch == width)
        return copy_async(dst, at, width * rows, HOST_TO_DEVICE, stream);
    return copy_rows_async(dst, dst_pitch, at, width, width, rows, HOST_TO_DEVICE, stream);
}
