/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * The ingress program at xdp: matching engine and scheduler of the NIC.
 *
 *   frame -> match -> message key, offset, EOM -> HPU -> metadata -> XSKMAP
 *                  -> the context's handlers in eBPF
 *                  -> Linux, where the program at tc (ingress_tc.bpf.c) has it
 *
 * Whatever is not matched, or cannot be delivered, goes to the Linux stack as it
 * came. Only a frame whose context has no credit left is dropped, and counted,
 * unless the context has such frames spilled to the stack.
 */
#include "ingress.h"

const volatile struct xspin_config config = {
	.hpus = 1,
	.queues = 1,
	.buffer_size = 2048 - 256,
	.max_buffers = 1,
};

/* Socket of HPU h on receive queue q: element q * config.hpus + h. */
struct {
	__uint(type, BPF_MAP_TYPE_XSKMAP);
	__uint(max_entries, 1);
	__uint(key_size, 4);
	__uint(value_size, 4);
} sockets SEC(".maps");

/* The frame that is with handlers in eBPF: they have no way to this map, and the program
 * does not nest on a CPU. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct xspin_handing);
} handing SEC(".maps");

#define BUCKET_TRIES 8

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
static __always_inline __u32 occupancy(__u32 hpu)
{
	__u32 n = 0;

	for (__u32 q = 0; q < config.queues && q < XSPIN_MAX_QUEUES; q++)
		n += READ_ONCE(share.enqueued[q][hpu]) - READ_ONCE(share.dequeued[q][hpu]);
	return n;
}

/*
 * The least occupied HPU of the mask; prefer wins a tie, then the lowest.
 * Not static: the verifier checks it once, not at every call.
 */
