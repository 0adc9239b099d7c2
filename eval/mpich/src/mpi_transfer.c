// SPDX-License-Identifier: Apache-2.0

/*
 * Two ranks, rank 0 receives and rank 1 sends. Each is told what to do by lines on its
 * stdin, answers with numbers, one per line, and "ok", and sleeps until the next one. It
 * ends with its stdin at the latest.
 *
 *	prepare MESSAGES COUNT TYPE	TYPE as mpi_type.h has it
 *	send ROUNDS			sender, for each of the following: CPU ns
 *	receive ROUNDS			receiver: CPU ns, then ns of each round
 *	gemm DIM GEMMS ROUNDS		receiver, alone: ns of each round
 *	overlap DIM GEMMS ROUNDS	receiver: each round as struct overlap
 *	detect DIM GEMMS ROUNDS		receiver: the same
 *	load PATH			receiver, before these: the library with the GEMM
 *	quit
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <unistd.h>

#include "mpi_memory.h"

/* GCC takes MPI_STATUSES_IGNORE for an array. */
#pragma GCC diagnostic ignored "-Wstringop-overflow"

enum { RECEIVER, SENDER };
enum { DATA, READY, RTS, DONE }; /* tags */

static struct elements elements;
static int messages;
static MPI_Request *requests;
static char *stream;	       /* sender's */
static struct buffer *buffers; /* receiver's, one per message */

static void (*gemm_new)(long n);
static void (*gemm_run)(void);

/* Ends the process when whoever started it is gone, whatever MPI waits for. */
static void *watch(void *unused)
{
	struct pollfd in = {.fd = STDIN_FILENO}; /* POLLHUP alone */

	while (poll(&in, 1, -1) < 0 && errno == EINTR)
		;
	_exit(1);
	return unused;
}

/* UCX looks for devices in /sys, where they are those of the network namespace that it was
 * mounted in. Nobody else sees this one. */
static void own_sys(void)
{
	if (unshare(CLONE_NEWNS) || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL))
		fail("own mount namespace: %s", strerror(errno));
	if (mount("sysfs", "/sys", "sysfs", 0, NULL))
		fail("mount /sys: %s", strerror(errno));
}

static int64_t cpu(void)
{
	struct rusage u;

	getrusage(RUSAGE_SELF, &u);
	return (u.ru_utime.tv_sec + u.ru_stime.tv_sec) * INT64_C(1000000000) +
	       (u.ru_utime.tv_usec + u.ru_stime.tv_usec) * INT64_C(1000);
}

static long number(long lo, long hi)
{
	long n;

	if (scanf("%ld", &n) != 1 || n < lo || n > hi)
		fail("a number from %ld to %ld is missing", lo, hi);
	return n;
}

static void signal_peer(int rank, int tag)
{
	MPI_Send(NULL, 0, MPI_BYTE, rank, tag, MPI_COMM_WORLD);
}

