/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * The engine of handlers for messages: segments that come in any order, more than once, and
 * on several CPUs at a time. The contract is in bpf/include/xspin_message.h.
 */
#include "engine.h"
#define XSPIN_ONE_BY_ONE 1 /* each segment has a header of its own */
#include "train.h"
#include "xspin_message.h"

/* Of the kernel's interface, what the engine uses and handlers may not. */
enum {
	BPF_MAP_TYPE_PROG_ARRAY = 3,
	BPF_MAP_TYPE_QUEUE = 22,
	BPF_MAP_TYPE_RINGBUF = 27,
};

#ifndef XSPIN_TC
static long (*const bpf_tail_call)(void *ctx, void *map, __u32 index) = (void *)12;
#endif
static long (*const bpf_map_push_elem)(void *map, const void *value, __u64 flags) = (void *)87;
static long (*const bpf_map_pop_elem)(void *map, void *value) = (void *)88;
static long (*const bpf_ringbuf_output)(void *ringbuf, const void *data, __u64 size, __u64 flags) = (void *)130;
static __u64 (*const bpf_ringbuf_query)(void *ringbuf, __u64 flags) = (void *)134;

enum { BPF_RB_AVAIL_DATA = 0, BPF_RB_RING_SIZE = 1 };

/* --- what the loader sets before a life of the context --- */

enum {
	XSPIN_WINDOW_READ = 1 << 0,
	XSPIN_WINDOW_WRITE = 1 << 1,
	XSPIN_WINDOW_ATOMIC = 1 << 2,
};

struct xspin_range {
	__u64 off; /* of the window in its memory, a multiple of 8 */
	__u64 size;
	__u32 rights;
	__u32 pad;
};

enum xspin_protocol {
	XSPIN_NO_PROTOCOL, /* nothing is answered */
	XSPIN_SLMP,	   /* docs/slmp.md, over IPv4 */
};

enum xspin_checksums {
	XSPIN_VERIFY_COMPLETE, /* those that are there; a partial one is taken for right */
	XSPIN_VERIFY_ALL,
	XSPIN_VERIFY_NONE,
};

struct xspin_settings {
	struct xspin_range window[XSPIN_WINDOWS];
	__u32 words;	 /* elements of xspin_bits that a message has */
	__u32 protocol;	 /* xspin_protocol */
	__u32 checksums; /* xspin_checksums */
	__u32 target;	 /* window that messages go into; XSPIN_WINDOWS: none */
	__u64 remember;	 /* ns that an ended message is remembered */
	__u64 handed;	 /* ns since its last packet that one is remembered which was handed over */
	__u32 tell;	 /* events are wanted */
	__u32 state;	 /* bytes of memory that a message has, a multiple of 8 */
	__u32 read;	 /* user space reads xspin_events */
	__u32 pad;
};

const volatile struct xspin_settings xspin_setup XSPIN_DECLARED = {};

/* --- maps --- */

/* How far a message is. The word of a slot has it in its lower half, and above it the lap. */
enum xspin_state_of {
	XSPIN_FREE,
	XSPIN_STARTING, /* its header handler runs */
	XSPIN_OPEN,
	XSPIN_ENDING,	/* complete: its completion handler runs */
	XSPIN_DEFERRED, /* ended, but the event found no room */
	XSPIN_FAILED,	/* a handler failed; others may still run. User space ends it */
	XSPIN_STOPPED,	/* user space ends it: it is too old, or its context goes away */
};

enum xspin_mode {
	XSPIN_MODE_RUN, /* the payload handler */
	XSPIN_MODE_DEPOSIT,
	XSPIN_MODE_DISCARD,
};

/* Why a handler got XSPIN_SEGV the last time: xspin_slip_of says from which function. */
enum xspin_slip_why {
	XSPIN_SLIP_BOUNDS, /* `limit` bytes are there */
	XSPIN_SLIP_RIGHT,  /* `limit` is that which is missing */
	XSPIN_SLIP_WINDOW, /* there is none */
	XSPIN_SLIP_ALIGN,  /* `at` must be a multiple of `limit` */
	XSPIN_SLIP_APART,  /* the bytes lie in two MiB of the window's memory */
	XSPIN_SLIP_FRAME,  /* from `at` on of the frame, of `limit` bytes; or more than `limit` at once */
};

struct xspin_slip {
	__u8 what; /* xspin_slip_of */
	__u8 why;  /* xspin_slip_why */
	__u8 window;
	__u8 pad;
	__u32 n;
	__u64 at;
	__u64 limit;
};

/*
 * A slot. Each message in it is a lap, counted from 1, and what has an older lap counts
 * as zero: so slots are reused at once, and nothing is cleared. A CPU that has looked a
 * message up and comes late finds another lap and does nothing.
 */
struct xspin_message {
	__u64 word;   /* lap << 32 | xspin_state_of */
	__u32 key[8]; /* read before extent, written after it: see xspin_known() */
	__u64 extent; /* where the message ends, or has come to: see xspin_extent */
	__u64 done;   /* bytes that were processed, and one more for the segment with EOM */
	__u64 dropped;
	__u64 seen;    /* when the last new segment came: xspin_clock() */
	__u64 started; /* the same, of the first */
	__u64 place;   /* of the message in its window */
	__u64 room;    /* bytes that it may take there */
	__u64 user;    /* of the receive */
	__u64 hint;    /* lap << 32 | elements of xspin_bits that are done, or fewer */
	__u32 size;    /* of segments; 0: not known, as the first was empty */
	__u32 mode;    /* xspin_mode */
	__u32 window;
	__u32 eom_done; /* 1: that segment was processed */
	__u32 eom_flags; /* of the protocol, of the segment with EOM */
	__u32 eom_offset;
	__u32 starved; /* packets of it were dropped for lack of room */
	__u32 source;  /* address and port of the sender, in the frame's byte order, or 0 */
	__u32 port;
	__u32 code; /* what the handler returned that failed, in the upper half which (xspin_has) */
	__u32 cause; /* xspin_cause, for completion */
	__u64 receive; /* number of the receive that is held for it; XSPIN_NO_RECEIVE: none */
	struct xspin_slip slip; /* of the handler that failed */
	/* Of the header segment, in the frame's order: where answers go that answer no frame. */
	__u32 dest; /* address and port that it was sent to */
	__u32 dport;
	__u8 ethernet[12]; /* addresses */
	__u32 answerable; /* 0: nobody may answer to there */
	__u64 turn;	  /* its number among the deferred; 0: it has never been */
	__u8 pad[32];
};
_Static_assert(sizeof(struct xspin_message) == 256, "whole cache lines");

/*
 * The word `extent`: 29 bits of lap, whether the end is known, whether the segment that
 * told it is empty, and 33 bits with the end, or of the last byte claimed. A CPU must raise
 * it before it claims a segment, and it cannot be raised beyond a known end, nor an end
 * set below it. So once the end is known, nothing beyond it is claimed, and when all
 * bytes up to it are processed, nobody is still at work. The segment with EOM is claimed
 * first: one whose bytes another has must not say where the end is. If it cannot say it, it
 * gives back what it has claimed.
 */
#define XSPIN_EXTENT_BYTES ((1ULL << 33) - 1)
#define XSPIN_EXTENT_EMPTY (1ULL << 33)
#define XSPIN_EXTENT_KNOWN (1ULL << 34)
#define XSPIN_EXTENT_LAP(lap) ((__u64)(lap) << 35)

/* Of 32 segments; in the upper half of each word the lap. */
struct xspin_claims {
	__u64 claimed;
	__u64 done;
};

/* What became of segments and messages, a row for each CPU. */
struct xspin_tally {
	__u64 started;	  /* messages */
	__u64 ended;	  /* of these, complete */
	__u64 failed;	  /* a handler failed */
	__u64 abandoned;  /* ended by user space */
	__u64 refused;	  /* no receive, or no window */
	__u64 duplicates; /* segments that had been processed before */
	__u64 waits;	  /* of segments still being processed, or of EOM too early */
	__u64 corrupt;	  /* a wrong checksum */
	__u64 unverified; /* none, or a partial one */
	__u64 stray;	  /* no segment, but an acknowledgement */
	__u64 headers;	  /* handlers that ran */
	__u64 completions;
	__u64 acks;
	__u64 mute;	/* answers that did not fit, or failed */
	__u64 deferred; /* events that found no room */
	__u64 lost;	/* events that were not told, ever */
	__u64 leaked;	/* slots and entries that a map did not take, or give up */
	__u64 busy;	/* segments dropped as a word was contended, or their message was starting */
	__u64 dropped[8]; /* by reason: xspin_reason */
	__u64 handed;	  /* packets to handlers on HPUs */
	__u64 last;	  /* slot << 32 | lap of the message whose segment came last */
	struct xspin_slip slip; /* of this packet */
	struct xspin_slip told; /* of the last failure of a handler */
	__u64 forgotten;  /* messages that ended, and were not remembered for long enough */
	__u64 records;	  /* of those that ended: that were begun */
	__u64 pad[4];
};
_Static_assert(sizeof(struct xspin_tally) == 320, "CPUs share no cache line");

/* spin.DropReason */
enum xspin_reason {
	XSPIN_NOT_DROPPED,
	XSPIN_NO_MESSAGES,
	XSPIN_NO_MEMORY,
	XSPIN_NO_HEADER,
	XSPIN_OVERLAP,
	XSPIN_TWO_ENDS,
	XSPIN_BEYOND,
	XSPIN_DEAD,
};

/* What else an event may be than the end of a message, behind xspin_cause: a note. */
enum xspin_note_of {
	XSPIN_NOTIFIED = XSPIN_FAILURE + 1,
	XSPIN_LOGGED,
	XSPIN_WAITING,	/* a message is deferred: its event wants room. An event with its lap in `user`, its turn in `length` */
	XSPIN_OWED,	/* an answer that user space is to send, behind the events before it */
};

/* What user space orders that is no xspin_cause: ends a deferred message, for whose event it has made room. */
enum { XSPIN_RESUME = 16, XSPIN_RESUME_LATER = 2 /* there is no room in the ring */ };

/* In the ring buffer. */
struct xspin_event {
	__u32 cause;
	__u32 slot;
	__u32 key[8];
	__u64 length;
	__u64 dropped;
	__u64 missing;
	__u64 time;
	__u64 user;
	__u32 source;
	__u32 port;
	__u32 starved;
	__u32 code;
	struct xspin_slip slip;
};
_Static_assert(sizeof(struct xspin_event) == 120, "with the ring buffer's own 8 bytes: 128");

/* There, too: what a handler has to say. */
struct xspin_note {
	__u32 cause; /* xspin_note_of */
	__u32 hpu;
	__u64 tag;
	__u64 words[2];
	__u64 time;
	char text[XSPIN_TEXT];
	__u8 pad[8];
};
_Static_assert(sizeof(struct xspin_note) == sizeof(struct xspin_event), "events have one size");

/* There, too: a frame that answers EOM, where the frame at hand has another answer. */
enum { XSPIN_FRAME = 68 }; /* what is summed up ends there: in it are 60 bytes, or 64 */

struct xspin_owed {
	__u32 cause; /* XSPIN_OWED */
	__u32 len;   /* of frame */
	__u8 frame[XSPIN_FRAME];
	__u8 pad[44];
};
_Static_assert(sizeof(struct xspin_owed) == sizeof(struct xspin_event), "events have one size");

/*
 * How many complete messages the application may be told of: an event is posted if the application's queue has
 * room for it, for EOM is acknowledged then. The program counts those it has posted, and user space says up to how many
 * there is room. On 64 bits none wraps.
 */
struct xspin_room {
	__u64 granted; /* user space writes it */
	__u64 pad[7];
	__u64 posted;
	__u64 turns; /* that have been given to deferred messages */
	__u64 pad2[6];
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct xspin_room);
} xspin_rooms SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct xspin_tally);
} xspin_tallies SEC(".maps");

/* The whole key of a message, to slot << 32 | lap. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 1);
	__uint(key_size, 32);
	__type(value, __u64);
} xspin_table SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct xspin_message);
} xspin_messages SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct xspin_claims);
} xspin_bits SEC(".maps");

/* Slots that are free. */
struct {
	__uint(type, BPF_MAP_TYPE_QUEUE);
	__uint(max_entries, 1);
	__uint(value_size, 4);
} xspin_free SEC(".maps");

/*
 * Messages that have ended. A record has XSPIN_RUN consecutive numbers of one sender, so that senders that count
 * cost little. There are two generations, as in package mpq: the older is dropped when the younger is as old as
 * messages are remembered, and a copy moves its message to the younger.
 *
 * The key is that of a message, with the record's number modulo XSPIN_RECORDS in the place of the message's: no
 * sender has more records than these. One that needs more takes its own oldest.
 */
