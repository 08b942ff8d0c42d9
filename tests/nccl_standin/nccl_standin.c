/* A stand-in for NCCL, for tests on machines without a GPU. This is not NCCL: see __init__.py beside this file for what
 * it does, for the environment variables that plant failures, and for the functions that read its log.
 *
 * From top to bottom: what processes share, communicators, one operation as a state machine, batches of operations that
 * move forward together, calls and groups, the asynchronous mode, the 22 functions of NCCL, the functions of our own.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

#include "reductions.h"

#define API __attribute__((visibility("default")))
#define VERSION 29999 /* 2.99.99: no NCCL has it */

typedef enum {
    ncclSuccess,
    ncclUnhandledCudaError,
    ncclSystemError,
    ncclInternalError,
    ncclInvalidArgument,
    ncclInvalidUsage,
    ncclRemoteError,
    ncclInProgress,
    RESULTS
} ncclResult_t;

typedef struct {
    char internal[128];
} ncclUniqueId;
typedef struct ncclComm *ncclComm_t;

enum {
    MAX_RANKS = 127,
    PIECE = 1 << 16, /* bytes of a rank's tensor that are on the way at once */
    RING = 1 << 16,  /* bytes on the way from one rank to another, a power of two */
};

typedef enum {
    ALL_REDUCE,
    REDUCE,
    BROADCAST,
    BCAST,
    ALL_GATHER,
    REDUCE_SCATTER,
    SEND,
    RECV,
    SPLIT,
    UNIQUE_ID, /* from here on only logged */
    INIT,
    DESTROY,
    ABORT,
    GROUP_START,
    GROUP_END,
    KINDS
} Kind;

static const char *const KIND[KINDS] = {
    "AllReduce", "Reduce", "Broadcast", "Bcast",       "AllGather",  "ReduceScatter", "Send",     "Recv",
    "CommSplit", "GetUniqueId", "CommInitRank", "CommDestroy", "CommAbort", "GroupStart", "GroupEnd",
};

static bool reduces(Kind k) { return k == ALL_REDUCE || k == REDUCE || k == REDUCE_SCATTER; }
static bool rooted(Kind k) { return k == REDUCE || k == BROADCAST || k == BCAST; }
static bool is_message(Kind k) { return k == SEND || k == RECV; }

/* --- What processes share ---------------------------------------------------------------------------------------
 *
 * One anonymous segment of memory a communicator. Nothing in it needs to be set up, since its zeros are the initial
 * state. It has no name in /dev/shm: a process that joins opens it through the file descriptor of the one that made it,
 * so nothing is left behind however a job ends, and a small /dev/shm (containers) is no limit. */

typedef struct { /* what one rank says that it calls */
    int kind, type, reduction, root;
    size_t count;
    int color, key;
} Record;

typedef struct { /* where a segment is: the contents of a unique id */
    char magic[16];
    int64_t process, descriptor;
    uint64_t identity;
} Ticket;

static const char MAGIC[16] = "nccl_standin 1";

typedef struct {
    uint64_t identity; /* that of its ticket: a reused process or descriptor number is noticed */
    _Atomic int size, attached, released;
    _Atomic int failed, aborted; /* 1 + the first rank that gave up */
} Header;

typedef struct { /* of one rank; written by it alone. Counters only grow */
    _Alignas(128) _Atomic uint64_t arrived; /* collectives that it has come to */
    _Atomic uint64_t staged, consumed;      /* pieces that it has put into its stage, and read from the others' */
    _Atomic uint64_t offered;               /* the split for which `offer` is set */
    _Atomic int taken, gone;
    Record records[2]; /* nobody can be two collectives ahead */
    Ticket offer;
} Seat;

typedef struct { /* from one rank to another */
    _Alignas(128) _Atomic uint64_t sends, receives; /* messages announced by the sender, by the receiver */
    _Atomic uint64_t written, read;                 /* bytes */
    Record send[2], receive[2];
    unsigned char ring[RING];
} Channel;

static size_t segment_bytes(int size) {
    size_t n = (size_t)size;
    return 4096 + n * sizeof(Seat) + n * 2 * PIECE + n * n * sizeof(Channel);
}

struct ncclComm {
    Header *shared;
    int rank, size, device;
    uint64_t calls, pieces;           /* collectives begun; pieces they had */
    uint64_t *messages[2];            /* [SEND or RECV - SEND][peer], begun */
    _Atomic int references, running;  /* operations hold references; batches in flight */
    _Atomic int closed, error;        /* destroyed or aborted here; the asynchronous error */
    pthread_mutex_t driving;
};

static Seat *seat(const struct ncclComm *comm, int rank) { return (Seat *)((char *)comm->shared + 4096) + rank; }

static unsigned char *stage(const struct ncclComm *comm, int rank, uint64_t piece) {
    return (unsigned char *)seat(comm, comm->size) + ((size_t)rank * 2 + piece % 2) * PIECE;
}

static Channel *channel(const struct ncclComm *comm, int from, int to) {
    return (Channel *)stage(comm, comm->size, 0) + (size_t)from * (size_t)comm->size + to;
}

/* --- Saying, waiting, and what the environment asks for ---------------------------------------------------------- */

