/* Copies within host memory by several threads; the lane, a small ring for small copies, served in one call; and the
 * descriptors of a swap of blocks.
 *
 * Compiled at device start-up by h2d_patch/copies/native.py, which says what is called how; without a compiler, or where
 * anything else is wrong, Python does the same with one thread. Calls nothing but libc and the functions of the CUDA
 * runtime that it is given.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <time.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

enum { HOST_TO_DEVICE = 1, HOST_MEMORY = 1, RELAXED_CAPTURE = 2 }; /* the runtime's numbers */
enum { MOST_THREADS = 64, SPINS = 1000, ALONE = 256, MOST_LANES = 64, SEGMENTS = 8, ALIGNMENT = 256 };
enum { NOT_HERE = -1, CAPTURING = -2, NEGATIVE = -3, OUTSIDE = -4 };
enum { SHARE = 1024 }; /* as in swap.py */
static const size_t SMALLEST_CHUNK = 64 << 10;
static const long LATE_NS = 200 * 1000;
static const size_t IN_CACHE = 32 << 10;  /* below, what is used again and again stays in the caches */
static const size_t PAST_CACHES = 4 << 10; /* shorter runs are not worth going past them */

struct runtime {
    int (*copy)(void *, const void *, size_t, int, void *);
    int (*copy_rows)(void *, size_t, const void *, size_t, size_t, size_t, int, void *);
    int (*is_capturing)(void *, int *);
    int (*exchange_capture_mode)(int *);
    int (*stream_query)(void *);
    int (*event_record)(void *, void *);
    int (*event_query)(void *);
    int (*last_error)(void);
    int (*pointer_attributes)(void *, const void *);
};
static struct runtime cuda;

/* What to copy to dense memory at `dst`: `bytes` in rows of `width`, one every `pitch` bytes from `src`; or, of `parts`
 * that lie anywhere, part i, which ends `ends[i]` bytes from `dst`. `stream`: past the caches. */
struct job {
    char *dst;
    const char *src;
    size_t pitch, width, bytes, chunk;
    const char *const *parts;
    const size_t *ends;
    int stream;
};

/* Memory that is not in the caches is not read before it is written: 256 KiB took 21 us where memcpy took 31. (Where it
 * happens to be in them memcpy took 16; but between two copies a server does other things.) */
static void copy_past_caches(char *dst, const char *src, size_t bytes)
{
#ifdef __SSE2__
    size_t head = -(size_t)dst & 15;
    if (bytes > head + 64) {
        memcpy(dst, src, head);
        dst += head, src += head, bytes -= head;
        for (; bytes >= 64; dst += 64, src += 64, bytes -= 64) {
            __m128i a = _mm_loadu_si128((const __m128i *)src), b = _mm_loadu_si128((const __m128i *)(src + 16));
            __m128i c = _mm_loadu_si128((const __m128i *)(src + 32)), d = _mm_loadu_si128((const __m128i *)(src + 48));
            _mm_stream_si128((__m128i *)dst, a);
            _mm_stream_si128((__m128i *)(dst + 16), b);
            _mm_stream_si128((__m128i *)(dst + 32), c);
            _mm_stream_si128((__m128i *)(dst + 48), d);
        }
        _mm_sfence(); /* the device may be told to read it next */
    }
#endif
    memcpy(dst, src, bytes);
}

static void copy_run(const struct job *job, size_t to, const char *src, size_t bytes)
{
    if (job->stream)
        copy_past_caches(job->dst + to, src, bytes);
    else
        memcpy(job->dst + to, src, bytes);
}

