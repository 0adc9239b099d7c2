/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * The matching engine: bit vectors per field (Lakshman and Stiliadis, SIGCOMM
 * 1998). A field is a distinct (word, mask) of the table; its value axis is cut
 * into intervals, and each interval has one bit for each ruleset that can still
 * match there. A frame costs one binary search for each field until no ruleset
 * is left, however many rulesets share the fields; unmatched traffic ends after
 * the first fields, which user space orders for that. A rule that all rulesets
 * share is a gate: one comparison, and no vector.
 */
#pragma once
#include "kernel.h"
#include "xspin.h"

#define SEARCH_STEPS 13 /* 2*2048+1 intervals at most */

struct frame {
	struct xdp_md *ctx;
	void *data;
	void *data_end;
};

static __always_inline struct frame frame_of(struct xdp_md *ctx)
{
	struct frame f = {
		.ctx = ctx,
		.data = (void *)(long)ctx->data,
		.data_end = (void *)(long)ctx->data_end,
	};
	return f;
}

/*
 * A word that reaches beyond the linear part: the frame is short or fragmented.
 * Returns the word, and in the upper half whether the first `need` bytes of the
 * frame exist. Like is_local it is global so that the verifier looks at it once
 * rather than at each call: with both static it took four times as long.
 */
__noinline __u64 load_word_slow(struct xdp_md *ctx, __u32 off, __u32 need)
{
	__u32 len = hook_len(ctx);
	__u32 word = 0;

	if (need > len || off >= len)
		return 0;
	/*
	 * Sizes are constants. Of `len - off` clang knows that it is not 0, and
	 * the verifier of Linux 6.12 does not: "R4 invalid zero-sized read".
	 */
	if (off + 4 <= len) {
		hook_load(ctx, off, &word, 4);
	} else {
		for (__u32 i = 0; i < 3 && off + i < len; i++)
			hook_load(ctx, off + i, (__u8 *)&word + i, 1);
	}
	return 1ULL << 32 | bswap32(word);
}

/* The field's value; false when a byte its mask selects is not in the frame. */
static __always_inline int load_field(const struct frame *f, const struct xspin_field *field,
				      __u32 *value)
{
	__u32 off = field->off & (XSPIN_WINDOW - 4);
	void *p = f->data + off;
	__u64 word;

	if (likely(p + 4 <= f->data_end)) {
		*value = bswap32(*(__u32 *)p) & field->mask;
		return 1;
	}
	word = load_word_slow(f->ctx, off, field->need);
	*value = (__u32)word & field->mask;
	return word >> 32;
}

static __always_inline int rule_holds(const struct frame *f, const struct xspin_rule *rule)
{
	__u32 v = 0;

	if (rule->field.mask && !load_field(f, &rule->field, &v))
		return 0;
	return rule->start <= v && v <= rule->end;
}

/* The interval of bounds[first .. first+count) that holds v. */
static __always_inline __u32 search(const struct xspin_table *t, __u32 first, __u32 count, __u32 v)
{
	for (int i = 0; i < SEARCH_STEPS; i++) {
		__u32 half = count >> 1;

		if (!half)
			break;
		if (t->bounds[(first + half) & (XSPIN_MAX_BOUNDS - 1)] <= v)
			first += half;
		count -= half;
	}
	return first & (XSPIN_MAX_BOUNDS - 1);
}

/* Trailing zeros by de Bruijn multiplication: BPF has no instruction for it. */
static const __u8 debruijn_position[64] = {
	0,  1,	2,  53, 3,  7,	54, 27, 4,  38, 41, 8,	34, 55, 48, 28, 62, 5,	39, 46, 44, 42,
	22, 9,	24, 35, 59, 56, 49, 18, 29, 11, 63, 52, 6,  26, 37, 40, 33, 47, 61, 45, 43, 21,
	23, 58, 17, 10, 51, 25, 36, 32, 60, 20, 57, 16, 50, 31, 19, 15, 30, 14, 13, 12,
};