enum { XSPIN_RUN = 128, XSPIN_RECORDS = 16384, XSPIN_NO_RUN = -1 };

struct xspin_past {
	__u32 run; /* which numbers: the first, divided by XSPIN_RUN. XSPIN_NO_RUN while it changes */
	__u32 pad;
	__u64 since;	/* when the younger generation began */
	__u64 done[4];	/* a bit for each number, younger first */
	__u64 failed[4];
};

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 1);
	__uint(key_size, 32);
	__type(value, struct xspin_past);
} xspin_ended SEC(".maps");

/* Messages that were handed over, to when their last packet came. As others end, these are
 * forgotten: the oldest, or those without packets for too long. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 1);
	__uint(key_size, 32);
	__type(value, __u64);
} xspin_handed SEC(".maps");

/* The program that takes them to HPUs. */
struct {
	__uint(type, BPF_MAP_TYPE_PROG_ARRAY);
	__uint(max_entries, 1);
	__uint(key_size, 4);
	__uint(value_size, 4);
} xspin_user SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 4096);
} xspin_events SEC(".maps");

/* A receive that user space has posted: its message goes there. */
enum { XSPIN_RECEIVES = 4096, XSPIN_RECEIVES_SEEN = 256 };

enum xspin_receive_is {
	XSPIN_VOID,
	XSPIN_POSTED,
	XSPIN_TAKEN,
	XSPIN_HELD, /* by a message whose header handler may give it back */
};

#define XSPIN_NO_RECEIVE (~0ULL)

struct xspin_receive {
	__u64 word; /* number << 2 | xspin_receive_is. User space writes the rest while it is void */
	__u32 tag;  /* of the last word of a message's key, but for the bits in ignore */
	__u32 ignore;
	__u32 keep; /* 1: it stays posted after a message has taken it */
	__u32 window;
	__u64 place; /* in the window's memory */
	__u64 room;
	__u64 user;
	__u64 pad[2];
};
_Static_assert(sizeof(struct xspin_receive) == 64, "a cache line");

/* Receives are numbered as they are posted; number n lies in element n % XSPIN_RECEIVES. */
struct xspin_ring {
	__u64 head; /* those before this one are not posted any more */
	__u64 tail; /* the next to be posted. User space writes it */
	__u64 ever; /* 1: there was one */
	__u64 pad[5];
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, XSPIN_RECEIVES);
	__type(key, __u32);
	__type(value, struct xspin_receive);
} xspin_receives SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct xspin_ring);
} xspin_posted SEC(".maps");

/* What a segment asks for, and what it is to be told. */
struct xspin_reply {
	__u32 flags;
	__u32 id;
	__u32 offset;
	__u32 slot;
	__u32 lap;
	__u32 size; /* of segments */
	__u32 processed;
	__u32 open; /* the message is: what has come is in xspin_bits. Else `end` says all */
	__u64 end;
	__u64 high; /* of bytes that have come */
	__u32 source; /* address and port that it comes from, in the frame's byte order */
	__u32 port;
	__u32 hint;  /* see xspin_tell() */
	__u32 words; /* of the answer's bitmap */
};

/* What user space asks for, in the place of a frame. */
struct xspin_order {
	__u32 slot;
	__u32 lap;
	__u32 cause; /* xspin_cause, or XSPIN_RESUME */
	__u32 pad;
};

/*
 * Segments of one message in a train, one after the other, that go to their places without more ado: of those in one
 * element of xspin_bits, the bits are claimed together, and what they come to is added up together. A run follows a
 * segment that xspin_packet() has put into its place.
 */
struct xspin_run {
	__u64 at;    /* slot << 32 | lap of the message; 0: there is none */
	__u64 start; /* of the run, in ns; 0: it is not timed */
	__u32 id;    /* of the message, as in the header */
	__u32 next;  /* where the next segment begins, bytes */
	__u32 size;
	__u32 word; /* element of xspin_bits */
	__u32 bit;  /* there, of the first segment */
	__u32 got;  /* segments that are in their places */
	__u32 left; /* that are claimed, and may come */
	__u32 pad;
};

/* What does not fit on the stack: a datagram that is summed up (512 spare, see xspin_sum()),
 * and an answer with its frame. */
enum { XSPIN_PIECE = 16384 };

struct xspin_scratch {
	struct xspin_her her; /* what the handler that runs was called with: its own copy it may change */
	__u32 pad;
	__u8 datagram[XSPIN_PIECE + 512];
	__u8 answer[256];
	struct xspin_reply reply;
	struct xspin_event event;
	struct xspin_note note;
	struct xspin_owed owed;
	struct xspin_order order;
	struct xspin_past past;
#ifdef XSPIN_TC
	struct xspin_run run;
	__u32 ndue;
	struct xspin_reply due[XSPIN_SEGMENTS]; /* to the packets of a frame */
#endif
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct xspin_scratch);
} xspin_buffer SEC(".maps");

/* Windows: the loader puts the application's memories in their place. */
#define XSPIN_WINDOW_MAP(name)                                        \
	struct {                                                      \
		__uint(type, BPF_MAP_TYPE_ARRAY);                     \
		__uint(map_flags, BPF_F_MMAPABLE | BPF_F_INNER_MAP);  \
		__uint(max_entries, 1);                               \
		__type(key, __u32);                                   \
		__type(value, struct xspin_element);                  \
	} name SEC(".maps")
XSPIN_WINDOW_MAP(xspin_window0);
XSPIN_WINDOW_MAP(xspin_window1);
XSPIN_WINDOW_MAP(xspin_window2);
XSPIN_WINDOW_MAP(xspin_window3);

/* Memory of each message. The loader gives the values the size that the object says. */
enum { XSPIN_STATE_MAX = 1024 };

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__uint(value_size, 8);
	__type(key, __u32);
} xspin_states SEC(".maps");

/* --- windows --- */

static __always_inline __u8 *xspin_element(__u32 window, __u64 k)
{
	/* k has 64 bits of stack: of two numbers of 32 that clang keeps in one word of it, the
	 * verifier forgets one when the other changes. Its lower half is the key. */
	switch (window) {
	case 0:
		return xspin_setup.window[0].size ? bpf_map_lookup_elem(&xspin_window0, &k) : 0;
	case 1:
		return xspin_setup.window[1].size ? bpf_map_lookup_elem(&xspin_window1, &k) : 0;
	case 2:
		return xspin_setup.window[2].size ? bpf_map_lookup_elem(&xspin_window2, &k) : 0;
	case 3:
		return xspin_setup.window[3].size ? bpf_map_lookup_elem(&xspin_window3, &k) : 0;
	}
	return 0;
}

enum { XSPIN_MOVED = 512 }; /* bytes, at most, of xspin_window_load() and _store() */

/*
 * Copies n bytes of the frame from off on into a window, whose bounds were checked. At
 * most XSPIN_PIECE bytes, which may lie in two elements.
 */
__weak int xspin_copy(struct xdp_md *ctx, __u32 off, __u32 window, __u64 at, __u32 n)
{
	__u64 o = at & (XSPIN_ELEMENT - 1), l;
	__u32 first = n;
	__u8 *p;

	/* Or clang masks again, behind the comparison. */
	asm volatile("" : "+r"(o));

	if (!n)
		return XSPIN_SUCCESS;
	if (n > XSPIN_PIECE)
		return XSPIN_SEGV;
	p = xspin_element(window, at >> 20);
	if (!p)
		return XSPIN_SEGV;
	if (likely(o <= XSPIN_ELEMENT - XSPIN_PIECE)) {
		l = XSPIN_LENGTH(n, XSPIN_PIECE);
		return xspin_fetch(ctx, off, p + o, l) ? XSPIN_SEGV : XSPIN_SUCCESS;
	}

	/*
	 * Up to the element's end in pieces of constant length, the largest first; then the
	 * rest, from the next one's beginning. Where a piece lies is computed from `first` and
	 * not added up, so that the verifier finds the same state whichever pieces there are.
	 */
	first = XSPIN_ELEMENT - o;
	if (first > n)
		first = n;
	n -= first;
#define XSPIN_PIECE_OF(bit)                                                            \
	if (first & 1u << (bit)) {                                                     \
		__u64 before = first & ~((2u << (bit)) - 1), to = o + before;          \
                                                                                       \
		asm volatile("" : "+r"(to));                                           \
		if (to > XSPIN_ELEMENT - (1u << (bit)) ||                              \
		    xspin_fetch(ctx, off + before, p + to, 1u << (bit)))               \
			return XSPIN_SEGV;                                             \
	}
	XSPIN_PIECE_OF(14) XSPIN_PIECE_OF(13) XSPIN_PIECE_OF(12) XSPIN_PIECE_OF(11)
	XSPIN_PIECE_OF(10) XSPIN_PIECE_OF(9) XSPIN_PIECE_OF(8) XSPIN_PIECE_OF(7)
	XSPIN_PIECE_OF(6) XSPIN_PIECE_OF(5) XSPIN_PIECE_OF(4) XSPIN_PIECE_OF(3)
	XSPIN_PIECE_OF(2) XSPIN_PIECE_OF(1) XSPIN_PIECE_OF(0)
#undef XSPIN_PIECE_OF
	if (!n)
		return XSPIN_SUCCESS;
	p = xspin_element(window, (at >> 20) + 1);
	if (!p)
		return XSPIN_SEGV;
	l = XSPIN_LENGTH(n, XSPIN_PIECE);
	return xspin_fetch(ctx, off + first, p, l) ? XSPIN_SEGV : XSPIN_SUCCESS;
}

/* --- what handlers of messages call: see engine.h --- */

/* Notes what is wrong, for whoever reads why a handler has failed. */
static __noinline int xspin_slipped(__u32 of, __u64 at, __u32 n, __u64 limit)
{
	__u32 me = bpf_get_smp_processor_id();
	struct xspin_tally *t = bpf_map_lookup_elem(&xspin_tallies, &me);

	if (t) {
		t->slip.what = of;
		t->slip.why = of >> 8;
		t->slip.window = of >> 16;
		t->slip.n = n;
		t->slip.at = at;
		t->slip.limit = limit;
	}
	return XSPIN_SEGV;
}

#define XSPIN_SLIPPED(what, why, window) ((what) | (why) << 8 | (window) << 16)

static __always_inline struct xspin_scratch *xspin_scratch(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&xspin_buffer, &zero);
}

/* The message of the handler that runs. */
static __always_inline struct xspin_message *xspin_mine(const struct xspin_scratch *s)
{
	__u32 slot = s->her.slot;

	return bpf_map_lookup_elem(&xspin_messages, &slot);
}

static __always_inline int xspin_put(struct xdp_md *ctx, const struct xspin_her *her, const struct xspin_message *m)
{
	if (m->window >= XSPIN_WINDOWS)
		return xspin_slipped(XSPIN_SLIPPED(XSPIN_SLIP_DEPOSIT, XSPIN_SLIP_WINDOW, 0), her->offset, her->payload_len, 0);
	if ((__u64)her->offset + her->payload_len > m->room)
		return xspin_slipped(XSPIN_SLIPPED(XSPIN_SLIP_DEPOSIT, XSPIN_SLIP_BOUNDS, 0), her->offset, her->payload_len, m->room);
	return xspin_copy(ctx, her->payload, m->window, m->place + her->offset, her->payload_len);
}

__weak int xspin_deposit(struct xdp_md *ctx, const struct xspin_her *her __attribute__((unused)))
{
	struct xspin_scratch *s = xspin_scratch();
	struct xspin_message *m = s ? xspin_mine(s) : 0;

	return m ? xspin_put(ctx, &s->her, m) : XSPIN_SEGV;
}

__weak void *xspin_state(const struct xspin_her *her __attribute__((unused)))
{
	struct xspin_scratch *s = xspin_scratch();
	__u32 slot;

	if (!s)
		return 0;
	slot = s->her.slot;
	return bpf_map_lookup_elem(&xspin_states, &slot);
}

__weak int xspin_about(const struct xspin_her *her __attribute__((unused)), struct xspin_info *i)
{
	struct xspin_scratch *s = xspin_scratch();
	struct xspin_message *m = s ? xspin_mine(s) : 0;
	const __u32 words = xspin.nkey;
	__u64 extent, done;

	if (!m)
		return 0;
	extent = READ_ONCE(m->extent);
	done = READ_ONCE(m->done) - m->eom_done;
	i->number = s->her.key[words && words <= 8 ? words - 1 : 0];
	i->slot = s->her.slot;
	i->source = m->source;
	i->port = m->port;
	i->length = extent & XSPIN_EXTENT_BYTES;
	i->known = !!(extent & XSPIN_EXTENT_KNOWN);
	i->cause = m->cause;
	i->missing = done > i->length ? 0 : i->length - done;
	i->dropped = m->dropped;
	i->user = m->user;
	return 1;
}

