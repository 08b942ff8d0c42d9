/* Three processes, no Python: goes through the stand-in once, so that it can be run under the compiler's sanitizers.
 *
 *     cc -fsanitize=address,undefined driver.c nccl_standin.c -lm -pthread && ./a.out
 *
 * Prints what is wrong; the status is 0 if nothing is. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

enum { RANKS = 3, LONG = 100003, FLOAT32 = 7, INT8 = 0, BFLOAT16 = 9, SUM = 0, AVG = 4 };
enum { SUCCESS, INTERNAL_ERROR = 3, INVALID_ARGUMENT, INVALID_USAGE, REMOTE_ERROR };

typedef struct {
    char internal[128];
} Id;
typedef void *Comm;

int ncclGetUniqueId(Id *);
int ncclCommInitRankConfig(Comm *, int, Id, int, void *);
int ncclCommSplit(Comm, int, int, Comm *, void *);
int ncclCommDestroy(Comm);
int ncclCommAbort(Comm);
int ncclGroupStart(void);
int ncclGroupEnd(void);
int ncclAllReduce(const void *, void *, size_t, int, int, Comm, void *);
int ncclReduceScatter(const void *, void *, size_t, int, int, Comm, void *);
int ncclAllGather(const void *, void *, size_t, int, Comm, void *);
int ncclBroadcast(const void *, void *, size_t, int, int, Comm, void *);
int ncclReduce(const void *, void *, size_t, int, int, int, Comm, void *);
int ncclSend(const void *, size_t, int, int, Comm, void *);
int ncclRecv(void *, size_t, int, int, Comm, void *);
int standin_asynchronous(int);
void standin_hold(int);
size_t standin_pending(void *);
void standin_wait(void *);
size_t standin_log_count(void);

static int rank, wrong;

#define EXPECT(condition) \
    do { \
        if (!(condition)) wrong++, fprintf(stderr, "rank %d, line %d: not %s\n", rank, __LINE__, #condition); \
    } while (0)

static Comm fresh(Id *ids) {
    static int used;
    Comm comm = NULL;
    EXPECT(ncclCommInitRankConfig(&comm, RANKS, ids[used++], rank, NULL) == SUCCESS);
    return comm;
}

static void collectives(Comm comm) {
    float *a = malloc(RANKS * LONG * sizeof *a), *b = malloc(RANKS * LONG * sizeof *b);
    for (int i = 0; i < RANKS * LONG; i++) a[i] = (float)(i % 1000 + rank);
    int bad = 0;
    EXPECT(ncclAllReduce(a, b, LONG, FLOAT32, SUM, comm, NULL) == SUCCESS);
    for (int i = 0; i < LONG; i++) bad += b[i] != (float)(3 * (i % 1000) + 3);
    EXPECT(ncclReduce(a, rank == 2 ? b : NULL, LONG, FLOAT32, AVG, 2, comm, NULL) == SUCCESS);
    EXPECT(ncclReduceScatter(a, b, LONG, FLOAT32, SUM, comm, NULL) == SUCCESS);
    for (int i = 0; i < LONG; i++) bad += b[i] != (float)(3 * ((rank * LONG + i) % 1000) + 3);
    EXPECT(ncclAllGather(a, b, LONG, FLOAT32, comm, NULL) == SUCCESS);
    for (int i = 0; i < RANKS * LONG; i++) bad += b[i] != (float)(i % LONG % 1000 + i / LONG);
    EXPECT(ncclBroadcast(rank == 1 ? a : NULL, b, LONG, FLOAT32, 1, comm, NULL) == SUCCESS);
    for (int i = 0; i < LONG; i++) bad += b[i] != (float)(i % 1000 + 1);
    EXPECT(ncclAllReduce(NULL, NULL, 0, FLOAT32, SUM, comm, NULL) == SUCCESS);
    for (int type = 0; type < 12; type++)
        for (int reduction = 0; reduction < 5; reduction++)
            EXPECT(ncclAllReduce(a, b, 257, type, reduction, comm, NULL) == SUCCESS);
    EXPECT(bad == 0);
    free(a);
    free(b);
}

static void messages(Comm comm) {
    int *a = malloc(RANKS * LONG * sizeof *a), *b = calloc(RANKS * LONG, sizeof *b), bad = 0;
    for (int i = 0; i < RANKS * LONG; i++) a[i] = i + rank * RANKS * LONG;
    ncclGroupStart();
    ncclGroupStart();
    for (int peer = 0; peer < RANKS; peer++) {
        EXPECT(ncclSend(a + peer * LONG, LONG * sizeof *a, INT8, peer, comm, NULL) == SUCCESS);
        EXPECT(ncclRecv(b + peer * LONG, LONG * sizeof *b, INT8, peer, comm, NULL) == SUCCESS);
    }
    EXPECT(ncclGroupEnd() == SUCCESS);
    EXPECT(ncclGroupEnd() == SUCCESS);
    for (int i = 0; i < RANKS * LONG; i++) bad += b[i] != i % LONG + rank * LONG + i / LONG * RANKS * LONG;
    EXPECT(bad == 0);
    free(a);
    free(b);
}

static void many_communicators(Comm comm) {
    for (int i = 0; i < 50; i++) {
        Comm part = NULL;
        EXPECT(ncclCommSplit(comm, rank == i % RANKS ? -1 : 5, -rank, &part, NULL) == SUCCESS);
        EXPECT((part == NULL) == (rank == i % RANKS));
        float one = 1, sum = 0;
        if (part) EXPECT(ncclAllReduce(&one, &sum, 1, FLOAT32, SUM, part, NULL) == SUCCESS && sum == 2);
        EXPECT(ncclCommDestroy(part) == SUCCESS);
    }
}

static void *sum_on(void *comm) {
    for (int i = 0; i < 200; i++) {
        float value = (float)i;
        EXPECT(ncclAllReduce(&value, &value, 1, FLOAT32, SUM, comm, NULL) == SUCCESS && value == (float)(3 * i));
    }
    return NULL;
}

static void two_threads(Comm one, Comm other) {
    pthread_t thread;
    pthread_create(&thread, NULL, sum_on, one);
    sum_on(other);
    pthread_join(thread, NULL);
}

static void asynchronous(Comm one, Comm other) {
    float x[64], y[64];
    void *streams[2] = {(void *)16, (void *)32};
    for (int i = 0; i < 64; i++) x[i] = y[i] = 1;
    EXPECT(standin_asynchronous(1) == 0);
    standin_hold(1);
    /* in different orders, which is fine on different streams; the second of a stream after the first */
    for (int turn = 0; turn < 2; turn++) {
        int first = (rank + turn) % 2;
        EXPECT(ncclAllReduce(first ? y : x, first ? y : x, 64, FLOAT32, SUM, first ? other : one, streams[first]) == 0);
    }
    for (int turn = 0; turn < 2; turn++)
        EXPECT(ncclAllReduce(turn ? y : x, turn ? y : x, 64, FLOAT32, SUM, turn ? other : one, streams[turn]) == 0);
    EXPECT(standin_pending(streams[0]) == 2 && x[0] == 1);
    standin_hold(0);
    standin_wait(streams[0]);
    EXPECT(x[63] == 9);
    standin_wait((void *)UINTPTR_MAX);
    EXPECT(y[63] == 9 && standin_pending((void *)UINTPTR_MAX) == 0);
    EXPECT(standin_asynchronous(0) == 0);
}

