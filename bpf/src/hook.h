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

/* The end of a packet of Linux's stack. */
struct skb_shared_info {
	__u16 gso_size;
	__u32 gso_type;
} __attribute__((preserve_access_index));

extern void *bpf_cast_to_kern_ctx(void *ctx) __attribute__((section(".ksyms")));
extern void *bpf_rdonly_cast(const void *p, __u32 type) __attribute__((section(".ksyms")));

#define kernel_size_of(type) __builtin_preserve_type_info(*(type *)0, 1)
#define kernel_offset_of(type, field) __builtin_preserve_field_info(((type *)0)->field, 0)
#define kernel_type_id(type) __builtin_btf_type_id(*(type *)0, 1)

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

/* The kernel's side of the packet. The BTF of the kernel that a program is loaded into says where fields are. */
struct sk_buff {
	__u8 ip_summed : 2;
	__u32 end;
	unsigned char *head;
} __attribute__((preserve_access_index));

enum { CHECKSUM_PARTIAL = 3 };

/* Bits of gso_type: include/linux/skbuff.h. */
enum {
	SKB_GSO_TCP = 1 << 0 | 1 << 2 | 1 << 3 | 1 << 4 | 1 << 19 | 1 << 30, /* IPv4 and IPv6, with ECN, with one id (1 << 30 from Linux 6.18 on) */
	SKB_GSO_DODGY = 1 << 1,					    /* nobody has checked what it says */
	SKB_GSO_UDP_L4 = 1 << 17,
};

/* What is said of how to cut a train: SKB_GSO bits. PROG_RUN says nothing, whatever gso_size there is. */
static __always_inline __u32 hook_gso_type(struct __sk_buff *ctx)
{
	const struct sk_buff *skb = bpf_cast_to_kern_ctx(ctx);
	const struct skb_shared_info *s = bpf_rdonly_cast(skb->head + skb->end, kernel_type_id(struct skb_shared_info));

	return s->gso_type;
}

/* Whether the checksum is left to a device: a bit field, whose place the kernel's BTF tells. */
static __always_inline int hook_sum_is_left(struct __sk_buff *ctx)
{
	const struct sk_buff *skb = bpf_cast_to_kern_ctx(ctx);
	__u64 v = *((const __u8 *)skb + __builtin_preserve_field_info(skb->ip_summed, 0 /* its byte */));

	v <<= __builtin_preserve_field_info(skb->ip_summed, 4) & 63;
	v >>= __builtin_preserve_field_info(skb->ip_summed, 5) & 63;
	return v == CHECKSUM_PARTIAL;
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
