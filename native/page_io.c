/* Reads and writes of pages with their checksums, each in a call that does not hold Python's lock.
 *
 * A page is a tuple of (address, length) pieces of host memory; pages of a call follow each other on
 * the disk, with `gap_bytes` between one and the next. Where they lie is a sequence of (descriptor,
 * offset, length) places, filled one after the other, `chunk_bytes` at a time; with direct I/O,
 * `num_requests` of those can be in the disk's queue at once. A fourth member of a place tells where
 * its file is mapped: what is in the page cache is copied from there. Checksums are XXH3-128 over the
 * pieces of each page, as `xxhash.xxh3_128_digest` gives them: the library of that package computes
 * them.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "page_mapping.h"
#include "page_queue.h"
#include "page_stream.h"

#include <errno.h>
#include <sys/mman.h>

/* -- from Python's objects ------------------------------------------------------------------ */

static bool as_size(PyObject *object, size_t *value)
{
    *value = PyLong_AsSize_t(object);
    return !(*value == (size_t)-1 && PyErr_Occurred());
}

/* Whether an object is a tuple of that length; false with an error set. */
static bool check_tuple(PyObject *object, Py_ssize_t length, const char *what)
{
    if (PyTuple_Check(object) && PyTuple_GET_SIZE(object) == length)
        return true;
    PyErr_Format(PyExc_TypeError, "expected %s, got %R", what, object);
    return false;
}

static bool read_piece(PyObject *piece, Segment *segment)
{
    size_t address;
    if (!check_tuple(piece, 2, "a piece as (address, number of bytes)") ||
        !as_size(PyTuple_GET_ITEM(piece, 0), &address) ||
        !as_size(PyTuple_GET_ITEM(piece, 1), &segment->num_bytes))
        return false;
    if (!address || !segment->num_bytes) {
        PyErr_SetString(PyExc_ValueError, "a piece needs an address and at least one byte");
        return false;
    }
    segment->base = (char *)address;
    return true;
}

static bool read_page(PyObject *page, Segment *segments, Py_ssize_t num_pieces)
{
    for (Py_ssize_t piece = 0; piece < num_pieces; piece++) {
        Segment *segment = &segments[piece];
        if (!read_piece(PyTuple_GET_ITEM(page, piece), segment))
            return false;
        segment->begins_page = piece == 0;
        segment->ends_page = piece == num_pieces - 1;
        segment->is_gap = false;
    }
    return true;
}

static Py_ssize_t count_pieces(PyObject *page)
{
    if (PyTuple_Check(page) && PyTuple_GET_SIZE(page))
        return PyTuple_GET_SIZE(page);
    PyErr_Format(PyExc_TypeError, "expected a page as a tuple of pieces, got %R", page);
    return -1;
}

/* Fill `stream` with pages[first : first + num_pages]; false with an error set. */
static bool read_pages_into(Stream *stream, PyObject *pages, Py_ssize_t first, Py_ssize_t num_pages,
                            size_t gap_bytes, bool writes)
{
    PyObject *sequence = PySequence_Fast(pages, "pages must be a sequence");
    if (!sequence)
        return false;
    bool done = false;
    Py_ssize_t length = PySequence_Fast_GET_SIZE(sequence), total = 0;
    if (first < 0 || num_pages < 0 || num_pages > length - first || gap_bytes > MAX_GAP_BYTES) {
        PyErr_Format(PyExc_ValueError, "no pages %zd to %zd of %zd with gaps of %zu bytes", first,
                     first + num_pages, length, gap_bytes);
        goto out;
    }
    PyObject **items = PySequence_Fast_ITEMS(sequence) + first;
    for (Py_ssize_t page = 0; page < num_pages; page++) {
        Py_ssize_t num_pieces = count_pieces(items[page]);
        if (num_pieces < 0)
            goto out;
        total += num_pieces + 1;
    }
    stream->segments = PyMem_New(Segment, (size_t)(total ? total : 1));
    if (!stream->segments) {
        PyErr_NoMemory();
        goto out;
    }
    Segment *segment = stream->segments;
    for (Py_ssize_t page = 0; page < num_pages; page++) {
        Py_ssize_t num_pieces = PyTuple_GET_SIZE(items[page]);
        if (!read_page(items[page], segment, num_pieces))
            goto out;
        segment += num_pieces;
        if (gap_bytes && page < num_pages - 1)
            *segment++ = (Segment){.base = writes ? (char *)zeros : scrap,
                                   .num_bytes = gap_bytes,
                                   .is_gap = true};
    }
    stream->num_segments = segment - stream->segments;
    done = true;
out:
    Py_DECREF(sequence);
    return done;
}

