/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The frame, as the engines reach it, and the functions of xspin_handler.h that are about it. */
#pragma once

/*
 * A length that the verifier knows to be 1 to max, a power of two. It was checked before:
 * this tells the verifier, which does not believe a comparison of two registers.
 */
#define XSPIN_LENGTH(n, max)                             \
	({                                               \
		__u64 n_ = (n);                          \
		asm volatile("%0 += -1; %0 &= %1; %0 += 1" \
			     : "+r"(n_)                  \
			     : "i"((max) - 1));          \
		n_;                                      \
	})

#ifdef XSPIN_TC

/*
 * The packet that handlers are called for: a frame that came alone, or a segment of a train as
 * it would have come alone. Its first bytes are copied to here, as most of a packet of Linux's
 * stack may be in many pieces; what is behind them is read where it is.
 *
 * The segments of a train have one set of headers, those of a frame with all of them. Here
 * they are those of the segment at hand, and what handlers write to them stays here until all
 * segments were looked at: see train.h.
 *
 * A row for each CPU: a tc program does not nest on one.
 */
enum { XSPIN_SEEN = 128, XSPIN_IMAGE = 16384 };

struct xspin_segment {
	__u32 len;	/* of the packet, bytes */
	__u32 seen;	/* of these, in image */
	__u32 head;	/* bytes of headers that it has in common with the others; 0: it came alone */
	__u32 base;	/* what lies behind them lies so many bytes further back in the train */
	__u32 partial;	/* its UDP checksum is: the device is to complete it */
	__u32 left;	/* Linux says so */
	__u32 followed; /* the last segment that xspin_follow() has dealt with */
	__u32 pad;
	__u8 shared[XSPIN_SEEN]; /* the headers as they came */
	__u8 first[XSPIN_SEEN + 8]; /* those of the first segment, as handlers left them */
	__u8 piece[512 + 8];	 /* what is summed up */
	__u8 image[XSPIN_IMAGE + XSPIN_SEEN];
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct xspin_segment);
} xspin_segments SEC(".maps");

struct bpf_dynptr {
	__u64 opaque[2];
} __attribute__((aligned(8)));

static long (*const bpf_dynptr_from_mem)(void *data, __u32 size, __u64 flags, struct bpf_dynptr *ptr) = (void *)197;
static long (*const bpf_dynptr_read)(void *dst, __u32 len, const struct bpf_dynptr *src, __u32 offset, __u64 flags) = (void *)201;
static long (*const bpf_dynptr_write)(const struct bpf_dynptr *dst, __u32 offset, void *src, __u32 len, __u64 flags) = (void *)202;

static __always_inline struct xspin_segment *xspin_segment(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&xspin_segments, &zero);
}

/* Has image have the bytes from `from` on, up to those that are seen. */
static __always_inline long xspin_look(struct xdp_md *ctx, struct xspin_segment *g, __u32 from)
{
	__u32 n;

	if (from >= g->seen || from >= XSPIN_SEEN)
		return 0;
	n = g->seen - from;
	return hook_load(ctx, g->base + from, g->image + from, XSPIN_LENGTH(n, XSPIN_SEEN));
}

enum { XSPIN_EFAULT = -14 };

/*
 * Headers of a segment are in image alone; a dynptr takes any length from there. What of the
 * payload is wanted with them is copied to behind them first.
 */
static __noinline long xspin_load_image(struct xdp_md *ctx, struct xspin_segment *g, __u32 to)
{
	__u32 from = g->head, n;

	if (from >= XSPIN_SEEN || to > XSPIN_IMAGE)
		return XSPIN_EFAULT;
	if (to <= g->seen || to <= from)
		return 0;
	n = to - from;
	return hook_load(ctx, g->base + from, g->image + from, XSPIN_LENGTH(n, XSPIN_IMAGE));
}

static __noinline long xspin_store_image(struct xdp_md *ctx, struct xspin_segment *g, __u32 to)
{
	__u32 from = g->head, n;

	if (from >= XSPIN_SEEN || to > XSPIN_IMAGE)
		return XSPIN_EFAULT;
	if (to <= from)
		return 0;
	n = to - from;
	return hook_store(ctx, g->base + from, g->image + from, XSPIN_LENGTH(n, XSPIN_IMAGE)) ?: xspin_look(ctx, g, from);
}

__weak long xspin_load(struct xdp_md *ctx, __u32 off, void *to, __u32 n)
{
	struct xspin_segment *g = xspin_segment();
	struct bpf_dynptr image;

	if (!g)
		return XSPIN_EFAULT;
	if (!g->head)
		return hook_load(ctx, off, to, n);
	if (n > g->len || off > g->len - n)
		return XSPIN_EFAULT;
	if (off >= g->head)
		return hook_load(ctx, g->base + off, to, n);
	return xspin_load_image(ctx, g, off + n) ?: bpf_dynptr_from_mem(g->image, XSPIN_IMAGE, 0, &image) ?: bpf_dynptr_read(to, n, &image, off, 0);
}

