/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Handlers in eBPF for messages: segments that come in any order, more than once, and on
 * several CPUs at a time. A whole file:
 *
 *   #include "xspin_message.h"
 *
 *   XSPIN_HEADER { return XSPIN_PROCEED; }
 *
 *   XSPIN_MESSAGES(HEADER);
 *   XSPIN_LICENSE("GPL");
 *
 * The header handler runs once, before anything else of its message; the payload handler
 * once for each segment; the completion handler once, after all of these. A message is
 * complete when every byte up to its end has been processed. What its protocol wants
 * answered is answered from here.
 *
 * Segments must be as long as the message's first, except for the last one, which may be
 * shorter or empty. Others are dropped and counted.
 */
#pragma once
#include "xspin_handler.h"

/*
 * Names the handlers that there are, joined by |, of HEADER, PAYLOAD and COMPLETION. Without
 * PAYLOAD, payload goes into the window. With HAND_OVER the header handler may return
 * XSPIN_HAND_OVER, which has handlers on HPUs take the whole message. The program never
 * runs: it calls handlers so that they are in the object.
 */
#define XSPIN_MESSAGES(names)                                               \
	SEC("xdp.frags") int xspin_context(struct xdp_md *ctx)              \
	{                                                                   \
		enum { HEADER = XSPIN_HAS_HEADER,                           \
		       PAYLOAD = XSPIN_HAS_PAYLOAD,                         \
		       COMPLETION = XSPIN_HAS_COMPLETION,                   \
		       HAND_OVER = XSPIN_HAS_HAND_OVER };                   \
		_Static_assert(!((names) & HAND_OVER) || (names) & HEADER,  \
			       "HAND_OVER is for a header handler");        \
		static const volatile struct xspin_declared declared        \
			XSPIN_DECLARED = { .handlers = (names), .messages = 1, .state = XSPIN_STATE_SIZE }; \
		return xspin_names(ctx, names);                             \
	}                                                                   \
	_Static_assert(1, "for the semicolon")

/*
 * Memory of each message, if there is any: so many bytes, a multiple of 8 and at most
 * 1024, that a handler's file says before it includes this one. They are 0 when a message begins.
 */
#ifdef XSPIN_STATE
_Static_assert(XSPIN_STATE > 0 && XSPIN_STATE <= 1024 && XSPIN_STATE % 8 == 0,
	       "XSPIN_STATE: want a multiple of 8, up to 1024");
#define XSPIN_STATE_SIZE XSPIN_STATE
#else
#define XSPIN_STATE_SIZE 0
#endif

/* How a message ended: spin.Cause. */
enum xspin_cause {
	XSPIN_COMPLETE,
	XSPIN_TIMED_OUT,
	XSPIN_REMOVED,
	XSPIN_FAILURE,
};

/* --- what handlers of messages call. Each is about the message and the segment that the
 * handler was called for, whatever it has written to her --- */

/*
 * Copies the payload to its place in the message's window. Success; Segv if the message
 * has no window, no right to write to it, or no room there. 20 ns, and what the bytes cost.
 */
XSPIN_API(int, xspin_deposit, struct xdp_md *ctx, const struct xspin_her *her);

#if defined(XSPIN_STATE) || defined(XSPIN_ENGINE)
/* Returns the XSPIN_STATE bytes of her message. Never null for a handler, but the verifier wants it
 * checked. Segments of a message are handled at the same time: see __sync_fetch_and_add. 10 ns. */
XSPIN_API(void *, xspin_state, const struct xspin_her *her);
#endif

/* What there is to know of a message. */
struct xspin_info {
	__u32 number; /* the last word of its key: with SLMP the message id */
	__u32 slot;   /* no other message that is open has it */
	__u32 source; /* address and port of the sender, in the frame's byte order */
	__u32 port;
	__u64 length; /* up to the last byte that has come, or to the end if that is known */
	__u32 known;  /* the end is */
	__u32 cause;  /* in a completion handler: how it ended, xspin_cause */
	__u64 missing; /* there: bytes that were not processed */
	__u64 dropped; /* bytes of segments for which a handler returned Drop */
	__u64 user;   /* of the receive that it has taken */
};

