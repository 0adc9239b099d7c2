/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * For tests: handlers that note in HPU memory when they ran, and for what. The test
 * (nic/conformance_test.go) has the same handlers in Go, and judges both by what they noted.
 */
#include "xspin_message.h"

/* Where HPU memory begins. Behind it are the runs. */
struct witness_head {
	__u32 runs;
	__u32 steps; /* that handlers began or ended, in all */
	__u8 pad[56];
};
_Static_assert(sizeof(struct witness_head) == 64, "runs are aligned");

/* One run of a handler. */
struct witness_run {
	__u32 handler; /* xspin_has */
	__u32 number;  /* of the message */
	__u32 first;   /* the step with which it began, from 1 */
	__u32 last;    /* and the one with which it ended; 0: it runs */
	__u64 begun;   /* xspin_now() */
	__u64 ended;
	__u64 offset; /* of the payload; of a completion: where the message ends, or has come to */
	__u64 length; /* and how many bytes were processed */
	__u64 start;  /* the payload's first 8 bytes, if there are as many */
	__u16 port;  /* of the sender */
	__u16 hpu;
	__u32 slot;
};
_Static_assert(sizeof(struct witness_run) == 64, "none lies in two elements");

/* The upper 24 bits of a message's number can say what its handlers do. */
enum witness_order {
	WITNESS_PROCEED = 0x5e1f01,
	WITNESS_DROP_MESSAGE,
	WITNESS_DROP_PAYLOAD, /* of all segments but the first, as the next */
	WITNESS_FAIL_PAYLOAD,
	WITNESS_FAIL_HEADER,
	WITNESS_FAIL_COMPLETION,
};

/* The payload handler puts the payload into the window. */
const volatile _Bool deposits = 0;

/* Functions, so that their types are in the object, from which those in Go are made. */

static __noinline enum witness_order order(const struct xspin_her *her)
{
	return her->key[3] >> 8;
}

static __noinline struct witness_head *top(void)
{
	return xspin_memory(0, sizeof(struct witness_head));
}

static __noinline struct witness_run *begin(const struct xspin_her *her, enum xspin_has handler)
{
	struct witness_head *head = top();
	struct witness_run *r;

	if (!head)
		return 0;
	r = xspin_memory(sizeof(*head) + (__u64)sizeof(*r) * __sync_fetch_and_add(&head->runs, 1), sizeof(*r));
	if (!r)
		return 0;
	r->handler = handler;
	r->number = her->key[3];
	r->port = her->key[2];
	r->hpu = her->hpu;
	r->slot = her->slot;
	r->begun = xspin_now();
	WRITE_ONCE(r->first, __sync_fetch_and_add(&head->steps, 1) + 1);
	return r;
}

/* Some runs take longer: what is done or told too early shows. 12 us. */
static __noinline int dawdle(void)
{
#define NOW8 xspin_now(), xspin_now(), xspin_now(), xspin_now(), xspin_now(), xspin_now(), xspin_now(), xspin_now()
#define NOW64 NOW8, NOW8, NOW8, NOW8, NOW8, NOW8, NOW8, NOW8
	NOW64, NOW64, NOW64, NOW64, NOW64, NOW64, NOW64, NOW64;
	return 0;
}

static __noinline int end(struct witness_run *r)
{
	struct witness_head *head = top();

	if (!head)
		return 0;
	r->ended = xspin_now();
	WRITE_ONCE(r->last, __sync_fetch_and_add(&head->steps, 1) + 1);
	return 0;
}

XSPIN_HEADER
{
	struct witness_run *r = begin(her, XSPIN_HAS_HEADER);

	if (!r)
		return XSPIN_SEGV;
	r->offset = her->offset;
	dawdle();
	end(r);
	switch (order(her)) {
	case WITNESS_PROCEED:
		return XSPIN_PROCEED;
	case WITNESS_DROP_MESSAGE:
		return XSPIN_DROP;
	case WITNESS_FAIL_HEADER:
		return XSPIN_FAIL;
	default:
		return XSPIN_PROCESS_DATA;
	}
}

XSPIN_PAYLOAD
{
	struct witness_run *r = begin(her, XSPIN_HAS_PAYLOAD);
	int code = XSPIN_SUCCESS;

	if (!r)
		return XSPIN_SEGV;
	r->offset = her->offset;
	r->length = her->payload_len;
	if (her->payload_len >= sizeof(r->start) && xspin_load(ctx, her->payload, &r->start, sizeof(r->start)))
		return XSPIN_SEGV;
	if (!(her->offset & 15))
		dawdle();
	if (deposits)
		code = xspin_deposit(ctx, her);
	if (her->offset && order(her) == WITNESS_DROP_PAYLOAD)
		code = XSPIN_DROP;
	if (her->offset && order(her) == WITNESS_FAIL_PAYLOAD)
		code = XSPIN_FAIL;
	end(r);
	return code;
}

XSPIN_COMPLETION
{
	struct witness_run *r = begin(her, XSPIN_HAS_COMPLETION);
	struct xspin_info i;

	if (!r || !xspin_about(her, &i))
		return XSPIN_SEGV;
	r->offset = i.length;
	r->length = i.length - i.missing;
	dawdle();
	end(r);
	return order(her) == WITNESS_FAIL_COMPLETION ? XSPIN_FAIL : XSPIN_SUCCESS;
}

XSPIN_MESSAGES(HEADER | PAYLOAD | COMPLETION);
XSPIN_LICENSE("Dual BSD/GPL");
