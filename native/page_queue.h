/* A stream of pages moved with several requests in a disk's queue at once. */

#ifndef HICACHE_PAGE_QUEUE_H
#define HICACHE_PAGE_QUEUE_H

#include "page_stream.h"

enum { MAX_REQUESTS = 16 };

/* Whether threads can have queues from now on. To be called once, before `move_queued`. */
bool prepare_queues(void);

/* A place in a stream that somebody waits for.
 *
 * `reach` is called by the thread that moves the stream, once, when all before the mark has been
 * moved and its checksums are there, while the requests behind it are under way. It must not take
 * long; to move another stream meanwhile takes no queue. False breaks the move off.
 */
typedef struct {
    size_t num_bytes; /* before the mark */
    bool (*reach)(void *context);
    void *context;
} Mark;

/* As `move_stream`, with up to `num_requests` of `chunk_bytes` each under way at once.
 *
 * That needs descriptors for direct I/O: with others each request is done before the next begins.
 * Where the kernel gives no queue, `move_stream` does it, as much at a time. Whatever it returns, no
 * request is under way any more. Without a queue, and without a `mark`, nobody is told; ECANCELED where
 * that broke the move off.
 */
int move_queued(Stream *stream, Place *places, ptrdiff_t num_places, size_t chunk_bytes,
                size_t num_requests, bool writes, const Mark *mark);

#endif