static void *abort_soon(void *comm) {
    usleep(50000);
    ncclCommAbort(comm);
    return NULL;
}

static void failures(Id *ids) {
    float x = 1, y = 0;
    Comm comm = fresh(ids);
    EXPECT(ncclAllReduce(&x, &y, 1, FLOAT32, rank == 1 ? AVG : SUM, comm, NULL) == INVALID_USAGE);
    ncclCommDestroy(comm);

    comm = fresh(ids);
    if (rank == 0) {
        pthread_t thread;
        pthread_create(&thread, NULL, abort_soon, comm);
        EXPECT(ncclAllReduce(&x, &y, 1, FLOAT32, SUM, comm, NULL) == INTERNAL_ERROR);
        pthread_join(thread, NULL);
    } else {
        EXPECT(ncclRecv(&y, 1, FLOAT32, 0, comm, NULL) == REMOTE_ERROR);
        ncclCommAbort(comm);
    }

    setenv("NCCL_STANDIN_TIMEOUT", "0.3", 1);
    comm = fresh(ids);
    if (rank == 2) usleep(600000);
    else EXPECT(ncclAllReduce(&x, &y, 1, FLOAT32, SUM, comm, NULL) == REMOTE_ERROR);
    ncclCommDestroy(comm);
    unsetenv("NCCL_STANDIN_TIMEOUT");

    comm = fresh(ids);
    EXPECT(ncclAllReduce(&x, NULL, 1, FLOAT32, SUM, comm, NULL) == INVALID_ARGUMENT);
    ncclGroupStart();
    EXPECT(ncclAllReduce(&x, &y, 1, FLOAT32, SUM, comm, NULL) == SUCCESS);
    EXPECT(ncclAllReduce(&x, &y, 1, FLOAT32, 9, comm, NULL) == INVALID_ARGUMENT);
    EXPECT(ncclGroupEnd() == INVALID_ARGUMENT && ncclGroupEnd() == INVALID_USAGE && y == 0);
    ncclCommDestroy(comm);
}

static int play(Id *ids) {
    Comm one = fresh(ids), other = fresh(ids);
    collectives(one);
    messages(one);
    many_communicators(one);
    two_threads(one, other);
    asynchronous(one, other);
    ncclCommDestroy(one);
    ncclCommDestroy(other);
    failures(ids);
    EXPECT(standin_log_count() > 400);
    return wrong != 0;
}

int main(void) {
    Id ids[6];
    int status, failed = 0;
    for (int i = 0; i < 6; i++)
        if (ncclGetUniqueId(&ids[i])) return 2;
    for (rank = 0; rank < RANKS; rank++)
        if (!fork()) exit(play(ids));
    while (wait(&status) > 0) failed += status != 0;
    if (!failed) puts("nothing wrong");
    return failed != 0;
}
