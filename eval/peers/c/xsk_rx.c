// SPDX-License-Identifier: Apache-2.0

/*
 * The C twin of the bare AF_XDP loop of `xspin bench rx`: receive 64, recycle 64,
 * nothing else. Plain UAPI, no library; one socket and one UMEM a queue.
 *
 *	cc -O2 -Wall -o xsk_rx xsk_rx.c
 *	xsk_rx INTERFACE QUEUES RING CPU 3<XSKMAP 4<>COUNTERS
 *
 * Descriptor 3 is the map of sockets by queue, descriptor 4 a page of memory
 * that the number of packets and of batches are kept in. It prints whether the
 * kernel granted zero-copy or copy when it receives, and ends with its standard
 * input.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/bpf.h>
#include <linux/if_xdp.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { MAP_FD = 3, COUNTERS_FD = 4, BATCH = 64, FRAME = 2048, MAX_QUEUES = 64 };

/* How the loop in Go waits, too. */
#define SPIN_NS 200000
#define YIELD_EVERY 16

struct ring {
	uint32_t *producer, *consumer, *flags;
	void *entries;
	uint32_t cached;
};

struct queue {
	int fd;
	struct ring fill, rx;
};

static struct queue queues[MAX_QUEUES];

static int fail(const char *what)
{
	fprintf(stderr, "xsk_rx: %s: %s\n", what, strerror(errno));
	return 1;
}

static int map_ring(int fd, uint64_t at, const struct xdp_ring_offset *off, size_t size,
		    struct ring *r)
{
	uint8_t *mem = mmap(NULL, off->desc + size, PROT_READ | PROT_WRITE,
			    MAP_SHARED | MAP_POPULATE, fd, at);

	if (mem == MAP_FAILED)
		return -1;
	r->producer = (uint32_t *)(mem + off->producer);
	r->consumer = (uint32_t *)(mem + off->consumer);
	r->flags = (uint32_t *)(mem + off->flags);
	r->entries = mem + off->desc;
	return 0;
}

static int open_queue(struct queue *q, int ifindex, int number, uint32_t ring)
{
	size_t size = (size_t)ring * FRAME;
	struct xdp_umem_reg reg = { .len = size, .chunk_size = FRAME };
	struct xdp_mmap_offsets off;
	socklen_t len = sizeof(off);
	struct sockaddr_xdp addr = { .sxdp_family = AF_XDP,
				     .sxdp_ifindex = ifindex,
				     .sxdp_queue_id = number,
				     .sxdp_flags = XDP_USE_NEED_WAKEUP };
	union bpf_attr update = { .map_fd = MAP_FD };
	uint32_t key = number, value, completion = 64;
	uint64_t *fill;
	void *umem = mmap(NULL, size, PROT_READ | PROT_WRITE,
			  MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);

	if (umem == MAP_FAILED)
		return fail("map frames");
	reg.addr = (uintptr_t)umem;
	q->fd = socket(AF_XDP, SOCK_RAW | SOCK_CLOEXEC, 0);
	if (q->fd < 0)
		return fail("open AF_XDP socket");
	if (setsockopt(q->fd, SOL_XDP, XDP_UMEM_REG, &reg, sizeof(reg)) ||
	    setsockopt(q->fd, SOL_XDP, XDP_UMEM_FILL_RING, &ring, sizeof(ring)) ||
	    setsockopt(q->fd, SOL_XDP, XDP_UMEM_COMPLETION_RING, &completion, sizeof(completion)) ||
	    setsockopt(q->fd, SOL_XDP, XDP_RX_RING, &ring, sizeof(ring)) ||
	    getsockopt(q->fd, SOL_XDP, XDP_MMAP_OFFSETS, &off, &len))
		return fail("size the rings");
	if (map_ring(q->fd, XDP_UMEM_PGOFF_FILL_RING, &off.fr, ring * sizeof(uint64_t), &q->fill) ||
	    map_ring(q->fd, XDP_PGOFF_RX_RING, &off.rx, ring * sizeof(struct xdp_desc), &q->rx))
		return fail("map the rings");
	fill = q->fill.entries;
	for (uint32_t i = 0; i < ring; i++)
		fill[i] = (uint64_t)i * FRAME;
	q->fill.cached = ring;
	__atomic_store_n(q->fill.producer, ring, __ATOMIC_RELEASE);
	/* The sockets of whoever ran before may still be on their way out. */
	for (int try = 0; bind(q->fd, (struct sockaddr *)&addr, sizeof(addr)); try++) {
		if (errno != EBUSY || try == 200)
			return fail("bind");
		usleep(5000);
	}
	value = q->fd;
	update.key = (uintptr_t)&key;
	update.value = (uintptr_t)&value;
	if (syscall(SYS_bpf, BPF_MAP_UPDATE_ELEM, &update, sizeof(update)))
		return fail("enter the socket in the map");
	return 0;
}

