#define _GNU_SOURCE
#include "page_queue.h"

#include <errno.h>
#include <linux/aio_abi.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* -- a thread's queue ----------------------------------------------------------------------- */

typedef struct {
    struct iocb control;
    struct iovec vectors[MAX_VECTORS];
    size_t wanted;
    int64_t moved; /* an error number below zero */
    bool under_way;
} Request;

/* The kernel takes some ten milliseconds to give a queue up, so a thread keeps its own. */
typedef struct {
    aio_context_t context; /* 0: none */
    pid_t pid;             /* a forked process does not have its parent's */
    bool in_use;
    Request requests[MAX_REQUESTS];
} Queue;

/* So much takes 50 us: a disk that has done all its requests meanwhile has not waited for long. */
enum { MAX_LOOK_BYTES = 512 << 10 };

/* Requests that may still be under way before a mark when those behind it are submitted.
 *
 * A disk may say that requests are done when it has nothing else to do, and not before: so what lies
 * behind a mark is held back until the mark is nearly reached. One is left because a disk that has
 * nothing to do at all is slower.
 */
enum { MAX_BEFORE_MARK = 1 };

static pthread_key_t key_of_queue;

static void give_up(Queue *queue)
{
    if (queue->context && queue->pid == getpid())
        syscall(SYS_io_destroy, queue->context);
    queue->context = 0;
}

/* Called as a thread ends. */
static void free_queue(void *queue)
{
    give_up(queue);
    free(queue);
}

bool prepare_queues(void)
{
    return pthread_key_create(&key_of_queue, free_queue) == 0;
}

/* Return the queue of this thread, NULL if there is none to be had or it is in use already. */
static Queue *own_queue(void)
{
    Queue *queue = pthread_getspecific(key_of_queue);
    if (!queue) {
        queue = calloc(1, sizeof *queue);
        if (!queue || pthread_setspecific(key_of_queue, queue)) {
            free(queue);
            return NULL;
        }
    }
    if (queue->in_use)
        return NULL;
    if (queue->context && queue->pid == getpid())
        return queue;
    queue->context = 0;
    queue->pid = getpid();
    return syscall(SYS_io_setup, MAX_REQUESTS, &queue->context) ? NULL : queue;
}

/* -- requests ------------------------------------------------------------------------------- */

/* A move that goes on: where the next request begins, and which those under way are. */
typedef struct {
    Queue *queue;
    Stream *stream;
    Cursor ahead; /* of the next request; the stream's own is where checksums are computed */
    Place *place;
    size_t chunk_bytes;
    size_t num_requests;
    size_t num_bytes;     /* to be moved */
    size_t next;          /* number of the next request, */
    size_t oldest;        /* and of the oldest one that may be under way */
    size_t num_submitted; /* bytes of all requests so far, */
    size_t num_moved;     /* of those that are done, */
    size_t num_looked_at; /* and those that the checksums have seen */
    const Mark *mark;     /* NULL: none is ahead */
    bool ended;           /* a file is shorter than what was to be read from it */
    bool writes;
} Move;

static Request *request_of(const Move *move, size_t number)
{
    return &move->queue->requests[number % MAX_REQUESTS];
}

static size_t smaller(size_t one, size_t other)
{
    return one < other ? one : other;
}

/* Whether what lies behind the mark has to wait. */
static bool waits_at_mark(const Move *move)
{
    return move->mark && move->num_submitted == move->mark->num_bytes &&
           move->next - move->oldest > MAX_BEFORE_MARK;
}

/* Submit the next request; an error number. */
static int submit(Move *move, const Place *place)
{
    Request *request = request_of(move, move->next);
    Cursor ahead = move->ahead;
    size_t most = smaller(place->num_bytes, move->chunk_bytes);
    if (move->mark && move->num_submitted < move->mark->num_bytes)
        most = smaller(most, move->mark->num_bytes - move->num_submitted);
    int count = gather(move->stream, &ahead, most, request->vectors, &request->wanted);
    request->control = (struct iocb){
        .aio_data = (uintptr_t)request,
        .aio_lio_opcode = move->writes ? IOCB_CMD_PWRITEV : IOCB_CMD_PREADV,
        .aio_fildes = (uint32_t)place->fd,
        .aio_buf = (uintptr_t)request->vectors,
        .aio_nbytes = (uint64_t)count,
        .aio_offset = place->offset,
    };
    struct iocb *control = &request->control;
    request->under_way = true;
    if (syscall(SYS_io_submit, move->queue->context, 1, &control) != 1) {
        request->under_way = false;
        return errno;
    }
    move->ahead = ahead;
    move->next++;
    return 0;
}

