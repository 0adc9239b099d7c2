/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Bad network for a lab. Frames come from one end of the lab into the namespace
 * in the middle, where xspin_impair_* decide at tc ingress what happens to each,
 * and send it on: straight to the other end, or through a second veth pair at
 * whose far side xspin_wait_* hand it to the relay, which lets it wait.
 *
 * What happens to a frame depends on a key and on the number of the frame, and
 * on nothing else: no state but a counter, so that CPUs need no lock and the
 * same frames meet the same fate each time. Package netns/impair has the same
 * function in Go.
 */
#include "kernel.h"

enum { TC_ACT_SHOT = 2 };
enum { ETH_HEADER = 14, ETH_P_IP = 0x0800, ETH_P_IPV6 = 0x86dd };

/* The front of the kernel's struct, which is longer. */
struct __sk_buff {
	__u32 len;
	__u32 pkt_type;
	__u32 mark;
	__u32 queue_mapping;
	__u32 protocol;
};

static long (*const bpf_skb_store_bytes)(struct __sk_buff *skb, __u32 off, const void *from, __u32 len, __u64 flags) = (void *)9;
static long (*const bpf_clone_redirect)(struct __sk_buff *skb, __u32 ifindex, __u64 flags) = (void *)13;
static long (*const bpf_skb_load_bytes)(const struct __sk_buff *skb, __u32 off, void *to, __u32 len) = (void *)26;

/* What may happen in one direction. Written before there is any traffic. */
struct xspin_impairment {
	__u64 key; /* of the decisions */
	/* Probabilities: 2^32 is always. */
	__u64 loss;
	__u64 duplicate;
	__u64 corrupt;
	__u64 reorder; /* the relay's */
	__u64 delay;   /* ns, the relay's */
	__u64 rate;    /* bit/s, of the queueing discipline on `out`; 0: none */
	__u64 seed;    /* that key was made of */
	__u32 out;     /* interface index */
	__u32 on;      /* 0: frames of this direction are only counted */
};

/* What happened. */
struct xspin_impaired {
	__u64 frames; /* that came; the number of the next one */
	__u64 bytes;  /* of them, with Ethernet header */
	__u64 lost;
	__u64 duplicated;
	__u64 corrupted;
	__u64 unserved; /* dropped because there was no relay */
};

/* What the relay did: written by it alone, in memory that it maps. */
struct xspin_relayed {
	__u64 delayed;
	__u64 reordered;
	__u64 overflowed;
	__u64 sent;
};

struct xspin_path {
	struct xspin_impairment set;
	struct xspin_impaired did __aligned;
	struct xspin_relayed relay __aligned;
} __aligned;

enum { FROM_HOST, TO_HOST, DIRECTIONS };

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, DIRECTIONS);
	__type(key, __u32);
	__type(value, struct xspin_path);
} xspin_paths SEC(".maps");

/* The relay's sockets, by direction. */
struct {
	__uint(type, BPF_MAP_TYPE_XSKMAP);
	__uint(max_entries, DIRECTIONS);
	__uint(key_size, 4);
	__uint(value_size, 4);
} xspin_relays SEC(".maps");

/* In front of a frame on its way to the relay. */
struct xspin_wait_meta {
	__u64 arrived; /* CLOCK_MONOTONIC, ns */
	__u32 flow;    /* hash: frames of a flow leave by one queue */
	__u32 _pad;
};

/* The finalizer of splitmix64. */
static __always_inline __u64 mix(__u64 x)
{
	x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
	x = (x ^ x >> 27) * 0x94d049bb133111eb;
	return x ^ x >> 31;
}

/* The i-th random number of a key. */
static __always_inline __u64 draw(__u64 key, __u64 i)
{
	return mix(key + (i + 1) * 0x9e3779b97f4a7c15);
}

/* Only in what has a checksum: a broken ARP reply would be believed. */
static __always_inline int can_corrupt(struct __sk_buff *skb)
{
	return (skb->protocol == __builtin_bswap16(ETH_P_IP) || skb->protocol == __builtin_bswap16(ETH_P_IPV6)) &&
	       skb->len > ETH_HEADER;
}