static __always_inline int lowest_bit(__u64 v)
{
	return debruijn_position[((v & -v) * 0x022fdd63cc95386dULL) >> 58];
}

struct search_state {
	struct frame frame;
	const struct xspin_table *table;
	__u64 cand[XSPIN_VEC_WORDS];
	__u64 hit[XSPIN_VEC_WORDS];
	__u32 next;
};

/* One field, up to 64 rulesets, all of them AND. Returns 1 when the outcome is known. */
static __always_inline int step_and(const struct frame *f, const struct xspin_table *t, __u32 i,
				    __u64 *cand)
{
	const struct xspin_index_field *x = &t->fields[i & (XSPIN_MAX_FIELDS - 1)];
	__u32 v;

	if (!(x->users[0] & *cand))
		return 0; /* nobody asks any more */
	if (load_field(f, &x->field, &v))
		*cand &= t->vec[search(t, x->first, x->count, v)];
	else
		*cand &= x->absent[0];
	return !(*cand & x->after[0]);
}

/* One field, up to 64 rulesets. Returns 1 when the outcome is known. */
static __always_inline int step_narrow(const struct frame *f, const struct xspin_table *t, __u32 i,
				       __u64 *cand, __u64 *hit)
{
	const struct xspin_index_field *x = &t->fields[i & (XSPIN_MAX_FIELDS - 1)];
	__u64 vec;
	__u32 v;

	if (!(x->users[0] & (*cand | (t->or_[0] & ~*hit))))
		return 0; /* nobody asks any more */
	if (load_field(f, &x->field, &v))
		vec = t->vec[search(t, x->first, x->count, v)];
	else
		vec = x->absent[0];
	*hit |= vec & t->or_[0];
	*cand &= vec;
	return !(*cand & x->after[0]) && i + 1 >= t->last_or;
}

static __always_inline int step_wide(const struct frame *f, const struct xspin_table *t, __u32 i,
				     __u64 *cand, __u64 *hit)
{
	const struct xspin_index_field *x = &t->fields[i & (XSPIN_MAX_FIELDS - 1)];
	const __u64 *vec;
	__u64 left = 0;
	__u32 v;

	for (int w = 0; w < XSPIN_VEC_WORDS; w++)
		left |= x->users[w] & (cand[w] | (t->or_[w] & ~hit[w]));
	if (!left)
		return 0; /* nobody asks any more */
	left = 0;
	if (load_field(f, &x->field, &v))
		vec = &t->vec[search(t, x->first, x->count, v) * XSPIN_VEC_WORDS];
	else
		vec = x->absent;
	for (int w = 0; w < XSPIN_VEC_WORDS; w++) {
		hit[w] |= vec[w] & t->or_[w];
		cand[w] &= vec[w];
		left |= cand[w] & x->after[w];
	}
	return !left && i + 1 >= t->last_or;
}

static long more_narrow(__u32 i, struct search_state *s)
{
	return step_narrow(&s->frame, s->table, s->next + i, &s->cand[0], &s->hit[0]);
}

static long more_wide(__u32 i, struct search_state *s)
{
	return step_wide(&s->frame, s->table, s->next + i, s->cand, s->hit);
}

/*
 * Is the frame to this host: to the interface's MAC and, if it is an IP packet, to
 * one of its addresses? Asked last, about frames that rulesets have matched. The
 * addresses are few, and the first is nearly always the one.
 */
