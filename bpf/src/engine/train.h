/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * The engine's view of what arrives: one packet after another. At xdp a frame is one packet. At tc it may be a train:
 * the payloads of several datagrams of one sender behind the headers of one, whose lengths count all of them. Linux's
 * stack has not cut it yet (UDP_SEGMENT), or has joined it (GRO). It cuts a train every gso_size bytes.
 */
#pragma once
#include "engine.h"

#ifndef XSPIN_TC

/* An engine's answer to a packet: an xdp_action. */
#define XSPIN_PACKET static __always_inline int xspin_packet(struct xdp_md *ctx)

XSPIN_PACKET;

/* What becomes of a frame. */
static __always_inline int xspin_packets(struct xdp_md *ctx)
{
	return xspin_packet(ctx);
}

#else

#define XSPIN_PACKET static __noinline int xspin_packet(struct xdp_md *ctx)

XSPIN_PACKET;

enum {
	XSPIN_SEGMENTS = 128, /* of a train; UDP_MAX_SEGMENTS of the kernel */
	XSPIN_WHOLE = 0,      /* a packet that came alone, or that is looked at as a whole */
	XSPIN_UNCUT = -1,     /* a train that nobody here can cut */
};

/* An engine that cannot take a train for one packet, even one that nobody here can cut, says so before it includes this. */
#ifndef XSPIN_ONE_BY_ONE
#define XSPIN_ONE_BY_ONE 0
#endif

static long (*const bpf_loop)(__u32 n, void *fn, void *arg, __u64 flags) = (void *)181;

/* Segments of a train, and where its headers end. */
struct xspin_cut {
	__u32 segments;
	__u32 head;
};

static __always_inline struct xspin_cut xspin_cut(const struct xspin_frame *f, __u32 len, __u32 gso)
{
	struct xspin_cut none = {}, cut = {};
	const __u8 *eth = xspin_at_frame(f, 0, 14), *p = xspin_at_frame(f, 14, 20);
	__u32 hlen, n;

	if (!eth || !p)
		return none;
	if (*(__u16 *)(eth + 12) == bswap16(0x0800)) {
		hlen = (p[0] & 15) * 4;
		if (p[0] >> 4 != 4 || hlen < 20 || p[9] != 17 || *(__u16 *)(p + 6) & bswap16(0x3fff) ||
		    bswap16(*(__u16 *)(p + 2)) != len - 14)
			return none;
	} else if (*(__u16 *)(eth + 12) == bswap16(0x86dd)) {
		hlen = 40;
		if (!xspin_at_frame(f, 14, 40) || p[0] >> 4 != 6 || p[6] != 17 || bswap16(*(__u16 *)(p + 4)) != len - 54)
			return none;
	} else {
		return none;
	}
	p = xspin_at_frame(f, 14 + hlen, 8);
	if (!p || bswap16(*(__u16 *)(p + 4)) != len - 14 - hlen)
		return none;
	cut.head = 14 + hlen + 8;
	n = len - cut.head;
	if (!gso || n / gso > XSPIN_SEGMENTS)
		return none;
	cut.segments = (n + gso - 1) / gso;
	return cut.segments > XSPIN_SEGMENTS ? none : cut;
}

/*
 * A packet has come. Returns how many segments it has that are to be looked at one by one, by
 * xspin_segment_at(); or XSPIN_WHOLE: it is the one at hand; or XSPIN_UNCUT.
 */