__weak long xspin_store(struct xdp_md *ctx, __u32 off, const void *from, __u32 n)
{
	struct xspin_segment *g = xspin_segment();
	struct bpf_dynptr image;

	if (!g || n > g->len || off > g->len - n)
		return XSPIN_EFAULT;
	if (off >= g->head)
		return hook_store(ctx, g->base + off, from, n) ?: xspin_look(ctx, g, g->head);
	if (off + n > XSPIN_IMAGE)
		return XSPIN_EFAULT;
	return bpf_dynptr_from_mem(g->image, XSPIN_IMAGE, 0, &image) ?: bpf_dynptr_write(&image, off, (void *)from, n, 0) ?: xspin_store_image(ctx, g, off + n);
}

/* xspin_load(), where one call of the kernel does at xdp. */
#define xspin_fetch xspin_load

struct xspin_frame {
	struct xdp_md *ctx;
	struct xspin_segment *segment; /* null: nothing can be reached */
};

static __always_inline struct xspin_frame xspin_frame(struct xdp_md *ctx)
{
	struct xspin_frame f = { ctx, xspin_segment() };

	return f;
}

/* Where n bytes of the packet are, from off on, which the verifier must know to have a bound. Null if
 * they are not all among its first, which are those that are in one piece. */
static __always_inline void *xspin_at_frame(const struct xspin_frame *f, __u32 off, __u32 n)
{
	struct xspin_segment *g = f->segment;

	if (!g || off > XSPIN_SEEN - n || off + n > g->seen)
		return 0;
	/* Or clang calculates with it before it is compared with null, which Linux 6.12 refuses. */
	asm volatile("" : "+r"(g));
	return g->image + off;
}

/* The first n bytes were written to; up to XSPIN_SEEN. */
static __always_inline void xspin_wrote(const struct xspin_frame *f, __u32 n)
{
	if (f->segment && !f->segment->head)
		hook_store(f->ctx, 0, f->segment->image, XSPIN_LENGTH(n, XSPIN_SEEN));
}

static __always_inline int xspin_partial(const struct xspin_frame *f)
{
	return f->segment && f->segment->partial;
}

/* Whether the device is to complete the checksum of whatever becomes of the frame, too. */
static __always_inline int xspin_sums_later(const struct xspin_frame *f)
{
	return f->segment && f->segment->left;
}

/* Whether an answer has its checksum where the device would complete it, at 40. */
static __always_inline int xspin_fits_sum(const struct xspin_frame *f)
{
	return f->segment && (!f->segment->left || f->segment->image[14] == 0x45);
}

static __always_inline __u32 xspin_length(const struct xspin_frame *f)
{
	return f->segment ? f->segment->len : 0;
}

#else

__weak long xspin_load(struct xdp_md *ctx, __u32 off, void *to, __u32 n)
{
	return hook_load(ctx, off, to, n);
}

__weak long xspin_store(struct xdp_md *ctx, __u32 off, const void *from, __u32 n)
{
	return hook_store(ctx, off, from, n);
}

#define xspin_fetch hook_load

struct xspin_frame {
	void *data;
	void *data_end;
};

static __always_inline struct xspin_frame xspin_frame(struct xdp_md *ctx)
{
	struct xspin_frame f = { (void *)(long)ctx->data, (void *)(long)ctx->data_end };

	return f;
}

static __always_inline void *xspin_at_frame(const struct xspin_frame *f, __u32 off, __u32 n)
{
	void *p = f->data + off;

	return p + n <= f->data_end ? p : 0;
}

static __always_inline void xspin_wrote(const struct xspin_frame *f __attribute__((unused)), __u32 n __attribute__((unused))) {}

static __always_inline int xspin_partial(const struct xspin_frame *f __attribute__((unused)))
{
	return 0; /* nothing tells but the checksum itself */
}

static __always_inline int xspin_sums_later(const struct xspin_frame *f __attribute__((unused)))
{
	return 0;
}

static __always_inline int xspin_fits_sum(const struct xspin_frame *f __attribute__((unused)))
{
	return 1;
}

/* In one piece, or the NIC would not have called; no helper is asked. */
static __always_inline __u32 xspin_length(const struct xspin_frame *f)
{
	return f->data_end - f->data;
}

#endif