static void await_peer(int rank, int tag)
{
	MPI_Recv(NULL, 0, MPI_BYTE, rank, tag, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
}

/* The sender's side of rounds. What it has sent may wait in buffers, which only its calls
 * empty: it must not sleep before the receiver is done. */
static void send_rounds(long rounds)
{
	signal_peer(RECEIVER, READY);
	for (; rounds > 0; rounds--) {
		await_peer(RECEIVER, RTS);
		for (int i = 0; i < messages; i++)
			MPI_Isend(stream, elements.size, MPI_PACKED, RECEIVER, DATA, MPI_COMM_WORLD, &requests[i]);
		MPI_Waitall(messages, requests, MPI_STATUSES_IGNORE);
	}
	await_peer(RECEIVER, DONE);
}

/* Posts the receives, and then says so. Returns when. */
static int64_t receive_begin(void)
{
	int64_t start;

	for (int i = 0; i < messages; i++)
		MPI_Irecv(buffers[i].origin, elements.count, elements.type, SENDER, DATA, MPI_COMM_WORLD, &requests[i]);
	start = now();
	signal_peer(SENDER, RTS);
	return start;
}

static int64_t receive_round(void)
{
	int64_t start = receive_begin();

	MPI_Waitall(messages, requests, MPI_STATUSES_IGNORE);
	return now() - start;
}

/* One round, after which the buffers must be what the stream makes of them. */
static void verify(void)
{
	struct buffer want = buffer_new(&elements);
	char *sent = stream_new(&elements);
	int position = 0;

	memset(want.memory, 0x5a, want.length);
	MPI_Unpack(sent, elements.size, &position, want.origin, elements.count, elements.type, MPI_COMM_WORLD);
	for (int i = 0; i < messages; i++)
		memset(buffers[i].memory, 0x5a, want.length);
	await_peer(SENDER, READY);
	receive_round();
	signal_peer(SENDER, DONE);
	for (int i = 0; i < messages; i++)
		for (size_t b = 0; b < want.length; b++)
			if (buffers[i].memory[b] != want.memory[b])
				fail("message %d: byte %ld of the buffer is 0x%02x, want 0x%02x", i, (long)(elements.lo + b),
				     (unsigned char)buffers[i].memory[b], (unsigned char)want.memory[b]);
	free(sent);
	buffer_free(&want);
}

static void prepare(int rank)
{
	for (int i = 0; buffers && i < messages; i++)
		buffer_free(&buffers[i]);
	free(buffers);
	free(stream);
	free(requests);
	if (elements.count)
		mpi_type_free(&elements.type);

	messages = number(1, 1 << 16);
	elements_read(stdin, number(1, INT_MAX), &elements);
	requests = need(calloc(messages, sizeof(*requests)));
	buffers = NULL;
	stream = NULL;
	if (rank == SENDER) {
		stream = stream_new(&elements);
		send_rounds(1);
		return;
	}
	buffers = need(calloc(messages, sizeof(*buffers)));
	for (int i = 0; i < messages; i++)
		buffers[i] = buffer_new(&elements);
	verify();
}

static void load(void)
{
	char path[4096];
	void *library;

	if (scanf("%4095s", path) != 1 || !(library = dlopen(path, RTLD_NOW)))
		fail("load: %s", dlerror());
	*(void **)&gemm_new = dlsym(library, "gemm_new");
	*(void **)&gemm_run = dlsym(library, "gemm_run");
	if (!gemm_new || !gemm_run)
		fail("load: %s", dlerror());
}

static int64_t gemm(void)
{
	int64_t start = now();

	gemm_run();
	return now() - start;
}

struct overlap {
	int64_t gemms;	  /* that were computed */
	int64_t computed; /* ns in them */
	int64_t detected; /* ns from ready-to-send to the test that found all messages */
	int64_t total;	  /* ns from ready-to-send until both were done */
};

/* GEMMs, and after each a test. With until_detected there are no more than it takes. */
static struct overlap overlap_round(long gemms, int until_detected)
{
	struct overlap o = {0};
	int64_t start = receive_begin();
	int done = 0;

	while (o.gemms < gemms && !(done && until_detected)) {
		o.computed += gemm();
		o.gemms++;
		if (!done) {
			MPI_Testall(messages, requests, &done, MPI_STATUSES_IGNORE);
			if (done)
				o.detected = now() - start;
		}
	}
	if (!done) {
		MPI_Waitall(messages, requests, MPI_STATUSES_IGNORE);
		o.detected = now() - start;
	}
	o.total = now() - start;
	return o;
}

/* Reads what commands with GEMMs begin with, and computes one. */
static long gemm_begin(void)
{
	long dim = number(1, 1 << 14), gemms = number(0, INT_MAX);

	if (!gemm_new)
		fail("no GEMM is loaded");
	gemm_new(dim);
	gemm_run();
	return gemms;
}

static int command(int rank)
{
	char c[16];
	int64_t start, *ns;
	long rounds, gemms;

	if (scanf("%15s", c) != 1 || !strcmp(c, "quit"))
		return 0;
	if (!strcmp(c, "prepare")) {
		prepare(rank);
		answer(NULL, 0);
	} else if (!strcmp(c, "load")) {
		load();
		answer(NULL, 0);
	} else if (!strcmp(c, "send")) {
		rounds = number(1, INT_MAX);
		start = cpu();
		send_rounds(rounds);
		start = cpu() - start;
		answer(&start, 1);
	} else if (!strcmp(c, "receive")) {
		rounds = number(1, INT_MAX);
		ns = need(calloc(rounds + 1, sizeof(*ns)));
		await_peer(SENDER, READY);
		start = cpu();
		for (long i = 1; i <= rounds; i++)
			ns[i] = receive_round();
		ns[0] = cpu() - start;
		signal_peer(SENDER, DONE);
		answer(ns, rounds + 1);
		free(ns);
	} else if (!strcmp(c, "gemm")) {
		gemms = gemm_begin();
		rounds = number(1, INT_MAX);
		ns = need(calloc(rounds, sizeof(*ns)));
		for (long i = 0; i < rounds; i++) {
			start = now();
			for (long k = 0; k < gemms; k++)
				gemm_run();
			ns[i] = now() - start;
		}
		answer(ns, rounds);
		free(ns);
	} else if (!strcmp(c, "overlap") || !strcmp(c, "detect")) {
		struct overlap *o;

		gemms = gemm_begin();
		rounds = number(1, INT_MAX);
		o = need(calloc(rounds, sizeof(*o)));
		await_peer(SENDER, READY);
		for (long i = 0; i < rounds; i++)
			o[i] = overlap_round(gemms, *c == 'd');
		signal_peer(SENDER, DONE);
		answer((int64_t *)o, rounds * (sizeof(*o) / sizeof(int64_t)));
		free(o);
	} else {
		fail("%s: no such command", c);
	}
	return 1;
}

int main(int argc, char **argv)
{
	pthread_t watcher;
	int rank;

#ifdef OPEN_MPI
	/* There is a launcher, which may be killed. It does not start ranks from a thread that ends. */
	prctl(PR_SET_PDEATHSIG, SIGKILL);
#endif
	own_sys();
	if (pthread_create(&watcher, NULL, watch, NULL))
		fail("start a thread");
	MPI_Init(&argc, &argv);
	MPI_Comm_rank(MPI_COMM_WORLD, &rank);
	answer(NULL, 0);
	while (command(rank))
		;
	MPI_Finalize();
	return 0;
}
