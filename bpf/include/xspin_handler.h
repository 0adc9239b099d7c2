/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Handlers in eBPF, version 1. They run in the kernel, on the CPU that received
 * the packet, and answer from there. A whole file:
 *
 *   #include "xspin_handler.h"
 *
 *   XSPIN_PAYLOAD { return xspin_reply_udp(ctx, her) ? xspin_send(her) : XSPIN_DROP; }
 *
 *   XSPIN_CONTEXT(PAYLOAD);
 *   XSPIN_LICENSE("GPL");
 *
 * A handler has two arguments: ctx, for the functions below, and her, the request.
 * What it returns is an xspin_code. docs/kernel-handlers.md has more.
 *
 * Costs were measured in loops of 200 on Linux 6.18 on a virtual CPU: good for comparing.
 */
#pragma once
#include "xspin_kernel.h"

#define XSPIN_VERSION 1

/* What a handler returns. */
enum xspin_code {
	XSPIN_SUCCESS,
	XSPIN_DROP, /* the packet counts as dropped; from a header handler: no payload handler */
	XSPIN_FAIL, /* the handler failed, as with any code that is not listed: nothing is sent */
	XSPIN_SEGV, /* the same, for an access outside of memory */
	XSPIN_PROCEED, /* from a header handler: deposit into a window. No packet has one yet: fails */
	XSPIN_HAND_OVER, /* from a header handler of messages: handlers on HPUs take it. See XSPIN_MESSAGES */
	XSPIN_PROCESS_DATA = XSPIN_SUCCESS, /* from a header handler: run the payload handler */
	XSPIN_PENDING = 16, /* may be added; without a meaning for packets */
};

enum xspin_flags {
	XSPIN_EOM = 1 << 0, /* the last packet of its message */
};

/*
 * Handler execution request: numbers only. A pointer into the frame would be good
 * until the next call that may move it, so each function derives its own, and checks it.
 */
struct xspin_her {
	__u32 len;	   /* of the frame, bytes */
	__u32 payload;	   /* where the format's header ends, bytes from the frame's first */
	__u32 payload_len; /* bytes from there, without padding if the format knows */
	__u32 offset;	   /* of the payload in its message, bytes */
	__u32 key[8];	   /* words that name the message, masked; the rest 0 */
	__u32 flags;	   /* xspin_flags */
	__u32 hpu;	   /* which this is: the CPU's number */
	__u32 hpus;	   /* how many there may be */
	__u32 action;	   /* what becomes of the frame: XDP_DROP, until a function asks for more.
			      Set by hand to anything but XDP_DROP, XDP_TX and XDP_PASS: fails */
	__u32 slot;	   /* of the message: no two in flight have the same. xspin_message.h only */
};

/* --- what the loader sets before a life of the context: constants for the verifier,
 * which removes the code that they switch off --- */

/* A word of the frame under a mask; no mask: not in the format. */
struct xspin_word {
	__u32 mask;
	__u16 off;  /* bytes, multiple of 4, <= 508 */
	__u16 need; /* frame bytes that must be there */
};

struct xspin_constants {
	__u64 memory;	  /* bytes of HPU memory that all HPUs share */
	__u64 hpu_memory; /* bytes of HPU memory of each HPU */
	struct xspin_word key[8];
	struct xspin_word offset;
	struct xspin_word length;
	struct xspin_word eom; /* without a mask, its value is 0 */
	__u32 eom_start;
	__u32 eom_end;
	__u32 length_from; /* the field counts bytes from here */
	__u32 header;	   /* bytes before the payload */
	__u32 hpus;
	__u8 nkey;
	__u8 offset_shift; /* to the lowest bit of the mask */
	__u8 length_shift;
	__u8 whole; /* every packet is a message: all three handlers run */
};

const volatile struct xspin_constants xspin = {};
const volatile __u32 xspin_version = XSPIN_VERSION;

/* --- counters, a row for each CPU: user space maps them --- */

/*
 * Sum and count belong together. One CPU writes: begin, sum, count, end, in this
 * order. A reader reads end first and begin last, and again if they differ. (In
 * order they are on x86; elsewhere a pair may be off by the packet under way.)
 */
struct xspin_pair {
	__u64 begin;
	__u64 sum;
	__u64 count;
	__u64 end;
};