static __always_inline int xspin_may(enum xspin_slip_of what, __u32 window, __u32 right, __u64 at, __u32 n, __u32 align)
{
	__u64 size = window < XSPIN_WINDOWS ? xspin_setup.window[window].size : 0, limit = size;
	enum xspin_slip_why why = XSPIN_SLIP_BOUNDS;

	if (!size)
		why = XSPIN_SLIP_WINDOW;
	else if (!(xspin_setup.window[window].rights & right))
		why = XSPIN_SLIP_RIGHT, limit = right;
	else if (at % align)
		why = XSPIN_SLIP_ALIGN, limit = align;
	else if (n <= size && at <= size - n)
		return 1;
	xspin_slipped(XSPIN_SLIPPED(what, why, window), at, n, limit);
	return 0;
}

/* Where n bytes of a window are, which must lie in one MiB of its memory, from a multiple of
 * align on. 0: they are not there. */
static __always_inline void *xspin_in(enum xspin_slip_of what, __u32 window, __u32 right, __u64 at, __u32 n, __u32 align)
{
	__u64 off;
	__u8 *p;

	if (!xspin_may(what, window, right, at, n, align))
		return 0;
	off = at + xspin_setup.window[window].off;
	asm volatile("" : "+r"(off)); /* or clang knows that it is a multiple, and the verifier does not */
	p = xspin_element(window, off >> 20);
	off &= XSPIN_ELEMENT - align;
	if (!p || off > XSPIN_ELEMENT - n) {
		xspin_slipped(XSPIN_SLIPPED(what, XSPIN_SLIP_APART, window), at, n, 0);
		return 0;
	}
	asm volatile("" : "+r"(off)); /* see xspin_at() */
	return p + off;
}

__weak int xspin_window_frame(struct xdp_md *ctx, __u32 window, __u64 at, __u32 off, __u32 n)
{
	if (n > XSPIN_PIECE)
		return xspin_slipped(XSPIN_SLIPPED(XSPIN_SLIP_WRITE, XSPIN_SLIP_FRAME, window), off, n, XSPIN_PIECE);
	if (!xspin_may(XSPIN_SLIP_WRITE, window, XSPIN_WINDOW_WRITE, at, n, 1))
		return XSPIN_SEGV;
	if (xspin_copy(ctx, off, window, xspin_setup.window[window & (XSPIN_WINDOWS - 1)].off + at, n)) {
		const struct xspin_frame f = xspin_frame(ctx);

		return xspin_slipped(XSPIN_SLIPPED(XSPIN_SLIP_WRITE, XSPIN_SLIP_FRAME, window), off, n, xspin_length(&f));
	}
	return XSPIN_SUCCESS;
}

/* `how` has the window, and from bit 8 on which way, and from bit 16 on in what pieces. */
__weak int xspin_window_move(__u32 how, __u64 at, void *p, __u32 n)
{
	const __u32 of = how >> 8 & 255, window = how & 255, unit = how >> 16;
	const int load = of == XSPIN_SLIP_LOAD;
	__u8 *w;

	/* Of pieces that n has in whole: the verifier knows where the element ends, and not the window. */
	if (n > XSPIN_MOVED || ((unit == 8 || unit == 4 || unit == 2) && n & (unit - 1)))
		return xspin_slipped(XSPIN_SLIPPED(of, XSPIN_SLIP_FRAME, window), at, n, XSPIN_MOVED);
	w = xspin_in(of, window, load ? XSPIN_WINDOW_READ : XSPIN_WINDOW_WRITE, at, n, 1);
	if (!w)
		return XSPIN_SEGV;
	/* Not unrolled: the verifier knows n, and where the loop ends. */
#define XSPIN_MOVE_BY(type)                                                 \
	_Pragma("clang loop unroll(disable)")                               \
	for (__u32 i = 0; i < XSPIN_MOVED; i += sizeof(type)) {             \
		if (i >= n)                                                 \
			break;                                              \
		asm volatile("" : "+r"(i));                                 \
		if (load)                                                   \
			*(type *)((__u8 *)p + i) = *(type *)(w + i);        \
		else                                                        \
			*(type *)(w + i) = *(type *)((__u8 *)p + i);        \
	}
	switch (unit) {
	case 8:
		XSPIN_MOVE_BY(__u64)
		break;
	case 4:
		XSPIN_MOVE_BY(__u32)
		break;
	case 2:
		XSPIN_MOVE_BY(__u16)
		break;
	default:
		XSPIN_MOVE_BY(__u8)
	}
#undef XSPIN_MOVE_BY
	return XSPIN_SUCCESS;
}

__weak int xspin_window_add(__u32 window, __u64 at, __u64 n, __u64 *was)
{
	__u64 *p = xspin_in(XSPIN_SLIP_ADD64, window, XSPIN_WINDOW_ATOMIC, at, 8, 8);

	if (!p)
		return XSPIN_SEGV;
	*was = __sync_fetch_and_add(p, n);
	return XSPIN_SUCCESS;
}

__weak int xspin_window_cas(__u32 window, __u64 at, __u64 is, __u64 to, __u64 *was)
{
	__u64 *p = xspin_in(XSPIN_SLIP_CAS64, window, XSPIN_WINDOW_ATOMIC, at, 8, 8);

	if (!p)
		return XSPIN_SEGV;
	*was = __sync_val_compare_and_swap(p, is, to);
	return XSPIN_SUCCESS;
}

static __noinline int xspin_say(__u32 cause, __u64 tag, __u64 w0, __u64 w1)
{
	__u32 zero = 0;
	struct xspin_scratch *s = bpf_map_lookup_elem(&xspin_buffer, &zero);

	if (!s)
		return 0;
	s->note.cause = cause;
	s->note.hpu = bpf_get_smp_processor_id();
	s->note.tag = tag;
	s->note.words[0] = w0;
	s->note.words[1] = w1;
	s->note.time = xspin_now();
	return !bpf_ringbuf_output(&xspin_events, &s->note, sizeof(s->note), 0);
}

__weak int xspin_notify(__u64 tag, __u64 w0, __u64 w1)
{
	return xspin_say(XSPIN_NOTIFIED, tag, w0, w1);
}

__weak int xspin_log_line(const void *text, __u64 w0, __u64 w1)
{
	struct xspin_scratch *s = xspin_scratch();

	if (!s)
		return 0;
	for (int i = 0; i < XSPIN_TEXT / 8; i++)
		((__u64 *)s->note.text)[i] = ((const __u64 *)text)[i];
	return xspin_say(XSPIN_LOGGED, 0, w0, w1);
}

/* --- the engine --- */

/* CLOCK_MONOTONIC as of the last tick, in ns: good enough for timeouts. 3 ns. */
static __always_inline __u64 xspin_clock(void)
{
	return bpf_ktime_get_coarse_ns();
}

/* Whether it is less than ns since `when`, which its caller has read before: if the clock
 * were read first, another CPU might write a later time meanwhile. */
static __always_inline int xspin_recent(__u64 when, __u64 ns)
{
	return xspin_clock() - when < ns;
}

/* The Internet checksum of n bytes at b, not inverted: up to XSPIN_PIECE, the up to 3 after
 * them are zeroed. 512 bytes at a time: Linux 6.12 takes no more. */
static __always_inline __u32 xspin_sum(struct xspin_scratch *s, __u32 n)
{
	__u32 at = n, all = (n + 3) & ~3u;
	__u8 *b = s->datagram;
	long sum = 0;

	asm volatile("" : "+r"(at));
	at &= 2 * XSPIN_PIECE - 1;
	if (at > XSPIN_PIECE)
		return 0;
	b[at] = b[at + 1] = b[at + 2] = 0;
	for (__u32 i = 0; i < XSPIN_PIECE; i += 512) {
		__u32 piece = all - i;

		if (i >= all)
			break;
		if (piece > 512)
			piece = 512;
		asm volatile("" : "+r"(piece));
		piece &= 0x3fc;
		if (piece > 512)
			piece = 512;
		sum = bpf_csum_diff(0, 0, (void *)(b + i), piece, sum);
	}
	sum = (__u32)sum;
	sum = (sum >> 16) + (sum & 0xffff);
	return (sum >> 16) + (sum & 0xffff);
}

enum xspin_verdict_of { XSPIN_SUM_NONE, XSPIN_SUM_PARTIAL, XSPIN_SUM_RIGHT, XSPIN_SUM_WRONG };

/* The UDP checksum of a datagram over IPv4 without options. One complete checksum in 65536
 * is the same as that of the pseudo-header, which is partial; only XSPIN_VERIFY_ALL looks
 * closer. */
__weak int xspin_verify(struct xdp_md *ctx, __u32 len)
{
	const struct xspin_frame f = xspin_frame(ctx);
	const __u8 *frame = xspin_at_frame(&f, 0, 42);
	struct xspin_scratch *s = xspin_scratch();
	__u32 n, sum, partial;
	__u64 l;
	__u16 have;

	if (!s || !frame || *(__u16 *)(frame + 12) != bswap16(0x0800) ||
	    frame[14] != 0x45 || frame[23] != 17)
		return XSPIN_SUM_NONE;
	have = *(__u16 *)(frame + 40);
	if (!have)
		return XSPIN_SUM_NONE;
	n = bswap16(*(__u16 *)(frame + 38));
	if (n < 8 || 34 + n > len)
		return XSPIN_SUM_WRONG;
	sum = *(__u16 *)(frame + 26) + *(__u16 *)(frame + 28) + *(__u16 *)(frame + 30) +
	      *(__u16 *)(frame + 32) + bswap16(17) + *(__u16 *)(frame + 38);
	sum = xspin_fold(sum);
	partial = sum == have || xspin_partial(&f);
	if (partial && xspin_setup.checksums != XSPIN_VERIFY_ALL)
		return XSPIN_SUM_PARTIAL;
	l = n;
	asm volatile("" : "+r"(l));
	if (l < 1 || l > XSPIN_PIECE || xspin_fetch(ctx, 34, s->datagram, l))
		return XSPIN_SUM_WRONG;
	if (xspin_fold(sum + xspin_sum(s, n)) == 0xffff)
		return XSPIN_SUM_RIGHT;
	return partial ? XSPIN_SUM_PARTIAL : XSPIN_SUM_WRONG;
}

static __always_inline int xspin_sum_is(struct xdp_md *ctx, const struct xspin_frame *f, __u32 len)
{
	const __u16 *sum = xspin_at_frame(f, 40, 2);

	/* Without a call: no checksum, or no UDP. */
	if (!sum || !*sum)
		return XSPIN_SUM_NONE;
	if (xspin_partial(f) && xspin_setup.checksums != XSPIN_VERIFY_ALL)
		return XSPIN_SUM_PARTIAL;
	return xspin_verify(ctx, len);
}

/* SLMP's header: docs/slmp.md. */
enum {
	XSPIN_SLMP_EOM = 0x8000,
	XSPIN_SLMP_SYN = 0x4000,
	XSPIN_SLMP_ACK = 0x2000,
	XSPIN_SLMP_CUMULATIVE = 0x1000,
	XSPIN_SLMP_WAIT = 0x0800,
	XSPIN_SLMP_HEADER = 10,
	XSPIN_SLMP_WORDS = 16,
	XSPIN_SLMP_AT = 42, /* in a frame: behind Ethernet, IPv4 without options, and UDP */
};

static __always_inline __u32 xspin_done_bits(__u32 slot, __u32 lap, __u32 word)
{
	__u32 i = slot * xspin_setup.words + word;
	struct xspin_claims *b;
	__u64 v;

	if (word >= xspin_setup.words)
		return 0;
	b = bpf_map_lookup_elem(&xspin_bits, &i);
	if (!b)
		return 0;
	v = READ_ONCE(b->done);
	return v >> 32 == lap ? (__u32)v : 0;
}

/* How many bits are set. */
static __always_inline __u32 xspin_ones(__u64 v)
{
	v -= v >> 1 & 0x5555555555555555;
	v = (v & 0x3333333333333333) + (v >> 2 & 0x3333333333333333);
	v = (v + (v >> 4)) & 0x0f0f0f0f0f0f0f0f;
	return v * 0x0101010101010101 >> 56;
}

static __always_inline int xspin_lowest(__u32 v)
{
	int n = 0;

	if (!(v & 0xffff))
		n += 16, v >>= 16;
	if (!(v & 0xff))
		n += 8, v >>= 8;
	if (!(v & 0xf))
		n += 4, v >>= 4;
	if (!(v & 3))
		n += 2, v >>= 2;
	return v & 1 ? n : n + 1;
}