/* Receives a batch and gives its frames back. Returns how many there were. */
static uint32_t step(struct queue *q, uint32_t mask)
{
	struct ring *rx = &q->rx, *fill = &q->fill;
	const struct xdp_desc *descs = rx->entries;
	uint64_t *frames = fill->entries;
	uint32_t n = __atomic_load_n(rx->producer, __ATOMIC_ACQUIRE) - rx->cached;

	if (!n)
		return 0;
	if (n > BATCH)
		n = BATCH;
	/* There are as many frames as entries: those received fit. */
	for (uint32_t i = 0; i < n; i++)
		frames[fill->cached++ & mask] = descs[rx->cached++ & mask].addr & ~(uint64_t)(FRAME - 1);
	__atomic_store_n(rx->consumer, rx->cached, __ATOMIC_RELEASE);
	__atomic_store_n(fill->producer, fill->cached, __ATOMIC_RELEASE);
	if (__atomic_load_n(fill->flags, __ATOMIC_RELAXED) & XDP_RING_NEED_WAKEUP)
		recvfrom(q->fd, NULL, 0, MSG_DONTWAIT, NULL, NULL);
	return n;
}

static int64_t now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000000000LL + t.tv_nsec;
}

int main(int argc, char **argv)
{
	struct pollfd wait[MAX_QUEUES + 1] = { { .fd = STDIN_FILENO, .events = POLLIN } };
	struct xdp_options granted;
	socklen_t len = sizeof(granted);
	volatile uint64_t *counters;
	int64_t since = 0;
	unsigned int ifindex, spins = 0;
	uint32_t ring;
	cpu_set_t one;
	int n;

	if (argc != 5 || !(ifindex = if_nametoindex(argv[1])) || (n = atoi(argv[2])) < 1 ||
	    n > MAX_QUEUES || !(ring = atoi(argv[3])) || ring & (ring - 1)) {
		fprintf(stderr, "usage: xsk_rx INTERFACE QUEUES RING CPU 3<XSKMAP 4<>COUNTERS\n");
		return 2;
	}
	CPU_ZERO(&one);
	CPU_SET(atoi(argv[4]), &one);
	if (sched_setaffinity(0, sizeof(one), &one))
		return fail("pin to CPU");
	counters = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, COUNTERS_FD, 0);
	if (counters == MAP_FAILED)
		return fail("map the counters");
	for (int i = 0; i < n; i++) {
		if (open_queue(&queues[i], ifindex, i, ring))
			return 1;
		wait[i + 1] = (struct pollfd){ .fd = queues[i].fd, .events = POLLIN };
	}
	if (getsockopt(queues[0].fd, SOL_XDP, XDP_OPTIONS, &granted, &len))
		return fail("ask for what was granted");
	printf("%s\n", granted.flags & XDP_OPTIONS_ZEROCOPY ? "zero-copy" : "copy");
	fflush(stdout);

	for (;;) {
		uint32_t got = 0;

		for (int i = 0; i < n; i++) {
			uint32_t k = step(&queues[i], ring - 1);

			if (k) {
				got += k;
				counters[0] += k;
				counters[1]++;
			}
		}
		if (got) {
			since = 0;
			continue;
		}
		if (!since) {
			since = now();
			spins = 0;
		} else if (now() - since < SPIN_NS) {
			if (++spins % YIELD_EVERY == 0)
				sched_yield();
		} else {
			if (poll(wait, n + 1, -1) < 0 && errno != EINTR)
				return fail("poll");
			if (wait[0].revents)
				return 0;
			since = 0;
		}
	}
}
