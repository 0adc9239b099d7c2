/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Peers and traffic of the benchmarks, and the programs a lab may need. */
#include "kernel.h"

const volatile __u32 target; /* interface index; of xspin_echo a port */

/*
 * What xspin_segments sends next: segment `next` of `count`, of message `id` +
 * `turn`: the segments of `among` messages take turns. One CPU sends.
 */
struct xspin_segments {
	__u32 id, next, count;
	__u32 turn, among; /* 0: 1 */
	__u32 step; /* bytes from a segment's offset to the next one's */
	__u32 every; /* so many segments ask for an acknowledgement once, and the last; 0: none */
	__u16 ask; /* flags of those that do */
	__u16 last; /* flags of a message's last */
} segments;

struct {
	__uint(type, BPF_MAP_TYPE_XSKMAP);
	__uint(max_entries, 64);
	__uint(key_size, 4);
	__uint(value_size, 4);
} bare_sockets SEC(".maps");

SEC("xdp.frags")
int xspin_pass(struct xdp_md *ctx)
{
	return XDP_PASS;
}

SEC("xdp.frags")
int xspin_drop(struct xdp_md *ctx)
{
	return XDP_DROP;
}

/* The least that brings a frame to AF_XDP: one socket a queue, no questions. */
SEC("xdp.frags")
int xspin_bare(struct xdp_md *ctx)
{
	return bpf_redirect_map(&bare_sockets, ctx->rx_queue_index, XDP_PASS);
}

/* The least that answers: datagrams to the port `target` go back. */
SEC("xdp.frags")
int xspin_echo(struct xdp_md *ctx)
{
	__u8 *frame = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end;
	__u16 *eth = (__u16 *)frame, *udp = (__u16 *)(frame + 34), half;
	__u32 *ip = (__u32 *)(frame + 26), whole;

	if (frame + 42 > end || eth[6] != bswap16(0x0800) || frame[14] != 0x45 || frame[23] != 17 ||
	    udp[1] != bswap16(target))
		return XDP_PASS;
	for (int i = 0; i < 3; i++)
		half = eth[i], eth[i] = eth[i + 3], eth[i + 3] = half;
	whole = ip[0], ip[0] = ip[1], ip[1] = whole;
	half = udp[0], udp[0] = udp[1], udp[1] = half;
	udp[3] = 0; /* of a local sender it is a part only */
	return XDP_TX;
}

/* Live-frame runs of this send their frames out of `target`. */
SEC("xdp")
int xspin_send(struct xdp_md *ctx)
{
	return bpf_redirect(target, 0);
}

/* FPsPIN's SLMP header, big endian, behind Ethernet, IPv4 and UDP. */
struct slmp_header {
	__u16 flags;
	__u32 id, offset;
} __attribute__((packed));

enum { SLMP_AT = 14 + 20 + 8 };

/* Live-frame runs of this send segments of SLMP messages, one after the other,
 * out of `target`. The frame has all but the SLMP header. */
SEC("xdp")
int xspin_segments(struct xdp_md *ctx)
{
	struct slmp_header *h = (void *)(long)ctx->data + SLMP_AT;
	struct xspin_segments *s = &segments;
	__u32 k = s->next;
	__u16 flags = 0;

	if ((void *)(h + 1) > (void *)(long)ctx->data_end)
		return XDP_ABORTED;
	if (s->every && (k + 1) % s->every == 0)
		flags = s->ask;
	if (k + 1 >= s->count) {
		if (s->every)
			flags = s->ask;
		flags |= s->last;
	}
	h->id = bswap32(s->id + s->turn);
	h->offset = bswap32(k * s->step);
	if (++s->turn >= s->among) {
		s->turn = 0;
		if (++s->next >= s->count) {
			s->next = 0;
			s->id += s->among ?: 1;
		}
	}
	h->flags = __builtin_bswap16(flags);
	return bpf_redirect(target, 0);
}

char _license[] SEC("license") = "Dual BSD/GPL";
