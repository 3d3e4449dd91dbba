/* A stream of pages moved with several requests in a disk's queue at once. */

#ifndef HICACHE_PAGE_QUEUE_H
#define HICACHE_PAGE_QUEUE_H

#include "page_stream.h"

enum { MAX_REQUESTS = 16 };

/* Whether threads can have queues from now on. To be called once, before `move_queued`. */
bool prepare_queues(void);

/* As `move_stream`, with up to `num_requests` of `chunk_bytes` each under way at once.
 *
 * That needs descriptors for direct I/O: with others each request is done before the next begins.
 * Where the kernel gives no queue, `move_stream` does it, as much at a time. Whatever it returns, no
 * request is under way any more.
 */
int move_queued(Stream *stream, Place *places, ptrdiff_t num_places, size_t chunk_bytes,
                size_t num_requests, bool writes);

#endif