/* Flips one bit behind the Ethernet header. */
static __always_inline long corrupt(struct __sk_buff *skb, __u32 random)
{
	__u32 bit = random % ((skb->len - ETH_HEADER) * 8);
	__u32 off = ETH_HEADER + bit / 8;
	__u8 byte;

	if (bpf_skb_load_bytes(skb, off, &byte, 1))
		return -1;
	byte ^= 1 << bit % 8;
	return bpf_skb_store_bytes(skb, off, &byte, 1, 0);
}

static __always_inline int impair(struct __sk_buff *skb, __u32 direction)
{
	struct xspin_path *p = bpf_map_lookup_elem(&xspin_paths, &direction);
	__u64 n, x;

	if (!p)
		return TC_ACT_SHOT;
	n = __sync_fetch_and_add(&p->did.frames, 1);
	__sync_fetch_and_add(&p->did.bytes, skb->len);

	x = draw(p->set.key, 2 * n);
	if ((__u32)x < p->set.loss) {
		__sync_fetch_and_add(&p->did.lost, 1);
		return TC_ACT_SHOT;
	}
	/* The copy goes first, and is as the frame came. */
	if (x >> 32 < p->set.duplicate && bpf_clone_redirect(skb, p->set.out, 0) >= 0)
		__sync_fetch_and_add(&p->did.duplicated, 1);

	x = draw(p->set.key, 2 * n + 1);
	if ((__u32)x < p->set.corrupt && can_corrupt(skb) && !corrupt(skb, x >> 32))
		__sync_fetch_and_add(&p->did.corrupted, 1);
	return bpf_redirect(p->set.out, 0);
}

SEC("tc")
int xspin_impair_from_host(struct __sk_buff *skb)
{
	return impair(skb, FROM_HOST);
}

SEC("tc")
int xspin_impair_to_host(struct __sk_buff *skb)
{
	return impair(skb, TO_HOST);
}

/* Addresses and ports of UDP and TCP over IPv4 without options, else 0. */
static __always_inline __u32 flow(struct xdp_md *ctx)
{
	const __u8 *p = (void *)(long)ctx->data;
	const __u32 *ip;

	if (p + ETH_HEADER + 24 > (const __u8 *)(long)ctx->data_end)
		return 0;
	if (p[12] != 8 || p[13] != 0 || p[14] != 0x45 || (p[23] != 6 && p[23] != 17))
		return 0;
	ip = (const void *)(p + ETH_HEADER + 12);
	return mix(((__u64)ip[0] << 32 | ip[1]) + (__u64)ip[2] * 0x9e3779b97f4a7c15) >> 32;
}

static __always_inline int wait(struct xdp_md *ctx, __u32 direction)
{
	__u32 hash = flow(ctx);
	struct xspin_wait_meta *m;
	struct xspin_path *p;
	long action;

	if (bpf_xdp_adjust_meta(ctx, -(int)sizeof(*m)))
		return XDP_DROP;
	m = (void *)(long)ctx->data_meta;
	if ((void *)(m + 1) > (void *)(long)ctx->data)
		return XDP_DROP;
	m->arrived = bpf_ktime_get_ns();
	m->flow = hash;
	m->_pad = 0;
	action = bpf_redirect_map(&xspin_relays, direction, XDP_DROP);
	if (action == XDP_DROP && (p = bpf_map_lookup_elem(&xspin_paths, &direction)))
		__sync_fetch_and_add(&p->did.unserved, 1);
	return action;
}

SEC("xdp.frags")
int xspin_wait_from_host(struct xdp_md *ctx)
{
	return wait(ctx, FROM_HOST);
}

SEC("xdp.frags")
int xspin_wait_to_host(struct xdp_md *ctx)
{
	return wait(ctx, TO_HOST);
}

/* On the devices next to the ends: without a program there, what an end sends
 * by XDP_TX or by a redirect would not arrive. */
SEC("xdp.frags")
int xspin_wire(struct xdp_md *ctx)
{
	return XDP_PASS;
}

char _license[] SEC("license") = "Dual BSD/GPL";
