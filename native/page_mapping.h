/* Reads of a stream out of the page cache itself, without the kernel's copy. */

#ifndef HICACHE_PAGE_MAPPING_H
#define HICACHE_PAGE_MAPPING_H

#include "page_stream.h"

/* As `move_stream`, for reads.
 *
 * What is mapped and in the page cache goes past the processor's caches to where it belongs, and is
 * looked at on its way, which is faster than a system call. That is not done for a few bytes, nor
 * where somebody else handles SIGBUS, the kernel's answer to a disk that fails meanwhile: then
 * `move_stream` does it.
 */
int move_mapped(Stream *stream, Place *places, ptrdiff_t num_places, size_t chunk_bytes);

#endif
