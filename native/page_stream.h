/* Pages in host memory as one stream of bytes that is moved to and from files, and its checksums.
 *
 * Nothing here knows Python, needs its lock, or is shared between two calls.
 */

#ifndef HICACHE_PAGE_STREAM_H
#define HICACHE_PAGE_STREAM_H

#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>
#include <sys/uio.h>

enum { DIGEST_BYTES = 16, MAX_GAP_BYTES = 4096, MAX_VECTORS = 1024 };

/* Neighbouring bytes in memory: a piece of a page, or what lies between two pages. */
typedef struct {
    char *base;
    size_t num_bytes;
    bool begins_page;
    bool ends_page;
    bool is_gap;
} Segment;

/* Neighbouring bytes of a file, and where in memory the file is mapped, if it is. */
typedef struct {
    int fd;
    off_t offset;
    size_t num_bytes;
    const char *mapping;
} Place;

/* A place in a stream: a segment, and so many bytes of it. */
typedef struct {
    ptrdiff_t segment;
    size_t offset;
} Cursor;

/* Memory as a stream of bytes, with a cursor, and the checksums of the pages before the cursor. */
typedef struct {
    Segment *segments;
    ptrdiff_t num_segments;
    Cursor cursor;
    void *state;        /* of the checksum of a page that is looked at in parts */
    char *digests;      /* where they go */
    ptrdiff_t num_done; /* pages before the cursor */
} Stream;

/* What lies between pages is read to `scrap`, and nobody looks at it; written are `zeros`. */
extern char scrap[MAX_GAP_BYTES];
extern const char zeros[MAX_GAP_BYTES];

/* Take the functions of XXH3 from a loaded library; whether it has them all. To be called once. */
bool bind_checksum(const char *library_path);

/* Move a stream between memory and its places, one after the other, and compute its checksums.
 *
 * Goes on a chunk at a time, so that the checksum finds the bytes in the processor's cache. Places
 * become what is left of them. Returns an error number: 0 also where a file ends, and then `num_done`
 * says which pages were read.
 */
int move_stream(Stream *stream, Place *places, ptrdiff_t num_places, size_t chunk_bytes,
                bool writes);

/* Fill `vectors`, MAX_VECTORS at most, with `most` bytes of memory at most. Neighbours become one.
 *
 * Moves the cursor `at`, which need not be the stream's own, over the bytes, and returns how many
 * vectors there are.
 */
int gather(const Stream *stream, Cursor *at, size_t most, struct iovec *vectors, size_t *num_bytes);

/* Move the stream's cursor over bytes and add them to the checksums; false without memory. */
bool pass_over(Stream *stream, size_t num_bytes);

/* As `pass_over` for bytes of one segment, which lie, or lie once more, at `bytes`. */
bool pass_part(Stream *stream, const char *bytes, size_t num_bytes);

/* Free what a stream needed on its way. */
void end_stream(Stream *stream);

#endif
