/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * The ingress program: matching engine and scheduler of the NIC.
 *
 *   frame -> match -> message key, offset, EOM -> HPU -> metadata -> XSKMAP
 *
 * Whatever is not matched, or cannot be delivered, goes to the Linux stack as it
 * came. Only a frame whose context has no credit left is dropped, and counted.
 */
#include "kernel.h"
#include "xspin.h"
#include "match.h"

const volatile struct xspin_config config = {
	.hpus = 1,
	.queues = 1,
	.buffer_size = 2048 - 256,
	.max_buffers = 1,
};

struct table_map {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__uint(key_size, sizeof(__u32));
	__uint(value_size, sizeof(struct xspin_table));
};

/*
 * The table in force. An update swaps the inner map for every packet at once
 * and returns after an RCU grace period, when no run of the program (and no
 * frame it redirected) is still inside the old one.
 */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__uint(max_entries, 1);
	__type(key, __u32);
	__array(values, struct table_map);
} tables SEC(".maps");

/* Socket of HPU h on receive queue q: element q * config.hpus + h. */
struct {
	__uint(type, BPF_MAP_TYPE_XSKMAP);
	__uint(max_entries, 1);
	__uint(key_size, 4);
	__uint(value_size, 4);
} sockets SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct xspin_queue);
} queues SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct xspin_share);
} shares SEC(".maps");

/*
 * Where the messages of a context go: HPU + 1 in the low byte, and in the high
 * word how many packets in flight and open messages hold it there. A context
 * has a range of buckets and a message the one its key's hash names: messages
 * that collide share an HPU and nothing else. At zero users the next packet
 * may choose again. Unlike a hash map of messages this never fills up, evicts
 * or allocates.
 */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, XSPIN_MAX_BUCKETS);
	__type(key, __u32);
	__type(value, __u64);
} buckets SEC(".maps");

/* Plain increments are safe: the program does not nest on a CPU. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct xspin_stats);
} counters SEC(".maps");

/* Makes clang describe, and so bpf2go generate, types that no map names. */
const struct xspin_meta *unused_meta __attribute__((unused));
const struct xspin_context *unused_context __attribute__((unused));
const struct xspin_table *unused_table __attribute__((unused));
_Static_assert(sizeof(struct xspin_meta) == 64, "one cache line, magic last");
const enum xspin_limits *unused_limits __attribute__((unused));
const enum xspin_policy *unused_policy __attribute__((unused));
const enum xspin_context_flags *unused_context_flags __attribute__((unused));
const enum xspin_meta_flags *unused_meta_flags __attribute__((unused));

#define BUCKET_TRIES 4

/* Adds to a counter of the queue; returns what it was. */
static __always_inline __u32 count(__u32 *counter, __u32 n)
{
	__u32 old;

	if (config.atomic)
		return __sync_fetch_and_add(counter, n);
	old = READ_ONCE(*counter);
	WRITE_ONCE(*counter, old + n);
	return old;
}

/* Buffers on their way to, or held by, an HPU, from all queues. */
static __always_inline __u32 occupancy(const struct xspin_share *share, __u32 hpu)
{
	__u32 n = 0;

	for (__u32 q = 0; q < config.queues && q < XSPIN_MAX_QUEUES; q++)
		n += READ_ONCE(share->enqueued[q][hpu]) - READ_ONCE(share->dequeued[q][hpu]);
	return n;
}

/*
 * The least occupied HPU of the mask; prefer wins a tie, then the lowest.
 * Not static: the verifier checks it once, not at every call.
 */
__noinline __u32 least_occupied(__u64 mask, __u32 prefer)
{
	__u32 best = XSPIN_MAX_HPUS, least = ~0U, zero = 0;
	const struct xspin_share *share = bpf_map_lookup_elem(&shares, &zero);

	if (!share)
		return best;
	if (prefer < config.hpus && prefer < XSPIN_MAX_HPUS && mask >> prefer & 1) {
		best = prefer;
		least = occupancy(share, prefer);
		if (!least)
			return best;
	}
	for (__u32 h = 0; h < config.hpus && h < XSPIN_MAX_HPUS; h++) {
		__u32 n;

		if (!(mask >> h & 1))
			continue;
		n = occupancy(share, h);
		if (n < least) {
			best = h;
			least = n;
			if (!n)
				break;
		}
	}
	return best;
}

/*
 * Policy `packet`: stay while the HPU has little to do, so that packets reach
 * it in batches, then take the least occupied. The quantum follows the
 * context's handler time: slow handlers have one of 1.
 */
