#define _GNU_SOURCE
#include "page_stream.h"

#include <dlfcn.h>
#include <errno.h>
#include <stdint.h>
#include <stdlib.h>

/* -- the checksum --------------------------------------------------------------------------- */

typedef struct {
    uint64_t low;
    uint64_t high;
} Hash128;

static struct {
    Hash128 (*digest_of)(const void *data, size_t num_bytes);
    void *(*create_state)(void);
    int (*free_state)(void *state);
    int (*reset)(void *state);
    int (*update)(void *state, const void *data, size_t num_bytes);
    Hash128 (*digest)(const void *state);
} xxh;

static void store_digest(char *out, Hash128 hash)
{
    for (int byte = 0; byte < 8; byte++) {
        out[byte] = (char)(hash.high >> (56 - 8 * byte));
        out[8 + byte] = (char)(hash.low >> (56 - 8 * byte));
    }
}

/* Return a function of the library, the variant that looks at the processor if there is one. */
static void *look_up(void *library, const char *name, const char *dispatching)
{
    void *function = dispatching ? dlsym(library, dispatching) : NULL;
    return function ? function : dlsym(library, name);
}

bool bind_checksum(const char *library_path)
{
    /* It stays loaded: the interpreter does not unload it either. */
    void *library = dlopen(library_path, RTLD_NOW);
    if (!library)
        return false;
    *(void **)&xxh.digest_of = look_up(library, "XXH3_128bits", "XXH3_128bits_dispatch");
    *(void **)&xxh.create_state = look_up(library, "XXH3_createState", NULL);
    *(void **)&xxh.free_state = look_up(library, "XXH3_freeState", NULL);
    *(void **)&xxh.reset = look_up(library, "XXH3_128bits_reset", NULL);
    *(void **)&xxh.update = look_up(library, "XXH3_128bits_update", "XXH3_128bits_update_dispatch");
    *(void **)&xxh.digest = look_up(library, "XXH3_128bits_digest", NULL);
    return xxh.digest_of && xxh.create_state && xxh.free_state && xxh.reset && xxh.update &&
           xxh.digest;
}

/* -- the stream ----------------------------------------------------------------------------- */

/* Aligned, so that direct I/O takes them. */
char scrap[MAX_GAP_BYTES] __attribute__((aligned(MAX_GAP_BYTES)));
const char zeros[MAX_GAP_BYTES] __attribute__((aligned(MAX_GAP_BYTES)));

/* Add bytes at the cursor, which are part of a page, to its checksum; false without memory. */
static bool hash_part(Stream *stream, const char *bytes, size_t num_bytes, bool ends_page)
{
    char *out = stream->digests + stream->num_done * DIGEST_BYTES;
    bool begins_page =
        stream->segments[stream->cursor.segment].begins_page && !stream->cursor.offset;
    if (begins_page && ends_page) {
        store_digest(out, xxh.digest_of(bytes, num_bytes));
        return true;
    }
    if (!stream->state && !(stream->state = xxh.create_state()))
        return false;
    if (begins_page)
        xxh.reset(stream->state);
    xxh.update(stream->state, bytes, num_bytes);
    if (ends_page)
        store_digest(out, xxh.digest(stream->state));
    return true;
}

bool pass_part(Stream *stream, const char *bytes, size_t num_bytes)
{
    Cursor *cursor = &stream->cursor;
    const Segment *segment = &stream->segments[cursor->segment];
    bool ends = cursor->offset + num_bytes == segment->num_bytes;
    bool ends_page = ends && segment->ends_page;
    if (!segment->is_gap && !hash_part(stream, bytes, num_bytes, ends_page))
        return false;
    stream->num_done += ends_page;
    cursor->segment += ends;
    cursor->offset = ends ? 0 : cursor->offset + num_bytes;
    return true;
}

bool pass_over(Stream *stream, size_t num_bytes)
{
    while (num_bytes) {
        const Segment *segment = &stream->segments[stream->cursor.segment];
        size_t left = segment->num_bytes - stream->cursor.offset;
        size_t part = num_bytes < left ? num_bytes : left;
        if (!pass_part(stream, segment->base + stream->cursor.offset, part))
            return false;
        num_bytes -= part;
    }
    return true;
}

int gather(const Stream *stream, Cursor *at, size_t most, struct iovec *vectors, size_t *num_bytes)
{
    int count = 0;
    *num_bytes = 0;
    while (at->segment < stream->num_segments && *num_bytes < most) {
        const Segment *segment = &stream->segments[at->segment];
        char *base = segment->base + at->offset;
        size_t left = segment->num_bytes - at->offset;
        size_t part = left < most - *num_bytes ? left : most - *num_bytes;
        if (count && (char *)vectors[count - 1].iov_base + vectors[count - 1].iov_len == base) {
            vectors[count - 1].iov_len += part;
        } else if (count == MAX_VECTORS) {
            break;
        } else {
            vectors[count].iov_base = base;
            vectors[count++].iov_len = part;
        }
        at->segment += part == left;
        at->offset = part == left ? 0 : at->offset + part;
        *num_bytes += part;
    }
    return count;
}

/* Move all of `vectors`; return how many bytes that were, fewer at the end of a file; -1: errno. */
static ssize_t move_all(const Place *place, struct iovec *vectors, int count, bool writes)
{
    size_t total = 0;
    while (count) {
        off_t offset = place->offset + (off_t)total;
        ssize_t moved = writes ? pwritev(place->fd, vectors, count, offset)
                               : preadv(place->fd, vectors, count, offset);
        if (moved < 0 && errno == EINTR)
            continue;
        if (moved < 0)
            return -1;
        if (!moved)
            break;
        total += (size_t)moved;
        for (size_t left = (size_t)moved; left;) {
            size_t part = left < vectors->iov_len ? left : vectors->iov_len;
            vectors->iov_base = (char *)vectors->iov_base + part;
            vectors->iov_len -= part;
            left -= part;
            if (!vectors->iov_len) {
                vectors++;
                count--;
            }
        }
    }
    return (ssize_t)total;
}

int move_stream(Stream *stream, Place *places, ptrdiff_t num_places, size_t chunk_bytes,
                bool writes)
{
    struct iovec vectors[MAX_VECTORS];
    for (Place *place = places; place < places + num_places; place++) {
        while (place->num_bytes && stream->cursor.segment < stream->num_segments) {
            size_t most = place->num_bytes < chunk_bytes ? place->num_bytes : chunk_bytes;
            size_t wanted;
            Cursor ahead = stream->cursor;
            int count = gather(stream, &ahead, most, vectors, &wanted);
            if (writes && !pass_over(stream, wanted))
                return ENOMEM;
            ssize_t moved = move_all(place, vectors, count, writes);
            if (moved < 0)
                return errno;
            if (!writes && !pass_over(stream, (size_t)moved))
                return ENOMEM;
            if ((size_t)moved < wanted)
                return writes ? EIO : 0;
            place->offset += moved;
            place->num_bytes -= (size_t)moved;
        }
    }
    return 0;
}

void end_stream(Stream *stream)
{
    if (stream->state)
        xxh.free_state(stream->state);
    stream->state = NULL;
}