static __always_inline int xspin_arrive(struct xdp_md *ctx, struct xspin_segment *g)
{
	const struct xspin_frame f = { ctx, g };
	__u32 len = ctx->len, gso = ctx->gso_size;
	struct xspin_cut cut;

	g->len = len;
	g->seen = len < XSPIN_SEEN ? len : XSPIN_SEEN;
	g->head = 0;
	g->base = 0;
	g->left = hook_sum_is_left(ctx);
	g->partial = g->left;
	if (xspin_look(ctx, g, 0))
		return XSPIN_UNCUT;
	if (likely(!gso) || xspin.has & XSPIN_HAS_TRAINS)
		return XSPIN_WHOLE;
	cut = xspin_cut(&f, len, gso);
	if (cut.segments == 1)
		return XSPIN_WHOLE;
	if (!cut.segments) /* TCP, or what else there may be */
		return xspin.writes || XSPIN_ONE_BY_ONE ? XSPIN_UNCUT : XSPIN_WHOLE;
	__builtin_memcpy(g->shared, g->image, XSPIN_SEEN);
	g->head = cut.head;
	g->partial = 1; /* or it could not be cut */
	return cut.segments;
}

static __always_inline int xspin_is_ipv4(const struct xspin_segment *g)
{
	return *(__u16 *)(g->shared + 12) == bswap16(0x0800);
}

/* Writes the lengths of a packet of len bytes to the headers in image. */
static __always_inline void xspin_measure(struct xspin_segment *g, __u32 len)
{
	__u16 *udp = (void *)(g->image + ((g->head - 8) & (XSPIN_SEEN - 1)));

	if (xspin_is_ipv4(g))
		*(__u16 *)(g->image + 16) = bswap16(len - 14);
	else
		*(__u16 *)(g->image + 18) = bswap16(len - 54);
	udp[2] = bswap16(len - g->head + 8);
}

/*
 * Makes the headers in image those of a packet of len bytes, as the kernel does when it cuts a train: lengths,
 * checksums, and an id of IPv4 that grows by i. The checksum of UDP is partial.
 */
static __always_inline void xspin_resize(struct xspin_segment *g, __u32 len, __u32 i)
{
	__u16 *udp = (void *)(g->image + ((g->head - 8) & (XSPIN_SEEN - 1))), *ip = (__u16 *)g->image + 7;
	const __u16 total = ip[1], id = ip[2], datagram = udp[2];

	xspin_measure(g, len);
	if (xspin_is_ipv4(g)) {
		ip[5] = xspin_update(ip[5], total, ip[1]);
		ip[2] = bswap16(bswap16(id) + i);
		ip[5] = xspin_update(ip[5], id, ip[2]);
	}
	if (udp[3]) /* else there is none */
		udp[3] = xspin_fold(udp[3] + (__u16)~datagram + udp[2]);
}

/* Has the i-th segment of a train be the packet at hand. False: there is none. */
static __always_inline int xspin_segment_at(struct xdp_md *ctx, struct xspin_segment *g, __u32 i)
{
	__u32 base = i * ctx->gso_size, left = ctx->len - g->head - base, n = ctx->gso_size;

	if (base >= ctx->len - g->head)
		return 0;
	if (n > left)
		n = left;
	g->base = base;
	g->len = g->head + n;
	g->seen = g->len < XSPIN_SEEN ? g->len : XSPIN_SEEN;
	if (xspin.reads || xspin.writes) {
		__builtin_memcpy(g->image, g->shared, XSPIN_SEEN);
		xspin_resize(g, g->len, i);
	} else {
		xspin_measure(g, g->len); /* for the format: nobody sees the rest */
	}
	return !xspin_look(ctx, g, g->head);
}

/* Keeps the headers of the first segment, and tells whether those of another are the same. Lengths, checksums and ids
 * differ anyway: image takes them over from the first. */
