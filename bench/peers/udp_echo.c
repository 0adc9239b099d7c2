// SPDX-License-Identifier: Apache-2.0

/*
 * UDP echo as lean as a socket server gets: the yardstick for the one in Go
 * that the demos and benches use (demos/pingpong/rtt).
 *
 *	cc -O2 -Wall -o udp_echo udp_echo.c
 *	udp_echo ADDRESS PORT [block|spin [CPU]]
 *
 * It prints a line when it listens and stays until it is killed.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

static int fail(const char *what)
{
	fprintf(stderr, "udp_echo: %s: %s\n", what, strerror(errno));
	return 1;
}

int main(int argc, char **argv)
{
	static char buf[1 << 16];
	struct sockaddr_in peer, self = { .sin_family = AF_INET };
	int flags = 0, fd;

	if (argc < 3 || argc > 5 || inet_pton(AF_INET, argv[1], &self.sin_addr) != 1 ||
	    (argc > 3 && strcmp(argv[3], "block") && strcmp(argv[3], "spin"))) {
		fprintf(stderr, "usage: udp_echo ADDRESS PORT [block|spin [CPU]]\n");
		return 2;
	}
	self.sin_port = htons(atoi(argv[2]));
	if (argc > 3 && !strcmp(argv[3], "spin"))
		flags = MSG_DONTWAIT;
	if (argc > 4) {
		cpu_set_t one;

		CPU_ZERO(&one);
		CPU_SET(atoi(argv[4]), &one);
		if (sched_setaffinity(0, sizeof(one), &one))
			return fail("pin to CPU");
	}

	fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, IPPROTO_UDP);
	if (fd < 0)
		return fail("open socket");
	if (bind(fd, (struct sockaddr *)&self, sizeof(self)))
		return fail("bind");
	printf("%s:%s\n", argv[1], argv[2]);
	fflush(stdout);

	for (;;) {
		socklen_t size = sizeof(peer);
		ssize_t n = recvfrom(fd, buf, sizeof(buf), flags, (struct sockaddr *)&peer, &size);

		if (n >= 0)
			sendto(fd, buf, n, 0, (struct sockaddr *)&peer, size);
		else if (errno != EAGAIN && errno != EINTR)
			return fail("receive");
	}
}
