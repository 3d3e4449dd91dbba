#define _GNU_SOURCE
#include "page_mapping.h"

#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

enum {
    MIN_BYTES = 64 << 10,     /* below that, asking for it takes longer than it saves */
    PIECE_BYTES = 4096,       /* stays in the first cache between the copy and the checksum */
    SAMPLE_BYTES = 1 << 20,   /* of so many, one page tells whether they are in the page cache */
    AHEAD_BYTES = 768,        /* fetched before they are needed: the processor stops at a page's end */
};

/* -- a disk that fails ---------------------------------------------------------------------- */

/* What a thread reads at the moment, and where it goes on if that cannot be read. */
typedef struct {
    const char *begin;
    const char *end;
    sigjmp_buf way_out;
} Guard;

/* The handler must find it without an allocation. */
static _Thread_local Guard *volatile guard __attribute__((tls_model("initial-exec")));
static struct sigaction earlier;

static void on_bus_error(int number, siginfo_t *info, void *context)
{
    const char *at = info->si_addr;
    if (guard && at >= guard->begin && at < guard->end)
        siglongjmp(guard->way_out, 1);
    if (earlier.sa_flags & SA_SIGINFO) {
        earlier.sa_sigaction(number, info, context);
    } else if (earlier.sa_handler != SIG_DFL && earlier.sa_handler != SIG_IGN) {
        earlier.sa_handler(number);
    } else {
        /* Everything is as if nobody handled it. An access that has failed is repeated now by itself;
         * what was sent by a process is not. */
        sigaction(SIGBUS, &earlier, NULL);
        if (info->si_code <= 0)
            raise(number);
    }
}

static bool is_ours(const struct sigaction *action)
{
    return action->sa_flags & SA_SIGINFO && action->sa_sigaction == on_bus_error;
}

static void install_handler(void)
{
    /* Not to be deferred: it is left by a jump, and the thread's mask of signals stays as it is. */
    struct sigaction action = {.sa_sigaction = on_bus_error,
                               .sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK};
    sigemptyset(&action.sa_mask);
    sigaction(SIGBUS, NULL, &earlier);
    sigaction(SIGBUS, &action, NULL);
}

/* Whether bus errors are reported to this file. Who comes later stays: two that call each other
 * would do so for ever. */
static bool handles_bus_errors(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    struct sigaction now;
    pthread_once(&once, install_handler);
    return !sigaction(SIGBUS, NULL, &now) && is_ours(&now);
}

/* -- the copy ------------------------------------------------------------------------------- */

/* Copy bytes to `to`, past the caches, and to `seen`, so that what is looked at is what was copied.
 *
 * An ordinary copy reads what it overwrites from memory first, and pushes everything else out of the
 * caches.
 */
static void copy_past_caches(char *to, char *seen, const char *from, size_t num_bytes)
{
    size_t done = 0;
#ifdef __SSE2__
    if (!((uintptr_t)to % sizeof(__m128i))) {
        for (; done + 64 <= num_bytes; done += 64) {
            const __m128i *source = (const __m128i *)(from + done);
            __m128i *look = (__m128i *)(seen + done), *target = (__m128i *)(to + done);
            _mm_prefetch(from + done + AHEAD_BYTES, _MM_HINT_T0);
            __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1);
            __m128i c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);
            _mm_store_si128(look, a);
            _mm_store_si128(look + 1, b);
            _mm_store_si128(look + 2, c);
            _mm_store_si128(look + 3, d);
            _mm_stream_si128(target, a);
            _mm_stream_si128(target + 1, b);
            _mm_stream_si128(target + 2, c);
            _mm_stream_si128(target + 3, d);
        }
    }
#endif
    memcpy(seen + done, from + done, num_bytes - done);
    memcpy(to + done, seen + done, num_bytes - done);
}

/* Other threads see what was copied past the caches. */
static void finish_copies(void)
{
#ifdef __SSE2__
    _mm_sfence();
#endif
}

static bool copy_stream(Stream *stream, const char *from, size_t num_bytes)
{
    char seen[PIECE_BYTES] __attribute__((aligned(64)));
    while (num_bytes) {
        const Segment *segment = &stream->segments[stream->cursor.segment];
        size_t left = segment->num_bytes - stream->cursor.offset;
        size_t part = num_bytes < left ? num_bytes : left;
        if (part > PIECE_BYTES)
            part = PIECE_BYTES;
        if (!segment->is_gap)
            copy_past_caches(segment->base + stream->cursor.offset, seen, from, part);
        if (!pass_part(stream, seen, part))
            return false;
        from += part;
        num_bytes -= part;
    }
    return true;
}

/* As `copy_stream`, from memory that may turn out not to be readable; return an error number. */
static int copy_guarded(Stream *stream, const char *from, size_t num_bytes)
{
    Guard mine = {.begin = from, .end = from + num_bytes};
    if (sigsetjmp(mine.way_out, 0)) {
        guard = NULL;
        finish_copies();
        return EIO;
    }
    guard = &mine;
    bool copied = copy_stream(stream, from, num_bytes);
    guard = NULL;
    finish_copies();
    return copied ? 0 : ENOMEM;
}

/* -- the mapping ---------------------------------------------------------------------------- */

static size_t count_left(const Stream *stream)
{
    size_t total = 0;
    for (ptrdiff_t at = stream->cursor.segment; at < stream->num_segments; at++)
        total += stream->segments[at].num_bytes;
    return total - stream->cursor.offset;
}

/* Whether mapped bytes seem to be in the page cache: a few of their pages are. */
static bool is_cached(const char *from, size_t num_bytes)
{
    size_t system_page = (size_t)sysconf(_SC_PAGESIZE);
    const char *page = from - (uintptr_t)from % system_page, *end = from + num_bytes;
    const char *last = end - 1 - (uintptr_t)(end - 1) % system_page;
    unsigned char found;
    for (; page < last; page += SAMPLE_BYTES)
        if (mincore((void *)page, system_page, &found) || !(found & 1))
            return false;
    return !mincore((void *)last, system_page, &found) && found & 1;
}

/* Read a place, or as much of it as the stream wants, if it is worth it; return an error number. */
static int move_place(Stream *stream, Place *place)
{
    struct stat file;
    size_t left = count_left(stream);
    size_t num_bytes = place->num_bytes < left ? place->num_bytes : left;
    const char *from = place->mapping + place->offset;
    /* Behind the end of a file there is nothing to be read. */
    if (num_bytes < MIN_BYTES || fstat(place->fd, &file) ||
        place->offset + (off_t)num_bytes > file.st_size || !is_cached(from, num_bytes))
        return 0;
    int error = copy_guarded(stream, from, num_bytes);
    place->offset += (off_t)num_bytes;
    place->num_bytes -= num_bytes;
    return error;
}

int move_mapped(Stream *stream, Place *places, ptrdiff_t num_places, size_t chunk_bytes)
{
    for (Place *place = places; place < places + num_places; place++) {
        bool is_mapped = place->mapping && handles_bus_errors();
        int error = is_mapped ? move_place(stream, place) : 0;
        if (!error)
            error = move_stream(stream, place, 1, chunk_bytes, false);
        if (error || place->num_bytes)
            return error;
    }
    return 0;
}
