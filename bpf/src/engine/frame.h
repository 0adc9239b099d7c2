/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The functions of xspin_handler.h that are about the frame. */
#pragma once

__weak long xspin_load(struct xdp_md *ctx, __u32 off, void *to, __u32 n)
{
	return bpf_xdp_load_bytes(ctx, off, to, n);
}

__weak long xspin_store(struct xdp_md *ctx, __u32 off, const void *from, __u32 n)
{
	return bpf_xdp_store_bytes(ctx, off, from, n);
}

static __always_inline void xspin_find(struct xdp_md *ctx, const struct xspin_her *her, struct xspin_headers *h)
{
	const __u8 *frame = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end;
	const __u8 *p = frame + 14;
	__u32 hlen, total, n;

	__builtin_memset(h, 0, sizeof(*h));
	h->payload_len = her->len;
	if (p > end)
		return;
	h->payload = 14;
	h->payload_len = her->len - 14;
	if (p + 20 > end || *(__u16 *)(frame + 12) != bswap16(0x0800) || p[0] >> 4 != 4)
		return;
	hlen = (p[0] & 15) * 4;
	total = bswap16(*(__u16 *)(p + 2));
	if (hlen < 20 || p + hlen > end || total < hlen || total > her->len - 14)
		return;
	h->ipv4 = 14;
	h->payload = 14 + hlen;
	h->payload_len = total - hlen;
	if (*(__u16 *)(p + 6) & bswap16(0x3fff))
		return; /* a fragment, the first one too */

	switch (p[9]) {
	case 17:
		p += hlen;
		if (total - hlen < 8 || p + 8 > end)
			return;
		n = bswap16(*(__u16 *)(p + 4));
		if (n < 8 || n > total - hlen)
			return;
		h->udp = h->payload;
		h->payload += 8;
		h->payload_len = n - 8;
		return;
	case 1:
		p += hlen;
		if (total - hlen < 8 || p + 8 > end)
			return;
		h->icmp = h->payload;
		h->payload += 8;
		h->payload_len -= 8;
		return;
	case 6:
		p += hlen;
		if (total - hlen < 20 || p + 20 > end)
			return;
		n = (p[12] >> 4) * 4;
		if (n < 20 || n > total - hlen || p + n > end)
			return;
		h->tcp = h->payload;
		h->payload += n;
		h->payload_len -= n;
		return;
	}
}

__weak int xspin_headers(struct xdp_md *ctx, const struct xspin_her *her, struct xspin_headers *h)
{
	xspin_find(ctx, her, h);
	return 0;
}

/* Whether hosts may answer from the frame's destination to its source (RFC 1122, 3.2.1.3);
 * `ip` are the first 20 bytes of the IPv4 header. */
static __always_inline int xspin_answerable(const __u8 *frame, const __u8 *ip)
{
	const __u8 *src = ip + 12, *dst = ip + 16;

	if ((frame[0] | frame[6]) & 1 || !src[0] || src[0] == 127)
		return 0;
	if (src[0] >> 4 == 0xe || dst[0] >> 4 == 0xe)
		return 0; /* multicast */
	if (*(__u32 *)src == ~0U || *(__u32 *)dst == ~0U)
		return 0;
	return *(__u32 *)src != *(__u32 *)dst;
}

/* Exchanges the MAC and the IPv4 addresses. */
static __always_inline void xspin_swap(__u8 *frame, __u8 *ip)
{
	__u16 *eth = (__u16 *)frame, half;
	__u32 *address = (__u32 *)(ip + 12), whole;

	half = eth[0], eth[0] = eth[3], eth[3] = half;
	half = eth[1], eth[1] = eth[4], eth[4] = half;
	half = eth[2], eth[2] = eth[5], eth[5] = half;
	whole = address[0], address[0] = address[1], address[1] = whole;
}

/* Has the verifier forget what it knows of a number. So it looks once at what comes after a
 * loop, whichever time the loop was left. */
#define xspin_forget(x, any) asm volatile("%0 ^= %1\n%0 ^= %1" : "+&r"(x) : "r"(any))

/*
 * The Internet checksum, not inverted, of n bytes of the frame from `off` on, which is even, and
 * of what sum has; never 0 unless all of it is. -1 if the frame does not have them in one piece, or
 * they are more than XSPIN_SUMMED. 512 at a time: Linux 6.12 takes no more.
 */
enum { XSPIN_SUMMED = 16384 };