/* One line in one write, so that the ranks' lines do not mix. */
static void say(const struct ncclComm *comm, const char *format, ...) {
    char line[1024];
    int used = snprintf(line, sizeof line, "nccl_standin: ");
    if (comm)
        used += snprintf(line + used, sizeof line - (size_t)used, "rank %d of %d, communicator %04x: ", comm->rank,
                         comm->size, (unsigned)(comm->shared->identity & 0xffff));
    va_list arguments;
    va_start(arguments, format);
    int more = vsnprintf(line + used, sizeof line - (size_t)used, format, arguments);
    va_end(arguments);
    used = used + more < (int)sizeof line - 1 ? used + more : (int)sizeof line - 2;
    line[used] = '\n';
    if (write(STDERR_FILENO, line, (size_t)used + 1) < 0) return;
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void rest(double seconds) {
    struct timespec t = {(time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9)};
    nanosleep(&t, NULL);
}

static double setting(const char *name, double otherwise) {
    const char *text = getenv(name);
    return text && *text ? atof(text) : otherwise;
}

static bool is_set(const char *name) {
    const char *text = getenv(name);
    return text && *text;
}

typedef struct {
    unsigned turns;
    double since, limit;
} Patience;

/* Called when there is nothing to do; true once that has lasted for NCCL_STANDIN_TIMEOUT seconds. Few cores and more
 * ranks: spin shortly, then let the others run, and sleep when it takes long. */
static bool out_of_patience(Patience *patience) {
    if (patience->turns++ < 100) return false;
    if (patience->turns == 101) {
        patience->since = now();
        patience->limit = setting("NCCL_STANDIN_TIMEOUT", 30);
    }
    sched_yield();
    if (patience->turns % 16) return false;
    double waited = now() - patience->since;
    if (waited > 0.02) rest(0.0002);
    return waited > patience->limit;
}

/* --- Communicators ---------------------------------------------------------------------------------------------- */

static ncclResult_t make_segment(Ticket *ticket) {
    memset(ticket, 0, sizeof *ticket);
    memcpy(ticket->magic, MAGIC, sizeof MAGIC);
    ticket->process = getpid();
    ticket->descriptor = memfd_create("nccl_standin", MFD_CLOEXEC);
    if (ticket->descriptor < 0 ||
        getrandom(&ticket->identity, sizeof ticket->identity, 0) != sizeof ticket->identity ||
        pwrite((int)ticket->descriptor, &ticket->identity, sizeof ticket->identity, 0) < 0 ||
        ftruncate((int)ticket->descriptor, (off_t)segment_bytes(MAX_RANKS))) { /* costs nothing: holes */
        say(NULL, "no shared memory: %s", strerror(errno));
        return ncclSystemError;
    }
    return ncclSuccess;
}

static void let_go(struct ncclComm *comm) {
    if (atomic_fetch_sub(&comm->references, 1) > 1) return;
    munmap(comm->shared, segment_bytes(comm->size));
    pthread_mutex_destroy(&comm->driving);
    free(comm->messages[0]);
    free(comm->messages[1]);
    free(comm);
}

static void *map_segment(const Ticket *ticket, int size) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", (int)ticket->process, (int)ticket->descriptor);
    int file = open(path, O_RDWR | O_CLOEXEC);
    uint64_t identity = 0;
    if (file < 0 || pread(file, &identity, sizeof identity, 0) < 0 || identity != ticket->identity) {
        say(NULL, "the unique id of process %d is not valid (any more): %s", (int)ticket->process,
            file < 0 ? strerror(errno) : "it stands for something else");
        if (file >= 0) close(file);
        return NULL;
    }
    void *memory = mmap(NULL, segment_bytes(size), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (memory == MAP_FAILED) say(NULL, "no shared memory: %s", strerror(errno));
    close(file);
    return memory == MAP_FAILED ? NULL : memory;
}

/* Waits for all ranks to attach. Names those that did not. */
static ncclResult_t wait_for_all(struct ncclComm *comm) {
    Patience patience = {0};
    while (atomic_load(&comm->shared->attached) < comm->size) {
        int failed = atomic_load(&comm->shared->failed);
        if (failed) {
            say(comm, "rank %d gave up the initialisation", failed - 1);
            return ncclRemoteError;
        }
        if (out_of_patience(&patience) && atomic_load(&comm->shared->attached) < comm->size) {
            char names[256] = "";
            for (int r = 0, used = 0; r < comm->size && used < 240; r++)
                if (!atomic_load(&seat(comm, r)->taken))
                    used += snprintf(names + used, sizeof names - (size_t)used, "%s%d", used ? ", " : "", r);
            atomic_store(&comm->shared->failed, comm->rank + 1);
            say(comm, "initialisation: after %g s rank(s) %s have not come", patience.limit, names);
            return ncclRemoteError;
        }
    }
    return ncclSuccess;
}

static ncclResult_t join(const Ticket *ticket, int size, int rank, int device, struct ncclComm **made) {
    *made = NULL;
    Header *shared = map_segment(ticket, size);
    if (!shared) return ncclSystemError;
    struct ncclComm *comm = calloc(1, sizeof *comm);
    *comm = (struct ncclComm){.shared = shared, .rank = rank, .size = size, .device = device, .references = 1};
    for (int i = 0; i < 2; i++) comm->messages[i] = calloc((size_t)size, sizeof(uint64_t));
    pthread_mutex_init(&comm->driving, NULL);

    ncclResult_t result = ncclSuccess;
    int none = 0, free_seat = 0;
    if (!atomic_compare_exchange_strong(&shared->size, &none, size) && none != size) {
        say(comm, "initialisation: another rank says that there are %d ranks", none);
        result = ncclInvalidUsage;
    } else if (!atomic_compare_exchange_strong(&seat(comm, rank)->taken, &free_seat, 1)) {
        say(comm, "initialisation: this rank or unique id is used twice");
        result = ncclInvalidUsage;
    } else {
        atomic_fetch_add(&shared->attached, 1);
        result = wait_for_all(comm);
    }
    if (result == ncclInvalidUsage) atomic_store(&shared->failed, rank + 1);
    if (ticket->process == getpid() && !atomic_exchange(&shared->released, 1)) close((int)ticket->descriptor);
    if (result)
        let_go(comm);
    else
        *made = comm;
    return result;
}

/* --- One operation ---------------------------------------------------------------------------------------------- */

typedef enum { POST, MATCH, PUT, TAKE, OFFER, MOVE, DONE } State;

typedef struct {
    Kind kind;
    const void *send;
    void *receive;
    size_t count;
    int type, reduction, root; /* root: or the peer */
    struct ncclComm *comm;
    uintptr_t stream;
    int color, key;
    struct ncclComm **made;

    size_t after; /* 1 + the operation of the same batch that has to end first, or 0 */
    bool never;   /* planted: does not arrive */
    bool scale_before;
    State state;
    uint64_t number; /* of the collective in its communicator or of the message in its channel, from 1 */
    uint64_t piece;
    size_t done; /* elements of a collective, bytes of a message */
} Operation;

static Record record_of(const Operation *op) {
    return (Record){.kind = op->kind == BCAST ? BROADCAST : (int)op->kind,
                    .type = op->type,
                    .reduction = reduces(op->kind) ? op->reduction : 0,
                    .root = rooted(op->kind) ? op->root : 0,
                    .count = op->count,
                    .color = op->color,
                    .key = op->key};
}

static const char *describe(const Record *r, char *text, size_t room) {
    if (r->kind == SPLIT)
        snprintf(text, room, "CommSplit");
    else {
        int used = snprintf(text, room, "%s(count %zu, %s", KIND[r->kind], r->count, TYPE[r->type].name);
        if (reduces((Kind)r->kind)) used += snprintf(text + used, room - (size_t)used, ", %s", REDUCTION[r->reduction]);
        if (rooted((Kind)r->kind)) used += snprintf(text + used, room - (size_t)used, ", root %d", r->root);
        snprintf(text + used, room - (size_t)used, ")");
    }
    return text;
}

static Channel *channel_of(const Operation *op) {
    int here = op->comm->rank;
    return op->kind == SEND ? channel(op->comm, here, op->root) : channel(op->comm, op->root, here);
}

static size_t message_bytes(const Operation *op) { return op->count * TYPE[op->type].bytes; }

static bool reads_stage_of(const Operation *op, int rank) {
    switch (op->kind) {
        case REDUCE: return op->comm->rank == op->root;
        case BROADCAST:
        case BCAST: return rank == op->root && op->comm->rank != op->root;
        default: return true;
    }
}

/* The first rank of this rank's colour, by key and rank: it makes the new segment. Also the place in that order. */
static int split_leader(const Operation *op, int *place, int *size) {
    const struct ncclComm *comm = op->comm;
    int leader = -1, leader_key = 0;
    *place = *size = 0;
    for (int r = 0; r < comm->size; r++) {
        Record other = seat(comm, r)->records[op->number % 2];
        if (other.color != op->color) continue;
        ++*size;
        if (other.key < op->key || (other.key == op->key && r < comm->rank)) ++*place;
        if (leader < 0 || other.key < leader_key) leader = r, leader_key = other.key;
    }
    return leader;
}

/* The rank for which the operation waits, or -1 if it can go on. */
static int missing(const Operation *op) {
    const struct ncclComm *comm = op->comm;
    switch (op->state) {
        case POST: return op->never ? comm->rank : -1;
        case MATCH:
            if (op->kind == SEND) return atomic_load(&channel_of(op)->receives) < op->number ? op->root : -1;
            if (op->kind == RECV) return atomic_load(&channel_of(op)->sends) < op->number ? op->root : -1;
            for (int r = 0; r < comm->size; r++)
                if (atomic_load(&seat(comm, r)->arrived) < op->number) return r;
            return -1;
        case PUT: /* into a stage whose last piece everybody has read */
            for (int r = 0; r < comm->size; r++)
                if (atomic_load(&seat(comm, r)->consumed) + 2 < op->piece) return r;
            return -1;
        case TAKE:
            for (int r = 0; r < comm->size; r++)
                if (reads_stage_of(op, r) && atomic_load(&seat(comm, r)->staged) < op->piece) return r;
            return -1;
        case OFFER: {
            int place, size, leader = split_leader(op, &place, &size);
            return leader != comm->rank && atomic_load(&seat(comm, leader)->offered) < op->number ? leader : -1;
        }
        case MOVE: {
            uint64_t held = atomic_load(&channel_of(op)->written) - atomic_load(&channel_of(op)->read);
            return (op->kind == SEND ? held == RING : held == 0) ? op->root : -1;
        }
        case DONE: break;
    }
    return -1;
}

static void post(Operation *op) {
    struct ncclComm *comm = op->comm;
    if (is_message(op->kind)) {
        Channel *c = channel_of(op);
        op->number = ++comm->messages[op->kind - SEND][op->root];
        (op->kind == SEND ? c->send : c->receive)[op->number % 2] = record_of(op);
        atomic_store(op->kind == SEND ? &c->sends : &c->receives, op->number);
    } else {
        op->number = ++comm->calls;
        seat(comm, comm->rank)->records[op->number % 2] = record_of(op);
        atomic_store(&seat(comm, comm->rank)->arrived, op->number);
    }
    op->state = MATCH;
}

static bool same(const Record *a, const Record *b) {
    return a->type == b->type && a->reduction == b->reduction && a->root == b->root && a->count == b->count;
}

/* Everybody compares the same records and comes to the same verdict. */
static ncclResult_t match(Operation *op) {
    const struct ncclComm *comm = op->comm;
    char one[128], other[128];
    if (is_message(op->kind)) {
        Record s = channel_of(op)->send[op->number % 2], r = channel_of(op)->receive[op->number % 2];
        if (!same(&s, &r)) {
            int sender = op->kind == SEND ? comm->rank : op->root, receiver = op->kind == SEND ? op->root : comm->rank;
            say(comm, "message %llu from rank %d to rank %d does not match: rank %d called %s, rank %d called %s",
                (unsigned long long)op->number, sender, receiver, sender, describe(&s, one, sizeof one), receiver,
                describe(&r, other, sizeof other));
            return ncclInvalidUsage;
        }
        op->state = message_bytes(op) ? MOVE : DONE;
        return ncclSuccess;
    }
    Record first = seat(comm, 0)->records[op->number % 2];
    for (int r = 1; r < comm->size; r++) {
        Record theirs = seat(comm, r)->records[op->number % 2];
        if (theirs.kind == first.kind && same(&theirs, &first)) continue;
        say(comm, "collective %llu does not match: rank 0 called %s, rank %d called %s", (unsigned long long)op->number,
            describe(&first, one, sizeof one), r, describe(&theirs, other, sizeof other));
        return ncclInvalidUsage;
    }
    if (op->kind == SPLIT)
        op->state = op->color < 0 ? DONE : OFFER;
    else
        op->state = op->count ? PUT : DONE;
    op->piece = op->comm->pieces + 1;
    return ncclSuccess;
}

/* Elements of each rank's tensor in the current piece; of each block of it, where blocks go to different ranks. */
static size_t piece_length(const Operation *op) {
    size_t fits = PIECE / TYPE[op->type].bytes, left = op->count - op->done;
    if (op->kind == REDUCE_SCATTER) fits /= (size_t)op->comm->size;
    return left < fits ? left : fits;
}

static void put(Operation *op) {
    struct ncclComm *comm = op->comm;
    size_t element = TYPE[op->type].bytes, length = piece_length(op), bytes = length * element;
    unsigned char *to = stage(comm, comm->rank, op->piece);
    const char *from = (const char *)op->send + op->done * element;
    if (op->kind == REDUCE_SCATTER) {
        for (int r = 0; r < comm->size; r++)
            memcpy(to + (size_t)r * bytes, from + (size_t)r * op->count * element, bytes);
        length *= (size_t)comm->size;
    } else if (!rooted(op->kind) || op->kind == REDUCE || comm->rank == op->root)
        memcpy(to, from, bytes);
    if (reduces(op->kind) && op->scale_before) scale_by_ranks(to, length, op->type, comm->size);
    atomic_store(&seat(comm, comm->rank)->staged, op->piece);
    op->state = TAKE;
}

static void take(Operation *op) {
    struct ncclComm *comm = op->comm;
    size_t element = TYPE[op->type].bytes, length = piece_length(op), bytes = length * element;
    char *to = (char *)op->receive + op->done * element;
    if (op->kind == ALL_GATHER) {
        for (int r = 0; r < comm->size; r++)
            memcpy(to + (size_t)r * op->count * element, stage(comm, r, op->piece), bytes);
    } else if (reduces(op->kind)) {
        if (op->kind != REDUCE || comm->rank == op->root) {
            size_t block = op->kind == REDUCE_SCATTER ? (size_t)comm->rank * bytes : 0;
            memcpy(to, stage(comm, 0, op->piece) + block, bytes);
            for (int r = 1; r < comm->size; r++)
                reduce_into(to, stage(comm, r, op->piece) + block, length, op->type, op->reduction);
            if (op->reduction == AVG && !op->scale_before) scale_by_ranks(to, length, op->type, comm->size);
        }
    } else if (comm->rank != op->root)
        memcpy(to, stage(comm, op->root, op->piece), bytes);
    else if (op->receive != op->send)
        memcpy(to, (const char *)op->send + op->done * element, bytes);
    atomic_store(&seat(comm, comm->rank)->consumed, op->piece);
    comm->pieces = op->piece++;
    op->done += length;
    op->state = op->done < op->count ? PUT : DONE;
}

static ncclResult_t offer(Operation *op) {
    struct ncclComm *comm = op->comm;
    int place, size, leader = split_leader(op, &place, &size);
    Seat *from = seat(comm, leader);
    if (leader == comm->rank) {
        ncclResult_t result = make_segment(&from->offer);
        if (result) return result;
        atomic_store(&from->offered, op->number);
    }
    op->state = DONE;
    return join(&from->offer, size, place, comm->device, op->made);
}

static void move(Operation *op) {
    Channel *c = channel_of(op);
    uint64_t written = atomic_load(&c->written), read = atomic_load(&c->read);
    size_t left = message_bytes(op) - op->done;
    size_t length = op->kind == SEND ? RING - (written - read) : written - read;
    if (length > left) length = left;
    uint64_t at = (op->kind == SEND ? written : read) % RING;
    size_t first = length < RING - at ? length : RING - at;
    if (op->kind == SEND) {
        const char *from = (const char *)op->send + op->done;
        memcpy(c->ring + at, from, first);
        memcpy(c->ring, from + first, length - first);
        atomic_store(&c->written, written + length);
    } else {
        char *to = (char *)op->receive + op->done;
        memcpy(to, c->ring + at, first);
        memcpy(to + first, c->ring, length - first);
        atomic_store(&c->read, read + length);
    }
    op->done += length;
    if (op->done == message_bytes(op)) op->state = DONE;
}

static ncclResult_t advance(Operation *op) {
    switch (op->state) {
        case POST: post(op); break;
        case MATCH: return match(op);
        case PUT: put(op); break;
        case TAKE: take(op); break;
        case OFFER: return offer(op);
        case MOVE: move(op); break;
        case DONE: break;
    }
    return ncclSuccess;
}

/* Why an operation that cannot go on never will. Flags are read before the state is looked at again: what a rank did
 * before it raised its flag counts. */
static ncclResult_t trouble(const Operation *op) {
    const struct ncclComm *comm = op->comm;
    char text[128];
    Record record = record_of(op);
    if (atomic_load(&comm->closed)) {
        say(comm, "%s ends, for this rank has %s the communicator", describe(&record, text, sizeof text),
            atomic_load(&comm->closed) == ABORT ? "aborted" : "destroyed");
        return ncclInternalError;
    }
    int who = missing(op);
    if (op->never || who < 0) return ncclSuccess;
    int aborted = atomic_load(&comm->shared->aborted), failed = atomic_load(&comm->shared->failed);
    bool gone = atomic_load(&seat(comm, who)->gone);
    if ((!aborted && !failed && !gone) || missing(op) != who) return ncclSuccess;
    describe(&record, text, sizeof text);
    if (aborted)
        say(comm, "%s ends, for rank %d has aborted its communicator", text, aborted - 1);
    else if (failed)
        say(comm, "%s ends, for rank %d has failed", text, failed - 1);
    else
        say(comm, "%s waits for rank %d, which has destroyed its communicator", text, who);
    return ncclRemoteError;
}

/* What is known of a rank that did not come. */
static void say_who_is_missing(const Operation *op, double limit) {
    const struct ncclComm *comm = op->comm;
    int who = missing(op), here = comm->rank;
    char text[128], last[128], more[300] = "";
    Record record = record_of(op);
    describe(&record, text, sizeof text);
    if (is_message(op->kind)) {
        say(comm, "after %g s, rank %d has not called its side of %s %s rank %d", limit, who, text,
            op->kind == SEND ? "to" : "from", who);
        return;
    }
    uint64_t arrived = atomic_load(&seat(comm, who)->arrived);
    if (arrived) {
        record = seat(comm, who)->records[arrived % 2];
        snprintf(more, sizeof more, "; its last was %s", describe(&record, last, sizeof last));
    }
    uint64_t sends = atomic_load(&channel(comm, who, here)->sends);
    uint64_t receives = atomic_load(&channel(comm, here, who)->receives);
    if (sends > comm->messages[1][who]) {
        record = channel(comm, who, here)->send[sends % 2];
        snprintf(more, sizeof more, "; it waits in %s to rank %d", describe(&record, last, sizeof last), here);
    } else if (receives > comm->messages[0][who]) {
        record = channel(comm, here, who)->receive[receives % 2];
        snprintf(more, sizeof more, "; it waits in %s from rank %d", describe(&record, last, sizeof last), here);
    }
    say(comm, "after %g s, rank %d has not come to collective %llu, %s%s", limit, who, (unsigned long long)op->number,
        text, more);
}

/* --- Batches: operations that move forward together -------------------------------------------------------------- */

typedef struct Batch {
    Operation *operations;
    size_t count, room, left;
    ncclResult_t result;
    Patience patience;
    bool running;
    struct Batch *next;
} Batch;

static _Atomic uint64_t calls_done; /* of this process; see NCCL_STANDIN_ASYNC_ERROR */

static void add_to(Batch *batch, Operation op) {
    if (batch->count == batch->room) {
        batch->room = batch->room ? 2 * batch->room : 8;
        batch->operations = realloc(batch->operations, batch->room * sizeof(Operation));
    }
    /* collectives of one communicator run in order, and so do the messages of one channel */
    for (size_t i = batch->count; i > 0 && !op.after; i--) {
        const Operation *before = &batch->operations[i - 1];
        if (before->comm != op.comm || is_message(before->kind) != is_message(op.kind)) continue;
        if (!is_message(op.kind) || (before->kind == op.kind && before->root == op.root)) op.after = i;
    }
    atomic_fetch_add(&op.comm->references, 1);
    batch->operations[batch->count++] = op;
    batch->left = batch->count;
}

static void empty(Batch *batch) {
    for (size_t i = 0; i < batch->count; i++) let_go(batch->operations[i].comm);
    free(batch->operations);
    *batch = (Batch){0};
}

static void mark_running(Batch *batch, int by) {
    for (size_t i = 0; i < batch->count; i++) atomic_fetch_add(&batch->operations[i].comm->running, by);
}

static bool is_active(const Batch *batch, const Operation *op) {
    return op->state != DONE && (!op->after || batch->operations[op->after - 1].state == DONE);
}

/* The communicators are of no more use: peers that wait for this rank must not wait for ever. */
static ncclResult_t give_up(Batch *batch, ncclResult_t result) {
    for (size_t i = 0; i < batch->count; i++) {
        struct ncclComm *comm = batch->operations[i].comm;
        int none = 0, nobody = 0;
        if (batch->operations[i].state == DONE && !atomic_load(&comm->error)) continue;
        atomic_compare_exchange_strong(&comm->error, &none, (int)result);
        atomic_compare_exchange_strong(&comm->shared->failed, &nobody, comm->rank + 1);
    }
    return result;
}

/* Every operation as far as it gets, once. */
static ncclResult_t pass(Batch *batch, bool *moved) {
    *moved = false;
    for (size_t i = 0; i < batch->count; i++) {
        Operation *op = &batch->operations[i];
        if (!is_active(batch, op) || missing(op) >= 0) continue;
        if (op->state == POST && atomic_load(&op->comm->closed)) return give_up(batch, trouble(op));
        ncclResult_t result = advance(op);
        if (result) {
            op->state = POST; /* not done, whatever it was: give_up looks */
            return give_up(batch, result);
        }
        *moved = true;
        if (op->state == DONE) {
            batch->left--;
            if (op->kind < SPLIT) atomic_fetch_add(&calls_done, 1);
        }
    }
    if (*moved) {
        batch->patience = (Patience){0};
        return ncclSuccess;
    }
    bool expired = out_of_patience(&batch->patience);
    for (size_t i = 0; i < batch->count; i++) {
        const Operation *op = &batch->operations[i];
        if (!is_active(batch, op)) continue;
        ncclResult_t result = trouble(op);
        if (!result && expired && !op->never && missing(op) >= 0) {
            say_who_is_missing(op, batch->patience.limit);
            result = ncclRemoteError;
        }
        if (result) return give_up(batch, result);
    }
    return ncclSuccess;
}

static int by_address(const void *a, const void *b) {
    uintptr_t x = (uintptr_t) * (struct ncclComm *const *)a, y = (uintptr_t) * (struct ncclComm *const *)b;
    return x < y ? -1 : x > y;
}

/* Runs a batch in the calling thread. Two threads that use one communicator take turns. */
static ncclResult_t drive(Batch *batch) {
    struct ncclComm **comms = calloc(batch->count + 1, sizeof *comms);
    size_t n = 0;
    for (size_t i = 0; i < batch->count; i++) comms[i] = batch->operations[i].comm;
    qsort(comms, batch->count, sizeof *comms, by_address);
    for (size_t i = 0; i < batch->count; i++)
        if (!n || comms[i] != comms[n - 1]) comms[n++] = comms[i];
    mark_running(batch, 1);
    for (size_t i = 0; i < n; i++) pthread_mutex_lock(&comms[i]->driving);
    ncclResult_t result = ncclSuccess;
    bool moved;
    while (!result && batch->left) result = pass(batch, &moved);
    for (size_t i = n; i > 0; i--) pthread_mutex_unlock(&comms[i - 1]->driving);
    mark_running(batch, -1);
    free(comms);
    return result;
}

/* --- The asynchronous mode: one thread works through the batches ------------------------------------------------- */

static pthread_mutex_t queue_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t queue_changed = PTHREAD_COND_INITIALIZER;
static Batch *queue; /* in the order submitted */
static _Atomic int asynchronous, held;

static bool share(const Batch *a, const Batch *b) {
    for (size_t i = 0; i < a->count; i++)
        for (size_t j = 0; j < b->count; j++) {
            const Operation *x = &a->operations[i], *y = &b->operations[j];
            if (x->comm == y->comm || x->stream == y->stream) return true;
        }
    return false;
}

static bool any_closed(const Batch *batch) {
    for (size_t i = 0; i < batch->count; i++)
        if (atomic_load(&batch->operations[i].comm->closed)) return true;
    return false;
}

/* A batch waits for earlier ones on its streams and communicators. */
static bool may_run(const Batch *batch) {
    if (atomic_load(&held) && !batch->running && !any_closed(batch)) return false;
    for (const Batch *earlier = queue; earlier != batch; earlier = earlier->next)
        if (share(earlier, batch)) return false;
    return true;
}

static void *work(void *unused) {
    (void)unused;
    pthread_mutex_lock(&queue_lock);
    for (;;) {
        while (!queue) pthread_cond_wait(&queue_changed, &queue_lock);
        bool any_moved = false;
        /* only this thread removes batches, so the list may be walked while others append to it */
        for (Batch **link = &queue, *batch; (batch = *link);) {
            bool moved = false, over = false;
            if (may_run(batch)) {
                batch->running = true;
                pthread_mutex_unlock(&queue_lock);
                over = pass(batch, &moved) || !batch->left;
                pthread_mutex_lock(&queue_lock);
            }
            any_moved |= moved || over;
            if (!over) {
                link = &batch->next;
                continue;
            }
            *link = batch->next;
            mark_running(batch, -1);
            empty(batch);
            free(batch);
            pthread_cond_broadcast(&queue_changed);
        }
        if (!any_moved && queue) {
            pthread_mutex_unlock(&queue_lock);
            sched_yield();
            if (atomic_load(&held)) rest(0.0002);
            pthread_mutex_lock(&queue_lock);
        }
    }
    return NULL;
}

static ncclResult_t submit(Batch *batch) {
    Batch *own = calloc(1, sizeof *own), **link;
    *own = *batch;
    *batch = (Batch){0};
    mark_running(own, 1);
    pthread_mutex_lock(&queue_lock);
    for (link = &queue; *link; link = &(*link)->next) continue;
    *link = own;
    pthread_cond_broadcast(&queue_changed);
    pthread_mutex_unlock(&queue_lock);
    return ncclSuccess;
}

static bool on_stream(const Batch *batch, uintptr_t stream) {
    for (size_t i = 0; i < batch->count; i++)
        if (stream == UINTPTR_MAX || batch->operations[i].stream == stream) return true;
    return false;
}

/* Waits until nothing of a communicator is in flight. */
static bool drained(struct ncclComm *comm) {
    Patience patience = {0};
    while (atomic_load(&comm->running))
        if (out_of_patience(&patience)) return false;
    return true;
}

/* --- Calls and groups -------------------------------------------------------------------------------------------- */

typedef struct {
    int32_t kind, type, reduction, root, rank, size;
    uint64_t count, send, receive, stream, communicator, group;
} standin_call;

static pthread_mutex_t log_lock = PTHREAD_MUTEX_INITIALIZER;
static standin_call *calls;
static size_t calls_logged, calls_room;
static uint64_t data_calls;
static _Atomic uint64_t groups;

static _Thread_local struct {
    int depth;
    uint64_t number;
    Batch batch;
    ncclResult_t error;
} group;

/* Returns how many calls with data this process has made. */
static uint64_t note(Kind kind, const struct ncclComm *comm, const Operation *op) {
    standin_call entry = {.kind = kind, .type = -1, .reduction = -1, .root = -1};
    entry.group = group.depth ? group.number : 0;
    if (comm) {
        entry.rank = comm->rank;
        entry.size = comm->size;
        entry.communicator = comm->shared->identity;
    }
    if (op) {
        entry.count = op->count;
        entry.send = (uint64_t)(uintptr_t)op->send;
        entry.receive = (uint64_t)(uintptr_t)op->receive;
        entry.stream = op->stream;
        entry.type = op->type;
        if (reduces(kind)) entry.reduction = op->reduction;
        if (rooted(kind) || is_message(kind)) entry.root = op->root;
    }
    pthread_mutex_lock(&log_lock);
    if (calls_logged == calls_room) {
        calls_room = calls_room ? 2 * calls_room : 256;
        calls = realloc(calls, calls_room * sizeof *calls);
    }
    calls[calls_logged++] = entry;
    uint64_t made = kind < SPLIT ? ++data_calls : data_calls;
    pthread_mutex_unlock(&log_lock);
    return made;
}

static ncclResult_t asynchronous_error(struct ncclComm *comm) {
    const char *plan = getenv("NCCL_STANDIN_ASYNC_ERROR");
    if (plan && *plan && atomic_load(&calls_done) >= strtoull(plan, NULL, 10)) {
        const char *code = strchr(plan, ':');
        int none = 0;
        atomic_compare_exchange_strong(&comm->error, &none, code ? atoi(code + 1) : ncclSystemError);
    }
    return (ncclResult_t)atomic_load(&comm->error);
}

static bool overlap(const void *a, size_t a_bytes, const void *b, size_t b_bytes) {
    uintptr_t x = (uintptr_t)a, y = (uintptr_t)b;
    return a && b && x < y + b_bytes && y < x + a_bytes;
}

/* What is wrong with the arguments, or NULL. NCCL would not notice all of it; its results would be undefined. */
static const char *wrong(const Operation *op) {
    const struct ncclComm *comm = op->comm;
    if (op->type < 0 || op->type >= TYPES) return "no such data type";
    if (reduces(op->kind) && (op->reduction < 0 || op->reduction >= REDUCTIONS)) return "no such reduction";
    if (op->root < 0 || op->root >= comm->size) return "no such rank";
    if (!op->count) return NULL;

    Kind kind = op->kind;
    bool at_root = comm->rank == op->root;
    bool sends = kind != RECV && (at_root || (kind != BROADCAST && kind != BCAST));
    bool receives = kind != SEND && (at_root || kind != REDUCE);
    size_t element = TYPE[op->type].bytes, bytes = op->count * element, all = bytes * (size_t)comm->size;
    size_t own = bytes * (size_t)comm->rank;
    const char *from = op->send, *to = op->receive;
    if ((sends && !from) || (receives && !to)) return "a null pointer";
    if ((sends && (uintptr_t)from % element) || (receives && (uintptr_t)to % element)) return "a misaligned pointer";
    if (!sends || !receives) return NULL;
    bool in_place = kind == ALL_GATHER ? from == to + own : kind == REDUCE_SCATTER ? to == from + own : from == to;
    if (!in_place && overlap(from, kind == REDUCE_SCATTER ? all : bytes, to, kind == ALL_GATHER ? all : bytes))
        return "buffers that overlap, and not as the operation in place wants it";
    return NULL;
}

static ncclResult_t run(Batch *batch) {
    ncclResult_t result = ncclSuccess;
    if (batch->count) result = atomic_load(&asynchronous) ? submit(batch) : drive(batch);
    empty(batch);
    return result;
}

static ncclResult_t refuse(ncclResult_t result) {
    if (group.depth && !group.error) group.error = result;
    return result;
}

static ncclResult_t call(Operation op) {
    if (!op.comm) {
        say(NULL, "%s: the communicator is null", KIND[op.kind]);
        return refuse(ncclInvalidArgument);
    }
    const char *plan = getenv("NCCL_STANDIN_NEVER_ARRIVE"), *average = getenv("NCCL_STANDIN_AVG");
    uint64_t number = note(op.kind, op.comm, &op);
    ncclResult_t error = asynchronous_error(op.comm);
    if (error) {
        say(op.comm, "%s: the communicator has failed before (error %d)", KIND[op.kind], (int)error);
        return refuse(error);
    }
    const char *complaint = wrong(&op);
    if (complaint) {
        say(op.comm, "%s: %s (count %zu, type %d, reduction %d, root or peer %d, buffers %p and %p)", KIND[op.kind],
            complaint, op.count, op.type, op.reduction, op.root, op.send, op.receive);
        return refuse(ncclInvalidArgument);
    }
    op.never = plan && *plan && number == strtoull(plan, NULL, 10);
    op.scale_before = op.reduction == AVG && !is_integer(op.type) && !(average && !strcmp(average, "post"));
    if (group.depth) {
        add_to(&group.batch, op);
        return ncclSuccess;
    }
    Batch alone = {0};
    add_to(&alone, op);
    return run(&alone);
}

/* --- NCCL's functions -------------------------------------------------------------------------------------------- */

API ncclResult_t ncclGetVersion(int *version) {
    *version = (int)setting("NCCL_STANDIN_VERSION", VERSION);
    return ncclSuccess;
}

API const char *ncclGetErrorString(ncclResult_t result) {
    static const char *const TEXT[RESULTS] = {
        "no error",
        "unhandled cuda error (nccl_standin)",
        "unhandled system error (nccl_standin)",
        "internal error (nccl_standin)",
        "invalid argument (nccl_standin)",
        "invalid usage (nccl_standin)",
        "remote process exited or there was a network error (nccl_standin)",
        "NCCL operation in progress (nccl_standin)",
    };
    return (unsigned)result < RESULTS ? TEXT[result] : "unknown result code (nccl_standin)";
}

API ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
    note(UNIQUE_ID, NULL, NULL);
    int planted = (int)setting("NCCL_STANDIN_FAIL_UNIQUE_ID", 0);
    if (planted) {
        say(NULL, "GetUniqueId: planted error %d", planted);
        return (ncclResult_t)planted;
    }
    Ticket ticket;
    memset(id, 0, sizeof *id);
    ncclResult_t result = make_segment(&ticket);
    memcpy(id->internal, &ticket, sizeof ticket);
    return result;
}

