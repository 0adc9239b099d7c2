/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * What the XDP program and user space share. This is the one definition: bpf2go
 * makes the Go types from it. Structures are padded by hand and never packed,
 * so that both sides load and store whole words.
 */
#pragma once

enum xspin_limits {
	XSPIN_MAX_RULESETS = 256,
	XSPIN_MAX_CONTEXTS = 256,
	XSPIN_MAX_HPUS = 64,
	XSPIN_MAX_QUEUES = 64,
	XSPIN_MAX_KEY = 8,
	XSPIN_MAX_FIELDS = 2048,   /* 256 rulesets x 8 rules, no two alike */
	XSPIN_MAX_BOUNDS = 8192,   /* intervals, all fields: 2*rules + fields <= 6144 */
	XSPIN_VEC_WORDS = 4,	   /* 256 bits, one a ruleset */
	XSPIN_MAX_GATES = 8,	   /* rules that all rulesets share */
	XSPIN_INLINE_FIELDS = 16,  /* fields matched without a call */
	XSPIN_MAX_BUCKETS = 1 << 18,
	XSPIN_WINDOW = 512,	   /* bytes a rule can see */
	XSPIN_MAX_LOCAL = 256,	   /* addresses of the interface */
	XSPIN_MAX_KEPT = 16384,	   /* bytes of a frame that handlers in eBPF may hand over */
	XSPIN_META_MAGIC = 0x5801, /* 'X', layout version 1 */
};

/* How the program picks the HPU of a packet. */
enum xspin_policy {
	XSPIN_POLICY_MESSAGE, /* all packets of a message go to one HPU */
	XSPIN_POLICY_PACKET,  /* every packet goes where there is room */
	XSPIN_POLICY_BLOCKED, /* all packets of a virtual HPU of a message go to one HPU */
};

enum xspin_context_flags {
	XSPIN_CONTEXT_TIMESTAMP = 1 << 0, /* stamp frames with their arrival time */
	XSPIN_CONTEXT_SPILL = 1 << 1,	  /* out of credit: to the stack, instead of dropped */
	XSPIN_CONTEXT_KERNEL = 1 << 2,	  /* its handlers are in eBPF: programs[context] */
	XSPIN_CONTEXT_HANDS = 1 << 3,	  /* these hand messages over to HPUs: see xspin_handing */
	XSPIN_CONTEXT_TC = 1 << 4,	  /* they are at tc, not at xdp */
};

enum xspin_meta_flags {
	XSPIN_META_EOM = 1 << 0,
};

/*
 * In front of the data of every frame handed to user space. The layout's
 * version comes last, immediately before the frame, so that a reader can tell
 * what lies before it.
 */
struct xspin_meta {
	__u64 arrival;		  /* CLOCK_MONOTONIC ns, 0 when not asked for */
	__u32 key[XSPIN_MAX_KEY]; /* message key words, masked, rest 0 */
	__u32 offset;		  /* of the payload in its message, bytes */
	__u32 hash;		  /* of the key and the virtual HPU: names the bucket */
	__u32 generation;	  /* of the table that matched */
	__u32 seq;		  /* buffers sent before to (queue, HPU, context) */
	__u16 context;
	__u8 ruleset;
	__u8 flags;
	__u16 cpu; /* that received the frame */
	__u16 magic;
};

/* --- the matching table: nobody changes it while it is in force --- */

/* A word of the frame under a mask. */
struct xspin_field {
	__u32 mask;
	__u16 off;  /* bytes, multiple of 4, < XSPIN_WINDOW */
	__u16 need; /* frame bytes that must be there */
};

struct xspin_index_field {
	struct xspin_field field;
	__u32 first;  /* of its intervals in bounds */
	__u32 count;  /* of its intervals, >= 1 */
	__u64 users[XSPIN_VEC_WORDS]; /* rulesets with a rule on the field */
	__u64 after[XSPIN_VEC_WORDS]; /* with a rule on a later one */
	__u64 absent[XSPIN_VEC_WORDS];
};

struct xspin_rule {
	struct xspin_field field;
	__u32 start;
	__u32 end;
};

struct xspin_ruleset {
	struct xspin_rule eom;
	__u16 context;
	__u8 slot;
	__u8 pad[5];
};

/* Execution context as the program sees it: message format and scheduling. */
struct xspin_context {
	__u64 core_mask;
	struct xspin_field key[XSPIN_MAX_KEY];
	struct xspin_field offset;
	struct xspin_field length;
	__u32 length_from; /* the field counts bytes from here */
	__u32 bucket_base;
	__u32 bucket_mask;
	__u32 sequence; /* BLOCKED: bytes of a message that stay together, >= 1 */
	__u16 vhpus;	/* BLOCKED: virtual HPUs of each message, >= 1 */
	__u16 header;	/* bytes before the payload */
	__u16 need;	/* the shortest frame with all of these bytes */
	__u8 nkey;
	__u8 policy;
	__u8 flags;
	__u8 has_offset;
	__u8 offset_shift; /* to the lowest bit of the mask */
	__u8 has_length;
	__u8 length_shift;
	__u8 pad[3];
};