static void copy_part(const struct job *job, size_t from, size_t to)
{
    if (job->parts) {
        size_t i = 0;
        while (job->ends[i] <= from)
            i++;
        for (; from < to; i++) {
            size_t start = i ? job->ends[i - 1] : 0, end = job->ends[i] < to ? job->ends[i] : to;
            copy_run(job, from, job->parts[i] + (from - start), end - from);
            from = end;
        }
        return;
    }
    if (job->pitch == job->width) {
        copy_run(job, from, job->src + from, to - from);
        return;
    }
    size_t column = from % job->width;
    const char *row = job->src + from / job->width * job->pitch;
    for (; from < to; row += job->pitch, column = 0) {
        size_t length = job->width - column;
        if (length > to - from)
            length = to - from;
        copy_run(job, from, row + column, length);
        from += length;
    }
}

static pthread_mutex_t in_use = PTHREAD_MUTEX_INITIALIZER; /* one job at a time */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;   /* of what follows */
static pthread_cond_t wake = PTHREAD_COND_INITIALIZER;
static struct job current;
static unsigned long generation;
static int threads, wanted;
static atomic_size_t active; /* helpers that copy parts of `current` */
static atomic_size_t next;   /* the next chunk of `current` */
static int alone;            /* so many jobs are done without helpers */