static __always_inline int xspin_same_headers(struct xspin_segment *g, __u32 i)
{
	const __u32 udp = (g->head - 8) & (XSPIN_SEEN - 1);
	__u64 other = 0;

	if (!i) {
		__builtin_memcpy(g->first, g->image, XSPIN_SEEN);
		return 1;
	}
	if (xspin_is_ipv4(g)) {
		*(__u32 *)(g->image + 16) = *(__u32 *)(g->first + 16);
		*(__u16 *)(g->image + 24) = *(__u16 *)(g->first + 24);
	} else {
		*(__u16 *)(g->image + 18) = *(__u16 *)(g->first + 18);
	}
	*(__u32 *)(g->image + udp + 4) = *(__u32 *)(g->first + udp + 4);
	for (int k = 0; k < XSPIN_SEEN / 8; k++) {
		__u64 differ = ((__u64 *)g->image)[k] ^ ((__u64 *)g->first)[k];
		int bytes = (int)g->head - 8 * k;

		if (bytes <= 0)
			break;
		other |= bytes < 8 ? differ & ((1ULL << (8 * bytes & 63)) - 1) : differ;
	}
	return !other;
}

/* Gives the train the headers that handlers have given each segment. */
static __always_inline long xspin_share_headers(struct xdp_md *ctx, struct xspin_segment *g)
{
	__builtin_memcpy(g->image, g->first, XSPIN_SEEN);
	xspin_resize(g, ctx->len, 0);
	return hook_store(ctx, 0, g->image, XSPIN_LENGTH(g->head, XSPIN_SEEN));
}

enum xspin_followed {
	XSPIN_ALONE,  /* the segment is a packet like another */
	XSPIN_BEHIND, /* it was dealt with, and nothing becomes of it */
	XSPIN_AGAIN,  /* the last one that was dealt with so is a packet like another after all */
};

/*
 * Deals with the segment at `at` of a train without a look at its headers, if that is what the engine would do with
 * those before it.
 */
static __noinline enum xspin_followed xspin_follow(struct xdp_md *ctx, struct xspin_segment *g, __u32 at);

/* The verdict of a train. */
struct xspin_verdict {
	struct xdp_md *ctx;
	int action; /* of each segment so far */
	int mixed;
	__u32 at; /* the next segment */
	__u32 n;
};

static long xspin_each(__u32 turn __attribute__((unused)), struct xspin_verdict *v)
{
	struct xspin_segment *g = xspin_segment();
	const __u32 i = v->at;
	int action = XDP_DROP;

	if (i >= v->n)
		return 1;
	if (!g) {
		v->mixed = 1;
		return 1;
	}
	switch (xspin_follow(v->ctx, g, i)) {
	case XSPIN_AGAIN:
		v->at = g->followed;
		return 0;
	case XSPIN_BEHIND:
		v->at = i + 1;
		v->mixed |= v->action != XDP_DROP;
		return 0;
	case XSPIN_ALONE:
		break;
	}
	v->at = i + 1;
	if (!xspin_segment_at(v->ctx, g, i)) {
		v->mixed = 1;
		return 1;
	}
	action = xspin_packet(v->ctx);
	if (!i)
		v->action = action;
	else if (action != v->action)
		v->mixed = 1;
	if (xspin.writes && action != XDP_DROP && !xspin_same_headers(g, i))
		v->mixed = 1;
	return 0;
}

/* What becomes of a frame: what becomes of each of its packets, if that is the same for all of them. */
static __always_inline int xspin_packets(struct xdp_md *ctx)
{
	struct xspin_counters *cpu = xspin_this_cpu();
	struct xspin_segment *g = xspin_segment();
	struct xspin_verdict v = { .ctx = ctx, .action = XDP_DROP };
	int segments;

	if (!cpu || !g)
		return XDP_PASS;
	segments = xspin_arrive(ctx, g);
	if (segments == XSPIN_UNCUT) {
		cpu->uncut++;
		return XDP_PASS;
	}
	if (likely(segments == XSPIN_WHOLE))
		return xspin_packet(ctx);
	v.n = segments;
	bpf_loop(2 * segments, xspin_each, &v, 0);
	if (v.mixed) {
		cpu->mixed++;
		return XDP_DROP;
	}
	if (v.action != XDP_DROP && xspin.writes && xspin_share_headers(ctx, g))
		return XDP_DROP;
	return v.action;
}

#endif