static ncclResult_t initialise(struct ncclComm **made, int size, const Ticket *ticket, int rank, int device) {
    *made = NULL;
    if (size < 1 || size > MAX_RANKS || rank < 0 || rank >= size || memcmp(ticket->magic, MAGIC, sizeof MAGIC)) {
        say(NULL, "CommInitRank: rank %d of %d (at most %d), or not a unique id", rank, size, MAX_RANKS);
        return ncclInvalidArgument;
    }
    if (is_set("NCCL_STANDIN_BLOCK_INIT")) {
        double seconds = setting("NCCL_STANDIN_BLOCK_INIT", 0), since = now();
        say(NULL, "CommInitRank: planted, rank %d of %d blocks", rank, size);
        while (seconds <= 0 || now() - since < seconds) rest(0.01);
    }
    int planted = (int)setting("NCCL_STANDIN_FAIL_INIT", 0);
    if (planted) {
        say(NULL, "CommInitRank: planted error %d on rank %d of %d", planted, rank, size);
        return (ncclResult_t)planted;
    }
    ncclResult_t result = join(ticket, size, rank, device, made);
    if (!result) note(INIT, *made, NULL);
    return result;
}

API ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int size, ncclUniqueId id, int rank, void *config) {
    (void)config;
    Ticket ticket;
    memcpy(&ticket, id.internal, sizeof ticket);
    return initialise(comm, size, &ticket, rank, (int)setting("NCCL_STANDIN_DEVICE", 0));
}

