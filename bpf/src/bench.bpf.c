/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Peers and traffic of the benchmarks, and the programs a lab may need. */
#include "kernel.h"

const volatile __u32 target; /* of xspin_send: interface index */

struct {
	__uint(type, BPF_MAP_TYPE_XSKMAP);
	__uint(max_entries, 64);
	__uint(key_size, 4);
	__uint(value_size, 4);
} bare_sockets SEC(".maps");

SEC("xdp.frags")
int xspin_pass(struct xdp_md *ctx)
{
	return XDP_PASS;
}

SEC("xdp.frags")
int xspin_drop(struct xdp_md *ctx)
{
	return XDP_DROP;
}

/* The least that brings a frame to AF_XDP: one socket a queue, no questions. */
SEC("xdp.frags")
int xspin_bare(struct xdp_md *ctx)
{
	return bpf_redirect_map(&bare_sockets, ctx->rx_queue_index, XDP_PASS);
}

/* Live-frame runs of this send their frames out of `target`. */
SEC("xdp")
int xspin_send(struct xdp_md *ctx)
{
	return bpf_redirect(target, 0);
}

char _license[] SEC("license") = "Dual BSD/GPL";