/*
 * Puts into an answer what has been processed: the contiguous end, and bitmap words as
 * slmp.Ack has them, at least 1. What loops find is kept in memory: of that the verifier
 * knows nothing, so however often they ran, what follows is the same to it.
 */
static __always_inline void xspin_tell(struct xspin_scratch *s)
{
	struct xspin_reply *r = &s->reply;
	__u32 slot = r->slot, lap = r->lap, word, bits = 0, at, shift;
	__u64 end = r->end, base, segments, hint;
	__u8 *out = s->answer;
	struct xspin_message *m;

	__builtin_memset(out + XSPIN_SLMP_AT + 14, 0, 8 * XSPIN_SLMP_WORDS + 2);
	WRITE_ONCE(r->words, 1);
	m = r->open ? bpf_map_lookup_elem(&xspin_messages, &slot) : 0;
	if (m && r->size) {
		hint = READ_ONCE(m->hint);
		WRITE_ONCE(r->hint, hint >> 32 == lap ? (__u32)hint : 0);
		for (int i = 0; i < 64; i++) {
			word = READ_ONCE(r->hint);
			if (~xspin_done_bits(slot, lap, word))
				break;
			WRITE_ONCE(r->hint, word + 1);
		}
		word = READ_ONCE(r->hint);
		WRITE_ONCE(m->hint, (__u64)lap << 32 | word);
		bits = xspin_done_bits(slot, lap, word);
		base = (__u64)word * 32 + (~bits ? xspin_lowest(~bits) : 0);
		end = base * r->size;
		if (end > r->high)
			end = r->high;
		segments = (r->high + r->size - 1) / r->size; /* none from here on */
		base = end / r->size + 1;		      /* bit 0 */
		at = base / 32;
		shift = base & 31;
		for (int i = 0; i < 2 * XSPIN_SLMP_WORDS; i++) {
			__u32 v;

			if (base + 32 * i >= segments)
				break;
			v = ((__u64)xspin_done_bits(slot, lap, at + i + 1) << 32 |
			     xspin_done_bits(slot, lap, at + i)) >> shift;
			if (segments - base - 32 * i < 32)
				v &= (1u << (segments - base - 32 * i)) - 1;
			/* Big-endian words of 64 bits: the lower half comes second. */
			*(__u32 *)(out + XSPIN_SLMP_AT + 14 + 8 * (i / 2) + (i & 1 ? 0 : 4)) = bswap32(v);
			if (v)
				WRITE_ONCE(r->words, i / 2 + 1);
		}
	}
	if (end > ~0U)
		end = ~0U;
	*(__u32 *)(out + XSPIN_SLMP_AT + XSPIN_SLMP_HEADER) = bswap32((__u32)end);
}

/*
 * Turns the segment into its answer. False: there is none, as nobody may answer to where it
 * comes from, the frame has no room for it, or the message is another one now. Then the
 * frame is not to be sent.
 */
__weak int xspin_answer(struct xdp_md *ctx)
{
	struct xspin_frame frame = xspin_frame(ctx);
	const __u16 *f = xspin_at_frame(&frame, 0, XSPIN_SLMP_AT);
	struct xspin_scratch *s = xspin_scratch();
	struct xspin_reply *r;
	__u32 words = 0, n = XSPIN_SLMP_HEADER, flags = XSPIN_SLMP_ACK, len, want, sum;
	__u16 *o;

	if (!s || !f || !xspin_answerable((void *)f, (void *)(f + 7)) || !xspin_fits_sum(&frame))
		return 0;
	r = &s->reply;
	o = (__u16 *)s->answer;
	len = hook_len(ctx);
	if (r->flags & XSPIN_SLMP_CUMULATIVE) {
		xspin_tell(s);
		words = READ_ONCE(r->words);
		want = XSPIN_SLMP_AT + 14 + 8 * words;
		if (want > len && hook_resize(ctx, len, want))
			words = len < XSPIN_SLMP_AT + 14 + 8 ? 0 : (len - XSPIN_SLMP_AT - 14) / 8;
		if (words > XSPIN_SLMP_WORDS)
			return 0;
	}
	if (words) {
		flags |= XSPIN_SLMP_CUMULATIVE | (r->processed ? 0 : XSPIN_SLMP_WAIT);
		n = 14 + 8 * words;
	} else if (!r->processed) {
		return 0;
	} else {
		__builtin_memset(s->answer + XSPIN_SLMP_AT + n, 0, 8);
	}

	/* What may have been moved. */
	frame = xspin_frame(ctx);
	f = xspin_at_frame(&frame, 0, XSPIN_SLMP_AT);
	if (!f)
		return 0;
	for (int i = 0; i < 3; i++) {
		o[i] = f[3 + i];
		o[3 + i] = f[i];
	}
	o[6] = f[6];
	o[7] = bswap16(0x4500);
	o[8] = bswap16(28 + n);
	o[9] = 0;
	o[10] = bswap16(0x4000); /* don't fragment */
	o[11] = bswap16(64 << 8 | 17);
	o[12] = 0;
	o[13] = f[15];
	o[14] = f[16];
	o[15] = f[13];
	o[16] = f[14];
	o[17] = f[18];
	o[18] = f[17];
	o[19] = bswap16(8 + n);
	o[20] = 0;
	o[21] = bswap16(flags);
	o[22] = bswap32(r->id);
	o[23] = bswap32(r->id) >> 16;
	o[24] = bswap32(r->offset);
	o[25] = bswap32(r->offset) >> 16;
	sum = bpf_csum_diff(0, 0, (void *)(o + 7), 20, 0);
	o[12] = ~xspin_fold(xspin_fold(sum));
	sum = xspin_fold(o[13] + o[14] + o[15] + o[16] + bswap16(17) + o[19]);
	if (xspin_sums_later(&frame)) {
		sum = (__u16)~sum; /* of the pseudo-header, not inverted */
	} else if (words) {
		sum = xspin_fold(sum + o[27]);
		sum = bpf_csum_diff(0, 0, (void *)(o + 17), 20, sum);
		sum = bpf_csum_diff(0, 0, (void *)(o + 28), XSPIN_LENGTH(8 * words, 128), sum);
	} else {
		sum = xspin_fold(sum + o[25]);
		sum = bpf_csum_diff(0, 0, (void *)(o + 17), 16, sum);
	}
	sum = (__u16)~xspin_fold(xspin_fold(sum));
	o[20] = sum ?: 0xffff;

	len = hook_len(ctx);
	want = XSPIN_SLMP_AT + n;
	if (want < 60 && (len >= 60 || !hook_resize(ctx, len, 60))) {
		want = 60;
		if (len < 60)
			len = 60;
	}
	if (want != len && hook_resize(ctx, len, want))
		return 0;
	if (hook_store(ctx, 0, s->answer, XSPIN_LENGTH(want, 256)))
		return 0;
	if (r->open) {
		__u32 slot = r->slot;
		struct xspin_message *m = bpf_map_lookup_elem(&xspin_messages, &slot);

		/* What was told is of another message: of its own, all has been processed. It
		 * is asked for again. */
		if (!m || READ_ONCE(m->word) >> 32 != r->lap)
			return 0;
	}
	return 1;
}

#ifdef XSPIN_TC

/*
 * Answers wait until all packets of a frame were looked at: each is made of the frame, which is then no train any
 * more. Of those that tell all that has come, a message has one at a time: the last says what the others would, unless
 * an earlier one acknowledges EOM, which no other can.
 */
static __always_inline int xspin_answer_to(struct xdp_md *ctx __attribute__((unused)), struct xspin_scratch *s, struct xspin_tally *t)
{
	__u32 n = s->ndue;

	if (n - 1 < XSPIN_SEGMENTS && s->reply.flags & XSPIN_SLMP_CUMULATIVE && s->due[n - 1].flags & XSPIN_SLMP_CUMULATIVE &&
	    s->due[n - 1].id == s->reply.id) {
		if (s->due[n - 1].processed && s->due[n - 1].flags & XSPIN_SLMP_EOM)
			return XDP_DROP;
		n--;
	}
	if (n >= XSPIN_SEGMENTS) {
		t->mute++;
		return XDP_DROP;
	}
	__builtin_memcpy(&s->due[n], &s->reply, sizeof(s->reply));
	s->ndue = n + 1;
	return XDP_DROP;
}

struct xspin_answering {
	struct xdp_md *ctx;
	__u32 n;
	int action;
};

static long xspin_answer_each(__u32 i, struct xspin_answering *a)
{
	__u32 me = bpf_get_smp_processor_id();
	struct xspin_tally *t = bpf_map_lookup_elem(&xspin_tallies, &me);
	struct xspin_scratch *s = xspin_scratch();

	if (!t || !s || i >= XSPIN_SEGMENTS)
		return 1;
	__builtin_memcpy(&s->reply, &s->due[i], sizeof(s->reply));
	a->action = XDP_DROP;
	if (!xspin_answer(a->ctx)) {
		t->mute++;
		return 0;
	}
	t->acks++;
	if (i + 1 < a->n)
		bpf_clone_redirect(a->ctx, a->ctx->ifindex, 0);
	else
		a->action = XDP_TX;
	return 0;
}

static __always_inline int xspin_answers(struct xdp_md *ctx, int action)
{
	struct xspin_scratch *s = xspin_scratch();
	struct xspin_answering a = { .ctx = ctx, .n = s ? s->ndue : 0 };

	if (!s || !a.n)
		return action;
	s->ndue = 0;
	if (a.n == 1)
		xspin_answer_each(0, &a);
	else
		bpf_loop(a.n, xspin_answer_each, &a, 0);
	return a.action;
}

#else

static __always_inline int xspin_answer_to(struct xdp_md *ctx, struct xspin_scratch *s __attribute__((unused)), struct xspin_tally *t)
{
	if (!xspin_answer(ctx)) {
		t->mute++;
		return XDP_DROP;
	}
	t->acks++;
	return XDP_TX;
}

static __always_inline int xspin_answers(struct xdp_md *ctx __attribute__((unused)), int action)
{
	return action;
}

#endif

enum {
	XSPIN_LATE = -1,      /* the slot has another message now */
	XSPIN_CONTENDED = -2, /* others changed the word four times: the segment comes again */
};

/*
 * Whether a segment fits with what is known of the message's end, of which `to` has a new
 * extent then. 0, or a reason.
 */
static __always_inline int xspin_fits(__u64 *to, __u64 start, __u64 end, int eom)
{
	__u64 v = *to, high = v & XSPIN_EXTENT_BYTES;

	if (v & XSPIN_EXTENT_KNOWN) {
		int empty = !!(v & XSPIN_EXTENT_EMPTY);

		if (end > high || (eom && end != high))
			return XSPIN_TWO_ENDS;
		if (eom ? empty != (start == end) : start != end && end == high && !empty)
			return XSPIN_OVERLAP;
	} else if (eom && end < high) {
		return XSPIN_TWO_ENDS;
	} else if (eom || end > high) {
		*to = (v & ~XSPIN_EXTENT_BYTES) | end;
		if (eom)
			*to |= XSPIN_EXTENT_KNOWN | (start == end ? XSPIN_EXTENT_EMPTY : 0);
	}
	return 0;
}

/* Makes a segment known to the extent: 0, a reason, or one of these. */
static __always_inline int xspin_reach(struct xspin_message *m, __u32 lap, __u64 start, __u64 end, int eom)
{
	for (int i = 0; i < 4; i++) {
		__u64 v = READ_ONCE(m->extent), to = v;
		int reason;

		if (v >> 35 != (lap & ((1 << 29) - 1)))
			return XSPIN_LATE;
		reason = xspin_fits(&to, start, end, eom);
		if (reason || to == v || __sync_val_compare_and_swap(&m->extent, v, to) == v)
			return reason;
	}
	return XSPIN_CONTENDED;
}

/* Claims segments, by their bits. 0, 1 if one of them was claimed before, or one of the above. */
static __always_inline int xspin_claim(struct xspin_claims *b, __u32 lap, __u64 bits)
{
	__u64 v = READ_ONCE(b->done), fresh = (__u64)lap << 32, is;

	/* The done word first: whoever finds his lap in `claimed` finds it there, too. */
	for (int i = 0; i < 4 && v >> 32 != lap; i++) {
		if ((__s32)((__u32)(v >> 32) - lap) > 0)
			return XSPIN_LATE;
		is = __sync_val_compare_and_swap(&b->done, v, fresh);
		v = is == v ? fresh : is;
	}
	if (v >> 32 != lap)
		return XSPIN_CONTENDED;
	v = READ_ONCE(b->claimed);
	for (int i = 0; i < 4; i++) {
		__u64 old = v >> 32 == lap ? v : fresh;

		if ((__s32)((__u32)(v >> 32) - lap) > 0)
			return XSPIN_LATE;
		if (old & bits)
			return 1;
		is = __sync_val_compare_and_swap(&b->claimed, v, old | bits);
		if (is == v)
			return 0;
		v = is;
	}
	return XSPIN_CONTENDED;
}