API ncclResult_t ncclCommInitAll(ncclComm_t *comms, int devices, const int *list) {
    if (devices != 1) {
        say(NULL, "CommInitAll: %d devices in one process; the stand-in has one a process", devices);
        return ncclInvalidArgument;
    }
    Ticket ticket;
    ncclResult_t result = make_segment(&ticket);
    return result ? result : initialise(comms, 1, &ticket, 0, list ? list[0] : 0);
}

API ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t *made, void *config) {
    (void)config;
    *made = NULL;
    if (!comm || color < -1) {
        say(comm, "CommSplit: %s", comm ? "a negative colour other than NCCL_SPLIT_NOCOLOR" : "null communicator");
        return refuse(ncclInvalidArgument);
    }
    note(SPLIT, comm, NULL);
    for (size_t i = 0; i < group.batch.count; i++)
        if (group.batch.operations[i].comm == comm) {
            say(comm, "CommSplit: this group has calls of the communicator outstanding");
            return refuse(ncclInvalidUsage);
        }
    ncclResult_t error = asynchronous_error(comm);
    if (error) return refuse(error);
    drained(comm);
    Batch alone = {0};
    add_to(&alone, (Operation){.kind = SPLIT, .comm = comm, .color = color, .key = key, .made = made});
    ncclResult_t result = drive(&alone);
    empty(&alone);
    return result;
}