struct xspin_counters {
	__u64 handled;	/* packets that handlers were called for; the last may be with them still */
	__u64 dropped;	/* of these: Drop */
	__u64 failed;	/* of these: anything but Success and Drop */
	__u64 sent;	/* of these: left by XDP_TX */
	__u64 to_stack; /* of these: went to Linux */
	__u64 fault;	/* the last failure: code, and in the upper half which handler (xspin_has) */
	__u64 timed;	/* packets whose time was taken, one in XSPIN_TIMED */
	__u64 time;	/* of these: ns in handlers */
	__u64 time_log2[32]; /* of these: how many in 2^(i-1) to 2^i - 1 ns; the last: all longer */
	struct xspin_pair user[16];
};
_Static_assert(sizeof(struct xspin_counters) % 64 == 0, "CPUs share no cache line");
_Static_assert(sizeof(struct xspin_counters) <= 1024, "a row is small");

enum { XSPIN_TIMED = 64 };

/* An element for each possible CPU, made so by the loader. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct xspin_counters);
} xspin_cpu SEC(".maps");

/*
 * HPU memory, in elements of 1 MiB: the verifier lets a program reach the first 512 MiB
 * of an element, and any number of elements. The loader puts the context's memory in
 * the place of these. BPF_F_INNER_MAP is how that was made.
 */
enum { XSPIN_ELEMENT = 1 << 20 };

struct xspin_element {
	__u8 bytes[XSPIN_ELEMENT];
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE | BPF_F_INNER_MAP);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct xspin_element);
} xspin_shared SEC(".maps"), xspin_own SEC(".maps");

/*
 * The handlers. Each is a global function, so that the verifier checks it once and by
 * itself, and a rejection names it. Weak, so that clang neither folds it into the
 * engine nor drops an argument that it does not use: the verifier takes what BTF says.
 * The tag tells it that her is never null.
 */
#define XSPIN_HER struct xspin_her *her __attribute__((unused, btf_decl_tag("arg:nonnull")))
#define XSPIN_HANDLER(name) __weak int name(struct xdp_md *ctx __attribute__((unused)), XSPIN_HER)

#define XSPIN_HEADER XSPIN_HANDLER(xspin_header)
#define XSPIN_PAYLOAD XSPIN_HANDLER(xspin_payload)
#define XSPIN_COMPLETION XSPIN_HANDLER(xspin_completion)

int xspin_header(struct xdp_md *ctx, struct xspin_her *her);
int xspin_payload(struct xdp_md *ctx, struct xspin_her *her);
int xspin_completion(struct xdp_md *ctx, struct xspin_her *her);

#define XSPIN_LICENSE(name) char _license[] SEC("license") = name

/*
 * Names the handlers that there are, joined by |, of HEADER, PAYLOAD and COMPLETION, and
 * makes the program that calls them.
 */
#define XSPIN_CONTEXT(handlers)                                            \
	SEC("xdp.frags") int xspin_context(struct xdp_md *ctx)             \
	{                                                                  \
		enum { HEADER = XSPIN_HAS_HEADER,                          \
		       PAYLOAD = XSPIN_HAS_PAYLOAD,                        \
		       COMPLETION = XSPIN_HAS_COMPLETION };                \
		return xspin_run(ctx, handlers);                           \
	}                                                                  \
	_Static_assert(1, "for the semicolon")

enum xspin_has {
	XSPIN_HAS_HEADER = 1 << 0,
	XSPIN_HAS_PAYLOAD = 1 << 1,
	XSPIN_HAS_COMPLETION = 1 << 2,
	XSPIN_HAS_HAND_OVER = 1 << 3, /* the header handler may return it */
	XSPIN_HAS_DEPOSIT = 1 << 4, /* of a failure: no handler, but xspin_message.h's own deposit */
};

/* --- what handlers call. All of it is inlined: a handler has 192 bytes of stack, and
 * nothing that it calls here takes more --- */

/* Has the frame sent back where it came from when the handlers have returned. Free. */
static __always_inline int xspin_send(struct xspin_her *her)
{
	her->action = XDP_TX;
	return XSPIN_SUCCESS;
}

/* Leaves the frame, as it then is, to Linux. Free. The last that asks has it: a frame
 * is sent or left to Linux, not both. */
static __always_inline int xspin_to_stack(struct xspin_her *her)
{
	her->action = XDP_PASS;
	return XSPIN_SUCCESS;
}

/* CLOCK_MONOTONIC in ns. 24 ns. */
static __always_inline __u64 xspin_now(void)
{
	return bpf_ktime_get_ns();
}

