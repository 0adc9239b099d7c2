/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* What the ingress programs of both hooks have in common: whose frame is it? */
#pragma once
#include "kernel.h"
#include "xspin.h"
#include "match.h"

/*
 * Globals, and not maps to be looked up in: their addresses are constants of the
 * program, which saves some 10 ns a packet. User space maps their section, and gives both
 * programs the same.
 */

/*
 * The table in force is tables[active], for a whole run of the program. User
 * space writes the other one, switches, and waits for an RCU grace period, after
 * which no run of the program (and no frame it redirected) is in the old one.
 */
struct xspin_table tables[2] __aligned;
__u32 active __aligned;

/* 1: the program at xdp is attached, and counts the frames that the one at tc has nothing to do with. */
__u32 counting __aligned;

struct xspin_queue queues[XSPIN_MAX_QUEUES] __aligned;

struct xspin_share share __aligned;

/*
 * Where the messages of a context go: HPU + 1 in the low byte, and in the high
 * word how many packets in flight and open messages hold it there. A context
 * has a range of buckets and a message, or each of its virtual HPUs, the one that
 * the hash names: those that collide share an HPU and nothing else. At zero users the next packet
 * may choose again. Unlike a hash map of messages this never fills up, evicts
 * or allocates.
 */
__u64 buckets[XSPIN_MAX_BUCKETS] __aligned;

/* Makes clang describe, and so bpf2go generate, types that no map names. */
const struct xspin_meta *unused_meta __attribute__((unused));
const struct xspin_context *unused_context __attribute__((unused));
_Static_assert(sizeof(struct xspin_meta) == 64, "one cache line, magic last");
const enum xspin_limits *unused_limits __attribute__((unused));
const enum xspin_policy *unused_policy __attribute__((unused));
const enum xspin_context_flags *unused_context_flags __attribute__((unused));
const enum xspin_meta_flags *unused_meta_flags __attribute__((unused));

/* The handlers in eBPF of context c: element c. They say what becomes of the frame. */
struct {
	__uint(type, BPF_MAP_TYPE_PROG_ARRAY);
	__uint(max_entries, XSPIN_MAX_CONTEXTS);
	__uint(key_size, 4);
	__uint(value_size, 4);
} programs SEC(".maps");

/*
 * Plain increments are safe: the program does not nest on a CPU. At either hook it runs with softirqs off, and
 * what it sends, or handlers do, is received by a later one: devices that hand a packet back to the stack queue it
 * (netif_rx).
 */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct xspin_stats);
} counters SEC(".maps");

/* A frame that a ruleset has matched, and that is what its context's format says. */
struct classified {
	const struct xspin_ruleset *ruleset;
	const struct xspin_context *context;
	__u32 at;    /* position of the ruleset */
	__u32 queue; /* that it came on */
	__u32 id;    /* of the context */
	__u32 len;   /* of the frame */
};

/* The ruleset at a position says whose frame it is. */
static __always_inline void belongs(struct classified *m, const struct xspin_table *t, __u32 at)
{
	m->at = at & (XSPIN_MAX_RULESETS - 1);
	m->ruleset = &t->rulesets[m->at];
	m->id = m->ruleset->context & (XSPIN_MAX_CONTEXTS - 1);
	m->context = &t->contexts[m->id];
}

/* Whether a matched frame is what its context's format says; counted if not. */
static __always_inline int well_formed(const struct frame *f, struct xspin_stats *stats, struct classified *m)
{
	const struct xspin_context *c = m->context;
	__u32 len, v;

	m->len = len = hook_len(f->ctx);
	if (len < c->need)
		goto malformed;
	if (c->has_length) {
		__u64 end;

		if (!load_field(f, &c->length, &v))
			goto malformed;
		end = (__u64)(v >> (c->length_shift & 31)) + c->length_from;
		if (end > len || end < c->header)
			goto malformed;
	}
	return 1;

malformed:
	stats->malformed++;
	return 0;
}