API ncclResult_t ncclCommDestroy(ncclComm_t comm) {
    if (!comm) return ncclSuccess;
    note(DESTROY, comm, NULL);
    if (!atomic_load(&held) && !drained(comm)) say(comm, "CommDestroy: something is still in flight");
    atomic_store(&comm->closed, DESTROY);
    atomic_store(&seat(comm, comm->rank)->gone, 1);
    drained(comm);
    let_go(comm);
    return ncclSuccess;
}

API ncclResult_t ncclCommAbort(ncclComm_t comm) {
    if (!comm) return ncclSuccess;
    int nobody = 0;
    note(ABORT, comm, NULL);
    atomic_store(&comm->closed, ABORT);
    atomic_compare_exchange_strong(&comm->shared->aborted, &nobody, comm->rank + 1);
    drained(comm); /* the caller may free the buffers now */
    let_go(comm);
    return ncclSuccess;
}

API ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *error) {
    if (!comm) return ncclInvalidArgument;
    *error = asynchronous_error(comm);
    return ncclSuccess;
}

API ncclResult_t ncclCommCount(ncclComm_t comm, int *count) {
    if (!comm) return ncclInvalidArgument;
    *count = comm->size;
    return ncclSuccess;
}

API ncclResult_t ncclCommCuDevice(ncclComm_t comm, int *device) {
    if (!comm) return ncclInvalidArgument;
    *device = comm->device;
    return ncclSuccess;
}