/* Copies n bytes of the frame from off on; n > 0, for the verifier too. Negative if the
 * frame does not have them. 5 ns up to 128 bytes, 17 ns for 1400. */
static __always_inline long xspin_load(struct xdp_md *ctx, __u32 off, void *to, __u32 n)
{
	return bpf_xdp_load_bytes(ctx, off, to, n);
}

/* The other direction, at the same cost. */
static __always_inline long xspin_store(struct xdp_md *ctx, __u32 off, const void *from, __u32 n)
{
	return bpf_xdp_store_bytes(ctx, off, from, n);
}

static __always_inline struct xspin_counters *xspin_this_cpu(void)
{
	__u32 cpu = bpf_get_smp_processor_id();

	return bpf_map_lookup_elem(&xspin_cpu, &cpu);
}

/* Adds n to user counter i, 0 to 15, and one to how often; any other i counts nothing. 2 ns. */
static __always_inline void xspin_count(__u32 i, __u64 n)
{
	struct xspin_counters *cpu = xspin_this_cpu();
	struct xspin_pair *p;

	if (!cpu || i >= 16)
		return;
	p = &cpu->user[i];
	WRITE_ONCE(p->begin, p->begin + 1);
	WRITE_ONCE(p->sum, p->sum + n);
	WRITE_ONCE(p->count, p->count + 1);
	WRITE_ONCE(p->end, p->begin);
}

static __always_inline void *xspin_at(void *map, __u64 at, __u32 n)
{
	__u64 off = at & (XSPIN_ELEMENT - 1);
	__u32 element = at >> 20;
	__u8 *p = bpf_map_lookup_elem(map, &element);

	if (!p || off > XSPIN_ELEMENT - n)
		return 0;
	/* Or clang adds first, when off has no bound yet, and chooses the result later. */
	asm volatile("" : "+r"(off));
	return p + off;
}

/*
 * Where n bytes of the context's HPU memory are, which all HPUs share; n is a constant.
 * Null if they are not in it, or lie in two MiB of it. 2 ns.
 */
static __always_inline void *xspin_memory(__u64 off, __u32 n)
{
	__u64 size = xspin.memory;

	if (n > size || off > size - n)
		return 0;
	return xspin_at(&xspin_shared, off, n);
}

/* The same for the memory that this HPU has for itself. 2 ns. */
static __always_inline void *xspin_hpu_memory(const struct xspin_her *her, __u64 off, __u32 n)
{
	__u64 size = xspin.hpu_memory;

	if (n > size || off > size - n)
		return 0;
	return xspin_at(&xspin_own, her->hpu * size + off, n);
}

/* The headers found in a frame, as offsets from its first byte; 0 for one that is not
 * there. At most one of udp, icmp and tcp is, and only above IPv4. */
struct xspin_headers {
	__u32 ipv4;
	__u32 udp;
	__u32 icmp;
	__u32 tcp;
	__u32 payload;	   /* of the innermost that is there */
	__u32 payload_len; /* without Ethernet padding if there is IPv4 */
};

/*
 * Finds the headers, by the rules of packet.Parse in Go: one that is impossible, cut off
 * or in a fragment is not there, and what lies above it neither. Looks at the part of
 * the frame that is in one piece, and at no checksum. 3 ns.
 */
static __always_inline void xspin_headers(struct xdp_md *ctx, const struct xspin_her *her,
					  struct xspin_headers *h)
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

/* Folds a sum, such as that of bpf_csum_diff(), to 16 bits. 2 ns. */
static __always_inline __u32 xspin_fold(__u32 sum)
{
	sum = (sum >> 16) + (sum & 0xffff);
	return (sum >> 16) + (sum & 0xffff);
}