static __always_inline __u32 pick_packet(struct xspin_queue *q, const struct xspin_share *share,
					 __u32 queue, __u64 mask, __u32 context)
{
	__u32 hpu = q->last[context];

	if (hpu < config.hpus && hpu < XSPIN_MAX_HPUS && mask >> hpu & 1 &&
	    READ_ONCE(share->enqueued[queue][hpu]) - READ_ONCE(share->dequeued[queue][hpu]) <
		    READ_ONCE(share->quantum[context]))
		return hpu;
	hpu = least_occupied(mask, XSPIN_MAX_HPUS);
	q->last[context] = hpu;
	return hpu;
}

/*
 * Policy `message`: the bucket's HPU while anybody uses it. Takes a use of the
 * bucket, which the HPU gives back. blocked-rr is this with the sequence's
 * virtual HPU mixed into the hash.
 */
static __always_inline __u32 pick_message(__u64 *bucket, __u64 mask)
{
	for (int i = 0; i < BUCKET_TRIES; i++) {
		__u64 old = READ_ONCE(*bucket), new;
		__u32 hpu = (old & 0xff) - 1;

		if (!(old >> 32))
			hpu = least_occupied(mask, hpu);
		if (hpu >= XSPIN_MAX_HPUS)
			break;
		new = ((old >> 32) + 1) << 32 | (hpu + 1);
		if (__sync_val_compare_and_swap(bucket, old, new) == old)
			return hpu;
	}
	return XSPIN_MAX_HPUS;
}

static __always_inline __u32 mix(__u32 hash, __u32 word)
{
	hash ^= word;
	hash *= 0x9e3779b1;
	return hash ^ hash >> 15;
}

enum verdict { PASS, DELIVER, REFUSE, MALFORMED, OVERSIZE };

struct delivery {
	struct xspin_meta meta;
	__u32 buffers;
	__u32 policy;
	__u32 bucket;
	__u64 core_mask;
};

/* Matches the frame and reads what its context's message format wants of it. */
static __always_inline enum verdict classify(const struct frame *f, const struct xspin_table *t,
					     struct xspin_stats *stats, struct delivery *d)
{
	const struct xspin_context *c;
	const struct xspin_ruleset *r;
	__u32 hash = 0, v;
	int bit;

	bit = match(f, t);
	if (bit < 0)
		return PASS;
	r = &t->rulesets[bit & (XSPIN_MAX_RULESETS - 1)];
	stats->matched[r->slot]++;
	d->meta.ruleset = r->slot;
	d->meta.context = r->context;
	c = &t->contexts[r->context & (XSPIN_MAX_CONTEXTS - 1)];

	for (int i = 0; i < XSPIN_MAX_KEY; i++) {
		if (i >= c->nkey)
			break;
		if (!load_field(f, &c->key[i], &v))
			return MALFORMED;
		d->meta.key[i] = v;
		hash = mix(hash, v);
	}
	if (c->has_offset) {
		if (!load_field(f, &c->offset, &v))
			return MALFORMED;
		d->meta.offset = v >> (c->offset_shift & 31);
	}
	if (c->has_length) {
		__u64 end;

		if (!load_field(f, &c->length, &v))
			return MALFORMED;
		end = (__u64)(v >> (c->length_shift & 31)) + c->length_from;
		if (end > f->len || end < c->header)
			return MALFORMED;
	} else if (f->len < c->header) {
		return MALFORMED;
	}
	d->buffers = 1;
	if (unlikely(f->len > config.buffer_size)) {
		d->buffers = (f->len - 1) / config.buffer_size + 1;
		if (d->buffers > config.max_buffers)
			return OVERSIZE;
	}
	if (rule_holds(f, &r->eom))
		d->meta.flags |= XSPIN_META_EOM;
	d->meta.hash = hash;
	d->meta.generation = t->generation;
	d->meta.magic = XSPIN_META_MAGIC;
	if (c->flags & XSPIN_CONTEXT_TIMESTAMP)
		d->meta.arrival = bpf_ktime_get_ns();
	d->policy = c->policy;
	d->bucket = c->bucket_base + (hash & c->bucket_mask);
	d->core_mask = c->core_mask;
	return DELIVER;
}

static __always_inline const struct xspin_table *current_table(void)
{
	__u32 zero = 0;
	void *inner = bpf_map_lookup_elem(&tables, &zero);

	return inner ? bpf_map_lookup_elem(inner, &zero) : (void *)0;
}

