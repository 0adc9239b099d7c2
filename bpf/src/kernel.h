/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* What XsPIN's own programs use of the kernel's BPF interface beyond what handlers may. */
#pragma once
#include "hook.h"

enum {
	BPF_MAP_TYPE_PROG_ARRAY = 3,
	BPF_MAP_TYPE_ARRAY_OF_MAPS = 12,
	BPF_MAP_TYPE_XSKMAP = 17,
};

static long (*const bpf_tail_call)(void *ctx, void *programs, __u32 index) = (void *)12;
static long (*const bpf_redirect)(__u32 ifindex, __u64 flags) = (void *)23;
static long (*const bpf_redirect_map)(void *map, __u64 key, __u64 flags) = (void *)51;
static long (*const bpf_xdp_adjust_meta)(struct xdp_md *ctx, int delta) = (void *)54;
/*
 * The kernel's side of an XDP program's argument, and the end of a packet of Linux's stack
 * (an sk_buff). The BTF of the kernel that a program is loaded into says where fields are.
 */
struct net_device;

struct xdp_rxq_info {
	struct net_device *dev;
	__u32 queue_index;
} __attribute__((preserve_access_index));

struct xdp_buff {
	void *data_hard_start;
	struct xdp_rxq_info *rxq;
	__u32 frame_sz;
} __attribute__((preserve_access_index));

struct netdev_rx_queue {
	struct xdp_rxq_info xdp_rxq;
} __attribute__((preserve_access_index));

struct net_device {
	struct netdev_rx_queue *_rx;
} __attribute__((preserve_access_index));

static long (*const bpf_loop)(__u32 n, void *fn, void *arg, __u64 flags) = (void *)181;