static __always_inline long xspin_sum_frame(struct xdp_md *ctx, __u64 off, __u64 n, __u32 sum)
{
	const __u8 *end = (void *)(long)ctx->data_end, *p;
	const __u64 any = n;

#define XSPIN_SUM_PIECE(len, add)                       \
	do {                                            \
		p = (void *)(long)ctx->data + off;      \
		if (p + (len) > end)                    \
			return -1;                      \
		add;                                    \
		off += (len);                           \
		xspin_forget(off, any);                 \
		off &= 2 * XSPIN_SUMMED - 1;            \
	} while (0)

	xspin_forget(n, any);
	n &= 0xffff;
	xspin_forget(off, any);
	off &= 2 * XSPIN_SUMMED - 1;
	for (int i = 0; n >= 512; i++) {
		if (i == XSPIN_SUMMED / 512)
			return -1;
		XSPIN_SUM_PIECE(512, sum = bpf_csum_diff(0, 0, (void *)p, 512, sum));
		n -= 512;
	}
	/* What is left, in powers of two. */
#define XSPIN_SUM_REST(len) \
	if (n & (len))      \
	XSPIN_SUM_PIECE(len, sum = bpf_csum_diff(0, 0, (void *)p, len, sum))
	XSPIN_SUM_REST(256);
	XSPIN_SUM_REST(128);
	XSPIN_SUM_REST(64);
	XSPIN_SUM_REST(32);
	XSPIN_SUM_REST(16);
	XSPIN_SUM_REST(8);
	XSPIN_SUM_REST(4);
	sum = xspin_fold(sum);
	if (n & 2)
		XSPIN_SUM_PIECE(2, sum += *(__u16 *)p);
	if (n & 1)
		XSPIN_SUM_PIECE(1, sum += *p);
	return xspin_fold(sum);
#undef XSPIN_SUM_REST
#undef XSPIN_SUM_PIECE
}

/* Whether the checksum of the IPv4 header is right, which begins at frame + 14; its first 20
 * bytes are there, and xspin_headers() has found the rest. */
static __always_inline int xspin_ipv4_right(const __u8 *frame, const __u8 *end)
{
	const __u32 *word = (void *)(frame + 14);
	const __u64 len = (frame[14] & 15) * 4;
	__u64 sum = (__u64)word[0] + word[1] + word[2] + word[3] + word[4], off = 14 + 20;

	for (int i = 0; i < 10 && off < 14 + len; i++) { /* options */
		const __u8 *p;

		xspin_forget(off, len);
		off &= 127;
		p = frame + off;
		if (p + 4 > end)
			return 0;
		sum += *(__u32 *)p;
		off += 4;
	}
	sum = (sum >> 32) + (__u32)sum;
	sum = (sum >> 16) + (__u16)sum; /* of up to 18 bits */
	return xspin_fold(sum) == 0xffff;
}

__weak int xspin_reply_udp(struct xdp_md *ctx, const struct xspin_her *her)
{
	__u8 *frame = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end, *ip = frame + 14;
	struct xspin_headers h;
	__u16 *udp, port, hop;

	xspin_find(ctx, her, &h);
	if (!h.udp || ip + 20 > end || !xspin_answerable(frame, ip) || !xspin_ipv4_right(frame, end))
		return 0;
	udp = (__u16 *)(frame + (h.udp & 127));
	if ((void *)(udp + 4) > (void *)end || udp[0] == udp[1] || ip[8] <= 1)
		return 0;

	if (udp[3]) { /* 0: none */
		__u32 pseudo = *(__u16 *)(ip + 12) + *(__u16 *)(ip + 14) + *(__u16 *)(ip + 16) +
			       *(__u16 *)(ip + 18) + bswap16(17) + udp[2];
		long sum = xspin_sum_frame(ctx, h.udp, h.payload_len + 8, pseudo);
		__u16 want;

		if (sum < 0)
			return 0;
		want = ~xspin_fold(sum + (__u16)~udp[3]);
		want = want ?: 0xffff;
		/* A partial checksum is the sum of the pseudo-header, not inverted. */
		if (udp[3] != want && udp[3] != xspin_fold(pseudo))
			return 0;
		udp[3] = want;
	}
	hop = *(__u16 *)(ip + 8);
	ip[8]--;
	*(__u16 *)(ip + 10) = xspin_update(*(__u16 *)(ip + 10), hop, *(__u16 *)(ip + 8));
	port = udp[0], udp[0] = udp[1], udp[1] = port;
	xspin_swap(frame, ip);
	return 1;
}

__weak int xspin_reply_icmp_echo(struct xdp_md *ctx, const struct xspin_her *her)
{
	__u8 *frame = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end, *ip = frame + 14;
	struct xspin_headers h;
	__u16 *icmp, hop;
	long sum;

	xspin_find(ctx, her, &h);
	if (!h.icmp || ip + 20 > end || !xspin_answerable(frame, ip) || !xspin_ipv4_right(frame, end))
		return 0;
	icmp = (__u16 *)(frame + (h.icmp & 127));
	if ((void *)(icmp + 4) > (void *)end || icmp[0] != bswap16(0x0800))
		return 0;
	/* Of what is behind type, code and checksum: it is the reply's sum, too. */
	sum = xspin_sum_frame(ctx, h.icmp + 4, h.payload_len + 4, 0);
	if (sum < 0 || xspin_fold(sum + icmp[0] + icmp[1]) != 0xffff)
		return 0;
	icmp[0] = 0;
	icmp[1] = ~sum;
	hop = *(__u16 *)(ip + 8);
	ip[8] = 64;
	*(__u16 *)(ip + 10) = xspin_update(*(__u16 *)(ip + 10), hop, *(__u16 *)(ip + 8));
	xspin_swap(frame, ip);
	return 1;
}
