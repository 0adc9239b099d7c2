/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Handlers in eBPF, version 3. They run in the kernel, on the CPU that received
 * the packet, and answer from there. A whole file:
 *
 *   #include "xspin_handler.h"
 *
 *   XSPIN_PAYLOAD { return xspin_reply_udp(ctx, her) ? xspin_send(her) : XSPIN_DROP; }
 *
 *   XSPIN_CONTEXT(PAYLOAD);
 *   XSPIN_LICENSE("GPL");
 *
 * A handler has two arguments: ctx, for the functions below, and her, the request. It
 * returns an xspin_code. docs/kernel-handlers.md has more.
 *
 * The engine that calls handlers is not here. XsPIN has it, and links it to the handlers
 * of an object; it also puts its own functions in the place of those that are declared
 * by XSPIN_API. So all that an object says of the engine are calls, and handlers reach
 * nothing of the engine's but what these return.
 *
 * Costs were measured in loops of 200 on Linux 6.18 on a virtual CPU, at xdp: good for comparing.
 * At tc, functions that change a packet take twice as long (xspin_store, xspin_reply_udp,
 * xspin_reply_icmp_echo), and all others as long.
 */
#pragma once
#include "xspin_kernel.h"

#define XSPIN_VERSION 3

/* What a handler returns. */
enum xspin_code {
	XSPIN_SUCCESS,
	XSPIN_DROP, /* the packet counts as dropped; from a header handler: no payload handler */
	XSPIN_FAIL, /* the handler failed, as with any code that is not listed: nothing is sent */
	XSPIN_SEGV, /* the same, for an access outside of memory */
	XSPIN_PROCEED, /* from a header handler: deposit into a window. Packets have none: fails */
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
 * It is the handler's own copy. The engine takes action from it and nothing else.
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

/* What the loader reads of an object, beside its handlers. */
struct xspin_declared {
	__u32 handlers; /* xspin_has */
	__u32 messages; /* 1: they are for messages, see xspin_message.h */
	__u32 state;	/* bytes of memory of each message */
};

#define XSPIN_DECLARED SEC(".rodata.xspin")

#ifndef XSPIN_ENGINE
const volatile __u32 xspin_version XSPIN_DECLARED = XSPIN_VERSION;
#endif

/*
 * A function of the engine's. The body here never runs. It is weak, so that clang
 * calls it as it is declared and concludes nothing from it.
 */
#ifdef XSPIN_ENGINE
#define XSPIN_API(type, name, ...) type name(__VA_ARGS__)
#else
#define XSPIN_API(type, name, ...)                                          \
	_Pragma("clang diagnostic push")                                    \
	_Pragma("clang diagnostic ignored \"-Wunused-parameter\"")          \
	__weak type name(__VA_ARGS__) { return (type)0; }                   \
	_Pragma("clang diagnostic pop")                                     \
	_Static_assert(1, "for the semicolon")
#endif

/*
 * The handlers. Each is a global function, so that the verifier checks it once and by
 * itself, and a rejection names it. Weak, so that clang drops no argument that it does
 * not use: the verifier takes what BTF says. The tag tells it that her is never null.
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

enum xspin_has {
	XSPIN_HAS_HEADER = 1 << 0,
	XSPIN_HAS_PAYLOAD = 1 << 1,
	XSPIN_HAS_COMPLETION = 1 << 2,
	XSPIN_HAS_HAND_OVER = 1 << 3, /* the header handler may return it */
	XSPIN_HAS_DEPOSIT = 1 << 4, /* of a failure: no handler, but the engine's own deposit */
	XSPIN_HAS_TRAINS = 1 << 5, /* at tc, handlers take a train as one frame */
};

/*
 * Names the handlers that there are, joined by |, of HEADER, PAYLOAD and COMPLETION. With TRAINS, too,
 * handlers at the tc hook get a train (docs/kernel-handlers.md) as the one frame that it is there, and not
 * each packet of it. The program never runs: it calls handlers so that they are in the object.
 */
