/* Pages in host memory as one stream of bytes that is moved to and from files, and its checksums.
 *
 * Nothing here knows Python, needs its lock, or is shared between two calls.
 */

#ifndef HICACHE_PAGE_STREAM_H
#define HICACHE_PAGE_STREAM_H

#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

enum { DIGEST_BYTES = 16, MAX_GAP_BYTES = 4096 };

/* Neighbouring bytes in memory: a piece of a page, or what lies between two pages. */
typedef struct {
    char *base;
    size_t num_bytes;
    bool begins_page;
    bool ends_page;
    bool is_gap;
} Segment;

/* Neighbouring bytes of a file. */
typedef struct {
    int fd;
    off_t offset;
    size_t num_bytes;
} Place;

/* Memory as a stream of bytes, with a cursor, and the checksums of the pages before the cursor. */
typedef struct {
    Segment *segments;
    ptrdiff_t num_segments;
    ptrdiff_t segment;   /* the cursor: this segment, */
    size_t offset;       /* and so many bytes of it */
    void *state;         /* of the checksum of a page that is looked at in parts */
    char *digests;       /* where they go; NULL if nobody wants them */
    ptrdiff_t num_done;   /* pages before the cursor */
} Stream;

/* What lies between pages is read to `scrap`, and nobody looks at it; written are `zeros`. */
extern char scrap[MAX_GAP_BYTES];
extern const char zeros[MAX_GAP_BYTES];

/* Take the functions of XXH3 from a loaded library; whether it has them all. To be called once. */
bool bind_checksum(const char *library_path);

/* Move a stream between memory and its places, one after the other, and compute its checksums.
 *
 * Goes on a chunk at a time, so that the checksum finds the bytes in the processor's cache. Returns
 * an error number: 0 also where a file ends, and then `num_done` says which pages were read.
 */
int move_stream(Stream *stream, Place *places, ptrdiff_t num_places, size_t chunk_bytes,
                bool writes);

/* Compute the checksums of a stream; an error number. */
int hash_stream(Stream *stream);

/* Free what a stream needed on its way. */
void end_stream(Stream *stream);

#endif