/* Gives back what was claimed. By compare-and-swap, as another message may have the word: the
 * claim of a segment beyond the end holds up none. */
static __always_inline void xspin_unclaim(struct xspin_claims *b, __u32 lap, __u64 bits)
{
	for (int i = 0; i < 4; i++) {
		__u64 v = READ_ONCE(b->claimed);

		if (v >> 32 != lap || __sync_val_compare_and_swap(&b->claimed, v, v & ~bits) == v)
			return;
	}
}

/* Moves a message from one state to another; false if it was not in it. */
static __always_inline int xspin_move(struct xspin_message *m, __u32 lap, __u32 from, __u32 to)
{
	__u64 old = (__u64)lap << 32 | from;

	return __sync_val_compare_and_swap(&m->word, old, (__u64)lap << 32 | to) == old;
}

/* Takes room in the application's queue for the event of a complete message. False: there is none. */
static __noinline int xspin_take_room(__u32 force)
{
	__u32 zero = 0;
	struct xspin_room *r = bpf_map_lookup_elem(&xspin_rooms, &zero);
	__u64 posted;

	if (!r)
		return 0;
	/* In this order: who takes back what was granted, and then looks, sees what has been posted. */
	posted = __sync_fetch_and_add(&r->posted, 1);
	if ((__s64)(posted - READ_ONCE(r->granted)) < 0 || force)
		return 1;
	__sync_fetch_and_add(&r->posted, -1);
	return 0;
}

static __noinline int xspin_give_room(void)
{
	__u32 zero = 0;
	struct xspin_room *r = bpf_map_lookup_elem(&xspin_rooms, &zero);

	if (r)
		__sync_fetch_and_add(&r->posted, -1);
	return 0;
}

static __noinline __u64 xspin_take_turn(void)
{
	__u32 zero = 0;
	struct xspin_room *r = bpf_map_lookup_elem(&xspin_rooms, &zero);

	return r ? __sync_fetch_and_add(&r->turns, 1) + 1 : 0;
}

/* Tells the application that a message has ended. False: there is no room. For that of a complete one it has been
 * taken before. */
static __noinline int xspin_post(struct xspin_message *m, __u32 slot, __u32 cause)
{
	struct xspin_scratch *s = xspin_scratch();
	__u64 to = m->extent & XSPIN_EXTENT_BYTES, done = m->done - m->eom_done;
	struct xspin_event *e;

	if (!xspin_setup.tell)
		return 1;
	if (!s)
		return 0;
	e = &s->event;
	e->cause = cause;
	e->slot = slot;
	__builtin_memcpy(e->key, m->key, sizeof(e->key));
	e->length = cause == XSPIN_WAITING ? m->turn : to;
	e->missing = done > to ? 0 : to - done;
	e->dropped = m->dropped;
	e->time = xspin_now();
	e->user = cause == XSPIN_WAITING ? m->word >> 32 : m->user;
	e->source = m->source;
	e->port = m->port;
	e->starved = m->starved;
	e->code = m->code;
	e->slip = m->slip;
	return !bpf_ringbuf_output(&xspin_events, e, sizeof(*e), 0);
}

/* Tells of a complete message, if there is room in the application's queue, or by force. */
static __noinline int xspin_post_complete(struct xspin_message *m, __u32 slot, __u32 force)
{
	if (!xspin_setup.tell)
		return 1;
	if (!xspin_take_room(force))
		return 0;
	if (xspin_post(m, slot, XSPIN_COMPLETE))
		return 1;
	xspin_give_room();
	return 0;
}

/*
 * Writes the acknowledgement of a message's EOM to scratch, as a frame. It answers no frame:
 * the addresses are those of the header segment. False: nobody may answer to there.
 */
static __noinline int xspin_owe(const struct xspin_message *m, struct xspin_scratch *s)
{
	const __u32 words = xspin.nkey;
	__u16 *o = (__u16 *)s->owed.frame;
	const __u16 *ethernet = (const __u16 *)m->ethernet;
	const __u32 full = m->eom_flags & XSPIN_SLMP_CUMULATIVE, n = XSPIN_SLMP_HEADER + (full ? 4 + 8 : 0);
	__u32 sum, id = bswap32(m->key[words && words <= 8 ? words - 1 : 0]), offset = bswap32(m->eom_offset);

	if (!m->answerable)
		return 0;
	for (int i = 0; i < 3; i++) {
		o[i] = ethernet[3 + i];
		o[3 + i] = ethernet[i];
	}
	o[6] = bswap16(0x0800);
	o[7] = bswap16(0x4500);
	o[8] = bswap16(28 + n);
	o[9] = 0;
	o[10] = bswap16(0x4000); /* don't fragment */
	o[11] = bswap16(64 << 8 | 17);
	o[12] = 0;
	o[13] = m->dest;
	o[14] = m->dest >> 16;
	o[15] = m->source;
	o[16] = m->source >> 16;
	o[17] = m->dport;
	o[18] = m->port;
	o[19] = bswap16(8 + n);
	o[20] = 0;
	o[21] = bswap16(XSPIN_SLMP_ACK | full);
	o[22] = id;
	o[23] = id >> 16;
	o[24] = offset;
	o[25] = offset >> 16;
	o[26] = o[27] = full ? 0xffff : 0; /* all that there is */
	for (int i = 28; i < XSPIN_FRAME / 2; i++)
		o[i] = 0;
	sum = bpf_csum_diff(0, 0, (void *)(o + 7), 20, 0);
	o[12] = ~xspin_fold(xspin_fold(sum));
	sum = xspin_fold(o[13] + o[14] + o[15] + o[16] + bswap16(17) + o[19]);
	sum = bpf_csum_diff(0, 0, (void *)(o + 17), 32, sum);
	sum = (__u16)~xspin_fold(xspin_fold(sum));
	o[20] = sum ?: 0xffff;
	s->owed.cause = XSPIN_OWED;
	s->owed.len = full ? 64 : 60;
	return 1;
}

/* Drops the older generation of a record if it is time. A bit that moves is in one of the two at all times. */
static __always_inline void xspin_age(struct xspin_past *p, __u64 now)
{
	const __u64 since = READ_ONCE(p->since), age = now - since;
	const int keep = age - xspin_setup.remember < xspin_setup.remember;
	__u64 done[2], failed[2];

	if (age < xspin_setup.remember)
		return;
	/* What is young is read before the turn: who comes too late for it sets his bit in what is young then. */
	for (int w = 0; w < 2; w++) {
		done[w] = READ_ONCE(p->done[w]);
		failed[w] = READ_ONCE(p->failed[w]);
	}
	if (__sync_val_compare_and_swap(&p->since, since, now) != since)
		return;
	for (int w = 0; w < 2; w++) {
		WRITE_ONCE(p->done[2 + w], keep ? done[w] : 0);
		WRITE_ONCE(p->failed[2 + w], keep ? failed[w] : 0);
		__sync_fetch_and_and(&p->done[w], ~done[w]);
		__sync_fetch_and_and(&p->failed[w], ~failed[w]);
	}
}

/* Sets a bit of a record that has these numbers. False: another CPU has given it to others meanwhile. */
static __always_inline int xspin_set(struct xspin_past *p, __u32 run, __u64 *word, __u64 bit)
{
	__sync_fetch_and_or(word, bit);
	if (__sync_fetch_and_add(&p->run, 0) == run)
		return 1;
	__sync_fetch_and_and(word, ~bit);
	return 0;
}

/* Makes the key of a message that of its record, and returns the message's number. */
static __always_inline __u32 xspin_record(__u32 *to, const __u32 *key)
{
	const __u32 words = xspin.nkey, last = words && words <= 8 ? words - 1 : 0;
	__u32 number = key[last];

	__builtin_memcpy(to, key, 32);
	to[last] = number / XSPIN_RUN % XSPIN_RECORDS;
	return number;
}

enum { XSPIN_UNKNOWN, XSPIN_DONE, XSPIN_DIED };

/*
 * Whether a message has ended, and is remembered: then it is for longer. Between the two looks at run nobody has
 * given the record to other numbers. The element is the record's own: what was just looked up
 * is not the next to go. Global, as xspin_bind().
 */
__weak int xspin_recall(XSPIN_HER)
{
	__u32 key[8], number = xspin_record(key, her->key), w = number / 64 % 2;
	struct xspin_past *p = bpf_map_lookup_elem(&xspin_ended, key);
	__u64 bit = 1ULL << (number % 64), young, old, bad;
	int is = XSPIN_UNKNOWN;

	if (!p || READ_ONCE(p->run) != number / XSPIN_RUN)
		return XSPIN_UNKNOWN;
	xspin_age(p, xspin_clock());
	bad = READ_ONCE(p->failed[w]);
	young = READ_ONCE(p->done[w]) | bad;
	old = READ_ONCE(p->done[2 + w]) | READ_ONCE(p->failed[2 + w]);
	bad |= READ_ONCE(p->failed[2 + w]);
	if (__sync_fetch_and_add(&p->run, 0) != number / XSPIN_RUN)
		return XSPIN_UNKNOWN;
	if ((young | old) & bit)
		is = bad & bit ? XSPIN_DIED : XSPIN_DONE;
	if (is && !(young & bit))
		xspin_set(p, number / XSPIN_RUN, is == XSPIN_DIED ? &p->failed[w] : &p->done[w], bit);
	return is;
}

/* Remembers a message that has ended. Global, as xspin_bind(). */
__weak int xspin_remember(struct xspin_message *m, __u32 failed)
{
	__u32 key[8], me = bpf_get_smp_processor_id(), number, w, run, was;
	struct xspin_tally *t = bpf_map_lookup_elem(&xspin_tallies, &me);
	struct xspin_scratch *s = xspin_scratch();
	const __u64 now = xspin_clock();
	struct xspin_past *p;
	__u64 bit;

	if (!m || !s || !t)
		return 0;
	number = xspin_record(key, m->key);
	w = number / 64 % 2;
	run = number / XSPIN_RUN;
	bit = 1ULL << (number % 64);
	p = bpf_map_lookup_elem(&xspin_ended, key);
	if (!p) {
		__builtin_memset(&s->past, 0, sizeof(s->past));
		s->past.run = run;
		s->past.since = now;
		if (failed)
			s->past.failed[w] = bit;
		else
			s->past.done[w] = bit;
		if (!bpf_map_update_elem(&xspin_ended, key, &s->past, BPF_NOEXIST)) {
			t->records++;
			return 0;
		}
		p = bpf_map_lookup_elem(&xspin_ended, key); /* another CPU was faster */
		if (!p) {
			t->forgotten++;
			return 0;
		}
	}
	was = READ_ONCE(p->run);
	if (was != run) {
		/* The sender's own numbers of long ago. What is young among them is forgotten too early. */
		if (was == (__u32)XSPIN_NO_RUN || __sync_val_compare_and_swap(&p->run, was, XSPIN_NO_RUN) != was) {
			t->forgotten++; /* this one: another CPU is at it */
			return 0;
		}
		for (int i = 0; i < 4; i++) {
			__u64 all = READ_ONCE(p->done[i]) | READ_ONCE(p->failed[i]);

			if (all && now - READ_ONCE(p->since) < xspin_setup.remember)
				t->forgotten += xspin_ones(all);
			WRITE_ONCE(p->done[i], 0);
			WRITE_ONCE(p->failed[i], 0);
		}
		WRITE_ONCE(p->since, now);
		__sync_lock_test_and_set(&p->run, run);
	}
	xspin_age(p, now);
	if (!xspin_set(p, run, failed ? &p->failed[w] : &p->done[w], bit))
		t->forgotten++;
	return 0;
}

/* Ends a message for which nothing runs any more: remembers it, and frees its slot. */
static __noinline int xspin_end(struct xspin_message *m, struct xspin_tally *t, __u32 slot, __u32 failed)
{
	__u64 lap = m->word >> 32;
	__u32 key[8];

	__builtin_memcpy(key, m->key, sizeof(key));
	xspin_remember(m, failed);
	if (bpf_map_delete_elem(&xspin_table, key))
		t->leaked++;
	WRITE_ONCE(m->word, lap << 32 | XSPIN_FREE);
	if (bpf_map_push_elem(&xspin_free, &slot, 0))
		t->leaked++;
	return 0;
}

