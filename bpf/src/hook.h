/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * The hook that a program is compiled for: xdp, or tc with -DXSPIN_TC. Shared source says
 * struct xdp_md and xdp_action at both, and reaches the frame by the functions here.
 *
 * At tc a frame is a packet of Linux's stack (an sk_buff). Often no more than its headers is in one
 * piece, and it may be a train: several packets of one sender, behind the headers of one.
 */
#pragma once
#ifdef XSPIN_TC
#define xdp_md __sk_buff
struct __sk_buff;
#define HOOK_SECTION "tcx/ingress"
#else
#define HOOK_SECTION "xdp.frags"
#endif
#include "../include/xspin_kernel.h"

#ifdef XSPIN_TC

/* include/uapi/linux/bpf.h. */
struct __sk_buff {
	__u32 len;
	__u32 pkt_type;
	__u32 mark;
	__u32 queue_mapping;
	__u32 protocol;
	__u32 vlan_present;
	__u32 vlan_tci;
	__u32 vlan_proto;
	__u32 priority;
	__u32 ingress_ifindex;
	__u32 ifindex;
	__u32 tc_index;
	__u32 cb[5];
	__u32 hash;
	__u32 tc_classid;
	__u32 data;
	__u32 data_end;
	__u32 napi_id;
	__u32 family;
	__u32 remote_ip4;
	__u32 local_ip4;
	__u32 remote_ip6[4];
	__u32 local_ip6[4];
	__u32 remote_port;
	__u32 local_port;
	__u32 data_meta;
	__u64 flow_keys __attribute__((aligned(8)));
	__u64 tstamp;
	__u32 wire_len;
	__u32 gso_segs;
	__u64 sk __attribute__((aligned(8)));
	__u32 gso_size;
};

enum { TCX_NEXT = -1, TC_ACT_SHOT = 2 };

static long (*const bpf_skb_store_bytes)(struct __sk_buff *skb, __u32 off, const void *from, __u32 len, __u64 flags) = (void *)9;
static long (*const hook_redirect)(__u32 ifindex, __u64 flags) = (void *)23;
static long (*const bpf_clone_redirect)(struct __sk_buff *skb, __u32 ifindex, __u64 flags) = (void *)13;
static long (*const bpf_skb_load_bytes)(const struct __sk_buff *skb, __u32 off, void *to, __u32 len) = (void *)26;

static long (*const bpf_skb_change_tail)(struct __sk_buff *skb, __u32 len, __u64 flags) = (void *)38;

enum { BPF_F_RECOMPUTE_CSUM = 1 }; /* where a device has summed all of the packet: keeps that true */

static __always_inline __u32 hook_len(struct __sk_buff *ctx)
{
	return ctx->len;
}

static __always_inline long hook_load(struct __sk_buff *ctx, __u32 off, void *to, __u32 n)
{
	return bpf_skb_load_bytes(ctx, off, to, n);
}

/* Pointers into the frame have to be made again. */
static __always_inline long hook_store(struct __sk_buff *ctx, __u32 off, const void *from, __u32 n)
{
	return bpf_skb_store_bytes(ctx, off, from, n, BPF_F_RECOMPUTE_CSUM);
}

/* Changes how long the frame is. A train is none any more. Pointers into the frame have to be made again. */
static __always_inline long hook_resize(struct __sk_buff *ctx, __u32 len __attribute__((unused)), __u32 to)
{
	return bpf_skb_change_tail(ctx, to, 0);
}

/* What the kernel is told of an xdp_action. */
static __always_inline int hook_verdict(struct __sk_buff *ctx, int action)
{
	switch (action) {
	case XDP_PASS:
		return TCX_NEXT;
	case XDP_TX:
		return hook_redirect(ctx->ifindex, 0);
	}
	return TC_ACT_SHOT;
}

#else

static __always_inline __u32 hook_len(struct xdp_md *ctx)
{
	return bpf_xdp_get_buff_len(ctx);
}

static __always_inline long hook_load(struct xdp_md *ctx, __u32 off, void *to, __u32 n)
{
	return bpf_xdp_load_bytes(ctx, off, to, n);
}

static __always_inline long hook_store(struct xdp_md *ctx, __u32 off, const void *from, __u32 n)
{
	return bpf_xdp_store_bytes(ctx, off, from, n);
}

static long (*const bpf_xdp_adjust_tail)(struct xdp_md *ctx, int delta) = (void *)65;

static __always_inline long hook_resize(struct xdp_md *ctx, __u32 len, __u32 to)
{
	return bpf_xdp_adjust_tail(ctx, (int)to - (int)len);
}

static __always_inline int hook_verdict(struct xdp_md *ctx __attribute__((unused)), int action)
{
	return action;
}

#endif