static bool read_place(PyObject *item, Place *place)
{
    bool is_mapped = PyTuple_Check(item) && PyTuple_GET_SIZE(item) == 4;
    size_t offset = 0, mapping = 0;
    bool good = check_tuple(item, is_mapped ? 4 : 3,
                            "a place as (descriptor, offset, number of bytes) or with a mapping") &&
                as_size(PyTuple_GET_ITEM(item, 1), &offset) &&
                as_size(PyTuple_GET_ITEM(item, 2), &place->num_bytes) &&
                (!is_mapped || as_size(PyTuple_GET_ITEM(item, 3), &mapping));
    place->fd = good ? PyLong_AsLong(PyTuple_GET_ITEM(item, 0)) : -1;
    place->offset = (off_t)offset;
    place->mapping = (const char *)mapping;
    return good && !PyErr_Occurred();
}

static Place *read_places(PyObject *places, Py_ssize_t *num_places)
{
    PyObject *sequence = PySequence_Fast(places, "places must be a sequence");
    if (!sequence)
        return NULL;
    *num_places = PySequence_Fast_GET_SIZE(sequence);
    Place *found = PyMem_New(Place, (size_t)(*num_places ? *num_places : 1));
    if (!found)
        PyErr_NoMemory();
    for (Py_ssize_t index = 0; found && index < *num_places; index++) {
        if (!read_place(PySequence_Fast_GET_ITEM(sequence, index), &found[index])) {
            PyMem_Free(found);
            found = NULL;
        }
    }
    Py_DECREF(sequence);
    return found;
}

/* -- the functions -------------------------------------------------------------------------- */

typedef struct {
    PyObject *places;
    PyObject *pages;
    Py_ssize_t first;
    Py_ssize_t num_pages;
    Py_ssize_t gap_bytes;
    Py_ssize_t chunk_bytes;
    Py_ssize_t num_requests;
    Py_ssize_t mark;    /* so many pages are to be written before */
    PyObject *on_mark;  /* is called with their checksums; NULL: nobody waits for that */
    PyObject *checksums;
    bool writes;
} Call;

static bool check_call(const Call *call)
{
    if (call->mark < 0 || call->mark > call->num_pages) {
        PyErr_Format(PyExc_ValueError, "no mark behind %zd of %zd pages", call->mark,
                     call->num_pages);
        return false;
    }
    if (call->gap_bytes >= 0 && call->chunk_bytes >= 1 && call->num_requests >= 1 &&
        call->num_requests <= MAX_REQUESTS)
        return true;
    PyErr_Format(PyExc_ValueError, "gap_bytes or chunk_bytes is too small, or num_requests is not "
                                   "from 1 to %d", MAX_REQUESTS);
    return false;
}

/* Call `on_mark` from within `work`; see `Mark`. */
static bool reach_mark(void *context)
{
    const Call *call = context;
    PyGILState_STATE state = PyGILState_Ensure();
    const char *checksums = PyBytes_AS_STRING(call->checksums);
    PyObject *result = PyObject_CallFunction(call->on_mark, "y#", checksums,
                                             call->mark * DIGEST_BYTES);
    Py_XDECREF(result);
    PyGILState_Release(state);
    return result != NULL;
}

/* Return how many bytes of a stream come before a page. */
static size_t bytes_before(const Stream *stream, Py_ssize_t page)
{
    size_t num_bytes = 0;
    for (const Segment *segment = stream->segments; page; segment++) {
        num_bytes += segment->num_bytes;
        page -= segment->ends_page;
    }
    return num_bytes;
}