#define XSPIN_CONTEXT(names)                                                \
	SEC("xdp.frags") int xspin_context(struct xdp_md *ctx)              \
	{                                                                   \
		enum { HEADER = XSPIN_HAS_HEADER,                           \
		       PAYLOAD = XSPIN_HAS_PAYLOAD,                         \
		       COMPLETION = XSPIN_HAS_COMPLETION,                   \
		       TRAINS = XSPIN_HAS_TRAINS };                         \
		static const volatile struct xspin_declared declared        \
			XSPIN_DECLARED = { .handlers = (names) };           \
		return xspin_names(ctx, names);                             \
	}                                                                   \
	_Static_assert(1, "for the semicolon")

static __always_inline int xspin_names(struct xdp_md *ctx, const __u32 has)
{
	struct xspin_her her = {};
	int n = 0;

	if (has & XSPIN_HAS_HEADER)
		n |= xspin_header(ctx, &her);
	if (has & XSPIN_HAS_PAYLOAD)
		n |= xspin_payload(ctx, &her);
	if (has & XSPIN_HAS_COMPLETION)
		n |= xspin_completion(ctx, &her);
	return n;
}

/* --- what handlers call. A handler has 192 bytes of stack; no function here takes
 * any of these --- */

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
XSPIN_API(long, xspin_load, struct xdp_md *ctx, __u32 off, void *to, __u32 n);

/* The other direction, at the same cost. */
XSPIN_API(long, xspin_store, struct xdp_md *ctx, __u32 off, const void *from, __u32 n);

/* Adds n to user counter i, 0 to 15, and one to how often; any other i counts nothing. 13 ns. */
XSPIN_API(int, xspin_count, __u32 i, __u64 n);

/*
 * Returns where n bytes of the context's HPU memory are, which all HPUs share; n is a constant.
 * Null if they are not in it, or lie in two MiB of it. 16 ns.
 */
XSPIN_API(void *, xspin_memory, __u64 off, __u32 n);

/* The same for the memory that this HPU has for itself. 16 ns. */
XSPIN_API(void *, xspin_hpu_memory, const struct xspin_her *her, __u64 off, __u32 n);

/*
 * The helper of this name, of at most 512 bytes each way, as of Linux 6.12: a longer one
 * returns -22 (EINVAL). 27 ns for 64 bytes.
 */
XSPIN_API(long, xspin_csum_diff, const __u32 *from, __u32 from_size, const __u32 *to, __u32 to_size, __u32 seed);
#ifndef XSPIN_ENGINE
#define bpf_csum_diff xspin_csum_diff
#endif

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
 * the frame that is in one piece (at tc its first 128 bytes), and at no checksum. 3 ns.
 */
XSPIN_API(int, xspin_headers, struct xdp_md *ctx, const struct xspin_her *her, struct xspin_headers *h);

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

/*
 * Turns a datagram round, into the answer with the same payload: MAC addresses, IPv4
 * addresses and ports change places, and the answer lives one hop less. The checksum
 * stays; that of a local sender, who leaves it to his device, is completed.
 *
 * Returns 0, and changes nothing, if there is no UDP, if a checksum says that the datagram is
 * damaged, if an address cannot be answered, if no hop is left, or if both ports are the same:
 * anybody could forge a datagram that has two echoes answer each other without end. 26 ns for
 * 64 bytes, 55 ns for 1400; 9 ns without a UDP checksum.
 */
XSPIN_API(int, xspin_reply_udp, struct xdp_md *ctx, const struct xspin_her *her);

/*
 * Turns an echo request round, into its reply: MAC and IPv4 addresses change places, so does
 * the type, and the reply has 64 hops to live, as Linux would give it. Returns 0, and changes
 * nothing, if there is no echo request, if a checksum says that it is damaged, or if an address
 * cannot be answered. 26 ns for 64 bytes, 55 ns for 1400.
 */
XSPIN_API(int, xspin_reply_icmp_echo, struct xdp_md *ctx, const struct xspin_her *her);
