// SPDX-License-Identifier: Apache-2.0

/*
 * UDP echo in batches, recvmmsg and sendmmsg at both ends, with a number of
 * datagrams outstanding: the peer of SLMP's small messages.
 *
 *	cc -O2 -Wall -o udp_batch udp_batch.c
 *	udp_batch serve ADDRESS PORT CPU
 *	udp_batch ask ADDRESS PORT CPU SIZE OUTSTANDING SECONDS
 *
 * The server prints a line when it listens, and ends with its standard input. The
 * client prints how many answers came, how many did not, and in how many seconds,
 * after a tenth of the time that does not count; and how many came with that tenth.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <poll.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

enum { BATCH = 64, SIZE = 2048, BUFFER = 8 << 20 };

/* How long the ends look for datagrams before they sleep: the most that a worker of
 * the NIC does, and a sender of SLMP, in the manner of the former. */
#define SERVER_SPIN 200e-6
#define CLIENT_SPIN 50e-6
#define YIELD_EVERY 16

static struct mmsghdr msgs[BATCH];
static struct iovec iovs[BATCH];
static struct sockaddr_in peers[BATCH];
static char bufs[BATCH][SIZE];

static int fail(const char *what)
{
	fprintf(stderr, "udp_batch: %s: %s\n", what, strerror(errno));
	return 1;
}

static double now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec + t.tv_nsec / 1e9;
}

/* Sends n messages. What the kernel has no room for it does not send. */
static int give(int fd, int n)
{
	int done = 0;

	while (done < n) {
		int r = sendmmsg(fd, msgs + done, n - done, 0);

		if (r > 0)
			done += r;
		else if (errno != EINTR)
			break;
	}
	return done;
}

/* Takes up to a batch. It sleeps at most as long as the socket's option says. */
static int take(int fd, double spin)
{
	double until = now() + spin;
	int n, spins = 0;

	do {
		n = recvmmsg(fd, msgs, BATCH, MSG_DONTWAIT, NULL);
		if (n >= 0 || (errno != EAGAIN && errno != EINTR))
			return n;
		if (++spins % YIELD_EVERY == 0)
			sched_yield();
	} while (now() < until);
	return recvmmsg(fd, msgs, BATCH, MSG_WAITFORONE, NULL);
}

static int serve(int fd)
{
	for (;;) {
		int n;

		for (int i = 0; i < BATCH; i++) {
			iovs[i].iov_len = SIZE;
			msgs[i].msg_hdr.msg_namelen = sizeof(peers[i]);
		}
		n = take(fd, SERVER_SPIN);
		if (n < 0) {
			struct pollfd in = { .fd = 0, .events = POLLIN };

			if (errno != EAGAIN && errno != EINTR)
				return fail("receive");
			if (poll(&in, 1, 0) > 0)
				return 0;
			continue;
		}
		for (int i = 0; i < n; i++)
			iovs[i].iov_len = msgs[i].msg_len;
		give(fd, n);
	}
}

/* Echoes keep their order, so an answer says of those before it that had none that
 * they will not get any. */
static int ask(int fd, int size, int outstanding, double seconds)
{
	double start = now(), from = start + seconds / 10, until = from + seconds, t = start;
	unsigned long sent = 0, over = 0, all = 0, count = 0, before = 0;

	while (t < until) {
		int n;

		for (int i = 0; i < BATCH; i++)
			iovs[i].iov_len = size;
		while (sent - over < (unsigned long)outstanding) {
			unsigned long left = outstanding - (sent - over);

			n = left < BATCH ? left : BATCH;
			for (int i = 0; i < n; i++)
				memcpy(bufs[i], &(unsigned long){ sent + i }, sizeof(sent));
			n = give(fd, n);
			if (!n)
				break;
			sent += n;
		}
		for (int i = 0; i < BATCH; i++)
			iovs[i].iov_len = SIZE;
		n = take(fd, CLIENT_SPIN);
		t = now();
		if (n < 0) {
			if (errno != EAGAIN && errno != EINTR)
				return fail("receive");
			if (errno == EAGAIN)
				over = sent;
			continue;
		}
		for (int i = 0; i < n; i++) {
			unsigned long k;

			memcpy(&k, bufs[i], sizeof(k));
			if (k >= over)
				over = k + 1;
		}
		all += n;
		if (t >= from) {
			if (!count)
				before = over - n;
			count += n;
		}
	}
	printf("%lu %lu %.9f %lu\n", count, over - before > count ? over - before - count : 0, t - from, all);
	return 0;
}

int main(int argc, char **argv)
{
	struct sockaddr_in addr = { .sin_family = AF_INET };
	int asks = argc == 8 && !strcmp(argv[1], "ask"), size = BUFFER, fd;
	struct timeval wait = { .tv_usec = asks ? 20000 : 200000 };
	cpu_set_t one;

	if ((!asks && (argc != 5 || strcmp(argv[1], "serve"))) || inet_pton(AF_INET, argv[2], &addr.sin_addr) != 1) {
		fprintf(stderr, "usage: udp_batch serve ADDRESS PORT CPU | ask ADDRESS PORT CPU SIZE OUTSTANDING SECONDS\n");
		return 2;
	}
	addr.sin_port = htons(atoi(argv[3]));
	CPU_ZERO(&one);
	CPU_SET(atoi(argv[4]), &one);
	if (sched_setaffinity(0, sizeof(one), &one))
		return fail("pin to CPU");
	fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, IPPROTO_UDP);
	if (fd < 0)
		return fail("open socket");
	/* All that are outstanding must fit. */
	if (setsockopt(fd, SOL_SOCKET, SO_RCVBUFFORCE, &size, sizeof(size)) ||
	    setsockopt(fd, SOL_SOCKET, SO_SNDBUFFORCE, &size, sizeof(size)))
		return fail("set buffers");
	if (setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &wait, sizeof(wait)))
		return fail("set timeout");
	for (int i = 0; i < BATCH; i++) {
		iovs[i] = (struct iovec){ .iov_base = bufs[i] };
		msgs[i].msg_hdr = (struct msghdr){ .msg_iov = &iovs[i], .msg_iovlen = 1 };
	}
	if (asks) {
		int bytes = atoi(argv[5]);

		if (bytes < 8 || bytes > SIZE) {
			fprintf(stderr, "udp_batch: %d bytes: want 8 to %d\n", bytes, SIZE);
			return 2;
		}
		if (connect(fd, (struct sockaddr *)&addr, sizeof(addr)))
			return fail("connect");
		return ask(fd, bytes, atoi(argv[6]), atof(argv[7]));
	}
	for (int i = 0; i < BATCH; i++)
		msgs[i].msg_hdr.msg_name = &peers[i];
	if (bind(fd, (struct sockaddr *)&addr, sizeof(addr)))
		return fail("bind");
	printf("%s:%s\n", argv[2], argv[3]);
	fflush(stdout);
	return serve(fd);
}