API ncclResult_t ncclCommUserRank(ncclComm_t comm, int *rank) {
    if (!comm) return ncclInvalidArgument;
    *rank = comm->rank;
    return ncclSuccess;
}

API ncclResult_t ncclGroupStart(void) {
    if (!group.depth++) group.number = atomic_fetch_add(&groups, 1) + 1;
    note(GROUP_START, NULL, NULL);
    return ncclSuccess;
}

API ncclResult_t ncclGroupEnd(void) {
    note(GROUP_END, NULL, NULL);
    if (!group.depth) {
        say(NULL, "GroupEnd without GroupStart");
        return ncclInvalidUsage;
    }
    if (--group.depth) return ncclSuccess;
    Batch batch = group.batch;
    ncclResult_t error = group.error;
    group.batch = (Batch){0};
    group.error = ncclSuccess;
    if (!error) return run(&batch);
    say(NULL, "GroupEnd: a call of the group failed (error %d), none is issued", (int)error);
    empty(&batch);
    return error;
}

API ncclResult_t ncclAllReduce(const void *send, void *receive, size_t count, int type, int reduction, ncclComm_t comm,
                               void *stream) {
    return call((Operation){.kind = ALL_REDUCE, .send = send, .receive = receive, .count = count, .type = type,
                            .reduction = reduction, .comm = comm, .stream = (uintptr_t)stream});
}

