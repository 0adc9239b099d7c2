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
enum { ETH_HEADER = 14, ETH_P_IP = 0x0800, ETH_P_IPV6 = 0x86dd, IPPROTO_UDP = 17 };

/* include/uapi/linux/bpf.h. */
struct __sk_buff {
	__u32 len;
	__u32 pkt_type;
	__u32 mark;
	__u32 queue_mapping;
	__u32 protocol;
	__u32 other[39];
	__u32 gso_size;
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
	__u16 on;      /* 0: frames of this direction are only counted */
	__u16 trains;  /* 1: trains pass whole */
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

/*
 * A train: UDP datagrams over IPv4 that their sender has left to a device to cut, behind the headers of one. Linux has no
 * way of taking one out of the middle, so in the place of a lost segment goes a copy of another.
 */
struct train {
	struct __sk_buff *skb;
	struct xspin_path *path;
	__u64 first; /* number of the first segment */
	__u32 at;    /* where that begins */
	__u32 size;  /* of a segment; the last may be shorter */
	__u32 n;
	__u32 lost;
	__u32 kept; /* a segment of that size which is not lost; n: none */
	__u32 whole; /* the last is as long as the others */
	__u64 gone[2]; /* bits: a segment is lost */
};

enum { UDP_MAX_SEGMENTS = 128, SEGMENT = 16384 };

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__uint(key_size, 4);
	__uint(value_size, SEGMENT);
} xspin_segment SEC(".maps");

/* Fills in what a train is. False: the frame is none. */
static __always_inline int is_train(struct __sk_buff *skb, struct train *t)
{
	__u8 ip[10];
	__u32 bytes;

	if (!skb->gso_size || skb->gso_size > SEGMENT || skb->protocol != __builtin_bswap16(ETH_P_IP) ||
	    bpf_skb_load_bytes(skb, ETH_HEADER, ip, sizeof(ip)) || ip[0] != 0x45 || ip[9] != IPPROTO_UDP)
		return 0;
	t->at = ETH_HEADER + 20 + 8;
	if (skb->len <= t->at)
		return 0;
	bytes = skb->len - t->at;
	t->size = skb->gso_size;
	t->n = (bytes + t->size - 1) / t->size;
	t->whole = bytes == t->n * t->size;
	t->kept = t->n;
	return t->n <= UDP_MAX_SEGMENTS;
}

static long lose(__u32 i, struct train *t)
{
	if ((__u32)draw(t->path->set.key, 2 * (t->first + i)) < t->path->set.loss) {
		t->gone[i >> 6 & 1] |= 1ULL << (i & 63);
		t->lost++;
	} else if (i + 1 < t->n || t->whole) {
		t->kept = i;
	}
	return 0;
}

/* `size` bytes between the buffer and a segment. */
static __always_inline long move(struct train *t, __u32 i, int out)
{
	__u32 zero = 0, n = t->size - 1;
	__u8 *b = bpf_map_lookup_elem(&xspin_segment, &zero);

	asm volatile("" : "+r"(n));
	if (!b || n >= SEGMENT)
		return -1;
	if (out)
		return bpf_skb_store_bytes(t->skb, t->at + i * t->size, b, n + 1, 0);
	return bpf_skb_load_bytes(t->skb, t->at + i * t->size, b, n + 1);
}

static long replace(__u32 i, struct train *t)
{
	if (t->gone[i >> 6 & 1] >> (i & 63) & 1 && move(t, i, 1))
		t->lost = t->n;
	return 0;
}

/* Does to a train what happens to its segments. False: nothing of it is left. */
static __always_inline int impair_train(struct train *t)
{
	__sync_fetch_and_add(&t->path->did.bytes, (__u64)(t->n - 1) * t->at);
	if (t->path->set.loss)
		bpf_loop(t->n, lose, t, 0);
	if (t->lost) {
		const __u32 last = t->n - 1;

		/* No other has the length of a last one that is shorter. */
		if (t->kept == t->n || (!t->whole && t->gone[last >> 6 & 1] >> (last & 63) & 1) || move(t, t->kept, 0))
			t->lost = t->n;
		else
			bpf_loop(t->n, replace, t, 0);
	}
	__sync_fetch_and_add(&t->path->did.lost, t->lost);
	return t->lost < t->n;
}

static __always_inline int impair(struct __sk_buff *skb, __u32 direction)
{
	struct xspin_path *p = bpf_map_lookup_elem(&xspin_paths, &direction);
	struct train t = { .skb = skb, .path = p };
	__u64 n, x;

	if (!p)
		return TC_ACT_SHOT;
	if (p->set.trains && is_train(skb, &t)) {
		t.first = __sync_fetch_and_add(&p->did.frames, t.n);
		__sync_fetch_and_add(&p->did.bytes, skb->len);
		if (draw(p->set.key, 2 * t.first) >> 32 < p->set.duplicate && bpf_clone_redirect(skb, p->set.out, 0) >= 0)
			__sync_fetch_and_add(&p->did.duplicated, t.n);
		return impair_train(&t) ? bpf_redirect(p->set.out, 0) : TC_ACT_SHOT;
	}
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
