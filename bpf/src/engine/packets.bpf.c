/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The engine of handlers for packets. */
#include "engine.h"
#include "train.h"

/*
 * Calls the handlers, each at one place and in no loop: so the instructions that the
 * verifier has counted for each of them bound a packet's run.
 */
XSPIN_PACKET
{
	const struct xspin_frame f = xspin_frame(ctx);
	const __u32 has = xspin.has;
	struct xspin_her her = { .len = xspin_length(&f), .action = XDP_DROP };
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
			return xspin_failed(cpu, XSPIN_HAS_COMPLETION | XSPIN_HAS_ACTED, XSPIN_FAIL);
		if (has & XSPIN_HAS_PAYLOAD && header == XSPIN_SUCCESS)
			return xspin_failed(cpu, XSPIN_HAS_PAYLOAD | XSPIN_HAS_ACTED, XSPIN_FAIL);
		return xspin_failed(cpu, XSPIN_HAS_HEADER | XSPIN_HAS_ACTED, XSPIN_FAIL);
	}
	if (header | payload | completion)
		cpu->dropped++;
	return her.action;
}

#ifdef XSPIN_TC
static __noinline enum xspin_followed xspin_follow(struct xdp_md *ctx __attribute__((unused)), struct xspin_segment *g __attribute__((unused)),
						   __u32 at __attribute__((unused)))
{
	return XSPIN_ALONE; /* handlers see every packet */
}
#endif

SEC(HOOK_SECTION)
int xspin_context(struct xdp_md *ctx)
{
	return hook_verdict(ctx, xspin_packets(ctx));
}

/* Has the functions that handlers call be in the object. */
SEC(HOOK_SECTION)
int xspin_api(struct xdp_md *ctx)
{
	struct xspin_her her = { .len = ctx->data };
	__u8 *shared = xspin_memory(her.len, 1), *own = xspin_hpu_memory(&her, her.len, 1);

	struct xspin_headers h;

	xspin_count(xspin_headers(ctx, &her, &h), xspin_load(ctx, 0, &h, 1) + xspin_store(ctx, 0, &h, 1) +
							  xspin_reply_udp(ctx, &her) + xspin_reply_icmp_echo(ctx, &her));
	return shared && own ? *shared + *own + xspin_csum_diff(her.key, 4, 0, 0, 0) : 0;
}

char _license[] SEC("license") = "Dual BSD/GPL";