/*
 * Says where a message goes: to the first of the receives that matches, of
 * XSPIN_RECEIVES_SEEN that were posted. As long as none ever was, to the beginning of the
 * first window that may be written. False: there is no receive for it.
 *
 * Global, so that the verifier looks at it once and not for each state of a caller: with the
 * loop in each of those it took up to twenty times as long.
 */
__weak int xspin_bind(struct xspin_message *m, __u32 number, __u32 hold)
{
	const __u32 target = xspin_setup.target;
	__u32 zero = 0, k;
	struct xspin_ring *p = bpf_map_lookup_elem(&xspin_posted, &zero);
	struct xspin_receive *r;
	__u64 head, at, word;

	if (!m)
		return 0;
	m->window = target;
	m->place = target < XSPIN_WINDOWS ? xspin_setup.window[target].off : 0;
	m->room = target < XSPIN_WINDOWS ? xspin_setup.window[target].size : 0;
	m->user = 0;
	m->receive = XSPIN_NO_RECEIVE;
	if (!p)
		return 0;
	if (!READ_ONCE(p->ever))
		return 1;
	head = READ_ONCE(p->head);
	for (int i = 0; i < XSPIN_RECEIVES_SEEN; i++) {
		at = head + i;
		if (at == READ_ONCE(p->tail))
			return 0;
		k = at % XSPIN_RECEIVES;
		r = bpf_map_lookup_elem(&xspin_receives, &k);
		if (!r)
			return 0;
		word = READ_ONCE(r->word);
		if (word == (at << 2 | XSPIN_TAKEN) && READ_ONCE(p->head) == at)
			__sync_val_compare_and_swap(&p->head, at, at + 1);
		if (word != (at << 2 | XSPIN_POSTED) || (READ_ONCE(r->tag) ^ number) & ~READ_ONCE(r->ignore))
			continue;
		/* Nobody writes to a receive that is posted, so if it still is behind this, what
		 * was read in between was its own. */
		if (__sync_fetch_and_or(&r->word, 0) != word)
			continue;
		m->window = READ_ONCE(r->window);
		m->place = READ_ONCE(r->place);
		m->room = READ_ONCE(r->room);
		m->user = READ_ONCE(r->user);
		if (READ_ONCE(r->keep)) {
			if (READ_ONCE(r->word) == word)
				return 1;
		} else if (__sync_val_compare_and_swap(&r->word, word, at << 2 | (hold ? XSPIN_HELD : XSPIN_TAKEN)) == word) {
			m->receive = hold ? at : XSPIN_NO_RECEIVE;
			return 1;
		}
	}
	return 0;
}

/*
 * Begins a message with its header packet, in a slot of its own, and returns slot << 32 |
 * lap. 0: the packet is dropped, and comes again.
 */
static __noinline __u64 xspin_begin(struct xspin_her *her, struct xspin_tally *t, __u32 has)
{
	const __u32 words = xspin.nkey;
	struct xspin_message *m;
	__u32 slot = 0, lap;
	__u64 at;

	if (bpf_map_pop_elem(&xspin_free, &slot)) {
		t->dropped[XSPIN_NO_MESSAGES]++;
		return 0;
	}
	m = bpf_map_lookup_elem(&xspin_messages, &slot);
	if (!m) {
		t->leaked++;
		return 0;
	}
	lap = (m->word >> 32) + 1;
	if (lap >> 31) { /* laps are compared: the slot is used up */
		t->leaked++;
		return 0;
	}
	/* In this order: who finds the old lap in extent has found the old key. */
	__sync_lock_test_and_set(&m->extent, XSPIN_EXTENT_LAP(lap) | her->payload_len);
	__sync_lock_test_and_set(&m->word, (__u64)lap << 32 | XSPIN_STARTING);
	__builtin_memcpy(m->key, her->key, sizeof(m->key));
	m->seen = m->started = xspin_clock();
	m->done = m->dropped = m->turn = 0;
	m->cause = XSPIN_COMPLETE;
	m->size = her->payload_len;
	m->starved = m->code = m->slip.what = m->eom_done = 0;
	m->mode = XSPIN_MODE_RUN;
	if (xspin_setup.state) {
		__u8 *state = bpf_map_lookup_elem(&xspin_states, &slot);

		for (__u32 i = 0; state && i < XSPIN_STATE_MAX && i < xspin_setup.state; i += 8)
			*(__u64 *)(state + i) = 0;
	}
	at = (__u64)slot << 32 | lap;
	if (!bpf_map_update_elem(&xspin_table, her->key, &at, BPF_NOEXIST)) {
		/*
		 * A copy of it may have begun and ended since it was not found. What is too old
		 * stays where it is: another CPU may have put something new in its place.
		 */
		__u64 *handed = 0;

		if (has & XSPIN_HAS_HAND_OVER)
			handed = bpf_map_lookup_elem(&xspin_handed, her->key);
		if (xspin_recall(her) ||
		    (handed && xspin_recent(READ_ONCE(*handed), xspin_setup.handed))) {
			t->busy++;
		} else if (xspin_bind(m, her->key[words && words <= 8 ? words - 1 : 0], has & XSPIN_HAS_HAND_OVER)) {
			t->started++;
			return at;
		} else {
			t->refused++;
		}
		if (bpf_map_delete_elem(&xspin_table, her->key))
			t->leaked++;
	} else {
		t->busy++;
	}
	WRITE_ONCE(m->word, (__u64)lap << 32 | XSPIN_FREE);
	if (bpf_map_push_elem(&xspin_free, &slot, 0))
		t->leaked++;
	return 0;
}

/* What the header handler has decided of the receive that is held for its message. */
static __always_inline void xspin_held(struct xspin_message *m, enum xspin_receive_is to)
{
	__u64 n = m->receive;
	__u32 k = n % XSPIN_RECEIVES;
	struct xspin_receive *r;

	if (n == XSPIN_NO_RECEIVE)
		return;
	m->receive = XSPIN_NO_RECEIVE;
	r = bpf_map_lookup_elem(&xspin_receives, &k);
	if (r)
		__sync_val_compare_and_swap(&r->word, n << 2 | XSPIN_HELD, n << 2 | to);
}

/* Hands a message over: receive and slot are given back, and where it went is known before it
 * is gone from here. */
static __noinline int xspin_hand_over(struct xspin_message *m, struct xspin_her *her, struct xspin_tally *t)
{
	__u64 now = xspin_clock(), lap = m->word >> 32;

	if (bpf_map_update_elem(&xspin_handed, her->key, &now, BPF_ANY))
		t->leaked++; /* its next packet begins it once more, and it is handed over then */
	xspin_held(m, XSPIN_POSTED);
	t->started--;
	if (bpf_map_delete_elem(&xspin_table, her->key))
		t->leaked++;
	WRITE_ONCE(m->word, lap << 32 | XSPIN_FREE);
	if (bpf_map_push_elem(&xspin_free, &her->slot, 0))
		t->leaked++;
	return 0;
}

/* A handler has failed. The first of a message says so; others may still run, so user
 * space ends it. */
static __noinline int xspin_fail(struct xspin_message *m, struct xspin_tally *t, __u64 at, __u32 from, __u64 fault)
{
	if (!xspin_move(m, (__u32)at, from, XSPIN_FAILED))
		return 0;
	m->code = (__u32)fault;
	m->slip = t->slip;
	t->failed++;
	if (!xspin_post(m, at >> 32, XSPIN_FAILURE))
		t->lost++;
	return 1;
}

/* What a completion leads to. True: the message has ended, which the sender may hear. */
static __noinline int xspin_conclude(struct xspin_message *m, struct xspin_tally *t, __u32 slot)
{
	__u64 word = m->word;

	if (!xspin_post_complete(m, slot, 0)) {
		t->deferred++;
		if (!m->turn)
			m->turn = xspin_take_turn();
		WRITE_ONCE(m->word, word >> 32 << 32 | XSPIN_DEFERRED);
		/* Without room in the ring, user space finds it all the same, later. */
		xspin_post(m, slot, XSPIN_WAITING);
		return 0;
	}
	t->ended++;
	xspin_end(m, t, slot, 0);
	return 1;
}

/* What xspin_called() makes of a handler whose action is none. */
#define XSPIN_BAD_ACTION (1 << 20 | XSPIN_FAIL)

static __always_inline int xspin_fault(struct xspin_counters *cpu, struct xspin_tally *t, __u32 handler, int code)
{
	if (code == XSPIN_BAD_ACTION) {
		handler |= XSPIN_HAS_ACTED;
		code = XSPIN_FAIL;
	}
	t->told = t->slip;
	cpu->failed++;
	cpu->fault = (__u64)handler << 32 | (__u32)code;
	return handler << 16 | (code & 0xffff);
}

/* Whether a slot still has the message with this key; then its word. 0: it has not. */
static __always_inline __u64 xspin_known(const struct xspin_message *m, const struct xspin_her *her, __u32 lap)
{
	__u64 word = READ_ONCE(m->word);
	__u32 other = 0;

	for (int i = 0; i < 8; i++) {
		if (i >= (int)xspin.nkey)
			break; /* zero in both */
		other |= READ_ONCE(m->key[i]) ^ her->key[i];
	}
	return word >> 32 == lap && !other ? word : 0;
}

/* Before a handler is called, scratch gets what it is called with; after, her is that again,
 * whatever the handler made of it, but for what becomes of the frame. */
static __always_inline int xspin_called(struct xspin_scratch *s, struct xspin_her *her, int code)
{
	const __u32 action = her->action;

	__builtin_memcpy(her, &s->her, sizeof(*her));
	code &= ~XSPIN_PENDING;
	if (action == XDP_DROP || action == XDP_TX || action == XDP_PASS)
		her->action = action;
	else if (code == XSPIN_SUCCESS || code == XSPIN_DROP || code == XSPIN_PROCEED || code == XSPIN_HAND_OVER)
		code = XSPIN_BAD_ACTION;
	return code;
}

#define XSPIN_CALL(handler)                                       \
	({                                                        \
		__builtin_memcpy(&s->her, &her, sizeof(her));     \
		xspin_called(s, &her, handler(ctx, &her));        \
	})

#ifdef XSPIN_TC

/*
 * Whether segments have SLMP's header where docs/slmp.md says, and nothing else tells them apart, so that a run can go
 * by it.
 */
static __always_inline int xspin_runs(void)
{
	return xspin_setup.protocol == XSPIN_SLMP && xspin_setup.checksums != XSPIN_VERIFY_ALL &&
	       xspin.header == XSPIN_SLMP_AT + XSPIN_SLMP_HEADER && xspin.nkey == 4 &&
	       xspin.key[0].need <= XSPIN_SLMP_AT && xspin.key[1].need <= XSPIN_SLMP_AT && xspin.key[2].need <= XSPIN_SLMP_AT &&
	       xspin.key[3].off == XSPIN_SLMP_AT + 2 && xspin.key[3].mask == ~0u && !xspin.offset_shift &&
	       xspin.length.off == XSPIN_SLMP_AT - 6 && xspin.length.mask == 0xffff && !xspin.length_shift && xspin.length_from == XSPIN_SLMP_AT - 8 &&
	       xspin.offset.off == XSPIN_SLMP_AT + 6 && xspin.offset.mask == ~0u &&
	       xspin.eom.off == XSPIN_SLMP_AT - 2 && xspin.eom.mask == XSPIN_SLMP_EOM && xspin.eom_start == XSPIN_SLMP_EOM &&
	       xspin.eom_end == XSPIN_SLMP_EOM;
}

/* SLMP's header, in the frame's order. */
struct xspin_slmp {
	__u16 flags;
	__u16 id[2];
	__u16 offset[2];
};

/* Whether the i-th segment of a train is one of the message at `offset`, with none of these flags. */
static __always_inline int xspin_comes(struct xdp_md *ctx, const struct xspin_segment *g, const struct xspin_run *r, __u32 i, __u32 offset, __u32 flags)
{
	struct xspin_slmp h;

	if (hook_load(ctx, g->head + i * ctx->gso_size, &h, sizeof(h)))
		return 0;
	return !(bswap16(h.flags) & flags) && ((__u32)h.id[1] << 16 | h.id[0]) == bswap32(r->id) &&
	       ((__u32)h.offset[1] << 16 | h.offset[0]) == bswap32(offset);
}

/*
 * Ends a run: segments that have come are processed, and the others are given back. False: the run completes its
 * message, so the last segment is given back, too, for xspin_packet() to find.
 */
