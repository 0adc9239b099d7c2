/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * The engines of packets (packets.bpf.c) and of messages (messages.bpf.c) have this in
 * common. The loader links one of them to the handlers of an object (loader/link.go): it
 * takes handlers, the functions that they call and the object's own maps from there, and
 * all else from here. So only instructions that are compiled from this folder name the
 * engine's maps and windows, whoever made the object.
 *
 * User space maps what is counted and kept here, and reads it as a stranger's.
 */
#pragma once
#define XSPIN_ENGINE
#include "../hook.h"

static long (*const bpf_csum_diff)(const __u32 *from, __u32 from_size, const __u32 *to, __u32 to_size, __u32 seed) = (void *)28;

#include "xspin_handler.h"

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
	__u32 has; /* which handlers there are: xspin_has */
	__u8 nkey;
	__u8 offset_shift; /* to the lowest bit of the mask */
	__u8 length_shift;
	__u8 whole; /* every packet is a message: all three handlers run */
	__u8 writes; /* handlers write to the frame, or turn it round */
	__u8 reads;  /* they look at it, beyond what her has */
	__u8 pad[2];
};

const volatile struct xspin_constants xspin XSPIN_DECLARED = {};

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
	__u64 uncut;	/* trains that handlers got nothing of, as they would write to them: went to Linux */
	__u64 mixed;	/* trains that were dropped, as handlers wanted different things of their segments */
	__u64 timed;	/* packets whose time was taken, one in XSPIN_TIMED */
	__u64 time;	/* of these: ns in handlers */
	__u64 time_log2[32]; /* of these: how many in 2^(i-1) to 2^i - 1 ns; the last: all longer */
	__u64 pad[6];
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

/* --- the functions that handlers call. The loader makes them static, so that the verifier
 * sees each of their calls with its arguments. A stranger calls them: no argument
 * decides what is reached, except within bounds that are checked here --- */

static __always_inline struct xspin_counters *xspin_this_cpu(void)
{
	__u32 cpu = bpf_get_smp_processor_id();

	return bpf_map_lookup_elem(&xspin_cpu, &cpu);
}

__weak int xspin_count(__u32 i, __u64 n)
{
	struct xspin_counters *cpu = xspin_this_cpu();
	struct xspin_pair *p;

	if (!cpu || i >= 16)
		return 0;
	p = &cpu->user[i];
	WRITE_ONCE(p->begin, p->begin + 1);
	WRITE_ONCE(p->sum, p->sum + n);
	WRITE_ONCE(p->count, p->count + 1);
	WRITE_ONCE(p->end, p->begin);
	return 0;
}

static __always_inline void *xspin_at(void *map, __u64 at, __u32 n)
{
	__u64 off = at & (XSPIN_ELEMENT - 1);
	__u32 element = at >> 20;
	__u8 *p = bpf_map_lookup_elem(map, &element);

	if (!p || n > XSPIN_ELEMENT || off > XSPIN_ELEMENT - n)
		return 0;
	/* Or clang adds first, when off has no bound yet, and chooses the result later. */
	asm volatile("" : "+r"(off));
	return p + off;
}

__weak void *xspin_memory(__u64 off, __u32 n)
{
	__u64 size = xspin.memory;

	if (n > size || off > size - n)
		return 0;
	return xspin_at(&xspin_shared, off, n);
}

__weak void *xspin_hpu_memory(const struct xspin_her *her __attribute__((unused)), __u64 off, __u32 n)
{
	__u64 size = xspin.hpu_memory;

	if (n > size || off > size - n)
		return 0;
	return xspin_at(&xspin_own, bpf_get_smp_processor_id() * size + off, n);
}

__weak long xspin_csum_diff(const __u32 *from, __u32 from_size, const __u32 *to, __u32 to_size, __u32 seed)
{
	if (from_size > 512 || to_size > 512)
		return -22;
	return bpf_csum_diff(from, from_size, to, to_size, seed);
}

#include "frame.h"

/* In the place of handlers that an object does not have. */
XSPIN_HEADER { return XSPIN_SUCCESS; }
XSPIN_PAYLOAD { return XSPIN_SUCCESS; }
XSPIN_COMPLETION { return XSPIN_SUCCESS; }

/* --- the engine --- */

/*
 * A word that reaches beyond the linear part: the frame is short or fragmented. Sizes
 * are constants for Linux 6.12, as in load_word_slow() of XsPIN's ingress program.
 */
static __noinline __u32 xspin_word_slow(struct xdp_md *ctx, __u32 off, __u32 len)
{
	__u32 word = 0;

	if (off + 4 <= len) {
		xspin_load(ctx, off, &word, 4);
	} else {
		for (__u32 i = 0; i < 3 && off + i < len; i++)
			xspin_load(ctx, off + i, (__u8 *)&word + i, 1);
	}
	return word;
}

/* False when a byte that the mask selects is not in the frame. */
static __always_inline int xspin_word(struct xdp_md *ctx, const struct xspin_frame *f, const volatile struct xspin_word *w,
				      __u32 len, __u32 *value)
{
	__u32 off = w->off & 508, word;
	void *p = xspin_at_frame(f, off, 4);

	if (w->need > len)
		return 0;
	if (likely(p))
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
	const struct xspin_frame f = xspin_frame(ctx);
	__u32 end = her->len, v = 0;

	for (int i = 0; i < 8; i++) {
		if (i >= (int)s->nkey)
			break;
		if (!xspin_word(ctx, &f, &s->key[i], her->len, &her->key[i]))
			return 0;
	}
	if (s->offset.mask) {
		if (!xspin_word(ctx, &f, &s->offset, her->len, &v))
			return 0;
		her->offset = v >> (s->offset_shift & 31);
	}
	if (s->length.mask) {
		__u64 to;

		if (!xspin_word(ctx, &f, &s->length, her->len, &v))
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
	if ((!s->eom.mask || xspin_word(ctx, &f, &s->eom, her->len, &v)) && s->eom_start <= v && v <= s->eom_end)
		her->flags = XSPIN_EOM;
	return 1;
}

/* Of a failure, beside the handler: it has set her->action to what is none. Its code is XSPIN_FAIL. */
#define XSPIN_HAS_ACTED (1 << 8)

static __always_inline int xspin_failed(struct xspin_counters *cpu, __u32 handler, int code)
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
