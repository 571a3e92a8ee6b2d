/* Memory for large outputs, kept for the next one.
 *
 * malloc maps a block over 32 MiB afresh each time and hands the end of its heap back, and writing to
 * pages that nobody has touched costs more than the rotation. A block here is made of huge pages and,
 * once its tensor is gone, waits for another output of about its size. All but the latest of them are
 * meanwhile the system's to take: they stay resident only as long as nobody needs the memory. */
#include <sys/mman.h>

enum {
    HUGE_PAGE = 2 << 20,
    PAGE = 4 << 10, /* what addresses are told apart by */
    GRAIN = 64 << 10, /* of blocks: a whole page on every system */
    KEPT_BLOCKS = 64,
    LATEST = 128 << 20, /* bytes that are not offered to the system: offering costs some 50 us */
    DIMS = 4,
    FIRST_SIZE = 3, /* of the arguments of empty() */
};

typedef struct {
    char *start;
    size_t bytes;
    int offered;
} Block;

static struct {
    size_t limit, bytes; /* that may be kept, and that are */
    int count;
    Block blocks[KEPT_BLOCKS]; /* the oldest first */
    char busy;
} kept = {.limit = (size_t)1 << 30};

/* Whoever finds the list in use does without it: nobody waits, not even a forked child whose parent
 * held it for good. */
static int hold_kept(void) { return !__atomic_test_and_set(&kept.busy, __ATOMIC_ACQUIRE); }
static void leave_kept(void) { __atomic_clear(&kept.busy, __ATOMIC_RELEASE); }

/* Bytes of a block as limits count them: without what take_block() adds to a round size. */
static size_t counted(Block block) { return block.bytes - GRAIN; }

static Block remove_kept(int i)
{
    const Block block = kept.blocks[i];
    kept.bytes -= counted(block), kept.count--;
    memmove(kept.blocks + i, kept.blocks + i + 1, (size_t)(kept.count - i) * sizeof block);
    return block;
}

static void shrink_kept(size_t bytes, int count)
{
    while (kept.bytes > bytes || kept.count > count) {
        const Block oldest = remove_kept(0);
        munmap(oldest.start, oldest.bytes);
    }
}