static __always_inline int xspin_run_ends(struct xspin_run *r, struct xspin_message *m, struct xspin_claims *b)
{
	__u32 me = bpf_get_smp_processor_id(), lap = r->at, got = r->got, first = r->bit & 31, left = r->left;
	struct xspin_tally *t = bpf_map_lookup_elem(&xspin_tallies, &me);
	struct xspin_counters *cpu = xspin_this_cpu();
	__u64 extent, done, last;

	r->got = r->left = 0;
	/* The word is the message's as long as bits of it are claimed and not done. */
	if (left)
		__sync_fetch_and_and(&b->claimed, ~(((1ULL << (left & 63)) - 1) << ((first + got) & 31)));
	if (!got || !t || !cpu)
		return 1;
	if (r->start)
		xspin_took(cpu, (xspin_now() - r->start) / got);
	__sync_fetch_and_or(&b->done, ((1ULL << (got & 63)) - 1) << first);
	WRITE_ONCE(m->seen, xspin_clock());
	done = __sync_fetch_and_add(&m->done, (__u64)got * r->size) + (__u64)got * r->size;
	extent = READ_ONCE(m->extent);
	cpu->handled += got;
	if (xspin_setup.checksums != XSPIN_VERIFY_NONE)
		t->unverified += got;
	/* Another CPU may have completed the message meanwhile, and the slot may have the next. */
	if (extent >> 35 != (lap & ((1 << 29) - 1)) || !(extent & XSPIN_EXTENT_KNOWN) ||
	    done != (extent & XSPIN_EXTENT_BYTES) + 1)
		return 1;
	last = 1ULL << ((first + got - 1) & 31);
	cpu->handled--;
	if (xspin_setup.checksums != XSPIN_VERIFY_NONE)
		t->unverified--;
	__sync_fetch_and_add(&m->done, -(__u64)r->size);
	__sync_fetch_and_and(&b->done, ~last);
	__sync_fetch_and_and(&b->claimed, ~last);
	r->at = 0;
	return 0;
}

static __noinline enum xspin_followed xspin_follow(struct xdp_md *ctx, struct xspin_segment *g, __u32 at)
{
	struct xspin_scratch *s = xspin_scratch();
	struct xspin_counters *cpu = xspin_this_cpu();
	struct xspin_message *m;
	struct xspin_claims *b;
	struct xspin_run *r;
	__u32 slot, n, k, whole;
	__u64 o, to, l;
	__u8 *p;

	/* The packet before the first segment was of another train, and may be of another sender. */
	if (!xspin_runs() || !at || !s || !cpu || !s->run.at)
		return XSPIN_ALONE;
	r = &s->run;
	slot = r->at >> 32;
	m = bpf_map_lookup_elem(&xspin_messages, &slot);
	if (!m || !r->size)
		return XSPIN_ALONE;
	if (!r->left) {
		k = r->next / r->size;
		n = 32 - (k & 31);
		whole = (ctx->len - g->head) / ctx->gso_size;
		r->word = slot * xspin_setup.words + (k >> 5);
		r->bit = k & 31;
		b = bpf_map_lookup_elem(&xspin_bits, &r->word);
		if (!b || k >> 5 >= xspin_setup.words || at >= whole || ctx->gso_size != r->size + XSPIN_SLMP_HEADER)
			goto none;
		if (n > whole - at)
			n = whole - at;
		to = (__u64)r->next + (__u64)n * r->size;
		/*
		 * The last is there, so it may say how far the message goes: before EOM does, if that is in between.
		 * No message has both.
		 */
		if (n < 2 || to > 1ULL << 32 || to > m->room || m->window >= XSPIN_WINDOWS ||
		    !xspin_comes(ctx, g, r, at + n - 1, to - r->size, XSPIN_SLMP_EOM | XSPIN_SLMP_ACK) ||
		    xspin_reach(m, r->at, to - r->size, to, 0) || xspin_claim(b, r->at, ((1ULL << n) - 1) << r->bit))
			goto none;
		r->left = n;
		r->got = 0;
		r->start = (cpu->handled - 1) / XSPIN_TIMED != (cpu->handled + n - 1) / XSPIN_TIMED ? xspin_now() : 0;
		/* What was read of the slot was its message's: the message is still there. */
		if (READ_ONCE(m->word) != ((r->at & ~0U) << 32 | XSPIN_OPEN)) {
			r->left = 0;
			xspin_unclaim(b, r->at, ((1ULL << n) - 1) << r->bit); /* another message may have them now */
			goto none;
		}
	} else {
		b = bpf_map_lookup_elem(&xspin_bits, &r->word);
		if (!b)
			goto none;
	}
	o = m->place + r->next;
	p = xspin_element(m->window, o >> 20);
	o &= XSPIN_ELEMENT - 1;
	l = r->size;
	asm volatile("" : "+r"(o));
	if (!p || o > XSPIN_ELEMENT - XSPIN_PIECE || !l || l > XSPIN_PIECE ||
	    !xspin_comes(ctx, g, r, at, r->next, XSPIN_SLMP_EOM | XSPIN_SLMP_ACK | XSPIN_SLMP_SYN) ||
	    hook_load(ctx, g->head + at * ctx->gso_size + XSPIN_SLMP_HEADER, p + o, XSPIN_LENGTH(l, XSPIN_PIECE))) {
		if (!xspin_run_ends(r, m, b))
			return XSPIN_AGAIN;
		goto none;
	}
	g->followed = at;
	r->next += r->size;
	r->got++;
	r->left--;
	return r->left || xspin_run_ends(r, m, b) ? XSPIN_BEHIND : XSPIN_AGAIN;
none:
	r->at = 0;
	return XSPIN_ALONE;
}

#endif

/*
 * A packet. Calls the handlers, each at one place and in no loop: so the instructions that
 * the verifier has counted for each of them bound a packet's run.
 */