__noinline int is_local(struct xdp_md *ctx, const struct xspin_table *t)
{
	void *data = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end;
	__u32 to[4] = { 0, 0, bswap32(0xffff), 0 };
	const __u16 *eth = data;
	__u16 copy[7];

	if (!t)
		return 0;
	if (unlikely(data + 14 > end)) {
		if (hook_load(ctx, 0, copy, 14))
			return 0;
		eth = copy;
	}
	if (eth[0] != t->mac[0] || eth[1] != t->mac[1] || eth[2] != t->mac[2])
		return 0;
	if (eth[6] == bswap16(0x0800)) {
		const __u16 *dst = data + 30;

		if (likely(data + 34 <= end))
			to[3] = dst[0] | (__u32)dst[1] << 16;
		else if (hook_load(ctx, 30, &to[3], 4))
			return 0;
	} else if (eth[6] == bswap16(0x86dd)) {
		if (hook_load(ctx, 38, to, 16))
			return 0;
	} else {
		return 1;
	}
	for (__u32 i = 0; i < XSPIN_MAX_LOCAL; i++) {
		const __u32 *w = t->addresses[i].w;

		if (i >= t->naddresses)
			break;
		if (w[3] == to[3] && w[2] == to[2] && w[1] == to[1] && w[0] == to[0])
			return 1;
	}
	return 0;
}

/* The position of the lowest-numbered ruleset that matches, or -1. */
static __always_inline int match_narrow(const struct frame *f, const struct xspin_table *t)
{
	__u64 cand = t->cand[0], hit = t->hit[0];
	__u32 n = t->nfields;

	if (likely(!t->last_or)) {
		for (__u32 i = 0; i < XSPIN_INLINE_FIELDS; i++) {
			if (i >= n)
				goto known;
			if (step_and(f, t, i, &cand))
				goto known;
		}
	} else {
		for (__u32 i = 0; i < XSPIN_INLINE_FIELDS; i++) {
			if (i >= n)
				goto known;
			if (step_narrow(f, t, i, &cand, &hit))
				goto known;
		}
	}
	if (n > XSPIN_INLINE_FIELDS) {
		struct search_state s = { .frame = *f, .table = t, .next = XSPIN_INLINE_FIELDS };

		s.cand[0] = cand;
		s.hit[0] = hit;
		bpf_loop(n - XSPIN_INLINE_FIELDS, more_narrow, &s, 0);
		cand = s.cand[0];
		hit = s.hit[0];
	}
known:
	cand |= hit;
	if (cand & t->local[0] && !is_local(f->ctx, t))
		cand &= ~t->local[0];
	return cand ? lowest_bit(cand) : -1;
}

static __always_inline int match_wide(const struct frame *f, const struct xspin_table *t)
{
	struct search_state s = { .frame = *f, .table = t, .next = XSPIN_INLINE_FIELDS };
	__u32 n = t->nfields;
	__u64 ask = 0;

	for (int w = 0; w < XSPIN_VEC_WORDS; w++) {
		s.cand[w] = t->cand[w];
		s.hit[w] = t->hit[w];
	}
	for (__u32 i = 0; i < XSPIN_INLINE_FIELDS; i++) {
		if (i >= n)
			goto known;
		if (step_wide(f, t, i, s.cand, s.hit))
			goto known;
	}
	if (n > XSPIN_INLINE_FIELDS)
		bpf_loop(n - XSPIN_INLINE_FIELDS, more_wide, &s, 0);
known:
	for (int w = 0; w < XSPIN_VEC_WORDS; w++) {
		s.cand[w] |= s.hit[w];
		ask |= s.cand[w] & t->local[w];
	}
	ask = ask && !is_local(f->ctx, t) ? ~0ULL : 0; /* take these away */
	for (int w = 0; w < XSPIN_VEC_WORDS; w++) {
		__u64 m = s.cand[w] & ~(t->local[w] & ask);

		if (m)
			return w * 64 + lowest_bit(m);
	}
	return -1;
}

static __always_inline int match(const struct frame *f, const struct xspin_table *t)
{
	/* What every ruleset demands needs no vectors. */
	for (__u32 i = 0; i < XSPIN_MAX_GATES; i++) {
		const struct xspin_rule *gate = &t->gates[i];
		__u32 v;

		if (i >= t->ngates)
			break;
		if (!load_field(f, &gate->field, &v) || v - gate->start > gate->end - gate->start)
			return -1;
	}
	if (likely(!t->wide))
		return match_narrow(f, t);
	return match_wide(f, t);
}
