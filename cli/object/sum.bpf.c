/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * An example: messages of SLMP go into the context's window, and the application is told the
 * sum of their 32-bit words beside their end. A message has many segments, which come in any
 * order, twice, and on several CPUs: each is handled once, and acknowledged when it was.
 */
#define XSPIN_STATE 8 /* bytes of each message */
#include "xspin_message.h"

const volatile __u32 most = 1 << 20; /* a parameter: bytes of a message */

XSPIN_PAYLOAD
{
	__u64 *sum = xspin_state(her), here = 0;
	__u32 word;

	if (!sum || (__u64)her->offset + her->payload_len > most)
		return XSPIN_FAIL; /* the message has failed: the application is told, the sender not answered */
	for (__u32 i = 0; i < 2250 && 4 * i + 4 <= her->payload_len; i++) {
		if (xspin_load(ctx, her->payload + 4 * i, &word, 4))
			return XSPIN_SEGV;
		here += word;
	}
	__sync_fetch_and_add(sum, here); /* others add at the same time */
	return xspin_deposit(ctx, her);
}

XSPIN_COMPLETION
{
	__u64 *sum = xspin_state(her);
	struct xspin_info i;

	if (!sum || !xspin_about(her, &i))
		return XSPIN_FAIL;
	if (i.cause != XSPIN_COMPLETE)
		xspin_log("message %u ends without %u bytes", i.number, i.missing);
	else
		xspin_notify(i.number, *sum, i.length);
	return XSPIN_SUCCESS;
}

XSPIN_MESSAGES(PAYLOAD | COMPLETION);
XSPIN_LICENSE("GPL");