static __always_inline struct frame whole_frame(struct xdp_md *ctx)
{
	struct frame f = {
		.ctx = ctx,
		.data = (void *)(long)ctx->data,
		.data_end = (void *)(long)ctx->data_end,
		.len = bpf_xdp_get_buff_len(ctx),
	};
	return f;
}

/* Everything up to the redirect; `deliver` is constant at each use. */
static __always_inline int ingress(struct xdp_md *ctx, int deliver)
{
	struct xspin_share *share;
	struct xspin_queue *q;
	struct xspin_stats *stats;
	const struct xspin_table *t;
	struct delivery d = {};
	struct xspin_meta *meta;
	__u32 zero = 0, queue = ctx->rx_queue_index, context, credit, hpu;
	struct frame f;
	void *data;

	stats = bpf_map_lookup_elem(&counters, &zero);
	if (!stats)
		return XDP_PASS;
	stats->seen++;
	t = current_table();
	if (!t)
		goto pass;
	f = whole_frame(ctx);
	switch (classify(&f, t, stats, &d)) {
	case DELIVER:
		break;
	case MALFORMED:
		stats->malformed++;
		return XDP_PASS;
	case OVERSIZE:
		stats->oversize++;
		return XDP_PASS;
	default:
		goto pass;
	}

	q = bpf_map_lookup_elem(&queues, &queue);
	share = bpf_map_lookup_elem(&shares, &zero);
	if (!q || !share || queue >= XSPIN_MAX_QUEUES)
		goto failed;

	/*
	 * A buffer is in flight until the HPU has put it back on the fill ring.
	 * The credits of all contexts together fit the rx ring of a socket and
	 * the fill ring of the queue, so neither can overflow behind our back.
	 */
	context = d.meta.context & (XSPIN_MAX_CONTEXTS - 1);
	credit = READ_ONCE(share->credit[context]);
	if (READ_ONCE(q->issued[context]) - READ_ONCE(q->done[context]) + d.buffers > credit) {
		stats->refused[context]++;
		return XDP_DROP;
	}

	if (bpf_xdp_adjust_meta(ctx, -(int)sizeof(*meta)))
		goto failed;
	if (d.policy == XSPIN_POLICY_MESSAGE) {
		__u64 *bucket = bpf_map_lookup_elem(&buckets, &d.bucket);

		hpu = bucket ? pick_message(bucket, d.core_mask) : XSPIN_MAX_HPUS;
	} else {
		hpu = pick_packet(q, share, queue, d.core_mask, context);
	}
	meta = (void *)(long)ctx->data_meta;
	data = (void *)(long)ctx->data;
	if (hpu >= XSPIN_MAX_HPUS || (void *)(meta + 1) > data) {
		bpf_xdp_adjust_meta(ctx, sizeof(*meta));
		goto failed;
	}
	d.meta.cpu = bpf_get_smp_processor_id();
	d.meta.seq = count(&q->seq[hpu][context], d.buffers);
	*meta = d.meta;
	count(&q->issued[context], d.buffers);
	count(&share->enqueued[queue][hpu], d.buffers);

	/*
	 * Counted before it is sent: whatever is lost from here on is missed by
	 * its HPU, which finds the gap in seq and returns the credit.
	 */
	if (deliver && bpf_redirect_map(&sockets, queue * config.hpus + hpu, XDP_PASS) !=
			       XDP_REDIRECT) {
		/* No socket: the NIC is going away. The stack takes over. */
		bpf_xdp_adjust_meta(ctx, sizeof(*meta));
		goto failed;
	}
	stats->redirected++;
	return XDP_REDIRECT;

failed:
	stats->failed++;
	return XDP_PASS;
pass:
	stats->passed++;
	return XDP_PASS;
}

SEC("xdp.frags")
int xspin_ingress(struct xdp_md *ctx)
{
	return ingress(ctx, 1);
}

/* The same without sockets behind it, for one frame at a time (`xspin rules test`). */
SEC("xdp.frags")
int xspin_verdict(struct xdp_md *ctx)
{
	return ingress(ctx, 0);
}

/* Match, then drop or pass: what matching alone costs (`xspin bench match`). */
SEC("xdp.frags")
int xspin_match(struct xdp_md *ctx)
{
	const struct xspin_table *t = current_table();
	struct frame f;

	if (!t)
		return XDP_ABORTED;
	f = whole_frame(ctx);
	return match(&f, t) < 0 ? XDP_PASS : XDP_DROP;
}

char _license[] SEC("license") = "Dual BSD/GPL";