/* Submit what there is to submit, and as much as may be under way; an error number. */
static int submit_more(Move *move)
{
    while (!move->ended && move->next - move->oldest < move->num_requests) {
        if (move->num_submitted == move->num_bytes || waits_at_mark(move))
            return 0;
        while (!move->place->num_bytes)
            move->place++;
        int error = submit(move, move->place);
        /* The kernel may have no room for more at present. */
        if (error)
            return error == EAGAIN && move->next > move->oldest ? 0 : error;
        size_t wanted = request_of(move, move->next - 1)->wanted;
        move->place->offset += (off_t)wanted;
        move->place->num_bytes -= wanted;
        move->num_submitted += wanted;
    }
    return 0;
}

/* Note which requests are done, after waiting for one if told to.
 *
 * An error number if nobody can tell, and then none is under way.
 */
static int collect(const Move *move, bool waits)
{
    struct io_event events[MAX_REQUESTS];
    struct timespec at_once = {0};
    long count = syscall(SYS_io_getevents, move->queue->context, waits, MAX_REQUESTS, events,
                         waits ? NULL : &at_once);
    if (count < 0 && errno != EINTR) {
        int error = errno;
        give_up(move->queue);
        for (size_t number = move->oldest; number < move->next; number++)
            request_of(move, number)->under_way = false;
        return error;
    }
    for (long event = 0; event < count; event++) {
        Request *done = (Request *)(uintptr_t)events[event].data;
        done->moved = events[event].res;
        done->under_way = false;
    }
    return 0;
}

/* Forget the oldest requests, as far as they are done; an error number. */
static int forget_done(Move *move)
{
    while (!move->ended && move->oldest < move->next) {
        const Request *request = request_of(move, move->oldest);
        if (request->under_way)
            break;
        move->oldest++;
        if (request->moved < 0)
            return (int)-request->moved;
        move->num_moved += (size_t)request->moved;
        move->ended = (size_t)request->moved < request->wanted;
    }
    return move->ended && move->writes ? EIO : 0;
}

/* Return of how many bytes there can be checksums by now. */
static size_t num_ready(const Move *move)
{
    return move->writes ? move->num_bytes : move->num_moved;
}

/* Compute checksums of what there is, but not for long; an error number. */
static int look_at_more(Move *move)
{
    size_t part = smaller(num_ready(move) - move->num_looked_at, MAX_LOOK_BYTES);
    move->num_looked_at += part;
    return pass_over(move->stream, part) ? 0 : ENOMEM;
}

/* Tell whoever waits for it that the mark is reached; an error number. */
static int pass_mark(Move *move)
{
    const Mark *mark = move->mark;
    if (!mark || move->num_moved < mark->num_bytes || move->num_looked_at < mark->num_bytes)
        return 0;
    move->mark = NULL;
    return mark->reach(mark->context) ? 0 : ECANCELED;
}

/* Whether checksums have seen all that can be seen at present. */
static bool has_seen_all(const Move *move)
{
    return move->num_looked_at == num_ready(move);
}

/* Move all; leaves requests under way after an error, and at the end of a file.
 *
 * Between two pieces of checksums it looks whether the disk is done with something, so that the disk
 * always has the next requests: what is written is looked at while the disk has anything, and what was
 * read while it has what comes next.
 */
static int run(Move *move)
{
    for (;;) {
        int error = submit_more(move);
        if (!error)
            error = look_at_more(move);
        if (!error)
            error = pass_mark(move);
        bool idle = move->oldest == move->next || move->ended;
        bool seen = has_seen_all(move);
        if (error || (idle && seen))
            return error;
        if (!idle)
            error = collect(move, seen);
        if (!error)
            error = forget_done(move);
        if (error)
            return error;
    }
}

/* Wait until no request is under way. */
static void wait_for_all(Move *move)
{
    for (; move->oldest < move->next; move->oldest++)
        while (request_of(move, move->oldest)->under_way)
            collect(move, true);
}

/* Return how many bytes a stream has from its cursor on, or the places if that is less. */
static size_t bytes_to_move(const Stream *stream, const Place *places, ptrdiff_t num_places)
{
    size_t in_stream = 0, in_places = 0;
    for (ptrdiff_t number = stream->cursor.segment; number < stream->num_segments; number++)
        in_stream += stream->segments[number].num_bytes;
    for (ptrdiff_t number = 0; number < num_places; number++)
        in_places += places[number].num_bytes;
    return smaller(in_stream - stream->cursor.offset, in_places);
}

int move_queued(Stream *stream, Place *places, ptrdiff_t num_places, size_t chunk_bytes,
                size_t num_requests, bool writes, const Mark *mark)
{
    Queue *queue = own_queue();
    if (!queue)
        return move_stream(stream, places, num_places, chunk_bytes * num_requests, writes);
    Move move = {
        .queue = queue,
        .stream = stream,
        .ahead = stream->cursor,
        .place = places,
        .chunk_bytes = chunk_bytes,
        .num_requests = num_requests,
        .num_bytes = bytes_to_move(stream, places, num_places),
        .writes = writes,
        .mark = mark,
    };
    queue->in_use = true;
    int error = run(&move);
    wait_for_all(&move);
    queue->in_use = false;
    return error;
}