API ncclResult_t ncclReduce(const void *send, void *receive, size_t count, int type, int reduction, int root,
                            ncclComm_t comm, void *stream) {
    return call((Operation){.kind = REDUCE, .send = send, .receive = receive, .count = count, .type = type,
                            .reduction = reduction, .root = root, .comm = comm, .stream = (uintptr_t)stream});
}

API ncclResult_t ncclBroadcast(const void *send, void *receive, size_t count, int type, int root, ncclComm_t comm,
                               void *stream) {
    return call((Operation){.kind = BROADCAST, .send = send, .receive = receive, .count = count, .type = type,
                            .root = root, .comm = comm, .stream = (uintptr_t)stream});
}

API ncclResult_t ncclBcast(void *buffer, size_t count, int type, int root, ncclComm_t comm, void *stream) {
    return call((Operation){.kind = BCAST, .send = buffer, .receive = buffer, .count = count, .type = type,
                            .root = root, .comm = comm, .stream = (uintptr_t)stream});
}

API ncclResult_t ncclAllGather(const void *send, void *receive, size_t count, int type, ncclComm_t comm, void *stream) {
    return call((Operation){.kind = ALL_GATHER, .send = send, .receive = receive, .count = count, .type = type,
                            .comm = comm, .stream = (uintptr_t)stream});
}