/* The checksum after a 16-bit word has changed (RFC 1624), in the frame's byte order. 3 ns. */
static __always_inline __u16 xspin_update(__u16 sum, __u16 before, __u16 after)
{
	return ~xspin_fold((__u16)~sum + (__u16)~before + after);
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

/*
 * Turns a datagram round, into the answer with the same payload: MAC addresses, IPv4
 * addresses and ports change places, and the answer lives one hop less. The checksum
 * stays right; that of a local sender, who leaves it to his device, becomes 0 for none.
 *
 * Returns 0, and changes nothing, if there is no UDP, if an address cannot be answered,
 * if no hop is left, or if both ports are the same: anybody could forge a datagram that
 * has two echoes answer each other without end. 7 ns, whatever its length.
 */
static __always_inline int xspin_reply_udp(struct xdp_md *ctx, const struct xspin_her *her)
{
	__u8 *frame = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end, *ip = frame + 14;
	struct xspin_headers h;
	__u16 *udp, port, hop;
	__u32 sum;

	xspin_headers(ctx, her, &h);
	if (!h.udp || ip + 20 > end || !xspin_answerable(frame, ip))
		return 0;
	udp = (__u16 *)(frame + (h.udp & 127));
	if ((void *)(udp + 4) > (void *)end || udp[0] == udp[1] || ip[8] <= 1)
		return 0;

	/* A partial checksum is the sum of the pseudo-header, not inverted. */
	sum = *(__u16 *)(ip + 12) + *(__u16 *)(ip + 14) + *(__u16 *)(ip + 16) + *(__u16 *)(ip + 18);
	sum += bswap16(17) + udp[2];
	if (udp[3] == xspin_fold(sum))
		udp[3] = 0;
	hop = *(__u16 *)(ip + 8);
	ip[8]--;
	*(__u16 *)(ip + 10) = xspin_update(*(__u16 *)(ip + 10), hop, *(__u16 *)(ip + 8));
	port = udp[0], udp[0] = udp[1], udp[1] = port;
	xspin_swap(frame, ip);
	return 1;
}

/*
 * Turns an echo request round, into its reply: MAC and IPv4 addresses change places, and
 * so does the type. The checksum is updated, not computed: the payload is not read, and
 * what was damaged stays damaged. Returns 0, and changes nothing, if there is no echo
 * request or if an address cannot be answered. 4 ns, whatever its length.
 */
static __always_inline int xspin_reply_icmp_echo(struct xdp_md *ctx, const struct xspin_her *her)
{
	__u8 *frame = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end, *ip = frame + 14;
	struct xspin_headers h;
	__u16 *icmp, sum;

	xspin_headers(ctx, her, &h);
	if (!h.icmp || ip + 20 > end || !xspin_answerable(frame, ip))
		return 0;
	icmp = (__u16 *)(frame + (h.icmp & 127));
	if ((void *)(icmp + 4) > (void *)end || icmp[0] != bswap16(0x0800))
		return 0;
	sum = xspin_update(icmp[1], icmp[0], 0);
	icmp[0] = 0;
	/* The same number in ones' complement, and the only one of the two that is right
	 * for a message of zeros. */
	icmp[1] = sum ?: 0xffff;
	xspin_swap(frame, ip);
	return 1;
}

/* --- the engine --- */

/*
 * A word that reaches beyond the linear part: the frame is short or fragmented. Sizes
 * are constants for Linux 6.12, as in load_word_slow() of XsPIN's ingress program.
 */
static __noinline __u32 xspin_word_slow(struct xdp_md *ctx, __u32 off, __u32 len)
{
	__u32 word = 0;

	if (off + 4 <= len) {
		bpf_xdp_load_bytes(ctx, off, &word, 4);
	} else {
		for (__u32 i = 0; i < 3 && off + i < len; i++)
			bpf_xdp_load_bytes(ctx, off + i, (__u8 *)&word + i, 1);
	}
	return word;
}

/* False when a byte that the mask selects is not in the frame. */
static __always_inline int xspin_word(struct xdp_md *ctx, const volatile struct xspin_word *w,
				      __u32 len, __u32 *value)
{
	__u32 off = w->off & 508, word;
	void *p = (void *)(long)ctx->data + off;

	if (w->need > len)
		return 0;
	if (likely(p + 4 <= (void *)(long)ctx->data_end))
		word = *(__u32 *)p;
	else
		word = xspin_word_slow(ctx, off, len);
	*value = bswap32(word) & w->mask;
	return 1;
}

/* What the format says of the frame. False if the frame is not what the format says. */
static __always_inline int xspin_read(struct xdp_md *ctx, struct xspin_her *her)
{
	const volatile struct xspin_constants *s = &xspin;
	__u32 end = her->len, v = 0;

	for (int i = 0; i < 8; i++) {
		if (i >= (int)s->nkey)
			break;
		if (!xspin_word(ctx, &s->key[i], her->len, &her->key[i]))
			return 0;
	}
	if (s->offset.mask) {
		if (!xspin_word(ctx, &s->offset, her->len, &v))
			return 0;
		her->offset = v >> (s->offset_shift & 31);
	}
	if (s->length.mask) {
		__u64 to;

		if (!xspin_word(ctx, &s->length, her->len, &v))
			return 0;
		to = (__u64)(v >> (s->length_shift & 31)) + s->length_from;
		if (to > end)
			return 0;
		end = to;
	}
	if (s->header > end)
		return 0;
	her->payload = s->header;
	her->payload_len = end - s->header;
	v = 0;
	if ((!s->eom.mask || xspin_word(ctx, &s->eom, her->len, &v)) && s->eom_start <= v && v <= s->eom_end)
		her->flags = XSPIN_EOM;
	return 1;
}

static __always_inline int xspin_failed(struct xspin_counters *cpu, enum xspin_has handler, int code)
{
	cpu->failed++;
	cpu->fault = (__u64)handler << 32 | (__u32)code;
	return XDP_DROP;
}

static __always_inline void xspin_took(struct xspin_counters *cpu, __u64 ns)
{
	__u32 v = ns, bits = 0;

	cpu->timed++;
	cpu->time += ns;
	if (v >> 16)
		bits += 16, v >>= 16;
	if (v >> 8)
		bits += 8, v >>= 8;
	if (v >> 4)
		bits += 4, v >>= 4;
	if (v >> 2)
		bits += 2, v >>= 2;
	bits += v >> 1 ? 2 : v;
	if (ns >> 31)
		bits = 31;
	cpu->time_log2[bits & 31]++;
}

/*
 * Calls the handlers, each at one place and in no loop: so the instructions that the
 * verifier has counted for each of them bound a packet's run.
 */
static __always_inline int xspin_run(struct xdp_md *ctx, const __u32 has)
{
	/* In one piece, or the NIC would not have called; no helper is asked for the length. */
	struct xspin_her her = { .len = ctx->data_end - ctx->data, .action = XDP_DROP };
	const int whole = xspin.whole;
	int header = XSPIN_SUCCESS, payload = XSPIN_SUCCESS, completion = XSPIN_SUCCESS;
	struct xspin_counters *cpu = xspin_this_cpu();
	__u64 start = 0;

	if (!cpu || !xspin_read(ctx, &her))
		return XDP_PASS; /* as if no ruleset had matched */
	her.hpu = bpf_get_smp_processor_id();
	her.hpus = xspin.hpus;
	if (!(cpu->handled % XSPIN_TIMED))
		start = bpf_ktime_get_ns();
	cpu->handled++;

	if (has & XSPIN_HAS_HEADER && whole) {
		header = xspin_header(ctx, &her) & ~XSPIN_PENDING;
		if ((__u32)header > XSPIN_DROP)
			return xspin_failed(cpu, XSPIN_HAS_HEADER, header);
	}
	if (has & XSPIN_HAS_PAYLOAD && header == XSPIN_SUCCESS) {
		payload = xspin_payload(ctx, &her) & ~XSPIN_PENDING;
		if ((__u32)payload > XSPIN_DROP)
			return xspin_failed(cpu, XSPIN_HAS_PAYLOAD, payload);
	}
	if (has & XSPIN_HAS_COMPLETION && whole) {
		completion = xspin_completion(ctx, &her) & ~XSPIN_PENDING;
		if ((__u32)completion > XSPIN_DROP)
			return xspin_failed(cpu, XSPIN_HAS_COMPLETION, completion);
	}
	if (start)
		xspin_took(cpu, bpf_ktime_get_ns() - start);

	switch (her.action) {
	case XDP_TX:
		cpu->sent++;
		break;
	case XDP_PASS:
		cpu->to_stack++;
		break;
	case XDP_DROP:
		break;
	default: /* set by a handler's own hand: told as a failure of the last one that ran */
		if (has & XSPIN_HAS_COMPLETION && whole)
			return xspin_failed(cpu, XSPIN_HAS_COMPLETION, XSPIN_FAIL);
		if (has & XSPIN_HAS_PAYLOAD && header == XSPIN_SUCCESS)
			return xspin_failed(cpu, XSPIN_HAS_PAYLOAD, XSPIN_FAIL);
		return xspin_failed(cpu, XSPIN_HAS_HEADER, XSPIN_FAIL);
	}
	if (header | payload | completion)
		cpu->dropped++;
	return her.action;
}
