/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* What XsPIN's own programs use of the kernel's BPF interface beyond what handlers may. */
#pragma once
#include "../include/xspin_kernel.h"

enum {
	BPF_MAP_TYPE_PROG_ARRAY = 3,
	BPF_MAP_TYPE_ARRAY_OF_MAPS = 12,
	BPF_MAP_TYPE_XSKMAP = 17,
};

static long (*const bpf_tail_call)(void *ctx, void *programs, __u32 index) = (void *)12;
static long (*const bpf_redirect)(__u32 ifindex, __u64 flags) = (void *)23;
static long (*const bpf_redirect_map)(void *map, __u64 key, __u64 flags) = (void *)51;
static long (*const bpf_xdp_adjust_meta)(struct xdp_md *ctx, int delta) = (void *)54;
static long (*const bpf_loop)(__u32 n, void *fn, void *arg, __u64 flags) = (void *)181;