static Block map_block(size_t bytes)
{
    /* One huge page more, to cut a block from that starts where one does. */
    char *const start = mmap(NULL, bytes + HUGE_PAGE, PROT_READ | PROT_WRITE,
                             MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (start == MAP_FAILED) return (Block){NULL, 0, 0};
    const size_t before = -(uintptr_t)start & (HUGE_PAGE - 1);
    if (before) munmap(start, before);
    munmap(start + before + bytes, HUGE_PAGE - before);
    madvise(start + before, bytes, MADV_HUGEPAGE);
    return (Block){start + before, bytes, 0};
}

/* The smallest kept block that holds so many bytes from anywhere in its first page on, unless an eighth
 * would lie idle; or a new one. */
static Block take_block(size_t bytes)
{
    Block found = {NULL, 0, 0};
    bytes = (bytes + PAGE + GRAIN - 1) & -(size_t)GRAIN;
    if (hold_kept()) {
        int best = -1;
        for (int i = 0; i < kept.count; i++) {
            const size_t has = kept.blocks[i].bytes;
            if (has < bytes || has > bytes + bytes / 8) continue;
            /* Of equals the last: it may still be in a cache. */
            if (best < 0 || has <= kept.blocks[best].bytes) best = i;
        }
        if (best >= 0) found = remove_kept(best);
        leave_kept();
    }
    if (!found.start) found = map_block(bytes);
    if (!found.start && hold_kept()) {
        /* What waits for nobody may be what is missing. */
        shrink_kept(0, 0);
        leave_kept();
        found = map_block(bytes);
    }
    return found;
}

static void give_block(Block block)
{
    if (!hold_kept()) {
        munmap(block.start, block.bytes);
        return;
    }
    const size_t limit = kept.limit, fits = counted(block) <= limit;
    shrink_kept(fits ? limit - counted(block) : limit, KEPT_BLOCKS - 1);
    if (!fits) {
        leave_kept();
        munmap(block.start, block.bytes);
        return;
    }
    block.offered = 0;
    kept.bytes += counted(block);
    kept.blocks[kept.count++] = block;
#ifdef MADV_FREE
    size_t latest = 0;
    for (int i = kept.count - 1; i >= 0; i--) {
        Block *const each = &kept.blocks[i];
        if ((latest += counted(*each)) <= LATEST || each->offered) continue;
        madvise(each->start, each->bytes, MADV_FREE);
        each->offered = 1;
    }
#endif
    leave_kept();
}

/* A tensor as DLPack hands it on (its DLManagedTensor, up to the deleter), and its block. */
typedef struct Loan {
    void *data;
    int32_t device_type, device_id, ndim;
    struct {
        uint8_t code, bits;
        uint16_t lanes;
    } dtype;
    int64_t *shape, *strides;
    uint64_t byte_offset;
    void *context;
    void (*deleter)(struct Loan *);
    int64_t sizes[2 * DIMS];
    Block block;
} Loan;

static void end_loan(Loan *loan)
{
    give_block(loan->block);
    free(loan);
}

static void end_unused_loan(PyObject *capsule)
{
    /* Whoever takes the tensor renames the capsule. */
    if (PyCapsule_IsValid(capsule, "dltensor")) end_loan(PyCapsule_GetPointer(capsule, "dltensor"));
}

/* Where in its page an output starts. A load seems to wait for a store before it whose address ends in
 * the same 12 bits, so an output lies half a page from its input, and neither meets the other. */
static size_t apart_from(uintptr_t input)
{
    return (input + PAGE / 2) & (PAGE - 1) & -(size_t)CACHE_LINE;
}

/* empty(DLPack's type code, bits, address of the input, shape, strides): a DLPack capsule of memory
 * nobody has written. */
static PyObject *py_empty(PyObject *self, PyObject *const *args, Py_ssize_t given)
{
    long long numbers[FIRST_SIZE + 2 * DIMS];
    (void)self;
    if (given != FIRST_SIZE + 2 * DIMS)
        return PyErr_Format(PyExc_TypeError, "%zd arguments given, %d wanted", given,
                            FIRST_SIZE + 2 * DIMS);
    for (int i = 0; i < given; i++)
        if ((numbers[i] = PyLong_AsLongLong(args[i])) == -1 && PyErr_Occurred()) return NULL;
    Loan *const loan = calloc(1, sizeof *loan);
    if (!loan) return PyErr_NoMemory();
    i64 last = 0;
    for (int i = 0; i < 2 * DIMS; i++) loan->sizes[i] = numbers[FIRST_SIZE + i];
    for (int i = 0; i < DIMS; i++) last += (loan->sizes[i] - 1) * loan->sizes[DIMS + i];
    const size_t start = apart_from((uintptr_t)numbers[2]);
    loan->block = take_block((size_t)(last + 1) * (size_t)(numbers[1] / 8));
    if (!loan->block.start) {
        free(loan);
        return PyErr_NoMemory();
    }
    loan->data = loan->block.start + start;
    loan->device_type = 1; /* the CPU */
    loan->ndim = DIMS;
    loan->dtype.code = (uint8_t)numbers[0];
    loan->dtype.bits = (uint8_t)numbers[1];
    loan->dtype.lanes = 1;
    loan->shape = loan->sizes, loan->strides = loan->sizes + DIMS;
    loan->deleter = end_loan;
    PyObject *const capsule = PyCapsule_New(loan, "dltensor", end_unused_loan);
    if (!capsule) end_loan(loan);
    return capsule;
}

/* keep(bytes): how much memory may wait for the next output; what is over goes back at once. */
static PyObject *py_keep(PyObject *self, PyObject *bytes)
{
    const long long limit = PyLong_AsLongLong(bytes);
    (void)self;
    if (limit == -1 && PyErr_Occurred()) return NULL;
    kept.limit = (size_t)limit;
    if (hold_kept()) {
        shrink_kept(kept.limit, KEPT_BLOCKS);
        leave_kept();
    }
    return PyLong_FromSize_t(kept.bytes);
}