/* Fills it in. False, which handlers never see: there is no such message. 13 ns. */
XSPIN_API(int, xspin_about, const struct xspin_her *her, struct xspin_info *i);

/*
 * Windows are numbered as in the context, from 0 on; their number and n are constants. In
 * what follows 0 is Success, and XSPIN_SEGV says that the context has no such window, that
 * its handlers do not have the right, or that the bytes are not in it.
 */
enum { XSPIN_WINDOWS = 4 };

extern void xspin_no_such_window(void) __attribute__((error("windows have the numbers 0 to 3")));

static __always_inline __u32 xspin_window(__u32 window)
{
	if (__builtin_constant_p(window) && window >= XSPIN_WINDOWS)
		xspin_no_such_window();
	return window;
}

/* What is wrong with an access to a window, by function. */
enum xspin_slip_of {
	XSPIN_SLIP_NONE,
	XSPIN_SLIP_DEPOSIT,
	XSPIN_SLIP_WRITE, /* xspin_window_write, and so on */
	XSPIN_SLIP_LOAD,
	XSPIN_SLIP_STORE,
	XSPIN_SLIP_ADD64,
	XSPIN_SLIP_CAS64,
};

XSPIN_API(int, xspin_window_frame, struct xdp_md *ctx, __u32 window, __u64 at, __u32 off, __u32 n);
XSPIN_API(int, xspin_window_move, __u32 how, __u64 at, void *p, __u32 n);
XSPIN_API(int, xspin_window_add, __u32 window, __u64 at, __u64 n, __u64 *was);
XSPIN_API(int, xspin_window_cas, __u32 window, __u64 at, __u64 is, __u64 to, __u64 *was);

/* In what pieces n bytes at p are moved: as large as p's type and n allow. */
#define XSPIN_UNIT(p, n)                                                  \
	({                                                                \
		__u32 unit_ = (n) | _Alignof(typeof(*(p))) | 8;           \
		unit_ & -unit_;                                           \
	})
#define XSPIN_MOVE(of, window, p, n) (xspin_window(window) | (of) << 8 | XSPIN_UNIT(p, n) << 16)

/* Copies n bytes of the frame, from off on, to a window; at most 16 KiB. 20 ns, and what the bytes cost. */
#define xspin_window_write(ctx, window, at, off, n) xspin_window_frame(ctx, xspin_window(window), at, off, n)

/* Copies n bytes of a window, at most 512, which may not lie in two MiB of its memory. 20 ns for
 * 8 bytes that are aligned as a __u64, else more. */
#define xspin_window_load(window, at, to, n) xspin_window_move(XSPIN_MOVE(XSPIN_SLIP_LOAD, window, to, n), at, to, n)

/* The other way, at the same cost. */
#define xspin_window_store(window, at, from, n) \
	xspin_window_move(XSPIN_MOVE(XSPIN_SLIP_STORE, window, from, n), at, (void *)(from), n)

/* Adds to the word at a multiple of 8, and says what was there. 22 ns. */
#define xspin_window_add64(window, at, n, was) xspin_window_add(xspin_window(window), at, n, was)

/* Puts a value into the word at a multiple of 8 if another is there, and says what was
 * there. 25 ns. */
#define xspin_window_cas64(window, at, is, to, was) xspin_window_cas(xspin_window(window), at, is, to, was)

/* Tells the application something, by its queue: a request that wants no answer. False: there is
 * no room. 100 ns, and a wakeup if it sleeps. */
XSPIN_API(int, xspin_notify, __u64 tag, __u64 w0, __u64 w1);

enum { XSPIN_TEXT = 72 };

XSPIN_API(int, xspin_log_line, const void *text, __u64 w0, __u64 w1);

/*
 * Writes a line to the context's log, xspin log. The text is a literal of up to 71 characters,
 * in which the first two of %u, %d and %x stand for the words. False: there is no
 * room. 150 ns.
 */
#define xspin_log(literal, w0, w1)                                                              \
	({                                                                                      \
		_Static_assert(sizeof("" literal) <= XSPIN_TEXT, "a line is too long");         \
		static const char text_[XSPIN_TEXT] __attribute__((aligned(8))) = literal;      \
		xspin_log_line(text_, w0, w1);                                                  \
	})