/* Do the work of a call without the interpreter's lock; return an error number. */
static int work(Call *call, Stream *stream, Place *places, Py_ssize_t num_places)
{
    Mark mark = {bytes_before(stream, call->mark), reach_mark, call};
    size_t chunk_bytes = (size_t)call->chunk_bytes, num_requests = (size_t)call->num_requests;
    int error;
    Py_BEGIN_ALLOW_THREADS
    if (num_requests > 1) {
        error = move_queued(stream, places, num_places, chunk_bytes, num_requests, call->writes,
                            call->on_mark ? &mark : NULL);
    } else if (call->writes) {
        error = move_stream(stream, places, num_places, chunk_bytes, true);
    } else {
        error = move_mapped(stream, places, num_places, chunk_bytes);
    }
    end_stream(stream);
    Py_END_ALLOW_THREADS
    bool places_too_small = call->writes && stream->cursor.segment < stream->num_segments;
    return !error && places_too_small ? EINVAL : error;
}

/* Return the checksums of the pages that were moved. */
static PyObject *process(Call *call)
{
    Stream stream = {0};
    Place *places = NULL;
    Py_ssize_t num_places = 0;
    PyObject *digests = NULL;
    if (!check_call(call) ||
        !read_pages_into(&stream, call->pages, call->first, call->num_pages,
                         (size_t)call->gap_bytes, call->writes))
        goto out;
    if (!(places = read_places(call->places, &num_places)) ||
        !(digests = PyBytes_FromStringAndSize(NULL, call->num_pages * DIGEST_BYTES)))
        goto out;
    stream.digests = PyBytes_AS_STRING(digests);
    call->checksums = digests;
    int error = work(call, &stream, places, num_places);
    if (error) {
        Py_CLEAR(digests);
        errno = error;
        /* What `on_mark` has raised says more. */
        if (!PyErr_Occurred())
            PyErr_SetFromErrno(PyExc_OSError);
    } else {
        _PyBytes_Resize(&digests, stream.num_done * DIGEST_BYTES);
    }
out:
    PyMem_Free(stream.segments);
    PyMem_Free(places);
    return digests;
}

static PyObject *read_pages(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    Call call = {.writes = false};
    if (!PyArg_ParseTuple(arguments, "OOnnnnn", &call.places, &call.pages, &call.first,
                          &call.num_pages, &call.gap_bytes, &call.chunk_bytes,
                          &call.num_requests))
        return NULL;
    return process(&call);
}

static PyObject *write_pages(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    Call call = {.writes = true};
    if (!PyArg_ParseTuple(arguments, "OOnnnnn|nO", &call.places, &call.pages, &call.first,
                          &call.num_pages, &call.gap_bytes, &call.chunk_bytes,
                          &call.num_requests, &call.mark, &call.on_mark))
        return NULL;
    return process(&call);
}

static PyObject *map_file(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    int fd;
    Py_ssize_t num_bytes;
    if (!PyArg_ParseTuple(arguments, "in", &fd, &num_bytes))
        return NULL;
    void *mapping = mmap(NULL, (size_t)num_bytes, PROT_READ, MAP_SHARED, fd, 0);
    return mapping == MAP_FAILED ? PyErr_SetFromErrno(PyExc_OSError) : PyLong_FromVoidPtr(mapping);
}

static PyObject *unmap(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    Py_ssize_t num_bytes;
    size_t mapping;
    PyObject *address;
    if (!PyArg_ParseTuple(arguments, "On", &address, &num_bytes) || !as_size(address, &mapping))
        return NULL;
    int result;
    Py_BEGIN_ALLOW_THREADS
    result = munmap((void *)mapping, (size_t)num_bytes);
    Py_END_ALLOW_THREADS
    if (result)
        return PyErr_SetFromErrno(PyExc_OSError);
    Py_RETURN_NONE;
}

/* So many pages ahead of the one that is looked at, objects are fetched into the processor's cache:
 * those of a batch can be anywhere in the interpreter's memory. */