static __always_inline void xspin_find(const struct xspin_frame *f, const struct xspin_her *her, struct xspin_headers *h)
{
	const __u8 *frame, *p;
	__u32 hlen, total, n;

	__builtin_memset(h, 0, sizeof(*h));
	h->payload_len = her->len;
	frame = xspin_at_frame(f, 0, 14);
	if (!frame)
		return;
	h->payload = 14;
	h->payload_len = her->len - 14;
	p = xspin_at_frame(f, 14, 20);
	if (!p || *(__u16 *)(frame + 12) != bswap16(0x0800) || p[0] >> 4 != 4)
		return;
	hlen = (p[0] & 15) * 4;
	total = bswap16(*(__u16 *)(p + 2));
	if (hlen < 20 || !xspin_at_frame(f, 14 + hlen, 0) || total < hlen || total > her->len - 14)
		return;
	h->ipv4 = 14;
	h->payload = 14 + hlen;
	h->payload_len = total - hlen;
	if (*(__u16 *)(p + 6) & bswap16(0x3fff))
		return; /* a fragment, the first one too */

	switch (p[9]) {
	case 17:
		p = xspin_at_frame(f, 14 + hlen, 8);
		if (total - hlen < 8 || !p)
			return;
		n = bswap16(*(__u16 *)(p + 4));
		if (n < 8 || n > total - hlen)
			return;
		h->udp = h->payload;
		h->payload += 8;
		h->payload_len = n - 8;
		return;
	case 1:
		if (total - hlen < 8 || !xspin_at_frame(f, 14 + hlen, 8))
			return;
		h->icmp = h->payload;
		h->payload += 8;
		h->payload_len -= 8;
		return;
	case 6:
		p = xspin_at_frame(f, 14 + hlen, 20);
		if (total - hlen < 20 || !p)
			return;
		n = (p[12] >> 4) * 4;
		if (n < 20 || n > total - hlen || !xspin_at_frame(f, 14 + hlen + n, 0))
			return;
		h->tcp = h->payload;
		h->payload += n;
		h->payload_len -= n;
		return;
	}
}

__weak int xspin_headers(struct xdp_md *ctx, const struct xspin_her *her, struct xspin_headers *h)
{
	struct xspin_frame f = xspin_frame(ctx);

	xspin_find(&f, her, h);
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

#ifdef XSPIN_TC

static __noinline long xspin_sum_frame(struct xdp_md *ctx, __u64 off, __u64 n, __u32 sum)
{
	struct xspin_segment *g = xspin_segment();

	if (!g)
		return -1;
	for (int i = 0; i <= XSPIN_SUMMED / 512 && n; i++) {
		__u64 l = n < 512 ? n : 512;

		xspin_forget(l, off);
		l = XSPIN_LENGTH(l, 512);
		if (xspin_load(ctx, off, g->piece, l))
			return -1;
		*(__u32 *)(g->piece + l) = 0; /* sums are of whole words */
		sum = xspin_fold(bpf_csum_diff(0, 0, (void *)g->piece, (l + 3) & 1020, sum));
		off += l;
		n -= l;
		xspin_forget(off, n);
		xspin_forget(n, off);
	}
	return n ? -1 : xspin_fold(sum);
}

#else

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

#endif

/* Whether the checksum of the IPv4 header is right; its first 20 bytes are at ip, and xspin_find() has
 * found the rest. */
static __always_inline int xspin_ipv4_right(const struct xspin_frame *f, const __u8 *ip)
{
	const __u32 *word = (void *)ip;
	const __u64 len = (ip[0] & 15) * 4;
	__u64 sum = (__u64)word[0] + word[1] + word[2] + word[3] + word[4], off = 14 + 20;

	for (int i = 0; i < 10 && off < 14 + len; i++) { /* options */
		const __u32 *p;

		xspin_forget(off, len);
		off &= 127;
		p = xspin_at_frame(f, off, 4);
		if (!p)
			return 0;
		sum += *p;
		off += 4;
	}
	sum = (sum >> 32) + (__u32)sum;
	sum = (sum >> 16) + (__u16)sum; /* of up to 18 bits */
	return xspin_fold(sum) == 0xffff;
}

__weak int xspin_reply_udp(struct xdp_md *ctx, const struct xspin_her *her)
{
	struct xspin_frame f = xspin_frame(ctx);
	struct xspin_headers h;
	__u16 *udp, port, hop;
	__u8 *frame, *ip;

	xspin_find(&f, her, &h);
	frame = xspin_at_frame(&f, 0, 34);
	if (!h.udp || !frame)
		return 0;
	ip = frame + 14;
	if (!xspin_answerable(frame, ip) || !xspin_ipv4_right(&f, ip))
		return 0;
	udp = xspin_at_frame(&f, h.udp & 127, 8);
	if (!udp || udp[0] == udp[1] || ip[8] <= 1)
		return 0;

	if (udp[3] && !xspin_partial(&f)) { /* 0: none */
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
	xspin_wrote(&f, h.udp + 8);
	return 1;
}

__weak int xspin_reply_icmp_echo(struct xdp_md *ctx, const struct xspin_her *her)
{
	struct xspin_frame f = xspin_frame(ctx);
	struct xspin_headers h;
	__u16 *icmp, hop;
	__u8 *frame, *ip;
	long sum;

	xspin_find(&f, her, &h);
	frame = xspin_at_frame(&f, 0, 34);
	if (!h.icmp || !frame)
		return 0;
	ip = frame + 14;
	if (!xspin_answerable(frame, ip) || !xspin_ipv4_right(&f, ip))
		return 0;
	icmp = xspin_at_frame(&f, h.icmp & 127, 8);
	if (!icmp || icmp[0] != bswap16(0x0800))
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
	xspin_wrote(&f, h.icmp + 8);
	return 1;
}
