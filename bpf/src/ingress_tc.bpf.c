/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * The ingress program at tc: what belongs to contexts whose handlers in eBPF are there goes to these, and
 * everything else to Linux. It goes by the same tables as the one at xdp, which may have seen the frame before,
 * and has let pass what belongs to these contexts.
 *
 * A frame may be a train, see hook.h: it is matched by its headers, and cut by whoever gets it.
 */
#include "ingress.h"

/* Whether it is of a kind that is not known here to be several packets behind the headers of one. */
static __always_inline int is_strange(struct __sk_buff *ctx)
{
	return ctx->gso_size && hook_gso_type(ctx) & ~(SKB_GSO_TCP | SKB_GSO_UDP_L4 | SKB_GSO_DODGY);
}

SEC(HOOK_SECTION)
int xspin_ingress_tc(struct __sk_buff *ctx)
{
	const struct xspin_table *t = &tables[READ_ONCE(active) & 1];
	const struct frame f = frame_of(ctx);
	struct classified m = {};
	struct xspin_stats *stats;
	__u32 zero = 0;
	int bit, here;

	stats = bpf_map_lookup_elem(&counters, &zero);
	if (!stats)
		return TCX_NEXT;
	/* A tag that the device has taken out of the frame makes it as much another frame as one in its bytes. */
	bit = ctx->vlan_present ? -1 : match(&f, t);
	if (bit >= 0)
		belongs(&m, t, bit);
	here = bit >= 0 && m.context->flags & XSPIN_CONTEXT_TC;
	if (!here && READ_ONCE(counting))
		return TCX_NEXT;
	stats->seen++;
	if (bit < 0) {
		stats->passed++;
		return TCX_NEXT;
	}
	stats->matched[m.ruleset->slot]++;
	if (!here) { /* the program at xdp is not there yet, or no more: the stack takes over */
		stats->failed++;
		return TCX_NEXT;
	}
	if (is_strange(ctx)) {
		stats->trains++;
		return TCX_NEXT;
	}
	if (!well_formed(&f, stats, &m))
		return TCX_NEXT;
	stats->kernel[m.id]++;
	bpf_tail_call(ctx, &programs, m.id);
	stats->kernel[m.id]--;
	stats->failed++; /* no program: the context is going away, the stack takes over */
	return TCX_NEXT;
}

char _license[] SEC("license") = "Dual BSD/GPL";