enum { PAGES_AHEAD = 8 };

static void fetch_ahead(PyObject **items, Py_ssize_t page, Py_ssize_t num_pages)
{
    if (page + 2 * PAGES_AHEAD < num_pages)
        __builtin_prefetch(items[page + 2 * PAGES_AHEAD]);
    PyObject *next = page + PAGES_AHEAD < num_pages ? items[page + PAGES_AHEAD] : NULL;
    if (next && PyTuple_Check(next) && PyTuple_GET_SIZE(next))
        __builtin_prefetch(PyTuple_GET_ITEM(next, 0));
}

static PyObject *have_length(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    PyObject *pages;
    Py_ssize_t page_bytes;
    if (!PyArg_ParseTuple(arguments, "On", &pages, &page_bytes))
        return NULL;
    PyObject *sequence = PySequence_Fast(pages, "pages must be a sequence");
    if (!sequence)
        return NULL;
    bool right = true;
    Py_ssize_t num_pages = PySequence_Fast_GET_SIZE(sequence);
    PyObject **items = PySequence_Fast_ITEMS(sequence);
    for (Py_ssize_t page = 0; page < num_pages && right; page++) {
        fetch_ahead(items, page, num_pages);
        size_t num_bytes = 0;
        Segment segment;
        Py_ssize_t num_pieces = count_pieces(items[page]);
        for (Py_ssize_t piece = 0; piece < num_pieces && right; piece++) {
            right = read_piece(PyTuple_GET_ITEM(items[page], piece), &segment);
            num_bytes += right ? segment.num_bytes : 0;
        }
        right = right && num_pieces > 0 && num_bytes == (size_t)page_bytes;
    }
    PyErr_Clear();
    Py_DECREF(sequence);
    return PyBool_FromLong(right);
}

/* -- the module ----------------------------------------------------------------------------- */

static bool bind_to_xxhash(void)
{
    PyObject *module = PyImport_ImportModule("xxhash._xxhash");
    PyObject *file = module ? PyObject_GetAttrString(module, "__file__") : NULL;
    const char *path = file ? PyUnicode_AsUTF8(file) : NULL;
    bool bound = path && bind_checksum(path);
    if (!bound && !PyErr_Occurred())
        PyErr_Format(PyExc_ImportError, "%s does not offer the functions of XXH3", path);
    Py_XDECREF(file);
    Py_XDECREF(module);
    return bound;
}

static PyMethodDef functions[] = {
    {"read_pages", read_pages, METH_VARARGS,
     "read_pages(places, pages, first, num_pages, gap_bytes, chunk_bytes, num_requests) -> bytes\n"
     "\nReturn the checksums of the leading pages that were read as a whole."},
    {"write_pages", write_pages, METH_VARARGS,
     "write_pages(places, pages, first, num_pages, gap_bytes, chunk_bytes, num_requests, mark=0,\n"
     "            on_mark=None) -> bytes\n\n"
     "Return the checksums of the pages, all of which are written. With several requests under way\n"
     "at once, `on_mark` is called when so many pages as `mark` are written, with their checksums,\n"
     "while the disk has those behind them; what it raises breaks the call off."},
    {"map_file", map_file, METH_VARARGS,
     "map_file(fd, num_bytes) -> int\n\n"
     "Map a file, which may be shorter, and return the address of its first byte."},
    {"unmap", unmap, METH_VARARGS,
     "unmap(mapping, num_bytes)\n\nUndo `map_file`; nobody reads there any more."},
    {"have_length", have_length, METH_VARARGS,
     "have_length(pages, page_bytes) -> bool\n\n"
     "Return whether all are pages, and of this length."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "hicache.storage._page_io",
    .m_doc = "Reads and writes of pages with their checksums, without the interpreter's lock.",
    .m_size = -1,
    .m_methods = functions,
};

PyMODINIT_FUNC PyInit__page_io(void)
{
    if (!bind_to_xxhash())
        return NULL;
    if (!prepare_queues())
        return PyErr_Format(PyExc_ImportError, "this process has no key left for its threads");
    return PyModule_Create(&definition);
}