API ncclResult_t ncclReduceScatter(const void *send, void *receive, size_t count, int type, int reduction,
                                   ncclComm_t comm, void *stream) {
    return call((Operation){.kind = REDUCE_SCATTER, .send = send, .receive = receive, .count = count, .type = type,
                            .reduction = reduction, .comm = comm, .stream = (uintptr_t)stream});
}

API ncclResult_t ncclSend(const void *send, size_t count, int type, int peer, ncclComm_t comm, void *stream) {
    return call((Operation){.kind = SEND, .send = send, .count = count, .type = type, .root = peer, .comm = comm,
                            .stream = (uintptr_t)stream});
}

API ncclResult_t ncclRecv(void *receive, size_t count, int type, int peer, ncclComm_t comm, void *stream) {
    return call((Operation){.kind = RECV, .receive = receive, .count = count, .type = type, .root = peer, .comm = comm,
                            .stream = (uintptr_t)stream});
}

/* --- Functions of our own: the log and the asynchronous mode ------------------------------------------------------ */

API size_t standin_log_count(void) {
    pthread_mutex_lock(&log_lock);
    size_t n = calls_logged;
    pthread_mutex_unlock(&log_lock);
    return n;
}

API int standin_log_entry(size_t i, standin_call *entry) {
    pthread_mutex_lock(&log_lock);
    bool there = i < calls_logged;
    if (there) *entry = calls[i];
    pthread_mutex_unlock(&log_lock);
    return there;
}

API void standin_log_clear(void) {
    pthread_mutex_lock(&log_lock);
    calls_logged = 0;
    data_calls = 0;
    atomic_store(&calls_done, 0);
    pthread_mutex_unlock(&log_lock);
}

API const char *standin_kind_name(int kind) { return kind >= 0 && kind < KINDS ? KIND[kind] : NULL; }

API size_t standin_pending(void *stream) {
    size_t n = 0;
    pthread_mutex_lock(&queue_lock);
    for (const Batch *batch = queue; batch; batch = batch->next) n += on_stream(batch, (uintptr_t)stream);
    pthread_mutex_unlock(&queue_lock);
    return n;
}

API void standin_wait(void *stream) {
    pthread_mutex_lock(&queue_lock);
    for (;;) {
        const Batch *batch = queue;
        while (batch && !on_stream(batch, (uintptr_t)stream)) batch = batch->next;
        if (!batch) break;
        pthread_cond_wait(&queue_changed, &queue_lock);
    }
    pthread_mutex_unlock(&queue_lock);
}

API void standin_hold(int on) {
    atomic_store(&held, on);
    pthread_mutex_lock(&queue_lock);
    pthread_cond_broadcast(&queue_changed);
    pthread_mutex_unlock(&queue_lock);
}

/* Returns 0, or the error for which there is no thread. */
API int standin_asynchronous(int on) {
    static bool started; /* under queue_lock */
    int error = 0;
    if (!on) standin_wait((void *)UINTPTR_MAX);
    pthread_mutex_lock(&queue_lock);
    if (on && !started) {
        pthread_t thread;
        error = pthread_create(&thread, NULL, work, NULL);
        started = !error;
        if (started) pthread_detach(thread);
    }
    pthread_mutex_unlock(&queue_lock);
    if (!error) atomic_store(&asynchronous, on);
    return error;
}