__noinline __u32 least_occupied(__u64 mask, __u32 prefer)
{
	__u32 best = XSPIN_MAX_HPUS, least = ~0U;

	if (prefer < config.hpus && prefer < XSPIN_MAX_HPUS && mask >> prefer & 1) {
		best = prefer;
		least = occupancy(prefer);
		if (!least)
			return best;
	}
	for (__u32 h = 0; h < config.hpus && h < XSPIN_MAX_HPUS; h++) {
		__u32 n;

		if (!(mask >> h & 1))
			continue;
		n = occupancy(h);
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
static __always_inline __u32 pick_packet(struct xspin_queue *q, __u32 queue, __u64 mask,
					 __u32 context)
{
	__u32 hpu = q->last[context];

	if (hpu < config.hpus && hpu < XSPIN_MAX_HPUS && mask >> hpu & 1 &&
	    READ_ONCE(share.enqueued[queue][hpu]) - READ_ONCE(share.dequeued[queue][hpu]) <
		    READ_ONCE(share.quantum[context]))
		return hpu;
	hpu = least_occupied(mask, XSPIN_MAX_HPUS);
	q->last[context] = hpu;
	return hpu;
}

/*
 * Policies `message` and `blocked-rr`: the bucket's HPU while anybody uses it.
 * Takes a use of the bucket, which the HPU gives back.
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

/*
 * Policy `blocked-rr` (sPIN, SC 2019, section 3.2.1): the bytes of a message are
 * dealt out to its virtual HPUs in turn, a sequence at a time. The multiplier is
 * odd, so that the virtual HPUs of a message have buckets of their own for as
 * long as there are as many.
 */
static __always_inline __u32 blocked(const struct xspin_context *c, __u32 hash, __u32 offset)
{
	return hash + offset / c->sequence % c->vhpus * 0x9e3779b1;
}

/*
 * Is it several packets in one, a train? A sender on this machine leaves the cutting of a long
 * TCP segment, or of one buffer with many datagrams (UDP_SEGMENT), to the device, and a receiver
 * joins what came from elsewhere (GRO). A driver's XDP runs after the cutting and before the
 * joining; generic XDP does not, and sees the headers of one packet, with the length of all. Two
 * short ones look like one of a sender on this machine, whatever one asks of the bytes; only
 * the stack's own packet tells, behind its end: how long each is. Where that is, the macro
 * xdp_data_hard_end() of net/xdp.h says.
 *
 * A tap has generic XDP run its driver's program, for what its process wrote as a train. The
 * queue is the stack's then: the end of other frames has nothing to say.
 */
#define CACHE_LINE 64 /* SMP_CACHE_BYTES */

static __always_inline int is_train(struct xdp_md *ctx)
{
	const struct xdp_buff *x = bpf_cast_to_kern_ctx(ctx);
	__u64 size = (kernel_size_of(struct skb_shared_info) + CACHE_LINE - 1) & -CACHE_LINE;
	__u64 end = (__u64)x->data_hard_start + x->frame_sz - size;
	const struct skb_shared_info *s =
		bpf_rdonly_cast((void *)end, kernel_type_id(struct skb_shared_info));

	if (!config.generic) {
		const struct xdp_rxq_info *q = x->rxq;
		__u64 at = (__u64)q->dev->_rx + q->queue_index * kernel_size_of(struct netdev_rx_queue);

		if ((__u64)q != at + kernel_offset_of(struct netdev_rx_queue, xdp_rxq))
			return 0;
	}
	return s->gso_size != 0;
}

/* Whose frame is it? False, and counted why, if it is the Linux stack's. */
static __always_inline int classify(const struct frame *f, const struct xspin_table *t,
				    struct xspin_stats *stats, struct classified *m, int trains)
{
	int bit = match(f, t);

	if (bit < 0) {
		stats->passed++;
		return 0;
	}
	belongs(m, t, bit);
	if (m->context->flags & XSPIN_CONTEXT_TC) {
		stats->seen--; /* the program at tc sees it, and counts it */
		return 0;
	}
	stats->matched[m->ruleset->slot]++;
	if (trains && is_train(f->ctx)) {
		stats->trains++;
		return 0;
	}
	return well_formed(f, stats, m);
}

/* A length that is 1 to XSPIN_MAX_KEPT, and that the verifier knows to be. */
static __always_inline __u64 length_kept(__u64 len)
{
	asm volatile("%0 += -1; %0 &= %1; %0 += 1" : "+r"(len) : "i"(XSPIN_MAX_KEPT - 1));
	return len;
}

/* Keeps what a frame is for xspin_user. False: it is too long. Global, so that the verifier
 * looks at it once. */
__noinline int keep(struct xdp_md *ctx, __u32 table, __u32 ruleset)
{
	const struct xspin_table *t = &tables[table & 1];
	__u32 zero = 0, offset = 0, len = bpf_xdp_get_buff_len(ctx);
	struct xspin_handing *h = bpf_map_lookup_elem(&handing, &zero);
	struct frame f = frame_of(ctx);
	struct classified m;

	if (!h || len < 1 || len > XSPIN_MAX_KEPT)
		return 0;
	belongs(&m, t, ruleset);
	if (m.context->has_offset)
		load_field(&f, &m.context->offset, &offset); /* is there: need */
	h->table = table;
	h->ruleset = ruleset;
	h->len = len;
	h->kept = !offset;
	return offset || !bpf_xdp_load_bytes(ctx, 0, h->bytes, length_kept(len));
}

/*
 * Calls the context's handlers in eBPF, which do not return here. The frame is as it
 * came: what they need of the format is constant in their program.
 */
static __always_inline int handle(struct xdp_md *ctx, __u32 table, struct xspin_stats *stats,
				  const struct frame *f, const struct classified *m)
{
	if (f->data_end - f->data < m->len || /* they see what is in one piece */
	    (m->context->flags & XSPIN_CONTEXT_HANDS && !keep(ctx, table, m->at))) {
		stats->oversize++;
		return XDP_PASS;
	}
	stats->kernel[m->id]++;
	bpf_tail_call(ctx, &programs, m->id);
	stats->kernel[m->id]--;
	stats->failed++; /* no program: the context is going away, the stack takes over */
	return XDP_PASS;
}

/*
 * Takes credit, writes the metadata and sends the frame to an HPU; redirect is
 * constant at each use.
 */
static __always_inline int deliver(struct xdp_md *ctx, const struct xspin_table *t,
				   struct xspin_stats *stats, const struct classified *m,
				   int redirect)
{
	__u32 queue = m->queue, context = m->id, buffers = 1, hash = 0, hpu, v;
	const struct xspin_context *c = m->context;
	struct xspin_queue *q;
	struct xspin_meta *meta;
	struct frame f;

	if (unlikely(m->len > config.buffer_size)) {
		buffers = (m->len - 1) / config.buffer_size + 1;
		if (buffers > config.max_buffers) {
			stats->oversize++;
			return XDP_PASS;
		}
	}
	if (queue >= config.queues || queue >= XSPIN_MAX_QUEUES)
		goto failed;
	q = &queues[queue];

	/*
	 * A buffer is in flight until the HPU has put it back on the fill ring.
	 * The credits of all contexts together fit the rx ring of a socket and
	 * the fill ring of the queue, so neither can overflow behind our back.
	 */
	if (READ_ONCE(q->issued[context]) - READ_ONCE(q->done[context]) + buffers >
	    READ_ONCE(share.credit[context])) {
		if (c->flags & XSPIN_CONTEXT_SPILL) {
			stats->spilled[context]++;
			return XDP_PASS;
		}
		stats->refused[context]++;
		return XDP_DROP;
	}

	/* A driver's own metadata would lie between ours and the frame. */
	if (ctx->data_meta != ctx->data &&
	    bpf_xdp_adjust_meta(ctx, (int)(ctx->data - ctx->data_meta)))
		goto failed;
	if (bpf_xdp_adjust_meta(ctx, -(int)sizeof(*meta)))
		goto failed;
	f = frame_of(ctx);
	meta = (void *)(long)ctx->data_meta;
	if ((void *)(meta + 1) > f.data)
		goto undo;

	__builtin_memset(meta->key, 0, sizeof(meta->key));
	for (int i = 0; i < XSPIN_MAX_KEY; i++) {
		if (i >= c->nkey)
			break;
		load_field(&f, &c->key[i], &v); /* is there: need */
		meta->key[i] = v;
		hash = mix(hash, v);
	}
	meta->offset = 0;
	if (c->has_offset) {
		load_field(&f, &c->offset, &v);
		meta->offset = v >> (c->offset_shift & 31);
	}
	if (c->policy == XSPIN_POLICY_BLOCKED)
		hash = blocked(c, hash, meta->offset);
	meta->hash = hash;
	meta->flags = rule_holds(&f, &m->ruleset->eom) ? XSPIN_META_EOM : 0;
	meta->generation = t->generation;
	meta->context = context;
	meta->ruleset = m->ruleset->slot;
	meta->cpu = bpf_get_smp_processor_id();
	meta->magic = XSPIN_META_MAGIC;
	meta->arrival = c->flags & XSPIN_CONTEXT_TIMESTAMP ? bpf_ktime_get_ns() : 0;

	/* First: whoever finds a bucket in use and its context idle behind that may take the use for
	 * that of a lost packet. */
	count(&q->issued[context], buffers);
	if (c->policy == XSPIN_POLICY_PACKET)
		hpu = pick_packet(q, queue, c->core_mask, context);
	else
		hpu = pick_message(&buckets[(c->bucket_base + (hash & c->bucket_mask)) &
					    (XSPIN_MAX_BUCKETS - 1)],
				   c->core_mask);
	if (hpu >= XSPIN_MAX_HPUS) {
		count(&q->issued[context], -buffers);
		goto undo;
	}
	meta->seq = count(&q->seq[hpu][context], buffers);
	count(&share.enqueued[queue][hpu], buffers);

	/*
	 * Counted before it is sent: whatever is lost from here on is missed by
	 * its HPU, which finds the gap in seq and returns the credit.
	 */
	if (redirect && bpf_redirect_map(&sockets, queue * config.hpus + hpu, XDP_PASS) !=
				XDP_REDIRECT)
		goto undo; /* no socket: the NIC is going away, the stack takes over */
	stats->redirected++;
	return XDP_REDIRECT;

undo:
	bpf_xdp_adjust_meta(ctx, sizeof(*meta));
failed:
	stats->failed++;
	return XDP_PASS;
}

/* Inlined in the main program, as the tail call must be: one from a subprogram may have
 * 256 bytes of stack before it. */
static __always_inline int ingress(struct xdp_md *ctx, int redirect, int trains)
{
	__u32 table = READ_ONCE(active) & 1;
	const struct xspin_table *t = &tables[table];
	struct frame f = frame_of(ctx);
	struct xspin_stats *stats;
	struct classified m = { .queue = ctx->rx_queue_index };
	__u32 zero = 0;

	stats = bpf_map_lookup_elem(&counters, &zero);
	if (!stats)
		return XDP_PASS;
	stats->seen++;
	if (!classify(&f, t, stats, &m, trains))
		return XDP_PASS;
	if (redirect && m.context->flags & XSPIN_CONTEXT_KERNEL)
		return handle(ctx, table, stats, &f, &m);
	return deliver(ctx, t, stats, &m, redirect);
}

SEC("xdp.frags")
int xspin_ingress(struct xdp_md *ctx)
{
	return ingress(ctx, 1, 0);
}

/* The same where trains may come. */
SEC("xdp.frags")
int xspin_trains(struct xdp_md *ctx)
{
	return ingress(ctx, 1, 1);
}

/*
 * Takes what handlers in eBPF hand over to HPUs of the same context, as it came. In the
 * same run of the program: so no other frame is in `handing`, and the table that has matched
 * this one is still as it was.
 */
SEC("xdp.frags")
int xspin_user(struct xdp_md *ctx)
{
	struct classified m = { .queue = ctx->rx_queue_index };
	const struct xspin_table *t;
	struct xspin_handing *h;
	struct xspin_stats *stats;
	__u32 zero = 0, len;

	stats = bpf_map_lookup_elem(&counters, &zero);
	h = bpf_map_lookup_elem(&handing, &zero);
	if (!stats || !h)
		return XDP_DROP;
	len = h->len;
	if (len < 1 || len > XSPIN_MAX_KEPT)
		return XDP_DROP;
	h->len = 0;
	if (h->kept && bpf_xdp_store_bytes(ctx, 0, h->bytes, length_kept(len)))
		return XDP_DROP;
	t = &tables[h->table & 1];
	belongs(&m, t, h->ruleset);
	m.len = len;
	stats->kernel[m.id]--; /* is counted by what becomes of it now */
	return deliver(ctx, t, stats, &m, 1);
}

/* The same without sockets behind it, for one frame at a time (`xspin rules test`). */
SEC("xdp.frags")
int xspin_verdict(struct xdp_md *ctx)
{
	return ingress(ctx, 0, 0);
}

/* Match, then drop or pass: what matching alone costs (`xspin bench match`). */
SEC("xdp.frags")
int xspin_match(struct xdp_md *ctx)
{
	struct frame f = frame_of(ctx);

	return match(&f, &tables[READ_ONCE(active) & 1]) < 0 ? XDP_PASS : XDP_DROP;
}

char _license[] SEC("license") = "Dual BSD/GPL";