XSPIN_PACKET
{
	const struct xspin_frame f = xspin_frame(ctx);
	const __u32 has = xspin.has;
	struct xspin_her her = { .len = xspin_length(&f), .action = XDP_DROP };
	struct xspin_scratch *s = xspin_scratch();
	struct xspin_counters *cpu = xspin_this_cpu();
	__u32 me = bpf_get_smp_processor_id(), k = 0, n, size = 0, processed = 0, open = 0;
	struct xspin_tally *t = bpf_map_lookup_elem(&xspin_tallies, &me);
	struct xspin_message *m;
	struct xspin_claims *b = 0;
	__u64 at, word, extent, done, to, high = 0, start = 0, *found;
	int code = XSPIN_SUCCESS, eom, hollow, both;

#ifdef XSPIN_TC
	if (s)
		s->run.at = s->run.left = 0;
#endif
	if (!cpu || !t || !s || !xspin_read(ctx, &her))
		return XDP_PASS; /* as if no ruleset had matched */
	t->slip.what = XSPIN_SLIP_NONE;
	her.hpu = me;
	her.hpus = xspin.hpus;
	eom = her.flags & XSPIN_EOM;
	hollow = !her.payload_len && !eom;
	to = (__u64)her.offset + her.payload_len;

	if (xspin_setup.checksums != XSPIN_VERIFY_NONE) {
		int sum = xspin_sum_is(ctx, &f, her.len);

		if (sum == XSPIN_SUM_WRONG ||
		    (sum != XSPIN_SUM_RIGHT && xspin_setup.checksums == XSPIN_VERIFY_ALL)) {
			t->corrupt++;
			return XDP_DROP;
		}
		if (sum != XSPIN_SUM_RIGHT)
			t->unverified++;
	}
	if (xspin_setup.protocol == XSPIN_SLMP) {
		const __u8 *p = xspin_at_frame(&f, 0, XSPIN_SLMP_AT + XSPIN_SLMP_HEADER);

		if (!p)
			return XDP_PASS;
		p += XSPIN_SLMP_AT;
		s->reply.source = *(__u32 *)(p - 16);
		s->reply.port = *(__u16 *)(p - 8);
		s->reply.flags = bswap16(*(__u16 *)p);
		s->reply.id = bswap32(*(__u32 *)(p + 2));
		s->reply.offset = bswap32(*(__u32 *)(p + 6));
		if (s->reply.flags & XSPIN_SLMP_ACK) {
			t->stray++;
			return XDP_DROP;
		}
	}
	if (to > 1ULL << 32) {
		t->dropped[XSPIN_BEYOND]++;
		return XDP_DROP;
	}

	/* Most often the message of this CPU's last segment. As long as a slot is open with its
	 * key, the table has it, too. */
	at = t->last;
	her.slot = at >> 32;
	m = bpf_map_lookup_elem(&xspin_messages, &her.slot);
	word = m ? xspin_known(m, &her, at) : 0;
	if (m && (__u32)word == XSPIN_OPEN)
		goto known;

	found = bpf_map_lookup_elem(&xspin_table, her.key);
	if (found) {
		at = READ_ONCE(*found); /* may be another message's already: see xspin_known() */
	} else {
		__u64 *old;

		if (has & XSPIN_HAS_HAND_OVER) {
			old = bpf_map_lookup_elem(&xspin_handed, her.key);
			/* It may be another message's already, one that was handed over as well. */
			if (old && xspin_recent(READ_ONCE(*old), xspin_setup.handed)) {
				WRITE_ONCE(*old, xspin_clock());
				goto handed;
			}
		}
		switch (xspin_recall(&her)) {
		case XSPIN_DIED:
			t->dropped[XSPIN_DEAD]++;
			return XDP_DROP;
		case XSPIN_DONE:
			t->duplicates++;
			processed = 1;
			high = ~0U;
			goto answer;
		}
		if (her.offset) {
			t->dropped[XSPIN_NO_HEADER]++;
			return XDP_DROP;
		}
		at = xspin_begin(&her, t, has);
		if (!at)
			return XDP_DROP;
	}
	her.slot = at >> 32;
	m = bpf_map_lookup_elem(&xspin_messages, &her.slot);
	if (!m)
		return XDP_DROP;
	if (!found) {
		if (!(cpu->handled % XSPIN_TIMED))
			start = xspin_now();
		m->source = s->reply.source;
		m->port = s->reply.port;
		if (xspin_setup.protocol == XSPIN_SLMP) {
			const __u8 *p = xspin_at_frame(&f, 0, XSPIN_SLMP_AT);

			m->answerable = 0;
			if (p) {
				m->answerable = xspin_answerable(p, p + 14);
				__builtin_memcpy(m->ethernet, p, sizeof(m->ethernet));
				m->dest = *(__u32 *)(p + 30);
				m->dport = *(__u16 *)(p + 36);
			}
		}
		if (has & XSPIN_HAS_HEADER) {
			t->headers++;
			code = XSPIN_CALL(xspin_header);
			if (has & XSPIN_HAS_HAND_OVER && code == XSPIN_HAND_OVER) {
				xspin_hand_over(m, &her, t);
				goto handed;
			}
			if (has & XSPIN_HAS_HAND_OVER)
				xspin_held(m, XSPIN_TAKEN);
			if (code == XSPIN_DROP) {
				m->mode = XSPIN_MODE_DISCARD;
			} else if (code == XSPIN_PROCEED) {
				m->mode = XSPIN_MODE_DEPOSIT;
			} else if (code != XSPIN_SUCCESS) {
				code = xspin_fault(cpu, t, XSPIN_HAS_HEADER, code);
				xspin_fail(m, t, at, XSPIN_STARTING, code);
				xspin_end(m, t, her.slot, 1); /* nothing else ran */
				return XDP_DROP;
			}
		}
		if (!(has & XSPIN_HAS_PAYLOAD) && m->mode == XSPIN_MODE_RUN)
			m->mode = XSPIN_MODE_DEPOSIT;
		if (hollow) /* nothing else of the message runs before it has been handled */
			goto ours;
		xspin_move(m, at, XSPIN_STARTING, XSPIN_OPEN);
	}

	word = xspin_known(m, &her, at);
	switch ((__u32)word) {
	case XSPIN_FREE:
	case XSPIN_STARTING:
		goto late; /* also: it has ended meanwhile */
	case XSPIN_FAILED:
	case XSPIN_STOPPED:
		t->dropped[XSPIN_DEAD]++;
		return XDP_DROP;
	}
known:
	if (hollow) { /* no byte of it can be claimed: it has nothing to say */
		extent = READ_ONCE(m->extent);
		code = xspin_fits(&extent, her.offset, to, 0);
		if (code)
			goto refused;
		t->duplicates++;
		processed = open = 1;
		high = extent & XSPIN_EXTENT_BYTES;
		size = m->size;
		goto answer;
	}
	size = READ_ONCE(m->size);
	if (!size && her.payload_len && (!eom || !her.offset)) {
		/* The first segment was empty. The first with bytes says how long all are. */
		if (her.offset % her.payload_len) {
			t->dropped[XSPIN_OVERLAP]++;
			return XDP_DROP;
		}
		size = __sync_val_compare_and_swap(&m->size, 0, her.payload_len);
		if (!size)
			size = her.payload_len;
	}
	if (size) {
		k = her.offset / size;
		if (k * size != her.offset || her.payload_len > size || (her.payload_len != size && !eom)) {
			t->dropped[XSPIN_OVERLAP]++;
			return XDP_DROP;
		}
	} else if (her.offset) {
		goto late; /* EOM has overtaken all others: which bit is its own is not known yet */
	}
	if (k >> 5 >= xspin_setup.words) {
		t->dropped[XSPIN_NO_MEMORY]++;
		m->starved = 1;
		return XDP_DROP;
	}
	if (!eom) {
		code = xspin_reach(m, at, her.offset, to, 0);
		if (code)
			goto refused;
	}
	n = her.slot * xspin_setup.words + (k >> 5);
	b = bpf_map_lookup_elem(&xspin_bits, &n);
	if (!b)
		return XDP_DROP;
	open = 1;
	switch (xspin_claim(b, at, 1ULL << (k & 31))) {
	case 0:
		if (eom) {
			code = xspin_reach(m, at, her.offset, to, 1);
			if (code) {
				xspin_unclaim(b, at, 1ULL << (k & 31));
				goto refused;
			}
		}
		/* What was read of the slot was its message's: the message is still there. */
		if (READ_ONCE(m->word) >> 32 != (__u32)at)
			goto late;
		break;
	case 1:
		done = READ_ONCE(b->done);
		done = done >> 32 == (__u32)at && done >> (k & 31) & 1;
		extent = READ_ONCE(m->extent);
		high = extent & XSPIN_EXTENT_BYTES;
		if (eom) {
			__u64 same = extent;

			code = xspin_fits(&same, her.offset, to, 1);
			if (!code && same != extent) /* it came without EOM, or its copy is at work */
				code = done ? XSPIN_OVERLAP : XSPIN_CONTENDED;
			if (code)
				goto refused;
		}
		if ((__u32)word == XSPIN_DEFERRED && eom && xspin_move(m, at, XSPIN_DEFERRED, XSPIN_ENDING)) {
			m->seen = xspin_clock();
			goto conclude;
		}
		processed = !eom && done;
		if (processed)
			t->duplicates++;
		else
			t->waits++;
		goto answer;
	default:
		goto late;
	}

	/* The segment is ours: until it is done, the message cannot end. */
	if (!start && !(cpu->handled % XSPIN_TIMED))
		start = xspin_now();
ours:
	t->last = at;
	WRITE_ONCE(m->seen, xspin_clock());
	code = XSPIN_DROP;
	if (m->mode == XSPIN_MODE_DEPOSIT) {
		code = m->window < XSPIN_WINDOWS ? xspin_put(ctx, &her, m) : XSPIN_SUCCESS;
		cpu->handled++;
	} else if (has & XSPIN_HAS_PAYLOAD && m->mode == XSPIN_MODE_RUN) {
		code = XSPIN_CALL(xspin_payload);
		cpu->handled++;
	}
	if (start)
		xspin_took(cpu, xspin_now() - start);
	if ((__u32)code > XSPIN_DROP) {
		code = xspin_fault(cpu, t, m->mode == XSPIN_MODE_DEPOSIT ? XSPIN_HAS_DEPOSIT : XSPIN_HAS_PAYLOAD, code);
		xspin_fail(m, t, at, b ? XSPIN_OPEN : XSPIN_STARTING, code);
		return XDP_DROP;
	}
	if (!b) {
		xspin_move(m, at, XSPIN_STARTING, XSPIN_OPEN);
		cpu->dropped += code == XSPIN_DROP;
		processed = open = 1;
		goto answer;
	}
	if (code == XSPIN_DROP) {
		cpu->dropped++;
		__sync_fetch_and_add(&m->dropped, her.payload_len);
	}
	__sync_fetch_and_or(&b->done, 1ULL << (k & 31));
#ifdef XSPIN_TC
	if (xspin_runs() && m->mode == XSPIN_MODE_DEPOSIT && !eom) {
		s->run.at = at;
		s->run.id = s->reply.id;
		s->run.next = to;
		s->run.size = size;
	}
#endif
	if (eom) {
		m->eom_flags = s->reply.flags;
		m->eom_offset = s->reply.offset;
		m->eom_done = 1;
	}
	n = her.payload_len + !!eom;
	done = __sync_fetch_and_add(&m->done, n) + n;
	extent = READ_ONCE(m->extent);
	high = extent & XSPIN_EXTENT_BYTES;
	processed = !eom;
	if (!(extent & XSPIN_EXTENT_KNOWN) || done != high + 1 ||
	    !xspin_move(m, at, XSPIN_OPEN, XSPIN_ENDING))
		goto answer;

	if (has & XSPIN_HAS_COMPLETION) {
		t->completions++;
		code = XSPIN_CALL(xspin_completion);
		if (code != XSPIN_SUCCESS) {
			code = xspin_fault(cpu, t, XSPIN_HAS_COMPLETION, code);
			xspin_fail(m, t, at, XSPIN_ENDING, code);
			xspin_end(m, t, her.slot, 1);
			return XDP_DROP;
		}
	}
conclude:
	/*
	 * A late segment that completes a message wants two answers, its own and EOM's, and a packet can have
	 * one: EOM's, which says all. Senders that count them get the other one from user space, when the
	 * application has the event that is before it in the ring.
	 */
	both = !eom && m->eom_flags & XSPIN_SLMP_SYN;
	if (both && (!(s->reply.flags & XSPIN_SLMP_SYN) || s->reply.flags & XSPIN_SLMP_CUMULATIVE ||
		     !xspin_setup.read || !xspin_owe(m, s))) {
		both = 2;
		s->reply.flags = m->eom_flags;
		s->reply.offset = m->eom_offset;
	}
	open = 0;
	processed = xspin_conclude(m, t, her.slot);
	if (both == 1 && !processed)
		processed = 1; /* its own: EOM waits for room */
	else if (both == 1 && bpf_ringbuf_output(&xspin_events, &s->owed, sizeof(s->owed), 0)) {
		s->reply.flags = XSPIN_SLMP_SYN;
		s->reply.offset = bswap32(*(__u32 *)(s->owed.frame + XSPIN_SLMP_AT + 6));
	}

answer:
	if (xspin_setup.protocol == XSPIN_SLMP && s->reply.flags & XSPIN_SLMP_SYN &&
	    (processed || s->reply.flags & XSPIN_SLMP_CUMULATIVE)) {
		s->reply.slot = her.slot;
		s->reply.lap = at;
		s->reply.size = size;
		s->reply.processed = processed;
		s->reply.open = open;
		s->reply.end = open ? 0 : high;
		s->reply.high = high;
		return xspin_answer_to(ctx, s, t);
	}
	switch (her.action) {
	case XDP_TX:
		cpu->sent++;
		return XDP_TX;
	case XDP_PASS:
		cpu->to_stack++;
		return XDP_PASS;
	}
	return XDP_DROP;

refused:
	if (code > 0) {
		at = code;
		asm volatile("" : "+r"(at)); /* or clang masks what it has shifted */
		t->dropped[at & 7]++;
		return XDP_DROP;
	}
late:
	t->busy++;
	return XDP_DROP;

handed:
#ifndef XSPIN_TC /* no HPU gets packets from there: the loader knows */
	if (has & XSPIN_HAS_HAND_OVER) {
		t->handed++;
		bpf_tail_call(ctx, &xspin_user, 0);
	}
#endif
	return XDP_DROP; /* there is no program: it comes again */
}

SEC(HOOK_SECTION)
int xspin_context(struct xdp_md *ctx)
{
	return hook_verdict(ctx, xspin_answers(ctx, xspin_packets(ctx)));
}

/*
 * Ends a message that user space has stopped, or that has failed, when it has made sure
 * that nothing runs for it any more. The return value says whether it did.
 */
SEC(HOOK_SECTION)
int xspin_expire(struct xdp_md *ctx)
{
	const __u32 has = xspin.has;
	struct xspin_her her = { .action = XDP_DROP };
	struct xspin_counters *cpu = xspin_this_cpu();
	__u32 me = bpf_get_smp_processor_id();
	struct xspin_tally *t = bpf_map_lookup_elem(&xspin_tallies, &me);
	struct xspin_scratch *s = xspin_scratch();
	struct xspin_message *m;
	struct xspin_order o;
	__u64 word;
	int code;

	if (!cpu || !t || !s || hook_load(ctx, 0, &s->order, sizeof(s->order)))
		return 0;
	o = s->order;
	m = bpf_map_lookup_elem(&xspin_messages, &o.slot);
	if (!m)
		return 0;
	word = READ_ONCE(m->word);
	if (word >> 32 != o.lap)
		return 0;
	if (o.cause == XSPIN_RESUME) {
		/* Of two records, of which each has a head. */
		if (bpf_ringbuf_query(&xspin_events, BPF_RB_RING_SIZE) - bpf_ringbuf_query(&xspin_events, BPF_RB_AVAIL_DATA) <
		    2 * (sizeof(struct xspin_event) + 8))
			return XSPIN_RESUME_LATER;
		if (!xspin_move(m, o.lap, XSPIN_DEFERRED, XSPIN_ENDING))
			return 0;
		if (!xspin_post_complete(m, o.slot, 1)) {
			WRITE_ONCE(m->word, (__u64)o.lap << 32 | XSPIN_DEFERRED);
			return XSPIN_RESUME_LATER;
		}
		/* Nothing that the sender sends is at hand: user space sends the answer that it waits for, when it
		 * has told the application. */
		if (xspin_setup.protocol == XSPIN_SLMP && m->eom_flags & XSPIN_SLMP_SYN &&
		    (!xspin_owe(m, s) || bpf_ringbuf_output(&xspin_events, &s->owed, sizeof(s->owed), 0)))
			t->mute++;
		t->ended++;
		xspin_end(m, t, o.slot, 0);
		return 1;
	}
	switch ((__u32)word) {
	case XSPIN_STOPPED:
		break;
	case XSPIN_FAILED:
		xspin_end(m, t, o.slot, 1);
		return 1;
	default:
		return 0;
	}
	if (o.cause == XSPIN_COMPLETE) { /* it was deferred for too long */
		code = xspin_post_complete(m, o.slot, 0);
		if (code) {
			t->ended++;
		} else { /* nobody knows of it, so it must not be acknowledged */
			t->failed++;
			t->lost++;
		}
		xspin_end(m, t, o.slot, !code);
		return 1;
	}
	__builtin_memcpy(her.key, m->key, sizeof(her.key));
	her.hpu = me;
	her.hpus = xspin.hpus;
	her.slot = o.slot;
	t->slip.what = XSPIN_SLIP_NONE;
	m->cause = o.cause;
	if (has & XSPIN_HAS_COMPLETION) {
		t->completions++;
		code = XSPIN_CALL(xspin_completion);
		if (code != XSPIN_SUCCESS) {
			code = xspin_fault(cpu, t, XSPIN_HAS_COMPLETION, code);
			xspin_fail(m, t, (__u64)o.slot << 32 | o.lap, XSPIN_STOPPED, code);
			xspin_end(m, t, o.slot, 1);
			return 1;
		}
	}
	t->abandoned++;
	if (!xspin_post(m, o.slot, o.cause))
		t->lost++;
	xspin_end(m, t, o.slot, 1);
	return 1;
}

/* Has the functions that handlers call be in the object. */
SEC(HOOK_SECTION)
int xspin_api(struct xdp_md *ctx)
{
	struct xspin_her her = { .len = ctx->data };
	struct xspin_headers h;
	struct xspin_info info;
	__u64 was;
	__u8 *p;

	p = xspin_memory(her.len, 1);
	p = p ?: xspin_hpu_memory(&her, her.len, 1);
	p = p ?: xspin_state(&her);
	return xspin_count(0, 1) + xspin_csum_diff(her.key, 4, 0, 0, 0) + xspin_deposit(ctx, &her) +
	       xspin_load(ctx, 0, &was, 8) + xspin_store(ctx, 0, &was, 8) + xspin_headers(ctx, &her, &h) +
	       xspin_reply_udp(ctx, &her) + xspin_reply_icmp_echo(ctx, &her) +
	       xspin_about(&her, &info) + xspin_window_frame(ctx, 0, 0, 0, 1) + xspin_window_move(0, 0, &was, 8) +
	       xspin_window_add(0, 0, 1, &was) + xspin_window_cas(0, 0, 1, 2, &was) + xspin_notify(0, 0, 0) +
	       xspin_log_line(&info, 0, 0) + !!p;
}

char _license[] SEC("license") = "Dual BSD/GPL";