static void copy_chunks(const struct job *job)
{
    for (;;) {
        size_t from = atomic_fetch_add(&next, 1) * job->chunk;
        if (from >= job->bytes)
            return;
        size_t to = job->bytes - from > job->chunk ? from + job->chunk : job->bytes;
        copy_part(job, from, to);
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

static long now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000L + now.tv_nsec;
}

/* `own_ns`: how long this thread's own chunks took, of which there are some four for each that a helper has left. */
static void wait_for_helpers(long own_ns)
{
    long began = now_ns();
    for (unsigned spins = 0; atomic_load(&active); spins++)
        if (spins > SPINS)
            sched_yield();
    if (now_ns() - began > own_ns + LATE_NS)
        alone = ALONE; /* one was interrupted in the middle of a chunk: CPUs are short */
}

/* Start `number` helpers, with the runtime to call. Once. Returns how many helpers there are. */
int h2d_start(int number, const struct runtime *runtime)
{
    cuda = *runtime;
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

static void copy_job(struct job job, int helpers)
{
    if (helpers > threads)
        helpers = threads;
    if (helpers < 1 || pthread_mutex_trylock(&in_use)) {
        copy_part(&job, 0, job.bytes);
        return;
    }
    if (alone) {
        alone--;
        copy_part(&job, 0, job.bytes);
        pthread_mutex_unlock(&in_use);
        return;
    }
    job.chunk = job.bytes / (4 * ((size_t)helpers + 1));
    if (job.chunk < SMALLEST_CHUNK)
        job.chunk = SMALLEST_CHUNK;
    job.chunk = (job.chunk + 63) & ~(size_t)63;
    pthread_mutex_lock(&lock);
    current = job;
    wanted = helpers;
    atomic_store(&next, 0);
    generation++;
    pthread_cond_broadcast(&wake);
    pthread_mutex_unlock(&lock);
    long began = now_ns();
    copy_chunks(&job);
    long own_ns = now_ns() - began;
    pthread_mutex_lock(&lock);
    wanted = 0; /* whoever wakes late stays out */
    pthread_mutex_unlock(&lock);
    wait_for_helpers(own_ns);
    pthread_mutex_unlock(&in_use);
}

/* Dense at `dst`: `rows` rows of `width` bytes, every `pitch` bytes from `src`, by up to `helpers` threads and this one. */
void h2d_copy(void *dst, const void *src, size_t pitch, size_t width, size_t rows, int helpers)
{
    int stream = width * rows >= IN_CACHE && (rows == 1 || width >= PAST_CACHES);
    struct job job = {dst, src, rows == 1 ? width : pitch, width, width * rows, 0, NULL, NULL, stream};
    copy_job(job, helpers);
}

/* Dense at `dst`: `number` parts one behind the other, the last of which ends after `ends[number - 1]` bytes. */
void h2d_gather(void *dst, const char *const *parts, const size_t *ends, size_t number, int helpers)
{
    size_t bytes = ends[number - 1];
    struct job job = {dst, NULL, 0, 0, bytes, 0, parts, ends, bytes >= IN_CACHE && bytes / number >= PAST_CACHES};
    copy_job(job, helpers);
}

/* A lane: pinned memory in segments, each of which takes copies of one stream, one behind the other, until it is full.
 *
 * A segment is free again when the event behind it has passed, or when its stream is found idle. */
struct segment {
    char *base;
    size_t used;
    void *stream, *event;
    enum { FREE, OPEN, CLOSED } state; /* closed: its event is recorded */
};
static struct lane {
    pthread_mutex_t lock;
    size_t segment_bytes; /* 0: not open */
    struct segment segments[SEGMENTS];
} lanes[MOST_LANES];
static int opened;

/* A lane over `bytes` at `base`; `events`: one for each segment, of the device. Returns its number, or NOT_HERE. */
int h2d_open_lane(char *base, size_t bytes, void *const *events)
{
    if (opened == MOST_LANES || bytes / SEGMENTS < ALIGNMENT)
        return NOT_HERE;
    struct lane *lane = &lanes[opened];
    pthread_mutex_init(&lane->lock, NULL);
    lane->segment_bytes = bytes / SEGMENTS & ~(size_t)(ALIGNMENT - 1);
    for (int i = 0; i < SEGMENTS; i++)
        lane->segments[i] = (struct segment){base + i * lane->segment_bytes, 0, NULL, events[i], FREE};
    return opened++;
}

/* Its memory and events are used no more. */
void h2d_close_lane(int number)
{
    pthread_mutex_lock(&lanes[number].lock);
    lanes[number].segment_bytes = 0;
    pthread_mutex_unlock(&lanes[number].lock);
}

/* Whether a query answers that all is done. In no other mode would it leave the captures of other threads intact. */
static int done(int (*query)(void *), void *handle)
{
    int mode = RELAXED_CAPTURE;
    cuda.exchange_capture_mode(&mode);
    int answer = query(handle);
    cuda.exchange_capture_mode(&mode);
    if (answer)
        cuda.last_error(); /* "not ready" is one; torch would blame its own next launch for it */
    return answer == 0;
}

/* The segment for `bytes` more of `stream`, which captures nothing. NULL: none is free, or CUDA is unwell. */
static struct segment *segment_for(struct lane *lane, void *stream, size_t bytes)
{
    struct segment *found = NULL;
    for (int i = 0; i < SEGMENTS && !found; i++)
        if (lane->segments[i].state == OPEN && lane->segments[i].stream == stream)
            found = &lane->segments[i];
    if (found) {
        int full = found->used + bytes > lane->segment_bytes;
        if (full && done(cuda.stream_query, stream)) {
            for (int i = 0; i < SEGMENTS; i++)
                if (lane->segments[i].stream == stream)
                    lane->segments[i].state = FREE;
            found->used = 0;
            found->state = OPEN;
            return found;
        }
        if (!full)
            return found;
        if (cuda.event_record(found->event, stream)) {
            cuda.last_error();
            lane->segment_bytes = 0;
            return NULL;
        }
        found->state = CLOSED;
    }
    for (int i = 0; i < SEGMENTS; i++) {
        struct segment *segment = &lane->segments[i];
        if (segment->state == CLOSED && done(cuda.event_query, segment->event))
            segment->state = FREE;
        if (segment->state == FREE) {
            segment->state = OPEN;
            segment->stream = stream;
            segment->used = 0;
            return segment;
        }
    }
    for (int i = 0; i < SEGMENTS; i++) { /* those of streams that are used no more come back at a later call */
        struct segment *segment = &lane->segments[i];
        int capturing = 0;
        if (segment->state != OPEN)
            continue;
        if (cuda.is_capturing(segment->stream, &capturing) ||
            (!capturing && cuda.event_record(segment->event, segment->stream)))
            cuda.last_error();
        else if (!capturing)
            segment->state = CLOSED;
    }
    return NULL;
}

/* `rows` rows of `width` bytes, every `src_pitch` bytes from `src`: now to the lane, then, on `stream`, from there to
 * every `dst_pitch` bytes of device memory `dst`.
 * Returns 0; CUDA's error; CAPTURING, or NOT_HERE where the lane has no room or is in use, nothing being done. */
int h2d_send(int number, void *dst, size_t dst_pitch, const void *src, size_t src_pitch, size_t width, size_t rows,
             void *stream, int helpers)
{
    int capturing = 0, code = cuda.is_capturing(stream, &capturing);
    if (code)
        return code;
    if (capturing)
        return CAPTURING;
    struct lane *lane = &lanes[number];
    size_t bytes = width * rows, room = (bytes + ALIGNMENT - 1) & ~(size_t)(ALIGNMENT - 1);
    if (pthread_mutex_trylock(&lane->lock))
        return NOT_HERE;
    struct segment *segment = bytes > lane->segment_bytes ? NULL : segment_for(lane, stream, room);
    if (!segment) {
        pthread_mutex_unlock(&lane->lock);
        return NOT_HERE;
    }
    char *at = segment->base + segment->used;
    segment->used += room;
    h2d_copy(at, src, src_pitch, width, rows, helpers);
    if (rows == 1 || dst_pitch == width)
        code = cuda.copy(dst, at, bytes, HOST_TO_DEVICE, stream);
    else
        code = cuda.copy_rows(dst, dst_pitch, at, width, width, rows, HOST_TO_DEVICE, stream);
    pthread_mutex_unlock(&lane->lock);
    return code;
}

/* Whether the runtime knows the memory at `address` as pinned. */
int h2d_pinned(const void *address)
{
    _Alignas(16) int attributes[64] = {0}; /* cudaPointerAttributes, larger in newer releases; the kind of memory comes first */
    if (cuda.pointer_attributes(attributes, address)) {
        cuda.last_error();
        return 0;
    }
    return attributes[0] == HOST_MEMORY;
}

/* What a swap may touch: one device range; of the host, `number` ranges, sorted, each with what to add for the device. */
struct touchable {
    int64_t device_start, device_end;
    const int64_t *starts, *ends, *shifts;
    int64_t number;
};

/* A kernel, and how to launch it: swap_bulk.cu's arguments come with it. */
struct kernel {
    int (*launch)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);
    void *function;
    uint64_t warps, stage_bytes, stages, shared; /* of a program; a share is a warp's */
};

static int inside(int64_t start, int64_t end, int64_t at, int64_t bytes)
{
    return (at >= start) & ((int64_t)((uint64_t)end - (uint64_t)at) >= bytes);
}

/* The range that holds `bytes` from `at`, looked for from the one before on; -1: none. */
static int64_t range_of(const struct touchable *may, int64_t before, int64_t at, int64_t bytes)
{
    if (!inside(may->starts[before], may->ends[before], at, bytes)) {
        int64_t low = 0, high = may->number;
        while (high - low > 1) {
            int64_t middle = (low + high) / 2;
            if (may->starts[middle] <= at)
                low = middle;
            else
                high = middle;
        }
        before = low;
    }
    return inside(may->starts[before], may->ends[before], at, bytes) ? before : -1;
}

/* Where `shares` begin, and the last ends: (block, offset in it), as swap.py's _cuts. `alike`: all of one length. */
static void cut(const int64_t *lengths, int64_t blocks, int64_t total, int alike, int64_t shares, int64_t *cuts)
{
    int64_t share = (total + shares * SHARE - 1) / (shares * SHARE) * SHARE, block = 0, start = 0;
    for (int64_t i = 0; i <= shares; i++) {
        int64_t at = i * share < total ? i * share : total;
        if (alike) {
            block = at / lengths[0];
            start = block * lengths[0];
        }
        while (block < blocks && start + lengths[block] <= at)
            start += lengths[block++];
        cuts[2 * i] = block;
        cuts[2 * i + 1] = (at - start) & ~(int64_t)15;
    }
}

/* With vectors of what the processor has, where the compiler makes a version for each. */
#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__)
#define VECTORS __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define VECTORS
#endif

/* The blocks as they are to `out`, `shift` added to those on the host; whether one is not inside the one host range or the
 * device range. `signs` and `differ`: of all numbers, and of all lengths with the first, or-ed. */
VECTORS static int64_t in_one_range(const int64_t *restrict host, const int64_t *restrict device,
                                    const int64_t *restrict lengths, int64_t blocks, int64_t host_start, int64_t host_end,
                                    int64_t device_start, int64_t device_end, int64_t shift, int64_t *restrict to_host,
                                    int64_t *restrict to_device, int64_t *restrict to_lengths, int64_t *signs,
                                    int64_t *differ)
{
    int64_t wrong = 0, all = 0, other = 0, first = lengths[0];
    for (int64_t i = 0; i < blocks; i++) {
        int64_t h = host[i], d = device[i], n = lengths[i];
        all |= h | d | n;
        other |= n ^ first;
        /* What does not fit makes one of these negative, and may wrap around when it is shifted. None of them wraps around unless h, d or n are negative, or
         * the one before it is. */
        uint64_t host_left = (uint64_t)host_end - (uint64_t)h, device_left = (uint64_t)device_end - (uint64_t)d;
        wrong |= (int64_t)(((uint64_t)h - (uint64_t)host_start) | host_left | (host_left - (uint64_t)n));
        wrong |= (int64_t)(((uint64_t)d - (uint64_t)device_start) | device_left | (device_left - (uint64_t)n));
        to_host[i] = (int64_t)((uint64_t)h + (uint64_t)shift);
        to_device[i] = d;
        to_lengths[i] = n;
    }
    *signs = all;
    *differ = other;
    return wrong < 0;
}

VECTORS int64_t h2d_total(const int64_t *lengths, size_t blocks)
{
    uint64_t total = 0;
    for (size_t i = 0; i < blocks; i++)
        total += (uint64_t)lengths[i];
    return (int64_t)total;
}

/* The descriptors of `blocks` blocks, `total` bytes together, and the cuts of `shares` behind them, to `out`, as
 * swap_bulk.cu reads them; then its launch on `stream`, unless `kernel` is NULL.
 * Returns 0; the driver's error; NEGATIVE or OUTSIDE for what no kernel may touch, nothing being launched. */
int h2d_swap(const int64_t *reads, const int64_t *writes, const int64_t *lengths, int64_t blocks, int64_t total,
             int gpu_to_cpu, const struct touchable *may, int64_t shares, int64_t *out, const struct kernel *kernel,
             void *stream)
{
    const int64_t *host = gpu_to_cpu ? writes : reads, *device = gpu_to_cpu ? reads : writes;
    int64_t *to_host = gpu_to_cpu ? out + blocks : out, *to_device = gpu_to_cpu ? out : out + blocks;
    int64_t signs = 0, differ = 0, range = 0;
    if (may->number == 1) {
        int64_t wrong = in_one_range(host, device, lengths, blocks, may->starts[0], may->ends[0], may->device_start,
                                     may->device_end, may->shifts[0], to_host, to_device, out + 2 * blocks, &signs, &differ);
        if (signs < 0)
            return NEGATIVE;
        if (wrong)
            return OUTSIDE;
    } else {
        for (int64_t i = 0; i < blocks; i++) {
            signs |= reads[i] | writes[i] | lengths[i];
            differ |= lengths[i] ^ lengths[0];
        }
        if (signs < 0)
            return NEGATIVE;
        for (int64_t i = 0; i < blocks; i++) {
            range = may->number < 1 ? -1 : range_of(may, range, host[i], lengths[i]);
            if (range < 0 || !inside(may->device_start, may->device_end, device[i], lengths[i]))
                return OUTSIDE;
            to_host[i] = host[i] + may->shifts[range];
            to_device[i] = device[i];
            out[2 * blocks + i] = lengths[i];
        }
    }
    int64_t *cuts = out + 3 * blocks;
    cut(lengths, blocks, total, !differ && lengths[0], shares, cuts);
    if (!kernel)
        return 0;
    uint64_t count = (uint64_t)blocks;
    unsigned stage_bytes = (unsigned)kernel->stage_bytes, stages = (unsigned)kernel->stages;
    void *arguments[] = {&out, &count, &cuts, &stage_bytes, &stages};
    unsigned warps = (unsigned)kernel->warps;
    return kernel->launch(kernel->function, (unsigned)shares / warps, 1, 1, 32 * warps, 1, 1, (unsigned)kernel->shared,
                          stream, arguments, NULL);
}

#ifdef H2D_PYTHON /* those that most calls need, as functions of Python's own, which take half as long to call */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

static int numbers_of(const char *name, PyObject *const *args, Py_ssize_t given, int wanted, unsigned long long *n)
{
    if (given != wanted) {
        PyErr_Format(PyExc_TypeError, "%s takes %d integers", name, wanted);
        return 0;
    }
    for (int i = 0; i < wanted; i++) {
        n[i] = PyLong_AsUnsignedLongLong(args[i]);
        if (n[i] == (unsigned long long)-1 && PyErr_Occurred())
            return 0;
    }
    return 1;
}

static PyObject *py_send(PyObject *self, PyObject *const *args, Py_ssize_t number)
{
    unsigned long long n[9];
    (void)self;
    if (!numbers_of("send", args, number, 9, n))
        return NULL;
    int answer;
    Py_BEGIN_ALLOW_THREADS /* the launch queue may be full */
    answer = h2d_send((int)n[0], (void *)(size_t)n[1], n[2], (void *)(size_t)n[3], n[4], n[5], n[6],
                      (void *)(size_t)n[7], (int)n[8]);
    Py_END_ALLOW_THREADS
    return PyLong_FromLong(answer);
}

static PyObject *py_swap(PyObject *self, PyObject *const *args, Py_ssize_t number)
{
    unsigned long long n[11];
    (void)self;
    if (!numbers_of("swap", args, number, 11, n))
        return NULL;
    int answer;
    Py_BEGIN_ALLOW_THREADS
    answer = h2d_swap((void *)(size_t)n[0], (void *)(size_t)n[1], (void *)(size_t)n[2], (int64_t)n[3], (int64_t)n[4],
                      (int)n[5], (void *)(size_t)n[6], (int64_t)n[7], (void *)(size_t)n[8], (void *)(size_t)n[9],
                      (void *)(size_t)n[10]);
    Py_END_ALLOW_THREADS
    return PyLong_FromLong(answer);
}

static PyObject *py_total(PyObject *self, PyObject *const *args, Py_ssize_t number)
{
    unsigned long long n[2];
    (void)self;
    return numbers_of("total", args, number, 2, n) ? PyLong_FromLongLong(h2d_total((void *)(size_t)n[0], n[1])) : NULL;
}

static PyObject *py_pinned(PyObject *self, PyObject *address)
{
    (void)self;
    void *at = PyLong_AsVoidPtr(address);
    if (!at && PyErr_Occurred())
        return NULL;
    return PyLong_FromLong(h2d_pinned(at));
}

static PyMethodDef methods[] = {
    {"send", (PyCFunction)(void (*)(void))py_send, METH_FASTCALL, NULL},
    {"pinned", py_pinned, METH_O, NULL},
    {"swap", (PyCFunction)(void (*)(void))py_swap, METH_FASTCALL, NULL},
    {"total", (PyCFunction)(void (*)(void))py_total, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "h2d_patch_native", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_h2d_patch_native(void)
{
    return PyModule_Create(&module);
}
#endif