/* IPv6, or IPv4 mapped into it; bytes as on the wire. */
struct xspin_address {
	__u32 w[4];
};

struct xspin_table {
	__u32 generation;
	__u32 ngates;
	__u32 nfields;
	__u32 last_or; /* leading fields that some OR ruleset uses */
	__u32 wide;    /* more than 64 rulesets: vectors have 4 words, else 1 */
	__u32 naddresses;
	struct xspin_rule gates[XSPIN_MAX_GATES];
	__u64 cand[XSPIN_VEC_WORDS];
	__u64 hit[XSPIN_VEC_WORDS];
	__u64 or_[XSPIN_VEC_WORDS];
	__u64 local[XSPIN_VEC_WORDS]; /* rulesets for frames to this host only */
	__u16 mac[4];		      /* of the interface, as on the wire; the last is 0 */
	struct xspin_address addresses[XSPIN_MAX_LOCAL];
	struct xspin_index_field fields[XSPIN_MAX_FIELDS];
	__u32 bounds[XSPIN_MAX_BOUNDS];
	__u64 vec[XSPIN_MAX_BOUNDS * XSPIN_VEC_WORDS];
	struct xspin_ruleset rulesets[XSPIN_MAX_RULESETS];
	struct xspin_context contexts[XSPIN_MAX_CONTEXTS];
};

/* --- scheduling: written all the time by both sides, mapped into user space --- */

/*
 * The driver runs the program for a receive queue on one CPU at a time, so what
 * the program counts for a queue has one writer and needs no atomics (generic
 * XDP gives no such promise: config.atomic). All count buffers (AF_XDP
 * descriptors) and wrap; only differences mean something.
 */
struct xspin_queue {
	/* written by the program */
	__u32 issued[XSPIN_MAX_CONTEXTS];
	__u32 seq[XSPIN_MAX_HPUS][XSPIN_MAX_CONTEXTS];
	__u8 last[XSPIN_MAX_CONTEXTS]; /* HPU of the context's last packet */
	/* written by the HPUs, after the buffers are back on the fill ring */
	__u32 done[XSPIN_MAX_CONTEXTS];
};

struct xspin_share {
	/* written by user space at any time */
	__u32 credit[XSPIN_MAX_CONTEXTS];  /* buffers in flight on each queue */
	__u32 quantum[XSPIN_MAX_CONTEXTS]; /* backlog up to which packets stay on an HPU */
	/* written by the program, one row a queue */
	__u32 enqueued[XSPIN_MAX_QUEUES][XSPIN_MAX_HPUS];
	/* written by the HPUs */
	__u32 dequeued[XSPIN_MAX_QUEUES][XSPIN_MAX_HPUS];
};

struct xspin_stats {
	__u64 seen;
	__u64 passed;	  /* no ruleset matched */
	__u64 redirected; /* on their way to an HPU */
	__u64 failed;	  /* matched, could not be redirected, passed on */
	__u64 malformed;  /* matched, without the bytes its format needs, passed on */
	__u64 oversize;	  /* matched, more buffers than handlers get, passed on */
	__u64 trains;	  /* matched, several packets in one, passed on */
	__u64 matched[XSPIN_MAX_RULESETS];
	__u64 refused[XSPIN_MAX_CONTEXTS]; /* dropped for lack of credit */
	__u64 spilled[XSPIN_MAX_CONTEXTS]; /* passed on for lack of credit */
	__u64 kernel[XSPIN_MAX_CONTEXTS];  /* to the context's handlers in eBPF */
};

/*
 * A frame as it was before handlers in eBPF got it that may hand it over. It is delivered by
 * this, whatever they wrote to it. Only a header handler hands over a frame that it has seen,
 * and it sees those at offset 0: of these the bytes are kept.
 */
struct xspin_handing {
	__u32 table;   /* tables[table] has matched it */
	__u32 ruleset; /* its position there */
	__u32 len;     /* of the frame; 0: it was handed over */
	__u32 kept;    /* 1: bytes has it */
	__u8 bytes[XSPIN_MAX_KEPT];
};

struct xspin_config {
	__u32 hpus;
	__u32 queues;
	__u32 buffer_size; /* bytes of a frame that one buffer takes */
	__u32 max_buffers; /* of one frame */
	__u32 atomic;	   /* several CPUs may run the program for one queue */
	__u32 generic;	   /* all frames are packets of Linux's stack */
};
